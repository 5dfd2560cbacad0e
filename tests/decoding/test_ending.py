"""Where a sequence ends: the same place whether its tokens come one by one or in accepted
drafts.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.results import GenerationOutput
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings, StopTracker
from multirate.errors import UserError

from .helpers import MAX_POSITIONS, ScriptedDrafter, oracle, reference, scripts, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]
WORDS = ["", " a", "ab", "b ", "é", "the", " c", "cc", " ab", "d", "e ", "fg", "x"]


def decode(tokens: list[int]) -> str:
    """Like a sentencepiece tokenizer: the leading space of a text is dropped."""
    return "".join(WORDS[t] for t in tokens).removeprefix(" ")


def both(
    stop: StopSettings, kind: str = "right", start: int = 0, prompts: list[list[int]] = PROMPTS
) -> GenerationOutput:
    """Speculative output after checking that plain decoding and the stream agree with it."""
    model, decoder = tiny(3)
    futures = oracle(model, prompts)
    drafter = ScriptedDrafter(scripts(kind, futures, 13, 4), decoder if start else None, start)
    streamed: list[list[int]] = [[] for _ in prompts]
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        prompts,
        stop=stop,
        on_tokens=lambda b, t: streamed[b].extend(t),
        after_step=check_invariants,
    )
    plain = generate(decoder, PlainStep(), prompts, stop=stop)
    assert out.sequences == plain.sequences == streamed
    assert out.finish_reasons == plain.finish_reasons
    return out


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("kind", ["right", "tree"])
def test_eos_inside_an_accepted_draft(kind: str, start: int) -> None:
    model, _ = tiny(3)
    futures = oracle(model, PROMPTS)
    new = futures[0][len(PROMPTS[0]) :]
    eos = new[
        2
    ]  # the prefill yields the first token; this is the second of the first draft of four
    assert new.index(eos) == 2, "it must not end the sequence earlier"
    out = both(StopSettings(max_new_tokens=20, eos_token_ids=(eos,)), kind, start)
    for b, sequence in enumerate(out.sequences):
        assert sequence == reference(model, PROMPTS[b], 20, eos_token_id=eos)
        assert sequence.index(eos) == len(sequence) - 1 if eos in sequence else len(sequence) == 20
    assert (len(out.sequences[0]), out.finish_reasons[0]) == (3, "eos")


def test_rows_end_at_different_steps_and_any_eos_counts() -> None:
    model, _ = tiny(3)
    futures = oracle(model, PROMPTS)
    ends = tuple({futures[0][len(PROMPTS[0]) + 6], futures[2][len(PROMPTS[2]) + 1]})
    out = both(StopSettings(max_new_tokens=25, eos_token_ids=ends), "half_right", 1)
    assert len({len(s) for s in out.sequences}) > 1
    assert all(
        s == reference(model, p, 25, eos_token_id=list(ends))
        for p, s in zip(PROMPTS, out.sequences, strict=True)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["right", "too_long", "maximal_tree"])
def test_max_new_tokens(count: int, kind: str) -> None:
    out = both(StopSettings(max_new_tokens=count), kind)
    assert [len(s) for s in out.sequences] == [count] * 3
    assert out.finish_reasons == ["length"] * 3
    assert out.stats.tokens == 3 * count


@pytest.mark.parametrize("kind", ["right", "too_long", "maximal_tree", "tree", "empty"])
@pytest.mark.parametrize("start", [0, 2])
def test_context_limit_inside_a_draft(kind: str, start: int) -> None:
    out = both(StopSettings(max_new_tokens=None, context_limit=11), kind, start)
    assert [len(s) for s in out.sequences] == [7, 10, 4]
    assert out.finish_reasons == ["context"] * 3


def test_the_models_own_context_ends_a_sequence() -> None:
    prompts = [[1 + i % 9 for i in range(MAX_POSITIONS - 6)], [4] * MAX_POSITIONS]
    out = both(StopSettings(max_new_tokens=50), "random", 1, prompts[:1])
    assert (len(out.sequences[0]), out.finish_reasons) == (6, ["context"])
    _, decoder = tiny(3)
    full = generate(decoder, PlainStep(), prompts, stop=StopSettings(max_new_tokens=50))
    assert (full.sequences[1], full.finish_reasons[1]) == ([], "context")
    with pytest.raises(UserError, match=f"{MAX_POSITIONS + 1} tokens"):
        generate(decoder, PlainStep(), [[1] * (MAX_POSITIONS + 1)])


def test_stop_strings_across_token_borders() -> None:
    model, _ = tiny(3)
    texts = [
        decode(future[len(p) :]) for future, p in zip(oracle(model, PROMPTS), PROMPTS, strict=True)
    ]
    richest = max(range(3), key=lambda b: len(texts[b]))
    stop_string = texts[richest][3:7]
    assert len(stop_string) == 4, "longer than any token's text: it lies across a border"
    for kind in ("right", "half_right", "tree"):
        out = both(
            StopSettings(max_new_tokens=25, stop_strings=(stop_string, "never"), decode=decode),
            kind,
        )
        assert out.finish_reasons[richest] == "stop_string"
        for sequence, reason in zip(out.sequences, out.finish_reasons, strict=True):
            assert (stop_string in decode(sequence)) == (reason == "stop_string")
            assert stop_string not in decode(sequence[:-1])


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 12), max_size=60),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=60),
    eos=st.lists(st.integers(0, 12), max_size=1),
    strings=st.lists(st.text("abce é", min_size=1, max_size=5), max_size=2),
    count=st.integers(0, 50),
)
def test_blocks_end_where_single_tokens_do(
    tokens: list[int], cuts: list[int], eos: list[int], strings: list[str], count: int
) -> None:
    s = StopSettings(count, tuple(eos), tuple(strings), decode, context_limit=45)
    blocks, single = StopTracker(s, [3], None), StopTracker(s, [3], None)
    at, i = 0, 0
    while at < len(tokens):
        blocks.push(0, tokens[at : at + cuts[i % len(cuts)]])
        at += cuts[i % len(cuts)]
        i += 1
    for token in tokens:
        single.push(0, [token])
    assert blocks.new_tokens == single.new_tokens
    assert blocks.reasons == single.reasons
    # the oracle: the shortest prefix of the tokens with a reason to end
    room = min(count, 42)
    ends = (
        n
        for n in range(1, len(tokens) + 1)
        if n >= room or tokens[n - 1] in eos or any(t in decode(tokens[:n]) for t in strings)
    )
    assert len(blocks.new_tokens[0]) == (min(room, next(ends, len(tokens))))


def test_an_interrupt_leaves_nothing_broken() -> None:
    model, decoder = tiny(3)
    drafter = ScriptedDrafter(scripts("right", oracle(model, PROMPTS), 13, 0), decoder, 1)
    calls = 0

    def interrupt(b: int, tokens: list[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    stop = StopSettings(max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=stop, on_tokens=interrupt)
    out = generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=stop)
    assert out.sequences == [reference(model, p, 20) for p in PROMPTS]


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1, 2], [0]),
        Draft([1], [1]),
        Draft([1] * 64, [0] * 64),
        Draft([1, 1], [0, 0]),
    ],
)
def test_drafts_that_break_the_contract(draft: Draft) -> None:
    if draft.parents == [0, 0]:
        draft.check()  # siblings may repeat a token
        return
    with pytest.raises(ValueError, match="draft"):
        draft.check()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([[1], []], "prompt 1 is empty"), ([[99]], "outside 0..12"), ([[-1]], "outside 0..12")],
)
def test_prompts_are_refused(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny(3)[1], PlainStep(), prompts)


def test_no_prompts() -> None:
    assert generate(tiny(3)[1], PlainStep(), []).sequences == []


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"context_limit": 0},
        {"eos_token_ids": (-2,)},
        {"stop_strings": ("",), "decode": decode},
        {"stop_strings": ("x",)},
    ],
)
def test_settings_refuse(values: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(UserError, match=next(iter(values))):
        StopSettings(**values)


def test_same_seed_same_text() -> None:
    _, decoder = tiny(3)
    s, stop = SamplingSettings(1.0, seed=5), StopSettings(max_new_tokens=12)
    assert (
        generate(decoder, PlainStep(), PROMPTS, s, stop).sequences
        == generate(decoder, PlainStep(), PROMPTS, s, stop).sequences
        != generate(decoder, PlainStep(), PROMPTS, SamplingSettings(1.0, seed=6), stop).sequences
    )
