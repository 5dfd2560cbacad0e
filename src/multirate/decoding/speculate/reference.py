"""Speculative decoding without a cache and without tricks [Stern et al. 2018, Leviathan et al.
2023]. The tests compare every real step with it; nothing else calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft
from multirate.runtime.decoder import Decoder
from multirate.runtime.rows import Rows


def speculative_decode(
    decoder: Decoder, propose: Callable[[Sequence[int]], Draft], sampler: Sampler, count: int
) -> list[list[int]]:
    """Continue `sampler.tokens[0]` by at least `count` tokens; return the tokens of each step.

    Every token is the model's own choice after the tokens before it: the argmax or, at a
    temperature, the argmax of logits and the noise of its place. So the text is plain decoding's,
    whatever `propose` returns.
    """
    text, steps = sampler.tokens[0], list[list[int]]()
    while sum(map(len, steps)) < count:
        draft = propose(text)
        logits = one_pass(decoder, text, draft)
        emitted, node = list[int](), 0
        while True:
            [token] = sampler.choose(logits[node][None], [0])  # the model's own token
            text.append(token)
            emitted.append(token)
            child = draft.child(node, token)
            if child is None:  # the draft differs or ends here; so does the step
                break
            node = child  # accepted: the same pass has the logits after it
        steps.append(emitted)
    return steps


def one_pass(decoder: Decoder, text: Sequence[int], draft: Draft) -> Tensor:
    """Logits [n + 1, V] after the last token of `text` and after each of the draft's n nodes."""
    committed = len(text) - 1
    ids = torch.tensor([*text, *draft.tokens], device=decoder.info.device, dtype=torch.int64)
    rows = Rows.concat([Rows.causal(0, 0, committed), draft.rows(0, committed)])
    cache = decoder.new_cache(1, len(ids))
    x = decoder.embed(ids, rows.pos)
    return decoder.logits(decoder.layers(x, rows, 0, decoder.info.num_layers, cache)[committed:])
