"""The page: one self-contained HTML file, which works offline and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multirate.decoding.text_stream import TextStream
from multirate.lab.inspection.colourings import Colouring, colourings, layers_text
from multirate.lab.inspection.decisions import Kind
from multirate.lab.inspection.inspect import InspectedText, Inspection
from multirate.lab.inspection.text_pass import Said
from multirate.lab.pages import page

TEMPLATE, STYLE, SCRIPT = "page.html.jinja", "page.css", "page.js"


@dataclass(frozen=True)
class Piece:
    """A token as the page shows it. text: what it adds to the answer, which may be nothing in the
    middle of a character. categories: one of each colouring.
    """

    text: str
    categories: list[int]


def render(inspection: Inspection, tokenizer: Any, facts: Mapping[str, str]) -> str:
    """The page. facts: what to know of its making, such as the command, by name. UserError where
    something that draws it is not installed.
    """
    page.check_installed()
    from multirate.lab.inspection.figures import colour, histogram, layer_figures

    sorted_by = colourings(inspection)
    shown = [
        {
            "prompt": tokenizer.decode(text.prompt),
            "pieces": _pieces(text, number, tokenizer, sorted_by),
        }
        for number, text in enumerate(inspection.texts)
    ]
    decode = _cached(tokenizer)
    assert __package__ is not None
    return page.render(
        __package__,
        TEMPLATE,
        STYLE,
        script=page.text_of(__package__, SCRIPT),
        title=f"{facts['model']}, layer by layer",
        inspection=inspection,
        facts=facts,
        lead=_lead(inspection),
        colourings=sorted_by,
        colours=[[colour(one) for one in each.categories] for each in sorted_by],
        histograms=[histogram(inspection, one) for one in sorted_by],
        drawn=layer_figures(inspection),
        texts=shown,
        details=page.script_json([_details(inspection, text, decode) for text in inspection.texts]),
    )


def _lead(inspection: Inspection) -> list[tuple[str, str]]:
    total = inspection.tokens
    layers = sorted(
        layer for text in inspection.texts for layer in text.values.first_agreeing_layers()
    )
    found = [(str(total), "tokens")]
    if inspection.method is not None:
        early = sum(
            one.kind is not Kind.MODEL for text in inspection.texts for one in text.decisions
        )
        how = "stopped early, not verified" if inspection.lossy else "drafted or copied, verified"
        found.append((f"{early / total:.0%}", how))
    if inspection.lossy:
        same = sum(
            token == said.tokens[0]
            for text in inspection.texts
            for token, said in zip(text.tokens, text.values.said, strict=True)
        )
        found.append((f"{same / total:.0%}", "of the tokens match the full model's"))
    if inspection.traced:
        best = inspection.values.intervals[0]
        plain = inspection.values.agrees[best.gate - 1].mean()
        found += [
            (
                f"{best.read_agrees.mean():.0%}",
                f"agreement of the accelerated residual after {layers_text(best.gate)}",
            ),
            (f"{plain:.0%}", f"agreement of the plain residual after {layers_text(best.gate)}"),
        ]
    found.append(
        (
            f"{layers[len(layers) // 2]} of {inspection.layers}",
            "layers until the plain residual agrees (median)",
        )
    )
    return found


def _pieces(
    text: InspectedText, number: int, tokenizer: Any, sorted_by: Sequence[Colouring]
) -> list[Piece]:
    """A character may take several tokens, and the last of them shows it."""
    written: list[str] = []
    stream = TextStream(tokenizer, written.append, skip_special_tokens=False)
    shown = []
    for token in text.tokens:
        stream.push([token])
        shown.append("".join(written))
        written.clear()
    stream.end()
    if shown:
        shown[-1] += "".join(written)
    return [Piece(added, [one.of[number][i] for one in sorted_by]) for i, added in enumerate(shown)]


def _details(
    inspection: Inspection, text: InspectedText, decode: Callable[[int], str]
) -> list[dict[str, Any]]:
    found = []
    layers = text.values.first_agreeing_layers()
    for i, (token, decision) in enumerate(zip(text.tokens, text.decisions, strict=True)):
        readings = [
            _reading(f"accelerated, gate after {layers_text(one.gate)}", one.said[i], decode)
            for one in text.values.intervals
        ]
        full = text.values.said[i]
        readings.append(_reading(f"full model, {layers_text(inspection.layers)}", full, decode))
        decided = {
            Kind.MODEL: "chosen by the full model",
            Kind.DRAFT: f"drafted after {layers_text(decision.layers)}, accepted by verification",
            Kind.COPIED: "copied from the text, accepted by verification",
            Kind.LEFT: f"stopped after {layers_text(decision.layers)}, not verified",
        }[decision.kind]
        facts = [decided, f"plain residual agrees after {layers_text(layers[i])}"]
        if inspection.lossy and token != full.tokens[0]:
            facts.append(f"the full model's token is {decode(full.tokens[0])!r}")
        found.append({"t": decode(token), "id": token, "f": facts, "r": readings})
    return found


def _reading(name: str, said: Said, decode: Callable[[int], str]) -> dict[str, Any]:
    candidates = zip(said.tokens, said.probabilities, strict=True)
    return {
        "n": name,
        "c": [[decode(token), round(probability, 4)] for token, probability in candidates],
        "s": {name: round(value, 4) for name, value in said.scores.items()},
    }


def _cached(tokenizer: Any) -> Callable[[int], str]:
    known: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in known:
            known[token] = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return known[token]

    return decode
