"""How fast this machine reads memory, and how much of that plain decoding uses."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from multirate.lab.bench.rows import Row
from multirate.methods.spec import PLAIN
from multirate.runtime.decoder import Decoder
from multirate.runtime.quantised import weight_bytes, weight_of

BYTES = 256 << 20  # far beyond every cache
ROUNDS = 7


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes per second: the best of a few sums over 256 MB, on torch's threads."""
    data = torch.ones(BYTES // 8, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(ROUNDS):
        start = perf_counter()
        data.sum().item()
        best = min(best, perf_counter() - start)
    return BYTES / best


def bytes_per_step(model: Any, decoder: Decoder | None = None) -> int | None:
    """Weights that one token's pass reads: all parameters, but of an embedding that is no head one
    row only, and what `decoder` reads fewer bytes of: a head by its copy in 8 bits, weights in 12.
    None for a mixture of experts, which reads what its router says.
    """
    if any(".experts." in name for name, _ in model.named_parameters()):
        return None
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    total = weight_bytes(model)
    if head is None or head.weight is not embedding.weight:
        total -= weight_of(embedding).nbytes
    return total if decoder is None else total - decoder.unread_bytes


def share_of(read: float, weights: int | None, rows: Sequence[Row], batch: int = 1) -> float | None:
    """Of `read` bytes per second, the share that our plain loop's passes (prefills apart, each for
    `batch` tokens) read; None where either is unknown.
    """
    plain = next((row for row in rows if row.method == PLAIN), None)
    if plain is None or weights is None or plain.decode_tokens_per_second is None:
        return None
    return plain.decode_tokens_per_second / batch * weights / read
