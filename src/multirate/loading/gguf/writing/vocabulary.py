"""A transformers tokenizer as the keys of a GGUF file: the inverse of loading/gguf/tokenizer.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gguf import TokenType
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from multirate.errors import UserError
from multirate.loading.gguf.tokenizer import KNOWN_ENDS, WHOLE_TOKENS_FIRST

_SPLITS = ("llama-bpe", "smaug-bpe", "tekken", "qwen2", "qwen35", "gpt-4o")
"""llama.cpp's names for ways to split text, one for each that transformers reads."""
_NO_SCORE = -1e6
"""The score of a token that no merge makes: below every other."""
_PROBES = (
    "Hello world! It's 3 o'clock, they'LL say we've paid 1,234.50 euros (12345678 in all).",
    "def f(x):\n    return x**2  # squared\n\n\tif  x == 0:\r\n   pass",
    "  two spaces, a tab\tand a break\n\n \n   x\u00a0y",
    "Größe, naïveté, señor; Привет, мир; Γειά σου; 你好，世界；こんにちは；مرحبا; นี่คือ; 안녕하세요",
    "🙂🚀 ½ ² x₂ ∑∫ “quotes” — and–dashes… CamelCaseWord ALLCAPS mixedCASE x86_64 v1.2.3-rc4",
    'https://example.org/a?b=c&d=%20#e me@example.org {"k": [1, null, -2.5e-3]}',
)
"""Texts on which the tokenizer in the file must agree with the original."""


def tokenizer_keys(tokenizer: Any, rows: int, name: str) -> dict[str, Any]:
    """The keys of the tokenizer of a model whose embedding has `rows` rows. UserError naming a kind
    of tokenizer that is not written.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{name}: tokenizers of type {type(tokenizer).__name__} cannot be written")
    state = json.loads(backend.to_str())
    model = state["model"]
    byte_level = any(part["type"] == "ByteLevel" for part in _parts(state["pre_tokenizer"]))
    if model["type"] != "BPE" or not (byte_level or model.get("byte_fallback")):
        kind = f"{model['type']} without bytes" if model["type"] == "BPE" else model["type"]
        raise UserError(
            f"{name}: its tokenizer ({kind}) cannot be written to a GGUF file; accepted: "
            "byte-level BPE, and SentencePiece's BPE with byte tokens"
        )
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    tokens, types = _tokens(tokenizer, state, rows, name)
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if byte_level:
        keys |= {"model": "gpt2", "pre": _split(state, name), "merges": list(map(" ".join, merges))}
    else:
        keys |= {"model": "llama", "pre": "default", "scores": _scores(tokens, merges)}
        keys["add_space_prefix"] = _begins_with_space(tokenizer)
    keys |= _special(tokenizer)
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return {
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
        **({"tokenizer.chat_template": template} if template else {}),
    }


def more_ends(tokenizer: Any, ends: Any) -> dict[str, int]:
    """The key of an end of turn in a generation config's `ends` (ids, one id, or None) that readers
    would not find by themselves.
    """
    ids = [ends] if isinstance(ends, int) else list(ends or ())
    unknown = [
        index
        for index in ids
        if index != tokenizer.eos_token_id
        and tokenizer.convert_ids_to_tokens(index) not in KNOWN_ENDS
    ]
    return {"tokenizer.ggml.eot_token_id": unknown[0]} if unknown else {}


def check_tokens(tokenizer: Any, written: Any, name: str) -> None:
    """UserError if the tokenizer that the file gives splits a text differently."""
    special = "".join(token for token in tokenizer.all_special_tokens if token)
    for text in (*_PROBES, f"One{special}two"):
        expected, found = (each(text)["input_ids"] for each in (tokenizer, written))
        if expected != found:
            at = next(
                (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                min(len(expected), len(found)),
            )
            raise UserError(
                f"{name}: its tokenizer cannot be written to a GGUF file: read from one, it splits "
                f"{text!r} into {tokenizer.convert_ids_to_tokens(found[at : at + 3])} at token "
                f"{at}, not {tokenizer.convert_ids_to_tokens(expected[at : at + 3])}"
            )


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The pre-tokenizers of a sequence of these, one by one."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part["pretokenizers"]:
            yield from _parts(inner)
    else:
        yield part


def _tokens(
    tokenizer: Any, state: dict[str, Any], rows: int, name: str
) -> tuple[list[str], list[int]]:
    """The texts and types of all tokens; embedding rows without one get unused tokens."""
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) > rows or max(vocabulary.values()) >= rows:
        raise UserError(
            f"{name}: its tokenizer has {max(vocabulary.values()) + 1} tokens, but its embedding "
            f"has {rows} rows"
        )
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, index in vocabulary.items():
        tokens[index], types[index] = token, int(TokenType.NORMAL)
        if state["model"].get("byte_fallback") and _is_byte(token):
            types[index] = int(TokenType.BYTE)
    for added in state["added_tokens"]:
        index, control = added["id"], added["special"]
        types[index] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        if not control:  # llama.cpp looks for them in texts that have not been changed
            tokens[index] = added["content"].replace("\u2581", " ")
    if state["model"].get("byte_fallback") and state["model"].get("unk_token") in vocabulary:
        types[vocabulary[state["model"]["unk_token"]]] = int(TokenType.UNKNOWN)
    return tokens, types


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _split(state: dict[str, Any], name: str) -> str:
    """llama.cpp's name for how the tokenizer splits text before merging."""
    parts = list(_parts(state["pre_tokenizer"]))
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1]["use_regex"]:
        whole_first = bool(state["model"].get("ignore_merges"))
        pattern = parts[0]["pattern"].get("Regex")
        same = [split for split in _SPLITS if GGUF_PRE_TOKENIZER_SPLITS[split] == pattern]
        same.sort(key=lambda split: (split in WHOLE_TOKENS_FIRST) != whole_first)
        if same:
            return same[0]
    raise UserError(
        f"{name}: its tokenizer splits text ({' and '.join(kinds)}) in a way for which GGUF files "
        f"have no name that multirate reads; accepted: those of gpt-2, smollm, {', '.join(_SPLITS)}"
    )


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """SentencePiece merges the pair whose token has the best score: earlier merges are better."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault("".join(merge), index)
    return [-float(rank[token]) if token in rank else _NO_SCORE for token in tokens]


def _begins_with_space(tokenizer: Any) -> bool:
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(tokenizer.convert_ids_to_tokens(ids[0]).startswith("\u2581"))


def _special(tokenizer: Any) -> dict[str, Any]:
    """The ids of special tokens, and whether texts begin or end with one."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: getattr(tokenizer, f"{other}_token_id") for name, other in names.items()}
    text = tokenizer("a")["input_ids"]
    return {
        **{f"{name}_token_id": index for name, index in ids.items() if index is not None},
        "add_bos_token": ids["bos"] is not None and text[0] == ids["bos"],
        "add_eos_token": ids["eos"] is not None and text[-1] == ids["eos"],
    }
