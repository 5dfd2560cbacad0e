"""Tiny random models and drafters, good and adversarial, for the tests of the loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers as tf
from scipy.stats import chi2
from torch import Tensor

from multirate.decoding.logits import SamplingSettings, allowed
from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits, Verified
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder

MAX_POSITIONS = 64


@cache
def tiny(seed: int = 0, vocab: int = 13, layers: int = 3) -> tuple[Any, Decoder]:
    """A random Llama in fp32 whose greedy output is varied, and its decoder."""
    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = tf.LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model, load_decoder(model, "hf")


def reference(model: Any, prompt: Sequence[int], count: int, **settings: Any) -> list[int]:
    """transformers' own greedy continuation of one prompt."""
    with torch.no_grad():
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return out[0, len(prompt) :].tolist()


def oracle(model: Any, prompts: Sequence[Sequence[int]], count: int = 40) -> list[list[int]]:
    """Prompt and true greedy continuation, for drafters that know the future."""
    return [[*p, *reference(model, p, min(count, MAX_POSITIONS - len(p)))] for p in prompts]


class ScriptedDrafter(Drafter):
    """Drafts what `script(seq, tokens so far, limit)` says: (tokens, parents). Honours nothing,
    limits included.

    start > 0: runs layers [0, start) itself and hands over `hidden`, as self-speculation does; with
    `lazy` it leaves every other draft's shallow layers to the loop.
    """

    def __init__(
        self,
        script: Callable[[int, list[int], int], tuple[list[int], list[int]]],
        decoder: Decoder | None = None,
        start: int = 0,
        lazy: bool = False,
    ) -> None:
        self.script, self.decoder, self.lazy = script, decoder, lazy
        self.traits = Traits(start=start)
        self.finals: dict[int, list[Tensor]] = {}
        self.steps = 0

    def begin(self, cache: Any, sampler: Sampler) -> None:
        self.cache = cache
        self.finals = {}

    def prefill(self, seqs: Any, prompts: Any, hidden_final: Any, taps: Any) -> None:
        for b, prompt, hidden in zip(seqs, prompts, hidden_final, strict=True):
            assert hidden.shape[0] == len(prompt)
            self.finals[b] = [hidden]

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts = []
        for b, limit in request.pairs:
            text = request.sampler.tokens[b]
            assert limit >= 0
            tokens, parents = self.script(b, text, limit)
            # positions past the model's last are the loop's business to cut; rotary angles exist
            # for them all the same
            draft = Draft(tokens, parents)
            self.steps += 1
            if self.decoder is not None and not (self.lazy and self.steps % 2):
                rows = draft.rows(b, self.cache.lengths[b])
                x = self.decoder.embed(torch.tensor([text[-1], *tokens]), rows.pos)
                draft.hidden = self.decoder.layers(x, rows, 0, self.traits.start, self.cache)
            drafts.append(draft)
        return drafts

    def accept(self, seq: int, verified: Verified) -> None:
        assert verified.accepted.shape[0] == len(verified.path)
        assert verified.path[0] == 0
        self.finals[seq].append(verified.accepted)


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    """`nodes` random tokens below random parents (siblings may repeat a token)."""
    return rng.integers(0, vocab, nodes).tolist(), [
        int(rng.integers(0, i + 1)) for i in range(nodes)
    ]


def scripts(
    kind: str, futures: list[list[int]], vocab: int, seed: int
) -> Callable[..., tuple[list[int], list[int]]]:
    """Drafting behaviours by name; `futures` are the true sequences."""
    rng = np.random.default_rng(seed)

    def chain(tokens: list[int]) -> tuple[list[int], list[int]]:
        return tokens, list(range(len(tokens)))

    def script(b: int, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        ahead = futures[b][len(tokens) :]
        if kind == "empty":
            return [], []
        if kind == "random":
            return chain(rng.integers(0, vocab, int(rng.integers(0, 6))).tolist())
        if kind == "wrong":
            return chain([(t + 1) % vocab for t in ahead[:5]])
        if kind == "repeated":
            return chain([tokens[-1]] * 7)
        if kind == "right":
            return chain(ahead[:4])
        if kind == "too_long":
            return chain((ahead + [1] * 63)[:63])
        if kind == "half_right":
            drafted = ahead[:6]
            wrong_from = int(rng.integers(0, 7))
            return chain([t if i < wrong_from else (t + 1) % vocab for i, t in enumerate(drafted)])
        if kind == "mixed":  # a different shape for every sequence and step
            return scripts(
                ["empty", "right", "tree", "half_right"][int(rng.integers(4))],
                futures,
                vocab,
                len(tokens),
            )(b, tokens, limit)
        if kind == "maximal_tree":
            return random_tree(rng, 63, vocab)
        assert kind == "tree"  # the truth hidden at random places among random nodes
        nodes, parents = random_tree(rng, int(rng.integers(2, 9)), vocab)
        at = 0
        for token in ahead[:4]:
            for _ in range(int(rng.integers(0, 3))):
                nodes.append(int(rng.integers(vocab)))
                parents.append(int(rng.integers(0, len(nodes))))
            nodes.append(token)
            parents.append(at)
            at = len(nodes)
        return nodes, parents

    return script


KINDS = [
    "empty",
    "random",
    "wrong",
    "repeated",
    "right",
    "too_long",
    "half_right",
    "mixed",
    "maximal_tree",
    "tree",
]


def pearson(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's χ² of counts against probabilities; cells expecting fewer than 5 are pooled.
    Impossible seen: 0.
    """
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs < 1e-9].sum():
        return 0.0
    expected = probs * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1))


def distribution(
    logits: Tensor,
    settings: SamplingSettings,
    contexts: list[list[int]] | None = None,
    prompts: list[int] | None = None,
) -> Tensor:
    """Probabilities [n, V] that tokens are drawn from; see `allowed`."""
    scores = allowed(logits, settings, contexts, prompts)
    return torch.softmax(scores / settings.temperature, dim=-1)


def path_tokens(draft: Draft) -> list[list[int]]:
    """For nodes 0..n: the drafted tokens on the path from node 1 down to the node itself."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent], token])
    return paths
