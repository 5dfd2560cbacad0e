"""Every method that drafts gives the model's own greedy text in fp32, whatever the prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from multirate.engine import Engine, attach
from multirate.methods import spec
from multirate.methods._shared.shape import BaseShape
from multirate.training.checkpoint import Accelerator

from .tiny import SHAPE, VOCAB, base, disturb

NEW_TOKENS = 10
BATCH = 38
CONTEXT = SHAPE["max_position_embeddings"]
END = 30  # the model often says it
DRAFTING = [
    name
    for name, known in spec.all_specs().items()
    if known.role == "drafter" and known.lossless and name != spec.PLAIN
]


def odd_prompts() -> list[list[int]]:
    """228 of them: what a tokenizer seldom gives, or a user seldom asks."""
    generator = torch.Generator().manual_seed(5)

    def some(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    prompts = [[token] for token in range(VOCAB)]  # one token, pad, begin and end among them
    prompts += [[token] * length for token in (0, 1, END, 17) for length in (2, 7, 16, 33, 64, 100)]
    prompts += [some(3) * times for times in (2, 5, 11, 30)]
    prompts += [
        [*some(5), END, *some(n)] for n in (0, 1, 5, 20)
    ]  # an end in its middle, at its end
    prompts += [[0] * n + some(4) for n in (1, 5, 40)]  # padding that is part of the prompt
    prompts += [list(range(VOCAB)), list(range(VOCAB))[::-1], list(range(VOCAB)) * 2]
    prompts += [some(CONTEXT - n) for n in (1, 2, 3, 5, 9, 10, 11)]  # where the context ends
    prompts += [2 * some(length) for length in range(1, 50, 2)]  # what follows once followed before
    prompts += [some(length) for length in (2, 3, 5, 11, 24, 48, 96) for _ in range(14)]
    return prompts[:228]


@cache
def model() -> Any:
    made = base()
    made.generation_config.eos_token_id = END
    return made


@cache
def expected() -> list[list[int]]:
    """transformers' own answers; prompts of one length together, as nothing is padded then."""
    prompts = odd_prompts()
    answers: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[i] for i in which])
        found = model().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(NEW_TOKENS, CONTEXT - length),
            do_sample=False,
        )
        for i, answer in zip(which, found[:, length:].tolist(), strict=True):
            answers[i] = answer[: answer.index(END) + 1] if END in answer else answer
    return answers


def words() -> PreTrainedTokenizerFast:
    """A tokenizer for the models' vocabulary: a number is its own id."""
    vocabulary = {str(number): number for number in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)))


def save_relative(folder: Path) -> str:
    """A model with the same tokenizer and nearly the same weights, for methods with a second
    one.
    """
    relative = base()
    disturb(relative, 0.02)
    relative.save_pretrained(folder)
    words().save_pretrained(folder)
    return str(folder)


def engine_with(name: str) -> Engine:
    """Trained methods with random modules: most of their drafts are wrong, some are not."""
    engine = attach(model(), backend="hf", tokenizer=words())
    training = spec.find(name).training
    if training is not None:
        shape = BaseShape.of(model().config)
        config = training.config_for(shape)
        torch.manual_seed(2)
        module = training.build(config, shape)
        disturb(module, 0.05)
        engine.add(Accelerator(name, config, module.eval().requires_grad_(False), {}))
    return engine


def test_the_prompts_are_as_odd_as_they_are_many() -> None:
    prompts, answers = odd_prompts(), expected()
    assert len(prompts) == 228
    assert sum(END in answer for answer in answers) > 20  # they end within a draft
    assert len({tuple(answer) for answer in answers}) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTING)
def test_odd_prompts_get_the_models_own_answers(name: str, tmp_path: Path) -> None:
    engine, prompts, found = engine_with(name), odd_prompts(), []
    settings = spec.find(name).settings
    method = name
    if settings and "confidence" in settings.names():
        method += ":confidence=0"  # random modules are never sure
    if settings and "draft_threshold" in settings.names():
        method += ":depth=3:draft_threshold=0:verify_threshold=0"  # nor do their drafts pay
    if spec.find(name).second_model is not None:
        method += f":draft={save_relative(tmp_path)}"
    drafted = 0
    for start in range(0, len(prompts), BATCH):
        output = engine.generate(
            prompts[start : start + BATCH],
            stop=engine.stopping(NEW_TOKENS),
            method=method,
            speculate="always",
        )
        found += output.sequences
        drafted += output.stats.drafted
    assert found == expected()
    assert drafted > 228
