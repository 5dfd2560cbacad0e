"""`multirate generate`: generates text from one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.cli.generating import (
    ENDINGS,
    How,
    OfExperts,
    Sampling,
    print_stats,
    ready_engine,
    remarks,
)
from multirate.errors import UserError
from multirate.io import decoded, read_text

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.results import GenerationOutput
    from multirate.decoding.stopping import StopSettings
    from multirate.engine import Engine


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
    stop: options.Stop = None

    def settings(self, engine: Engine, ids: list[int]) -> StopSettings:
        if self.max_new_tokens is None:
            return engine.stopping_after([ids], self.stop)
        return engine.stopping(self.max_new_tokens, self.stop)


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
    text, given = prompt.read(), sampling.given()
    engine = ready_engine(model, accelerator, how, tuned, machine, experts)
    ids = options.prompt_ids(engine.tokenizer, text, prompt.raw)
    chosen = engine.sampling(**given)
    output = _generate(engine, ids, chosen, ending.settings(engine, ids), stream, asdict(how))
    for remark in remarks(engine, chosen):
        options.note(f"note: {remark}")
    if stats:
        print_stats(engine, output, ENDINGS[output.finish_reasons[0]])


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
