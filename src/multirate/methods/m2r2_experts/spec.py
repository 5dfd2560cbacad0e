"""Registers the accelerated residual as a predictor of experts."""

from __future__ import annotations

from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.methods.m2r2_experts.start import start_from_experts
from multirate.methods.m2r2_experts.train import ExpertPredictorObjective
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name=ExpertPredictorConfig.METHOD,
        title="M2R2's accelerated residual as a predictor of experts (arXiv 2502.02040; a "
        "reconstruction)",
        summary="predicts the experts of a mixture ahead of time",
        role="experts",
        recommended=True,
        training=Training(
            ExpertPredictorConfig,
            ExpertPredictor,
            ExpertPredictorObjective,
            start=start_from_experts,
        ),
    )
)
