"""Ways of sorting an answer's tokens by depth. Each one is a histogram and colours the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from multirate.lab.inspection.decisions import Decision, Kind
from multirate.lab.inspection.inspect import Inspection

FULL = "all layers"
FEW = 8
"""As many categories are all named; of more, those that occur, and only some on the axis."""


@dataclass(frozen=True)
class Category:
    """label: of legend and histogram; tick: the short one of the axis. depth: the share of the
    layers that ran, which gives the colour; None: no layer ran at all.
    """

    label: str
    tick: str
    depth: float | None


@dataclass(frozen=True)
class Colouring:
    """title, meaning: for the page. axis: what the categories are. of: for each text the category
    of each token, an index into categories.
    """

    title: str
    meaning: str
    axis: str
    categories: list[Category]
    of: list[list[int]]

    def counts(self) -> list[int]:
        found = Counter(index for text in self.of for index in text)
        return [found[index] for index in range(len(self.categories))]

    def legend(self) -> list[tuple[int, Category, int]]:
        """Index, category and tokens of those to explain: of many, the ones that occur."""
        few = len(self.categories) <= FEW
        return [
            (index, category, count)
            for index, (category, count) in enumerate(
                zip(self.categories, self.counts(), strict=True)
            )
            if count or few
        ]


def colourings(inspection: Inspection) -> list[Colouring]:
    """The one that says most comes first."""
    found = [_first_layers(inspection)]
    if inspection.traced:
        found.insert(0, _first_gates(inspection))
    if inspection.method is not None:
        decided = _decided(inspection)
        several_gates = len(inspection.gates) > 1 and not inspection.lossy
        found.insert(1 if several_gates else 0, decided)
    return found


def _decided(inspection: Inspection) -> Colouring:
    layers = inspection.layers
    seen = {decision for text in inspection.texts for decision in text.decisions}
    order = sorted(seen, key=lambda one: (one.layers, one.kind.value))
    meaning = (
        "Where each token was decided when the answer was generated. The layers above did not "
        "verify tokens that stopped early."
        if inspection.lossy
        else "Where each token was decided when the answer was generated: drafted and accepted by "
        "verification, or chosen by the full model. The text is the model's own either way."
    )
    return Colouring(
        "Layers used by each token" if inspection.lossy else "Source of each token",
        meaning,
        "decided by",
        [_category(decision, layers) for decision in order],
        [[order.index(one) for one in text.decisions] for text in inspection.texts],
    )


def _category(decision: Decision, layers: int) -> Category:
    after = layers_text(decision.layers)
    words: dict[Kind, tuple[str, str]] = {
        Kind.MODEL: ("full model", "full model"),
        Kind.COPIED: ("copied from the text, verified", "copied"),
        Kind.DRAFT: (f"drafted after {after}, verified", f"draft at {decision.layers}"),
        Kind.LEFT: (f"stopped after {after}, not verified", f"stopped at {decision.layers}"),
    }
    label, tick = words[decision.kind]
    depth = None if decision.kind is Kind.COPIED else decision.layers / layers
    return Category(label, tick, depth)


def _first_gates(inspection: Inspection) -> Colouring:
    layers, gates = inspection.layers, inspection.gates
    categories = [
        Category(f"gate after {layers_text(gate)}", f"gate {gate}", gate / layers) for gate in gates
    ]
    categories.append(Category("at no gate", "no gate", 1.0))
    index = {gate: i for i, gate in enumerate(gates)}
    return Colouring(
        "First gate that agrees",
        "The first gate where the accelerated residual's top token is the full model's. A token "
        "could stop there without changing the text.",
        "first gate that agrees",
        categories,
        [
            [
                len(gates) if gate is None else index[gate]
                for gate in text.values.first_agreeing_gates()
            ]
            for text in inspection.texts
        ],
    )


def _first_layers(inspection: Inspection) -> Colouring:
    layers = inspection.layers
    name: Callable[[int], str] = lambda layer: FULL if layer == layers else layers_text(layer)  # noqa: E731
    return Colouring(
        "First layer that agrees",
        "The first layer after which the LM head, applied to the plain residual, gives the full "
        "model's token. It shows what early exit could save without an accelerator.",
        "first layer that agrees",
        [Category(f"after {name(i)}", str(i), i / layers) for i in range(1, layers + 1)],
        [[layer - 1 for layer in text.values.first_agreeing_layers()] for text in inspection.texts],
    )


def layers_text(count: int) -> str:
    """ "1 layer", "7 layers"."""
    return f"{count} layer" if count == 1 else f"{count} layers"
