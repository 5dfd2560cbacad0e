"""Tasks as suites of a bench: the same questions and scores as `multirate eval --shots 0`."""

from __future__ import annotations

from pathlib import Path

import pytest

from multirate.engine import attach
from multirate.errors import UserError
from multirate.lab.bench.prompts import build_prompts

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'multirate[eval]'")

from multirate.lab.evaluation.modes import Mode, decoding
from multirate.lab.evaluation.run import evaluate
from multirate.lab.evaluation.task_files import load_tasks, local_tasks
from multirate.lab.evaluation.task_suite import METRICS, is_task, load_task_suite

from . import tiny_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data.write(tmp_path_factory.mktemp("data"))


def test_questions_and_scores_are_those_of_an_evaluation(data: Path) -> None:
    engine = attach("tiny")
    assert set(METRICS) == set(local_tasks())
    for name in local_tasks():
        suite = load_task_suite(name, data)
        count = suite.task.get_config("generation_kwargs")["max_gen_toks"]
        stop = engine.stopping(count, ["\n"])
        prompts = build_prompts(
            suite.questions,
            engine.tokenizer,
            lambda ids: [],
            max_positions=engine.decoder.info.max_positions,
            max_new_tokens=count,
        ).prompts
        answers = {
            prompt.id: engine.tokenizer.decode(
                engine.generate([prompt.tokens], stop=stop).sequences[0], skip_special_tokens=True
            )
            for prompt in prompts
        }
        theirs = evaluate(engine, decoding(engine, Mode()), load_tasks([name], data, shots=0))
        assert len(answers) == theirs.scores[0].samples
        said = [one["said"][0] for one in theirs.answers[name]]
        assert [text.split("\n")[0] for text in answers.values()] == said
        assert any(said)
        assert suite.scores(answers) == {s.metric: s.value for s in theirs.scores}


def test_only_the_first_line_of_an_answer_counts(data: Path) -> None:
    suite = load_task_suite("wikisql", data, limit=1)
    (name,) = suite.documents
    gold = suite.documents[name]["sql"]
    assert suite.scores({name: f" {gold}\nand so on"})["execution_match"] == 1
    assert suite.scores({name: f"what? {gold}"})["execution_match"] == 0


def test_no_question_is_both_asked_and_trained_on(data: Path) -> None:
    for name, task in load_tasks(local_tasks(), data)["tasks"].items():
        test, training = (
            {task.doc_to_text(document) for document in documents}
            for documents in (task.test_docs(), task.training_docs())
        )
        assert test and training and not test & training, name


def test_what_is_no_task_or_no_limit(data: Path) -> None:
    assert is_task("wikisql") and not is_task("mt_bench")
    with pytest.raises(UserError, match="limit of prompts is 0"):
        load_task_suite("wikisql", data, limit=0)
