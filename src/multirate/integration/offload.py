"""A transformers model whose experts are on disk, for code that calls `model.generate`."""

from __future__ import annotations

import os
from typing import Any

from multirate.experts.load import load_offloaded
from multirate.torch_modes import own_modes


@own_modes()
def offload(
    model: str | os.PathLike[str],
    experts: str | os.PathLike[str],
    memory: str | int | None = None,
    policy: str = "aot",
    predictor: str | os.PathLike[str] | None = None,
) -> Any:
    """A mixture of experts by folder or hub id → the transformers model, its experts read from the
    store `experts`.

    memory: for experts, such as "2GB" (None: all). policy: see experts/named_policies.py.
    predictor: what `train --objective experts` made. Its `generate` works as ever, and faster with
    `custom_generate=multirate.custom_generate()`, which finds the store by itself; a predictor's
    own folder as `custom_generate` adds that predictor. Raises UserError for a model, store or
    predictor that cannot be used.
    """
    loaded = load_offloaded(os.fspath(model), experts)
    assert loaded.experts is not None
    if predictor is not None:
        loaded.experts.add(predictor)
    loaded.experts.use_policy(policy, memory)
    return loaded.model
