"""Writes OUT/serving_load.json from the files that load.sh has made, and prints a line for each.

    python lab/recipes/serving/gather.py OUT --argv COMMAND ...

Of a server's rounds with so many clients: answers, tokens and seconds in total, the mean of the
median times to the first token, and the most of the other times. by_round: tokens/s of each.
other_texts: answers that differ from those of the server without drafts.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

from multirate.provenance import collect


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All rounds of one server with so many clients, as one row."""

    def each(name: str) -> list[Any]:
        return [one[name] for one in rounds]

    tokens, seconds = sum(each("tokens")), sum(each("seconds"))
    return {
        "clients": rounds[0]["clients"],
        "answers": sum(each("answers")),
        "errors": list(chain(*each("errors"))),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "by_round": each("tokens_per_second"),
        "first_token_p50": round(sum(each("first_token_p50")) / len(rounds), 4),
        "first_token_p99": max(each("first_token_p99")),
        "between_pieces_p99": max(each("between_pieces_p99")),
        "between_pieces_most": max(each("between_pieces_most")),
        "texts": list(chain(*each("texts"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for path in sorted(given.out.glob("*-*-*.json")):
        made = json.loads(path.read_text("utf-8"))
        rounds.setdefault((made["clients"], path.stem.rsplit("-", 2)[0]), []).append(made)
    rows = [{"server": server, **together(those)} for (_, server), those in sorted(rounds.items())]
    plain = {row["clients"]: row["texts"] for row in rows if row["server"] == "plain"}
    for row in rows:
        pairs = zip(row.pop("texts"), plain[row["clients"]], strict=True)
        row["other_texts"] = sum(one != other for one, other in pairs)
        print(row["clients"], row["server"], row["tokens_per_second"], "tokens/s")
    made = collect(argv=given.argv, rows=rows)
    (given.out / "serving_load.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
