"""Registers Kangaroo."""

from __future__ import annotations

from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.kangaroo.decode import KangarooDecodeConfig, KangarooDrafter
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.train import KangarooObjective, start_from_least_squares
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="kangaroo",
        plain_name="Kangaroo",
        title="Kangaroo (arXiv 2404.18911)",
        summary="drafts with the first layers and a trained attention adapter",
        settings=KangarooDecodeConfig,
        tunable={
            "threshold": (0.4, 0.6, 0.8),
            "max_draft": (3, 6, 8),
            "lookup": (0, "sam"),
        },
        drafter=KangarooDrafter,
        training=Training(
            KangarooConfig, KangarooAdapter, KangarooObjective, start=start_from_least_squares
        ),
    )
)
