"""The patterns that slots are found by."""

from __future__ import annotations

import pytest

from multirate.lab.evaluation.slots import parse_meaning, stated


@pytest.mark.parametrize(
    ("slot", "value", "text"),
    [
        ("eatType", "coffee shop", "It is a café."),
        ("area", "city centre", "in the center of the city"),
        ("area", "riverside", "next to the river"),
        ("food", "English", "British food"),
        ("food", "Fast food", "a fast-food place"),
        ("priceRange", "less than £20", "meals for under £20"),
        ("priceRange", "£20-25", "between £20 and £25"),
        ("priceRange", "more than £30", "over 30 pounds"),
        ("priceRange", "high", "the price range is high"),
        ("priceRange", "cheap", "low-priced meals"),
        ("customer rating", "5 out of 5", "rated five out of five"),
        ("customer rating", "1 out of 5", "has 1 star"),
        ("customer rating", "average", "has an average customer rating"),
        ("customer rating", "low", "is poorly rated"),
        ("familyFriendly", "yes", "is kid friendly"),
        ("familyFriendly", "no", "isn't child friendly"),
        ("familyFriendly", "no", "an adults-only place"),
    ],
)
def test_what_is_found(slot: str, value: str, text: str) -> None:
    assert value in stated(f"The Mill: {text}.", {"name": "The Mill"})[slot]


@pytest.mark.parametrize(
    ("slot", "text"),
    [
        ("customer rating", "It has a high price range."),
        ("priceRange", "It has a high customer rating."),
        ("eatType", "It is near the Café Rouge."),
        ("food", "It is near Raja Indian Cuisine."),
        ("familyFriendly", "It is friendly."),
    ],
)
def test_what_is_not(slot: str, text: str) -> None:
    near = "Café Rouge" if "Rouge" in text else "Raja Indian Cuisine"
    assert stated(text, {"name": "The Mill", "near": near})[slot] == set()


def test_meanings() -> None:
    found = parse_meaning("name[The Mill], customer rating[3 out of 5], priceRange[£20-25]")
    assert found == {"name": "The Mill", "customer rating": "3 out of 5", "priceRange": "£20-25"}
    for broken in ("", "name", "name[The Mill] area[riverside]", "name[The Mill"):
        with pytest.raises(ValueError):
            parse_meaning(broken)
