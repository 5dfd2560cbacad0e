"""`multirate calibrate`: thresholds of dynamic mode for a promised quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: Annotated[
        str, typer.Argument(help="The base model's folder, GGUF file, hub id or name.")
    ],
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", help="The accelerator's folder or name.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON or JSONL whose prompts are answered (repeatable); none that the accelerator "
            "was trained on.",
        ),
    ],
    quality: Annotated[
        list[float] | None,
        typer.Option(
            help="The share of tokens that are to be the full model's; 0.99 unless given "
            "(repeatable: answers are decoded once for all).",
            show_default=False,
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="How sure the promise is, over the choice of prompts.")
    ] = 0.95,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 128,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts answered, spread over the data.")
    ] = None,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Sequences decoded at once; 1: the kernel's fused steps."),
    ] = 8,
    tries: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only so many thresholds, spread evenly over the method's: faster, and less "
            "finely chosen.",
            show_default=False,
        ),
    ] = None,
    point: Annotated[
        list[float] | None,
        typer.Option(
            help="Only these settings of the dial, the most cautious first (repeatable): a margin, "
            "a threshold, or below a margin of 0 the threshold minus 1.",
            show_default=False,
        ),
    ] = None,
    dial: Annotated[
        str | None,
        typer.Option(
            help="What is turned: score (how sure a gate must be), or margin (how near two tokens "
            "must be for the model's own weights to decide, in place of narrow ones; then the "
            "score). Default: margin where this machine can.",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of the method's other settings, such as exit_score=confidence or "
            "kv=propagate (repeatable).",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Choose how early tokens may leave for a promised quality; kept beside the accelerator.

    Every prompt is answered at one threshold after another, from the most cautious on, until the
    promise cannot be made any more (Learn-then-Test): minutes to hours, by the data's size.
    """
    options.set_threads(threads)

    from multirate.calibration import promise as promises
    from multirate.calibration.calibrate import (
        calibrate,
        check_points,
        check_promise,
        dynamic_mode,
    )
    from multirate.calibration.measure import Measured, read_prompts
    from multirate.cli.progress import Bar
    from multirate.engine import attach
    from multirate.io import check_writable
    from multirate.methods.spec import find, parse_settings
    from multirate.training.fingerprint import fingerprint

    qualities = sorted(set(quality or [0.99]), reverse=True)
    for one in qualities:  # wrong values are said before anything loads
        check_promise(one, confidence, 1 << 60, "")
    if point:
        check_points(point)
    settings = parse_settings(option or [], "--option")
    loaded = options.load(model, dtype, device)
    engine = attach(loaded, backend=backend)
    given = engine.accelerators[engine.add(accelerator)]
    mode = dynamic_mode(find(given.method)).dial(engine.decoder, given.module, dial)
    assert given.folder is not None
    check_writable(given.folder / promises.FILE)
    promises.read(given.folder)  # what cannot be added to is said before an hour's work
    # so is an accelerator that cannot leave early
    cautious = {**settings, **mode.settings(given.module, mode.path[0])}
    find(given.method).make_step(engine.decoder, given, cautious)
    positions = engine.decoder.info.max_positions
    room = None if positions is None else positions - max_new_tokens
    prompts = read_prompts(data, loaded.tokenizer, room, limit)
    names = [str(file) for file in data]
    for one in qualities:
        check_promise(one, confidence, len(prompts), ", ".join(names))
    options.note_left_out(engine)
    measured: dict[float, list[Measured]] = {}
    with Bar("calibrating") as bar:
        threshold: float | None = None

        def progress(now: float, done: int, total: int) -> None:
            nonlocal threshold
            if now != threshold:
                threshold = now
                options.note(f"{mode.told(now)} on {total} prompts")
            bar.to(done, total)

        for one in qualities:  # the answers of one are the first answers of the next
            made = calibrate(
                engine.decoder,
                given,
                prompts,
                fingerprint(loaded.model),
                one,
                confidence,
                engine.stopping(max_new_tokens, ()),
                names,
                batch,
                progress,
                settings,
                measured,
                tries,
                dial,
                point or None,
            )
            path = promises.store(given.folder, made)
            for tried, loss in made.tried:
                options.note(f"{mode.told(tried)}: {100 * loss:.2f}% of the tokens differed")
            if made.looped:
                options.note(
                    "the last of them is not promised, as its answers run into loops, which the "
                    "full model would go on with, too"
                )
            typer.echo(made.sentence())
    typer.echo(f"{path}")
