"""The page: every token on it, valid, and nothing fetched from anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from lab.bench import tiny_model
from multirate.engine import Engine, attach
from multirate.lab.inspection.colourings import colourings
from multirate.lab.inspection.decisions import Decision, Kind
from multirate.lab.inspection.inspect import Inspection, inspect
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base

pytest.importorskip("matplotlib")
from multirate.lab.inspection.page import render

PROMPT = "</script><script>alert('no')</script> & so <b>on</b>"
NEW = 24
VOID = {"meta", "input", "br", "img", "link"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps what tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tokens: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self.in_answer = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.in_answer = self.in_answer or given.get("class") == "answer"
        if given.get("role") == "button":
            self.tokens.append(given)
            self.texts.append("")
        if given.get("id"):
            self.ids.append(given["id"] or "")
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            if given.get(name):
                self.addresses.append(given[name] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag
        self.in_answer = self.in_answer and tag != "div"

    def handle_data(self, data: str) -> None:
        if self.in_answer and self.tokens and data != "↵":
            self.texts[-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def build(method: str | None, **options: Any) -> tuple[Engine, Inspection]:
    network, words = tiny_model.model(), tiny_model.tokenizer()
    engine = attach(network, backend="hf", tokenizer=words)
    if method is not None:
        kind = find_training(method)
        shape = BaseShape.of(network.config)
        config = kind.config_for(shape, **options)
        engine.add(Accelerator(method, config, kind.build(config, shape), describe_base(network)))
    ids = [list(words(text)["input_ids"]) for text in (PROMPT, "hello")]
    return engine, inspect(engine, ids, engine.stopping(NEW), method)


FACTS = {"model": "tiny <model>", "command": "multirate inspect tiny --out page.html"}


@pytest.mark.parametrize(
    ("method", "options", "titles"),
    [
        (None, {}, ["First layer that agrees"]),
        (
            "m2r2",
            {"rank": 4, "gates": [1, 3]},
            ["First gate that agrees", "Source of each token", "First layer that agrees"],
        ),
        (
            "m2r2-carry",
            {"rank": 4},
            ["Source of each token", "First gate that agrees", "First layer that agrees"],
        ),
        ("kangaroo", {}, ["Source of each token", "First layer that agrees"]),
    ],
)
def test_page(method: str | None, options: dict[str, Any], titles: list[str]) -> None:
    engine, inspection = build(method, **options)
    page = render(inspection, engine.tokenizer, FACTS)
    found = read(page)
    total = sum(len(text.tokens) for text in inspection.texts)
    assert len(found.tokens) == total == inspection.tokens > NEW
    for number, text in enumerate(inspection.texts):
        shown = [
            piece
            for given, piece in zip(found.tokens, found.texts, strict=True)
            if given["data-text"] == str(number)
        ]
        answer = engine.tokenizer.decode(text.tokens)
        assert "".join(shown).replace("⋯", "") == answer
    assert [one.title for one in colourings(inspection)] == titles
    for title in [*titles, "Residual velocity", "Direction of the change"]:
        assert title in page
    assert len(found.ids) == len(set(found.ids)), "two elements have the same id"
    assert found.addresses and all(
        address.startswith("#") and address[1:] in found.ids for address in found.addresses
    )
    assert not re.search(r"https?:|//[a-z]+\.|@import|@font-face", page)
    assert not [used for used in re.findall(r"url\(([^)]*)\)", page) if used[1:] not in found.ids]
    assert found.scripts == 2 and "<b>on</b>" not in page and "tiny &lt;model&gt;" in page
    assert len(page) < 1 << 20

    details = re.search(r'<script type="application/json" id="details">(.*?)</script>', page, re.S)
    assert details is not None
    for text, told in zip(inspection.texts, json.loads(details[1]), strict=True):
        assert [one["id"] for one in told] == text.tokens
        for i, one in enumerate(told):
            assert len(one["r"]) == len(inspection.gates) + 1
            full = [candidate[1] for candidate in one["r"][-1]["c"]]
            assert full == sorted(full, reverse=True) and 0 < sum(full) <= 1.001
            for reading, interval in zip(one["r"], text.values.intervals, strict=False):
                assert set(reading["s"]) == {"confidence", "ARLA"}
                said = interval.said[i].scores["ARLA"]
                assert reading["s"]["ARLA"] == pytest.approx(said, abs=1e-3)


def test_every_token_has_the_colour_of_its_category() -> None:
    engine, inspection = build("m2r2", rank=4, gates=[1, 3])
    page = render(inspection, engine.tokenizer, FACTS)
    found = read(page)
    for k, colouring in enumerate(colourings(inspection)):
        expected = [str(index) for text in colouring.of for index in text]
        assert [given[f"data-{k}"] for given in found.tokens] == expected
        for index in set(expected):
            assert f'[data-by="{k}"] [data-{k}="{index}"] {{ --c: ' in page
        assert sum(colouring.counts()) == inspection.tokens


def test_both_colour_schemes_use_one_drawing() -> None:
    engine, inspection = build(None)
    page = render(inspection, engine.tokenizer, FACTS)
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 6
    bars = set(re.findall(r"#[0-9a-f]{6}\b", drawings[0]))
    for drawing in drawings[1:]:
        assert not re.search(r"#[0-9a-f]{6}\b", drawing), "a colour that does not follow the page"
        assert "var(--ink)" in drawing and 'role="img"' in drawing
    assert len(bars) == 3, "layers 1 to 3 of 4 have colours of their own"


def test_a_lossy_text_is_said_to_be_one() -> None:
    """Whatever made it so: a token that the full model would not have said is named as such."""
    engine, inspection = build("m2r2", rank=4, gates=[1, 3])
    assert not inspection.lossy
    inspection.lossy = True
    text = inspection.texts[0]
    text.decisions[3] = Decision(Kind.LEFT, 1)
    text.tokens[3] = (text.values.said[3].tokens[0] + 7) % 261
    page = render(inspection, engine.tokenizer, FACTS)
    assert "The method is lossy" in page and "the text is the model's own" not in page
    assert "stopped after 1 layer, not verified" in page
    assert page.count("the full model's token is") == 1
    share = f"{1 - 1 / inspection.tokens:.0%}"
    assert f"<dd>{share}</dd>" in page
