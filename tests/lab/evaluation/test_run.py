"""Tasks from their files to their scores, in all modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirate.engine import attach
from multirate.errors import UserError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'multirate[eval]'")

from multirate.lab.evaluation.modes import Mode, decoding
from multirate.lab.evaluation.run import Evaluation, evaluate
from multirate.lab.evaluation.task_files import load_tasks, local_tasks

from . import tiny_data

CHOICES = """
task: choices
custom_dataset: !function choices.documents
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
"""
DOCUMENTS = """
from datasets import Dataset

def documents(**_):
    one = {"question": "Once upon", "answer": 0, "choices": [" a time", " the"]}
    return {"test": Dataset.from_list([one, {**one, "question": "The end of"}])}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data.write(tmp_path_factory.mktemp("data"))


def run(
    data: Path, mode: Mode, tasks: list[str], speculate: str = "always", **more: object
) -> Evaluation:
    engine = attach("tiny", None if mode.name == "full" else "m2r2-carry")
    return evaluate(
        engine,
        decoding(engine, mode, speculate),
        load_tasks(tasks, data),
        **more,  # type: ignore[arg-type]
    )


def test_full_and_speculative_scores_are_equal_to_the_last_digit(data: Path) -> None:
    full, speculative = (
        run(data, Mode(name), local_tasks(), limit=3) for name in ("full", "speculative")
    )
    assert full.scores == speculative.scores
    assert full.answers == speculative.answers
    assert {score.samples for score in full.scores} == {3}
    assert {(score.task, score.metric) for score in full.scores} == {
        ("dialogsum", "rouge1"),
        ("dialogsum", "rouge2"),
        ("dialogsum", "rougeL"),
        ("e2e_nlg", "bleu"),
        ("e2e_nlg", "slot_error_rate"),
        ("wikisql", "exact_match"),
        ("wikisql", "execution_match"),
    }
    # the comparison says something only if texts were written, and drafts were accepted
    assert sum(len(one["said"][0]) for one in full.answers["dialogsum"]) > 100
    assert full.work["tokens"] == speculative.work["tokens"] > 100
    assert full.work["steps"] > 1.1 * speculative.work["steps"]


def test_dynamic_mode_runs_at_its_threshold(data: Path) -> None:
    lossless, lossy = (
        run(data, Mode("dynamic", threshold=threshold), ["dialogsum"], limit=2)
        for threshold in (1.1, 0.0)
    )
    full = run(data, Mode(), ["dialogsum"], limit=2)
    assert lossless.answers == full.answers != lossy.answers
    assert lossy.work["exits"] and lossy.work["steps"] < full.work["steps"]


def test_scores_of_perfect_answers(data: Path) -> None:
    """What the tasks' files say is scored, whatever a model would have answered."""
    loaded = load_tasks(local_tasks(), data)["tasks"]
    for name, perfect in (("wikisql", 1), ("e2e_nlg", 0), ("dialogsum", 1)):
        task = loaded[name]
        document = task.task_docs[0]
        scores = task.process_results(document, [task.doc_to_target(document)])
        assert set(scores) == set(task.aggregation())
        if name == "e2e_nlg":
            assert task.aggregation()["bleu"]([scores["bleu"]]) == pytest.approx(100)
            assert task.aggregation()["slot_error_rate"]([scores["slot_error_rate"]]) == perfect
        elif name == "wikisql":
            assert scores == {"exact_match": perfect, "execution_match": perfect}
        else:  # the first of two references, "They meet." and "A meeting."
            assert 0.5 < scores["rouge1"] <= perfect


def test_a_task_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "choices.yaml").write_text(CHOICES)
    (tmp_path / "choices.py").write_text(DOCUMENTS)
    task = str(tmp_path / "choices.yaml")
    full, speculative = (run(tmp_path, Mode(n), [task]) for n in ("full", "speculative"))
    assert full.scores == speculative.scores
    assert {score.metric for score in full.scores} == {"acc", "acc_norm"}
    assert full.scores[0].error is not None and full.work["tokens"] == 0


def test_one_document_has_no_standard_error(data: Path) -> None:
    one = run(data, Mode(), ["dialogsum"], limit=1)
    assert [score.error for score in one.scores] == [None] * 3


def test_the_harness_can_be_called_itself(tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from multirate.lab.evaluation.harness_model import EngineLM

    (tmp_path / "choices.yaml").write_text(CHOICES)
    (tmp_path / "choices.py").write_text(DOCUMENTS)
    engine = attach("tiny", "m2r2-carry")
    found = lm_eval.simple_evaluate(
        model=EngineLM(engine, decoding(engine, Mode("speculative"))),
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    ours = run(tmp_path, Mode(), [str(tmp_path / "choices.yaml")])
    assert found["results"]["choices"]["acc,none"] == ours.scores[0].value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("task: [", "cannot be loaded: ParserError"),
        ("- a list", "cannot be loaded: ValueError"),
        ("name: nothing", "cannot be loaded: ValueError"),
        ("task: x\ncustom_dataset: !function nowhere.documents", "cannot be loaded: ImportError"),
        (CHOICES + "output_type: riddles", "cannot be loaded: ValueError"),
        (CHOICES.replace("{{question}}", "{{"), "cannot be loaded: TemplateSyntaxError"),
        (CHOICES + "unsafe_code: true", "runs code that the model writes"),
    ],
)
def test_task_files_that_cannot_be_used(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "choices.yaml").write_text(content)
    (tmp_path / "choices.py").write_text(DOCUMENTS)
    with pytest.raises(UserError, match=reason):
        load_tasks([str(tmp_path / "choices.yaml")])


def test_limits(data: Path) -> None:
    with pytest.raises(UserError, match="limit is 0; accepted: at least 1"):
        run(data, Mode(), ["dialogsum"], limit=0)
    with pytest.raises(UserError, match="shots is -1; accepted: at least 0"):
        load_tasks(["dialogsum"], data, -1)
    with pytest.raises(UserError, match=r"task dialogsum has 4 examples .* 5 were requested"):
        load_tasks(["dialogsum"], data, 5)
    assert load_tasks(["dialogsum"], data, 0)["tasks"]["dialogsum"].get_config("num_fewshot") == 0


@pytest.mark.slow
def test_names_that_no_task_has() -> None:
    for name in ("wikisqll", "doc_to_text"):  # the second is in the harness's files, and no task
        with pytest.raises(UserError, match=f"task '{name}' is unknown; accepted: dialogsum"):
            load_tasks([name])
