"""Values of files from anywhere become a dataclass, or one sentence names the wrong one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.errors import UserError
from multirate.json_values import read_as

PATH = Path("some.json")


@dataclass(frozen=True)
class Example:
    name: str
    count: int
    share: float
    kind: Literal["a", 1] = "a"
    pairs: tuple[tuple[float, float], ...] = ()
    more: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.share > 1:
            raise UserError(f"share is {self.share}; accepted: at most 1")


GOOD: dict[str, Any] = {"name": "x", "count": 3, "share": 0.5}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_what_fits_is_read() -> None:
    assert read_as(Example, GOOD | {"later": 1}, PATH, "one") == Example("x", 3, 0.5)
    assert read_as(Example, GOOD | {"pairs": [[1, 2.5]]}, PATH, "one").pairs == ((1, 2.5),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, r"some\.json: field 'one\.name' is 3; accepted: text"),
        ({"name": None}, r"'one\.name' is None"),
        ({"count": True}, "'one.count' is True; accepted: a whole number"),
        ({"count": 1.0}, "a whole number"),
        ({"count": 1 << 63}, "a whole number"),
        ({"share": 10**400}, "accepted: a number"),
        ({"share": float("inf")}, "accepted: a number"),
        ({"share": 2}, "one: share is 2; accepted: at most 1"),
        ({"kind": True}, "accepted: 'a', 1"),
        ({"kind": ["a"]}, "accepted: 'a', 1"),
        ({"pairs": [[1]]}, "a list of a list of a number"),
        ({"pairs": [1]}, "a list of a list of a number"),
        ({"more": []}, "an object or null"),
    ],
)
def test_what_does_not_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_as(Example, GOOD | change, PATH, "one")


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(field=st.sampled_from([*Example.__dataclass_fields__, None]), value=ODD)
def test_no_value_is_a_traceback(field: str | None, value: Any) -> None:
    try:
        found = read_as(Example, value if field is None else GOOD | {field: value}, PATH, "one")
    except UserError as error:
        assert "some.json" in str(error) and len(str(error)) < 300
    else:
        json.dumps(found.__dict__)
