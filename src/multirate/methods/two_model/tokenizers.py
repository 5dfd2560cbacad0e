"""Whether two tokenizers give every id the same meaning."""

from __future__ import annotations

from typing import Any

from multirate.errors import UserError


def check_same(draft: Any, base: Any, name: str) -> None:
    """UserError naming the first difference between the draft model's tokenizer and the base
    model's: in the vocabulary, or in the special tokens. name: the draft model's.
    """
    if base is None or draft is None:
        whose = "base" if base is None else "draft"
        raise UserError(
            f"drafts of {name} need both models' tokenizers, but the {whose} model has none; use "
            "attach(model, tokenizer=…) with a draft model that has one"
        )
    theirs, ours = draft.get_vocab(), base.get_vocab()
    for token in sorted(theirs.keys() | ours.keys(), key=lambda t: (ours.get(t, 1 << 40), t)):
        if theirs.get(token) != ours.get(token):
            raise UserError(
                f"{name} has another tokenizer than the base model: token {token!r} is "
                f"{_number(theirs, token)} there and {_number(ours, token)} here; use a draft "
                "model with the same tokenizer"
            )
    there, here = draft.special_tokens_map, base.special_tokens_map
    for role in sorted(there.keys() | here.keys()):
        if there.get(role) != here.get(role):
            raise UserError(
                f"{name} has another tokenizer than the base model: its {role} is "
                f"{there.get(role)!r} there and {here.get(role)!r} here; use a draft model with "
                "the same tokenizer"
            )


def _number(vocabulary: dict[str, int], token: str) -> str:
    return f"number {vocabulary[token]}" if token in vocabulary else "unknown"
