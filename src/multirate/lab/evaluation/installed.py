"""Whether what evaluation needs is there: it is an extra of its own."""

from __future__ import annotations

import importlib
import logging

from multirate.errors import UserError

INSTALL = "pip install 'multirate[eval]'"


def check_installed() -> None:
    """UserError naming the package that is missing and the command that installs it.

    The harness is told to keep its information to itself: errors are ours to say.
    """
    for module, package in (
        ("lm_eval", "lm-eval"),
        ("sacrebleu", "sacrebleu"),
        ("rouge_score", "rouge-score"),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing = package if error.name in (None, module) else f"{error.name} ({package})"
            raise UserError(
                f"evaluation needs lm-eval, sacrebleu and rouge-score, but {missing} is not "
                f"installed; run {INSTALL}"
            ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
