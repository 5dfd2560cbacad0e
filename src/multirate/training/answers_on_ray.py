"""Answers of several copies of a model, by Ray Data: placing them and handing out questions is
Ray's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.runtime.load import load_decoder
from multirate.training.own_answers import Answerer, Answering, Questions, Said, Turns

_BATCHES = 4
"""How many times a copy's batch it gets at once, so that few places are idle while answers end."""


class Copy:
    """One copy of the model, in a process of its own. load: makes it."""

    def __init__(
        self,
        load: Callable[[], Any],
        stop: dict[str, Any],
        sampling: SamplingSettings | None,
        batch: int,
    ) -> None:
        loaded = load()
        ends = StopSettings(**stop, decode=loaded.tokenizer.decode)
        self._answerer = Answerer.of(load_decoder(loaded.model), loaded.tokenizer, ends, sampling)
        self._batch = batch

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        questions = [pickle.loads(one) for one in rows["asked"]]
        found = self._answerer.answers(questions, self._batch)
        return {"answer": [pickle.dumps(one) for one in found]}


def on_ray(
    load: Callable[[], Any],
    stop: StopSettings,
    sampling: SamplingSettings | None,
    copies: int,
    cpus: int,
) -> Answering:
    """What `answer_questions` takes as `answering`: the same answers in the same order, from
    `copies` copies with so many processors each, on the cluster that RAY_ADDRESS names or on this
    machine. load: makes the loaded model in a copy's process.
    """
    ends = {
        "max_new_tokens": stop.max_new_tokens,
        "eos_token_ids": stop.eos_token_ids,
        "stop_strings": stop.stop_strings,
    }

    def answering(questions: Sequence[Questions], batch: int) -> Iterator[tuple[Turns, list[Said]]]:
        import ray
        import ray.data

        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        size = _BATCHES * batch
        asked = [{"asked": pickle.dumps(one)} for one in questions]
        found = ray.data.from_items(asked, override_num_blocks=-(-len(asked) // size)).map_batches(
            Copy,
            fn_constructor_args=(load, ends, sampling, batch),
            batch_size=size,
            compute=ray.data.ActorPoolStrategy(size=copies),
            num_cpus=cpus,
        )
        for row in found.iter_rows():
            yield pickle.loads(row["answer"])

    return answering
