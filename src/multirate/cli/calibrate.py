"""`multirate calibrate`: sets dynamic mode's thresholds for a quality target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multirate import guarantee as guarantees
from multirate.cli import options
from multirate.io import check_writable

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.training.checkpoint import Accelerator


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be reached, and on which prompts."""

    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON or JSONL file of prompts (repeatable). Do not use the training data.",
        ),
    ]
    quality: Annotated[
        list[float] | None,
        typer.Option(
            help="Quality target: the share of tokens that must match the full model's "
            "(repeatable; default: 0.99)."
        ),
    ] = None
    confidence: Annotated[
        float, typer.Option(help="Confidence that the target holds on similar prompts.")
    ] = 0.95
    max_new_tokens: options.MaxNewTokens = 128
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Number of prompts, spread evenly over the data (default: all)."),
    ] = None

    @property
    def qualities(self) -> list[float]:
        """The highest first: the answers of one are the first answers of the next."""
        return sorted(set(self.quality or [0.99]), reverse=True)

    def check(self, prompts: int = 1 << 60) -> None:
        """UserError for what calibration cannot establish, or not with so few prompts."""
        from multirate.lab.calibration.calibrate import check_guarantee

        names = ", ".join(map(str, self.data))
        for quality in self.qualities:
            check_guarantee(quality, self.confidence, prompts, names)


@dataclass(frozen=True)
class Tried:
    tries: Annotated[
        int | None,
        options.advanced(
            min=1, help="Number of thresholds to try. Fewer is faster, but less precise."
        ),
    ] = None
    point: Annotated[
        list[float] | None,
        options.advanced(help="Try only this threshold, most cautious first (repeatable)."),
    ] = None
    option: Annotated[
        list[str] | None,
        options.advanced(
            help="Another setting of the method, NAME=VALUE, such as exit_score=confidence or "
            "kv=propagate (repeatable)."
        ),
    ] = None


def command(
    model: options.BaseModel,
    *,
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", help="A trained accelerator: folder or name.")
    ],
    target: Target,
    batch: Annotated[
        int, typer.Option(min=1, help="Answers generated at once. 1 uses the kernel's fused steps.")
    ] = 8,
    tried: Tried,
    machine: options.Machine,
) -> None:
    """Choose when tokens may skip layers, for a quality target that you set.

    Answers every prompt at one threshold after another, starting with the most cautious, until the
    target no longer holds (Learn-then-Test). This takes minutes to hours, depending on the data.
    The result is stored with the accelerator.
    """
    from multirate.cli.progress import Bar
    from multirate.lab.calibration.calibrate import Calibration, check_points
    from multirate.methods.spec import find, parse_settings
    from multirate.training.fingerprint import fingerprint

    target.check()  # fails before anything is loaded
    if tried.point:
        check_points(tried.point)
    settings = parse_settings(tried.option or [], "--option")
    loaded, engine = machine.attach(model)
    given = engine.accelerators[engine.add(accelerator)]
    mode = find(given.method).dynamic_mode()
    folder = _folder(given)
    cautious = {**settings, **mode.settings(given.module, mode.path[0])}
    find(given.method).make_step(engine.decoder, given, cautious)  # fails before an hour's work
    prompts = _prompts(engine, target)
    options.note_left_out(engine)
    with Bar("calibrating") as bar:
        threshold: float | None = None

        def progress(now: float, done: int, total: int) -> None:
            nonlocal threshold
            if now != threshold:
                threshold = now
                options.note(f"trying threshold {now:.4f} on {total} prompts")
            bar.to(done, total)

        calibration = Calibration(
            engine.decoder,
            given,
            prompts,
            fingerprint(loaded.model),
            engine.stopping(target.max_new_tokens, ()),
            [str(file) for file in target.data],
            batch,
            progress,
            settings,
            tried.point or mode.along(tried.tries),
        )
        for quality in target.qualities:
            _store(folder, calibration.reach(quality, target.confidence))
    typer.echo(f"{folder / guarantees.FILE}")


def _folder(accelerator: Accelerator) -> Path:
    """The accelerator's folder, in which results can be stored."""
    folder = accelerator.folder
    assert folder is not None
    check_writable(folder / guarantees.FILE)
    guarantees.read(folder)  # fails if another program wrote it
    return folder


def _prompts(engine: Engine, target: Target) -> list[list[int]]:
    from multirate.lab.calibration.measure import read_prompts

    positions = engine.decoder.info.max_positions
    room = None if positions is None else positions - target.max_new_tokens
    prompts = read_prompts(target.data, engine.tokenizer, room, target.limit)
    target.check(len(prompts))
    return prompts


def _store(folder: Path, made: guarantees.Guarantee) -> None:
    guarantees.store(folder, made)
    for tried, loss in made.tried:
        options.note(f"threshold {tried:.4f}: {100 * loss:.2f}% of the tokens differ")
    if made.looped:
        options.note(
            "the last setting is not used, because its answers repeat in loops, which the full "
            "model would continue"
        )
    typer.echo(made.sentence())
