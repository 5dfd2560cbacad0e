"""Decodes prompts with a model, and an accelerator if there is one, and reads what went on
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multirate.decoding.plain import PlainStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.guarantee import Guarantee
from multirate.lab.inspection.decisions import Decision, decode
from multirate.lab.inspection.text_pass import TextValues, join, read_text
from multirate.methods import spec
from multirate.runtime.decoder import Decoder

Progress = Callable[[int, int], None]
"""progress(steps done, steps in all): one for each token decoded, and one for each read."""


@dataclass
class InspectedText:
    """prompt, tokens: ids. decisions and the rows of values: one for each token."""

    prompt: list[int]
    tokens: list[int]
    decisions: list[Decision]
    values: TextValues


@dataclass
class Inspection:
    """The data of a page.

    layers: of the model. method: the accelerator's; None without one. traced: whether it has an
    accelerated residual. gates: its gates, or the layers that drafts start from. lossy: whether the
    text can differ from the model's. guarantee: dynamic mode's calibrated target.
    """

    layers: int
    texts: list[InspectedText]
    method: str | None = None
    traced: bool = False
    gates: tuple[int, ...] = ()
    lossy: bool = False
    guarantee: Guarantee | None = None

    @property
    def values(self) -> TextValues:
        return join([text.values for text in self.texts])

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


def inspect(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stop: StopSettings,
    name: str | None = None,
    quality: float | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Decodes greedily, one prompt after the other, then reads each prompt and answer again.

    name: one of the engine's accelerators; None: the model alone. quality: the calibrated target of
    dynamic mode. Raises UserError for prompts that cannot be used, answers without tokens, and a
    quality that is not calibrated.
    """
    decoder = engine.decoder
    step, guarantee = _step(engine, decoder, name, quality)
    accelerator = None if name is None else engine.accelerators[name]
    method = None if accelerator is None else spec.find(accelerator.method)
    tracer = None
    if method is not None and method.tracer is not None and accelerator is not None:
        tracer = method.tracer(decoder, accelerator.module)
    most = stop.max_new_tokens or 0
    total = 2 * most * len(prompts)
    texts: list[InspectedText] = []
    for number, prompt in enumerate(prompts):

        def decoded(done: int, before: int = 2 * most * number) -> None:
            if progress is not None:
                progress(before + done, total)

        def read(done: int, before: int = most * (2 * number + 1)) -> None:
            if progress is not None:
                progress(before + done, total)

        tokens, decisions = decode(decoder, step, prompt, stop, decoded)
        if not tokens:
            raise UserError(
                f"prompt {number} of {len(prompt)} tokens leaves no room for an answer in "
                f"{decoder.info.context}"
            )
        values = read_text(decoder, prompt, tokens, tracer, read)
        texts.append(InspectedText(list(prompt), tokens, decisions, values))
    if progress is not None:
        progress(total, total)
    return Inspection(
        decoder.info.num_layers,
        texts,
        None if method is None else method.name,
        tracer is not None,
        () if tracer is None else tracer.gates,
        not step.lossless,
        guarantee,
    )


def _step(
    engine: Engine, decoder: Decoder, name: str | None, quality: float | None
) -> tuple[Step, Guarantee | None]:
    if name is None:
        if quality is not None:
            raise UserError("quality needs an accelerator; without one no token leaves early")
        return PlainStep(), None
    accelerator = engine.accelerators[name]
    method = spec.find(accelerator.method)
    guarantee = None if quality is None else engine.guarantee_of(f"{name}:quality={quality!r}")
    settings = None if guarantee is None else guarantee.settings
    return method.make_step(decoder, accelerator, settings) or PlainStep(), guarantee
