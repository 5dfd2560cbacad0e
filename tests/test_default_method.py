"""What an engine decodes with when no method is named."""

from __future__ import annotations

from native_kernel import skip_without_kernel

import multirate
from multirate.loading.hub import load_model, reference_accelerators
from multirate.methods.spec import PLAIN, recommended

UNTRAINED = recommended(trained=False)


def test_without_an_accelerator_the_native_kernel_drafts_from_the_text() -> None:
    loaded = load_model("tiny", "bfloat16", "cpu")
    engine = multirate.attach(loaded)
    if engine.backend != "native":
        skip_without_kernel()
    assert engine.default == UNTRAINED
    stop = engine.stopping(48)
    ids = loaded.tokenizer("one two three one two three one two")["input_ids"]
    own = engine.generate([ids], stop=stop)
    assert engine.used == UNTRAINED
    plain = engine.generate([ids], stop=stop, method=PLAIN)
    assert engine.used == PLAIN
    assert own.sequences == plain.sequences and own.stats.drafted > 0
    name, folder = next(iter(reference_accelerators("tiny").items()))
    engine.add(folder, name)
    assert engine.default == name


def test_where_drafts_may_round_otherwise_decoding_is_plain() -> None:
    engine = multirate.attach(load_model("tiny", "bfloat16", "cpu"), backend="hf")
    assert engine.default == PLAIN
