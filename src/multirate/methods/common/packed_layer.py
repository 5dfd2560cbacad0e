"""A trained decoder layer with its own keys and values (layers.py), packed for the kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from multirate.methods.common.layers import OwnAttention, SwiGLU
from multirate.model.native import NativeDecoder, abi
from multirate.model.native.own_layer import OwnLayer
from multirate.model.native.packing import Owner, interleave_gate_up


def packed_layer(
    decoder: NativeDecoder,
    owner: Owner,
    attention: OwnAttention,
    mlp: SwiGLU,
    eps: float,
    norms: Mapping[str, int | None],
) -> OwnLayer:
    """x + attention, + mlp. norms: the addresses of the fields of Layer that say what is read
    through which norms, all of epsilon `eps`.
    """
    layer = abi.new(
        "Layer",
        qkv=owner.linear(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])),
        o=owner.linear(attention.o.weight),
        gate_up=owner.linear(interleave_gate_up(mlp.gate.weight, mlp.up.weight)),
        down=owner.linear(mlp.down.weight),
        **norms,
    )
    return OwnLayer(
        decoder,
        owner,
        layer,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        intermediate=mlp.gate.out_features,
        theta=attention.theta,
        eps=eps,
    )
