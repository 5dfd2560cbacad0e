"""Registers EAGLE."""

from __future__ import annotations

from multirate.methods._shared.branch_config import TUNABLE
from multirate.methods._shared.feature_drafter import FeatureDrafter
from multirate.methods.eagle.config import EagleConfig, EagleDecodeConfig
from multirate.methods.eagle.modules import EagleLayer
from multirate.methods.eagle.train import EagleObjective, start_from_least_squares
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="eagle",
        plain_name="EAGLE",
        title="EAGLE (arXiv 2401.15077), with EAGLE-2's trees",
        summary="drafts with a trained layer that continues from the model's last hidden state",
        settings=EagleDecodeConfig,
        tunable={**TUNABLE, "lookup": (0, "sam")},
        drafter=FeatureDrafter,
        training=Training(EagleConfig, EagleLayer, EagleObjective, start=start_from_least_squares),
    )
)
