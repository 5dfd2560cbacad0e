"""A module whose result for a token depends on where the token stands in a call, or on what stands
beside it, is refused: drafts, batches and prompts in pieces would change the text.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from multirate.errors import UserError
from multirate.integration import custom_generate
from multirate.runtime.hf.decoder import HFDecoder
from runtime.tiny_models import tiny_model


class Around(nn.Module):
    """A wrapper that changes what `inner` gives by `change(its output)`."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


def last_place(y: Tensor) -> Tensor:
    y[:, -1] = y[:, -1] * 1.5
    return y


def single_rows(y: Tensor) -> Tensor:
    return y * 1.5 if y.shape[1] == 1 else y


def long_passes(y: Tensor) -> Tensor:
    return y * 1.5 if y.shape[1] > 16 else y


def beyond_ten(y: Tensor) -> Tensor:
    """As an adapter whose offset counts from the end of a call."""
    y[:, -10:] = y[:, -10:] * 1.5
    return y


def scaled_by_all(y: Tensor) -> Tensor:
    """As a layer that quantises its activations with one scale for all."""
    scale = y.abs().max() / 127
    return (y / scale).round() * scale


def first_of_the_batch(y: Tensor) -> Tensor:
    y[1:] = 0
    return y


def row_wise(y: Tensor) -> Tensor:
    return y * (1 + y.abs().amax(-1, keepdim=True))


def wrapped(change: Callable[[Tensor], Tensor]) -> Any:
    model = copy.deepcopy(tiny_model("llama"))
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Around(mlp.down_proj, change)
    return model


CHANGES = [last_place, single_rows, long_passes, beyond_ten, scaled_by_all, first_of_the_batch]


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_is_not_row_wise_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = wrapped(change)
    with pytest.raises(UserError, match="depends on other tokens in the pass"):
        HFDecoder(model)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(ids, **options)
    speed = custom_generate(method="prompt_lookup", speculate="always")
    with pytest.warns(UserWarning, match="own generate: .*other tokens in the pass"):
        assert model.generate(ids, **options, custom_generate=speed).equal(expected)


def test_a_row_wise_wrapper_is_run() -> None:
    HFDecoder(wrapped(row_wise))


def test_dynamically_quantised_layers_are_refused() -> None:
    """torch chooses one scale for all rows of a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(tiny_model("llama")), {nn.Linear}
        )
    with pytest.raises(UserError, match="cannot run"):
        HFDecoder(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_that_ignores_masks_is_refused(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some replacements of torch's attention do: causal or not is all that they know."""
    from torch.nn import functional

    own = functional.scaled_dot_product_attention

    def without_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **more: Any) -> Tensor:
        more["is_causal"] = q.shape[2] > 1 and q.shape[2] == k.shape[2]
        return own(q, k, v, **more)

    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation(attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", without_mask)
    if attention == "eager":
        HFDecoder(model)  # it never calls that function
        return
    with pytest.raises(UserError, match="cannot run"):
        HFDecoder(model)


def test_local_attention_of_another_kind_is_refused_however_wide() -> None:
    """Its own window is wider than the few tokens that are compared."""
    config = GPTNeoConfig(
        vocab_size=89,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=64,
    )
    with pytest.raises(UserError, match="its attention has a window_size"):
        HFDecoder(GPTNeoForCausalLM(config).eval())


def test_a_layer_that_is_run_twice_is_refused() -> None:
    """Both runs would add to the same keys and values."""
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UserError, match=r"keys and values at the cache indices \[0, 0, 2\]"):
        HFDecoder(model)
