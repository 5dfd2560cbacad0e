"""A chat with a model: answers, commands, and a status line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from multirate.cli import options
from multirate.cli.chat_input import CtrlC, Said
from multirate.cli.generating import ENDINGS, print_stats, remarks
from multirate.errors import UserError
from multirate.io import write_atomically

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.results import DecodeStats, GenerationOutput
    from multirate.decoding.stopping import StopSettings
    from multirate.engine import Engine
    from multirate.loading.conversation import OpenConversation

HELP = """\
/reset          forget the conversation, but not the system message
/system TEXT    set the system message; /system shows it, /system off removes it
/stats          speed, drafts and context of the last answer
/save FILE      write the messages as JSON; /save! replaces a file
/help           this list
/exit           end the chat (or Ctrl-D)
Ctrl-C stops an answer. \"\"\" begins and ends a message of several lines, and a
line that ends in \\ goes on in the next. A space before / makes it a message."""
OFF = "off"
FULL = "/reset starts a new conversation, /save FILE keeps this one"


def status_line(seen: DecodeStats, stopped: bool = False, width: int = 80) -> str:
    """What an answer took, in as many parts as fit."""
    parts = [
        f"{seen.tokens:,} token{'s' * (seen.tokens != 1)}",
        f"{seen.tokens / max(seen.seconds, 1e-9):,.0f} tok/s",
    ]
    if seen.drafted:
        parts.append(f"{seen.tokens_per_step:.1f} tokens/step")
        parts.append(f"{100 * seen.acceptance:.0f}% accepted")
    else:
        parts.append("no drafts")
    if seen.resumed:
        parts.append(f"{seen.resumed:,} tokens kept")
    if stopped:
        parts.append("stopped")
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)


@dataclass
class Chat:
    """Takes what the user says, one after the other."""

    engine: Engine
    conversation: OpenConversation
    sampling: SamplingSettings
    stop: StopSettings
    how: dict[str, Any]
    """Further arguments of `Engine.generate`."""
    about: dict[str, str]
    """What `/save` writes beside the messages."""
    terminal: bool
    """Whether someone reads along: shows the status line, and Ctrl-C stops an answer only."""
    ctrl_c: CtrlC = field(default_factory=CtrlC)
    """In effect in a terminal."""
    _known: set[str] = field(default_factory=set)
    """The engine's remarks that were printed."""
    _last: GenerationOutput | None = None
    _ending: str = ""
    _prompt: int = 0
    """Tokens of the last prompt."""

    def take(self, said: Said) -> bool:
        """Answers, or runs a command. False: the chat has ended. UserError for what cannot be done;
        the conversation is then as before.
        """
        if not said.is_command:
            if said.text.strip():
                self._answer(said.text)
            return True
        name, _, rest = said.text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/save": self._save,
            "/save!": self._replace,
            "/help": self._help,
        }
        if name == "/exit":
            return False
        if name not in commands:
            known = ", ".join([*commands, "/exit"])
            raise UserError(f"unknown command {name}; accepted: {known}")
        commands[name](rest.strip())
        return True

    def _answer(self, text: str) -> None:
        prompt = self.conversation.prompt(text)
        self._check_room(len(prompt))
        answer: list[int] = []
        try:
            output = self._generate(prompt, answer)
        except KeyboardInterrupt:
            if not self.terminal:
                raise
            options.note("\nstopped before the first token; the message is forgotten")
            return
        self.conversation.add(text, answer)
        reason = output.finish_reasons[0]
        stopped = self.ctrl_c.pressed and reason == "stop_string"
        self._last, self._prompt = output, len(prompt)
        self._ending = "stopped by Ctrl-C" if stopped else ENDINGS[reason]
        if self.terminal:
            console = options.console(stderr=True)
            line = status_line(output.stats, stopped, console.width)
            console.print(line, style="dim", markup=False, soft_wrap=True)
        self._remark(reason)
        if self.terminal:
            options.note("")

    def _generate(self, prompt: list[int], answer: list[int]) -> GenerationOutput:
        """Generates and prints an answer, whose tokens it adds to `answer`."""
        from multirate.decoding.text_stream import TextStream

        printer = TextStream(self.engine.tokenizer, lambda piece: typer.echo(piece, nl=False))
        stop = replace(self.stop, ends=lambda *_: self.ctrl_c.pressed)

        def push(_: int, tokens: list[int]) -> None:
            if not answer:
                # from now on `ends` stops the answer, so that the engine keeps what it has read
                self.ctrl_c.raises = False
                if self._last is not None and not self.terminal:
                    typer.echo("")  # between two answers
            answer.extend(tokens)
            printer.push(tokens)

        try:
            with self.ctrl_c.raising():
                return self.engine.generate(
                    [prompt], self.sampling, stop, on_tokens=push, **self.how
                )
        finally:
            if answer:
                printer.end()
                typer.echo("")

    def _check_room(self, tokens: int) -> None:
        info = self.engine.decoder.info
        if info.max_positions is not None and tokens >= info.max_positions:
            raise UserError(
                f"with this message the conversation has {tokens:,} tokens, and {info.context} "
                f"leaves no room for an answer: {FULL}"
            )

    def _remark(self, reason: str) -> None:
        """Says what the engine remarks, once, and how an answer was cut off."""
        for remark in remarks(self.engine, self.sampling):
            if remark not in self._known:
                self._known.add(remark)
                options.note(f"note: {remark}")
        if reason == "context":
            options.note(f"note: the context is full: {FULL}")
        elif reason == "length":
            most = self.stop.max_new_tokens
            options.note(f"note: cut off after {most:,} tokens; -n sets the limit")

    def _reset(self, rest: str) -> None:
        _none(rest, "/reset")
        self.conversation.reset()
        options.note("The conversation is forgotten.")

    def _system(self, rest: str) -> None:
        if rest:
            self.conversation.set_system(None if rest == OFF else rest)
        system = self.conversation.system
        if system is None:
            options.note("There is no system message, unless the model's template has its own.")
        else:
            options.note(f"System message: {system}")

    def _stats(self, rest: str) -> None:
        _none(rest, "/stats")
        if self._last is None:
            options.note("There is no answer yet.")
            return
        print_stats(self.engine, self._last, self._ending)
        seen = self._last.stats
        options.note(
            f"first token after {seen.prefill_seconds:.2f} s, {seen.resumed:,} of {self._prompt:,} "
            "prompt tokens kept from earlier turns"
        )
        turns, most = self.conversation.turns, self.engine.decoder.info.max_positions
        limit = "" if most is None else f" of at most {most:,}"
        options.note(
            f"{turns} answer{'s' * (turns != 1)}, {self.conversation.tokens:,}{limit} tokens"
        )

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        if os.path.lexists(path):
            raise UserError(f"{path} exists; `/save! {rest}` replaces it")
        self._write(path)

    def _replace(self, rest: str) -> None:
        self._write(_path(rest, "/save!"))

    def _write(self, path: Path) -> None:
        messages = self.conversation.messages
        record = {**self.about, "messages": messages}
        # one line, as the commands that read conversations with --data want it
        write_atomically(path, json.dumps(record, ensure_ascii=False) + "\n")
        options.note(f"{len(messages)} message{'s' * (len(messages) != 1)} in {path}")

    def _help(self, rest: str) -> None:
        options.note(HELP)


def _none(rest: str, command: str) -> None:
    if rest:
        raise UserError(f"{command} takes no argument, not {rest!r}")


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise UserError(f"{command} needs a file name, as in {command} talk.jsonl")
    return Path(os.path.expanduser(rest))
