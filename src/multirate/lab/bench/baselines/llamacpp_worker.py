"""llama.cpp in a process of its own: reads a JSON object per line, answers with one.

Run by path with the interpreter that has `llama_cpp`; imports nothing of this package. Requests:
{"quantize": [from, to, format]}, {"load": file, "positions": n, "threads": n, "lookup": n} (drafts
of n tokens by prompt lookup; 0: none), {"prompt": [ids], "count": n} (greedy, exactly so many
tokens).
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def quantize(source: str, target: str, wanted: str) -> dict[str, Any]:
    """Another format of a GGUF file's weights."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{wanted}")
    settings.allow_requantize = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings)
    return {"error": f"llama_model_quantize ended with {code}"} if code else {"done": True}


def answer(model: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """`count` greedy tokens after the prompt, which is read from its first token."""
    model.reset()
    size, tokens, following = model.n_vocab(), [], prompt
    for _ in range(count):
        model.eval(following)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (size,))
        following = [int(logits.argmax())]
        tokens += following
    return {"tokens": tokens}


def drafted_answer(model: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """The same by the package's own loop, which drafts, and how many passes it took."""
    passes, evaluate = 0, model.eval

    def counted(tokens: Any) -> None:
        nonlocal passes
        passes += 1
        evaluate(tokens)

    model.reset()
    model.eval = counted
    try:
        found = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        tokens = [int(token) for token in islice(found, count)]
    finally:
        model.eval = evaluate
    return {"tokens": tokens, "passes": passes}


def main() -> None:
    model: Any = None
    lookup = 0
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "quantize" in request:
            reply = quantize(*request["quantize"])
        elif "load" in request:
            lookup = request["lookup"]
            drafts = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
            model = llama_cpp.Llama(
                request["load"],
                n_ctx=request["positions"],
                n_threads=request["threads"],
                n_threads_batch=request["threads"],
                draft_model=drafts,
                logits_all=bool(lookup),  # else it has room for drafts' logits up to token 512
                verbose=False,
            )
            reply = {"vocabulary": model.n_vocab()}
        else:
            respond = drafted_answer if lookup else answer
            reply = respond(model, request["prompt"], request["count"])
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
