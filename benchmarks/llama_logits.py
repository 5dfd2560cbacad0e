"""Logits of llama.cpp over given texts, for benchmarks/fidelity.py, which runs it with the
interpreter that has `llama_cpp`.

    python llama_logits.py FILE.gguf FOLDER

FOLDER has ids.json, the token ids of each text; text I's logits become FOLDER/I.npy, float32
[tokens, vocabulary].
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

BATCH = 512  # as llama.cpp's own perplexity tool reads texts


def main() -> None:
    file, folder = sys.argv[1], Path(sys.argv[2])
    texts = json.loads((folder / "ids.json").read_text())
    model = llama_cpp.Llama(
        file,
        n_ctx=max(map(len, texts)),
        n_batch=BATCH,
        n_ubatch=BATCH,
        logits_all=True,
        verbose=False,
    )
    for index, ids in enumerate(texts):
        model.reset()
        model.eval(ids)
        np.save(folder / f"{index}.npy", np.asarray(model.scores[: len(ids)], np.float32))


main()
