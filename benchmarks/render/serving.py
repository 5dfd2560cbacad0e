"""`multirate serve` under load."""

from __future__ import annotations

from typing import Any

from render.common import Section, command, load, machine, sources, table

SERVERS = {
    "llama.cpp": "llama.cpp's `llama-server`",
    "plain": "multirate without drafts",
    "multirate": "multirate (text lookup)",
    "accelerator": "multirate (M2R2 + text lookup)",
}


def under_load() -> Section:
    names = "serving_load", "serving_load_q4_0"
    first, other = (load(name) for name in names)
    return Section(
        "Server under load",
        [
            f"SmolLM2's Q4_1 file, {machine(first)}, 2 threads, which the clients share. The given "
            f"number of clients ask {_questions(first)} questions of Spec-Bench (310 tokens on "
            "average; other ones at every level) in two rounds, up to 128 tokens each, streamed, "
            "greedily. In brackets: speed relative to llama-server (16 slots, else its defaults), "
            "built from the sources that llama-cpp-python 0.3.36 ships.",
            _speeds(first),
            f"Relative to multirate without drafts: {_over_plain(first)}.",
            "llama.cpp processes prompts slowly with Q4_1. With a file in Q4_0, for which it has a "
            f"faster kernel, 32 questions in one round, on another machine, {machine(other)}:",
            _speeds(other),
            "Seconds to the first token (median, 99th percentile), and the longest pause of any "
            "stream, with Q4_1:",
            _waits(first),
            "No request failed. The texts with drafts are those without, all "
            f"{_answers(first)} of them.",
            command(
                "export LLAMA_SERVER=llama-server",
                "export ACCELERATOR=src/multirate/reference/smollm2/m2r2-carry REQUESTS=24",
                "bash lab/recipes/serving/load.sh MODEL.gguf EVAL runs/serving",
            ),
            sources(*names),
        ],
    )


def _levels(run: dict[str, Any]) -> list[int]:
    return sorted({row["clients"] for row in run["rows"]})


def _row(run: dict[str, Any], server: str, clients: int) -> dict[str, Any]:
    rows = [r for r in run["rows"] if (r["server"], r["clients"]) == (server, clients)]
    found: dict[str, Any] = rows[0]
    return found


def _ratio(run: dict[str, Any], server: str, clients: int) -> float:
    """The speed relative to llama-server's."""
    ours, theirs = (_row(run, name, clients) for name in (server, "llama.cpp"))
    return float(ours["tokens_per_second"] / theirs["tokens_per_second"])


def _questions(run: dict[str, Any]) -> int:
    """How many at each level."""
    (count,) = {row["answers"] for row in run["rows"]}
    return int(count)


def _over_plain(run: dict[str, Any]) -> str:
    """The ratios to plain decoding, level by level."""
    parts = []
    for server in ("multirate", "accelerator"):
        rows = ((_row(run, server, n), _row(run, "plain", n)) for n in _levels(run))
        ratios = [ours["tokens_per_second"] / plain["tokens_per_second"] for ours, plain in rows]
        parts.append(f"{SERVERS[server]} " + ", ".join(f"{ratio:.2f}x" for ratio in ratios))
    return "; ".join(parts)


def _servers(run: dict[str, Any]) -> list[str]:
    there = {row["server"] for row in run["rows"]}
    return [server for server in SERVERS if server in there]


def _speeds(run: dict[str, Any]) -> str:
    lines = []
    for server in _servers(run):
        cells = []
        for clients in _levels(run):
            speed = _row(run, server, clients)["tokens_per_second"]
            ratio = _ratio(run, server, clients)
            cells.append(f"{speed:.0f} ({ratio:.1f}x)" if server != "llama.cpp" else f"{speed:.0f}")
        lines.append((SERVERS[server], *cells))
    return table(("tokens/s, clients:", *map(str, _levels(run))), lines)


def _waits(run: dict[str, Any]) -> str:
    lines = []
    for server in _servers(run):
        cells = []
        for clients in _levels(run):
            row = _row(run, server, clients)
            first = f"{row['first_token_p50']:.2f}, {row['first_token_p99']:.1f}"
            cells.append(f"{first}; {row['between_pieces_most']:.1f}")
        lines.append((SERVERS[server], *cells))
    return table(("clients:", *map(str, _levels(run))), lines)


def _answers(run: dict[str, Any]) -> int:
    ours = [row for row in run["rows"] if row["server"] in ("multirate", "accelerator")]
    assert all(not row["other_texts"] for row in ours), "texts differ"
    assert all(not row["errors"] for row in run["rows"]), "requests failed"
    return sum(row["answers"] for row in ours)


def over_llama(name: str) -> str:
    """The least and the most of the default method's ratios to llama-server, in a file."""
    run = load(name)
    ratios = [_ratio(run, "multirate", clients) for clients in _levels(run)]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"
