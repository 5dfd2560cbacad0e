"""`multirate texts`: prepares texts that drafts are copied from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options


def command(
    model: options.BaseModel,
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSON or JSONL file of answers or texts (repeatable)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens, from the first texts.")
    ] = None,
) -> None:
    """Prepare texts that drafts are copied from, in addition to the prompt and the output.

    Use them with `--method sam:texts=OUT`, or with a trained drafter that has text lookup:
    `m2r2-carry:lookup=sam:texts=OUT`. The best texts are the model's own answers (`multirate
    answers`) or documents that its answers will quote. Of conversations, only the assistant's turns
    are used. The generated text does not change.
    """
    from multirate.decoding.speculate.given_texts import GivenTexts
    from multirate.io import check_writable
    from multirate.loading.hub import load_tokenizer
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
"""Maximum number of tokens of a text."""
