"""Registers the accelerated residual as a predictor of experts."""

from __future__ import annotations

from multirate.methods.m2r2_experts.config import ExpertForecastConfig
from multirate.methods.m2r2_experts.modules import ExpertForecast
from multirate.methods.m2r2_experts.start import start_from_experts
from multirate.methods.m2r2_experts.train import ExpertForecastObjective
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name=ExpertForecastConfig.METHOD,
        title="M2R2's accelerated residual as a predictor of experts (arXiv 2502.02040; a reconstruction)",
        summary="predicts the experts of a mixture ahead of time",
        role="experts",
        recommended=True,
        training=Training(
            ExpertForecastConfig,
            ExpertForecast,
            ExpertForecastObjective,
            start=start_from_experts,
        ),
    )
)
