"""Training text that the base model wrote itself: its greedy answers to the data's questions. [ours]

A draft has to agree with what the model says, not with what a data set says. The file is written one record
at a time, so an interrupted run is continued by the same call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multirate.backbone.decoder import Decoder
from multirate.decoding.autoregressive import generate_autoregressive
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.training.data import read_conversations, render_prompt


def answer_questions(
    decoder: Decoder,
    tokenizer: Any,
    data_files: Sequence[str | Path],
    out: str | Path,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 160,
    limit: int | None = None,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes {"instruction", "output"} lines to `out`: the first user turn of each record, answered by the model.

    limit: at most so many questions, spread evenly over the data. progress(done, total). Returns the number of
    records in the file. Questions that leave no room in the context, and empty answers, are left out.
    Raises UserError for unusable data or an `out` that was made from other questions.
    """
    first_turns = [c.turns[0] for f in data_files for c in read_conversations(f) if c.turns]
    questions = [text for role, text in first_turns if role == "user"]
    if not questions:
        names = ", ".join(str(f) for f in data_files)
        raise UserError(f"no user turns in {names}; accepted are chat or question records")
    if limit is not None and limit < len(questions):
        questions = [questions[i * len(questions) // limit] for i in range(limit)]
    room = (decoder.facts.max_positions or 1 << 30) - max_new_tokens
    prompts = [
        (q, list(tokenizer(render_prompt(tokenizer, [("user", q)]), add_special_tokens=False)["input_ids"]))
        for q in questions
    ]
    prompts = [(q, ids) for q, ids in prompts if 0 < len(ids) <= room]
    path = Path(out)
    done = _resume(path, [q for q, _ in prompts])
    stop = StopSettings(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    try:
        with path.open("a", encoding="utf-8") as handle:
            for start in range(done, len(prompts), batch):
                part = prompts[start : start + batch]
                answers = generate_autoregressive(decoder, [ids for _, ids in part], stop=stop).sequences
                for (question, _), answer in zip(part, answers, strict=True):
                    text = tokenizer.decode(answer, skip_special_tokens=True).strip()
                    handle.write(json.dumps({"instruction": question, "output": text or " "}) + "\n")
                handle.flush()
                if progress is not None:
                    progress(min(start + batch, len(prompts)), len(prompts))
    except OSError as error:
        raise UserError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    return len(prompts)


def _resume(path: Path, questions: Sequence[str]) -> int:
    """How many records `path` holds already; cuts off a half-written last line."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")
    whole, rest = lines[:-1], lines[-1]
    if rest:
        path.write_bytes(b"".join(line + b"\n" for line in whole))
    for number, (line, question) in enumerate(zip(whole, questions, strict=False), start=1):
        try:
            found = json.loads(line)["instruction"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not a record of this command; choose another --out") from None
        if found != question:
            raise UserError(f"{path}, line {number}: made from other questions; choose another --out or delete it")
    if len(whole) > len(questions):
        raise UserError(f"{path} holds {len(whole)} records for {len(questions)} questions; choose another --out")
    return len(whole)
