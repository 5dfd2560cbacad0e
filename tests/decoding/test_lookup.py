"""Looking the end of a text up in itself: the index against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.ngram import TextIndex

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


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


def test_a_text_that_repeats_itself_goes_on_as_long_as_asked() -> None:
    assert TextIndex(3).look_up([9, 1, 2, 3, 1, 2, 3], 8) == ([1, 2, 3, 1, 2, 3, 1, 2], 3)
