"""A trained decoder layer with its own keys and values (layers.py), packed for the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multirate.methods._shared.layers import OwnAttention, SwiGLU
from multirate.runtime.native import NativeDecoder, abi
from multirate.runtime.native.own_layer import OwnLayer
from multirate.runtime.native.packing import Owner


def packed_layer(
    decoder: NativeDecoder,
    owner: Owner,
    attention: OwnAttention,
    mlp: SwiGLU | None,
    eps: float,
    norms: Mapping[str, int | None],
) -> OwnLayer:
    """x + attention, + mlp, if there is one. norms: the addresses of the fields of Layer that say
    what is read through which norms, all of epsilon `eps`.
    """
    fields: dict[str, Any] = dict(norms)
    if mlp is not None:
        fields["gate_up"] = owner.gate_up(mlp.gate.weight, mlp.up.weight)
        fields["down"] = owner.linear(mlp.down.weight)
    layer = abi.new(
        "Layer",
        qkv=owner.linear([attention.q.weight, attention.k.weight, attention.v.weight]),
        o=owner.linear(attention.o.weight),
        **fields,
    )
    return OwnLayer(
        decoder,
        owner,
        layer,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        intermediate=0 if mlp is None else mlp.gate.out_features,
        theta=attention.theta,
        eps=eps,
    )
