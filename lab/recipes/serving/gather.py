"""Writes OUT/serving_load.json from the files that load.sh has made, and prints a line for each.

    python lab/recipes/serving/gather.py OUT --argv COMMAND ...

other_texts: answers that differ from those of the server without drafts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from multirate.provenance import collect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    rows = [
        {"server": path.stem.rpartition("-")[0], **json.loads(path.read_text("utf-8"))}
        for path in given.out.glob("*-*.json")
    ]
    rows.sort(key=lambda row: (row["clients"], row["server"]))
    plain = {row["clients"]: row["texts"] for row in rows if row["server"] == "plain"}
    for row in rows:
        pairs = zip(row.pop("texts"), plain[row["clients"]], strict=True)
        row["other_texts"] = sum(one != other for one, other in pairs)
        print(row["clients"], row["server"], row["tokens_per_second"], "tokens/s")
    made = collect(argv=given.argv, rows=rows)
    (given.out / "serving_load.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
