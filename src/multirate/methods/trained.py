"""The methods that are trained: how each makes its config, its modules and its objective for a base model."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multirate.errors import UserError
from multirate.methods.config import MethodConfig
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.train import KangarooObjective
from multirate.methods.m2r2.config import PRESETS, M2R2Config
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.train import M2R2Objective
from multirate.methods.m2r2_experts.config import ExpertForecastConfig
from multirate.methods.m2r2_experts.modules import ExpertForecast
from multirate.methods.m2r2_experts.start import start_from_experts
from multirate.methods.m2r2_experts.train import ExpertForecastObjective
from multirate.methods.shape import BaseShape
from multirate.methods.teacher import Teacher

EXPERTS = ExpertForecastConfig.METHOD


@dataclass(frozen=True)
class TrainedMethod:
    """``configure(base, **options)`` fills a config for a base; ``build(config, base)`` makes the modules;
    ``objective(teacher, modules, step_decay)`` is an ``nn.Module``: (ids, mask) → (loss, Report), with ``terms``,
    ``has_arla``, ``early_exit`` and ``drafts`` (whether its agreement is that of drafted tokens). ``start(teacher,
    modules, batches of (ids, mask))`` sets what begins as something of the base's own."""

    config_type: type[MethodConfig]
    configure: Callable[..., MethodConfig]
    build: Callable[[Any, BaseShape], nn.Module]
    objective: Callable[..., nn.Module]
    start: Callable[[Teacher, Any, Iterable[tuple[Tensor, Tensor]]], None] | None = None


def trained_method(name: str) -> TrainedMethod:
    """The method called ``name``, or UserError."""
    if name in PRESETS:
        return TrainedMethod(
            M2R2Config,
            lambda base, **options: M2R2Config.for_base(base, name, **options),
            AcceleratedStream,
            M2R2Objective,
        )
    if name == "kangaroo":
        return TrainedMethod(KangarooConfig, KangarooConfig.for_base, KangarooAdapter, KangarooObjective)
    if name == EXPERTS:
        return TrainedMethod(
            ExpertForecastConfig,
            ExpertForecastConfig.for_base,
            ExpertForecast,
            ExpertForecastObjective,
            start_from_experts,
        )
    accepted = ", ".join((*PRESETS, "kangaroo", EXPERTS))
    raise UserError(f"Method {reprlib.repr(name)} cannot be trained; accepted: {accepted}.")
