"""The page's files: what is sent, and what they may ask for. test_page_in_browser.py uses them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from multirate.serving.page import FILES, OPEN
from serving.conftest import client, saying, served

NAMES = ("index.html", "style.css", "main.js", "theme.js", "icon.svg")


def get(path: str, model: Any = None, **options: Any) -> Any:
    headers = options.pop("headers", {})
    return client(saying("x"), model, **options)("GET", path, headers=headers)


def test_the_files_are_served() -> None:
    assert set(NAMES) <= {path.name for path in FILES.values()}
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    for path, file in FILES.items():
        found = get(path)
        assert found.status_code == 200 and found.content == file.read_bytes()
        kind = kinds.get(file.suffix, "image/svg+xml")
        assert found.headers["content-type"] == f"{kind}; charset=utf-8"
    assert get("/page/absent.js").status_code == 404
    assert get("/page/../page.py").status_code == 404
    assert client(saying("x"))("HEAD", "/").status_code == 200
    assert client(saying("x"))("POST", "/").status_code == 405


@pytest.mark.parametrize("path", sorted(OPEN))
def test_browsers_are_told_to_let_nothing_else_in(path: str) -> None:
    headers = get(path).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src", "img-src"):
        assert policy[kind] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_file_is_sent_again_only_when_it_has_changed() -> None:
    first = get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = get("/", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert again.headers["content-security-policy"]
    assert get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_nothing_is_asked_of_another_server_and_nothing_is_inline() -> None:
    for file in FILES.values():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?:https?:|wss?:|[\"'(=]\s*)//", text), file.name
    page = FILES["/"].read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for file in FILES.values():
        for name in re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()
        ):
            raise AssertionError(f"{file.name} has {name}")


def test_what_the_files_name_exists() -> None:
    page = FILES["/"].read_text()
    named = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert len(named) >= 4
    for file in FILES.values():
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', file.read_text())]
    assert {f"/{name}" for name in named} == set(FILES) - {"/"}


def test_with_a_key_the_page_is_open_and_the_model_is_not() -> None:
    for path in OPEN:
        assert get(path, api_key="key").status_code == 200
    assert get("/v1/models", api_key="key").status_code == 401
    about = get("/page/server.json", api_key="key", max_tokens=9).json()
    assert about == {
        "model": "bytes",
        "method": "lookup",
        "context": 2000,
        "max_tokens": 9,
        "needs_key": True,
    }
    plain = get("/page/server.json", served(method="autoregressive")).json()
    assert plain["method"] is None and plain["needs_key"] is False


def test_what_is_asked_for_every_second_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multirate.serving")
    for path in ("/metrics", "/health", "/ready"):
        assert get(path).status_code == 200
    stopping = saying("x")
    stopping.stopping = True
    assert client(stopping)("GET", "/ready").status_code == 503
    assert get("/v1/models").status_code == 200
    lines = [one for one in caplog.records if one.getMessage() == "request"]
    paths = [line.fields["path"] for line in lines]  # type: ignore[attr-defined]
    assert paths == ["/ready", "/v1/models"]
