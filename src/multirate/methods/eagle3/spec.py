"""Registers EAGLE-3."""

from __future__ import annotations

from multirate.methods._shared.branch_config import TUNABLE
from multirate.methods._shared.feature_drafter import FeatureDrafter
from multirate.methods.eagle3 import speculators
from multirate.methods.eagle3.config import Eagle3Config, Eagle3DecodeConfig
from multirate.methods.eagle3.modules import Eagle3Layer
from multirate.methods.eagle3.train import Eagle3Objective, start_from_least_squares
from multirate.methods.spec import MethodSpec, Published, Training, register

SPEC = register(
    MethodSpec(
        name="eagle3",
        title="EAGLE-3 (arXiv 2503.01840)",
        summary=(
            "drafts with a trained layer that reads hidden states of three depths, and its own head"
        ),
        settings=Eagle3DecodeConfig,
        tunable={**TUNABLE, "lookup": (0, "sam")},
        drafter=FeatureDrafter,
        training=Training(
            Eagle3Config,
            Eagle3Layer,
            Eagle3Objective,
            start=start_from_least_squares,
            published=Published(speculators.is_published, speculators.read, speculators.write),
        ),
    )
)
