"""transformers' assisted generation without another model: drafts by prompt lookup
(`prompt_lookup_num_tokens`), and by the model's own first layers (`assistant_early_exit`).
"""

from __future__ import annotations

from functools import partial

import transformers

from multirate.lab.bench.baselines import Baseline, Contest
from multirate.lab.bench.method_runs import of_expanded_weights, transformers_run
from multirate.lab.bench.runner import MethodRun
from multirate.runtime.quantised import runnable

TOKENS = 10
"""Drafted at most by prompt lookup; the value of transformers' documentation."""
EXIT_SHARE = 4
"""The first of so many equal parts of the layers drafts."""


def _prepare(contest: Contest) -> list[MethodRun]:
    model = runnable(contest.engine.model)
    eos = contest.engine.stopping(stop_strings=()).eos_token_ids
    version = f"transformers {transformers.__version__}"
    row = partial(transformers_run, model, eos, contest.max_new_tokens, drafts=True)
    layers = max(1, model.config.get_text_config().num_hidden_layers // EXIT_SHARE)
    drafting = f"{version}, the first {layers} layers draft"
    rows = (
        row("generate-lookup", note=version, prompt_lookup_num_tokens=TOKENS),
        row("generate-early-exit", note=drafting, assistant_early_exit=layers),
    )
    return [of_expanded_weights(contest.engine, one) for one in rows]


BASELINE = Baseline("assisted", _prepare)
