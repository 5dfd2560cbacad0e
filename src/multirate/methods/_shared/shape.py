"""The sizes of a base model that a trained method must fit, read from its transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BaseShape:
    """Sizes of a frozen base model. All counts; ``norm_eps`` and ``rope_theta`` as the model's
    config states them.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    num_experts: int
    sites: frozenset[str] | None = None
    """Adapter sites that every layer has (LayerParts.sites); None: unknown, taken as all."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def whole_tiles(self) -> int:
        """The MLP's width as a multiple of 64, which keeps packed kernels on whole tiles."""
        return max(64, round(self.intermediate_size / 64) * 64)

    def has_sites(self, *names: str) -> bool:
        """Whether adapters can sit at all of ``names`` ("q", "o", "gate", "up", "down", "mlp")."""
        return self.sites is None or self.sites.issuperset(names)

    @staticmethod
    def of(config: Any) -> BaseShape:
        """Sizes from a ``PretrainedConfig`` (its text part when it is multimodal)."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config

        def first(*names: str, default: Any = None) -> Any:
            for name in names:
                value = getattr(text, name, None)
                if value is not None:
                    return value
            return default

        hidden, heads = first("hidden_size"), first("num_attention_heads")
        rope = first("rope_parameters", default={}) or {}
        if (
            "full_attention" in rope
        ):  # one set per layer type (Gemma 3): the block attends to everything
            rope = rope["full_attention"]
        return BaseShape(
            architecture=(getattr(config, "architectures", None) or [type(config).__name__])[0],
            num_layers=first("num_hidden_layers"),
            hidden_size=hidden,
            vocab_size=first("vocab_size"),
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads", default=heads),
            head_dim=first("head_dim", default=hidden // heads),
            intermediate_size=first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
            norm_eps=float(
                first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-5)
            ),
            rope_theta=float(rope.get("rope_theta") or first("rope_theta", default=10000.0)),
            num_experts=first("num_experts", "num_local_experts", default=0),
        )
