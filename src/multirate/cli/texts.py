"""`multirate texts`: texts that drafts may be copied from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: Annotated[
        str, typer.Argument(help="The base model's folder, GGUF file, hub id or name.")
    ],
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSON or JSONL with answers or plain texts (repeatable)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens, of the first texts.")
    ] = None,
) -> None:
    """Prepare texts from which drafts are copied, beside the text that is being written.

    `multirate generate MODEL --method sam:texts=OUT` drafts what followed there; so do all methods
    that are joined to the text: `m2r2-carry:lookup=sam:texts=OUT`. Of conversations the assistant's
    turns are taken. What helps most is what the model itself says (`multirate answers`), or what
    its answers will quote. The text that is generated stays the model's own.
    """
    from multirate.decoding.given_texts import GivenTexts
    from multirate.hub import load_tokenizer
    from multirate.io import check_writable
    from multirate.training.data import load_samples

    check_writable(out, "a file of texts that multirate wrote", GivenTexts.saved)
    options.keep_transformers_quiet()
    tokenizer, vocabulary = load_tokenizer(model)
    parts, count = [], 0
    for sample in load_samples(data, tokenizer, LONGEST_TEXT, vocabulary):
        parts.append(sample.ids[sample.response][: None if tokens is None else tokens - count])
        count += len(parts[-1])
        if count == tokens:
            break
    given = GivenTexts.of(parts, vocabulary)
    given.save(out)
    size = out.stat().st_size / 1e6
    typer.echo(f"{len(parts)} texts of {count} tokens in {out} ({size:.1f} MB)")


LONGEST_TEXT = 1 << 20
"""Tokens of a text; the rest is cut."""
