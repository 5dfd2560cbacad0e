"""The page of a bench run: everything in the JSON is on it, whatever is missing there."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from multirate.decoding.results import DecodeStats
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.errors import UserError
from multirate.io import check_folder
from multirate.lab.bench.predicted import seconds_of
from multirate.lab.bench.report_figures import figures
from multirate.lab.bench.report_page import render, write

pytest.importorskip("matplotlib")


def row(method: str, speedup: float | None, **values: Any) -> dict[str, Any]:
    made = {
        "method": method,
        "lossless": True,
        "tokens": 200,
        "seconds": 2.0,
        "tokens_per_second": 100.0,
        "speedup": speedup,
        "spread": 0.02,
        "tokens_per_step": 1.0,
        "acceptance": None,
        "identical": 4,
        "near_ties": 0,
        "diverged": 0,
        "note": None,
        "kept": None,
        "perplexity": None,
        "decode_tokens_per_second": 110.0,
        "prefill_seconds": 0.2,
        "steps": 200,
        "tried_at": [],
        "accepted_at": [],
        "categories": {"maths": 90.0, "<b>writing": 110.0},
    }
    return made | values


DRAFTED = {"tokens_per_step": 2.0, "acceptance": 0.5, "tried_at": [100, 50], "steps": 100}
CONTENT: dict[str, Any] = {
    "version": "0.1.0",
    "commit": None,
    "device": "cpu",
    "threads": 2,
    "cpu": "a processor",
    "python": "3.11",
    "torch": "2.13",
    "transformers": "5",
    "backend": "native",
    "date": "2026-01-01",
    "argv": ["/home/someone/multirate", "bench", "tiny"],
    "read_bandwidth_bytes_per_second": 2e10,
    "plain_share_of_bandwidth": 0.9,
    "model": "tiny",
    "dtype": "bfloat16",
    "suite": "mt_bench",
    "data": "/secret/question.jsonl",
    "task": None,
    "prompts": 4,
    "max_new_tokens": 64,
    "repeats": 1,
    "skipped": [],
    "interrupted": False,
    "unavailable": [{"method": "llamacpp", "reason": "it is not installed"}],
    "baseline": "autoregressive",
    "predicted": {"m2r2-carry": 1.75},
    "accelerators": {"m2r2-carry": {"parameters": 5.1e6, "tokens": 4.5e6, "minutes": 150.0}},
    "rows": [
        row("generate", 0.2, decode_tokens_per_second=None, prefill_seconds=None),
        row("autoregressive", 1.0),
        row("m2r2-carry", 1.8, accepted_at=[60, 20], **DRAFTED),
        row("m2r2-carry:nodes=5:lookup=0", None, diverged=1, identical=3),
        row("calm", 1.4, lossless=False, kept=0.951, perplexity=2.5, note="lossy"),
    ],
}


class Parser(HTMLParser):
    """Open elements, and addresses that a browser would follow."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "wbr", "path", "use"):
            self.open.append(tag)
        self.outside += [
            v for k, v in attrs if k in ("src", "href", "xlink:href") and v and v[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use"):
            assert self.open.pop() == tag


def test_the_page_shows_every_row_and_needs_nothing_else() -> None:
    page = render(CONTENT)
    parser = Parser()
    parser.feed(page)
    assert not parser.open and not parser.outside and "http" not in page
    text = re.sub(r"<[^>]+>", " ", page)
    for shown in ("1.80x", "withheld", "1 WRONG", "95.1% of tokens kept", "1.75x", "5.1M", "150"):
        assert shown in text
    assert "No row for llamacpp: it is not installed" in text
    assert "&lt;b&gt;writing" in page and "/secret" not in page and "/home" not in page
    assert page.count("<svg") == 4


def test_measured_seconds_take_the_place_of_estimated_ones() -> None:
    content = copy.deepcopy(CONTENT)
    split = {"draft": 0.1, "own": 0.7, "head": 0.3}
    for shown in content["rows"][1:3]:
        shown["split"] = split
    title = "Where a token's time goes"
    (measured,) = (figure for figure in figures(content) if figure.title == title)
    assert [line[0] for line in measured.rows] == ["autoregressive", "m2r2-carry"]
    for shown, line in zip(content["rows"][1:3], measured.rows, strict=True):
        told = [float(cell.removesuffix(" ms")) for cell in line[1:]]
        whole = 1e3 * shown["seconds"] / shown["tokens"]
        assert sum(told) == pytest.approx(whole, abs=0.05)
    (estimated,) = (figure for figure in figures(CONTENT) if figure.title == title)
    assert len(estimated.rows) > 2 and len(estimated.columns) == 4


@pytest.mark.parametrize(
    "lacking",
    [
        {"rows": []},
        {"rows": [row("autoregressive", 1.0, categories={})], "predicted": {}, "accelerators": {}},
        {"rows": [row("prompt_lookup", None)], "baseline": None, "plain_share_of_bandwidth": None},
        {"interrupted": True, "skipped": ["1"], "temperature": 1.0},
    ],
)
def test_what_a_run_lacks_is_left_out(lacking: dict[str, Any]) -> None:
    assert "<h1>" in render(copy.deepcopy(CONTENT) | lacking)


def test_answers_that_were_not_counted_are_told() -> None:
    said = "2 more were left out because they repeat in loops"
    assert said in " ".join(render(CONTENT | {"loops": ["1", "2"]}).split())
    assert all("left out because" not in render(CONTENT | {"loops": none}) for none in (None, []))


def test_the_folder_holds_what_the_page_was_made_from(tmp_path: Path) -> None:
    page = write(tmp_path / "new" / "report", CONTENT)
    assert page.read_text() == render(CONTENT)
    assert json.loads((page.parent / "results.json").read_text()) == CONTENT


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below", "new/" + 300 * "x"):
        with pytest.raises(UserError, match=f"cannot create the folder .*{folder}"):
            check_folder(tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checking_a_folder_leaves_everything_as_it_was(tmp_path: Path) -> None:
    check_folder(tmp_path / "runs" / "first")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    check_folder(tmp_path / "runs")
    check_folder(tmp_path / "runs" / "first")
    assert (tmp_path / "runs").is_dir() and not list((tmp_path / "runs").iterdir())


def test_a_page_that_cannot_be_drawn_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write(tmp_path / "new", {"rows": []})
    assert not list(tmp_path.iterdir())


def test_tokens_are_counted_by_their_place_in_the_draft() -> None:
    stats = DecodeStats()
    stats.count_draft(drafted=3, levels=3, accepted=1)
    stats.count_draft(drafted=5, levels=2, accepted=2)
    stats.count_draft(drafted=0, levels=0, accepted=0)
    assert stats.tried_at == [2, 2] and stats.accepted_at == [2, 1]
    assert stats.accepted == sum(stats.accepted_at)


def test_a_step_of_a_mean_depth_lies_between_whole_ones() -> None:
    costs = StepCosts(1.0, {1: 1.0, 3: 1.4}, 0.1, 0.05)
    assert seconds_of(costs, 0.0) == 1.0
    assert seconds_of(costs, 1.5) == pytest.approx(
        (costs.step_seconds(1) + costs.step_seconds(2)) / 2
    )
