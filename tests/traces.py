"""The residual stream of a whole pass, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.runtime.hf.layer_caches import RecordingKV
from multirate.runtime.hf.parts import ModelParts


@torch.no_grad()
def trace(parts: ModelParts, ids: Tensor) -> tuple[list[Tensor], RecordingKV]:
    """ids [B, T] → hidden[i] [B, T, d] entering layer i (the last before the final norm), and all
    K/V.
    """
    cache, position_ids = RecordingKV(), parts.position_ids(ids)
    with parts.attention():
        hidden = [parts.embed(ids, position_ids)]
        masks = parts.causal_masks(ids.shape[1], hidden[0].dtype)
        rotary = parts.position_embeddings(hidden[0], position_ids)
        for i in range(len(parts.layers)):
            hidden.append(parts.run_layer(i, hidden[-1], masks[i], position_ids, rotary, cache))
    return hidden, cache
