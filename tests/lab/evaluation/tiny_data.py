"""Data of the three tasks in their own formats, written for the tests."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

DIALOGUE = "#Person1#: Shall we meet at noon?\n#Person2#: Yes, at the river."


def wikisql_record(
    question: str, sql: str, split: str, table: str, **values: str
) -> dict[str, Any]:
    """A record with one question, all of whose values are in its words."""
    return {
        "sentences": [
            {
                "original": question,
                "question-split": split,
                "table-id": table,
                "variables": values,
            }
        ],
        "sql": [sql],
        "variables": [{"name": k, "example": v} for k, v in values.items()],
    }


def wikisql_records() -> list[dict[str, Any]]:
    """Six training and four test questions about two tables."""
    select = 'SELECT {}A.YEAR_FIELD FROM TABLE AS A WHERE A.TO_PAR_FIELD = "var0" ;'
    select = select.replace("A.", "TABLEalias0.").replace("AS A ", "AS TABLEalias0 ")
    return [
        wikisql_record(
            f"In which year was it {value}?",
            select.format(aggregate),
            "train" if number < 6 else "test",
            f"t{number % 2}",
            var0=value,
        )
        for number, (value, aggregate) in enumerate(
            zip("abcdefghij", ("", "MAX ", "MIN ", "COUNT ", "") * 2, strict=True)
        )
    ]


def write(folder: Path) -> Path:
    """FOLDER/TASK/FILE of all three tasks, four test documents each."""
    for task in ("wikisql", "e2e_nlg", "dialogsum"):
        (folder / task).mkdir(parents=True)
    packed = bz2.compress(json.dumps(wikisql_records()).encode())
    (folder / "wikisql" / "wikisql.json.bz2").write_bytes(packed)
    text = "mr,ref\n" + "".join(
        f'"name[{name}], area[riverside], food[{food}]",{name} {says}\n'
        for name in ("The Mill", "The Eagle")
        for food in ("French", "Indian")
        for says in (f"has {food} food.", f"serves {food} food at the river.")
    )
    (folder / "e2e_nlg" / "testset_w_refs.csv").write_text(text)
    others = text.replace("The Mill", "The Barn").replace("The Eagle", "The Crown")
    (folder / "e2e_nlg" / "devset.csv").write_text(others)
    records = [{"dialogue": DIALOGUE, "summary": "They meet at noon."} for _ in range(4)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "dialogsum" / "dialogsum.dev.jsonl").write_text(lines)
    tests = [
        {"dialogue": f"{DIALOGUE} {i}", "summary1": "They meet.", "summary2": "A meeting."}
        for i in range(4)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in tests)
    (folder / "dialogsum" / "dialogsum.test.jsonl").write_text(lines)
    return folder
