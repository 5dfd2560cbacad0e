"""A GGUF file as a model with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from multirate.loading.gguf.config import architecture_of, read_config
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.tokenizer import ends, load_tokenizer
from multirate.loading.gguf.weights import load_weights
from multirate.torch_modes import own_modes


@own_modes()
def load_gguf(
    path: Path, dtype: torch.dtype | None = torch.bfloat16, experts: bool = True
) -> tuple[Any, Any]:
    """(causal LM, tokenizer) of a GGUF file: chat template and the ids that end a text from the
    file, weights as `load_weights` makes them: in the file (dtype None), or dequantised. Raises
    UserError naming what cannot be read or is not supported.
    """
    file = GgufFile(path)
    architecture_of(file)
    tokenizer = load_tokenizer(file)
    model = load_weights(file, read_config(file), dtype, experts)
    end = ends(file, tokenizer)
    model.generation_config.eos_token_id = end[0] if len(end) == 1 else end or None
    model.config.name_or_path = path.stem
    model.config.architectures = [type(model).__name__]
    return model, tokenizer


def load_tokenizer_of(path: Path) -> tuple[Any, int]:
    """(tokenizer, size of the vocabulary) of a GGUF file. Raises UserError as `load_gguf`."""
    file = GgufFile(path)
    architecture_of(file)
    return load_tokenizer(file), int(read_config(file).vocab_size)
