"""Only plain modules are packed: whatever else a module does is done by the model's own layers, or
refused by name.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
import pytest
import torch
from native_kernel import skip_without_kernel
from runtime.native.test_native_decoder import CONFIGS
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from multirate import attach
from multirate.errors import Notice, UserError
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.weight_watch import WeightWatch


@pytest.fixture(autouse=True)
def kernel() -> None:
    """In place of conftest's: what is packed is the same for every processor."""
    skip_without_kernel()


SIZES: dict[str, Any] = dict(
    vocab_size=133,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
)
PROMPT = [7, 3, 99, 42, 5]
NEW = 10


def make(config: Any = None) -> Any:
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES, head_dim=32))
        .to(torch.bfloat16)
        .eval()
    )


def answer(model: Any, **options: Any) -> list[int]:
    engine = attach(model, **options)
    return engine.generate([PROMPT], stop=engine.stopping(NEW)).sequences[0]


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


class Minus(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


class Doubled(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.down_proj = block, block.down_proj
        self.gate_proj, self.up_proj, self.act_fn = block.gate_proj, block.up_proj, block.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.block(x)


def lora(model: Any, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings
    )
    return peft.get_peft_model(model, config).eval()


def subclass(model: Any) -> Any:
    old = model.model.layers[1].self_attn.o_proj
    new = Louder(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16)
    new.load_state_dict(old.state_dict())
    model.model.layers[1].self_attn.o_proj = new
    return model


def hook(model: Any) -> Any:
    model.model.layers[2].mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return model


def pre_hook(model: Any) -> Any:
    model.model.layers[0].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 2, *inputs[1:])
    )
    return model


def parametrised(model: Any) -> Any:
    nn.utils.parametrize.register_parametrization(
        model.model.layers[0].mlp.up_proj, "weight", Minus()
    )
    return model


def own_forward(model: Any) -> Any:
    attention = model.model.layers[1].self_attn
    before = attention.forward
    attention.forward = lambda *a, **k: (before(*a, **k)[0] * 3, None)
    return model


def other_block(model: Any) -> Any:
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)
    return model


def other_scale(model: Any) -> Any:
    model.model.layers[0].self_attn.scaling *= 2
    return model


def one_bias(model: Any) -> Any:
    linear = model.model.layers[0].self_attn.k_proj
    linear.bias = nn.Parameter(torch.randn(linear.out_features, dtype=torch.bfloat16))
    return model


def scaled_lookup(model: Any) -> Any:
    model.model.embed_tokens.max_norm = 0.05
    return model


def own_call(model: Any) -> Any:
    class Negated(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        __module__ = "transformers.models.llama.modeling_llama"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return -super().__call__(x)

    model.model.layers[0].mlp.__class__ = Negated
    return model


def final_epsilon(model: Any) -> Any:
    model.model.norm.variance_epsilon = 300.0
    return model


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lora": (lora, "peft"),
    "lora-within": (lambda model: lora(model).get_base_model(), "q_proj is a peft Linear"),
    "subclass": (subclass, "layers.1.self_attn.o_proj is a .* Louder, not a plain Linear"),
    "hook": (hook, "layers.2.mlp has a forward hook"),
    "pre-hook": (pre_hook, "layers.0 has a forward pre hook"),
    "parametrised": (parametrised, "layers.0.mlp.up_proj is .*parametri"),
    "own-forward": (own_forward, "layers.1.self_attn has a forward of its own"),
    "other-block": (other_block, "layers.0.mlp is a .* Doubled"),
    "other-scale": (other_scale, "layers.0 scales its attention scores"),
    "one-bias": (one_bias, "layers.0 has a bias only in k_proj"),
    "max-norm": (scaled_lookup, "embed_tokens scales its rows"),
    "own-call": (own_call, "layers.0.mlp is a Negated whose class has a __call__ of its own"),
    "final-epsilon": (final_epsilon, r"model\.norm has a norm with epsilon 300\.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_plain_is_run_by_its_own_layers(name: str) -> None:
    change, named = CHANGES[name]
    model = change(make())
    with torch.no_grad():
        plain, changed = make()(torch.tensor([PROMPT])).logits, model(torch.tensor([PROMPT])).logits
    assert (plain - changed).norm() > 0.05 * plain.norm()  # ignoring it would be seen
    with pytest.warns(Notice, match=f"running the model's own layers.*{named}") as caught:
        engine = attach(model)
    assert (
        isinstance(engine.decoder, HFDecoder)
        and len(caught) == 1
        and "\n" not in str(caught[0].message)
    )
    assert engine.generate([PROMPT], stop=engine.stopping(NEW)).sequences[0] == answer(
        model, backend="hf"
    )
    with pytest.raises(UserError, match=named):
        attach(model, backend="native")


@contextmanager
def hook_for_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 3 if isinstance(module, nn.Embedding) else None
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def function_replaced() -> Iterator[None]:
    before = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, **_: (2 * q, 2 * k)
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = before


@contextmanager
def class_forward_replaced() -> Iterator[None]:
    block = modeling_llama.LlamaMLP
    before = block.forward
    block.forward = lambda self, x: -before(self, x)
    try:
        yield
    finally:
        block.forward = before


@contextmanager
def activation_replaced() -> Iterator[None]:
    before = nn.functional.silu
    nn.functional.silu = functools.wraps(before)(lambda x, inplace=False: -before(x))
    try:
        yield
    finally:
        nn.functional.silu = before


@contextmanager
def attention_replaced() -> Iterator[None]:
    before = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda *given, **more: -before(*given, **more)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = before


@pytest.mark.parametrize("after", [False, True], ids=["before-attaching", "after-attaching"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (hook_for_all, "a hook on every module"),
        (function_replaced, "modeling_llama.apply_rotary_pos_emb was replaced"),
        (class_forward_replaced, "layers.0.mlp is a LlamaMLP whose class has a replaced forw"),
        (activation_replaced, "torch.nn.functional.silu was replaced"),
        (attention_replaced, "torch.nn.functional.scaled_dot_product_attention was replaced"),
    ],
)
def test_what_is_changed_for_all_models_is_heard(
    change: Callable[[], AbstractContextManager[None]], named: str, after: bool
) -> None:
    model = make()
    engine = attach(model)
    before = answer(model)
    assert engine.generate([PROMPT], stop=engine.stopping(NEW)).sequences[0] == before
    with change():
        with pytest.warns(Notice, match=f"running the model's own layers.*{named}"):
            if not after:
                engine = attach(model)
            found = engine.generate([PROMPT], stop=engine.stopping(NEW)).sequences[0]
        assert found == answer(model, backend="hf") != before


def test_another_attention_is_refused_by_name() -> None:
    """The rows of a draft need attention to honour masks: an unknown one may not."""

    def other(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        output, weights = sdpa_attention_forward(module, *arguments, **named)
        return -output, weights

    AttentionInterface.register("other", other)
    model = make()
    engine = attach(model)
    stop = engine.stopping(NEW)
    model.set_attn_implementation("other")
    try:
        for backend in ("auto", "native", "hf"):
            with pytest.raises(UserError, match=f"'other' is a function of {__name__}"):
                attach(model, backend=backend)
        with pytest.raises(UserError, match="'other'"):
            engine.generate([PROMPT], stop=stop)
    finally:
        model.set_attn_implementation("sdpa")
    assert engine.generate([PROMPT], stop=stop).sequences[0] == answer(model)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = make()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UserError, match="the attention of layer 1 is not causal"):
        attach(model)


@pytest.mark.parametrize("config", [None, Qwen3Config(**SIZES, head_dim=64)])
def test_plain_models_are_packed_without_a_word(config: Any) -> None:
    model = make(config)
    model(
        torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True
    )  # leaves transformers' hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(attach(model).decoder, NativeDecoder)


def test_mixtures_without_a_store_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(make(MixtralConfig(**SIZES, num_local_experts=4)))


def test_a_merged_lora_is_packed() -> None:
    model = lora(make())
    merged = copy.deepcopy(model).merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = attach(merged)
    assert isinstance(engine.decoder, NativeDecoder)
    tokens = torch.tensor([PROMPT])
    cache = engine.decoder.new_cache(1, 16)
    from multirate.runtime.rows import Rows

    rows = Rows.causal(0, 0, len(PROMPT))
    hidden = engine.decoder.layers(engine.decoder.embed(tokens[0], rows.pos), rows, 0, 3, cache)
    with torch.no_grad():
        exact, plain = model.float()(tokens).logits[0], make().float()(tokens).logits[0]
    difference = (engine.decoder.logits(hidden) - exact).norm()
    assert difference < 0.05 * exact.norm() < (plain - exact).norm()


def test_offloaded_modules_are_not_packed() -> None:
    from accelerate import cpu_offload

    model, expected = make(), answer(make(), backend="hf")
    cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    with pytest.warns(Notice, match=r"layers\.1.* has a forward of its own \(.*offloaded"):
        assert answer(model) == expected


def test_a_model_offloaded_as_a_whole_is_run() -> None:
    from accelerate import cpu_offload

    model, expected = make(), answer(make(), backend="hf")
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(Notice, match="offloaded"):
        assert answer(model) == expected


def test_learned_prompts_are_refused_in_a_sentence() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(
        UserError, match=r"cannot run .*: PEFT prepends a learned prompt to its inputs"
    ):
        attach(peft.get_peft_model(make(), config))


def test_a_quantised_weight_is_not_packed() -> None:
    class Small(torch.Tensor):
        pass

    model = make()
    linear = model.model.layers[1].mlp.gate_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Small), requires_grad=False)
    with pytest.warns(Notice, match=r"layers\.1\.mlp\.gate_proj has a weight that is a Small"):
        assert isinstance(attach(model).decoder, HFDecoder)


def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def one_of_its_tensors(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.neg_()


def other_storage(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = -weight.data


def new_parameter(model: Any) -> None:
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = nn.Parameter(-linear.weight.detach())


def state_dict(model: Any) -> None:
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})


def optimizer_step(model: Any) -> None:
    weight = model.lm_head.weight
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def one_row_of_the_head(model: Any) -> None:
    head = model.lm_head.weight.data
    with torch.no_grad():
        said = int(model(torch.tensor([PROMPT * 3])).logits[0, -1].argmax())
    head[said + 1] = 4 * head[said]


def one_row_of_the_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data[PROMPT[-1]].neg_()


def one_row_of_a_layer(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data[77] = 3


def one_value(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data[5, 17] = 50


def exchanged_rows(model: Any) -> None:
    rows = model.model.embed_tokens.weight.data
    rows[[3, 42]] = rows[[42, 3]]


def exchanged_columns(model: Any) -> None:
    columns = model.model.layers[1].mlp.gate_proj.weight.data
    columns[:, [0, 64]] = columns[:, [64, 0]] * 1.0


def through_numpy(model: Any) -> None:
    bits = model.model.layers[0].mlp.up_proj.weight.detach().view(torch.int16).numpy()
    bits[50] = 0x4040


def head_of_its_own(model: Any) -> None:
    model.lm_head = nn.Linear(128, 133, bias=False, dtype=torch.bfloat16)


def some_rows(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[7:10] *= -20


def some_columns(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[:, 7:10] *= -20


def part_of_a_norm(model: Any) -> None:
    model.model.norm.weight.data[40:50] = 5


def rotary_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(5)


def rotary_scale(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 3.0


@pytest.mark.parametrize(
    "change",
    [
        through_data,
        one_of_its_tensors,
        one_row_of_the_head,
        one_row_of_the_embedding,
        one_row_of_a_layer,
        one_value,
        exchanged_rows,
        exchanged_columns,
        through_numpy,
        head_of_its_own,
        some_rows,
        some_columns,
        part_of_a_norm,
        rotary_frequencies,
        rotary_scale,
        other_storage,
        new_parameter,
        state_dict,
        optimizer_step,
    ],
)
def test_changed_weights_are_packed_again(change: Callable[[Any], None]) -> None:
    model = make()
    engine = attach(model)
    stop = engine.stopping(NEW)
    before = engine.generate([PROMPT * 3], stop=stop).sequences
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate([PROMPT * 3], stop=stop).sequences == before
    change(model)
    expected = attach(copy.deepcopy(model)).generate([PROMPT * 3], stop=stop).sequences
    assert expected != before
    for method in ("autoregressive", "layerskip"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert (
                engine.generate(
                    [PROMPT * 3], stop=stop, method=method, speculate="always"
                ).sequences
                == expected
            )
        assert [str(w.message) for w in caught if w.category is Notice] == (
            ["the model changed after its weights were packed; packed them again"]
            if method == "autoregressive"
            else []
        )


@pytest.mark.parametrize("columns", [8, 9, 64, 130, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_any_value_of_a_matrix_is_compared(columns: int, dtype: torch.dtype) -> None:
    """Of rows whose bytes are whole words or not, also where it lies in memory column by column."""
    torch.manual_seed(0)
    weight = (torch.randn(40, columns) * 20).to(dtype)
    for made in (weight, weight.t().contiguous().t()):
        module = nn.Module()
        module.weight = nn.Parameter(made, requires_grad=False)
        watch = WeightWatch(module)
        for row, column in ((0, 0), (17, columns - 1), (39, columns // 2)):
            before = made[row, column].item()
            module.weight.data[row, column] = before + 1
            assert watch.changed()
            module.weight.data[row, column] = before
            assert not watch.changed()
        for row in range(40):
            module.weight.data[row] = -module.weight.data[row]
            assert watch.changed()
            module.weight.data[row] = -module.weight.data[row]


def test_a_number_of_the_configuration_is_followed() -> None:
    from transformers import Gemma2Config

    sizes = SIZES | {"query_pre_attn_scalar": 32, "head_dim": 32}
    model = make(Gemma2Config(**sizes, final_logit_softcapping=30.0)).float()
    engine = attach(model)
    watch = WeightWatch(model)
    model.config.final_logit_softcapping = 0.5
    assert watch.changed()
    engine.generate([PROMPT], stop=engine.stopping(2))
    rows = engine.decoder.info.vocab_size
    assert engine.decoder.unembed(torch.ones(1, 128) * 9).abs().max() <= 0.5 and rows == 133


def test_a_lora_put_on_after_attaching_is_heard() -> None:
    model = make()
    engine = attach(model)
    stop = engine.stopping(NEW)
    engine.generate([PROMPT * 3], stop=stop)
    adapted = lora(model)
    with pytest.warns(Notice, match="running the model's own layers"):
        got = engine.generate([PROMPT * 3], stop=stop).sequences
    assert got == attach(adapted, backend="hf").generate([PROMPT * 3], stop=stop).sequences
    with adapted.disable_adapter():  # the K/V kept from the last answer are of other weights
        plain = engine.generate([PROMPT * 3], stop=stop).sequences
    assert plain == attach(make(), backend="hf").generate([PROMPT * 3], stop=stop).sequences != got


def test_a_check_is_cheap() -> None:
    import timeit

    from multirate.runtime.weight_watch import WeightWatch

    watch = WeightWatch(make())
    assert not watch.changed()
    assert (
        min(timeit.repeat(watch.changed, number=20, repeat=5)) / 20 < 0.001
    )  # 3 layers; about 0.02 ms


def test_rotary_frequencies_that_every_forward_writes_are_no_change() -> None:
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(**SIZES, pad_token_id=0, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    frequencies = model.model.rotary_emb.inv_freq
    watch, version = WeightWatch(model), frequencies._version
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
    assert frequencies._version > version and not watch.changed()
    frequencies[3] *= 2
    assert watch.changed()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hook_on_any_module_of_any_family_is_heard(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().to(torch.bfloat16)
    assert NativeDecoder.supports(model) is None
    for part, module in model.named_modules():
        if type(module) is nn.ModuleList:  # nobody calls these
            continue
        handle = module.register_forward_hook(lambda *_: None)
        reason = NativeDecoder.supports(model)
        assert reason is not None and "forward hook" in reason, part
        handle.remove()
