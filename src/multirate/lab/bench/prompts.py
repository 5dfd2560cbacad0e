"""Questions become token ids: chat template, turns asked after the model's own answers, and the
context limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from multirate.errors import UserError
from multirate.lab.bench.suites import Question
from multirate.loading.chat_template import encode_chat

Answer = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One turn, ready for the model. `id` is the question's, with `#turn` when it has several.

    follows: whether it goes on from the prompt before it.
    """

    id: str
    tokens: list[int]
    category: str | None = None
    follows: bool = False


@dataclass
class PromptSet:
    """The prompts of a run, and the ids of those left out because they do not fit the context."""

    prompts: list[Prompt] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)


def build_prompts(
    questions: Sequence[Question],
    tokenizer: Any,
    answer: Answer,
    *,
    max_positions: int | None,
    max_new_tokens: int,
    truncate: bool = False,
    on_question: Callable[[], None] | None = None,
) -> PromptSet:
    """Every turn of every question as token ids, the same for all methods that are compared.

    `answer(prompt ids) -> new ids` is the base model's plain decoding; it is called for all turns
    but a question's last, because the next turn is asked after that answer. A prompt longer than
    `max_positions - max_new_tokens` (None: there is no limit) is cut from the left with `truncate`,
    else it is skipped together with its later turns, which would follow an answer that was never
    given. UserError when no prompt is left.
    """
    room = None if max_positions is None else max_positions - max_new_tokens
    if max_positions is not None and room is not None and room < 1:
        raise UserError(
            f"max_new_tokens is {max_new_tokens}, but the model's context is {max_positions} "
            f"tokens: use at most {max_positions - 1}, to leave room for a prompt"
        )
    result = PromptSet()
    for question in questions:
        messages: list[dict[str, str]] = []
        if question.system is not None:
            messages.append({"role": "system", "content": question.system})
        for turn, text in enumerate(question.turns):
            name = question.id if len(question.turns) == 1 else f"{question.id}#{turn + 1}"
            messages.append({"role": "user", "content": text})
            where = question.where or f"question {question.id}"
            tokens = encode_chat(tokenizer, messages, where)
            if room is not None and len(tokens) > room:
                if not truncate:
                    result.skipped.extend(
                        f"{question.id}#{t + 1}" for t in range(turn, len(question.turns))
                    )
                    break
                tokens = tokens[-room:]
                result.truncated.append(name)
            result.prompts.append(Prompt(name, tokens, question.category, follows=turn > 0))
            if turn + 1 < len(question.turns):
                reply = tokenizer.decode(answer(tokens), skip_special_tokens=True).strip()
                messages.append({"role": "assistant", "content": reply})
        if on_question is not None:
            on_question()
    if not result.prompts:
        raise UserError(
            f"none of the {len(questions)} questions fits the model's context of {max_positions} "
            f"tokens with max_new_tokens={max_new_tokens}: lower --max-new-tokens or cut prompts "
            "from the left with --truncate"
        )
    return result
