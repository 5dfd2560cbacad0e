"""A GGUF file's tokenizer, and the tokens that end a text, as llama.cpp understands them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from multirate.errors import UserError, first_line, say_once
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.metadata import Metadata

_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece"}
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Ways to split text that set every digit apart, then split the rest as GPT-2 does: spaces and line
breaks before a digit stay together.
"""
_KNOWN_SPLITS = {None, "gpt-2"} | DIGITS_APART | set(GGUF_PRE_TOKENIZER_SPLITS)
"""Ways to split text before merging that are told apart."""
WHOLE_TOKENS_FIRST = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}
"""Byte-level vocabularies whose texts begin with BOS unless the file says otherwise, and whose
tokens are found whole even where no merge leads to them (llama.cpp: add_bos, ignore_merges).
"""
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""What llama.cpp assumes of a SentencePiece vocabulary that does not say."""
KNOWN_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<｜end▁of▁sentence｜>",
}
"""Tokens that llama.cpp takes for the end of a text, a turn or a message wherever a vocabulary has
them, whatever type the file gives them.
"""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def vocabulary_of(file: GgufFile) -> list[str]:
    """The texts of the tokens. UserError when there are none, or not one for each embedding."""
    data = Metadata(file, "tokenizer.ggml.")
    tokens = data.array("tokens", str)
    if not tokens:
        raise UserError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens)")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != len(tokens):
        raise UserError(
            f"{file.path} is damaged: tokenizer.ggml.tokens has {len(tokens)} tokens, but "
            f"token_embd.weight has {embedding.shape[0]} rows"
        )
    named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    twice = next((token for token, times in Counter(named).items() if times > 1), None)
    if twice is not None:
        raise UserError(f"{file.path} is damaged: tokenizer.ggml.tokens has {twice!r} twice")
    return named


def special_tokens(file: GgufFile) -> dict[str, int | None]:
    """The ids of "bos", "eos", "unknown" and "padding"."""
    data = Metadata(file, "tokenizer.ggml.")
    size = len(vocabulary_of(file))
    defaults = _SENTENCEPIECE_IDS if data.text("model", "") == "llama" else {}
    found: dict[str, int | None] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = data.token(f"{name}_token_id", size)
        default = defaults.get(name)
        found[name] = default if token is None and default is not None and default < size else token
    return found


def load_tokenizer(file: GgufFile) -> Any:
    """The tokenizer that the file describes. UserError when there is none or it is not known."""
    data = Metadata(file, "tokenizer.ggml.")
    tokens = vocabulary_of(file)
    kind = data.text("model")
    if kind not in _KINDS:
        data.refuse("model", kind, " or ".join(map(repr, _KINDS)))
    split = data.text("pre", "") or None
    if kind == "gpt2" and split not in _KNOWN_SPLITS:
        say_once(
            f"{file.path.name}: unknown tokenizer.ggml.pre {split!r}; splitting text as GPT-2 "
            "does, so some texts may get other tokens than in training"
        )
    described = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": split,
        "tokens": tokens,
        "token_type": _types(data, tokens),
        **_merges(data, tokens, kind),
    }
    ids = {name: None if i is None else tokens[i] for name, i in special_tokens(file).items()}
    begins = kind == "llama" or split in WHOLE_TOKENS_FIRST
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, (str, type(None))):
        Metadata(file, "tokenizer.").refuse("chat_template", template, "text")
    settings = {
        "add_bos_token": data.flag("add_bos_token", begins) and ids["bos"] is not None,
        "add_eos_token": data.flag("add_eos_token", False) and ids["eos"] is not None,
    }
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, described)
        backend = _without_more_tokens(backend, len(tokens))
        if kind == "gpt2" and split in WHOLE_TOKENS_FIRST:
            backend.model.ignore_merges = True
        if kind == "gpt2" and split in DIGITS_APART:
            level = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=ids["bos"],
            eos_token=ids["eos"],
            unk_token=ids["unknown"],
            pad_token=ids["padding"],
            chat_template=template,
            **settings,
        )
    except Exception as error:  # the libraries' own kinds, down to a bare Exception
        logging.getLogger(__name__).debug("tokenizer of %s", file.path, exc_info=True)
        raise UserError(
            f"{file.path}: cannot read its tokenizer (tokenizer.ggml.*): {first_line(error)}"
        ) from error


def _without_more_tokens(backend: Tokenizer, size: int) -> Tokenizer:
    """Drops what transformers' classes add of their own, such as GPT-2's <|endoftext|>: the model
    has no embedding for it.
    """
    if backend.get_vocab_size() <= size:
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _types(data: Metadata, tokens: list[str]) -> list[int]:
    """Each token's type; what is known to end a text is a control token, whatever the file says."""
    types = data.array("token_type", int, len(tokens)) or [_NORMAL] * len(tokens)
    pairs = zip(tokens, types, strict=True)
    return [_CONTROL if token in KNOWN_ENDS else type_ for token, type_ in pairs]


def _merges(data: Metadata, tokens: list[str], kind: str) -> dict[str, list[Any]]:
    """Merges, and the scores that they are derived from where a file has none."""
    found: dict[str, list[Any]] = {}
    scores = data.array("scores", float, len(tokens))
    merges = data.array("merges", str)
    if scores is not None:
        found["scores"] = scores
    if merges is None:
        needed = "merges" if kind == "gpt2" else "scores"
        if needed not in found:
            data.refuse(needed, None, f"one per token of the {_KINDS[kind]} vocabulary")
        return found
    known = set(tokens)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in known and right in known and left + right in known):
            data.refuse(
                "merges", merge, ("two tokens separated by a space, whose concatenation is a token")
            )
    return found | {"merges": merges}


def ends(file: GgufFile, tokenizer: Any) -> list[int]:
    """The ids that end a text, a turn or a message: those that a key names, those that llama.cpp
    knows by their text, and the one with which the chat template ends an answer.
    """
    data = Metadata(file, "tokenizer.ggml.")
    tokens = vocabulary_of(file)
    named = [data.token(f"{name}_token_id", len(tokens)) for name in ("eot", "eom")]
    known = [index for index, token in enumerate(tokens) if token in KNOWN_ENDS]
    found = [special_tokens(file)["eos"], *named, *known]
    ids = list(dict.fromkeys(token for token in found if token is not None))
    after = _after_an_answer(tokenizer)
    if after is None:
        return ids
    types = _types(data, tokens)
    control = (
        index
        for index, token in enumerate(tokens)
        if types[index] in (_CONTROL, _USER_DEFINED) and after.startswith(token)
    )
    end = max(control, key=lambda index: len(tokens[index]), default=None)
    if end is None:
        say_once(
            f"{file.path.name}: its chat template ends a turn with text that is not a single "
            "token, so an answer may run past its turn"
        )
    elif end not in ids:
        say_once(
            f"{file.path.name}: no field names the end-of-turn token; using {tokens[end]!r}, "
            "with which the chat template ends an answer"
        )
        ids.append(end)
    return ids


def _after_an_answer(tokenizer: Any) -> str | None:
    """What the chat template writes after an answer; None where it does not show."""
    answer = "An answer, and no other."
    messages = [("user", "A question."), ("assistant", answer), ("user", "One more.")]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages], tokenize=False
        )
    except Exception:  # there is no template, or it raises for this conversation
        return None
    return str(text).rpartition(answer)[2].lstrip() if answer in str(text) else None
