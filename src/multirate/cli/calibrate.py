"""`multirate calibrate`: sets dynamic mode's thresholds for a quality target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: options.BaseModel,
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", help="A trained accelerator: folder or name.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON or JSONL file of prompts (repeatable). Do not use the training data.",
        ),
    ],
    quality: Annotated[
        list[float] | None,
        typer.Option(
            help="Quality target: the share of tokens that must match the full model's "
            "(repeatable; default: 0.99)."
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence that the target holds on similar prompts.")
    ] = 0.95,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Number of prompts, spread evenly over the data (default: all)."),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Answers generated at once. 1 uses the kernel's fused steps.")
    ] = 8,
    tries: Annotated[
        int | None,
        options.advanced(
            min=1, help="Number of thresholds to try. Fewer is faster, but less precise."
        ),
    ] = None,
    point: Annotated[
        list[float] | None,
        options.advanced(help="Try only this threshold, most cautious first (repeatable)."),
    ] = None,
    option: Annotated[
        list[str] | None,
        options.advanced(
            help="Another setting of the method, NAME=VALUE, such as exit_score=confidence or "
            "kv=propagate (repeatable)."
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Choose when tokens may skip layers, for a quality target that you set.

    Answers every prompt at one threshold after another, starting with the most cautious, until the
    target no longer holds (Learn-then-Test). This takes minutes to hours, depending on the data.
    The result is stored with the accelerator.
    """
    options.set_threads(threads)

    from multirate import guarantee as guarantees
    from multirate.cli.progress import Bar
    from multirate.engine import attach
    from multirate.io import check_writable
    from multirate.lab.calibration.calibrate import (
        calibrate,
        check_guarantee,
        check_points,
    )
    from multirate.lab.calibration.measure import Measured, read_prompts
    from multirate.methods.spec import find, parse_settings
    from multirate.training.fingerprint import fingerprint

    qualities = sorted(set(quality or [0.99]), reverse=True)
    for one in qualities:  # fails before anything is loaded
        check_guarantee(one, confidence, 1 << 60, "")
    if point:
        check_points(point)
    settings = parse_settings(option or [], "--option")
    loaded = options.load(model, dtype, device, weights=weights)
    engine = attach(loaded, backend=backend)
    given = engine.accelerators[engine.add(accelerator)]
    mode = find(given.method).dynamic_mode()
    assert given.folder is not None
    check_writable(given.folder / guarantees.FILE)
    guarantees.read(given.folder)  # both fail before an hour's work
    cautious = {**settings, **mode.settings(given.module, mode.path[0])}
    find(given.method).make_step(engine.decoder, given, cautious)
    positions = engine.decoder.info.max_positions
    room = None if positions is None else positions - max_new_tokens
    prompts = read_prompts(data, loaded.tokenizer, room, limit)
    names = [str(file) for file in data]
    for one in qualities:
        check_guarantee(one, confidence, len(prompts), ", ".join(names))
    options.note_left_out(engine)
    measured: dict[float, list[Measured]] = {}
    with Bar("calibrating") as bar:
        threshold: float | None = None

        def progress(now: float, done: int, total: int) -> None:
            nonlocal threshold
            if now != threshold:
                threshold = now
                options.note(f"trying threshold {now:.4f} on {total} prompts")
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
                point or None,
            )
            path = guarantees.store(given.folder, made)
            for tried, loss in made.tried:
                options.note(f"threshold {tried:.4f}: {100 * loss:.2f}% of the tokens differ")
            if made.looped:
                options.note(
                    "the last setting is not used, because its answers repeat in loops, which the "
                    "full model would continue"
                )
            typer.echo(made.sentence())
    typer.echo(f"{path}")
