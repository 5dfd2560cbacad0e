"""DEED's objective: deep supervision of every exit."""

from __future__ import annotations

from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective


class DeedObjective(MultiExitObjective):
    """Every exit towards the full model's distribution, weighed by its depth (the paper:
    cross-entropy with the text at every layer, the base tuned with it).
    """

    by_depth = True
