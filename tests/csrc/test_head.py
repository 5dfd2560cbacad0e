"""Embeddings, the likeliest tokens and the greedy argmax (csrc/head.c) against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multirate.runtime.native import abi, library
from multirate.runtime.native.packing import Owner
from multirate.runtime.noise import Noise, with_noise

from . import reference
from .harness import bf16_values, linear, pointer, randn


def top(
    logits: torch.Tensor, vocab: int, k: int, sharpness: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    ids, probs = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
    library.kernel().mr_top(
        pointer(logits),
        len(logits),
        vocab,
        logits.shape[1],
        k,
        sharpness,
        abi.longs(ids),
        abi.floats(probs),
    )
    return ids, probs


def test_embed() -> None:
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids, x = torch.tensor([3, 49, 0, 3]), torch.empty(4, 64)
    library.kernel().mr_embed(Owner().table(table), pointer(ids), 4, 64, 2.0, pointer(x))
    assert torch.equal(x, table[ids].float() * 2)


def test_what_is_no_token_has_no_embedding() -> None:
    """A draft's token may be any number: it is never read from beside the table."""
    table = torch.ones(50, 64, dtype=torch.bfloat16)
    ids, x = torch.tensor([-1, 50, 2**62, -(2**63), 7]), torch.empty(5, 64)
    library.kernel().mr_embed(Owner().table(table), pointer(ids), 5, 64, 1.0, pointer(x))
    assert torch.equal(x.sum(-1), torch.tensor([0.0, 0.0, 0.0, 0.0, 64.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_likeliest_of_logits_that_are_no_numbers(value: float) -> None:
    logits = torch.full((1, 64), value)
    ids, probabilities = top(logits, 50, 3, 1.0)
    assert ((ids >= 0) & (ids < 50)).all() and probabilities.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("vocab", [5, 16, 133, 4096])
@pytest.mark.parametrize("sharpness", [1.0, 0.7])
def test_top(vocab: int, sharpness: float) -> None:
    logits = torch.full(
        (3, -(-vocab // 64) * 64), 1e9
    )  # what lies behind the vocabulary must not count
    logits[:, :vocab] = randn(3, vocab, seed=vocab) * 4
    ids, probs = top(logits, vocab, 5, sharpness)
    exact = torch.softmax(logits[:, :vocab].double() * sharpness, -1)
    best, places = exact.topk(5)
    assert ids.tolist() == places.tolist()
    assert np.allclose(probs, best.numpy(), rtol=1e-5, atol=1e-9)


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    logits = torch.zeros(1, 128)
    logits[0, [40, 77, 101]] = 2.0
    logits[0, 90] = 3.0
    ids, _ = top(logits, 128, 5)
    assert ids.tolist() == [[90, 40, 77, 101, 0]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [5, 63, 64, 133, 4096])
def test_best_is_top_without_probabilities(vocab: int, threads: int) -> None:
    """Of random rows, of rising and falling ones, of equal ones, and of those with infinities."""
    logits = torch.full((8, -(-vocab // 64) * 64), 1e9)
    logits[:, :vocab] = randn(8, vocab, seed=vocab)
    logits[1, :vocab] = torch.arange(vocab)
    logits[2, :vocab] = -torch.arange(vocab).float()
    logits[3, :vocab] = 3.0
    logits[4, :vocab] = (torch.arange(vocab) % 3).float()
    logits[5, :vocab] = -torch.inf
    logits[5, vocab // 2] = -5.0
    logits[6, :vocab:2] = torch.inf
    logits[7, 1:vocab:2] = torch.nan
    workspace = library.Workspace(threads)
    for k in (1, 5, min(vocab, 64)):
        ids = np.full((9, k), 77, np.int64)
        library.kernel().mr_best(
            workspace.address, pointer(logits), 8, vocab, logits.shape[1], k, abi.longs(ids)
        )
        assert ids[:8].tolist() == top(logits, vocab, k)[0].tolist()
        assert (ids[8] == 77).all()
        stable = (-logits[:7, :vocab]).sort(dim=-1, stable=True)[1][
            :, :k
        ]  # of equals the lowest id
        finite = [row for row in range(7) if row != 5 or k == 1]
        assert ids[finite].tolist() == stable[finite].tolist()


def shape_of(hidden: int, vocab: int) -> abi.CData:
    return abi.new("Shape", hidden=hidden, vocab=vocab, eps=1e-5, embed_scale=1.0)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("vocab", [7, 130, 200])
def test_a_pass_reads_the_head_and_takes_the_first_of_equals(vocab: int, noisy: bool) -> None:
    """No layers: tokens → embedding → norm → head → argmax."""
    weight, table = bf16_values(vocab, 64), bf16_values(vocab, 64, seed=1).to(torch.bfloat16)
    weight[vocab // 2] = weight[vocab - 1]  # equal outputs: the lower id wins
    norm = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    table[1] = (weight[vocab - 1] * 2).to(torch.bfloat16)  # its best are these two
    ids, x = np.array([1, 0, 3], np.int64), torch.empty(3, 64)
    owner, workspace = Owner(), library.Workspace(2)
    head, noise = owner.linear(weight), [Noise(8, place, 0.7) for place in range(3)]
    logits, tokens = torch.empty(3, head.outputs), np.empty(3, np.int64)
    library.kernel().mr_argmax_pass(
        workspace.address,
        shape_of(64, vocab),
        abi.NULL,
        abi.NULL,
        abi.new("Rows", count=3, **COLUMNS),
        owner.table(table),
        abi.longs(ids),
        pointer(x),
        0,
        0,
        head,
        abi.NULL,
        pointer(norm),
        abi.noise_of(noise) if noisy else abi.NULL,
        pointer(logits),
        abi.longs(tokens),
    )
    assert torch.equal(x, table[torch.from_numpy(ids)].float())
    exact = reference.rms_norm(x.double(), norm.double(), 1e-5) @ weight.double().T
    assert (logits[:, :vocab] - exact).norm() < 0.004 * exact.norm()
    assert noisy or tokens[0] in (vocab // 2, int(exact[0].argmax()))
    sums = with_noise(logits[:, :vocab], noise) if noisy else logits[:, :vocab]
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in sums]


_INTS, _LONGS = np.zeros(8, np.int32), np.zeros(8, np.int64)
COLUMNS = {name: abi.ints(_INTS) for name in ("seq", "slot", "pos", "prefix")} | {
    "tree": abi.longs(_LONGS)
}


class HeadTop:
    """mr_head_top of a head [vocab, 64] and four rows x, with noise or without, the outputs' tokens
    mapped or not.
    """

    def __init__(self, weight: torch.Tensor, norm: torch.Tensor, noisy: bool, mapped: bool) -> None:
        self.owner, self.workspace, self.vocab = Owner(), library.Workspace(2), len(weight)
        self.head, self.norm, self.noisy, self.mapped = (
            self.owner.linear(weight),
            norm,
            noisy,
            mapped,
        )
        self.noise = [Noise(4, place, 1.3) for place in range(4)]
        self.tokens = np.arange(self.vocab) * 7 % self.vocab if mapped else np.arange(self.vocab)

    def added(self) -> torch.Tensor:
        """The noise of each row's outputs, [4, vocab]."""
        ids = self.tokens.astype(np.uint32)
        return torch.from_numpy(np.stack([one.of_tokens(ids) for one in self.noise]))

    def run(
        self, x: torch.Tensor, k: int, exact: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """The logits [4, vocab] that are left, and the k likeliest tokens and their
        probabilities.
        """
        logits = torch.empty(4, self.head.outputs)
        ids, probs = np.empty((4, k), np.int64), np.empty((4, k), np.float32)
        library.kernel().mr_head_top(
            self.workspace.address,
            self.head,
            pointer(self.norm),
            1e-5,
            pointer(x),
            4,
            self.vocab,
            abi.noise_of(self.noise) if self.noisy else abi.NULL,
            abi.longs(self.tokens) if self.mapped else abi.NULL,
            pointer(exact),
            k,
            1.0,
            pointer(logits),
            abi.longs(ids),
            abi.floats(probs),
        )
        return logits[:, : self.vocab], ids, probs


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_head_top_is_the_heads_top(noisy: bool, mapped: bool) -> None:
    weight, x, norm = bf16_values(133, 64), randn(4, 64, seed=1), torch.ones(64)
    head = HeadTop(weight, norm, noisy, mapped)
    logits, ids, probs = head.run(x, 3)
    product = linear(weight, x, norm=norm)
    expected = product + head.added() if noisy else product
    assert torch.equal(logits, expected)
    best, places = torch.softmax(logits.double(), -1).topk(3)
    assert ids.tolist() == places.tolist()
    assert np.allclose(probs, best.numpy(), rtol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("vocab", [5, 133])
def test_the_exact_head_has_the_last_word_on_the_likeliest(
    noisy: bool, mapped: bool, vocab: int
) -> None:
    """The head is told wrong logits; those of its eight likeliest become what the exact rows
    say.
    """
    weight, x, norm = bf16_values(vocab, 64), randn(4, 64, seed=1), 1 + randn(64, seed=2).abs()
    head = HeadTop(weight + 0.05 * randn(vocab, 64, seed=3), norm, noisy, mapped)
    told, _, _ = head.run(x, 2)
    refined, ids, probs = head.run(x, 2, exact=weight.to(torch.bfloat16))
    true = reference.rms_norm(x.double(), norm.double(), 1e-5) @ weight.double().T
    if noisy:
        true += head.added()
    likeliest = told.topk(min(8, vocab)).indices
    expected = told.double().scatter(1, likeliest, true.gather(1, likeliest))
    torch.testing.assert_close(refined.double(), expected, rtol=1e-5, atol=1e-5)
    best, places = torch.softmax(refined.double(), -1).topk(2)
    assert ids.tolist() == places.tolist()
    assert np.allclose(probs, best.numpy(), rtol=1e-5)
