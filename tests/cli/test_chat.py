"""`multirate chat`: turns, commands, Ctrl-C, and what a pipe gets."""

from __future__ import annotations

import builtins
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.bench import tiny_model
from typer.testing import CliRunner, Result

import multirate
from multirate.cli import chat as chat_command
from multirate.cli.chat_input import CtrlC, Said, next_said, typed
from multirate.cli.chat_session import HELP, Chat, status_line
from multirate.cli.main import app
from multirate.decoding.results import DecodeStats
from multirate.decoding.session import Session
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.loading.conversation import OpenConversation

COMMANDS = ("/reset", "/system", "/stats", "/save", "/save!", "/help", "/exit")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return multirate.attach("tiny")


@pytest.fixture
def chat(engine: Engine) -> Chat:
    """One in a terminal, with a model that has read nothing."""
    engine.forget()
    how = {"speculate": "never"}
    talk = OpenConversation(engine.tokenizer)
    about = {"model": "tiny"}
    return Chat(engine, talk, engine.sampling(), engine.stopping(40), how, about, terminal=True)


def run(*arguments: str, text: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=text)


def expected(engine: Engine, *turns: str, most: int = 40) -> list[str]:
    """The answers of a model that reads the whole conversation each time."""
    talk, answers = OpenConversation(engine.tokenizer), []
    for turn in turns:
        engine.forget()
        prompt = talk.prompt(turn)
        found = engine.generate([prompt], stop=engine.stopping(most), speculate="never")
        talk.add(turn, found.sequences[0])
        answers.append(talk.messages[-1]["content"])
    return answers


def lines(*texts: str | type[BaseException]) -> Callable[[str], str]:
    """What stands for the keyboard: each call returns the next text, or raises."""
    waiting = list(texts)

    def read(_: str) -> str:
        found = waiting.pop(0) if waiting else EOFError
        if isinstance(found, str):
            return found
        if found is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise found

    return read


def talk_to(chat: Chat, monkeypatch: pytest.MonkeyPatch, *texts: str | type[BaseException]) -> None:
    monkeypatch.setattr(builtins, "input", lines(*texts))
    chat_command._talk(chat)


# a pipe


def test_a_pipe_gets_the_answers_only(engine: Engine) -> None:
    first, second = expected(engine, "hello there", "and then?")
    done = run("tiny", "-n", "40", text="hello there\n\nand then?\n")
    assert (done.exit_code, done.stdout) == (0, f"{first}\n\n{second}\n")
    assert done.stderr.startswith("tiny, weights bfloat16\nnative backend, method m2r2-carry\n")
    assert "tok/s" not in done.output and "\x1b" not in done.output and "> " not in done.output
    alone = CliRunner().invoke(app, ["generate", "tiny", "-n", "40", "-p", "hello there"])
    assert run("tiny", "-n", "40", text="hello there").stdout == alone.stdout


def test_commands_in_a_pipe_and_the_end(engine: Engine) -> None:
    (first,) = expected(engine, "a\nb\nc")
    done = run("tiny", "-n", "40", text='a\\\nb\\\nc\n/reset\n"""a\nb\n c"""\n/exit\nnever\n')
    (other,) = expected(engine, "a\nb\n c")
    assert (done.exit_code, done.stdout) == (0, f"{first}\n\n{other}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"hello\n\xff\n", "stdin, line 2: not UTF-8 text (byte 0)"),
        (b"hello\n/foo\n", f"unknown command /foo; accepted: {', '.join(COMMANDS)}"),
        (b"hello\n/save\n", "/save needs a file name, as in /save talk.jsonl"),
        (b"hello\n/save /nowhere/at/all.json\n", "cannot write /nowhere/at/all.json: no such file"),
        (b"hello\n/reset all\n", "/reset takes no argument, not 'all'"),
        (b"hello\n" + b"word " * 1100, "/reset starts a new conversation"),
    ],
)
def test_an_error_ends_a_pipe(engine: Engine, text: bytes, said: str) -> None:
    done = run("tiny", "-n", "8", text=text)
    assert done.exit_code == 2 and done.stdout == f"{expected(engine, 'hello', most=8)[0]}\n"
    assert f"error: {said}" in done.stderr or said in done.stderr.splitlines()[-1]


def test_why_there_are_no_drafts_is_said() -> None:
    never = run("tiny", "--speculate", "never").stderr
    assert "native backend, no drafts (--speculate never)\n" in never
    layers = ("tiny", "--backend", "hf", "--method", "autoregressive")
    assert "hf backend, method autoregressive\n" in run(*layers).stderr


def test_no_default_drafter_is_said(tmp_path: Path) -> None:
    folder = str(tiny_model.save(tmp_path))
    assert "no drafts: none by default here; -a or --method chooses some" in run(folder).stderr


def test_a_model_that_knows_no_turns_is_refused(tmp_path: Path) -> None:
    folder = tiny_model.save(tmp_path)
    words = tiny_model.tokenizer()
    words.chat_template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + (
        tiny_model.TEMPLATE
    )
    words.save_pretrained(folder)
    refused = run(str(folder), "--system", "be nice", text="hi")
    assert refused.exit_code == 2 and "rejects the turns system, user" in refused.stderr
    assert run(str(folder), "-n", "4", text="hi").exit_code == 0
    words.chat_template = None
    (folder / "chat_template.jinja").unlink()
    words.save_pretrained(folder)
    refused = run(str(folder), text="hi")
    assert refused.exit_code == 2 and not refused.stdout
    assert "error: the model has no chat template" in refused.stderr


# turns


def test_the_next_turn_reads_only_what_is_new(chat: Chat) -> None:
    for place, text in enumerate(("hello there", "and then?", "what else?")):
        known = chat.conversation.tokens
        chat.take(Said(text))
        assert chat._last is not None
        # the last token of an answer has not been read, the one before is read again
        assert chat._last.stats.resumed == (known - 2 if place else 0)
    texts = [m["content"] for m in chat.conversation.messages if m["role"] == "assistant"]
    assert texts == expected(chat.engine, "hello there", "and then?", "what else?")


def test_special_tokens_are_not_printed(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take(Said("hello there"))
    assert chat._last is not None and chat._last.finish_reasons == ["eos"]
    assert capsys.readouterr().out == f"{expected(chat.engine, 'hello there')[0]}\n"
    assert "<|" not in json.dumps(chat.conversation.messages)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["hi"], Said("hi")),
        ([" /etc is what? "], Said("/etc is what?")),
        (["/save  a b "], Said("/save  a b", is_command=True)),
        (["/pasted\ntext"], Said("/pasted\ntext")),
        (["a\\", "b\\", "c"], Said("a\nb\nc")),
        (["a\\"], Said("a")),
        (['"""a"""'], Said("a")),
        (['"""', "  a", "", "/b", '"""'], Said("  a\n\n/b")),
        (['"""a\\', 'b"""'], Said("a\\\nb")),
        (['"""a', "b"], Said("a\nb")),
        ([""], Said("")),
    ],
)
def test_messages_of_several_lines(typed: list[str], said: Said) -> None:
    assert next_said(lines(*typed)) == said


def test_nothing_is_not_a_message() -> None:
    with pytest.raises(EOFError):
        next_said(lines())


# commands


def refused(chat: Chat, command: str, *parts: str) -> None:
    before = json.dumps(chat.conversation.messages)
    with pytest.raises(UserError) as caught:
        chat.take(Said(command, is_command=True))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert json.dumps(chat.conversation.messages) == before


def said_by(chat: Chat, capsys: pytest.CaptureFixture[str], command: str) -> str:
    capsys.readouterr()
    assert chat.take(Said(command, is_command=True))
    out, error = capsys.readouterr()
    assert not out
    return error


def test_help_names_every_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    text = said_by(chat, capsys, "/help")
    assert text == HELP + "\n" and max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in COMMANDS)
    refused(chat, "/helpme", "unknown command /helpme", ", ".join(COMMANDS))
    assert not chat.take(Said("/exit", is_command=True))


def test_reset_keeps_the_system_message(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no system message" in said_by(chat, capsys, "/system")
    assert said_by(chat, capsys, "/system be nice") == "System message: be nice\n"
    chat.take(Said("hi"))
    roles = [message["role"] for message in chat.conversation.messages]
    assert roles == ["system", "user", "assistant"]
    said_by(chat, capsys, "/system be brief")
    assert chat.conversation.turns == 1 and said_by(chat, capsys, "/system").endswith("be brief\n")
    said_by(chat, capsys, "/reset")
    assert chat.conversation.messages == [{"role": "system", "content": "be brief"}]
    assert chat.conversation.tokens == chat.conversation.turns == 0
    said_by(chat, capsys, "/system off")
    assert chat.conversation.messages == [] and chat.conversation.system is None


def test_a_system_message_is_read(chat: Chat) -> None:
    chat.conversation.set_system("be nice")
    prompt = chat.engine.tokenizer.decode(chat.conversation.prompt("hi"))
    assert prompt.startswith("<|system|>\nbe nice<|end|>\n<|user|>\nhi")


def test_stats_are_those_of_the_last_answer(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert said_by(chat, capsys, "/stats") == "There is no answer yet.\n"
    chat.how["speculate"] = "always"
    chat.take(Said("hello there"))
    chat.take(Said("and then?"))
    text = said_by(chat, capsys, "/stats")
    assert chat._last is not None
    seen, used = chat._last.stats, chat.conversation.tokens
    for part in (
        f"{seen.tokens} tokens in ",
        " tokens/s, ended by the model",
        f"{100 * seen.acceptance:.0f}% of the drafted tokens were accepted",
        f"{seen.tokens_per_step:.2f} tokens per pass",
        f"first token after {seen.prefill_seconds:.2f} s, {seen.resumed} of {used - seen.tokens} ",
        f"2 answers, {used} of at most 1,024 tokens",
    ):
        assert part in text


def test_save_writes_all_and_replaces_only_when_told(
    chat: Chat, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat.take(Said("héllo"))
    file = tmp_path / "my talk.jsonl"
    assert said_by(chat, capsys, f"/save {file}") == f"2 messages in {file}\n"
    read = json.loads(file.read_text())
    assert read == {"model": "tiny", "messages": chat.conversation.messages}
    assert "héllo" in file.read_text() and file.read_text().count("\n") == 1
    file.write_text("mine")
    refused(chat, f"/save {file}", "exists", f"/save! {file}")
    assert file.read_text() == "mine"
    said_by(chat, capsys, f"/save! {file}")
    assert json.loads(file.read_text()) == read
    refused(chat, f"/save {tmp_path}/no/talk.jsonl", "cannot write", "no such file")
    refused(chat, f"/save! {tmp_path}", "cannot write", "not a regular file")
    refused(chat, f"/save {tmp_path}/{'x' * 300}", "cannot write", "file name too long")
    refused(chat, "/save ~nobody-here/talk.jsonl", "cannot write", "no such file")
    refused(chat, "/save!", "/save! needs a file name")
    assert list(tmp_path.iterdir()) == [file]


def test_a_saved_chat_is_training_data(chat: Chat, tmp_path: Path) -> None:
    from multirate.training.data import read_conversations

    chat.take(Said("hi"))
    chat.take(Said(f"/save {tmp_path}/talk.jsonl", is_command=True))
    (read,) = read_conversations(tmp_path / "talk.jsonl")
    assert [role for role, _ in read.turns] == ["user", "assistant"]


# Ctrl-C


def interrupting(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C comes after the first `after` tokens of every answer."""
    right = Engine.generate

    def generate(self: Engine, *arguments: Any, on_tokens: Any, **named: Any) -> Any:
        seen = 0

        def push(b: int, tokens: list[int]) -> None:
            nonlocal seen
            on_tokens(b, tokens)
            seen += len(tokens)
            if seen >= after:
                signal.raise_signal(signal.SIGINT)

        return right(self, *arguments, on_tokens=push, **named)

    monkeypatch.setattr(Engine, "generate", generate)


def test_ctrl_c_stops_the_answer_and_keeps_it(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = expected(chat.engine, "hello there")[0]
    chat.engine.forget()
    with monkeypatch.context() as patch:
        interrupting(patch, after=5)
        talk_to(chat, monkeypatch, "hello there")
    out, error = capsys.readouterr()
    said = chat.conversation.messages[-1]["content"]
    assert chat._last is not None and chat._last.stats.tokens == 6
    assert whole.startswith(said) and 0 < len(said) < len(whole) and out.startswith(f"{said}\n")
    assert "6 tokens, " in error and ", stopped" in error
    known = chat.conversation.tokens
    talk_to(chat, monkeypatch, "/stats", "go on")
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    assert chat.conversation.turns == 2 and chat._last.stats.resumed == known - 2


def test_ctrl_c_before_the_first_token_forgets_the_message(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Session.prefill

    def prefill(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "prefill", prefill)
        talk_to(chat, monkeypatch, "hello there")
    assert "stopped before the first token" in capsys.readouterr().err
    assert chat.conversation.messages == []
    talk_to(chat, monkeypatch, "hello there")
    said = chat.conversation.messages[-1]["content"]
    assert said == expected(chat.engine, "hello there")[0]


def test_ctrl_c_between_answer_and_prompt_does_nothing(chat: Chat) -> None:
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt), ctrl_c.raising():
            assert not ctrl_c.pressed
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_twice_at_the_prompt_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pressed = KeyboardInterrupt
    keyboard = lines(pressed, "a", '"""b', pressed, "c", "\udcff", pressed, "d", pressed, pressed)
    monkeypatch.setattr(builtins, "input", keyboard)
    found: list[str] = []
    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        for said in typed(ctrl_c):
            found.append(said.text)
    assert found == ["a", "c", "d"]
    error = capsys.readouterr().err
    assert error.count("Ctrl-C again ends the chat") == 4
    assert "error: the line: not UTF-8 text (byte 0)" in error


def test_ctrl_c_in_a_pipe_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, after=1)
    done = run("tiny", text="hello there\nand then?\n")
    assert done.exit_code == 130 and done.stderr.endswith("interrupted\n")
    assert done.stdout.endswith("\n")


def test_an_error_in_on_tokens_leaves_the_engine_usable(engine: Engine) -> None:
    engine.forget()
    prompt = OpenConversation(engine.tokenizer).prompt("hello there")
    right = engine.generate([prompt], stop=engine.stopping(20))

    def fail(_: int, tokens: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt], stop=engine.stopping(20), on_tokens=fail)
    again = engine.generate([prompt], stop=engine.stopping(20))
    assert again.sequences == right.sequences and again.stats.resumed == 0


# the context, and the status line


def test_a_full_context_says_what_to_do(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.stop = chat.engine.stopping(None)
    long = "word"
    while len(chat.conversation.prompt(long)) < 1019:
        long += " word"
    talk_to(chat, monkeypatch, long, "more", "/reset", "hello there")
    error = capsys.readouterr().err
    assert "note: the context is full: /reset starts a new conversation" in error
    assert "error: with this message the conversation has 1,0" in error
    assert "leaves no room for an answer: /reset starts a new conversation, /save FILE" in error
    assert chat.conversation.turns == 1


def test_an_answer_that_is_cut_off_is_said(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.stop = chat.engine.stopping(3)
    talk_to(chat, monkeypatch, "hello there")
    error = capsys.readouterr().err
    assert "note: cut off after 3 tokens; -n sets the limit" in error and "3 tokens, " in error


def test_a_remark_of_the_engine_is_said_once(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Engine.generate

    def generate(self: Engine, *arguments: Any, **named: Any) -> Any:
        output = right(self, *arguments, **named)
        self.notice = "drafting is not faster here"
        return output

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", generate)
        talk_to(chat, monkeypatch, "hello there", "and then?")
    assert capsys.readouterr().err.count("note: drafting is not faster here") == 1


def stats(**changes: Any) -> DecodeStats:
    counts = dict(tokens=87, first_tokens=1, sequence_steps=36, seconds=0.613, resumed=1204)
    drafts = dict(drafted=100, drafted_levels=70, accepted=50)
    return DecodeStats(**{**counts, **drafts, **changes})


def test_the_status_line_fits() -> None:
    text = "87 tokens, 142 tok/s, 2.4 tokens/step, 71% accepted, 1,204 tokens kept"
    assert status_line(stats()) == text
    assert status_line(stats(), stopped=True) == f"{text}, stopped"
    assert status_line(stats(), width=60) == text.removesuffix(", 1,204 tokens kept")
    plain = stats(tokens=1, drafted=0, resumed=0, seconds=0.0)
    assert status_line(plain) == "1 token, 1,000,000,000 tok/s, no drafts"
    most = stats(tokens=131_072, resumed=131_072, seconds=1.0, accepted=70)
    assert len(status_line(most, stopped=True)) <= 80
