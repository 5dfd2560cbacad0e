"""A seed's text is the same whichever method drafts, on both backends, in one call of the kernel or
in parts: on the trained model `tiny`, whose drafts are accepted often.
"""

from __future__ import annotations

from functools import cache

import pytest
from native_kernel import skip_without_kernel

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine, attach
from multirate.loading.hub import load_model, reference_accelerators

PROMPTS = ["Once upon a time", "The little dog", "One day Lily and her mother"]
_ALWAYS = ":draft_threshold=0.05:verify_threshold=0.02"  # as no clock is to decide what is tested
WITHOUT_TRAINING = ["prompt_lookup", "sam", "token_recycling", "lookahead"]
METHODS = [
    *WITHOUT_TRAINING,
    "layerskip:confidence=0.1",
    f"m2r2{_ALWAYS}",
    f"m2r2-carry{_ALWAYS}",
    f"m2r2-carry:lookup=sam{_ALWAYS}",
    "kangaroo:threshold=0.1",
]
SAMPLINGS = [
    SamplingSettings(1.0, seed=3),
    SamplingSettings(0.7, seed=4),
    SamplingSettings(1.2, top_p=0.9, seed=5),
]


@cache
def engine_of(backend: str) -> tuple[Engine, list[list[int]]]:
    """With all accelerators of the model, and the prompts."""
    loaded = load_model("tiny", dtype="bfloat16" if backend == "native" else "float32")
    engine = attach(loaded.model, tokenizer=loaded.tokenizer, backend=backend)
    for accelerator in reference_accelerators("tiny").values():
        engine.add(accelerator)
    return engine, [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]


@cache
def plain_texts(backend: str, sampling: SamplingSettings) -> list[list[int]]:
    engine, prompts = engine_of(backend)
    stop = StopSettings(max_new_tokens=16)
    return engine.generate(prompts, sampling, stop, method="autoregressive").sequences


@pytest.fixture(params=["hf", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        skip_without_kernel()
    name: str = request.param
    return name


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_seeds_text_is_plain_decodings(
    backend: str, method: str, sampling: SamplingSettings
) -> None:
    """Alone, where the native backend fuses steps or verifies drafts in one call, and in a batch,
    where it does not.
    """
    engine, prompts = engine_of(backend)
    stop = StopSettings(max_new_tokens=16)
    texts = plain_texts(backend, sampling)
    together = engine.generate(prompts, sampling, stop, method=method, speculate="always")
    assert together.sequences == texts
    alone = engine.generate(prompts[:1], sampling, stop, method=method, speculate="always")
    assert alone.sequences == texts[:1]
    assert alone.stats.accepted > 0 or method in WITHOUT_TRAINING


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_so_is_that_of_a_conversations_next_turn(
    backend: str, method: str, sampling: SamplingSettings
) -> None:
    """A turn goes on in the keys and values of the one before, with its own random numbers."""
    engine, prompts = engine_of(backend)
    stop = StopSettings(max_new_tokens=16)

    def second_turn(method: str) -> tuple[list[int], int]:
        engine.forget()
        first = engine.generate(prompts[:1], sampling, stop, method=method, speculate="always")
        following = [*prompts[0], *first.sequences[0], *prompts[1]]
        out = engine.generate([following], sampling, stop, method=method, speculate="always")
        return out.sequences[0], out.stats.resumed

    text, resumed = second_turn(method)
    assert resumed > 0
    assert text == second_turn("autoregressive")[0]


def test_seeds_and_temperatures_make_other_texts(backend: str) -> None:
    texts = [plain_texts(backend, sampling) for sampling in SAMPLINGS]
    assert len({str(text) for text in texts}) == len(SAMPLINGS)
