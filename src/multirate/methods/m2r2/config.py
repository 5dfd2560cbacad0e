"""M2R2's configuration and its two presets: "m2r2", what the paper describes, and "m2r2-carry",
with our additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from multirate.errors import UserError
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape

PRESETS = ("m2r2", "m2r2-carry")
MOST_TAPS = 4  # the kernel's MAX_TAPS


def default_paper_gates(num_layers: int) -> tuple[int, ...]:
    """Three equally spaced gates, after L/4, L/2 and 3L/4 layers. Equal spacing is the paper's; the
    number three is ours.
    """
    return tuple(
        sorted({max(1, min(num_layers - 1, round(num_layers * j / 4))) for j in (1, 2, 3)})
    )


@dataclass(frozen=True)
class M2R2Config(MethodConfig):
    """Everything that decides the shape of an accelerated residual stream. Paper: arXiv 2502.02040;
    [ours] marks our choices.
    """

    METHOD: ClassVar[str] = "m2r2"
    FROM_BASE: ClassVar[dict[str, str]] = {
        "gates": "m2r2: L/4, L/2 and 3L/4 (their number is ours); m2r2-carry: 1"
    }

    gates: tuple[int, ...]
    """Exit gates, in increasing order: gate G reads the stream after G layers. Drafts use the first
    one. [the paper]
    """
    rank: int = 64
    """Rank of every adapter. [ours]"""
    attention_adapter: bool = True
    """Low-rank updates of the q and o projections. [ours]"""
    mlp_adapter: Literal["parallel", "lora", "none"] = "parallel"
    """parallel: one adapter beside the whole MLP [ours, closest to the paper]. lora: adapters on
    gate, up and down [ours].
    """
    carry: bool = False
    """Adds a projection of the previous token's final residual to the stream's start. [ours]"""
    taps: tuple[int, ...] = ()
    """Inner layers whose input residuals are added to the carried residual of a verified token,
    through one matrix that starts at zero. Needs carry. [ours, as EAGLE-3]
    """
    fuse: bool = False
    """Mixes the stream with the carried residual (if there is one) at each gate, through one matrix
    that training initialises by least squares. [ours]
    """
    block: bool = False
    """One transformer block at each gate, with its own keys and values. [ours]"""
    reinitialise: bool = True
    """Restarts the stream from the slow residual at every gate. [the paper]"""
    arla_dim: int = 64
    """Width of ARLA's latents; 0: no ARLA. Latent attention over gates is the paper's; the width is
    ours.
    """
    unroll_steps: int = 1
    """Training steps through the stream's own drafts, from 1 to 16. More than 1 needs carry. [ours,
    as HASS and EAGLE-3]
    """
    feature_weight: float = 0.0
    """Loss weight, beside the KL divergence, of the SmoothL1 distance between the normed stream and
    the normed final residual h_L. [ours; EAGLE's loss, which uses 10]
    """
    noise: float = 0.0
    """Training noise on the carried residuals: uniform, of this width times 512 / tokens of the
    sample. [ours, as EAGLE, which uses 0.2]
    """
    draft_vocab: int | None = None
    """Size of the reduced draft head, which covers the most frequent tokens of the training data.
    Null: the full head. [ours]
    """

    def check(self) -> None:
        g = self.gates
        self.require(
            len(g) > 0 and g[0] >= 1 and all(a < b for a, b in pairwise(g)),
            "gates",
            "increasing layer counts of at least 1",
        )
        self.require_count("rank")
        self.require_count("arla_dim", least=0)
        self.require(1 <= self.unroll_steps <= 16, "unroll_steps", "1 to 16")
        self.require(
            self.unroll_steps == 1 or self.carry,
            "unroll_steps",
            "1 when carry is false (without carry every draft step is the first)",
        )
        self.require(0 <= self.feature_weight <= 1000, "feature_weight", "0 to 1000")
        self.require(0 <= self.noise <= 10, "noise", "0 to 10")
        above = all(a < b for a, b in pairwise((g[-1], *self.taps)))
        self.require(
            len(self.taps) <= MOST_TAPS and above and (self.carry or not self.taps),
            "taps",
            f"at most {MOST_TAPS} increasing layers above the last gate; none without carry",
        )
        self.require_draft_vocab()

    def check_base(self, base: BaseShape) -> None:
        """Raises UserError for a config that does not fit ``base``."""
        self.require(
            self.gates[-1] < base.num_layers,
            "gates",
            f"layer counts below the base model's {base.num_layers} layers",
        )
        self.require(
            all(tap < base.num_layers for tap in self.taps),
            "taps",
            f"layers below the base model's {base.num_layers}",
        )
        self.require_draft_vocab(base.vocab_size)
        if base.is_moe:
            self.require(
                self.mlp_adapter != "lora",
                "mlp_adapter",
                "'parallel' or 'none' for a mixture of experts",
            )

    @staticmethod
    def for_base(base: BaseShape, preset: str = "m2r2", **options: Any) -> M2R2Config:
        """The preset's config for a base model; ``options`` replace its fields. Raises UserError
        for an unknown preset or options that cannot be used.
        """
        if preset not in PRESETS:
            raise UserError(f"M2R2 preset '{preset}' is unknown; accepted: {' or '.join(PRESETS)}.")
        values: dict[str, Any] = {}
        gated = base.has_sites("gate", "up", "down") and not base.is_moe
        if not base.has_sites("q", "o"):
            values |= {"attention_adapter": False}
        if preset == "m2r2":
            values |= {"gates": default_paper_gates(base.num_layers)}
        else:
            values |= {
                "gates": (1,),
                "mlp_adapter": "lora" if gated else "parallel",
                "carry": True,
                "fuse": True,
                "block": True,
                "unroll_steps": 3,
            }
        config = M2R2Config.from_json(values | options)
        config.check_base(base)
        return config
