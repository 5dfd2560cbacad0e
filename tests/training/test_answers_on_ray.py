"""`multirate answers --ray`: several copies write the file that one writes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs the extra [ray]")

from multirate.decoding.logits import SamplingSettings  # noqa: E402
from multirate.decoding.stopping import StopSettings  # noqa: E402
from multirate.loading.hub import load_model  # noqa: E402
from multirate.runtime.load import load_decoder  # noqa: E402
from multirate.training.answers_on_ray import on_ray  # noqa: E402
from multirate.training.own_answers import answer_questions, read_questions  # noqa: E402

TOKENS = 12


@pytest.mark.slow
def test_copies_write_the_file_that_one_writes(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    records = [{"instruction": f"Name {n} colors."} for n in range(2, 9)]
    turns = [{"role": "user", "content": f"Say {n}."} for n in range(2)]
    records.insert(2, {"messages": [turns[0], {"role": "assistant", "content": "-"}, turns[1]]})
    data.write_text("\n".join(map(json.dumps, records)))
    load = partial(load_model, "tiny")
    loaded, sampling = load(), SamplingSettings()
    decoder = load_decoder(loaded.model)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would write a token to the home folder
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        stop = StopSettings(TOKENS, (0,))
        for name, answering in (("one", None), ("two", on_ray(load, stop, sampling, 2, 1))):
            count = answer_questions(
                decoder,
                loaded.tokenizer,
                read_questions([data]),
                tmp_path / name,
                (0,),
                TOKENS,
                batch=1,
                sampling=sampling,
                answering=answering,
            )
            assert count == len(records)
    finally:
        ray.shutdown()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
