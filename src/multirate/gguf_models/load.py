"""A GGUF file as a model with its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from multirate.errors import UserError, say_once
from multirate.gguf_models.config import architecture_of, ends, read_config
from multirate.gguf_models.file import GgufFile
from multirate.gguf_models.weights import load_weights
from multirate.torch_modes import own_modes

_KNOWN_SPLITS = {None, "gpt-2", "smollm"}
"""Ways to split text before merging that transformers' default is right for (SmolLM's vocabulary
has no token of two digits, so splitting these apart changes nothing).
"""


@own_modes()
def load_gguf(path: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(causal LM, tokenizer) of a GGUF file: weights dequantised to `dtype`, chat template and the
    ids that end a text from the file. Raises UserError naming what cannot be read or is not
    supported.
    """
    file = GgufFile(path)
    architecture_of(file)
    tokenizer = load_tokenizer(file)
    model = load_weights(file, read_config(file), dtype)
    end = ends(file)
    model.generation_config.eos_token_id = end[0] if len(end) == 1 else end or None
    model.config.name_or_path = path.stem
    model.config.architectures = [type(model).__name__]
    return model, tokenizer


def load_tokenizer_of(path: Path) -> tuple[Any, int]:
    """(tokenizer, size of the vocabulary) of a GGUF file. Raises UserError as `load_gguf`."""
    file = GgufFile(path)
    architecture_of(file)
    return load_tokenizer(file), int(read_config(file).vocab_size)


def load_tokenizer(file: GgufFile) -> Any:
    """The tokenizer that the file describes. UserError when there is none or it is not known."""
    if not isinstance(file.metadata.get("tokenizer.ggml.tokens"), list):
        raise UserError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens)")
    split = file.metadata.get("tokenizer.ggml.pre")
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in _known_splits():
        say_once(
            f"{file.path.name}: how its tokenizer splits text ({split!r}) is not known, it is "
            "split as GPT-2 does: some texts may get other tokens than the model was trained with"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        logging.getLogger(__name__).debug("tokenizer of %s", file.path, exc_info=True)
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(f"{file.path}: its tokenizer cannot be read: {first[:200]}") from error


def _known_splits() -> set[Any]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # before transformers 5.20 splits were not told apart
        return _KNOWN_SPLITS
    return _KNOWN_SPLITS | set(GGUF_PRE_TOKENIZER_SPLITS)
