"""`multirate chat` in a process of its own: at a terminal, and with a reader that goes away."""

from __future__ import annotations

import os
import pty
import select
import time

import fresh_process
import pytest
from fresh_process import FreshProcess

CTRL_C = "\x03"
AT_A_TERMINAL = """
import os, sys, time
from multirate.cli.main import run
from multirate.decoding.text_stream import TextStream

os.setsid()
screen = os.open(sys.argv.pop(), os.O_RDWR)  # Ctrl-C there is for this process
for descriptor in range(3):
    os.dup2(screen, descriptor)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
os.environ["TERM"] = "xterm"
right = TextStream.push
def push(self, tokens):
    right(self, tokens)
    time.sleep(0.05)  # slow enough to be interrupted
TextStream.push = push
run()
"""
WITHOUT_A_READER = """
import io, os, sys
from multirate.cli.main import run

reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(b"hello there")), open(1, "w")
run()
"""


class Terminal:
    """`multirate chat` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = FreshProcess(AT_A_TERMINAL, "chat", *arguments, os.ttyname(screen))
        self._screen = screen  # open until the process has it
        self._shown = ""

    def see(self, text: str, timeout: float = 60.0) -> str:
        """Waits for a text, and returns what came before it."""
        until = time.monotonic() + timeout
        while text not in self._shown:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._keyboard], [], [], left)
            assert ready, f"{text!r} did not come: {self._shown}"
            self._shown += os.read(self._keyboard, 4096).decode()
        before, _, self._shown = self._shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def end(self) -> int:
        code = self.process.finish().returncode
        os.close(self._keyboard)
        os.close(self._screen)
        return code


@pytest.mark.slow
def test_in_a_terminal() -> None:
    screen = Terminal("tiny", "--speculate", "never", "--temperature", "9", "--seed", "1")
    screen.see("Ctrl-D ends the chat.")
    screen.see("> ")
    screen.type("\x1b[200~two lines\npasted\x1b[201~\r")
    screen.see("\x1b[?2004l")
    screen.see("e")
    screen.type(CTRL_C)
    assert " tok/s, no drafts" in screen.see("stopped")
    screen.see("> ")
    screen.type("/stats\r")
    screen.see("1 answer, ")  # both lines were one message
    screen.see("> ")
    screen.type("half a li")
    screen.see("half a li")
    screen.type(CTRL_C)
    screen.see("Ctrl-C again ends the chat")
    screen.see("> ")
    screen.type(CTRL_C)
    screen.see("interrupted")
    assert screen.end() == 130


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = fresh_process.run(WITHOUT_A_READER, "chat", "tiny")
    assert done.returncode == 1
    assert done.stderr == "tiny, weights bfloat16\nnative backend, method m2r2-carry\n"
