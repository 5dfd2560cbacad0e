"""Checks of arguments that `Engine.generate`, `custom_generate` and the commands share."""

from __future__ import annotations

from multirate.errors import UserError
from multirate.guarantee import check_quality

SPECULATE = ("auto", "always", "never")
MODES = ("lossless", "dynamic")


def check_mode(mode: str, quality: float | None, speculate: str) -> None:
    """Raises UserError for invalid values or combinations of these arguments of
    `Engine.generate`.
    """
    if speculate not in SPECULATE:
        raise UserError(f"speculate is {speculate!r}; accepted: {', '.join(SPECULATE)}")
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}; accepted: {', '.join(MODES)}")
    if mode == "lossless":
        if quality is not None:
            raise UserError(f"quality {quality!r} needs mode 'dynamic', not 'lossless'")
        return
    if quality is None:
        raise UserError(
            "mode 'dynamic' needs a quality: a number above 0 and at most 1, the share of "
            "tokens that must match the full model"
        )
    check_quality(quality)
    if speculate == "never":
        raise UserError(
            "speculate 'never' decodes without drafts; with mode 'dynamic' use 'auto' or 'always'"
        )
