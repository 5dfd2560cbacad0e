"""WikiSQL's questions, and the rows that its queries are executed on."""

from __future__ import annotations

import bz2
import json
from pathlib import Path

import pytest

from multirate.errors import UserError
from multirate.lab.evaluation.metrics import execution_match
from multirate.lab.evaluation.sql_sandbox import run_query
from multirate.lab.evaluation.wikisql import Condition, Query, columns, made_table, read

from .tiny_data import wikisql_record, wikisql_records

QUERIES = [
    Query("", "YEAR", (Condition("TO_PAR", "=", "e"), Condition("POINTS", "<", "55"))),
    Query("MAX", "POINTS", (Condition("TEAM", "=", "mclaren m28"),)),
    Query("COUNT", "TEAM", (Condition("POINTS", ">", "10"), Condition("YEAR", "=", "1979"))),
    Query("AVG", "POINTS", ()),
]


def write(path: Path, records: object) -> Path:
    path.write_bytes(bz2.compress(json.dumps(records).encode()))
    return path


def test_a_query_as_text() -> None:
    names = columns(QUERIES)
    assert names == {"POINTS": "points", "TEAM": "team", "TO_PAR": "to_par", "YEAR": "year"}
    assert QUERIES[0].sql(names) == "SELECT year FROM data WHERE to_par = 'e' AND points < 55"
    assert QUERIES[3].sql(names) == "SELECT AVG(points) FROM data"
    quoted = Query("", "A", (Condition("A", "=", "o'neill"),))
    assert quoted.sql({"A": "a"}) == "SELECT a FROM data WHERE a = 'o''neill'"
    assert Query.unpacked(json.loads(json.dumps(QUERIES[0].packed()))) == QUERIES[0]


@pytest.mark.parametrize("number", range(len(QUERIES)))
def test_made_rows_tell_queries_apart(number: int) -> None:
    query, names = QUERIES[number], columns(QUERIES)
    table = made_table(QUERIES, "t")
    gold = query.sql(names)
    assert run_query(gold, table)
    assert execution_match(gold, gold, table) == 1.0
    for missed in query.conditions:  # a condition left out
        rest = tuple(one for one in query.conditions if one != missed)
        wrong = Query(query.aggregate, query.column, rest).sql(names)
        assert execution_match(wrong, gold, table) == 0.0, wrong
    for aggregate in {"", "MAX", "MIN", "SUM", "AVG", "COUNT"} - {query.aggregate}:
        wrong = Query(aggregate, query.column, query.conditions).sql(names)
        assert execution_match(wrong, gold, table) == 0.0, wrong
    for column in set(names) - {query.column}:
        if query.aggregate != "COUNT":  # COUNT counts rows, whatever the column
            wrong = Query(query.aggregate, column, query.conditions).sql(names)
            assert execution_match(wrong, gold, table) == 0.0, wrong


def test_made_rows_are_the_same_each_time() -> None:
    assert made_table(QUERIES, "t") == made_table(QUERIES, "t") != made_table(QUERIES, "u")


def test_records_become_questions(tmp_path: Path) -> None:
    records = wikisql_records()
    # a second question with another value of its own; a third that does not say its value
    first = records[0]["sentences"][0]
    records[0]["sentences"] += [
        {**first, "original": "And when z?", "variables": {"var0": "z"}, "table-id": "t9"},
        {**first, "original": "And then?", "variables": {}},
    ]
    records[1]["sentences"][0]["variables"] = {}  # the example is this question's
    asked = read(write(tmp_path / "w.bz2", records))
    assert [one.query.conditions[0].value for one in asked[:3]] == ["a", "z", "b"]
    assert (asked[1].table, asked[1].question, asked[1].split) == ("t9", "And when z?", "train")
    assert [one.query.aggregate for one in asked[:4]] == ["", "", "MAX", "MIN"]
    assert {one.query.column for one in asked} == {"YEAR"} and len(asked) == 11


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    odd = wikisql_record("?", "SELECT nothing", "test", "t0")
    for records, reason in (
        ({"a": 1}, "a list of records"),
        ([{}], "record 0 is not a wikisql record"),
        (["x"], "record 0 is not a wikisql record"),
        ([*wikisql_records(), odd], "1 of 11 queries are not in wikisql's form"),
    ):
        with pytest.raises(UserError, match=reason):
            read(write(tmp_path / "w.bz2", records))
    whole = write(tmp_path / "w.bz2", wikisql_records()).read_bytes()
    (tmp_path / "cut.bz2").write_bytes(whole[:-20])
    (tmp_path / "no.bz2").write_bytes(b"hello")
    for name, reason in (("cut.bz2", "truncated"), ("no.bz2", "cannot read"), ("none", "no such")):
        with pytest.raises(UserError, match=reason):
            read(tmp_path / name)


def test_a_few_queries_of_an_unknown_form_are_left_out(tmp_path: Path) -> None:
    odd = wikisql_record("?", "SELECT nothing", "test", "t0")
    assert len(read(write(tmp_path / "w.bz2", [*wikisql_records() * 20, odd]))) == 200
