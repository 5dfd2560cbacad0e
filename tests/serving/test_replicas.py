"""Copies of the server behind Ray Serve, on a cluster of this machine alone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

ray = pytest.importorskip("ray", reason="needs the extra [ray]")

import multirate  # noqa: E402
from multirate.errors import UserError  # noqa: E402
from multirate.serving.replicas import NAME, Replicas, run  # noqa: E402
from multirate.serving.settings import HttpSettings, ServingSettings  # noqa: E402

load = partial(multirate.attach, "tiny")  # the copies' processes do not know this module


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would write a token to the home folder
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        settings = ServingSettings(parallel=2), HttpSettings(drain_seconds=5)
        run(load, "tiny", *settings, Replicas(2, cpus=1), "127.0.0.1", port, blocking=False)
        yield f"http://127.0.0.1:{port}"
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
def test_copies_answer_behind_one_address_and_are_replaced(url: str) -> None:
    body = {"prompt": "The house", "max_tokens": 12, "temperature": 0}
    engine = load()
    ids = engine.tokenizer("The house")["input_ids"]
    text = engine.tokenizer.decode(
        engine.generate([ids], stop=engine.stopping(12)).sequences[0], skip_special_tokens=True
    )
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(6):
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == text
        pieces = []
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    pieces += [one["text"] for one in json.loads(line[6:])["choices"]]
        assert "".join(pieces) == text and len(pieces) > 1
        wrong = client.post("/v1/completions", json={**body, "max_tokens": -1})
        assert wrong.status_code == 400 and "max_tokens" in wrong.json()["error"]["message"]
        copies = [one for one in ray.util.list_named_actors(True) if NAME in one["name"]]
        assert len(copies) == 2, ray.util.list_named_actors(True)
        ray.kill(ray.get_actor(**copies[0]))
        for _ in range(6):
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == text


def test_wrong_autoscaling_settings_are_refused_with_what_is_accepted() -> None:
    for wrong in ({"min_replicas": -1}, {"min_replicas": 3, "max_replicas": 2}):
        with pytest.raises(UserError, match="min_replicas and max_replicas"):
            Replicas(autoscaling=wrong).options(ServingSettings(), HttpSettings())
    most = {"min_replicas": 1, "max_replicas": 1000}
    options = Replicas(autoscaling=most).options(ServingSettings(), HttpSettings())
    assert options["ray_actor_options"]["num_cpus"] == 1 and "num_replicas" not in options
