"""Looking the end of a text up in itself: indices against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.speculate.ngram import TextIndex
from multirate.decoding.speculate.suffix_automaton import MAX_NESTED, SuffixAutomaton
from multirate.decoding.speculate.text_source import TextSource

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
pieces = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)
"""Texts that grow by several tokens at once."""


def searched(text: list[int], drafted: list[int], longest: int, most: int) -> tuple[list[int], int]:
    whole = text + drafted
    for n in range(min(longest, len(whole)), 0, -1):
        for end in range(len(text) - 1, 0, -1):
            if end >= n and whole[end - n : end] == whole[-n:]:
                going_on = list(whole)
                while len(going_on) < end + most:
                    going_on.append(going_on[len(going_on) - (len(whole) - end)])
                return going_on[end : end + most], n
    return [], 0


@given(
    tokens,
    st.lists(st.integers(0, 3), max_size=5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 40),
)
def test_a_growing_index_finds_what_a_search_finds(
    text: list[int], drafted: list[int], longest: int, most: int, first: int
) -> None:
    index = TextIndex(longest)
    if first < len(text):
        index.look_up(text[:first], most)
    assert index.look_up(text, most, drafted) == searched(text, drafted, longest, most)


@given(pieces, st.lists(st.integers(0, 2), max_size=5), st.integers(1, 12), st.integers(1, 60))
def test_a_suffix_automaton_finds_the_longest_end_wherever_the_text_stops(
    pieces: list[list[int]], drafted: list[int], most: int, longest: int
) -> None:
    automaton, text = SuffixAutomaton(longest), []
    for piece in pieces:
        text += piece
        expected, matched = searched(text, drafted, len(text) + len(drafted), most)
        assert automaton.look_up(text, most, drafted) == (expected, min(matched, longest))


def test_ends_nested_more_deeply_than_are_renewed_are_still_the_longest() -> None:
    """The place may then be an earlier one; what followed there is what followed there."""
    automaton, count = SuffixAutomaton(10_000), 3 * MAX_NESTED
    text = [7] * count
    assert automaton.look_up(text, 3) == ([7, 7, 7], count - 1)
    text += [8, *[7] * (count // 2), 9, 7, 7]
    assert automaton.look_up(text, 1)[1] == 2
    assert automaton.look_up([*text, 7], 1)[0][0] in (7, 8, 9)


@pytest.mark.parametrize("source", [TextIndex, SuffixAutomaton])
def test_a_text_that_repeats_itself_goes_on_as_long_as_asked(source: type[TextSource]) -> None:
    assert source(3).look_up([9, 1, 2, 3, 1, 2, 3], 8) == ([1, 2, 3, 1, 2, 3, 1, 2], 3)
