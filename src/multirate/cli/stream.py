"""An answer on the terminal while it is written."""

from __future__ import annotations

from typing import Any

import typer

from multirate.decoding.text_stream import TextStream


def printed(tokenizer: Any) -> TextStream:
    """A stream that prints its text."""
    return TextStream(tokenizer, lambda piece: typer.echo(piece, nl=False))
