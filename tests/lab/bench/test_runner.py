import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.bench import tiny_model
from multirate import io, provenance
from multirate.errors import UserError
from multirate.lab.bench import report
from multirate.lab.bench.divergence import Judge, first_difference
from multirate.lab.bench.prompts import Prompt
from multirate.lab.bench.rows import Scoring, reference_row, summarise
from multirate.lab.bench.runner import Answer, Measurements, MethodRun, Sample, batches, measure

PROMPTS = [Prompt(str(i), [10 + i, 20, 30]) for i in range(4)]


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model.model()


@pytest.fixture(scope="module")
def truth(model: torch.nn.Module) -> dict[tuple[int, ...], list[int]]:
    with torch.no_grad():
        return {tuple(p.tokens): greedy(model, p.tokens, 6) for p in PROMPTS}


def recorded(answers: dict[str, list[list[int]]], seconds: dict[str, list[float]]) -> Measurements:
    """Measurements with the given answers in every repeat and the given seconds per prompt of each
    repeat.
    """
    repeats = len(next(iter(seconds.values())))

    def sample(name: str, repeat: int, index: int) -> Sample:
        tokens = answers[name][index]
        return Sample(
            Answer(tokens, stepped=len(tokens), steps=2, drafted=4, accepted=3),
            seconds[name][repeat],
        )

    samples = [
        [{name: sample(name, r, i) for name in answers} for i in range(4)] for r in range(repeats)
    ]
    return Measurements(list(answers), PROMPTS, samples)


LOOP = [7, 8] * 12
NO_LOOP = list(range(24))


def test_answers_in_loops_are_left_out_whatever_the_others_say() -> None:
    mixed = [NO_LOOP, LOOP, NO_LOOP, LOOP]
    runs = recorded(
        {"autoregressive": mixed, "kangaroo": [LOOP] * 4},
        {"autoregressive": [2.0, 3.0], "kangaroo": [1.0, 1.0]},
    )
    runs.interrupted = True
    counted, left_out = runs.without_loops()
    assert left_out == ["1", "3"]
    assert [prompt.id for prompt in counted.prompts] == ["0", "2"] and counted.interrupted
    assert [len(repeat) for repeat in counted.usable()] == [2, 2]
    assert [taken["autoregressive"].answer.tokens for taken in counted.samples[1]] == [NO_LOOP] * 2
    row = summarise(counted, Judge(tiny_model.model()), ["kangaroo"])[0]
    assert row.tokens == 48 and row.seconds_per_repeat == [4.0, 6.0] and row.repeats == 0.0
    assert len(runs.prompts) == 4 and len(runs.samples[0]) == 4


def test_a_repeat_that_was_cut_off_stays_incomplete_without_loops() -> None:
    runs = recorded(
        {"autoregressive": [LOOP, NO_LOOP, NO_LOOP, NO_LOOP]}, {"autoregressive": [2.0, 3.0]}
    )
    runs.samples[1] = runs.samples[1][:2]
    counted, left_out = runs.without_loops()
    assert left_out == ["0"]
    assert [len(repeat) for repeat in counted.samples] == [3, 1]
    assert [len(repeat) for repeat in counted.usable()] == [3]
    nothing = Measurements(["autoregressive"], PROMPTS, [[]], interrupted=True).without_loops()
    assert nothing[1] == [] and nothing[0].usable() == []


def test_first_difference_is_by_length_and_content() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([1], [1, 2]) == 1
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([], [1]) == 0


def test_rows(model: torch.nn.Module, truth: dict) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    runs = recorded(
        {"generate": right, "autoregressive": right, "fast": right},
        {"generate": [4.0, 4.0, 4.0], "autoregressive": [2.0, 3.0, 2.5], "fast": [1.0, 1.0, 1.0]},
    )
    rows = {row.method: row for row in summarise(runs, Judge(model))}
    plain = rows["autoregressive"]
    assert plain.tokens == 24 and plain.seconds == pytest.approx(10.0)  # the median repeat
    assert plain.tokens_per_second == pytest.approx(2.4)
    assert plain.spread == pytest.approx((24 / 8 - 24 / 12) / 2.4)
    assert plain.speedup == pytest.approx(1.0)
    assert rows["fast"].speedup == pytest.approx(2.5)
    assert rows["generate"].speedup == pytest.approx(10 / 16)
    assert rows["fast"].tokens_per_step == pytest.approx(3.0) and rows[
        "fast"
    ].acceptance == pytest.approx(0.75)
    assert (rows["fast"].identical, rows["fast"].near_ties, rows["fast"].diverged) == (4, 0, 0)


def test_speedup_is_against_the_faster_reference(model: torch.nn.Module, truth: dict) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    runs = recorded(
        {"generate": right, "autoregressive": right, "fast": right},
        {"generate": [1.0], "autoregressive": [2.0], "fast": [0.5]},
    )
    rows = summarise(runs, Judge(model))
    against = reference_row(rows)
    assert against is not None and against.method == "generate"
    assert rows[2].speedup == pytest.approx(2.0)
    assert "compared with generate" in (report.table(rows).caption or "")


@pytest.mark.parametrize("damage", ["shortened", "missing", "longer", "changed"])
def test_wrong_answers_get_no_speedup(model: torch.nn.Module, truth: dict, damage: str) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    bad = right[2]
    bad = {
        "shortened": bad[:-1],
        "missing": [],
        "longer": [*bad, 5],
        "changed": [*bad[:3], (bad[3] + 1) % 261, 7],
    }[damage]
    runs = recorded(
        {"autoregressive": right, "fast": [right[0], right[1], bad, right[3]]},
        {"autoregressive": [2.0, 2.0], "fast": [1.0, 1.0]},
    )
    row = summarise(runs, Judge(model))[1]
    assert (row.identical, row.near_ties, row.diverged) == (3, 0, 1)
    assert row.speedup is None
    assert row.divergences[0]["prompt"] == "2" and row.divergences[0]["kind"] == "bug"


def test_a_wrong_answer_in_one_repeat_only_is_found(model: torch.nn.Module, truth: dict) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    runs = recorded(
        {"autoregressive": right, "fast": right}, {"autoregressive": [1.0] * 3, "fast": [1.0] * 3}
    )
    runs.samples[1][0]["fast"] = Sample(Answer([3]), 1.0)
    row = summarise(runs, Judge(model))[1]
    assert (row.identical, row.diverged, row.speedup) == (3, 1, None)


def test_a_lossy_method_may_differ_but_must_answer(model: torch.nn.Module, truth: dict) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    other = [[5, 6], *right[1:]]
    runs = recorded(
        {"autoregressive": right, "exit": other}, {"autoregressive": [1.0], "exit": [1.0]}
    )
    row = summarise(runs, Judge(model), lossy=["exit"])[1]
    assert row.speedup is not None and row.identical == 3 and report.identity(row) == "3 same"
    runs.samples[0][0]["exit"] = Sample(Answer([]), 1.0)
    assert summarise(runs, Judge(model), lossy=["exit"])[1].speedup is None


def test_a_tasks_scores_are_those_of_the_answers(model: torch.nn.Module, truth: dict) -> None:
    right = list(truth.values())
    shortened = [tokens[:-1] for tokens in right]
    answers = {"autoregressive": right, "exit": shortened}
    runs = recorded(answers, {"autoregressive": [2.0, 2.0], "exit": [1.0, 1.0]})
    lengths = Scoring("length", lambda said: {"length": sum(len(ids) for ids in said.values())})
    plain, lossy = summarise(runs, Judge(model), lossy=["exit"], scoring=lengths)
    full = sum(len(tokens) for tokens in right)
    assert plain.scores == {"length": full} and plain.quality == 1.0
    assert lossy.quality == lossy.score_kept == (full - len(right)) / full
    nothing = Scoring("length", lambda said: {"length": 0.0})
    assert summarise(runs, Judge(model), lossy=["exit"], scoring=nothing)[1].quality is None


def test_near_ties_of_bf16_are_told_from_bugs() -> None:
    model = tiny_model.model(seed=3, dtype=torch.bfloat16)
    judge = Judge(model)
    prompt = [10, 20, 30]
    with torch.no_grad():
        exact = judge._exact_model()(torch.tensor([prompt])).logits[0, -1]
        top = int(exact.argmax())
        # Copy the winning row of the head onto another token with the smallest change bf16 can
        # hold.
        twin = (top + 5) % 261
        for head in (model.lm_head.weight, judge._exact.lm_head.weight):
            head[twin] = head[top]
        index = int(model.lm_head.weight[twin].abs().argmin())
        for head in (model.lm_head.weight, judge._exact.lm_head.weight):
            head[twin, index] *= 1.01
    tie = judge.classify(prompt, [top, 4], [twin, 9])
    assert (
        tie is not None and tie.kind == "near-tie" and tie.gap is not None and tie.bound is not None
    )
    assert tie.position == 0 and tie.gap <= tie.bound
    worst = int(exact.argmin())
    bug = judge.classify(prompt, [top, 4], [worst, 9])
    assert (
        bug is not None
        and bug.kind == "bug"
        and bug.gap is not None
        and bug.gap > 10 * (bug.bound or 0)
    )
    assert judge.classify(prompt, [top, 4], [top, 4]) is None
    assert model.dtype == torch.bfloat16  # judged on a copy


def test_measuring_interleaves_and_rotates() -> None:
    calls: list[str] = []

    def method_run(name: str) -> MethodRun:
        def run(prompt: list[int]) -> Answer:
            calls.append(name)
            return Answer([1])

        return MethodRun(name, run)

    runs = measure([method_run("a"), method_run("b")], PROMPTS[:3], repeats=2, warmup=1)
    assert "".join(calls) == "ab" + "abbaab" + "baabba"
    assert [len(repeat) for repeat in runs.samples] == [3, 3] and not runs.interrupted


def test_only_a_conversations_later_turns_may_know_what_came_before() -> None:
    calls: list[str] = []

    def run(prompt: list[int]) -> Answer:
        calls.append(str(prompt[0]))
        return Answer([1])

    prompts = [Prompt("a#1", [1]), Prompt("a#2", [2], follows=True), Prompt("b", [3])]
    measure(
        [MethodRun("a", run, forget=lambda: calls.append("forget"))], prompts, repeats=2, warmup=1
    )
    assert calls == ["forget", "1"] + 2 * ["forget", "1", "2", "forget", "3"]


def test_a_batch_has_the_same_turn_of_several_conversations() -> None:
    names = ["a#1", "a#2", "b#1", "b#2", "c", "d#1", "d#2", "e"]
    prompts = [Prompt(name, [1], follows=name.endswith("#2")) for name in names]
    groups = [[prompt.id for prompt in group] for group in batches(prompts, 2)]
    assert groups == [["a#1", "b#1"], ["a#2", "b#2"], ["c", "d#1"], ["d#2"], ["e"]]
    assert [group for group in batches(prompts, 1)] == [[prompt] for prompt in prompts]


def test_a_batch_is_answered_at_once_and_its_time_shared(model: torch.nn.Module) -> None:
    calls: list[int] = []

    def run_batch(prompts: list[list[int]]) -> list[Answer]:
        calls.append(len(prompts))
        return [Answer([1, 2], stepped=5, steps=3), *(Answer([1]) for _ in prompts[1:])]

    together = MethodRun("autoregressive", lambda p: run_batch([p])[0], run_batch=run_batch)
    alone = MethodRun("alone", lambda p: Answer([1, 2] if p == [3] else [1]))
    prompts = [Prompt(str(n), [n]) for n in (3, 4, 3)]
    runs = measure([together, alone], prompts, repeats=1, warmup=1, batch=2)
    assert calls == [2, 2, 1]
    first, second, _ = (taken["autoregressive"] for taken in runs.samples[0])
    assert first.seconds == second.seconds > 0
    row, _ = summarise(runs, Judge(model))
    assert row.tokens == 5 and row.steps == 6 and row.identical == 3


@pytest.mark.parametrize(
    ("stop_at", "repeats", "prompts"), [(3, 0, 0), (6, 1, 1), (11, 1, 3), (14, 1, 3)]
)
def test_ctrl_c_keeps_what_is_complete(stop_at: int, repeats: int, prompts: int) -> None:
    calls = 0

    def run(prompt: list[int]) -> Answer:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return Answer([1, 2])

    runs = measure(
        [MethodRun("autoregressive", run), MethodRun("b", run)], PROMPTS[:3], repeats=3, warmup=1
    )
    assert runs.interrupted
    assert [len(r) for r in runs.usable()] == [prompts] * repeats


def test_table_fits_in_80_columns_and_json_is_complete(
    model: torch.nn.Module, truth: dict, tmp_path: Path
) -> None:
    right = [truth[tuple(p.tokens)] for p in PROMPTS]
    runs = recorded(
        {"generate": right, "autoregressive": right, "m2r2-carry": [*right[:3], []]},
        {"generate": [1.0], "autoregressive": [0.001], "m2r2-carry": [0.0005]},
    )
    rows = summarise(runs, Judge(model))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(rows, title="mt_bench"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "withheld" in text and "1 WRONG" in text and "3/4" in text

    facts = provenance.collect(seed=0)
    content = report.document(
        facts, rows, dtype="float32", model="tiny", suite="text", prompts=4, max_new_tokens=6
    )
    path = io.check_writable(tmp_path / "out.json")
    io.write_json(path, content)
    read = json.loads(path.read_text())
    top = [
        "version",
        "commit",
        "device",
        "threads",
        "dtype",
        "model",
        "suite",
        "prompts",
        "max_new_tokens",
        "rows",
    ]
    assert set(top) <= set(read)
    fields = ["method", "lossless", "tokens", "seconds", "tokens_per_second", "speedup", "spread"]
    fields += ["tokens_per_step", "acceptance", "identical", "near_ties", "diverged"]
    assert all(set(fields) <= set(row) for row in read["rows"])
    assert read["baseline"] == "autoregressive" and read["rows"][2]["speedup"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_unwritable_outputs_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is a folder"):
        io.check_writable(tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*missing/out\.json: no such file"):
        io.check_writable(tmp_path / "missing" / "out.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a directory"):
        io.check_writable(tmp_path / "file" / "out.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ValueError):
        io.write_json(path, {"bad": float("nan")})
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out.json"]
