"""What a dynamic comparison measures, and which setting is the best at a share of full quality."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from multirate.engine import attach
from multirate.errors import UserError
from multirate.lab.bench import frontier
from multirate.lab.bench.rows import Row
from multirate.loading.hub import reference_accelerators
from multirate.methods import spec


def row(method: str, speedup: float | None, kept: float | None = None) -> Row:
    lossless = "=" not in method
    return Row(method, lossless, 10, 1.0, 10.0, speedup, 0.0, None, None, 4, 0, 0, kept=kept)


ROWS = [
    row("autoregressive", 1.0),
    row("one", 1.5),
    row("one:dial=[0.9]", 1.8, 0.97),
    row("one:dial=[0.5]", 2.5, 0.92),
    row("one:dial=[0.1]", 3.5, 0.6),
    row("two", 1.2),
    row("two:dial=[0.9]", 1.1, 0.999),  # slower than its lossless form
    row("two:dial=[0.5]", None, 0.96),  # wrong answers
    row("three:dial=[0.5]", 9.0, None),  # quality not measured
]


def test_the_best_of_each_method_at_each_quality() -> None:
    found = {(b.method, b.quality): b for b in frontier.frontier(ROWS)}
    assert {key: best.setting for key, best in found.items()} == {
        ("autoregressive", 0.99): "autoregressive",
        ("autoregressive", 0.95): "autoregressive",
        ("autoregressive", 0.9): "autoregressive",
        ("one", 0.99): "one",
        ("one", 0.95): "one:dial=[0.9]",
        ("one", 0.9): "one:dial=[0.5]",
        ("two", 0.99): "two",
        ("two", 0.95): "two",
        ("two", 0.9): "two",
    }
    assert found["one", 0.99].kept == 1.0 and found["one", 0.9].kept == 0.92
    assert not frontier.frontier([row("three:dial=[0.5]", 9.0, 0.5)])


def test_answers_that_loop_do_not_count_unless_a_task_scores_them() -> None:
    rows = [row("autoregressive", 1.0), row("one:dial=[0.5]", 2.5, 0.97)]
    rows[0].repeats, rows[1].repeats = 0.02, 0.06
    assert len(frontier.frontier(rows, [0.95])) == 2
    rows[1].repeats = 0.5
    assert [best.method for best in frontier.frontier(rows, [0.95])] == ["autoregressive"]
    rows[0].score_kept, rows[1].score_kept = 1.0, 0.99
    assert len(frontier.frontier(rows, [0.95])) == 2


def test_on_a_task_quality_is_the_share_of_its_score() -> None:
    rows = [row("autoregressive", 1.0), row("one:dial=[0.5]", 2.5, 0.4)]
    rows[0].score_kept, rows[1].score_kept = 1.0, 0.991
    (best,) = [b for b in frontier.frontier(rows, [0.99]) if b.method == "one"]
    assert (best.kept, best.speedup) == (0.991, 2.5)
    rows[1].score_kept = 0.98
    assert all(b.method != "one" for b in frontier.frontier(rows, [0.99]))


def test_the_table_fits_a_terminal() -> None:
    rows = [*ROWS, row("one:exit_thresholds=[0.9990,0.9990,0.9990]", 1.9, 0.995)]
    console = Console(width=80, record=True)
    console.print(frontier.table(frontier.frontier(rows)))
    text = console.export_text()
    assert "1.90x" in text and "99.5% kept" in text and "lossless" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_every_accelerator_with_a_dial_is_measured_along_it() -> None:
    folders = reference_accelerators("tiny")
    engine = attach("tiny", folders["m2r2-carry"])
    engine.add(folders["m2r2"], "three-gates")
    names = frontier.settings_of(engine)
    assert names[:2] == ["autoregressive", "m2r2-carry"]
    dials = [name for name in names if name.startswith("three-gates:")]
    untrained = [name for name in names if spec.parse_variant(name)[0] not in engine.accelerators]
    assert len(dials) == frontier.POINTS
    mode = spec.find("m2r2-carry").dynamic
    assert mode is not None
    assert len(names) - len(untrained) == 2 + (1 + len(mode.dials)) * frontier.POINTS
    gates = engine.accelerators["three-gates"].module.config.gates
    thresholds = [spec.parse_variant(name)[1]["exit_thresholds"] for name in dials]
    assert all(len(values) == len(gates) for values in thresholds)
    firsts = [values[0] for values in thresholds]
    assert firsts == sorted(firsts, reverse=True) and firsts[0] > 0.99
    for name in dials:
        assert not engine.lossless(name)


def test_methods_without_training_are_measured_along_all_their_dials() -> None:
    engine = attach("tiny")
    names = frontier.settings_of(engine)
    assert names[0] == "autoregressive" and len(set(names)) == len(names)
    for method in spec.dynamic_methods(trained=False):
        mode = spec.find(method).dynamic
        assert mode is not None
        own = [name for name in names if spec.parse_variant(name)[0] == method]
        assert len(own) == frontier.POINTS * len(mode.dials)
        for name in own:
            assert not engine.lossless(name), "its settings are accepted"


def test_an_accelerator_without_a_dial_is_refused() -> None:
    engine = attach("tiny", reference_accelerators("tiny")["kangaroo"])
    with pytest.raises(UserError, match=r"mode, one of .*m2r2, m2r2-carry.*; given: kangaroo"):
        frontier.settings_of(engine)


def test_bench_prints_and_writes_the_frontier(tmp_path: Path) -> None:
    import json

    from typer.testing import CliRunner

    from multirate.cli.main import app

    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"instruction": "Name a colour."}) + "\n")
    out = tmp_path / "out.json"
    arguments = ["bench", "tiny", "--suite", "text", "--data", str(data), "--json", str(out)]
    data.write_text(json.dumps({"text": "Name a colour."}) + "\n")
    result = CliRunner().invoke(
        app, [*arguments, "--methods", "dynamic", "--points", "2", "-n", "8", "--repeats", "1"]
    )
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    measured = {row["method"] for row in content["rows"]}
    assert {"autoregressive", "m2r2", "m2r2-carry"} <= measured
    assert sum(name.startswith("m2r2-carry:") for name in measured) == 2
    lossy = [row for row in content["rows"] if not row["lossless"]]
    assert all(row["kept"] is not None and row["perplexity"] >= 1 for row in lossy)
    assert {best["quality"] for best in content["frontier"]} == set(frontier.QUALITIES)
    assert "Best speedup at each quality" in result.output
    refused = CliRunner().invoke(app, [*arguments, "--methods", "autoregressive", "--points", "2"])
    assert refused.exit_code == 2 and "--points 2 needs --methods dynamic" in refused.output
