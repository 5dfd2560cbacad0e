"""What may be a prompt, and what is refused: never another text without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lab.bench import tiny_model

from multirate.decoding.prompts import as_lists
from multirate.engine import attach
from multirate.errors import UserError

PAD = 0
ROWS = [[5, 6, 7], [8, 9, 4]]


@pytest.mark.parametrize(
    "prompts",
    [
        ROWS,
        tuple(map(tuple, ROWS)),
        torch.tensor(ROWS),
        torch.tensor(ROWS, dtype=torch.int32),
        np.array(ROWS),
        np.array(ROWS, np.uint8),
        [torch.tensor(row) for row in ROWS],
        [np.array(row) for row in ROWS],
        [list(torch.tensor(row)) for row in ROWS],
        [list(np.array(row)) for row in ROWS],
        {"input_ids": ROWS, "token_type_ids": ROWS},
        {"input_ids": torch.tensor(ROWS), "attention_mask": torch.ones(2, 3, dtype=torch.long)},
    ],
)
def test_forms_of_the_same_prompts(prompts: Any) -> None:
    found = as_lists(prompts, PAD)
    assert found == ROWS and all(type(token) is int for row in found for token in row)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (torch.tensor([5, 6]), r"shape \[2\]"),
        (torch.tensor(5), r"shape \[\]"),
        (torch.ones(1, 2, 3, dtype=torch.long), r"shape \[1, 2, 3\]"),
        ([torch.tensor([[5, 6]])], r"prompt 0 is int64 of shape \[1, 2\]"),
        ([torch.tensor(5)], r"prompt 0 is int64 of shape \[\]"),
        (torch.tensor([[5.0, 6.0]]), "prompt 0 is float32"),
        (torch.tensor([[5.0, 6.0]], dtype=torch.bfloat16), "prompt 0 is float32"),
        (torch.tensor([[True, False]]), "prompt 0 is bool"),
        ([np.array([5.0])], "prompt 0 is float64"),
        ([np.array(["a"])], "prompt 0 is <U1"),
        ([[5, 6.0]], r"prompt 0 is \[5, 6.0\]"),
        ([[5], [True]], "prompt 1 is"),
        ([[5], "text"], "prompt 1 is 'text'"),
        ([[5], None], "prompt 1 is None"),
        ([5, 6], "prompt 0 is 5"),
        ("text", "are 'text'"),
        (5, "are 5"),
        (None, "are None"),
        ({"ids": ROWS}, "no input_ids"),
        ({"input_ids": ROWS, "attention_mask": [[1, 1, 1]]}, "does not have the shape"),
        ({"input_ids": ROWS, "attention_mask": [[1, 0, 1], [1, 1, 1]]}, "prompt 0 has a gap"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_lists(prompts, PAD)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[5, 6, 7], [PAD, PAD, 8]], "prompt 1 begins with padding .token 0."),
        ([[PAD, 6, 7], [5, 6, 7]], "prompt 0 begins"),
        ([[5, 6, 7], [8, PAD, PAD]], "prompt 1 ends"),
        ([[PAD, PAD, 8]], "prompt 0 begins"),
        ([[PAD, PAD], [PAD, PAD]], "prompt 0 begins"),
    ],
)
def test_padding_without_a_mask_is_refused(rows: list[list[int]], words: str) -> None:
    for prompts in (torch.tensor(rows), np.array(rows), {"input_ids": torch.tensor(rows)}):
        with pytest.raises(UserError, match=words):
            as_lists(prompts, PAD)
    assert as_lists(torch.tensor(rows)) == rows  # nothing is known of padding
    ones = torch.ones(len(rows), len(rows[0]), dtype=torch.int64)
    whole = {"input_ids": torch.tensor(rows), "attention_mask": ones}
    assert as_lists(whole, PAD) == rows  # the mask says that it is text


@pytest.mark.parametrize("kind", [bool, int, float])
def test_a_mask_may_be_of_truth_values_or_floats(kind: type) -> None:
    mask = [[kind(keep) for keep in (0, 1, 1)], [kind(1)] * 3]
    for one in (mask, torch.tensor(mask), np.array(mask), [torch.tensor(row) for row in mask]):
        found = as_lists({"input_ids": [[PAD, 5, 6], [7, 8, 9]], "attention_mask": one}, PAD)
        assert found == [[5, 6], [7, 8, 9]]


@pytest.mark.parametrize("mask", [[[1, 2, 1]], [[1.0, 0.5, 0.0]], [[0.0, -torch.inf, 0.0]], [1], 5])
def test_what_is_no_mask_is_called_the_mask(mask: Any) -> None:
    with pytest.raises(UserError, match=r"the prompts' attention mask is .*; accepted: rows"):
        as_lists({"input_ids": [[5, 6, 7]], "attention_mask": mask}, PAD)


def test_a_prompt_may_be_read_once_only() -> None:
    assert as_lists([iter([5, 6]), range(7, 9)]) == [[5, 6], [7, 8]]


def test_tensors_without_rows_of_numbers_are_refused() -> None:
    whole = torch.tensor([[5, 6]])
    for odd in (whole.to("meta"), whole.to_sparse()):
        for prompts in (odd, [odd], {"input_ids": odd}):
            with pytest.raises(UserError, match="accepted: plain tensors"):
                as_lists(prompts)


def test_padded_lists_are_refused_and_lists_that_begin_alike_are_not() -> None:
    with pytest.raises(UserError, match="prompt 1 begins"):
        as_lists([[5, 6, 7], [PAD, PAD, 8]], PAD)
    for fine in (
        [[PAD, 5, 6], [PAD, 7, 8]],  # how texts begin, where the tokenizer pads with that token
        [[PAD, 5], [7, 8]],
        [[PAD, PAD, 5], [7, 8]],
        [[PAD, PAD]],
    ):
        assert as_lists(fine, PAD) == fine
    assert as_lists(torch.tensor([[PAD, 5], [PAD, 6]]), PAD) == [[PAD, 5], [PAD, 6]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_engine_continues_a_padded_batch_as_its_prompts(side: str) -> None:
    words, model = tiny_model.tokenizer(), tiny_model.model()
    engine = attach(model, tokenizer=words)
    texts = ["a long prompt", "short"]
    prompts = [words(text)["input_ids"] for text in texts]
    want = engine.generate(prompts, stop=engine.stopping(8)).sequences
    words.padding_side = side
    batch = words(texts, padding=True, return_tensors="pt")
    assert engine.generate(batch, stop=engine.stopping(8)).sequences == want
    without = attach(model)  # the model's config knows the token as well
    for one in (engine, without):
        with pytest.raises(UserError, match=r"padding \(token 0\)"):
            one.generate(batch["input_ids"])
    alike = torch.tensor([prompts[0], prompts[0]])
    assert engine.generate(alike, stop=engine.stopping(8)).sequences == [want[0]] * 2
