"""A tokenizer written to a GGUF file splits texts as before, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from multirate.errors import UserError
from multirate.fidelity import TEXTS
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.tokenizer import load_tokenizer
from multirate.loading.gguf.writing.vocabulary import tokenizer_keys
from multirate.loading.gguf.writing.write import write_model

SIZE = 700
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CORPUS = [file.read_text() for file in sorted(TEXTS.glob("*.txt"))]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]


def split_of(name: str) -> Any:
    """The pre-tokenizer that llama.cpp calls so."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split_of("gpt-2")])
    pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[name])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), level])


def byte_level(split: str, bos: bool = False) -> Any:
    """A byte-level BPE tokenizer, trained on the package's texts."""
    backend = Tokenizer(models.BPE(ignore_merges=split in ("llama-bpe", "tekken")))
    backend.pre_tokenizer, backend.decoder = split_of(split), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend, bos)


def sentencepiece(kind: Any) -> Any:
    """A tokenizer with byte tokens that marks spaces, as those of Llama 2 and Gemma."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400))
    learnt = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    tokens = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(token for token, _ in learnt),
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = {token: -float(index) for token, index in vocabulary.items() if index >= 261}
    tokenizer = kind(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def wrapped(backend: Tokenizer, bos: bool) -> Any:
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SHAPE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64},
}
MADE = {
    **{
        split: (tf.LlamaConfig, lambda split=split: byte_level(split, split == "llama-bpe"))
        for split in ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "tekken", "qwen2", "gpt-4o")
    },
    "llama": (tf.LlamaConfig, lambda: sentencepiece(LlamaTokenizer)),
    "gemma": (tf.Gemma2Config, lambda: sentencepiece(GemmaTokenizer)),
}


def written(tokenizer: Any, config: Any, out: Path) -> Any:
    """The tokenizer, read from a file with three more rows in its embedding than tokens."""
    more = {"head_dim": 32, "query_pre_attn_scalar": 32} if config is tf.Gemma2Config else {}
    model = tf.AutoModelForCausalLM.from_config(
        config(**SHAPE, **more, vocab_size=len(tokenizer) + 3)
    )
    write_model(model, tokenizer, "some/model", out, "f16", lambda *_: None)
    return load_tokenizer(GgufFile(out))


@pytest.fixture(scope="module", params=MADE)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config, make = MADE[request.param]
    tokenizer, folder = make(), tmp_path_factory.mktemp("t")
    return tokenizer, written(tokenizer, config, folder / "t.gguf"), folder / "t.gguf"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(
                [*CORPUS[0].split()[:40], *SPECIAL[3:], " ", "\n\n", "'Ll", "12345", "é"]
            ),
        ),
        max_size=12,
    )
)
def test_texts_get_the_same_tokens(pair: Any, parts: list[str]) -> None:
    tokenizer, found, _ = pair
    text = "a" + "".join(parts)
    assert found(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_the_rest_is_the_same(pair: Any) -> None:
    tokenizer, found, path = pair
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"):
        assert getattr(found, name) == getattr(tokenizer, name), name
    tokens = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(tokenizer) + 3 and tokens[-1].startswith("[PAD")
    for text in CORPUS:
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_llama_cpp_splits_texts_so(pair: Any) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer, _, path = pair
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in CORPUS:
        ids = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert ids == tokenizer(text)["input_ids"]


def test_kinds_that_are_not_written_are_refused_by_name(tmp_path: Path) -> None:
    unigram = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)]))
    )
    odd = byte_level("gpt-2")
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("x+"), "isolated"), split_of("qwen2")]
    )
    for tokenizer, words in ((unigram, "Unigram"), (odd, "Split and Split and ByteLevel")):
        with pytest.raises(UserError, match=words):
            tokenizer_keys(tokenizer, 10_000, "some/model")
    with pytest.raises(UserError, match="its embedding has 5 rows"):
        tokenizer_keys(byte_level("gpt-2"), 5, "some/model")
    prefixed = byte_level("gpt-2")  # a setting that no key states: seen when the file is read
    prefixed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(UserError, match="read from one, it splits"):
        written(prefixed, tf.LlamaConfig, tmp_path / "t.gguf")
    assert not list(tmp_path.iterdir())
