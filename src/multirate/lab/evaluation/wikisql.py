"""WikiSQL: a question about one table, to be answered with a SQL query.

Read from `wikisql.json.bz2` of the collection text2sql-data (jkkummerfeld/text2sql-data), which has
the questions and queries of WikiSQL's three splits and the names of the columns, and no table's
rows. Two consequences:

- The columns that a prompt names are those that any query of the collection uses of that table, in
  alphabetical order. A table of the original has more, so the task is easier than the original.
- Queries are executed on rows made for the purpose (`made_table`), on which a query that leaves out
  a condition, or takes another column, value, comparison or aggregate, nearly always gives other
  rows: as in test suites for SQL (Zhong, Yu, Klein 2020, "Semantic Evaluation for Text-to-SQL with
  Distilled Test Suites"). Equal rows on them are no proof that two queries are the same.

Records whose query the collection itself could not convert (values with a comparison sign in them)
and questions whose values are not known are left out: 0.4% of all.

Columns get names that SQL needs no quotes for, and the table is called `data`.
"""

from __future__ import annotations

import bz2
import json
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import parse_json, read_bytes
from multirate.lab.evaluation.data_folder import data_file
from multirate.lab.evaluation.metrics import exact_match, execution_match
from multirate.lab.evaluation.sql_sandbox import TABLE, Table, identifiers

TASK, FILE = "wikisql", "wikisql.json.bz2"
EXAMPLES = 16
"""Training questions kept for few-shot prompts."""
TRAINING = 8000
"""Training questions that a model may be tuned on: others than the examples."""
SEED = 0
"""Of the order of the questions: the file's is by query, and its first few would be alike."""
MOST_UNKNOWN = 0.01
"""Share of the records whose query may be of an unknown form."""
MOST_BYTES = 1 << 30
"""Decompressed; the file has 35 MB."""

_NAME = r"(?:TABLEalias0\.)?(.+?)_FIELD"
_QUERY = re.compile(
    rf"SELECT (?:(MAX|MIN|COUNT|SUM|AVG) )?{_NAME} FROM TABLE AS TABLEalias0(?: WHERE (.+))? ;"
)
_CONDITION = re.compile(rf"{_NAME} ([=<>]) \"?(var\d+)\"?")
_FAR = 1_000_000
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Condition:
    """column, a field's name as in the file; sign, "=", "<" or ">"; value, as text."""

    column: str
    sign: str
    value: str


@dataclass(frozen=True)
class Query:
    """SELECT aggregate(column) WHERE all conditions; aggregate: "" for none."""

    aggregate: str
    column: str
    conditions: tuple[Condition, ...]

    def columns(self) -> set[str]:
        """The fields that it names."""
        return {self.column, *(condition.column for condition in self.conditions)}

    def packed(self) -> list[Any]:
        """JSON-ready; `unpacked` reads it."""
        conditions = [[one.column, one.sign, one.value] for one in self.conditions]
        return [self.aggregate, self.column, conditions]

    @staticmethod
    def unpacked(values: Sequence[Any]) -> Query:
        aggregate, column, conditions = values
        return Query(aggregate, column, tuple(Condition(*one) for one in conditions))

    def sql(self, names: Mapping[str, str]) -> str:
        """Its text. names: field → identifier."""
        column = names[self.column]
        text = f"SELECT {f'{self.aggregate}({column})' if self.aggregate else column} FROM {TABLE}"
        parts = [f"{names[c.column]} {c.sign} {_literal(c.value)}" for c in self.conditions]
        return f"{text} WHERE {' AND '.join(parts)}" if parts else text


@dataclass(frozen=True)
class Asked:
    """A question of a split ("train", "dev", "test") about a table."""

    split: str
    table: str
    question: str
    query: Query


def documents(data: str | os.PathLike[str] | None = None, **_: Any) -> dict[str, Any]:
    """The splits for the harness: `test`; `training`, to tune a model on; and `examples` for
    few-shot prompts (both of the collection's training split).

    A document: columns (a list in words), question, sql, table (its id), queries (all that are
    asked of the table, as JSON). Raises UserError naming the file that is missing or damaged.
    """
    from datasets import Dataset

    asked = read(data_file(data, TASK, FILE))
    by_table: dict[str, list[Query]] = {}
    for one in asked:
        by_table.setdefault(one.table, []).append(one.query)
    order = random.Random(SEED)
    drawn = {}
    for split in ("test", "train"):
        drawn[split] = [one for one in asked if one.split == split]
        order.shuffle(drawn[split])
        if not drawn[split]:
            raise UserError(f"{FILE} has no question in the split {split}")
    examples, others = drawn["train"][:EXAMPLES], drawn["train"][EXAMPLES:]
    splits = {
        "test": drawn["test"],
        "examples": examples,
        "training": others[:TRAINING] or examples,  # of a file with hardly any
    }
    return {
        name: Dataset.from_list([_document(one, by_table[one.table]) for one in kept])
        for name, kept in splits.items()
    }


def scores(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """exact_match and execution_match of an answer, which is the query and nothing else."""
    queries = [Query.unpacked(one) for one in json.loads(document["queries"])]
    table = made_table(queries, document["table"])
    predicted, gold = answers[0].strip(), document["sql"]
    return {
        "exact_match": exact_match(predicted, gold),
        "execution_match": execution_match(predicted, gold, table),
    }


def _document(asked: Asked, queries: Sequence[Query]) -> dict[str, str]:
    names = columns(queries)
    return {
        "columns": ", ".join(names.values()),
        "question": asked.question,
        "sql": asked.query.sql(names),
        "table": asked.table,
        "queries": json.dumps([query.packed() for query in queries]),
    }


def columns(queries: Sequence[Query]) -> dict[str, str]:
    """{field: identifier} of all that the queries name, sorted."""
    fields = sorted(set().union(*(query.columns() for query in queries)))
    return dict(zip(fields, identifiers(fields), strict=True))


def read(path: Path) -> list[Asked]:
    """Every question of the file. Raises UserError naming the record that cannot be used."""
    try:
        unpacker = bz2.BZ2Decompressor()
        content = unpacker.decompress(read_bytes(path), MOST_BYTES)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).lower()}") from None
    if not unpacker.eof:
        raise UserError(f"cannot read {path}: it is truncated, or larger than {MOST_BYTES} bytes")
    records = parse_json(content, path)
    if not isinstance(records, list):
        raise UserError(f"{path} holds a {type(records).__name__}; accepted: a list of records")
    found: list[Asked] = []
    unknown: list[_UnknownForm] = []
    for number, record in enumerate(records):
        try:
            found += _asked(record)
        except _UnknownForm as error:
            unknown.append(error)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"{path}: record {number} is not a {TASK} record ({type(error).__name__}: {error})"
            ) from None
    if len(unknown) > MOST_UNKNOWN * len(records):
        raise UserError(
            f"{path}: {len(unknown)} of {len(records)} queries are not in {TASK}'s form, for "
            f"example {unknown[0]}"
        )
    return found


class _UnknownForm(Exception):
    """A query, as text."""


def _asked(record: Mapping[str, Any]) -> Iterable[Asked]:
    """A record is a query with variables, and the questions that ask it with values of their own.

    A value that the question does not have in its words is the record's example, which is of its
    first question; what other questions mean by it is not known, and they are left out.
    """
    text = record["sql"][0]
    match = _QUERY.fullmatch(text)
    if match is None:
        raise _UnknownForm(text)
    aggregate, column, rest = match.groups()
    conditions = [_CONDITION.fullmatch(part) for part in rest.split(" AND ")] if rest else []
    examples = {one["name"]: one["example"] for one in record["variables"]}
    for index, sentence in enumerate(record["sentences"]):
        values = sentence["variables"] if index else {**examples, **sentence["variables"]}
        used = []
        for condition in conditions:
            if condition is None:
                raise _UnknownForm(text)
            if condition[3] in values:
                used.append(Condition(condition[1], condition[2], values[condition[3]]))
        if len(used) == len(conditions):
            query = Query(aggregate or "", column, tuple(used))
            question = " ".join(sentence["original"].split())
            yield Asked(sentence["question-split"], sentence["table-id"], question, query)


def made_table(queries: Sequence[Query], seed: str) -> Table:
    """Rows on which the queries of a table, and what they may be mistaken for, differ.

    For each query two rows that meet all of its conditions, and for each of its conditions three
    that miss only this one, two of them with the largest and the smallest number in the column that
    is asked for; and eight more. All other values are drawn from the values that the
    queries compare the column with, or are new ones, by a generator whose seed is `seed`.
    """
    names = columns(queries)
    draw = random.Random(seed)
    compared: dict[str, list[str]] = {field: [] for field in names}
    numeric = {field: False for field in names}
    for query in queries:
        numeric[query.column] |= query.aggregate in ("MAX", "MIN", "SUM", "AVG")
        for condition in query.conditions:
            compared[condition.column].append(condition.value)
    for field, values in compared.items():
        if values:
            numeric[field] = all(_NUMBER.fullmatch(value) for value in values)

    def anything(field: str) -> Any:
        if compared[field] and draw.random() < 0.5:
            return _cell(draw.choice(compared[field]))
        number = draw.randrange(1, 1000)
        return number if numeric[field] else f"{names[field].replace('_', ' ')} {number}"

    def row(query: Query | None = None, missed: Condition | None = None, sign: int = 0) -> Any:
        values = {field: anything(field) for field in names}
        if query is not None and sign and numeric[query.column]:
            values[query.column] = sign * draw.randrange(_FAR, 2 * _FAR)
        for condition in query.conditions if query is not None else ():
            values[condition.column] = _meeting(condition, draw)
        if missed is not None:
            values[missed.column] = _missing(missed, draw)
        return tuple(values.values())

    rows: list[tuple[Any, ...]] = []
    for query in queries:
        rows += [row(query) for _ in range(2)]
        rows += [row(query, one, sign) for one in query.conditions for sign in (-1, 0, 1)]
    rows += [row() for _ in range(8)]
    draw.shuffle(rows)
    return Table(tuple(names.values()), tuple(rows))


def _meeting(condition: Condition, draw: random.Random) -> Any:
    value = _cell(condition.value)
    if condition.sign == "=":
        return value
    if isinstance(value, str):
        return f"{value}z" if condition.sign == ">" else value[:-1]
    return value + (1 if condition.sign == ">" else -1) * draw.randrange(1, 20)


def _missing(condition: Condition, draw: random.Random) -> Any:
    value = _cell(condition.value)
    if condition.sign != "=":
        return value
    return f"{value} other" if isinstance(value, str) else value + draw.choice((-3, -2, -1, 1, 2))


def _cell(value: str) -> Any:
    if not _NUMBER.fullmatch(value):
        return value
    return float(value) if "." in value else int(value)


def _literal(value: str) -> str:
    return value if _NUMBER.fullmatch(value) else "'" + value.replace("'", "''") + "'"
