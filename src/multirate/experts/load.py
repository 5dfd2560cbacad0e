"""A mixture of experts by name, without its experts, which stay in a store on disk."""

from __future__ import annotations

import os

from transformers import AutoTokenizer

from multirate.experts.model import OffloadedExperts, load_without_experts
from multirate.experts.shards import Shards
from multirate.experts.store import ExpertStore
from multirate.hub import ACCELERATOR_FILES, LoadedModel, explained, find_device, model_folder
from multirate.torch_modes import own_modes

PREDICTOR = "predictor"
"""Folder beside a mixture's own files that holds its predictor of experts, if it has one."""


@own_modes()
def load_offloaded(name: str, experts: str | os.PathLike[str], device: str = "auto") -> LoadedModel:
    """A mixture-of-experts model without its experts, which stay in the store `experts`; `.experts`
    leads to them. On a GPU the store is read into pinned RAM, and experts go from there to the GPU.

    In the checkpoint's dtype. A predictor in the model's own folder `predictor` is added. Raises
    UserError as load_model and ExpertStore.open do.
    """
    place, folder = find_device(device), model_folder(name)
    with Shards(folder) as shards:
        store = ExpertStore.open(experts, shards.revision())
    with explained(f"model {name}"):
        model = load_without_experts(folder, place)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    offloaded = OffloadedExperts(model, store)
    if (folder / PREDICTOR / ACCELERATOR_FILES[0]).is_file():
        offloaded.add(folder / PREDICTOR)
    return LoadedModel(model, tokenizer, name, offloaded)
