"""Prompts in any accepted form, as lists of token ids."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from multirate.errors import UserError

_ACCEPTED = (
    'lists of token ids, such as [tokenizer(text)["input_ids"]] for one text, or what a tokenizer '
    'returns with return_tensors="pt"'
)
_UNPADDED = (
    "pass lists of token ids without padding, or the tokenizer's whole output, whose attention "
    "mask marks the padding"
)


def as_lists(prompts: Any, padding: int | None = None) -> list[list[int]]:
    """Lists of token ids from lists, from tensors and arrays (one prompt each, or [prompts,
    tokens]), or from a tokenizer's output with its attention mask.

    padding: the id that the tokenizer pads with. Raises UserError for everything else, and for rows
    of equal length that begin or end with padding without a mask.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise UserError(f"the prompts have no input_ids; accepted: {_ACCEPTED}")
        mask = prompts.get("attention_mask")
        if mask is None:
            return as_lists(prompts["input_ids"], padding)
        return _unmasked(as_lists(prompts["input_ids"]), _masks(mask))
    array = _array(prompts)
    if array is not None and array.ndim != 2:
        raise UserError(
            f"the prompts are a tensor of shape {list(array.shape)}; accepted: tensors [prompts, "
            f"tokens], and {_ACCEPTED}"
        )
    if array is None and (isinstance(prompts, str) or not isinstance(prompts, Sequence)):
        raise UserError(f"the prompts are {reprlib.repr(prompts)}; accepted: {_ACCEPTED}")
    rows = [as_list(number, row) for number, row in enumerate(prompts if array is None else array)]
    _check_unpadded(rows, padding, least=2 if array is None else 1)
    return rows


def as_list(number: int, prompt: Any) -> list[int]:
    """One prompt's token ids. Raises UserError for anything else."""
    array = _array(prompt)
    if array is not None:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(
                f"prompt {number} is {array.dtype} of shape {list(array.shape)}; accepted: "
                f"{_ACCEPTED}"
            )
        ids: list[int] = array.tolist()
        return ids
    try:
        tokens = list(prompt)  # which may be an iterator
        if isinstance(prompt, str) or bool in set(map(type, tokens)):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except (TypeError, RuntimeError):  # RuntimeError: an element is a tensor of several
        raise UserError(
            f"prompt {number} is {reprlib.repr(prompt)}; accepted: {_ACCEPTED}"
        ) from None


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() else value).numpy()
        except (RuntimeError, TypeError):  # without numbers (meta), or with others than these
            raise UserError(
                f"the prompts are a tensor of {value.layout} on {value.device}; accepted: plain "
                f"tensors [prompts, tokens], and {_ACCEPTED}"
            ) from None
    return value if isinstance(value, np.ndarray) else None


def _masks(mask: Any) -> list[list[int]]:
    """An attention mask's rows of 0 and 1, from whole numbers, truth values or floats. Raises
    UserError for anything else.
    """
    array = _array(mask)
    try:
        rows = [list(row) for row in (mask if array is None else array.tolist())]
        if all(value in (0, 1) for row in rows for value in row):
            return [list(map(int, row)) for row in rows]
    except (TypeError, ValueError, RuntimeError):  # no rows, or rows of something else
        pass
    raise UserError(
        f"the prompts' attention mask is {reprlib.repr(mask)}; accepted: rows of 0 and 1, one "
        "value per token of input_ids"
    )


def _unmasked(rows: list[list[int]], masks: list[list[int]]) -> list[list[int]]:
    """The tokens of each row that its mask keeps."""
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise UserError("the prompts' attention mask does not have the shape of their input_ids")
    found = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        kept = [place for place, keep in enumerate(mask) if keep]
        if kept != list(range(kept[0], kept[-1] + 1) if kept else ()):
            raise UserError(
                f"the attention mask of prompt {number} has a gap; accepted: padding on the left "
                "and on the right only"
            )
        found.append([row[place] for place in kept])
    return found


def _check_unpadded(rows: list[list[int]], padding: int | None, least: int) -> None:
    """Detects padding without a mask. Rows of equal length are padded if one has more padding at an
    end than another, or more than one. A single padding token at the same end of every row is how
    the texts begin or end.

    least: how many padding tokens at an end are too many if another row has fewer; more for lists,
    which need no padding, than for tensors.
    """
    if padding is None or len({len(row) for row in rows}) != 1:
        return
    for side, step in (("begins", 1), ("ends", -1)):
        runs = [_run(row[::step], padding) for row in rows]
        most, fewest = max(runs), min(runs)
        if (most >= least and most > fewest) or (least == 1 and most > 1):
            raise UserError(
                f"prompt {runs.index(most)} {side} with padding (token {padding}), which the "
                f"model would read as text; {_UNPADDED}"
            )


def _run(row: list[int], token: int) -> int:
    """How many times `token` occurs at the start of the row."""
    return next((count for count, found in enumerate(row) if found != token), len(row))
