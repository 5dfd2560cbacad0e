"""transformers' assisted generation with a draft model (`assistant_model`)."""

from __future__ import annotations

import transformers

from multirate.errors import UserError
from multirate.lab.bench.baselines import Baseline, Contest
from multirate.lab.bench.method_runs import transformers_run
from multirate.lab.bench.runner import MethodRun, Unavailable
from multirate.loading.hub import load_model
from multirate.runtime.quantised import runnable


def _prepare(contest: Contest) -> list[MethodRun]:
    name = contest.argument
    if name is None:
        raise Unavailable("it needs a draft model: --baselines assistant=MODEL")
    model = runnable(contest.engine.model)
    try:
        drafts = runnable(load_model(name, str(model.dtype).removeprefix("torch.")).model)
    except UserError as error:
        raise Unavailable(str(error)) from None
    contest.check_vocabulary(name, drafts.config.get_text_config().vocab_size)
    return [
        transformers_run(
            model,
            contest.engine.stopping(stop_strings=()).eos_token_ids,
            contest.max_new_tokens,
            "generate-assistant",
            assistant=drafts.to(model.device),
            drafts=True,
            note=f"transformers {transformers.__version__}, draft model {name}",
        )
    ]


BASELINE = Baseline("assistant", _prepare, argument="a draft model")
