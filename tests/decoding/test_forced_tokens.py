"""What must follow is drafted: forced tokens change no text, whoever drafts beside them and however
wrong they are, and right ones save passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from native_kernel import skip_without_kernel
from torch import Tensor

import multirate
from multirate.decoding.batch import Batch, Joining
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.results import DecodeStats
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.loading.hub import load_model

PROMPT = [5, 6, 7, 8]
FORM = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
"""Every other group of so many tokens of an answer is this."""
LENGTH = 60
METHODS = ["sam", "prompt_lookup", "m2r2-carry", "m2r2-carry:lookup=0"]


@cache
def engine(backend: str) -> Engine:
    if backend == "native":
        skip_without_kernel()
    model = "tiny" if backend == "native" else load_model("tiny", "float32")
    made = multirate.attach(model, backend=backend)
    made.add("m2r2-carry")
    return made


def wanted(answer: Sequence[int]) -> list[int]:
    """What is left of the form after these tokens of an answer; none where the model is free."""
    group, place = divmod(len(answer), len(FORM))
    return FORM[place:] if group % 2 else []


def hold(ids: Tensor, scores: Tensor) -> Tensor:
    form = wanted(ids[0, len(PROMPT) :].tolist())
    if not form:
        return scores
    only = torch.full_like(scores, -torch.inf)
    only[:, form[0]] = scores[:, form[0]]
    return only


def right(tokens: Sequence[int]) -> list[int]:
    return wanted(tokens[len(PROMPT) :])


def wrong(tokens: Sequence[int]) -> list[int]:
    return [(token + 1) % 50 for token in right(tokens)] or [3]


def settings(forced: object = None, temperature: float = 0.0) -> SamplingSettings:
    return SamplingSettings(temperature, seed=1, processors=lambda _: [hold], forced=forced)  # type: ignore[arg-type]


def decoded(
    method: str, backend: str, chosen: SamplingSettings, beside: bool
) -> tuple[list[int], DecodeStats]:
    """The answer, with a second sequence beside it that nothing is forced on."""
    with engine(backend).stepping(method, "always") as (decoder, step):
        batch = Batch(decoder, step, 2)
        seq, _ = batch.join(Joining(PROMPT, 0, chosen, StopSettings(LENGTH)))
        if beside:
            batch.join(Joining([9, 10] * 6, 0, None, StopSettings(LENGTH)))
        while batch.reading:
            batch.read(64)
        while batch.session.active:
            batch.advance()
        found = list(batch.session.stops.new_tokens[seq]), batch.session.each[seq]
        batch.close()
    return found


@cache
def plain(temperature: float) -> list[int]:
    chosen, stop = settings(temperature=temperature), StopSettings(LENGTH)
    return generate(engine("native").decoder, PlainStep(), [PROMPT], chosen, stop).sequences[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("beside", [False, True])
def test_forced_tokens_save_passes_and_change_nothing(
    method: str, temperature: float, beside: bool
) -> None:
    text = plain(temperature)
    assert FORM == text[10:20] == text[30:40]
    for forced in (right, wrong):
        found, stats = decoded(method, "native", settings(forced, temperature), beside)
        assert found == text
        if forced is right:
            # a form of ten tokens takes two or three steps: a draft has at most eight nodes
            assert stats.sequence_steps <= 30 + 3 * 3


@pytest.mark.parametrize("method", ["sam", "m2r2-carry"])
def test_so_it_is_where_torch_drafts_and_verifies(method: str) -> None:
    text, _ = decoded("autoregressive", "hf", settings(), beside=True)
    found, stats = decoded(method, "hf", settings(right), beside=True)
    assert found == text and stats.sequence_steps <= 30 + 3 * 3


def test_an_error_ends_only_its_own_sequence_where_they_are_isolated() -> None:
    def fails(tokens: Sequence[int]) -> list[int]:
        raise RuntimeError("the form is lost")

    with pytest.raises(RuntimeError, match="lost"):
        decoded("sam", "native", settings(fails), beside=True)
    with engine("native").stepping("sam", "always") as (decoder, step):
        batch = Batch(decoder, step, 2)
        batch.session.sampler.isolates = True
        seq, _ = batch.join(Joining(PROMPT, 0, settings(fails), StopSettings(LENGTH)))
        other, _ = batch.join(Joining([9, 10] * 6, 0, None, StopSettings(LENGTH)))
        while batch.reading:
            batch.read(64)
        while batch.session.active:
            batch.advance()
        assert set(batch.session.sampler.failed) == {seq}
        assert len(batch.session.stops.new_tokens[other]) > 0
        batch.close()
