"""Kept teacher states: the same training as with the teacher in every step, continued after a stop,
checked.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirate.errors import UserError
from multirate.methods._shared.teacher import Teacher
from multirate.runtime.hf.parts import ModelParts
from multirate.runtime.load import load_decoder
from multirate.training import teacher_states
from multirate.training.data import load_samples
from multirate.training.loop import train
from multirate.training.teacher_states import FILE, INDEX, TeacherStates

from .test_loop import OPTIONS, settings, weights


def test_states_are_the_teachers_for_every_sample(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    samples = load_samples(
        [data, data], AutoTokenizer.from_pretrained(model_dir), 64
    )  # every sample twice
    states = TeacherStates(tmp_path, samples, 48, "base", top=5)
    states.compute(load_decoder(model))
    distinct = {s.ids.tobytes() for s in samples}
    rows = sum(len(np_bytes) // 4 for np_bytes in distinct)
    assert states.bytes == (2 * 48 + (4 + 2) * 5) * rows
    teacher = Teacher(model)
    for i in (0, 7, len(samples) - 1):
        ids = torch.from_numpy(samples[i].ids).long()[None]
        length = ids.shape[1]
        wanted = teacher.slow(ids, shared=0)
        found = states.batch([i], length + 3)
        assert torch.allclose(found.final[:, :length], wanted.final, rtol=2**-7, atol=2e-3)
        assert not found.final[:, length:].any()
        log_p, tokens = teacher.head.logits(wanted.normed[0]).log_softmax(-1).topk(5)
        torch.testing.assert_close(found.top.log_probs[0, :length], log_p, atol=5e-3, rtol=2e-3)
        assert torch.equal(found.top.tokens[0, :length, 0], tokens[:, 0])


def test_inner_residuals_are_added_to_what_is_kept(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    decoder = load_decoder(model)
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    TeacherStates(tmp_path, samples[:20], 48, "base").compute(decoder)
    for taps in ((2,), (1, 3), (), (1, 2, 3)):  # each run adds what it misses
        states = TeacherStates(tmp_path, samples, 48, "base", taps=taps)
        assert states.complete is (taps in ((), (1, 2, 3)))
        states.compute(decoder)
        teacher = Teacher(model)
        for i in (0, 30, len(samples) - 1):
            ids = torch.from_numpy(samples[i].ids).long()[None]
            known = states.batch([i], ids.shape[1])
            wanted = teacher.slow(ids, shared=0, gates=taps)
            assert tuple(known.residual) == taps
            with monkeypatch.context() as patch:
                patch.setattr(ModelParts, "run_layer", lambda *_: pytest.fail("it ran"))
                found = teacher.slow(ids, shared=0, gates=taps, known=known)
            for tap in taps:
                assert torch.allclose(
                    found.residual[tap], wanted.residual[tap], rtol=2**-7, atol=2e-3
                )
    os.truncate(tmp_path / FILE.format(2), 100)
    with pytest.raises(UserError, match="damaged"):
        TeacherStates(tmp_path, samples, 48, "base")


@pytest.mark.parametrize("method", ["m2r2-carry", "m2r2", "kangaroo", "eagle3"])
def test_training_with_them_is_training_without(
    tmp_path: Path, model_dir: Path, data: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_states, "TOP", 2048)  # more than the vocabulary has
    options: dict[str, Any] = {
        "m2r2-carry": {**OPTIONS, "gates": [1], "taps": [2, 3]},
        "m2r2": {**OPTIONS, "gates": [1, 3]},
    }.get(method, {})
    online = train(model_dir, [data], tmp_path / "a", method, settings(), options)
    kept = train(
        model_dir,
        [data],
        tmp_path / "b",
        method,
        settings(teacher_states=str(tmp_path / "s")),
        options,
    )
    for one, other in zip(online.results["terms"], kept.results["terms"], strict=True):
        assert other["kl"] == pytest.approx(one["kl"], rel=0.02)
    assert weights(tmp_path / "a").keys() == weights(tmp_path / "b").keys()


def test_an_interrupted_computation_is_continued(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_states, "ROWS_PER_CALL", 100)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)

    def stop_at_30(done: int, of: int) -> None:
        if done >= 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TeacherStates(tmp_path, samples, 48, "base").compute(load_decoder(model), stop_at_30)
    done = len({name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}) // 3
    assert 30 <= done < len(samples)
    counted: list[int] = []
    again = TeacherStates(tmp_path, samples, 48, "base")
    again.compute(load_decoder(model), lambda count, of: counted.append(count))
    assert counted[0] > done and counted[-1] == len({s.ids.tobytes() for s in samples})
    whole = TeacherStates(tmp_path / "whole", samples, 48, "base")
    whole.compute(load_decoder(model))
    assert_equal_states(again, whole, range(len(samples)))


def assert_equal_states(one: TeacherStates, other: TeacherStates, samples: range) -> None:
    a, b = one.batch(samples, 64), other.batch(samples, 64)
    assert torch.equal(a.final, b.final)
    assert torch.equal(a.top.tokens, b.top.tokens)
    assert torch.equal(a.top.log_probs, b.top.log_probs)


def test_other_data_uses_what_is_there_and_adds_its_own(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    half = len(samples) // 2
    TeacherStates(tmp_path, samples[half:], 48, "base").compute(load_decoder(model))
    counted: list[int] = []
    grown = TeacherStates(tmp_path, samples, 48, "base")
    grown.compute(load_decoder(model), lambda count, of: counted.append(count))
    known = len({s.ids.tobytes() for s in samples[half:]})
    assert counted[0] > known and counted[-1] == len({s.ids.tobytes() for s in samples})
    whole = TeacherStates(tmp_path / "whole", samples, 48, "base")
    whole.compute(load_decoder(model))
    assert_equal_states(grown, whole, range(len(samples)))


def test_states_of_another_base_and_damaged_ones_are_refused(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    TeacherStates(tmp_path, samples, 48, "base").compute(load_decoder(model))
    with pytest.raises(UserError, match="another base"):
        TeacherStates(tmp_path, samples, 48, "other base")
    content = (tmp_path / INDEX).read_text()
    for damaged in ("{", content.replace("identity", "other"), "[1]"):
        (tmp_path / INDEX).write_text(damaged)
        with pytest.raises(UserError, match="damaged"):
            TeacherStates(tmp_path, samples, 48, "base")


def test_files_of_others_are_not_written_into(tmp_path: Path, model_dir: Path, data: Path) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    (tmp_path / FILE.format(1)).write_text("mine")
    with pytest.raises(UserError, match=r"states-00001.safetensors exists .* not replaced"):
        TeacherStates(tmp_path, samples, 48, "base")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / INDEX).write_text('{"mine": 1}')
    with pytest.raises(UserError, match="not a file of teacher states"):
        TeacherStates(tmp_path, samples, 48, "base")


def test_a_computation_that_was_killed_at_its_start_is_begun_again(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    TeacherStates(tmp_path, samples, 48, "base")
    states = TeacherStates(tmp_path, samples, 48, "base")
    states.compute(load_decoder(model))
    assert states.complete


def test_a_full_disk_is_found_before_anything_is_computed(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"cannot store .*: no space left on device"):
        TeacherStates(tmp_path, samples, 48, "base")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_keeps_what_was_saved(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_states, "ROWS_PER_CALL", 100)
    monkeypatch.setattr(teacher_states, "SAVE_TOKENS", 100)
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    states = TeacherStates(tmp_path, samples, 48, "base")
    write, written = teacher_states.write_atomically, list[Path]()

    def filling(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > 2:
            raise UserError(f"cannot write {path}: no space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_states, "write_atomically", filling)
        with pytest.raises(UserError, match="no space left on device"):
            states.compute(load_decoder(model))
    states._release()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    counted: list[int] = []
    again = TeacherStates(tmp_path, samples, 48, "base")
    again.compute(load_decoder(model), lambda count, of: counted.append(count))
    assert again.complete and counted[0] > 1


def test_one_process_at_a_time_adds_states(tmp_path: Path, model_dir: Path, data: Path) -> None:
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    first = TeacherStates(tmp_path, samples[:9], 48, "base")
    with pytest.raises(UserError, match="written by another process"):
        TeacherStates(tmp_path, samples[:10], 48, "base")
    first.compute(load_decoder(model))
    second = TeacherStates(tmp_path, samples[:10], 48, "base")
    assert TeacherStates(tmp_path, samples[:9], 48, "base").complete and not second.complete


def test_an_unusable_folder_is_one_sentence(tmp_path: Path, model_dir: Path, data: Path) -> None:
    (tmp_path / "file").write_text("")
    samples = load_samples([data], AutoTokenizer.from_pretrained(model_dir), 64)
    with pytest.raises(UserError, match=r"cannot store .* GB of teacher states in"):
        TeacherStates(tmp_path / "file", samples, 48, "base")


def test_progress_in_a_log_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(teacher_states.time, "monotonic", lambda: now)
    report = teacher_states.report_to_terminal(seconds=20)
    for now, done in ((5.0, 10), (25.0, 30), (30.0, 35), (60.0, 60), (90.0, 100)):  # noqa: B007
        report(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "running the base model on the samples: 30 of 100, 1 min left",
        "running the base model on the samples: 60 of 100, 1 min left",
        "running the base model on the samples: 100 of 100",
    ]
