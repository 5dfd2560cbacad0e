"""`multirate chat`: talks with a model in the terminal, or line by line in a pipe."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from multirate.cli import options
from multirate.cli.chat_input import CtrlC, piped, typed
from multirate.cli.generating import How, OfExperts, Sampling, ready_engine
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.cli.chat_session import Chat
    from multirate.engine import Engine


def command(
    model: options.Model = None,
    *,
    accelerator: options.Accelerator = None,
    system: Annotated[str | None, options.written(help="The system message.")] = None,
    how: How,
    max_new_tokens: options.MaxNewTokens = 1024,
    stop: options.Stop = None,
    sampling: Sampling,
    tuned: options.Tuned = True,
    machine: options.Machine,
    experts: OfExperts,
) -> None:
    """Talk with a model. /help lists the commands, such as /reset, /stats and /save.

    In a pipe each line of stdin is a message, and only the answers go to stdout. The text is the
    model's own unless you choose a lossy method or --mode dynamic. The sampling options default to
    the model's generation_config.
    """
    from multirate.cli.chat_session import Chat
    from multirate.loading.conversation import OpenConversation
    from multirate.loading.names import DEFAULT

    given = sampling.given()
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    name = model or DEFAULT
    if terminal:
        options.note(f"loading {name}")
    engine = ready_engine(model, accelerator, how, tuned, machine, experts)
    # the next turn needs the whole conversation, which was in memory during this one anyway
    engine.keep_bytes = sys.maxsize
    chat = Chat(
        engine,
        OpenConversation(engine.tokenizer, system),
        engine.sampling(**given),
        engine.stopping(max_new_tokens, stop),
        asdict(how),
        {"model": name, "weights": engine.weights, "backend": engine.backend},
        terminal,
    )
    options.note(f"{name}, weights {engine.weights}")
    options.note(f"{engine.backend} backend, {_drafts(engine, how)}")
    if terminal:
        _talk(chat)
    else:
        _pipe(chat)


def _drafts(engine: Engine, how: How) -> str:
    """The method, or why there are no drafts."""
    from multirate.methods.spec import PLAIN

    if how.speculate == "never":
        return "no drafts (--speculate never)"
    if how.method is None and engine.default == PLAIN:
        return "no drafts: none by default here; -a or --method chooses some"
    return f"method {how.method or engine.default}"


def _talk(chat: Chat) -> None:
    options.note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    with CtrlC() as chat.ctrl_c:
        for said in typed(chat.ctrl_c):
            try:
                if not chat.take(said):
                    return
            except UserError as error:
                options.note(f"error: {error}")


def _pipe(chat: Chat) -> None:
    for said in piped():
        if not chat.take(said):
            return
