"""`multirate generate`: generates text from one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Prompt:
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Your prompt.")] = None
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a UTF-8 file (default: stdin).")
    ] = None
    raw: Annotated[
        bool,
        options.written("--raw", help="Continue the prompt as it is, without the chat template."),
    ] = False

    def read(self) -> str:
        """The text. UserError if there is none, or several."""
        prompt = self.prompt
        if prompt is not None and self.prompt_file is not None:
            raise UserError("give either --prompt or --prompt-file, not both")
        if self.prompt_file is not None:
            prompt = read_text(self.prompt_file)
        elif prompt is None:
            if sys.stdin is None or sys.stdin.isatty():
                raise UserError(
                    "there is no prompt: give --prompt TEXT, --prompt-file FILE, or text on stdin"
                )
            prompt = decoded(sys.stdin.buffer.read(), "stdin")
        if not prompt.strip():
            raise UserError("the prompt is empty: give some text")
        return prompt


@dataclass(frozen=True)
class Sampling:
    """Fields of SamplingSettings. None: from the model's generation_config."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy; above 0 samples (default: from the model's generation_config, else "
            "greedy)."
        ),
    ] = None
    top_k: Annotated[
        int | None, options.sampling(help="Sample from the k most probable tokens; 0: all.")
    ] = None
    top_p: Annotated[
        float | None,
        options.sampling(help="Sample from the smallest set with this total probability; 1: all."),
    ] = None
    min_p: Annotated[
        float | None,
        options.sampling(help="Drop tokens below this fraction of the top token's probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        options.sampling(help="Above 1: makes tokens that already occurred less likely."),
    ] = None
    seed: Annotated[
        int | None, options.sampling(help="Random seed. The same seed gives the same text.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that are set. UserError for a value that cannot be used."""
        from multirate.decoding.logits import SamplingSettings

        found = {name: value for name, value in asdict(self).items() if value is not None}
        SamplingSettings(**found)
        return found


@dataclass(frozen=True)
class Ending:
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            help="Maximum number of tokens to generate (default: from the model's "
            "generation_config, else 256).",
        ),
    ] = None
    stop: Annotated[list[str] | None, options.written(help="Stop at this text (repeatable).")] = (
        None
    )

    def settings(self, engine: Engine, ids: list[int]) -> StopSettings:
        if self.max_new_tokens is None:
            return engine.stopping_after([ids], self.stop)
        return engine.stopping(self.max_new_tokens, self.stop)


@dataclass(frozen=True)
class How:
    method: Annotated[
        str | None,
        typer.Option(
            help="Decoding method (default: the accelerator's). Add settings after colons, as in "
            "m2r2-carry:lookup=0."
        ),
    ] = None
    speculate: options.Speculate = "auto"
    mode: options.Mode = "lossless"
    quality: options.Quality = None


@dataclass(frozen=True)
class OfExperts:
    experts: options.Experts = None
    expert_memory: options.ExpertMemory = None
    expert_policy: options.ExpertPolicy = "aot"
    expert_predictor: options.ExpertPredictor = None

    def check(self) -> None:
        """UserError for wrong values, before anything is loaded."""
        from multirate.experts.named_policies import parse_bytes, policy_named

        policy_named(self.expert_policy)
        parse_bytes(self.expert_memory)
        if self.experts is None and self.expert_memory is not None:
            raise UserError(
                "--expert-memory needs --experts FOLDER, a store made with multirate pack"
            )


def command(
    model: options.Model = None,
    *,
    prompt: Prompt,
    accelerator: options.Accelerator = None,
    how: How,
    ending: Ending,
    sampling: Sampling,
    stream: Annotated[bool, options.written(help="Print the text as it is generated.")] = True,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and draft acceptance to stderr.")
    ] = False,
    tuned: options.Tuned = True,
    machine: options.Machine,
    experts: OfExperts,
) -> None:
    """Generate text from a prompt: --prompt, --prompt-file or stdin.

    The text is the model's own unless you choose a lossy method or --mode dynamic. The sampling
    options default to the model's generation_config.
    """
    from multirate.engine import check_mode

    text, given = prompt.read(), sampling.given()
    check_mode(how.mode, how.quality, how.speculate)
    experts.check()
    engine = _engine(model, machine, experts)
    engine.uses_tuned = tuned
    options.add_accelerator(engine, model, accelerator, how.method)
    ids = options.prompt_ids(engine.tokenizer, text, prompt.raw)
    chosen = engine.sampling(**given)
    output = _generate(engine, ids, chosen, ending.settings(engine, ids), stream, asdict(how))
    if engine.guarantee is not None:
        changed = "text with penalties or forbidden tokens" if chosen.uses_context else ""
        options.note(
            f"note: {engine.guarantee.sentence(changed if chosen.greedy else 'sampled text')}"
        )
    if engine.notice:
        options.note(f"note: {engine.notice}")
    if stats:
        _print_stats(engine, output)


def _engine(model: str | None, machine: options.Machine, experts: OfExperts) -> Engine:
    from multirate.engine import attach
    from multirate.loading.names import DEFAULT
    from multirate.runtime.quantised import ON_LOAD

    loaded = machine.load(model, experts.experts)
    if machine.weights in ON_LOAD:
        say_once(
            f"the text is that of the model in {machine.weights.upper()}; `multirate info "
            f"{model or DEFAULT} --weights {machine.weights}` measures how close it is to the full "
            "model"
        )
    engine = attach(
        loaded,
        backend=machine.backend,
        expert_memory=experts.expert_memory,
        expert_policy=experts.expert_policy,
        expert_predictor=experts.expert_predictor,
    )
    runtime = None if engine.experts is None else engine.experts.runtime
    if runtime is not None and runtime.note:
        options.note(f"note: {runtime.note}")
    return engine


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
