"""The model families that the kernel runs: the names of their layers' modules, and what these do
beyond their weights.

A layer of any of them is

    x += norm(attention(norm(x)))        x += norm(down(activation(gate(norm(x))) · up(norm(x))))

Some norms may be absent, and queries and keys may be normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multirate.runtime.hf.inspect import ropes
from multirate.runtime.hf.parts import LayerParts, ModelParts
from multirate.runtime.native import abi
from multirate.runtime.quantised import Weight, dense, split, weight_of

_ACTIVATIONS = {
    "SiLU": abi.constant("ACTIVATION_SILU"),
    "SiLUActivation": abi.constant("ACTIVATION_SILU"),
    "GELUTanh": abi.constant("ACTIVATION_GELU"),
}
ROPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Rotary types whose angles do not change as a text grows (longrope: up to the positions of
ModelParts.max_positions).
"""


@dataclass(frozen=True)
class Family:
    """One family."""

    home: str
    """The folder of transformers that defines it."""
    norm_attention: str | None = "input_layernorm"
    """The name of the norm before attention; None: there is none. So with the next three."""
    norm_attention_out: str | None = None
    """Of what attention adds."""
    norm_mlp: str | None = "post_attention_layernorm"
    """Before the MLP."""
    norm_mlp_out: str | None = None
    """Of what the MLP adds."""
    norm_queries: str = "q_norm"
    norm_keys: str = "k_norm"
    norms_after_rotary: bool = False
    """Queries and keys are normed after rotation."""
    added_one: bool = False
    """A norm's weight w stands for 1 + w."""
    fused_attention: bool = False
    """Queries, keys and values are one linear layer."""
    fused_mlp: bool = False
    """Gates and ups are one linear layer."""
    interleaved_rotary: bool = False
    """Dimensions 2i and 2i + 1 of a head are rotated against each other, not the two halves."""
    windows_alone_rotate: bool = False
    """If some layers have a window, those without one do not rotate queries and keys."""
    scaled_queries: bool = False
    """Queries are multiplied by a number that grows with their position."""
    alpha_rotary: bool = False
    """A rotary type "dynamic" with an `alpha` has angles that do not change."""
    extra: tuple[str, ...] = ()
    """Modules of a layer that do nothing at inference."""

    @property
    def module(self) -> str:
        """The module that its classes are defined in."""
        return f"transformers.models.{self.home}.modeling_{self.home}"

    @property
    def linears(self) -> Mapping[str, tuple[str, ...]]:
        """The linear layers of a layer's attention and MLP."""
        apart = ("q_proj", "k_proj", "v_proj")
        return {
            "self_attn": (*(("qkv_proj",) if self.fused_attention else apart), "o_proj"),
            "mlp": (
                *(("gate_up_proj",) if self.fused_mlp else ("gate_proj", "up_proj")),
                "down_proj",
            ),
        }

    def norms(self, layer: LayerParts) -> dict[str, nn.Module]:
        """A layer's norms, by the fields of the kernel's Layer."""
        names = {
            "norm_attention": self.norm_attention,
            "norm_attention_out": self.norm_attention_out,
            "norm_mlp": self.norm_mlp,
            "norm_mlp_out": self.norm_mlp_out,
        }
        found = {field: getattr(layer.module, name) for field, name in names.items() if name}
        for field, name in (("q_norm", self.norm_queries), ("k_norm", self.norm_keys)):
            if hasattr(layer.attention, name):
                found[field] = getattr(layer.attention, name)
        return found

    def rotates(self, layer: LayerParts) -> bool:
        """Whether a layer's queries and keys are rotated."""
        attention: Any = layer.attention
        if self.windows_alone_rotate:
            return layer.window is not None or attention.sliding_window is None
        return bool(getattr(attention, "use_rope", True))

    def changes_with_length(self, rope: Mapping[str, Any]) -> bool:
        """Whether the angles of a configuration's rotary embedding change as a text grows."""
        kind = rope.get("rope_type", "default")
        if self.alpha_rotary and kind == "dynamic" and rope.get("alpha"):
            return False
        return kind not in ROPES

    def query_scale(self, config: Any, positions: Tensor) -> Tensor | None:
        """What queries are multiplied by at each of the positions [n], fp32 [n], as the model
        rounds it; None: nothing. (Llama 4's: longer texts need sharper attention.)
        """
        if not self.scaled_queries:
            return None
        (rope,) = ropes(config)
        steps = torch.floor(positions.float() / rope["original_max_position_embeddings"])
        scale = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps)
        return scale.to(torch.bfloat16).float()

    def rotary_order(self, dim: int, rotated: int) -> Tensor | None:
        """The dimensions of a head of `dim`, the first `rotated` of which are rotated, in the order
        in which the kernel has them, int64 [dim]; None: as they are.
        """
        if not self.interleaved_rotary:
            return None
        pairs = torch.arange(rotated, device="cpu").unflatten(0, (-1, 2))
        return torch.cat([pairs.T.flatten(), torch.arange(rotated, dim, device="cpu")])

    def norm_weight(self, norm: nn.Module) -> Tensor:
        """What a norm multiplies by, fp32 [n]."""
        weight: Tensor = norm.weight.detach().float()  # type: ignore[operator]
        return weight + 1 if self.added_one else weight

    def queries_keys_values(
        self, layer: LayerParts, deltas: Mapping[str, Tensor] | None = None
    ) -> dict[str, tuple[Weight, Tensor | None]]:
        """The weights of a layer's queries, keys and values, [outputs, d] of each, and their
        biases, or None. deltas: site (q, o, gate, up, down) → what is added to its weight.
        """
        attention: Any = layer.attention
        if self.fused_attention:
            queries = layer.sites["q"].out_features
            fused = weight_of(attention.qkv_proj)
            others = (len(fused) - queries) // 2
            weights = dict(zip("qkv", split(fused, [queries, others, others]), strict=True))
            return {site: (_changed(site, w, deltas), None) for site, w in weights.items()}
        linears = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
        return {
            site: (
                _changed(site, weight_of(one), deltas),
                None if one.bias is None else one.bias.detach(),
            )
            for site, one in linears.items()
        }

    def gate_up_down(
        self, layer: LayerParts, deltas: Mapping[str, Tensor] | None = None
    ) -> tuple[Weight, Weight, Weight]:
        """The weights of a layer's MLP; deltas: as above."""
        mlp: Any = layer.mlp
        if self.fused_mlp:
            fused = weight_of(mlp.gate_up_proj)
            gate, up = split(fused, [len(fused) // 2] * 2)
        else:
            gate, up = weight_of(mlp.gate_proj), weight_of(mlp.up_proj)
        down = weight_of(mlp.down_proj)
        gate, up, down = (
            _changed(site, weight, deltas)
            for site, weight in (("gate", gate), ("up", up), ("down", down))
        )
        return gate, up, down

    def output(
        self, layer: LayerParts, deltas: Mapping[str, Tensor] | None = None
    ) -> tuple[Weight, Tensor | None]:
        """The weight of attention's output projection and its bias, or None; deltas: as above."""
        linear: Any = layer.linears["o"]
        return _changed("o", weight_of(linear), deltas), linear.bias


_POST_NORMS: dict[str, Any] = {
    "norm_attention": None,
    "norm_attention_out": "post_attention_layernorm",
    "norm_mlp": None,
    "norm_mlp_out": "post_feedforward_layernorm",
}
_AS_LLAMA = ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite")
FAMILIES = {
    **{name: Family(name) for name in (*_AS_LLAMA, "cwm", "seed_oss")},
    "internlm3": Family("llama"),
    "ministral3": Family("ministral3", scaled_queries=True),
    "gemma": Family("gemma", added_one=True),
    "gemma3_text": Family(
        "gemma3",
        norm_attention_out="post_attention_layernorm",
        norm_mlp="pre_feedforward_layernorm",
        norm_mlp_out="post_feedforward_layernorm",
        added_one=True,
    ),
    "olmo2": Family("olmo2", **_POST_NORMS),
    "olmo3": Family("olmo3", **_POST_NORMS),
    "exaone4": Family("exaone4", windows_alone_rotate=True, **_POST_NORMS),
    "phi3": Family(
        "phi3",
        fused_attention=True,
        fused_mlp=True,
        extra=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
    "glm": Family("glm", fused_mlp=True, interleaved_rotary=True),
    "glm4": Family(
        "glm4",
        norm_attention_out="post_self_attn_layernorm",
        norm_mlp_out="post_mlp_layernorm",
        fused_mlp=True,
        interleaved_rotary=True,
    ),
    "ernie4_5": Family("ernie4_5", interleaved_rotary=True),
    "helium": Family("helium", interleaved_rotary=True),
    "hunyuan_v1_dense": Family(
        "hunyuan_v1_dense",
        norm_queries="query_layernorm",
        norm_keys="key_layernorm",
        norms_after_rotary=True,
        alpha_rotary=True,
    ),
}
"""By transformers' name of the model type."""
MIXTURES = {name: Family(name) for name in ("mixtral", "qwen3_moe", "olmoe", "mellum")}


def activation_function(layer: LayerParts) -> nn.Module | None:
    """What a layer's gates pass; None: it has no gates of its own."""
    mlp: Any = layer.mlp
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def activation(layer: LayerParts) -> int | None:
    """The same as the kernel calls it; None: it has no such."""
    found: int | None = _ACTIVATIONS.get(type(activation_function(layer)).__name__)
    return found


def epsilon(norm: nn.Module) -> float:
    """What a norm adds to the mean square."""
    found: Any = getattr(norm, "variance_epsilon", None)
    return float(found if found is not None else norm.eps)  # type: ignore[arg-type]


def attention_scale(config: Any) -> float:
    """By what attention scores are multiplied."""
    multiplier: Any = getattr(config, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    scalar: Any = getattr(config, "query_pre_attn_scalar", None)
    return float(head_dim(config) if scalar is None else scalar) ** -0.5


def residual_scale(config: Any) -> float:
    """By what attention's and the MLP's outputs are multiplied before they are added."""
    multiplier: Any = getattr(config, "residual_multiplier", None)
    return 1.0 if multiplier is None else float(multiplier)


def head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def embed_scale(parts: ModelParts) -> float:
    """By what the embedding's rows are multiplied, as the model rounds it."""
    own = getattr(parts.embed_tokens, "embed_scale", None)
    return parts.embed_scale * (1.0 if own is None else float(own.to(parts.dtype)))


def _changed(site: str, weight: Weight, deltas: Mapping[str, Tensor] | None) -> Weight:
    if not deltas or site not in deltas:
        return weight
    return dense(weight, torch.float32) + deltas[site].float()
