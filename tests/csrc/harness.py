"""The kernel's functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.formats import WeightFormat
from multirate.runtime.native.packing import Owner


def bf16_values(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Random numbers that bf16 holds exactly, as float32."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(torch.bfloat16).float()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def selection(outputs: int, inputs: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Weights of which each output has one, a power of two of either sign: products with them are
    exact. scale: for callers that give one to random weights; not used.
    """
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, inputs, (outputs, 1), generator=generator)
    steps = torch.randint(-1, 2, (outputs, 1), generator=generator).float()
    signs = torch.randint(0, 2, (outputs, 1), generator=generator).float() * 2 - 1
    return torch.zeros(outputs, inputs).scatter(1, at, signs * 2.0**steps)


def pointer(tensor: Tensor | None) -> abi.CData:
    return abi.at(None if tensor is None else tensor.data_ptr())


def linear(
    weight: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    into: Tensor | None = None,
    threads: int = 2,
    format: WeightFormat | None = None,
    twelve_bits: bool = True,
) -> Tensor:
    """mr_linear: x [N, in] → [N, out], added to `into` where given. format: of the packed weights;
    None: INT16, or INT12. twelve_bits: as of `Owner`.
    """
    owner = Owner(format, twelve_bits=twelve_bits)
    workspace = library.Workspace(threads)
    packed = owner.linear(weight, bias)
    y = torch.empty(len(x), packed.outputs)
    if into is not None:
        y[:, : len(weight)] = into
    library.kernel().mr_linear(
        workspace.address,
        packed,
        pointer(x.contiguous()),
        pointer(norm),
        eps,
        len(x),
        pointer(y),
        into is not None,
    )
    return y[:, : len(weight)]


def embedding_of(decoder: NativeDecoder) -> Tensor:
    """The rows that a decoder embeds tokens with, bf16 [vocab, hidden], in their own memory."""
    table, hidden = decoder.branch().table, decoder.info.hidden_size
    memory = abi.ffi.buffer(table.rows, table.vocab * hidden * 2)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(table.vocab, hidden)
