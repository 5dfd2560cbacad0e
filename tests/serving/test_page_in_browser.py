"""The page at / in Chromium, by keyboard and mouse. Skipped where there is no browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import multirate
from multirate.serving.model import ServedModel
from multirate.serving.requests import Counters, Request
from multirate.serving.scheduler import start
from multirate.serving.settings import ServingSettings
from serving.conftest import Running, eventually, prompt_text, running, saying, tokens
from serving.schedulers import Script, Scripted

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
INSTALLED = ("chromium", "chromium-browser", "google-chrome", "chrome")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Ends with the module: while it runs, no other test could start an event loop."""
    with playwright.sync_playwright() as found:
        path = next(filter(None, map(shutil.which, INSTALLED)), None)
        if path is None and not Path(found.chromium.executable_path).exists():
            pytest.skip("no Chromium was found: run playwright install chromium")
        chromium = found.chromium.launch(executable_path=path)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a server. A request to anywhere else, an error that no test expects, and a
    violation of the page's policy fail the test.
    """
    contexts, wrong = [], []

    def opened(server: Running, width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if unexpected(line.text) else None)
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(server.url) else wrong.append(asked.url),
        )
        page.goto(server.url)
        expect(page.locator("#model-name")).not_to_be_empty()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def unexpected(line: str) -> bool:
    """Browsers note each refusal and each broken connection by themselves."""
    return not re.search(r"status of (401|429|503)|net::ERR_", line)


def ask(page: Any, question: str) -> None:
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")


def answers(page: Any) -> Any:
    return page.get_by_role("article", name="Answer")


def result(page: Any) -> Any:
    return page.locator("#result")


@contextmanager
def saying_each(*texts: str, **how: Any) -> Iterator[tuple[Scripted, Running]]:
    """A server that says one text after the other, the last one from then on."""
    left = list(texts)

    def play(request: Request) -> Script:
        return Script(tokens(left.pop(0) if len(left) > 1 else left[0]), **how)

    scheduler = Scripted(play)
    with running(scheduler) as server:
        yield scheduler, server


def test_a_conversation_by_keyboard(open_page: Open) -> None:
    with saying_each("First.", "First.", "Second.") as (scheduler, server):
        page = open_page(server)
        field = page.get_by_label("Message", exact=True)
        expect(field).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert not scheduler.requests
        page.keyboard.press("Enter")
        expect(answers(page).locator(".body")).to_have_text("First.")
        expect(page.locator("#said")).to_have_text("First.")  # what a screen reader says, once
        expect(result(page)).not_to_be_empty()
        expect(field).to_be_focused()
        expect(field).to_have_value("")
        page.get_by_text("Settings").click()
        page.get_by_label("System message").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Maximum of new tokens").fill("50")
        page.get_by_label("After every answer").uncheck()
        ask(page, "three")
        expect(answers(page).last.locator(".body")).to_have_text("Second.")
        expect(answers(page).last.locator(".foot")).to_contain_text("7 tokens")
    request = scheduler.requests[-1]
    assert prompt_text(request) == (
        "<|system|>Be brief.<eos><|user|>one\ntwo<eos><|assistant|>First.<eos>"
        "<|user|>three<eos><|assistant|>"
    )
    assert request.sampling.temperature == 0.5 and request.stop.max_new_tokens == 50


def test_a_new_chat_forgets(open_page: Open) -> None:
    with saying_each("Yes.") as (scheduler, server):
        page = open_page(server)
        page.get_by_label("After every answer").uncheck()
        page.get_by_role("button", name="Why is the sky blue?").click()
        expect(page.get_by_role("log")).to_be_focused()
        expect(page.get_by_role("button", name="Race", exact=True)).to_be_enabled()
        page.get_by_role("button", name="New chat").click()
        expect(answers(page)).to_have_count(0)
        expect(page.locator("#drafted-text")).to_be_empty()
        expect(page.get_by_role("button", name="Race", exact=True)).to_be_disabled()
        ask(page, "again")
        expect(answers(page).locator(".body")).to_have_text("Yes.")
    assert prompt_text(scheduler.requests[-1]) == "<|user|>again<eos><|assistant|>"


HOSTILE = """\
<think>Is <i>this</i> text?</think>

# A <b>title</b>
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"> **bold** `a < b`

```html
<script>window.hacked = 3</script>
  **not bold**
```
after"""


def test_what_the_model_says_is_text_and_never_html(open_page: Open) -> None:
    with saying_each(HOSTILE, sizes=(7,)) as (_, server):
        page = open_page(server)
        ask(page, "<img src=y onerror='window.hacked = 4'>")
        expect(result(page)).to_contain_text("the same text")
        thought = answers(page).locator(".thought p")
        expect(thought).to_be_hidden()
        answers(page).get_by_text("Thought", exact=True).click()
        expect(thought).to_have_text("Is <i>this</i> text?")
        body = answers(page).locator(".body")
        expect(body.locator("strong")).to_have_text(["A <b>title</b>", "bold"])
        expect(body.locator("p code")).to_have_text("a < b")
        wanted = "<script>window.hacked = 3</script>\n  **not bold**"
        assert body.locator("pre").text_content() == wanted
        assert page.locator("#drafted-text").text_content() == HOSTILE
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.hacked") is None


def test_escape_stops_the_answer(open_page: Open) -> None:
    with saying_each("word " * 200, seconds=0.02) as (scheduler, server):
        page = open_page(server)
        ask(page, "go on")
        expect(answers(page).locator(".body")).to_contain_text("word word")
        expect(page.get_by_role("button", name="Stop").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(answers(page).locator(".foot")).to_contain_text("Stopped.")
        eventually(lambda: scheduler.tickets[0].cancelled.is_set())
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.get_by_role("button", name="Race", exact=True)).to_be_disabled()
    assert len(scheduler.requests) == 1


def test_a_full_queue_says_when_to_try_again(open_page: Open) -> None:
    with saying_each("Now.") as (scheduler, server):
        page = open_page(server)
        scheduler.room = 0
        ask(page, "hello")
        error = page.get_by_role("alert")
        expect(error).to_contain_text(
            "The server is busy. The queue is full. Try again in 2 seconds."
        )
        scheduler.room = 9
        error.get_by_role("button", name="Try again").click()
        expect(answers(page).locator(".body")).to_have_text("Now.")
        expect(error).to_have_count(0)
        expect(result(page)).not_to_be_empty()
        assert prompt_text(scheduler.requests[0]).count("hello") == 1


def test_failures_are_told(open_page: Open) -> None:
    with saying_each("Half", error=RuntimeError("no")) as (_, server):
        page = open_page(server)
        ask(page, "one")
        expect(page.get_by_role("alert")).to_contain_text("The server failed to answer")
        expect(answers(page).locator(".body")).to_have_text("Half")
    ask(page, "two")
    expect(page.get_by_role("alert").last).to_contain_text("The server does not answer.")
    expect(page.locator("#server-state")).to_have_text("unreachable")


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page: Open) -> None:
    scheduler = saying("Welcome.")
    with running(scheduler, api_key="kéy €") as server:
        page = open_page(server)
        field = page.get_by_label("API key of this server")
        expect(field).to_be_focused()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("The API key is missing or wrong")
        field.fill("kéy €")
        page.keyboard.press("Enter")
        expect(field).to_be_hidden()
        ask(page, "hello")
        expect(answers(page).locator(".body")).to_have_text("Welcome.")
        page.reload()
        expect(page.locator("#model-name")).not_to_be_empty()
        expect(field).to_be_hidden()
        assert "kéy" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def test_the_race_repeats_the_request_without_drafts(open_page: Open) -> None:
    with saying_each("abc def", sizes=(3,), seconds=0.1) as (scheduler, server):
        page = open_page(server)
        page.clock.install()
        ask(page, "hello")
        expect(result(page)).to_contain_text("1.00× the speed of plain decoding: 0.50 s")
        expect(result(page)).to_contain_text("the same text")
        drafted, plain = scheduler.requests
        assert drafted.speculate and not plain.speculate
        assert drafted.prompt == plain.prompt
        assert drafted.sampling.seed == plain.sampling.seed is not None
        assert drafted.stop.max_new_tokens == plain.stop.max_new_tokens
        # Steps of abc, " de" and f<eos>: the last token of each is the model's.
        kinds = page.locator("#drafted-text span").evaluate_all("all => all.map(o => o.className)")
        assert kinds == ["o-draft", "o-draft", "o-model"] * 2 + ["o-draft"]
        expect(page.locator("#count-draft")).to_have_text("5")
        expect(page.locator("#count-model")).to_have_text("2")
        expect(page.locator("#drafted-rate")).to_have_text("16 tokens/s")  # 8 with the end
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        page.get_by_role("button", name="Replay").click()
        for lane in ("#drafted-text", "#plain-text"):  # the first step's tokens, until time goes on
            assert page.locator(lane).text_content() == "abc"
        page.clock.run_for(1000)
        for lane in ("#drafted-text", "#plain-text"):
            assert page.locator(lane).text_content() == "abc def"
        expect(page.get_by_role("button", name="Replay")).to_be_enabled()
    assert len(scheduler.requests) == 2


def test_another_text_is_not_called_the_same(open_page: Open) -> None:
    with saying_each("abcdef", "abcxyz") as (_, server):
        page = open_page(server)
        ask(page, "hello")
        expect(result(page)).to_contain_text("another text after 3 characters")


def test_a_new_question_ends_the_race(open_page: Open) -> None:
    def play(request: Request) -> Script:
        return Script(tokens("short" if request.speculate else "long " * 300), seconds=0.01)

    scheduler = Scripted(play)
    with running(scheduler) as server:
        page = open_page(server)
        ask(page, "one")
        expect(page.locator("#plain-text")).to_contain_text("long")
        ask(page, "two")
        eventually(lambda: scheduler.tickets[1].cancelled.is_set())
        expect(answers(page)).to_have_count(2)
        expect(answers(page).last.locator(".body")).to_have_text("short")
        expect(page.locator("#plain-text")).to_contain_text("long long")
        expect(page.locator("#drafted-text")).to_have_text("short")
        page.keyboard.press("Escape")
        expect(result(page)).to_have_text("The race was stopped.")


def test_a_server_without_drafts_has_no_race(open_page: Open) -> None:
    from serving.conftest import served

    scheduler = saying("x")
    with running(scheduler, served(method="autoregressive")) as server:
        page = open_page(server)
        expect(page.get_by_text("there is nothing to race against")).to_be_visible()
        ask(page, "hello")
        expect(answers(page).locator(".body")).to_have_text("x")
        expect(page.get_by_role("button", name="Race", exact=True)).to_be_disabled()
    assert len(scheduler.requests) == 1


def test_the_charts_have_what_the_server_counted(open_page: Open) -> None:
    scheduler = saying("x")
    counted = Counters(running=2, waiting=3, drafts=4, drafted=10, accepted=4, new_tokens=70)
    counted.accepted_at = [3, 1]
    scheduler.counters = lambda: counted  # type: ignore[method-assign]
    with running(scheduler) as server:
        page = open_page(server)
        chart = page.get_by_role("img", name="Accepted by position: 1: 75 %, 2: 25 %")
        expect(chart.locator("rect")).to_have_count(2)
        tall = [
            float(one)
            for one in chart.locator("rect").evaluate_all(
                "all => all.map(bar => bar.getAttribute('height'))"
            )
        ]
        assert tall[0] == pytest.approx(3 * tall[1])
        note = page.locator("#acceptance-note")
        expect(note).to_contain_text(
            "40 % of the drafted tokens were emitted, 2.00 tokens per pass"
        )
        for table in page.get_by_text("As a table").all():
            table.click()
        expect(page.get_by_role("row", name="Accepted 75 % 25 %")).to_be_visible()
        expect(page.get_by_role("row", name="Running 2 2")).to_be_visible()
        expect(page.get_by_role("row", name="Waiting 3 3")).to_be_visible()
        counted.new_tokens += 500
        expect(page.locator("#speed svg")).to_have_attribute(
            "aria-label", re.compile(r"at most [1-9]\d{2}")
        )


TOO_WIDE = """
[...document.querySelectorAll("html, section, .log, .lane, .text, figure, .top, .notice")]
    .filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => one.id || one.className || one.tagName)
"""
"""What would have to be scrolled sideways."""


@pytest.mark.parametrize("width", [390, 1280])
def test_every_width_is_readable_in_both_themes(open_page: Open, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with saying_each(HOSTILE + " word" * 60, sizes=(3,)) as (scheduler, server):
        page = open_page(server, width, 844, reduced_motion="reduce")
        ask(page, "x" * 300)
        expect(result(page)).not_to_be_empty()
        scheduler.room = 0
        ask(page, "y")
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_text("Settings").click()
        for view in ["Chat", "Race", "Charts"] if width < 900 else [None]:
            if view:
                page.locator(".views").get_by_role("button", name=view).click()
            assert page.evaluate(TOO_WIDE) == []
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                found = axe.Axe().run(page)
                assert found.violations_count == 0, found.generate_report()


def test_the_theme_is_chosen_and_remembered(open_page: Open) -> None:
    with saying_each("x") as (_, server):
        page = open_page(server, color_scheme="light")
        colour = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colour)
        button = page.get_by_role("button", name="Dark")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        dark = page.evaluate(colour)
        assert dark != light
        page.reload()
        assert page.evaluate(colour) == dark


def test_a_real_model_says_the_same_with_and_without_drafts(open_page: Open) -> None:
    engine, settings = multirate.attach("tiny"), ServingSettings(parallel=2)
    scheduler = start(engine, settings)
    with running(scheduler, ServedModel.of(engine, "tiny", settings)) as server:
        page = open_page(server)
        page.get_by_text("Settings").click()
        page.get_by_label("Maximum of new tokens").fill("60")
        page.get_by_label("Temperature").fill("0")
        ask(page, "Tell me a story. " * 3)
        expect(result(page)).to_contain_text("the same text", timeout=20_000)
        drafted = page.locator("#drafted-text .o-draft, #drafted-text .o-text").count()
        shown = page.locator("#count-draft, #count-text").all_inner_texts()
        assert drafted == sum(map(int, shown)) > 0
        assert page.locator("#plain-text .o-draft, #plain-text .o-text").count() == 0
        accepted = scheduler.counters().accepted
    assert accepted == drafted
