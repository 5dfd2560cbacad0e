"""lm-evaluation-harness over HTTP scores what it scores in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'multirate[eval]'")
pytest.importorskip("tenacity", reason="lm-eval's clients need lm-eval[api]")

from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

import multirate
from multirate.lab.evaluation.harness_model import EngineLM
from multirate.lab.evaluation.modes import Mode, decoding
from multirate.serving.model import ServedModel
from multirate.serving.scheduler import start
from multirate.serving.settings import ServingSettings

from .conftest import running

PAIRS = [
    ("The house", " is not"),
    ("The house is", " near the river and the wood"),
    ("One, two,", " three, four"),
    ("long " * 60, "enough"),
]
UNTIL = {"until": ["."], "max_gen_toks": 12, "do_sample": False, "temperature": 0}


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """As much of the harness's requests as a model looks at."""
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def in_process() -> EngineLM:
    engine = multirate.attach("tiny")
    return EngineLM(engine, decoding(engine, Mode()))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine, settings = multirate.attach("tiny"), ServingSettings(parallel=4)
    scheduler = start(engine, settings)
    with running(scheduler, ServedModel.of(engine, "tiny", settings)) as server:
        yield server.url


@pytest.fixture(scope="module")
def completions(url: str, in_process: EngineLM, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    in_process.tokenizer.save_pretrained(folder)
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="tiny",
        tokenizer=str(folder),
        tokenized_requests=True,
        batch_size=2,
        max_length=512,
    )


def test_log_likelihoods(completions: Any, in_process: EngineLM) -> None:
    over_http = completions.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for found, known in zip(over_http, in_process.loglikelihood(requests(*PAIRS)), strict=True):
        assert found[0] == pytest.approx(known[0], abs=1e-4)
        assert bool(found[1]) == known[1]


def test_generated_texts(completions: Any, in_process: EngineLM) -> None:
    asked = requests(*((context, UNTIL) for context, _ in PAIRS))
    over_http = completions.generate_until(asked, disable_tqdm=True)
    assert over_http == in_process.generate_until(asked)


def test_chats(url: str, in_process: EngineLM) -> None:
    chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model="tiny")
    history = [{"role": "user", "content": "Name a color."}]
    prompt = in_process.apply_chat_template(history)
    known = in_process.generate_until(requests((prompt, UNTIL)))
    asked = requests((JsonChatStr(json.dumps(history)), UNTIL))
    assert chat.generate_until(asked, disable_tqdm=True) == known
