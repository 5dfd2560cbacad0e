"""8-bit model weights for methods that do not verify: half the memory per pass, and more tokens
that differ from the full model's. [ours]

Our own dynamic mode can verify with these weights (`margin` of StreamDecodeConfig). The other lossy
methods may use them as well, so that a comparison measures methods and not kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from multirate.decoding.session import Session
from multirate.decoding.step import Hole, Step
from multirate.errors import say_once
from multirate.methods.common.config import MethodConfig, PromptWeights
from multirate.methods.spec import DynamicMode
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.native.decoder import narrow_weights

ModelWeights = Literal["own", "int8"]
MakeStep = Callable[[Decoder, Any, Any], Step]


@dataclass(frozen=True)
class DepthDecodeConfig(MethodConfig):
    """Settings shared by the methods that choose how many layers a token runs."""

    model_weights: ModelWeights = "own"
    """own: the full-precision weights. int8: 8-bit weights for every pass except the prompt's, on
    the native kernel and a processor with byte multiplication; elsewhere it has no effect. [ours]
    """
    prompt_weights: PromptWeights = "own"
    """narrow: the 8-bit weights read the prompt as well. [ours]"""

    def check(self) -> None:
        super().check()
        self.require(
            self.prompt_weights == "own" or self.model_weights == "int8",
            "prompt_weights",
            "own, or narrow together with model_weights=int8",
        )


class NarrowStep(Step):
    """A step whose passes run on another decoder, `narrow`: the session's with 8-bit weights.

    step: made for `narrow`. reads_prompts: whether `narrow` reads the prompts as well. Otherwise
    the session's decoder reads them, and only the K/V of the prompts are exact.
    """

    lossless = False

    def __init__(self, step: Step, narrow: Decoder, reads_prompts: bool = False) -> None:
        self.step, self._narrow = step, narrow
        self.prompt_decoder = narrow if reads_prompts else None
        self.slots, self.taps = step.slots, step.taps
        self.repeats_text = step.repeats_text

    def begin(self, session: Session, resumed: bool) -> None:
        self.step.begin(session, resumed)

    def usable(self, cache: KVCache, length: int) -> int:
        return self.step.usable(cache, length)

    def prefilled(
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.step.prefilled(session, seqs, hidden, taps)

    def run(self, session: Session) -> None:
        for b in session.active:
            session.note_narrow(b, session.cache.lengths[b])
        own, session.decoder = session.decoder, self._narrow
        try:
            self.step.run(session)
        finally:
            session.decoder = own

    def holes(self, seq: int) -> list[Hole]:
        return self.step.holes(seq)


def with_model_weights(make: MakeStep) -> MakeStep:
    """Wraps `make`, which makes a method's step, to use the weights that its settings (a
    DepthDecodeConfig) name. Warns once if 8-bit weights are not available.
    """

    def made(decoder: Decoder, module: Any, settings: DepthDecodeConfig) -> Step:
        if settings.model_weights == "own":
            return make(decoder, module, settings)
        if not narrow_weights(decoder):
            say_once(
                "model_weights=int8 has no effect here: only the native kernel reads 8-bit "
                "weights, on a processor with byte multiplication (AVX-512 with VNNI); using "
                "the full-precision weights"
            )
            return make(decoder, module, settings)
        narrow = decoder.in_8_bits()
        step = make(narrow, module, settings)
        return NarrowStep(step, narrow, settings.prompt_weights == "narrow")

    return made


def with_narrow_dials(mode: DynamicMode) -> DynamicMode:
    """A method's dynamic mode, with a second copy of each dial that runs on 8-bit weights."""

    def narrow(dial: DynamicMode) -> DynamicMode:
        def settings(module: Any, threshold: float | None) -> dict[str, Any]:
            read = {"model_weights": "int8", "prompt_weights": "narrow"}
            return {**dial.settings(module, threshold), **read}

        return replace(
            dial,
            settings=settings,
            others=(),
            label=f"{dial.label}-int8",
            usable=lambda decoder, module: dial.usable(decoder, module) and narrow_weights(decoder),
        )

    dials = (mode, *mode.others)
    return replace(mode, others=(*mode.others, *map(narrow, dials)))
