"""Below float32, by the model's own layers, a row's numbers depend on how many others share its
pass: what such a decoder keeps and drafts.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from lab.bench import tiny_model

import multirate
from multirate.decoding import prefill, session
from multirate.engine import Engine, attach
from multirate.errors import Notice
from multirate.methods.spec import PLAIN
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.load import load_decoder

PIECE = 16
METHOD = "prompt_lookup"


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Random weights so small that its choices are often close."""
    return tiny_model.model(dtype=dtype, initializer_range=0.08, eos_token_id=None)


def prompts(count: int = 4) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 261) for _ in range(6)] * 4 for _ in range(count)]


def engine(dtype: torch.dtype = torch.bfloat16) -> Engine:
    return attach(model(dtype), backend="hf")


def texts(made: Engine, **options: object) -> list[list[int]]:
    stop = made.stopping(60)
    return [made.generate([p], stop=stop, **options).sequences[0] for p in prompts()]  # type: ignore[arg-type]


def test_decoders_say_in_what_precision_passes_differ() -> None:
    assert load_decoder(model(), "native").pass_dependent is None
    for dtype, said in (
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float32, None),
        (torch.float64, None),
    ):
        assert HFDecoder(model(dtype)).pass_dependent == said
    plain = HFDecoder(model(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.pass_dependent == "bfloat16"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert plain.pass_dependent == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)
    assert plain.pass_dependent is None


def test_auto_makes_no_drafts_that_could_change_the_text() -> None:
    made = engine()
    expected = texts(made, speculate="never")
    assert texts(made, speculate="always", method=METHOD) != expected, "this shows nothing"
    assert made.notice is not None and "bfloat16" in made.notice
    for _ in range(2):
        assert texts(made, method=METHOD) == expected
        assert made.used == PLAIN
        assert (
            made.notice is not None
            and "decoded without drafts: with the model's own layers in bfloat16" in made.notice
        )
    exact = engine(torch.float32)
    assert texts(exact, method=METHOD) == texts(exact, speculate="never")
    texts(exact, method=METHOD)
    assert exact.notice is None or "float32" not in exact.notice


@pytest.mark.parametrize("length", [PIECE - 3, 2 * PIECE, 2 * PIECE + 5])
def test_a_kept_prefix_changes_no_text(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again, and asked with more: as without anything kept, to the last bit of the K/V."""
    for module in (prefill, session):
        monkeypatch.setattr(module, "PREFILL_ROWS", PIECE)
    made, stop = engine(), engine().stopping(40)
    for seed in range(3):
        draw = random.Random(seed)
        prompt = [draw.randrange(5, 261) for _ in range(length)]
        made.forget()
        first = made.generate([prompt], stop=stop).sequences[0]
        again = made.generate([prompt], stop=stop)
        assert again.sequences[0] == first
        longer = [*prompt, *first, 7, 9]
        kept = made.generate([longer], stop=stop)
        made.forget()
        fresh = made.generate([longer], stop=stop)
        assert kept.sequences == fresh.sequences
        assert kept.stats.resumed == length // PIECE * PIECE
        assert again.stats.resumed == (length - 2) // PIECE * PIECE


def test_float32_keeps_all_of_a_prefix() -> None:
    made = engine(torch.float32)
    prompt = prompts(1)[0]
    made.generate([prompt], stop=made.stopping(5))
    again = made.generate([prompt], stop=made.stopping(5))
    assert again.stats.resumed == len(prompt) - 2


def test_custom_generate_gives_the_models_text_and_says_why_it_drafts_nothing() -> None:
    network = model()
    ids = torch.tensor(prompts())
    options = {"max_new_tokens": 60, "do_sample": False}
    for row in ids:
        want = network.generate(row[None], **options)  # type: ignore[operator]
        ours = multirate.custom_generate(method=METHOD, backend="hf")
        with pytest.warns(Notice, match="bfloat16.*speculate=always drafts"):
            got = network.generate(row[None], **options, custom_generate=ours)  # type: ignore[operator]
        assert got.equal(want)
    with pytest.warns(Notice, match="bfloat16"):
        always = multirate.custom_generate(method=METHOD, backend="hf", speculate="always")
        network.generate(ids[:1], **options, custom_generate=always)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        ours = multirate.custom_generate(method=METHOD, backend="hf")
        model(torch.float32).generate(ids[:1], **options, custom_generate=ours)  # type: ignore[operator]
