"""Prints an answer as it is generated."""

from __future__ import annotations

from typing import Any

import typer

from multirate.decoding.text_stream import TextStream


def printed(tokenizer: Any) -> TextStream:
    """A text stream that prints to stdout."""
    return TextStream(tokenizer, lambda piece: typer.echo(piece, nl=False))
