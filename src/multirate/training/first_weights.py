"""The weights that training starts from: a method's own, or those of an earlier accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import Training
from multirate.training.checkpoint import Accelerator
from multirate.training.data import Sample


def choose_draft_tokens(stream: nn.Module, samples: Sequence[Sample], vocab_size: int) -> None:
    """Fills a reduced draft head, if the method has one, with the tokens that responses use
    most.
    """
    tokens = getattr(stream, "draft_tokens", None)
    if isinstance(tokens, Tensor):
        counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
        for sample in samples:
            ids = torch.from_numpy(sample.ids[sample.response]).long()
            counts.scatter_add_(0, ids, torch.ones_like(ids))
        most = counts.sort(descending=True, stable=True).indices[: len(tokens)]
        tokens.copy_(most.sort().values)


def continue_from(
    before: Accelerator,
    stream: nn.Module,
    trained: Training,
    teacher: Teacher,
    other_tokens: bool,
    batches: Callable[[], Iterable[Any]],
) -> None:
    """Loads the weights of `before` into `stream`, whose config may differ.

    other_tokens: the reduced draft head (the base's own weights) was chosen anew from this run's
    data. batches: what parts that `before` lacks are fitted to. Raises UserError for an option that
    changes a shape.
    """
    given, wanted = before.module.state_dict(), stream.state_dict()
    if other_tokens:
        if "head.weight" in given:
            rows = _head_of_other_tokens(before, stream, teacher, given["head.weight"])
            given["head.weight"] = rows
        given.pop("draft_tokens", None)
        wanted.pop("draft_tokens", None)
    optional = trained.added.keys()
    added = {name.split(".")[0] for name in wanted.keys() - given.keys()} & optional
    left_out = {name.split(".")[0] for name in given.keys() - wanted.keys()} & optional
    wanted = {name: x for name, x in wanted.items() if name.split(".")[0] not in added}
    given = {name: x for name, x in given.items() if name.split(".")[0] not in left_out}
    for name in sorted(given.keys() | wanted.keys()):
        shapes = [tuple(each[name].shape) if name in each else None for each in (given, wanted)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"start_from: an option needs '{name}' of shape {shapes[1] or 'none'}, but "
                f"the accelerator in {before.folder} has {shapes[0] or 'none'}; "
                "leave out options that change shapes"
            )
    stream.load_state_dict(given, strict=not (other_tokens or added))
    for part in sorted(added):
        trained.added[part](teacher, stream, batches())


def _head_of_other_tokens(
    before: Accelerator, stream: nn.Module, teacher: Teacher, rows: Tensor
) -> Tensor:
    """A draft head that was trained itself, over the tokens that this run has chosen: its rows
    where it had them, else the base's.
    """
    every_token = torch.arange(teacher.shape.vocab_size, device="cpu")
    old, new = (
        kept.cpu() if isinstance(kept := module.draft_tokens, Tensor) else every_token
        for module in (before.module, stream)
    )
    every = teacher.head.own_start().cpu()
    every[old] = rows.float()
    return every[new]
