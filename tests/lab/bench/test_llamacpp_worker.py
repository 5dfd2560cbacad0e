"""llama.cpp itself, where its package is installed: its drafts by prompt lookup change no token, in
texts longer than the 512 tokens that it keeps logits of unless it is asked for all.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loading.gguf import tiny_files

import multirate.lab.bench.baselines

WORKER = Path(multirate.lab.bench.baselines.__file__).with_name("llamacpp_worker.py")


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed: pip install 'multirate[baselines]'",
)
def test_prompt_lookup_says_the_same_in_long_texts(tmp_path: Path) -> None:
    model = str(tiny_files.write(tmp_path / "tiny.gguf"))
    words = random.Random(0).choices(range(5, len(tiny_files.TOKENS)), k=40)
    requests: list[dict[str, Any]] = []
    for lookup in (0, 10):
        requests.append({"load": model, "positions": 1024, "threads": 1, "lookup": lookup})
        requests.append({"prompt": words * 14, "count": 24})
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _, _, plain, _, drafted = map(json.loads, done.stdout.splitlines())
    assert drafted["tokens"] == plain["tokens"]
