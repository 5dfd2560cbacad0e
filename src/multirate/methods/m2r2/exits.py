"""M2R2's dynamic mode: where a token leaves (docs/methods/m2r2.md, point 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from multirate.decoding.depth import DepthPolicy, Leaving
from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.session import Session
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.errors import UserError
from multirate.methods.m2r2.decode import M2R2Drafter, arla_of
from multirate.methods.m2r2.decode_config import M2R2DecodeConfig
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.runtime.decoder import Decoder, LayerAdapter


def step_of(decoder: Decoder, stream: AcceleratedStream, config: M2R2DecodeConfig) -> Step:
    """The step that decodes with these settings: lossless speculation, or one of the two forms of
    early exit.

    Raises UserError for exit thresholds that do not fit the stream's gates.
    """
    gates, thresholds = stream.config.gates, config.exit_thresholds
    if thresholds is not None and len(thresholds) != len(gates):
        raise UserError(
            f"m2r2 setting exit_thresholds has {len(thresholds)} values; accepted: one for each "
            f"of the accelerator's gates {list(gates)}"
        )
    if config.leaves_early and len(gates) > 1:
        return DynamicDepthStep(GateExits(decoder, stream, config), "deferred")
    return SpeculativeStep(M2R2Drafter(decoder, stream, config))


class GateExits(DepthPolicy):
    """A token leaves at the first of several gates where its score passes that gate's threshold.

    Each token's adapter row runs beside its own row up to the last gate that has a threshold, and
    the gates read it. With ARLA as the score, the LM head runs where a token leaves; with
    confidence, at every gate that it reaches.
    """

    def __init__(
        self, decoder: Decoder, stream: AcceleratedStream, config: M2R2DecodeConfig
    ) -> None:
        if stream.carry is not None or stream.blocks:
            raise UserError(
                "dynamic mode with several gates needs an accelerator without carry and block, "
                f"but this one has the gates {list(stream.config.gates)}; use m2r2's own "
                "options, or an accelerator with one gate"
            )
        if stream.fusions and not stream.config.reinitialise:
            raise UserError(
                "dynamic mode with several gates and a fusion needs reinitialise=true: training "
                "did not cover what the later layers do with a fused residual"
            )
        thresholds = config.exit_thresholds or ()
        used = [j for j, threshold in enumerate(thresholds) if threshold is not None]
        self.exits = stream.config.gates[: max(used, default=-1) + 1]
        self._thresholds = dict(zip(self.exits, thresholds, strict=False))
        self._decoder, self._sharpness = decoder, config.SHARPNESS
        info = decoder.info
        stream = stream.to(device=info.device, dtype=info.dtype).eval()
        self.adapters: Mapping[int, LayerAdapter] | None = stream.layer_adapters() or None
        self._stream = stream
        self._arla = arla_of(stream) if config.exit_score == "arla" else None
        self._reinitialise = stream.config.reinitialise
        self._passed: dict[int, list[Tensor]] = {}  # the normed stream at the gates, by sequence

    def begin(self, session: Session) -> None:
        self._passed = {}

    def start_accelerated(
        self, layer: int, hidden: Tensor, seqs: Sequence[int], last: Tensor | None
    ) -> Tensor:
        if last is None:
            self._passed = {b: [] for b in seqs}
        return hidden if last is None or self._reinitialise else last

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        """hidden [n, d]: the stream at this gate."""
        threshold = self._thresholds[exit]
        if self._arla is None:
            if threshold is None:
                return Leaving([False] * len(seqs))
            logits = self.logits(self._decoder, exit, hidden)
            top = torch.softmax(self._sharpness * logits, dim=-1).amax(dim=-1)
            return Leaving((top >= threshold).tolist(), logits)
        fused = self._stream.fuse(exit, hidden, None)
        for b, row in zip(seqs, self._decoder.norm(fused).float(), strict=True):
            self._passed[b].append(row)
        if threshold is None:
            return Leaving([False] * len(seqs))
        passed = torch.stack([torch.stack(self._passed[b]) for b in seqs])  # [n, gates so far, d]
        return Leaving((self._arla.score(passed) >= threshold).tolist())

    def logits(self, decoder: Decoder, exit: int, hidden: Tensor) -> Tensor:
        return self._stream.logits(decoder, self._stream.fuse(exit, hidden, None))
