"""The log: one line for each request, as text or as JSON, without prompts unless asked for."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
import warnings
from dataclasses import dataclass, field
from typing import Any

from multirate.serving.errors import ApiError
from multirate.serving.requests import Usage

log = logging.getLogger("multirate.serving")
_OWN_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_BARE = re.compile(r"[A-Za-z0-9._:/+-]+")
FORMATS = ("text", "json")


@dataclass
class Record:
    """What is known of one HTTP request, for its line in the log."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    """By time.perf_counter: when its head arrived, and its body once that has."""
    status: int = 0
    model: str | None = None
    answers: int | None = None
    finish: str | None = None
    usage: Usage | None = None
    error: ApiError | None = None
    texts: dict[str, str] = field(default_factory=dict)
    """Prompts and answers, if they are to be logged."""

    def fields(self, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(seconds, 4),
            "model": self.model,
            "answers": self.answers,
            "finish": self.finish,
        }
        if self.usage is not None:
            used = self.usage
            found |= {
                "prompt_tokens": used.prompt_tokens,
                "cached_tokens": used.cached_tokens,
                "new_tokens": used.new_tokens,
                "drafted": used.drafted,
                "accepted": used.accepted,
                "queue_seconds": round(used.queue_seconds, 4),
                "prefill_seconds": round(used.prefill_seconds, 4),
                "decode_seconds": round(used.decode_seconds, 4),
            }
        if self.error is not None:
            found |= {"error": self.error.logged, "param": self.error.param}
        return {name: value for name, value in (found | self.texts).items() if value is not None}


def request_id(header: str | None) -> str:
    """The client's own, or a new one if it has none that can be written to a log."""
    if header is not None and _OWN_ID.fullmatch(header):
        return header
    return uuid.uuid4().hex


class _Line(logging.Formatter):
    """One line per record: time, level, message, then name=value, with JSON's quotes where a value
    has spaces or control characters.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        said = " ".join(record.getMessage().split())
        found = [self.formatTime(record), record.levelname.lower(), said]
        found += [f"{name}={_shown(value)}" for name, value in fields.items()]
        if record.exc_info:
            found.append(f"traceback={json.dumps(self.formatException(record.exc_info))}")
        return " ".join(found)


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        } | getattr(record, "fields", {})
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def start(form: str) -> None:
    """Writes our log, uvicorn's errors and all warnings to stderr. form: one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine() if form == "json" else _Line())
    for name, level in (("multirate.serving", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    warnings.showwarning = lambda message, *_, **__: log.warning(str(message))


_noted: set[str] = set()


def note_once(sentence: str) -> None:
    """Logs a sentence the first time it is said."""
    if sentence not in _noted and len(_noted) < 1000:
        _noted.add(sentence)
        log.info(sentence)
