"""Each metric on examples worked out by hand."""

from __future__ import annotations

import math

import pytest

from multirate.lab.evaluation.metrics import (
    corpus_bleu,
    exact_match,
    execution_match,
    rouge,
    slot_error_rate,
    slot_errors,
)
from multirate.lab.evaluation.sql_sandbox import Table

GOLD = "SELECT MAX(year) FROM data WHERE team = 'mclaren m28' AND points < 2"
TABLE = Table(
    ("year", "team", "points"),
    (
        (1979, "mclaren m28", 1),
        (1980, "mclaren m28", 5),
        (1981, "lotus", 1),
        (1978, "mclaren m28", 0),
    ),
)


@pytest.mark.parametrize(
    "query",
    [
        GOLD,
        "select max( YEAR )  from data where team='McLaren M28' and points < 2;",
        'SELECT MAX(year) FROM data WHERE points < "2" AND team = "mclaren m28" ;',
        "SELECT MAX(year) FROM data WHERE points < 2.0 AND team = 'mclaren m28'",
    ],
)
def test_the_same_query(query: str) -> None:
    assert exact_match(query, GOLD) == 1.0
    assert execution_match(query, GOLD, TABLE) == 1.0


@pytest.mark.parametrize(
    "query",
    [
        "",
        "SELECT MIN(year) FROM data WHERE team = 'mclaren m28' AND points < 2",
        "SELECT MAX(points) FROM data WHERE team = 'mclaren m28' AND points < 2",
        "SELECT MAX(year) FROM data WHERE team = 'mclaren m28' AND points > 2",
        "SELECT MAX(year) FROM data WHERE team = 'lotus' AND points < 2",
        "SELECT MAX(year) FROM data WHERE team = 'mclaren m28'",
        "SELECT MAX(year) FROM data WHERE team = 'mclaren m28' OR points < 2",
        "SELECT MAX(year), 1 FROM data WHERE team = 'mclaren m28' AND points < 2",
        "SELECT MAX(year) FROM data WHERE team = mclaren AND points < 2",
        "DROP TABLE data",
    ],
)
def test_another_query(query: str) -> None:
    assert exact_match(query, GOLD) == 0.0
    assert execution_match(query, GOLD, TABLE) == 0.0


def test_equal_rows_of_another_query() -> None:
    """Execution may match where the text does not: 1979 is the latest year either way."""
    other = "SELECT year FROM data WHERE points = 1 AND team LIKE 'mclaren%'"
    assert exact_match(other, GOLD) == 0.0
    assert execution_match(other, GOLD, TABLE) == 1.0


def test_rows_compare_without_order_but_with_their_number() -> None:
    gold = "SELECT team FROM data WHERE points < 2"
    assert execution_match(f"{gold} ORDER BY year", gold, TABLE) == 1.0
    assert execution_match(gold.replace("team", "DISTINCT team", 1), gold, TABLE) == 0.0


def test_a_reference_that_does_not_run_is_said() -> None:
    with pytest.raises(ValueError, match="does not run"):
        execution_match(GOLD, "SELECT nothing FROM data", TABLE)


def test_a_name_is_no_value() -> None:
    assert (
        exact_match("SELECT a FROM data WHERE b = ford", "SELECT a FROM data WHERE b = 'ford'") == 0
    )
    assert exact_match("SELECT 'a' FROM data", "SELECT a FROM data") == 0


def test_bleu() -> None:
    """Worked out: 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams are in the reference of 5 words."""
    pytest.importorskip("sacrebleu", reason="pip install 'multirate[eval]'")
    by_hand = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    pairs = [("the mill serves food here", ["the mill serves food today"])]
    assert corpus_bleu(pairs) == pytest.approx(by_hand)
    # a shorter answer pays for its brevity; a further reference may have what the first lacks
    short = 100 * math.exp(1 - 5 / 4)
    assert corpus_bleu([("the mill serves food", pairs[0][1])]) == pytest.approx(short)
    both = [
        ("the mill serves food here", ["a", "the mill serves food here"]),
        ("x y z w", ["x y z w"]),
    ]
    assert corpus_bleu(both) == pytest.approx(100)


def test_rouge() -> None:
    """Answer and references of 4, 4 and 2 words: 3, then 1 unigrams in common; 2, then no bigrams.

    "meets" and "meet" are one word after stemming.
    """
    pytest.importorskip("rouge_score", reason="pip install 'multirate[eval]'")
    found = rouge("she meets him today", ["She meet him tomorrow", "he meets"])
    first, second = 3 / 4, 2 * (1 / 4) * (1 / 2) / (1 / 4 + 1 / 2)
    assert found["rouge1"] == pytest.approx((first + second) / 2)
    assert found["rouge2"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["rougeL"] == pytest.approx((first + second) / 2)


MEANING = {"name": "The Mill", "food": "French", "area": "riverside", "familyFriendly": "no"}


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("The Mill serves French food by the river and is not for families.", 0),
        ("By the river, the mill serves French food. Children are not welcome.", 0),
        ("The Mill serves French food by the river.", 1),  # one left out
        ("The Mill serves Indian food by the river; it is not family-friendly.", 1),  # wrong
        ("The Mill is a family-friendly French place at the riverside.", 1),  # the opposite
        ("The Mill, a pub, serves French food by the river, not for kids.", 1),  # a pub: added
        ("The Mill, a restaurant, serves French food by the river, not for kids.", 0),
        ("", 4),
    ],
)
def test_slot_errors(text: str, errors: int) -> None:
    assert slot_errors(text, MEANING) == (errors, 4)


def test_slot_error_rate_is_of_all_slots_together() -> None:
    assert slot_error_rate([(0, 4), (3, 6)]) == pytest.approx(0.3)
