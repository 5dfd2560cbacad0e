"""EAGLE-3 as a drafter: trees of its layer's likeliest tokens, as of the other trained streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multirate.methods.common.feature_runner import NativeFeatureRunner
from multirate.methods.common.fused_steps import DraftHead
from multirate.methods.common.stream_drafter import StreamDrafter
from multirate.methods.eagle3.config import Eagle3DecodeConfig
from multirate.methods.eagle3.modules import Eagle3Layer
from multirate.model.decoder import Decoder
from multirate.model.native import abi, library
from multirate.model.native.packing import Owner


class NativeEagle3Runner(NativeFeatureRunner):
    """Attention reads the embedding beside x; what is carried is a product of the taps."""

    stream: Eagle3Layer

    def layer_norms(self, owner: Owner) -> dict[str, Any]:
        beside = owner.floats(self.stream.embedding_norm.weight)
        carried = owner.floats(self.stream.carried_norm.weight)
        if self.stream.config.norm_before_residual:
            return {"norm_beside": beside}
        return {"norm_beside": beside, "norm_attention": carried}

    def draft_head(self, owner: Owner) -> DraftHead:
        tokens = self.stream.draft_tokens
        ids = None if tokens is None else tokens.cpu().to(torch.int64).contiguous()
        return DraftHead(
            owner.linear(self.stream.head.weight),
            len(self.stream.head.weight),
            owner.address(ids),
            owner.floats(self.stream.norm.weight),
            None if ids is None else ids.tolist(),
        )

    def stream_fields(self, owner: Owner) -> dict[str, Any]:
        # residuals of single channels are far above the others: 16 bits, once a step
        self._exact = Owner()
        self._features = self._exact.linear(self.stream.features())
        before = self.stream.config.norm_before_residual
        return {
            "taps": list(self.taps),
            "tap_count": len(self.taps),
            "features": self._features,
            "norm_in": owner.floats(self.stream.carried_norm.weight) if before else None,
        }

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        x = torch.cat([taps[layer] for layer in self.taps], dim=-1).float().contiguous()
        y = torch.empty(len(x), self.decoder.info.hidden_size)
        library.kernel().mr_linear(
            self.decoder.workspace.address,
            self._features,
            abi.at(x.data_ptr()),
            abi.NULL,
            0.0,
            len(x),
            abi.at(y.data_ptr()),
            0,
        )
        return y


class Eagle3Drafter(StreamDrafter):
    """Drafts with an Eagle3Layer."""

    def __init__(
        self, decoder: Decoder, layer: Eagle3Layer, config: Eagle3DecodeConfig | None = None
    ) -> None:
        config = config or Eagle3DecodeConfig()
        runner = NativeEagle3Runner.where_supported(decoder, layer, config.weights)
        super().__init__(decoder, runner, config)
