"""`multirate inspect`: draws a model's residuals, by layer and token, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from multirate.cli import options
from multirate.errors import UserError

PROMPT = "Why is the sky blue?"


def command(
    model: options.Model = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file to write.")] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            "-a",
            help="Also draw an accelerator's drafts and residual: its folder, hub id or name.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help=f"Your prompt (default: {PROMPT})")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", help="Use the prompts of this JSON or JSONL file instead (repeatable)."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Number of prompts of --data, spread evenly.")
    ] = 4,
    max_new_tokens: options.MaxNewTokens = 256,
    quality: Annotated[
        float | None,
        options.dynamic(
            help="Draw dynamic mode, at a quality target that multirate calibrate stored."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    *,
    machine: options.Machine,
) -> None:
    """Draw how a model's residuals change from layer to layer, and how many layers each token of an
    answer needed, on one HTML page.
    """
    from multirate.lab.inspection import page
    from multirate.lab.pages.page import PAGE, check_installed, is_page

    if out is None:
        raise UserError("--out is missing: give a file name, such as --out page.html")
    if prompt is not None and data:
        raise UserError("give either --prompt or --data, not both")
    if prompt is not None and not prompt.strip():
        raise UserError("--prompt is empty: give some text")
    check_installed()

    from multirate.cli.progress import Bar
    from multirate.guarantee import check_quality
    from multirate.io import check_writable, write_atomically
    from multirate.lab.inspection.inspect import inspect

    check_writable(out, PAGE, is_page)
    if quality is not None:
        check_quality(quality)
    loaded, engine = machine.attach(model)
    name = None if accelerator is None else engine.add(accelerator)
    if name is not None:
        _notes(engine.accelerators[name], quality)
    prompts = _prompts(engine, prompt, data or [], limit, max_new_tokens, raw)
    options.note_left_out(engine)
    stop = engine.stopping(max_new_tokens, ())
    with Bar("inspecting") as bar:
        found = inspect(engine, prompts, stop, name, quality, progress=bar.to)
    facts = _facts(engine, loaded.name, accelerator, data or [])
    write_atomically(out, page.render(found, loaded.tokenizer, facts))
    typer.echo(str(out))


def _notes(accelerator: Any, quality: float | None) -> None:
    """Prints what the user should know before looking at the page."""
    from multirate import guarantee as guarantees

    if accelerator.other_weights is not None:
        options.note(f"note: {accelerator.other_weights}")
    if quality is None and accelerator.folder is not None:
        stored = sorted({one.quality for one in guarantees.read(accelerator.folder)})
        if stored:
            options.note(
                f"note: calibrated for quality {', '.join(f'{one:g}' for one in stored)}: "
                "--quality draws at which layer tokens stop in dynamic mode"
            )


def _prompts(
    engine: Any, prompt: str | None, data: list[Path], limit: int, max_new_tokens: int, raw: bool
) -> list[list[int]]:
    from multirate.lab.calibration.measure import read_prompts

    tokenizer, positions = engine.tokenizer, engine.decoder.info.max_positions
    if data:
        room = None if positions is None else positions - max_new_tokens
        return read_prompts(data, tokenizer, room, limit)
    return [options.prompt_ids(tokenizer, PROMPT if prompt is None else prompt, raw)]


def _facts(engine: Any, model: str, accelerator: str | None, data: list[Path]) -> dict[str, str]:
    """How the page was made."""
    from multirate import provenance
    from multirate.lab.pages.page import facts

    info = engine.decoder.info
    return {
        "model": Path(model).name or model,
        "architecture": f"{info.architecture}, {info.num_layers} layers of width "
        f"{info.hidden_size}, vocabulary {info.vocab_size}, {str(info.dtype)[6:]}, "
        f"backend {engine.backend}",
        "accelerator": "none" if accelerator is None else accelerator,
        "data": ", ".join(str(file) for file in data) or "one prompt",
        **facts(provenance.collect(info.device)),
    }
