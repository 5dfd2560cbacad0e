"""Conversations whose next prompt begins with the tokens of the turns before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab.bench import tiny_model

from multirate.loading.conversation import OpenConversation
from multirate.loading.hub import load_tokenizer


def test_an_answer_is_not_tokenised_again() -> None:
    """Even where its text would give other tokens."""
    words = load_tokenizer("tiny")[0]
    letters = [words.convert_tokens_to_ids(letter) for letter in "the"]
    assert words("the", add_special_tokens=False)["input_ids"] != letters
    talk = OpenConversation(words)
    first = talk.prompt("hi")
    talk.add("hi", letters)
    after = talk.prompt("more")
    assert after[: len(first) + 3] == [*first, *letters] and talk.tokens == len(first) + 3
    assert words.decode(after) == words.apply_chat_template(
        [*talk.messages, {"role": "user", "content": "more"}],
        tokenize=False,
        add_generation_prompt=True,
    )


def spaced_tokenizer() -> Any:
    """One token for each character. It begins a text, but not its continuation, with a space, and
    its template has no token that begins a turn.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", *"abcdefghijklmnopqrstuvwxyz[]/▁"]
    backend = Tokenizer(models.BPE({one: place for place, one in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        chat_template="{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}[/user]"
        "{% else %}{{ m.content | trim }}<eos>{% endif %}{% endfor %}",
    )


@pytest.mark.parametrize("make", [tiny_model.tokenizer, spaced_tokenizer])
@pytest.mark.parametrize("answer", ["hello<eos>", " hello <eos>", "hello"])
def test_prompts_are_those_of_the_template(make: Callable[[], Any], answer: str) -> None:
    words = make()
    talk = OpenConversation(words)
    before, whole = (words(f"x{more}")["input_ids"] for more in ("", answer))
    for text in ("hello", "more", "again"):
        wanted = words.apply_chat_template(
            [*talk.messages, {"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        assert talk.prompt(text) == wanted
        talk.add(text, whole[len(before) :])
    assert talk.turns == 3
