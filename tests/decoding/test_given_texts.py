"""Given texts: what is found in them, in Python and in the kernel, and the files they come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from decoding.helpers import oracle, reference, tiny
from decoding.invariants import check_invariants
from multirate.decoding.loop import generate
from multirate.decoding.speculate.given_texts import (
    LEAST,
    LONGEST,
    SORTED_BY,
    GivenTexts,
    WithGivenTexts,
)
from multirate.decoding.speculate.ngram import TextIndex
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.speculate.suffix_automaton import SuffixAutomaton
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.spec import find
from multirate.runtime.native import abi, library

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    """Where part begins in tokens."""
    return [i for i in range(len(tokens)) if tokens[i : i + len(part)] == part]


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 20))
def test_what_is_found_is_the_longest_end_and_what_follows_it_most_often(
    texts: list[list[int]], end: list[int], most: int
) -> None:
    made, tokens = GivenTexts.of(texts, 4), [token for text in texts for token in text]
    assert made.tokens.tolist() == tokens
    beginnings = [tokens[place : place + SORTED_BY] for place in made.order]
    assert beginnings == sorted(beginnings)
    found, matched = made.look_up(end, most)
    ends = [n for n in range(1, min(LONGEST, len(end)) + 1) if occurrences(tokens, end[-n:])]
    longest = max(ends, default=0)
    if longest < LEAST:
        assert (found, matched) == ([], 0)
        return
    assert matched == longest and len(found) == most
    places = [place + longest for place in occurrences(tokens, end[-longest:])]
    after = [[tokens[(place + j) % len(tokens)] for j in range(most)] for place in places]
    assert found in after
    ended = [place for place in places if place == len(tokens)]
    firsts = [tokens[place] for place in places if place < len(tokens)]
    for token in set(firsts):
        if firsts.count(token) > len(firsts) / 2 + len(ended):
            assert found[0] == token


@settings(max_examples=200, deadline=None)
@given(
    TOKENS,
    TOKENS.filter(bool),
    st.lists(st.integers(0, 4), max_size=5),
    st.integers(1, 12),
    st.integers(0, 6),
    st.booleans(),
)
def test_the_kernel_finds_the_same(
    texts: list[int],
    read: list[int],
    drafted: list[int],
    most: int,
    longest: int,
    automatic: bool,
) -> None:
    kernel, made = library.kernel(), GivenTexts.of([texts], 5)
    whole = np.array(read + drafted, np.int32)
    memory = np.empty(kernel.mr_automaton_words(len(read)), np.int32)
    automaton = abi.new("Automaton", memory=abi.ints(memory), room=len(read))
    kernel.mr_automaton_clear(automaton)
    packed = abi.new(
        "GivenTexts",
        tokens=abi.ints(made.tokens),
        order=abi.ints(made.order),
        count=len(made.tokens),
    )
    text = abi.new("Text", tokens=abi.ints(whole), count=len(read), given=packed)
    if automatic:
        text.automaton = automaton
    found = np.zeros(most, np.int64)
    own = SuffixAutomaton(longest) if automatic else TextIndex(longest)
    expected, told = WithGivenTexts(own, made).look_up(read, most, drafted)
    assert kernel.mr_look_up(text, len(drafted), longest, most, abi.longs(found)) == (
        told if longest else 0
    )
    assert not told or not longest or found.tolist() == expected


def file_of(folder: Path, texts: list[list[int]], vocabulary: int = 13) -> str:
    path = folder / "texts.safetensors"
    GivenTexts.of(texts, vocabulary).save(path)
    return str(path)


METHODS = ("sam", "token_recycling:lookup=sam")


def drafter_of(name: str, decoder: Any, texts: str) -> Any:
    method, *options = name.split(":")
    chosen = dict(option.split("=") for option in options)
    chosen = {key: int(value) if value.isdigit() else value for key, value in chosen.items()}
    return find(method).make_drafter(decoder, settings={**chosen, "texts": texts})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("batch", [1, 2])
def test_texts_that_say_what_the_model_will_say_are_drafted_and_others_do_no_harm(
    name: str, batch: int, tmp_path: Path
) -> None:
    model, decoder = tiny()
    prompts = [[3, 7, 1], [5, 2, 8, 4]][:batch]
    answers = oracle(model, prompts, 30)
    noise = np.random.default_rng(1).integers(0, 13, 3000).tolist()
    steps = []
    said = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    for texts in (said, [noise]):
        out = generate(
            decoder,
            SpeculativeStep(drafter_of(name, decoder, file_of(tmp_path, texts))),
            prompts,
            stop=StopSettings(max_new_tokens=24),
            after_step=check_invariants,
        )
        for prompt, sequence in zip(prompts, out.sequences, strict=True):
            assert sequence == reference(model, prompt, 24)
        steps.append(out.stats.sequence_steps)
    assert steps[0] < min(0.4 * 24 * batch, steps[1])


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "texts.safetensors"
    made = GivenTexts.of([[1, 2, 3], [], [1, 2, 4]], 5)
    made.save(path)
    read = GivenTexts.load(path)
    assert read.look_up([9, 1, 2], 3) == made.look_up([9, 1, 2], 3) == ([4, 1, 2], 2)
    assert read.vocabulary == 5
    empty = GivenTexts.of([], 5)
    empty.save(path)
    assert GivenTexts.load(path).look_up([1, 2], 3) == ([], 0)

    path.write_bytes(b"not one")
    with pytest.raises(UserError, match=f"cannot read the texts in {path}"):
        GivenTexts.load(path)
    save_file({"tokens": made.tokens, "order": made.order}, path)
    with pytest.raises(UserError, match="is no file of texts: format None"):
        GivenTexts.load(path)
    for tokens, order, message in (
        (made.tokens + 3, made.order, r"tokens is int32 \[6\]; accepted: int32 \[6\], from 0 to 4"),
        (made.tokens, made.order + 1, r"order is int32 \[6\]; accepted: int32 \[6\], from 0 to 5"),
        (made.tokens, made.order[:4], r"order is int32 \[4\]; accepted: int32 \[6\]"),
        (made.tokens.astype(np.int64), made.order, r"tokens is int64 \[6\]; accepted: int32"),
    ):
        GivenTexts(tokens, order, 5).save(path)
        with pytest.raises(UserError, match=message):
            GivenTexts.load(path)


def test_settings_refuse(tmp_path: Path) -> None:
    _, decoder = tiny()
    with pytest.raises(
        UserError, match="there is no such file; accepted: a file that `multirate te"
    ):
        find("sam").make_drafter(decoder, settings={"texts": str(tmp_path / "none")})
    too_many = file_of(tmp_path, [[1, 2, 3]], 14)
    for method in ("sam", "token_recycling"):
        options = {"texts": too_many} | ({} if method == "sam" else {"lookup": "sam"})
        with pytest.raises(UserError, match="for a vocabulary of 14 tokens, but this model has 13"):
            find(method).make_drafter(decoder, settings=options)
    for method in ("token_recycling", "eagle", "m2r2"):
        with pytest.raises(UserError, match="texts need lookup=sam"):
            find(method).read_settings({"texts": too_many, "lookup": 0})
