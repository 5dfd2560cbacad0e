"""M2R2 self-speculative decoding: drafts from the accelerated stream at the first gate."""

from __future__ import annotations

import copy

from multirate.errors import UserError
from multirate.methods._shared.branch_drafter import BranchDrafter
from multirate.methods._shared.draft_runner import DraftRunner, packed_where_possible
from multirate.methods.m2r2.arla import ARLA
from multirate.methods.m2r2.decode_config import M2R2DecodeConfig
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.runner import StreamRunner
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import DraftWeights
from multirate.runtime.fused import Unverified


class M2R2Drafter(BranchDrafter):
    """Drafts with an AcceleratedStream.

    In dynamic mode (`exit_thresholds` of a stream with one gate), likeliest tokens whose score
    passes the threshold are accepted unverified when a draft reaches them.
    """

    def __init__(
        self, decoder: Decoder, stream: AcceleratedStream, config: M2R2DecodeConfig | None = None
    ) -> None:
        config, gate = config or M2R2DecodeConfig(), stream.config.gates[0]
        threshold = _exit_threshold(config, stream)
        unverified = None
        if threshold is not None:
            unverified = Unverified(threshold, config.unverified, config.exit_score == "arla")
            if unverified.by_agreement:
                arla_of(stream)
        super().__init__(
            decoder,
            make_runner(decoder, stream, gate, config.weights),
            config,
            start=gate,
            backfill=bool(stream.blocks),
            carry=stream.carry is not None,
            unverified=unverified,
        )


def _exit_threshold(config: M2R2DecodeConfig, stream: AcceleratedStream) -> float | None:
    """The only gate's threshold; None if every token is verified."""
    if not config.leaves_early or config.exit_thresholds is None:
        return None
    if len(stream.config.gates) != 1:
        raise ValueError("unverified acceptance needs an accelerator with one gate")
    return config.exit_thresholds[0]


def arla_of(stream: AcceleratedStream) -> ARLA:
    """The stream's ARLA in float32. Raises UserError if there is none."""
    if stream.arla is None:
        raise UserError(
            "m2r2 setting exit_score='arla' needs an accelerator with ARLA; this one has arla_dim=0"
        )
    return copy.deepcopy(stream.arla).float()


def make_runner(
    decoder: Decoder, stream: AcceleratedStream, gate: int, weights: DraftWeights
) -> DraftRunner:
    """The fastest runner for `decoder`. weights: how the native kernel packs weights that only
    draft.
    """
    runner = StreamRunner(decoder, stream, gate)
    return packed_where_possible(runner, lambda: runner.module.branch(gate), weights)
