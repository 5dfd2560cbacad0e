"""llama.cpp on the same file as it is, or on the weights of a file that is not quantised, in bf16,
Q8_0 and Q4_0; plainly and with the drafts that its Python package has, by prompt lookup. Each row
has its own process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from multirate.io import cache_folder
from multirate.lab.bench.baselines import Baseline, Contest
from multirate.lab.bench.runner import Answer, MethodRun, Unavailable
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.sources import gguf_of_wheel
from multirate.loading.names import named
from multirate.runtime.quantised import FLOATS

FORMATS = ("BF16", "Q8_0", "Q4_0")
"""Of a file whose weights are not quantised; quantising twice would cripple it."""
LOOKUP_TOKENS = 2
"""Drafted at a time by prompt lookup; what its documentation recommends on a CPU."""
_WORKER = Path(__file__).with_name("llamacpp_worker.py")


class Worker:
    """The process. Raises Unavailable when it ends or answers with an error."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.version = self._reply()["version"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reply says why
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise Unavailable(f"llama.cpp ended: {said[-1] if said else 'without a message'}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Unavailable(f"llama.cpp: {reply['error']}")
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def find_gguf(model: str, argument: str | None) -> Path:
    """The model's GGUF file: the one given, the one that a name stands for, the model itself, or
    the only one in its folder.
    """
    known = None if argument else named(model)
    found_in_wheel = gguf_of_wheel(known.wheel) if known and known.wheel else None
    path = found_in_wheel or Path(argument or model)
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    raise Unavailable(
        f"llama.cpp needs a GGUF file, and {path} is "
        f"{'a folder with several' if found else 'none'}: give --baselines llamacpp=FILE.gguf"
    )


def _converted(source: Path, wanted: str) -> Path:
    """`source` in another format, made once. Appears whole or not at all."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = cache_folder() / "baselines" / f"{source.stem}-{digest}.{wanted}.gguf"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            worker, part = Worker(), Path(folder) / target.name
            try:
                worker.ask(quantize=[str(source), str(part), wanted])
            finally:
                worker.close()
            os.replace(part, target)
    except OSError as error:
        raise Unavailable(
            f"cannot write llama.cpp's {wanted} file to {target.parent}: {error}"
        ) from None
    return target


def _prepare(contest: Contest) -> list[MethodRun]:
    if importlib.util.find_spec("llama_cpp") is None:
        raise Unavailable(
            "llama.cpp is not installed: pip install llama-cpp-python (its build takes minutes)"
        )
    source = find_gguf(contest.model, contest.argument)
    return [
        _row(contest, file, name, n)
        for n in (0, LOOKUP_TOKENS)
        for name, file in _files(source).items()
    ]


def _files(source: Path) -> dict[str, Path]:
    """By format: a quantised file as it is, and any other converted."""
    own = format_of(source)
    if own not in FLOATS:
        return {own: source}
    return {wanted: _converted(source, wanted) for wanted in FORMATS}


def format_of(source: Path) -> str:
    """GGUF's name of the format that most of a file's weights have. Raises UserError."""
    kinds = Counter[str]()
    for tensor in GgufFile(source).tensors.values():
        kinds[tensor.kind.name] += math.prod(tensor.shape)
    return kinds.most_common(1)[0][0]


def _row(contest: Contest, file: Path, wanted: str, lookup: int) -> MethodRun:
    """lookup: tokens that are drafted at a time; 0: it decodes plainly."""
    worker = Worker()
    contest.stack.callback(worker.close)
    positions = contest.positions + lookup  # its loop drafts beyond an answer's end
    loaded = worker.ask(load=str(file), positions=positions, threads=contest.threads, lookup=lookup)
    contest.check_vocabulary(file.name, loaded["vocabulary"])

    def run_for(prompt: list[int], count: int) -> Answer:
        reply = worker.ask(prompt=prompt, count=count)
        tokens = reply["tokens"]
        if lookup:  # the pass over the prompt drafts, too
            return Answer(tokens, stepped=len(tokens), steps=reply["passes"])
        return Answer(tokens, stepped=len(tokens) - 1, steps=len(tokens) - 1)

    return MethodRun(
        f"llamacpp-{wanted.lower()}" + ("-lookup" if lookup else ""),
        lambda prompt: run_for(prompt, 8),  # to warm up
        lossless=False,  # its arithmetic, and in other formats its weights, are others
        run_for=run_for,
        note=f"llama-cpp-python {worker.version}, {contest.threads} threads"
        + (f", {lookup} tokens at a time" if lookup else ""),
    )


BASELINE = Baseline("llamacpp", _prepare, argument="a GGUF file")
