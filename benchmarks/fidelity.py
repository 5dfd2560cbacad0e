"""How faithfully a GGUF file is run: perplexity and best tokens on the package's fixed texts, of
this package and of llama.cpp, against the file's dequantised float32 weights in transformers.

    python benchmarks/fidelity.py FILE.gguf [--weights bf16]... [--llama-python PATH] [--json OUT]

--weights: a setting of multirate.attach (repeatable); without it, what the file gets by default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from multirate import provenance
from multirate.engine import attach
from multirate.fidelity import (
    DecoderReader,
    Fidelity,
    ModelReader,
    Reader,
    fidelity,
    fixed_texts,
)
from multirate.io import write_json
from multirate.loading.gguf.load import load_gguf


class Known:
    """A reader of texts whose logits are known: in files, or kept from another reader."""

    def __init__(self, by_text: dict[tuple[int, ...], Path]) -> None:
        self._files = by_text

    def logits(self, ids: Tensor) -> Tensor:
        """As Reader has it."""
        return torch.from_numpy(np.load(self._files[tuple(ids.tolist())]))


def keep(reader: Reader, texts: list[list[int]], folder: Path) -> Known:
    """A reader's logits over all texts but their last tokens, kept in files."""
    for index, text in enumerate(texts):
        np.save(folder / f"{index}.npy", reader.logits(torch.tensor(text[:-1])).numpy())
    return _known(texts, folder)


@contextmanager
def llama_cpp(python: str, file: Path, texts: list[list[int]]) -> Iterator[Known]:
    """llama.cpp in another interpreter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ids.json").write_text(json.dumps([text[:-1] for text in texts]))
        worker = Path(__file__).parent / "llama_logits.py"
        subprocess.run([python, worker, file, folder], check=True)
        yield _known(texts, folder)


def _known(texts: list[list[int]], folder: Path) -> Known:
    return Known({tuple(text[:-1]): folder / f"{i}.npy" for i, text in enumerate(texts)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--weights", action="append")
    parser.add_argument("--llama-python", help="an interpreter that has llama_cpp")
    parser.add_argument("--no-ours", action="store_true", help="only llama.cpp")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    model, tokenizer = load_gguf(args.file, torch.float32)
    texts = fixed_texts(tokenizer, model.config.max_position_embeddings)
    found: dict[str, Fidelity] = {}

    def compare(name: str, reader: Reader) -> None:
        found[name] = fidelity(full, reader, texts)
        print(f"{args.file.name}, {name}: {found[name]}, KL {found[name].divergence:.5f}")

    with tempfile.TemporaryDirectory() as folder:
        full = keep(ModelReader(model), texts, Path(folder))
        del model
        for weights in () if args.no_ours else args.weights or [None]:
            settings = {} if weights is None else {"weights": weights}
            decoder = attach(str(args.file), **settings).decoder
            compare(f"multirate {weights or ''}".strip(), DecoderReader(decoder))
        if args.llama_python:
            with llama_cpp(args.llama_python, args.file, texts) as theirs:
                compare("llama.cpp", theirs)
    if args.json:
        here = provenance.collect(torch.device("cpu"))
        figures = {name: asdict(one) for name, one in found.items()}
        content = {"file": args.file.name, "date": str(date.today()), "machine": here}
        write_json(args.json, content | {"against_float32": figures})


if __name__ == "__main__":
    main()
