"""The tasks' metrics, each defined by its docstring. Scores are shares of 1, but BLEU's, which has
sacrebleu's scale of 0 to 100.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from multirate.lab.evaluation import slots
from multirate.lab.evaluation.sql_sandbox import Table, run_query

_TOKEN = re.compile(
    r"""'(?P<single>(?:[^']|'')*)'|"(?P<double>(?:[^"]|"")*)"|(?P<number>-?\d+(?:\.\d+)?(?!\w))"""
    r"""|(?P<word>\w+)|(?P<sign><=|>=|<>|!=|\S)"""
)
_CONNECTED = frozenset(("or", "not", "between", "group", "order", "limit", "having", "("))
"""After WHERE, what makes the order of conditions matter, or what is no list of conditions."""


def exact_match(predicted: str, gold: str) -> float:
    """1.0 where the two SQL texts are the same query in the same words, else 0.0.

    The same: equal tokens, where blanks, a final `;`, the case of letters, the kind of quotes and
    the writing of a number (5, 5.0, '5') do not count, and neither does the order of conditions
    that AND joins after WHERE. A quoted text is a value, and differs from a name.
    """
    return float(_normal_form(predicted) == _normal_form(gold))


def _normal_form(query: str) -> list[list[tuple[str, str]]]:
    """The part up to WHERE, then the conditions, sorted; or one part, where they are not a plain
    list.
    """
    tokens = [_token(match) for match in _TOKEN.finditer(query)]
    while tokens and tokens[-1] == ("sign", ";"):
        tokens.pop()
    where = ("word", "where")
    if where not in tokens:
        return [tokens]
    at = tokens.index(where)
    head, rest = tokens[:at], tokens[at + 1 :]
    if any(kind != "value" and text in _CONNECTED for kind, text in rest):
        return [tokens]
    conditions: list[list[tuple[str, str]]] = [[]]
    for token in rest:
        if token == ("word", "and"):
            conditions.append([])
        else:
            conditions[-1].append(token)
    return [head, *sorted(conditions)]


def _token(match: re.Match[str]) -> tuple[str, str]:
    if match["word"] is not None:
        return "word", match["word"].lower()
    if match["sign"] is not None:
        return "sign", match["sign"]
    if match["number"] is not None:
        return "value", _value(match["number"])
    if match["single"] is not None:
        return "value", _value(match["single"].replace("''", "'"))
    return "value", _value(match["double"].replace('""', '"'))


def _value(text: str) -> str:
    try:
        return repr(float(text))
    except ValueError:
        return text.strip().lower()


def execution_match(predicted: str, gold: str, table: Table) -> float:
    """1.0 where both queries, run on the table by sqlite3, give the same rows, else 0.0.

    The same rows: as multisets, for no query of the task orders its rows; numbers compare to nine
    digits, text without regard to case. A prediction that does not run (see
    sql_sandbox.run_query) matches nothing, whatever the other gives. ValueError for a gold query
    that does not run.
    """
    expected = run_query(gold, table)
    if expected is None:
        raise ValueError(f"the reference query does not run: {gold}")
    found = run_query(predicted, table)
    return float(found is not None and _rows(found) == _rows(expected))


def _rows(rows: Sequence[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(_cell(cell) for cell in row) for row in rows)


def _cell(cell: Any) -> Any:
    if isinstance(cell, (int, float)):
        return f"{cell:.9g}"
    return ("text", cell.lower()) if isinstance(cell, str) else cell


def corpus_bleu(pairs: Sequence[tuple[str, Sequence[str]]]) -> float:
    """BLEU of all answers together, 0 to 100, as sacrebleu computes it by default: 4-grams,
    tokenizer 13a, case counts, exponential smoothing; each answer against all of its references.

    pairs: (answer, its references), whose number may differ.
    """
    import sacrebleu

    most = max(len(references) for _, references in pairs)
    streams: list[Any] = [
        [references[i] if i < len(references) else None for _, references in pairs]
        for i in range(most)
    ]
    answers = [answer for answer, _ in pairs]
    return float(sacrebleu.corpus_bleu(answers, streams).score)


def slot_errors(answer: str, meaning: Mapping[str, str]) -> tuple[int, int]:
    """(errors, slots) of a text that is to state the slots of `meaning`, by the patterns of
    slots.py.

    An error is a slot of the meaning whose value the text does not state (left out, or with
    another value), or a slot that the meaning does not have and the text states all the same.
    `eatType` "restaurant" is no error where the meaning has no eatType: people call any of these
    places a restaurant.
    """
    found = slots.stated(answer, meaning)
    missing = sum(value not in found[slot] for slot, value in meaning.items() if slot in found)
    added = sum(
        bool(values - ({"restaurant"} if slot == "eatType" else set()))
        for slot, values in found.items()
        if slot not in meaning
    )
    return missing + added, len(meaning)


def slot_error_rate(counts: Sequence[tuple[int, int]]) -> float:
    """All answers' errors / all answers' slots, from `slot_errors` of each: 0 is best, and it may
    exceed 1.
    """
    errors = sum(one for one, _ in counts)
    return errors / sum(slots for _, slots in counts)


ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(answer: str, references: Sequence[str]) -> dict[str, float]:
    """{"rouge1", "rouge2", "rougeL"}: F1 of an answer as rouge-score computes it with Porter's
    stemmer, averaged over the references (three people wrote one each; none is the best one). A
    task's score is the mean over its answers.
    """
    scorer = _rouge_scorer()
    each = [scorer.score(reference, answer) for reference in references]
    return {name: sum(one[name].fmeasure for one in each) / len(each) for name in ROUGE}


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)
