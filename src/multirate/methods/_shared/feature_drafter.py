"""Drafts of a FeatureBranch (EAGLE, EAGLE-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.branch_drafter import BranchDrafter
from multirate.methods._shared.draft_runner import DraftRunner, packed_where_possible
from multirate.methods._shared.feature_branch import FeatureBranch
from multirate.runtime.captured import Level
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache


class FeatureRunner(DraftRunner):
    """Runs the branch with its torch modules. It reads embeddings and carried features only:
    verification begins at layer 0.
    """

    keys_only = True

    def __init__(self, decoder: Decoder, branch: FeatureBranch) -> None:
        self.decoder = decoder
        self.module = branch.to(device=decoder.info.device, dtype=decoder.info.dtype).eval()
        self.taps = branch.taps
        self._capture_on(decoder)

    def begin(self, cache: KVCache) -> None:
        self._begin(cache, self.module.attn)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        assert carried is not None
        dtype = self.decoder.info.dtype
        p = level.own(self.module.rows, embedded.to(dtype), carried.to(dtype))
        return embedded, p.to(embedded.dtype)

    @torch.no_grad()
    def logits(self, p: Tensor) -> Tensor:
        return self.module.logits(self.decoder, p)


class FeatureDrafter(BranchDrafter):
    """Trees of a FeatureBranch's likeliest tokens, as of the other draft branches."""

    def __init__(self, decoder: Decoder, branch: FeatureBranch, config: BranchDecodeConfig) -> None:
        runner = FeatureRunner(decoder, branch)
        fastest = packed_where_possible(runner, branch.branch, config.weights)
        super().__init__(decoder, fastest, config)
