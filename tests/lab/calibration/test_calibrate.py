"""Calibration on a tiny model: losses are what they say, and a guarantee names what keeps it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multirate
from lab.bench import tiny_model
from multirate.decoding.plain import PlainStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.guarantee import Guarantee, store
from multirate.lab.calibration import calibrate as calibrating
from multirate.lab.calibration import measure
from multirate.lab.calibration.calibrate import Calibration, check_guarantee
from multirate.lab.calibration.measure import Measured, answers, full_model_on, read_prompts
from multirate.lab.calibration.risk import try_threshold
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find, find_training
from multirate.runtime.hf.decoder import HFDecoder
from multirate.training.checkpoint import Accelerator, describe_base
from multirate.training.fingerprint import fingerprint

STOP = StopSettings(max_new_tokens=6)
PROMPTS = [[5 + i, 40, 7 * i % 200 + 5, 9] for i in range(10)]
"""As many as a quality of 0.7 needs."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model.model()


def accelerator(model: Any, folder: Path, method: str = "m2r2-carry", **options: Any) -> Path:
    torch.manual_seed(0)
    kind, shape = find_training(method), BaseShape.of(model.config)
    config = kind.config_for(shape, rank=4, **options)
    Accelerator(method, config, kind.build(config, shape), describe_base(model)).save_pretrained(
        folder
    )
    return folder


def test_a_loss_is_the_share_of_tokens_that_are_not_the_models(model: Any) -> None:
    decoder = HFDecoder(model)
    for prompt, measured in zip(
        PROMPTS, answers(decoder, PlainStep(), PROMPTS, STOP, batch=4), strict=True
    ):
        assert measured == Measured(6, 0) and measured.loss == 0, prompt
    generator = torch.Generator().manual_seed(0)
    for prompt in PROMPTS[:3]:
        tokens = torch.randint(0, 261, (5,), generator=generator).tolist()
        text = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        said = logits.argmax(-1).tolist()
        tokens[2] = said[2]
        right = [int(ours == theirs) for ours, theirs in zip(tokens[:3], said[:3], strict=True)]
        verdict = full_model_on(decoder, prompt, tokens[:3])
        assert verdict.differing == 3 - sum(right) < 3 == verdict.tokens
        likely = logits[:3].log_softmax(-1)[torch.arange(3), torch.tensor(tokens[:3])]
        assert verdict.nats == pytest.approx(-float(likely.sum()), rel=1e-4)
    assert full_model_on(decoder, PROMPTS[0], []).differing == 0 and Measured(0, 0).loss == 0


def test_prompts_are_first_questions_and_halves_of_texts(tmp_path: Path) -> None:
    words = tiny_model.tokenizer()
    records = [
        {"instruction": "one", "output": "x"},
        {"instruction": "One ", "output": "again"},
        {"messages": [{"role": r, "content": c} for r, c in (("user", "two"), ("assistant", "a"))]},
        {"text": "a text of its own"},
        {"instruction": "long " * 50, "output": "x"},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = [words.decode(ids) for ids in read_prompts([path], words, room=100)]
    assert prompts == [
        "<|user|>one<eos><|assistant|>",
        "<|user|>two<eos><|assistant|>",
        "a text of",
    ]
    assert len(read_prompts([path], words, None)) == 4
    assert len(read_prompts([path], words, None, limit=2)) == 2
    with pytest.raises(UserError, match=r"no prompt in .*data\.jsonl leaves room"):
        read_prompts([path], words, room=2)


def test_answers_that_a_lower_threshold_leaves_as_they_are_are_not_decoded_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = accelerator(model, tmp_path / "acc", arla_dim=8)
    engine = multirate.attach(model, folder, backend="hf")
    given, decoded = engine.accelerators["m2r2-carry"], []
    original = measure.generate

    def counted(*args: Any, **more: Any) -> Any:
        decoded.append(len(args[2]))
        return original(*args, **more)

    monkeypatch.setattr(measure, "generate", counted)
    calibration = Calibration(
        engine.decoder, given, PROMPTS, fingerprint(model), stop=STOP, batch=2
    )
    made, bolder = calibration.reach(0.7), calibration.reach(0.6)
    assert bolder.tried[: len(made.tried) - 1] == made.tried[:-1]
    assert sum(decoded) < len(PROMPTS) * len(bolder.tried) - 40
    mode, method = find("m2r2-carry").dynamic, find("m2r2-carry")
    assert mode is not None and len(made.tried) > 6
    for threshold, loss in [*bolder.tried[:-1:4], bolder.tried[-2]]:
        step = method.make_step(engine.decoder, given, mode.settings(given.module, threshold))
        assert step is not None
        drawn = random.Random(0).sample(PROMPTS, len(PROMPTS))
        anew = [one.loss for one in answers(engine.decoder, step, drawn, STOP)]
        tested = try_threshold(threshold, anew, len(drawn), 0.4, 0.95)
        assert tested.holds and loss == pytest.approx(tested.mean)


@pytest.mark.parametrize("method", ["m2r2-carry", "m2r2"])
def test_a_guarantee_is_made_stored_and_kept(model: Any, tmp_path: Path, method: str) -> None:
    folder = accelerator(model, tmp_path / "acc", method)
    engine = multirate.attach(model, folder, backend="hf")
    given = engine.accelerators[method]
    seen: list[tuple[float, int, int]] = []
    made = Calibration(
        engine.decoder,
        given,
        PROMPTS,
        fingerprint(model),
        stop=STOP,
        progress=lambda *said: seen.append(said),
    ).reach(0.7)
    mode = find(method).dynamic
    assert mode is not None and made.gates == mode.gates(given.module)
    assert [threshold for threshold, _ in made.tried] == list(mode.path[: len(made.tried)])
    assert made.samples == 10 and made.max_new_tokens == 6 and seen[0][1:] == (1, 10)
    assert made.loss <= 0.3 and made.p_value <= 0.05
    # an untrained accelerator's tokens differ: bold thresholds cannot be guaranteed
    assert made.leaves_early and made.tried[-1][1] > 0
    chosen = mode.settings(given.module, made.tried[-2][0])
    assert made.settings.items() >= {**chosen, "exit_score": "confidence"}.items()
    with pytest.raises(UserError, match="no calibration is stored"):
        engine.generate([PROMPTS[0]], stop=STOP, mode="dynamic", quality=0.7)
    store(folder, made)
    for quality in (0.7, 0.5):
        out = engine.generate([PROMPTS[0]], stop=STOP, mode="dynamic", quality=quality)
        assert engine.guarantee == made and sum(out.stats.exits.values()) == 5
    with pytest.raises(UserError, match="other settings beside the quality"):
        engine.generate([PROMPTS[0]], stop=STOP, method=f"{method}:lookup=0:quality=0.7")
    assert not engine.lossless(f"{method}:quality=0.7") and engine.lossless(method)
    plain = engine.generate([PROMPTS[0]], stop=STOP, method="autoregressive")
    assert engine.guarantee is None
    whole = engine.generate([PROMPTS[0]], stop=STOP, mode="dynamic", quality=1)
    assert whole.sequences == plain.sequences and engine.guarantee is None
    ids = torch.tensor([PROMPTS[0]])
    called = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        custom_generate=multirate.custom_generate(
            folder, backend="hf", mode="dynamic", quality=0.7
        ),
    )
    assert called[0, 4:].tolist() == out.sequences[0]


def test_a_threshold_whose_answers_loop_is_not_guaranteed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = multirate.attach(model, accelerator(model, tmp_path / "acc"), backend="hf")
    path = find("m2r2-carry").dynamic.path  # type: ignore[union-attr]

    def guaranteed(looping: dict[float, int]) -> Guarantee:
        """looping: by threshold, of the tokens of each answer."""

        def some_loop(*args: Any, threshold: float | None = None, **more: Any) -> Any:
            threshold = args[5] if threshold is None else threshold
            for one in answers(*args, **more):
                yield replace(one, looping=looping.get(threshold, 0))

        monkeypatch.setattr(calibrating, "answers", some_loop)
        return Calibration(
            engine.decoder,
            engine.accelerators["m2r2-carry"],
            PROMPTS,
            fingerprint(model),
            stop=STOP,
        ).reach(0.7)

    free = guaranteed({})
    assert not free.looped and len(free.tried) > 3
    made = guaranteed({path[2]: 3})
    assert made.looped and made.tried == free.tried[:3]
    assert made.settings["exit_thresholds"] == [path[1]]
    # where the model's own answers loop as much, it is not the threshold's doing
    assert guaranteed(dict.fromkeys(path, 3)) == free


def test_fewer_thresholds_are_spread_over_the_path(model: Any, tmp_path: Path) -> None:
    mode = find("m2r2-carry").dynamic
    assert mode is not None
    few = mode.along(4)
    assert len(few) == 4 and (few[0], few[-1]) == (mode.path[0], mode.path[-1])
    assert set(few) < set(mode.path) and list(few) == sorted(few, reverse=True)
    assert mode.along() == mode.along(99) == mode.path and mode.along(1) == mode.path[:1]
    engine = multirate.attach(model, accelerator(model, tmp_path / "acc"), backend="hf")
    made = Calibration(
        engine.decoder,
        engine.accelerators["m2r2-carry"],
        PROMPTS,
        fingerprint(model),
        stop=STOP,
        path=mode.along(4),
    ).reach(0.7)
    assert [threshold for threshold, _ in made.tried] == list(few[: len(made.tried)])


def test_where_no_threshold_is_safe_no_token_leaves(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = accelerator(model, tmp_path / "acc")
    engine = multirate.attach(model, folder, backend="hf")
    monkeypatch.setattr(calibrating, "answers", lambda *_: iter([Measured(10, 9)] * len(PROMPTS)))
    made = Calibration(
        engine.decoder, engine.accelerators["m2r2-carry"], PROMPTS, fingerprint(model)
    ).reach(0.7)
    assert not made.leaves_early and len(made.tried) == 1
    assert made.settings["exit_thresholds"] == [None]
    store(folder, made)
    plain = engine.generate([PROMPTS[0]], stop=STOP, method="autoregressive")
    out = engine.generate([PROMPTS[0]], stop=STOP, mode="dynamic", quality=0.7)
    assert out.sequences == plain.sequences and engine.guarantee == made


def test_only_the_points_that_were_named_are_tried(model: Any, tmp_path: Path) -> None:
    engine = multirate.attach(model, accelerator(model, tmp_path / "acc"), backend="hf")
    given = engine.accelerators["m2r2-carry"]
    made = Calibration(engine.decoder, given, PROMPTS, "base", stop=STOP, path=(1.0, 0.9)).reach(
        0.7
    )
    assert [point for point, _ in made.tried] == [1.0, 0.9][: len(made.tried)]
    for points in ((), (0.5, 0.5), (0.1, 0.2), (float("nan"),)):
        with pytest.raises(UserError, match=r"points are .*decreasing numbers"):
            Calibration(engine.decoder, given, PROMPTS, "base", path=points).reach(0.7)


def test_what_is_refused(model: Any, tmp_path: Path) -> None:
    for quality in (0, 1.5, float("nan")):
        with pytest.raises(UserError, match="quality is"):
            check_guarantee(quality, 0.95, 1000, "x")
    with pytest.raises(UserError, match="quality 1 is lossless"):
        check_guarantee(1, 0.95, 1000, "x")
    for confidence in (0, 1, -2):
        with pytest.raises(UserError, match="confidence is"):
            check_guarantee(0.9, confidence, 1000, "x")
    with pytest.raises(UserError, match=r"x has 323 different prompts; .* needs at least 324"):
        check_guarantee(0.99, 0.95, 323, "x")
    check_guarantee(0.99, 0.95, 324, "x")

    engine = multirate.attach(model, accelerator(model, tmp_path / "acc"), backend="hf")
    one = [PROMPTS[0]]
    for named, reason in (
        ({"mode": "fast"}, "mode is 'fast'; accepted: lossless, dynamic"),
        ({"quality": 0.9}, "needs mode 'dynamic'"),
        ({"mode": "dynamic"}, "needs a quality"),
        ({"mode": "dynamic", "quality": 0.0}, "quality is 0.0"),
        ({"mode": "dynamic", "quality": 0.9, "speculate": "never"}, "decodes without drafts"),
        ({"mode": "dynamic", "quality": 0.9, "method": "prompt_lookup"}, "has no dynamic mode"),
    ):
        with pytest.raises(UserError, match=reason):
            engine.generate(one, stop=STOP, **named)  # type: ignore[arg-type]
    blind = accelerator(model, tmp_path / "blind", arla_dim=0)
    engine = multirate.attach(model, blind, backend="hf")
    given = engine.accelerators["m2r2-carry"]
    with pytest.raises(UserError, match="needs an accelerator with ARLA"):
        Calibration(
            engine.decoder,
            given,
            PROMPTS,
            fingerprint(model),
            settings={"exit_score": "arla"},
        ).reach(0.7)
    made = Calibration(
        engine.decoder,
        given,
        PROMPTS,
        fingerprint(model),
        stop=StopSettings(max_new_tokens=2),
        settings={"exit_score": "confidence"},
    ).reach(0.7)
    assert made.settings["exit_score"] == "confidence"
