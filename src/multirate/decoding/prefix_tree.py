"""Keys and values of prompts and answers, kept in blocks for prompts that begin with the same
tokens.

Blocks of 16 tokens form a tree: a block's path from the root is the text that it follows. Kept K/V
equal what a prefill of the same tokens writes, so no text depends on what is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multirate.runtime.kv_cache import KVCache

BLOCK = 16
"""Tokens of a block: what the kernel's K/V layout keeps together."""


@dataclass
class _Block:
    """A block of the tree. place: in the memory. key: its place in the tree."""

    place: int
    key: tuple[int, tuple[int, ...]]


class PrefixTree:
    """Blocks of K/V in bounded memory; the least recently used go first.

    caches: whose K/V are kept, all of the same sequences: the model's and, for example, a draft
    branch's.
    nbytes: the most memory to use.
    """

    def __init__(self, caches: Sequence[KVCache], nbytes: int) -> None:
        self._caches = list(caches)
        sizes = [_block_of(view) for cache in caches for view in cache.block_views(BLOCK)]
        self.block_bytes = sum(one.numel() * one.element_size() for one in sizes)
        self.most = max(nbytes, 0) // self.block_bytes
        self._memory = [
            _array(torch.empty((self.most, *one.shape), dtype=one.dtype, device=one.device))
            for one in sizes
        ]
        self._free = list(range(self.most - 1, -1, -1))
        # The oldest first. A use counts for a block after it has counted for those below it, so
        # the oldest block never has one below it.
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._at: dict[tuple[int, tuple[int, ...]], int] = {}
        self._numbers = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the kept K/V."""
        return len(self._blocks) * self.block_bytes

    def _path(self, tokens: Sequence[int]) -> list[int]:
        """The kept blocks that the tokens begin with."""
        path, above = list[int](), 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            found = self._at.get((above, tuple(tokens[first : first + BLOCK])))
            if found is None:
                break
            path.append(found)
            above = found
        return path

    def _used(self, path: Sequence[int]) -> None:
        for number in reversed(path):
            self._blocks.move_to_end(number)

    def shared(self, tokens: Sequence[int]) -> int:
        """How many first tokens are kept."""
        return len(self._path(tokens)) * BLOCK

    def restore(self, seq: int, tokens: Sequence[int]) -> int:
        """Writes the K/V of the first tokens that are kept into the caches' sequence, uncommitted;
        returns how many they are.
        """
        path = self._path(tokens)
        self._used(path)
        if not path:
            return 0
        count = len(path) * BLOCK
        places = [self._blocks[number].place for number in path]
        for cache in self._caches:
            cache.reserve(count)
        for view, kept in zip(self._views(), self._memory, strict=True):
            view[seq, :, : len(path)] = kept[places].swapaxes(0, 1)
        for cache in self._caches:
            cache.note_restored(seq, count)
        return count

    def keep(self, seq: int, tokens: Sequence[int]) -> None:
        """Keeps the K/V of these tokens, the first ones of the caches' sequence. A last block that
        is not full is left out.
        """
        path = self._path(tokens)
        self._used(path)
        first, count, needed = len(path), min(len(tokens) // BLOCK, self.most), set(path)
        for number in range(first, count):
            place = self._room(needed)
            if place is None:
                break
            self._numbers += 1
            above = path[-1] if path else 0
            key = above, tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
            self._blocks[self._numbers] = _Block(place, key)
            self._at[key] = self._numbers
            path.append(self._numbers)
            needed.add(self._numbers)
        self._used(path)
        places = [self._blocks[number].place for number in path[first:]]
        if places:
            for view, kept in zip(self._views(), self._memory, strict=True):
                kept[places] = view[seq, :, first : first + len(places)].swapaxes(0, 1)

    def _room(self, needed: set[int]) -> int | None:
        """A free place, the oldest block's if there is no other; None: all blocks are needed."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._blocks))
        if oldest in needed:
            return None
        block = self._blocks.pop(oldest)
        del self._at[block.key]
        return block.place

    def _views(self) -> list[Any]:
        return [_array(view) for cache in self._caches for view in cache.block_views(BLOCK)]


def _block_of(view: Tensor) -> Tensor:
    """One sequence's first block, [H, …]."""
    return view[0, :, 0]


def _array(values: Tensor) -> Any:
    """As numpy has it on the CPU, so that torch's threads stay out of the kernel's way."""
    if values.device.type != "cpu":
        return values
    return values.view(torch.int16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
