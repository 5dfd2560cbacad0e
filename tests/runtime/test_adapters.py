"""Adapters through hooks: which rows change, by how much, with gradients; and the parts that
training uses.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from traces import trace

from multirate.errors import UserError
from multirate.runtime.hf.adapter_hooks import apply_adapter
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.layer_caches import SharedKV
from multirate.runtime.hf.parts import LayerParts
from multirate.runtime.rows import Rows

from .tiny_models import MOE, NAMES, prompts, tiny_model

DENSE = [n for n in NAMES if n not in MOE]
CLOSE = {"atol": 5e-5, "rtol": 1e-5}


class LinearAdapter(nn.Module):
    """A plain linear delta at each site: exactly a change of that weight, so a changed model is the
    reference.
    """

    def __init__(self, layer: LayerParts, sites: set[str], scale: float = 0.1) -> None:
        super().__init__()
        self.sites = nn.ModuleDict(
            {
                n: nn.Linear(s.in_features, s.out_features, bias=False)
                for n, s in layer.sites.items()
                if n in sites
            }
        )
        for linear in self.sites.values():
            nn.init.normal_(linear.weight, std=scale)

    def deltas(self) -> Mapping[str, nn.Module]:
        return dict(self.sites.items())


def merged_layer_output(
    decoder: HFDecoder, index: int, adapter: LinearAdapter, x: torch.Tensor
) -> torch.Tensor:
    """Layer `index` with the adapter's weights added into the model's, on rows of one causal
    sequence.
    """
    layer = decoder.parts.layers[index]
    changes = []
    for name, delta in adapter.deltas().items():
        site = layer.sites[name]
        weight = site.module.weight
        change = torch.zeros_like(weight)
        if hasattr(site.module, "in_features"):
            change[site.start : site.stop] = delta.weight
        else:  # Conv1D: [in, out]
            change[:, site.start : site.stop] = delta.weight.T
        changes.append((weight, weight.detach().clone(), change))
    try:
        with torch.no_grad():
            for weight, _, change in changes:
                weight.add_(change)
        return decoder.layers(
            x, Rows.causal(0, 0, len(x)), index, index + 1, decoder.new_cache(1, 32)
        )
    finally:
        with torch.no_grad():
            for weight, old, _ in changes:
                weight.copy_(old)


@pytest.mark.parametrize("name", NAMES)
def test_deltas_equal_changed_weights_and_touch_accelerated_rows_only(name: str) -> None:
    """q and o (and gate, up, down where they exist) against a model whose weights were changed by
    the same amounts.

    The changed model's K/V stay the slow ones (only q, o and the MLP change), so all its rows are
    accelerated rows.
    """
    torch.manual_seed(1)
    decoder, (ids,) = HFDecoder(tiny_model(name)), prompts(11, seed=3)
    slow, fast = Rows.causal(0, 0, 11), Rows.accelerated_at(0, np.arange(11))
    x = decoder.embed(ids, slow.pos)
    for index in range(decoder.info.num_layers):
        layer = decoder.parts.layers[index]
        adapter = LinearAdapter(layer, {"q", "o", "gate", "up", "down"})
        assert {"q", "o"} <= set(adapter.sites) and (
            layer.moe is not None or {"up", "down"} <= set(adapter.sites)
        )
        plain = decoder.layers(x, slow, index, index + 1, decoder.new_cache(1, 32))
        out = decoder.layers(
            torch.cat([x, x]),
            Rows.concat([slow, fast]),
            index,
            index + 1,
            decoder.new_cache(1, 32),
            {index: adapter},
        )
        torch.testing.assert_close(out[:11], plain, **CLOSE)
        torch.testing.assert_close(
            out[11:], merged_layer_output(decoder, index, adapter, x), **CLOSE
        )
        assert (out[11:] - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_parallel_mlp_adapter_adds_its_output(name: str) -> None:
    """Site "mlp": f(input of the block) joins the block's output; the block's own code is the
    reference.
    """
    torch.manual_seed(2)
    layer = HFDecoder(tiny_model(name)).parts.layers[0]
    assert layer.mlp is not None
    x = torch.randn(2, 6, 32)
    adapter = LinearAdapter(layer, {"mlp"})
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
    first = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    plain = first(layer.mlp(x))
    with apply_adapter(layer, adapter, mask):
        out = first(layer.mlp(x))
    expected = plain + adapter.sites["mlp"](x) * mask[..., None]
    torch.testing.assert_close(out, expected, **CLOSE)
    assert torch.equal(out[~mask], plain[~mask])


@pytest.mark.parametrize("name", sorted(MOE))
def test_experts_have_no_linear_sites(name: str) -> None:
    layer = HFDecoder(tiny_model(name)).parts.layers[0]

    class Wrong(nn.Module):
        def deltas(self) -> Mapping[str, nn.Module]:
            return {"gate": nn.Linear(32, 40)}

    reason = r"layer 0 adapts 'gate'.*mixture-of-experts.*available: mlp, o, q"
    with pytest.raises(UserError, match=reason), apply_adapter(layer, Wrong()):
        raise AssertionError("the body must not run")


def test_gpt2_has_no_gate() -> None:
    assert set(HFDecoder(tiny_model("gpt2")).parts.layers[0].sites) == {
        "q",
        "o",
        "up",
        "down",
        "mlp",
    }


def test_hooks_go_when_the_body_raises() -> None:
    parts = HFDecoder(tiny_model("llama")).parts
    layer = parts.layers[1]

    def hooks() -> int:
        return sum(len(m._forward_hooks) for m in layer.module.modules())

    before = hooks()  # the model is shared by tests
    with (
        pytest.raises(RuntimeError, match="boom"),
        apply_adapter(layer, LinearAdapter(layer, set(layer.sites))),
    ):
        assert hooks() > before
        raise RuntimeError("boom")
    assert hooks() == before


@pytest.mark.parametrize("name", NAMES)
def test_training_pieces_equal_the_decoder_and_carry_gradients(name: str) -> None:
    """p rows over shared slow K/V, padded batch, all layers adapted: the same numbers that drafting
    will compute.
    """
    torch.manual_seed(3)
    decoder = HFDecoder(tiny_model(name))
    parts, total = decoder.parts, decoder.info.num_layers
    sites = {"q", "o", "mlp"} if name in MOE else {"q", "o", "gate", "up", "down"}
    adapters = {i: LinearAdapter(parts.layers[i], sites) for i in range(total)}
    ids = torch.stack(prompts(10, 10, seed=6))
    real = torch.tensor([[1] * 7 + [0] * 3, [1] * 10]).bool()  # padding, which no real row sees
    hidden, slow_kv = trace(parts, ids)
    positions = parts.position_ids(ids)
    masks = parts.causal_masks(10)
    shared = SharedKV(slow_kv.keys, slow_kv.values)
    p = hidden[0].detach().clone().requires_grad_()
    start = p
    with parts.attention():
        rotary = parts.position_embeddings(p, positions)
        for i in range(total):
            with apply_adapter(parts.layers[i], adapters[i]):
                p = parts.run_layer(i, p, masks[i], positions, rotary, shared)

    cache = decoder.new_cache(2, 16)
    texts = [ids[0, :7], ids[1]]
    slow = Rows.concat([Rows.causal(b, 0, len(t)) for b, t in enumerate(texts)])
    fast = Rows.concat([Rows.accelerated_at(b, np.arange(len(t))) for b, t in enumerate(texts)])
    x = decoder.embed(torch.cat(texts), slow.pos)
    out = decoder.layers(torch.cat([x, x]), Rows.concat([slow, fast]), 0, total, cache, adapters)[
        len(slow) :
    ]
    torch.testing.assert_close(p[real], out, atol=2e-4, rtol=1e-4)

    parts.logits(p)[real].logsumexp(-1).sum().backward()
    assert start.grad is not None and start.grad[real].abs().sum() > 0
    for adapter in adapters.values():
        for linear in adapter.sites.values():
            assert linear.weight.grad is not None and linear.weight.grad.abs().sum() > 0
    parts.model.zero_grad()
