"""A mixture of experts by name, without its experts, which stay in a store on disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer

from multirate.experts.layout import NATIVE
from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.shards import Shards
from multirate.experts.store import ExpertStore
from multirate.loading.explained import explained
from multirate.loading.hub import LoadedModel, find_device, model_files
from multirate.loading.names import ACCELERATOR_FILES
from multirate.torch_modes import own_modes

PREDICTOR = "predictor"
"""Folder beside a mixture's own files that holds its predictor of experts, if it has one."""


@own_modes()
def load_offloaded(
    name: str, experts: str | os.PathLike[str], device: str = "auto", expand: bool = False
) -> LoadedModel:
    """A mixture-of-experts model without its experts, which stay in the store `experts`; `.experts`
    leads to them. On a GPU the store is read into pinned RAM, and experts go from there to the GPU.

    In the checkpoint's dtype, and in bfloat16 with a store for the kernel. What else is in a GGUF
    file stays as it is there, unless the model's own modules run it, on a GPU or with `expand`. A
    predictor in the model's own folder `predictor` is added. Raises UserError as load_model and
    ExpertStore.open do.
    """
    place, source = find_device(device), model_files(name)
    if source.is_file():
        return _of_file(source, name, experts, place, expand)
    with Shards(source) as shards:
        store = ExpertStore.open(experts, shards.revision())
    dtype = torch.bfloat16 if store.index.layout == NATIVE else None
    with explained(f"model {name}"):
        model = load_without_experts(source, place, dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
    offloaded = OffloadedExperts(model, store)
    if (source / PREDICTOR / ACCELERATOR_FILES[0]).is_file():
        offloaded.add(source / PREDICTOR)
    return LoadedModel(model, tokenizer, name, offloaded)


def _of_file(
    path: Path, name: str, experts: str | os.PathLike[str], place: torch.device, expand: bool
) -> LoadedModel:
    """Of a GGUF file."""
    from multirate.loading.gguf.file import GgufFile
    from multirate.loading.gguf.load import load_gguf

    with explained(f"model {path}"):
        store = ExpertStore.open(experts, GgufFile(path).identity())
        whole = expand or place.type != "cpu"
        model, tokenizer = load_gguf(path, torch.bfloat16 if whole else None, experts=False)
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(place))
    return LoadedModel(model, tokenizer, name, OffloadedExperts(model, store))
