"""`multirate generate`: generates text from one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.errors import UserError, say_once
from multirate.io import decoded, read_text

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.results import GenerationOutput
    from multirate.decoding.stopping import StopSettings
    from multirate.engine import Engine

ENDINGS = {
    "eos": "ended by the model",
    "stop_string": "ended at a stop text",
    "length": "ended at the token limit",
    "context": "ended at the context limit",
}


def command(
    model: options.Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Your prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a UTF-8 file (default: stdin).")
    ] = None,
    accelerator: options.Accelerator = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Decoding method (default: the accelerator's). Add settings after colons, as in "
            "m2r2-carry:lookup=0."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            help="Maximum number of tokens to generate (default: from the model's "
            "generation_config, else 256).",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy; above 0 samples (default: from the model's generation_config, else "
            "greedy)."
        ),
    ] = None,
    top_k: Annotated[
        int | None, options.sampling(help="Sample from the k most probable tokens; 0: all.")
    ] = None,
    top_p: Annotated[
        float | None,
        options.sampling(help="Sample from the smallest set with this total probability; 1: all."),
    ] = None,
    min_p: Annotated[
        float | None,
        options.sampling(help="Drop tokens below this fraction of the top token's probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        options.sampling(help="Above 1: makes tokens that already occurred less likely."),
    ] = None,
    seed: Annotated[
        int | None, options.sampling(help="Random seed. The same seed gives the same text.")
    ] = None,
    stop: Annotated[
        list[str] | None, options.written(help="Stop at this text (repeatable).")
    ] = None,
    stream: Annotated[bool, options.written(help="Print the text as it is generated.")] = True,
    raw: Annotated[
        bool,
        options.written("--raw", help="Continue the prompt as it is, without the chat template."),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and draft acceptance to stderr.")
    ] = False,
    speculate: options.Speculate = "auto",
    mode: options.Mode = "lossless",
    quality: options.Quality = None,
    tuned: options.Tuned = True,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    experts: options.Experts = None,
    expert_memory: options.ExpertMemory = None,
    expert_policy: options.ExpertPolicy = "aot",
    expert_predictor: options.ExpertPredictor = None,
) -> None:
    """Generate text from a prompt: --prompt, --prompt-file or stdin.

    The text is the model's own unless you choose a lossy method or --mode dynamic. The sampling
    options default to the model's generation_config.
    """
    text = _prompt(prompt, prompt_file)
    options.set_threads(threads)

    from multirate.decoding.logits import SamplingSettings
    from multirate.engine import attach, check_mode
    from multirate.experts.named_policies import parse_bytes, policy_named
    from multirate.loading.names import DEFAULT
    from multirate.runtime.quantised import ON_LOAD

    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    SamplingSettings(**given)
    check_mode(mode, quality, speculate)
    policy_named(expert_policy)  # fails on a wrong value before anything is loaded
    parse_bytes(expert_memory)
    if experts is None and expert_memory is not None:
        raise UserError("--expert-memory needs --experts FOLDER, a store made with multirate pack")
    loaded = options.load(model, dtype, device, experts, weights=weights)
    if weights in ON_LOAD:
        say_once(
            f"the text is that of the model in {weights.upper()}; `multirate info "
            f"{model or DEFAULT} --weights {weights}` measures how close it is to the full model"
        )
    engine = attach(
        loaded,
        backend=backend,
        expert_memory=expert_memory,
        expert_policy=expert_policy,
        expert_predictor=expert_predictor,
    )
    engine.uses_tuned = tuned
    if (
        engine.experts is not None
        and engine.experts.runtime is not None
        and engine.experts.runtime.note
    ):
        options.note(f"note: {engine.experts.runtime.note}")
    options.add_accelerator(engine, model, accelerator, method)
    ids = options.prompt_ids(loaded.tokenizer, text, raw)
    sampling = engine.sampling(**given)
    ending = (
        engine.stopping_after([ids], stop)
        if max_new_tokens is None
        else engine.stopping(max_new_tokens, stop)
    )

    how = {"method": method, "speculate": speculate, "mode": mode, "quality": quality}
    output = _generate(engine, ids, sampling, ending, stream, how)
    if engine.guarantee is not None:
        changed = "text with penalties or forbidden tokens" if sampling.uses_context else ""
        other = changed if sampling.greedy else "sampled text"
        options.note(f"note: {engine.guarantee.sentence(other)}")
    if engine.notice:
        options.note(f"note: {engine.notice}")
    if stats:
        _print_stats(engine, output)


def _generate(
    engine: Engine,
    ids: list[int],
    sampling: SamplingSettings,
    ending: StopSettings,
    stream: bool,
    how: dict[str, Any],
) -> GenerationOutput:
    """Generates and prints the text. how: further arguments of `Engine.generate`."""
    from multirate.decoding.text_stream import TextStream

    printer = TextStream(engine.tokenizer, lambda piece: typer.echo(piece, nl=False))
    begun = False

    def push(_: int, tokens: list[int]) -> None:
        nonlocal begun
        begun = True
        printer.push(tokens)

    try:
        on_tokens = push if stream else None
        output = engine.generate([ids], sampling, ending, on_tokens=on_tokens, **how)
    except UserError:
        stream = stream and begun  # failed before the first token: there is no line to end
        raise
    finally:
        if stream:
            printer.end()
            typer.echo("")
    if not stream:
        typer.echo(engine.tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    return output


def _print_stats(engine: Engine, output: GenerationOutput) -> None:
    from multirate.methods.spec import PLAIN

    seen = output.stats
    options.note(
        f"{seen.tokens} tokens in {seen.seconds:.2f} s: "
        f"{seen.tokens / max(seen.seconds, 1e-9):.1f} tokens/s, "
        f"{ENDINGS[output.finish_reasons[0]]}"
    )
    options.note(
        f"method {engine.used}, {engine.backend} backend, "
        f"{options.threads_line(engine.decoder)}, weights {engine.weights}"
    )
    if seen.drafted:
        drafts = f"{100 * seen.acceptance:.0f}% of the drafted tokens were accepted"
        counted = f"{seen.tokens_per_step:.2f} tokens per pass"
        options.note(f"{drafts}, {counted}")
    elif engine.used != PLAIN:
        options.note("no tokens were drafted")
    if seen.exits:
        left = ", ".join(f"{n} after {layers}" for layers, n in sorted(seen.exits.items()))
        options.note(f"tokens by the number of layers they used: {left}")
    if engine.experts is not None and engine.experts.runtime is not None:
        options.note(options.expert_line(engine.experts.runtime))


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UserError("give either --prompt or --prompt-file, not both")
    if file is not None:
        prompt = read_text(file)
    elif prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError(
                "there is no prompt: give --prompt TEXT, --prompt-file FILE, or text on stdin"
            )
        prompt = decoded(sys.stdin.buffer.read(), "stdin")
    if not prompt.strip():
        raise UserError("the prompt is empty: give some text")
    return prompt
