"""What a model's query may do: read one small table, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirate.lab.evaluation.sql_sandbox import MAX_LENGTH, Table, identifiers, run_query

TABLE = Table(("year", "team"), ((1979, "McLaren"), (1980, "Lotus"), (1980, "Ligier")))


def test_selects_run() -> None:
    assert run_query("SELECT team FROM data WHERE year = 1979", TABLE) == [("McLaren",)]
    assert run_query("select TEAM from DATA where year < '1980';", TABLE) == [("McLaren",)]
    assert run_query("SELECT count(*), max(year) FROM data", TABLE) == [(3, 1980)]
    assert run_query("SELECT year FROM data WHERE team = 'lotus'", TABLE) == [(1980,)]
    assert run_query("SELECT team FROM data WHERE team LIKE 'l%' ORDER BY team", TABLE) == [
        ("Ligier",),
        ("Lotus",),
    ]
    assert run_query("SELECT 1 FROM data WHERE year > 2000", TABLE) == []


@pytest.mark.parametrize(
    "query",
    [
        "",
        "-- nothing",
        "hello",
        "SELECT missing FROM data",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE data",
        "DROP TABLE data",
        "DELETE FROM data",
        "INSERT INTO data VALUES (1, 'x')",
        "UPDATE data SET year = 1",
        "CREATE TABLE other (a)",
        "ATTACH DATABASE '{file}' AS other",
        "VACUUM INTO '{file}'",
        "PRAGMA query_only = OFF",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%1000000000d', 1)",
        "SELECT randomblob(1000000000)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
        "SELECT count(*) FROM " + ", ".join(f"data a{i}" for i in range(30)),
        "SELECT '\0'",
        "SELECT '\ud800'",
        "SELECT " + "1 + " * MAX_LENGTH + "1",
    ],
)
def test_what_is_refused(query: str, tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    assert run_query(query.replace("{file}", str(file)), TABLE) is None
    assert not file.exists()
    assert run_query("SELECT count(*) FROM data", TABLE) == [(3,)]


def test_names_of_columns() -> None:
    names = ["To par", "YEAR", "year", "2010", "Order", "#", "Province,_community", "current_date"]
    assert identifiers(names) == (
        "to_par",
        "year",
        "year_2",
        "c_2010",
        "order_",
        "column",
        "province_community",
        "current_date_",
    )
    columns = identifiers([*names, "Größe", "from", "rowid"])
    table = Table(columns, (tuple(range(len(columns))),))
    for number, column in enumerate(columns):
        assert run_query(f"SELECT {column} FROM data", table) == [(number,)]
