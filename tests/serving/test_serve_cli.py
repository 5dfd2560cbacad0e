"""`multirate serve` as a process: it starts, logs, and ends with code 0 on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from multirate.cli import serve
from multirate.cli.main import app
from multirate.serving.connections import bound
from multirate.serving.model import short_name


def started(*options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "multirate", "serve", "tiny", "--port", "0", *options]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """Its log, which grows."""
    found: list[str] = []
    assert process.stderr is not None
    stream = process.stderr
    threading.Thread(target=lambda: found.extend(stream), daemon=True).start()
    return found


def url_in(process: subprocess.Popen[str], lines: list[str]) -> str:
    from serving.conftest import eventually

    def seen() -> Any:
        assert process.poll() is None, lines
        return next((line for line in lines if " serving " in line or '"serving"' in line), None)

    eventually(seen, 180)
    found = re.search(r"http://127\.0\.0\.1:\d+", seen())
    assert found is not None
    return found[0]


@pytest.mark.slow
def test_it_serves_and_ends_well() -> None:
    process = started("--log-format", "json", "--context", "100", MULTIRATE_API_KEY="secret")
    try:
        lines = lines_of(process)
        url = url_in(process, lines)
        key = {"authorization": "Bearer secret"}
        client = httpx.Client(base_url=url, timeout=30)
        assert client.get("/v1/models").status_code == 401
        (card,) = client.get("/v1/models", headers=key).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 100)
        asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        found = client.post("/v1/chat/completions", json=asked, headers=key)
        assert found.json()["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    requests = [json.loads(line) for line in lines if '"request"' in line]
    assert [one["status"] for one in requests] == [401, 200, 200]
    assert requests[-1]["new_tokens"] == found.json()["usage"]["completion_tokens"]
    assert "Hello" not in "".join(lines) and "Traceback" not in "".join(lines)


def refused(*options: str) -> str:
    found = CliRunner().invoke(app, ["serve", "tiny", *options])
    assert found.exit_code == 2 and found.stderr.startswith("error: "), found.output
    return found.stderr


def test_values_that_cannot_be_used_are_named() -> None:
    assert "--log-format is 'xml'" in refused("--log-format", "xml")
    assert "parallel is 0" in refused("--parallel", "0")
    assert "--prefix-memory is 'much'" in refused("--prefix-memory", "much")
    assert "API key is empty" in refused("--api-key", " ")
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1 port {port}: address already in use" in refused("--port", port)
    assert "cannot listen on 192.0.2.1" in refused("--host", "192.0.2.1")
    assert "cannot listen on no such host" in refused("--host", "no such host")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_EXTRA", ("json", "surely_missing"))
    said = refused()
    assert "surely_missing" in said and "pip install 'multirate[serve]'" in said


def test_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "my.Q4_1.gguf").touch()
    assert short_name(str(tmp_path / "my.Q4_1.gguf")) == "my.Q4_1"
    assert short_name(f"{tmp_path}/") == tmp_path.name
    assert short_name("owner/name") == "owner/name"
