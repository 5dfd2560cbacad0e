"""transformers' own prompt lookup (assisted generation with `prompt_lookup_num_tokens`)."""

from __future__ import annotations

from multirate.bench.method_runs import transformers_run
from multirate.bench.rivals import Contest, Rival
from multirate.bench.runner import MethodRun

TOKENS = 10
"""Drafted at most; the value of transformers' documentation."""


def _prepare(contest: Contest) -> list[MethodRun]:
    eos = contest.engine.stopping().eos_token_ids
    return [
        transformers_run(
            contest.engine.model,
            eos,
            contest.max_new_tokens,
            "generate-lookup",
            prompt_lookup_num_tokens=TOKENS,
        )
    ]


RIVAL = Rival("assisted", _prepare)
