"""Streamed text is what the tokenizer's `decode` gives for all tokens, for every kind of
tokenizer, in time that grows with the text's length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from multirate.decoding.stopping import StopSettings, StopTracker
from multirate.decoding.text_stream import TextStream

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["a", "b", "▁", "▁▁", "▁▁▁▁", "▁c", "▁d", "é", "'", "s", "n", "t", "m", ".", "▁.", "▁'"]
NEWLINE = "<0x0A>"


def fast(pieces: list[str], decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    kind: Any = models.WordLevel(vocabulary, unk_token="<unk>")
    if BYTES[0] in vocabulary:
        kind = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    inner = Tokenizer(kind)
    inner.decoder = decoder
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special, **options)


def sentence_piece(strips: int = 1) -> Any:
    """As Llama 2 and Mistral decode."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    last = [decoders.Strip(" ", strips, 0)] if strips else []
    return fast(["<unk>", "</s>", "<pad>", *BYTES, *WORDS], decoders.Sequence([*steps, *last]))


def metaspace() -> Any:
    return fast(["<unk>", "</s>", "<pad>", *WORDS], decoders.Metaspace())


def byte_level() -> Any:
    """As GPT-2 decodes: a token is a few bytes, whatever character these are part of."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pairs = [a + b for a, b in zip(letters[100:160], letters[:60], strict=True)]
    return fast(["<unk>", "</s>", "<pad>", *letters, *pairs], decoders.ByteLevel())


def word_piece(tidy: bool) -> Any:
    """As BERT decodes; with the clean-up of spaces before punctuation."""
    pieces = [
        "<unk>",
        "</s>",
        "<pad>",
        "a",
        "b",
        "##c",
        "##d",
        "'",
        "s",
        "m",
        ".",
        "n",
        "##'t",
        "!",
    ]
    decoder = decoders.WordPiece(cleanup=False)
    return fast(pieces, decoder, clean_up_tokenization_spaces=tidy)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, with bytes and spaces as SentencePiece has them."""

    def __init__(self, **options: Any) -> None:
        pieces = ["<unk>", "</s>", "<pad>", *BYTES, *WORDS, " n't", " ' ", " '", " 's"]
        self._pieces = pieces
        self._numbers = {piece: i for i, piece in enumerate(pieces)}
        super().__init__(unk_token="<unk>", eos_token="</s>", pad_token="<pad>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._numbers)

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        out, run = [], bytearray()
        for token in [*tokens, ""]:
            if token in BYTES:
                run.append(BYTES.index(token))
                continue
            out += [run.decode(errors="replace"), token.replace("▁", " ")]
            run.clear()
        return "".join(out).removeprefix(" ")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "sentence_piece": sentence_piece,
    "no_strip": lambda: sentence_piece(0),
    "two_spaces": lambda: sentence_piece(2),
    "metaspace": metaspace,
    "byte_level": byte_level,
    "word_piece": lambda: word_piece(False),
    "word_piece_tidy": lambda: word_piece(True),
    "slow": Slow,
    "slow_tidy": lambda: Slow(clean_up_tokenization_spaces=True),
}


def streamed(words: Any, ids: list[int], block: int = 1, **options: Any) -> list[str]:
    parts: list[str] = []
    stream = TextStream(words, parts.append, **options)
    for start in range(0, len(ids), block):
        stream.push(ids[start : start + block])
    stream.end()
    return parts


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_text_is_decoded_text(name: str) -> None:
    words = TOKENIZERS[name]()
    rng = random.Random(name)
    size = len(words)
    for round_ in range(120):
        few = rng.sample(range(size), 6)  # of few tokens: runs and repetitions
        ids = rng.choices(few if round_ % 2 else range(size), k=rng.randint(0, 24))
        for block in (1, 3, 100):
            got = streamed(words, ids, block)
            assert "".join(got) == words.decode(ids, skip_special_tokens=True), ids
        whole = streamed(words, ids, skip_special_tokens=False)
        assert "".join(whole) == words.decode(ids), ids


def test_characters_come_once_they_are_whole() -> None:
    words = byte_level()
    ids = words.convert_tokens_to_ids(list("aÃ©Ġb"))  # a, the two bytes of é, space, b
    assert streamed(words, ids) == ["a", "é", " ", "b"]
    words = sentence_piece()
    pieces = ["▁c", "<0xC3>", "<0xA9>", "▁d", NEWLINE, "▁▁", "a", "<0xC3>"]
    parts = streamed(words, words.convert_tokens_to_ids(pieces))
    assert parts == ["c", "é d", "\n  ", "a", "\ufffd"]
    assert "".join(parts) == words.decode(words.convert_tokens_to_ids(pieces))


class Counting:
    """A tokenizer that counts how many tokens it decodes."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(self._words.decode(ids, **options))


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        *(("sentence_piece", piece) for piece in ("a", "▁", "<0xC3>", "<0x41>", "</s>", "<unk>")),
        ("byte_level", "Ã"),
        ("slow_tidy", "▁"),
    ],
)
def test_a_long_line_takes_time_in_proportion_to_its_length(name: str, piece: str) -> None:
    """Whatever it is: words, half characters without end, tokens that are not shown."""
    words = Counting(TOKENIZERS[name]())
    token = words.convert_tokens_to_ids(piece)
    work = []
    for count in (500, 2000):
        words.decoded = 0
        streamed(words, [token] * count)
        work.append(words.decoded)
    assert work[1] <= 6 * max(work[0], 500)


@pytest.mark.parametrize(
    ("name", "before", "end", "stop"),
    [
        ("sentence_piece", ["<0xE2>", "<0x82>", "<0xAC>"], NEWLINE, "\n"),
        ("sentence_piece", ["▁▁", "a"], "▁c", " c"),
        ("sentence_piece", ["▁c"], "▁▁", "c  "),
        ("byte_level", ["â", "Ĥ", "¬"], "Ċ", "\n"),
    ],
)
def test_a_stop_string_after_characters_of_several_tokens(
    name: str, before: list[str], end: str, stop: str
) -> None:
    """Wherever the decoded tail begins, in the middle of a character too."""
    words = TOKENIZERS[name]()
    for count in range(1, 12):
        ids = words.convert_tokens_to_ids([*before * count, end])
        settings = StopSettings(max_new_tokens=99, stop_strings=(stop,), decode=words.decode)
        tracker = StopTracker(settings, [1], None)
        assert tracker.push(0, [*ids, *ids]) == ids
        assert tracker.reasons == ["stop_string"]
