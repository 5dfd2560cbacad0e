"""Our plain loop on a quantised model's weights expanded to bf16: what running them as they are
brings.
"""

from __future__ import annotations

from dataclasses import replace

from multirate.engine import attach
from multirate.lab.bench.baselines import Baseline, Contest
from multirate.lab.bench.method_runs import method_run
from multirate.lab.bench.runner import MethodRun, Unavailable
from multirate.methods.spec import PLAIN
from multirate.runtime.quantised import expanded, is_quantised


def _prepare(contest: Contest) -> list[MethodRun]:
    engine = contest.engine
    if not is_quantised(engine.model):
        raise Unavailable("the model's weights are not quantised")
    full = attach(expanded(engine.model), tokenizer=engine.tokenizer)
    run = method_run(full, PLAIN, contest.max_new_tokens)
    return [replace(run, name=f"{PLAIN}-bf16", lossless=False, note="weights expanded to bf16")]


BASELINE = Baseline("bf16", _prepare)
