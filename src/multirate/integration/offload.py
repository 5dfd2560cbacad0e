"""`offload`: a transformers model whose experts are on disk, for code that calls
`model.generate`.
"""

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
    """Loads a mixture of experts whose experts are read from a store as they are needed, and
    returns the transformers model.

        model = multirate.offload("path/to/model", "path/to/store", memory="2GB")
        model.generate(**inputs, custom_generate=multirate.custom_generate())

    model: folder, GGUF file or hub id.
    experts: the store; `multirate pack` makes it.
    memory: memory for experts, such as "2GB"; None: all of them.
    policy: see experts/named_policies.py.
    predictor: folder or hub id of a predictor from `multirate train --objective experts`.

    The model's `generate` works as usual; with `custom_generate` it is faster. A predictor's own
    folder as `custom_generate` adds that predictor. Raises UserError for a model, store or
    predictor that cannot be used.
    """
    loaded = load_offloaded(os.fspath(model), experts, expand=True)
    assert loaded.experts is not None
    if predictor is not None:
        loaded.experts.add(predictor)
    loaded.experts.use_policy(policy, memory)
    return loaded.model
