"""A text decoded as the method decodes it, and where each of its tokens was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder


class Kind(Enum):
    MODEL = "model"
    """All layers: the prompt's pass, a plain step, or the token that follows a verified draft."""
    DRAFT = "draft"
    """Drafted after some layers, and accepted by the verification."""
    COPIED = "copied"
    """Copied from the text, and accepted by the verification."""
    LEFT = "left"
    """Stopped early and was not verified (dynamic mode)."""


@dataclass(frozen=True)
class Decision:
    """How a token was decided, after how many layers (0: without the model)."""

    kind: Kind
    layers: int


def decode(
    decoder: Decoder,
    step: Step,
    prompt: Sequence[int],
    stop: StopSettings,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[int], list[Decision]]:
    """The prompt's greedy answer, and a decision for each of its tokens. progress(tokens so far).

    The method drafts whenever it can, even if that is slower on this machine.
    Raises UserError for a prompt that cannot be used.
    """
    layers = decoder.info.num_layers
    decisions = [Decision(Kind.MODEL, layers)]  # the first token is the prompt's own pass
    exits: Counter[int] = Counter()

    def watch(_: int, draft: Draft, nodes: Sequence[int]) -> None:
        assert isinstance(step, SpeculativeStep)
        for node in nodes:
            if node == 0:
                decisions.append(Decision(Kind.MODEL, layers))
            elif node in draft.unverified:
                decisions.append(Decision(Kind.LEFT, step.traits.start))
            elif node in draft.copied:
                decisions.append(Decision(Kind.COPIED, 0))
            else:
                decisions.append(Decision(Kind.DRAFT, step.traits.start))

    def after_step(session: Session, _: Step) -> None:
        if not isinstance(step, SpeculativeStep):
            now = Counter(session.stats.exits)
            for depth in (now - exits).elements():
                kind = Kind.MODEL if depth == layers else Kind.LEFT
                decisions.append(Decision(kind, depth))
            exits.update(now - exits)
            missing = session.stats.tokens - len(decisions)
            decisions.extend([Decision(Kind.MODEL, layers)] * missing)
        if progress is not None:
            progress(session.stats.tokens)

    step.adapt(decoder, on=False)
    if isinstance(step, SpeculativeStep):
        step.watch = watch
    try:
        output = generate(decoder, step, [prompt], stop=stop, after_step=after_step)
    finally:
        if isinstance(step, SpeculativeStep):
            step.watch = None
    tokens = output.sequences[0]
    assert len(decisions) == len(tokens) or not tokens, "a token was not watched"
    return tokens, decisions[: len(tokens)]
