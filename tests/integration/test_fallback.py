"""Whatever keeps us from speeding up a call of `generate`, the model's own loop runs it, as if we
had not been asked, and one warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
import transformers
from lab.bench import tiny_model
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, masking_utils
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama import modeling_llama

from multirate.engine import Engine, attach
from multirate.errors import Notice, UserError
from multirate.integration import custom_generate
from multirate.integration.engines import _ATTRIBUTE

SPEED = custom_generate(method="prompt_lookup", backend="hf", speculate="always")
SIZES: dict[str, Any] = dict(vocab_size=99, hidden_size=32, eos_token_id=None, pad_token_id=0)
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
NO_SPEED = "multirate does not speed up this call"


@pytest.fixture
def model() -> Any:
    return tiny_model.model()


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Exactly one warning of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "multirate" in str(w.message)]
    ours += [str(w.message) for w in caught if w.category is Notice]
    assert len(ours) == 1 and ours[0].startswith(NO_SPEED) and match in ours[0], ours
    assert "\n" not in ours[0]


def bloom() -> Any:
    config = transformers.BloomConfig(**SIZES, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, num_hidden_layers=2))


def rwkv() -> Any:
    config = transformers.RwkvConfig(**SIZES, num_hidden_layers=2, attention_hidden_size=32)
    return transformers.RwkvForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=99,
        pad_token_id=0,
        eos_token_id=None,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (bloom, "cannot run BloomForCausalLM"),
        (mamba, "a DynamicCache of layers without attention"),
        (rwkv, "cannot run RwkvForCausalLM"),
        (t5, "the argument encoder_outputs"),
    ],
)
@pytest.mark.parametrize("sample", [False, True])
def test_models_that_cannot_be_run_here(make: Callable[[], Any], why: str, sample: bool) -> None:
    torch.manual_seed(0)
    model = make().eval()
    options = OPTIONS | {"do_sample": sample, "max_new_tokens": 6}
    torch.manual_seed(1)
    expected = model.generate(IDS, **options)
    torch.manual_seed(1)
    with one_warning(why):
        assert model.generate(IDS, **options, custom_generate=SPEED).equal(expected)


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (custom_generate("no/such/accelerator"), "no/such/accelerator"),
        (custom_generate(method="eagle", backend="hf"), "'eagle' cannot be used"),
        (custom_generate(backend="native"), "cannot run this model"),
        (custom_generate(mode="dynamic", quality=0.9, method="layerskip"), "method layerskip"),
    ],
)
def test_what_attaching_or_decoding_refuses(
    model: Any, ours: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with one_warning(why):
        got = model.generate(IDS, **OPTIONS, custom_generate=ours)
    assert got.equal(model.generate(IDS, **OPTIONS))


@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": 5},
        {"method": "no_such_method"},
        {"method": 5},
        {"backend": "gpu"},
        {"speculate": "sometimes"},
        {"mode": "dynamic"},
        {"quality": 0.9},
    ],
)
def test_arguments_that_no_call_could_use_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        custom_generate(**arguments)


class Collect(BaseStreamer):
    def __init__(self, fails_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self.ends = 0
        self._fails_after = fails_after

    def put(self, value: torch.Tensor) -> None:
        if len(self.tokens) == self._fails_after:
            raise ConnectionError("the reader is gone")
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def break_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Every generation of ours ends with an error of its own once it has so many tokens."""
    right = Engine.generate

    def generate(self: Engine, *arguments: Any, on_tokens: Any = None, **named: Any) -> Any:
        emitted = 0

        def after(sequence: int, tokens: list[int]) -> None:
            nonlocal emitted
            for token in tokens:
                if emitted == count:
                    raise ZeroDivisionError("a defect of ours")
                emitted += 1
                if on_tokens is not None:
                    on_tokens(sequence, [token])

        output = right(self, *arguments, on_tokens=after, **named)
        if emitted == count:
            raise ZeroDivisionError("a defect of ours")
        return output

    monkeypatch.setattr(Engine, "generate", generate)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("count", [0, 4])
def test_a_defect_before_anything_was_streamed(
    model: Any, sample: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with random numbers as if we had drawn none."""
    options = OPTIONS | {"do_sample": sample, "return_dict_in_generate": True}
    streamer = Collect() if count == 0 else None
    torch.manual_seed(3)
    expected = model.generate(IDS, **options).sequences
    break_after(monkeypatch, count)
    torch.manual_seed(3)
    with one_warning("internal error and uses the model's own generate: ZeroDivisionError: a d"):
        got = model.generate(IDS, **options, custom_generate=SPEED, streamer=streamer)
    assert got.sequences.equal(expected)
    assert _ATTRIBUTE not in model.__dict__  # an engine that broke off is not used again
    if streamer is not None:
        assert streamer.tokens == expected[0].tolist() and streamer.ends == 1


@pytest.mark.parametrize("count", [1, 4, 9, 10])
def test_greedy_text_goes_on_after_a_defect(
    model: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(IDS, **OPTIONS)
    streamer = Collect()
    break_after(monkeypatch, count)
    with one_warning("ZeroDivisionError"):
        got = model.generate(IDS, **OPTIONS, custom_generate=SPEED, streamer=streamer)
    assert got.equal(expected)
    assert streamer.tokens == expected[0].tolist() and streamer.ends == 1


def test_a_defect_in_text_that_cannot_be_continued_is_raised(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(monkeypatch, 2)
    streamer = Collect()
    with pytest.raises(ZeroDivisionError):
        model.generate(
            IDS, **OPTIONS | {"do_sample": True}, custom_generate=SPEED, streamer=streamer
        )
    assert len(streamer.tokens) == IDS.shape[1] + 2 and streamer.ends == 1


@pytest.mark.parametrize("after", [7, 10])
def test_an_error_of_the_streamers_is_the_callers(model: Any, after: int) -> None:
    streamer = Collect(fails_after=after)
    with pytest.raises(ConnectionError):
        model.generate(IDS, **OPTIONS, custom_generate=SPEED, streamer=streamer)
    assert len(streamer.tokens) == after


def test_a_streamer_of_several_sequences(model: Any) -> None:
    ids, texts = IDS.expand(2, -1), []
    for ours in (None, SPEED):
        streamer = Collect()
        if ours is None:
            model.generate(ids, **OPTIONS, streamer=streamer)
        else:
            with one_warning("a streamer for 2 sequences"):
                model.generate(ids, **OPTIONS, streamer=streamer, custom_generate=ours)
        texts.append(streamer.tokens)
    assert texts[0] == texts[1]


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_an_error_of_the_models_own_loop_is_raised_once(model: Any) -> None:
    """The model's own loop fails, too: its error is the call's."""
    model.lm_head.weight = nn.Parameter(torch.zeros(3, 5))
    processors = LogitsProcessorList([Nothing()])
    for options in ({}, {"logits_processor": processors}):
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="shapes"):
            warnings.simplefilter("ignore")
            model.generate(IDS, **OPTIONS, custom_generate=SPEED, **options)


@pytest.mark.parametrize("where", ["model", "model.layers.1.mlp", ""])
def test_a_hook_sees_what_it_would_see_without_us(model: Any, where: str) -> None:
    """It counts calls, and changes one."""

    def run(ours: Any) -> tuple[list[int], list[tuple[int, ...]]]:
        shapes: list[tuple[int, ...]] = []

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            first = output[0] if not isinstance(output, torch.Tensor) else output
            shapes.append(tuple(first.shape))
            if isinstance(output, torch.Tensor) and len(shapes) == 4:
                return output + 3.0
            return None

        handle = model.get_submodule(where).register_forward_hook(hook)
        more = {} if ours is None else {"custom_generate": ours}
        try:
            return model.generate(IDS, **OPTIONS, **more)[0].tolist(), shapes
        finally:
            handle.remove()

    expected = run(None)
    with one_warning("a forward hook (integration.test_fallback."):
        assert run(SPEED) == expected
    model.generate(IDS, **OPTIONS, custom_generate=SPEED)  # without the hook, without a word


def test_dropout_is_the_models_own(model: Any) -> None:
    lora = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).train()
    options = OPTIONS | {"input_ids": IDS}
    torch.manual_seed(1)
    expected = adapted.generate(**options)
    torch.manual_seed(1)
    with one_warning("dropout of model.layers.0.self_attn.q_proj"):
        assert adapted.generate(**options, custom_generate=SPEED).equal(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted.eval().generate(**options, custom_generate=SPEED)


def learned_prompt(kind: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        sizes: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
        configs = {
            "prompt": lambda: peft.PromptTuningConfig(**sizes),
            "prefix": lambda: peft.PrefixTuningConfig(**sizes),
            "p": lambda: peft.PromptEncoderConfig(**sizes, encoder_hidden_size=16),
        }
        learned = peft.get_peft_model(model, configs[kind]()).eval()
        for parameter in learned.prompt_encoder.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.5)
        return learned

    return change


def prepares_inputs(model: Any) -> Any:
    class Reversed(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **more: Any) -> Any:
            return super().prepare_inputs_for_generation(input_ids.flip(1), **more)

    model.__class__ = Reversed
    return model


def own_forward(model: Any) -> Any:
    class Other(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
            output = super().forward(input_ids, **more)
            output.logits[:, -1] += 9.0 * (torch.arange(output.logits.shape[-1]) == input_ids[0, 0])
            return output

    model.__class__ = Other
    return model


def own_method(model: Any) -> Any:
    before = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda input_ids, **more: before(input_ids + 1, **more)
    return model


def forward_of_its_own(model: Any) -> Any:
    before = model.model.forward
    model.model.forward = lambda *given, **more: before(*given, **more)
    return model


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (learned_prompt("prompt"), "its prepare_inputs_for_generation is not that of transf"),
        (learned_prompt("prefix"), "its prepare_inputs_for_generation is not that of transf"),
        (learned_prompt("p"), "its prepare_inputs_for_generation is not that of transf"),
        (prepares_inputs, "its prepare_inputs_for_generation is not that of transformers"),
        (own_method, "its prepare_inputs_for_generation is not that of transformers"),
        (own_forward, "its Other has a forward of its own"),
        (forward_of_its_own, "its LlamaModel has a forward of its own"),
    ],
)
def test_a_model_with_a_way_of_its_own(
    model: Any, change: Callable[[Any], Any], why: str, later: bool
) -> None:
    torch.manual_seed(0)
    options = OPTIONS | {"input_ids": IDS}
    if later:  # an engine is kept already
        model.generate(**options, custom_generate=SPEED)
    changed = change(model)
    expected = changed.generate(**options)
    with one_warning(why):
        assert changed.generate(**options, custom_generate=SPEED).equal(expected)


def adapters(model: Any, **settings: Any) -> Any:
    def lora() -> Any:
        return peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings
        )

    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, lora(), adapter_name="first")
    adapted.add_adapter("second", lora())
    return adapted.eval()


def test_an_adapter_for_each_row(model: Any) -> None:
    """PEFT's hooks, which an error would leave on the model, are gone afterwards."""
    adapted = adapters(model)
    options = OPTIONS | {"input_ids": IDS.expand(2, -1), "adapter_names": ["second", "__base__"]}
    expected = adapted.generate(**options)
    with one_warning("a forward pre hook (peft."):
        assert adapted.generate(**options, custom_generate=SPEED).equal(expected)
    assert not any(module._forward_pre_hooks for module in adapted.modules())


def test_an_adapter_that_certain_tokens_switch_on(model: Any) -> None:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj"],
        init_lora_weights=False,
        alora_invocation_tokens=[7, 8],
    )
    adapted = peft.get_peft_model(model, config).eval()
    options = OPTIONS | {"input_ids": IDS}
    expected = adapted.generate(**options)
    with one_warning("a forward pre hook (peft."):
        assert adapted.generate(**options, custom_generate=SPEED).equal(expected)
    with one_warning("activated by certain tokens (aLoRA)"):  # without its hooks, too
        adapted.get_base_model().generate(**options, custom_generate=SPEED)


def test_adapters_switched_between_calls_are_followed(model: Any) -> None:
    adapted = adapters(model)
    options = OPTIONS | {"input_ids": IDS}
    texts = []
    for switch in (
        lambda: None,
        lambda: adapted.set_adapter("second"),
        lambda: adapted.merge_adapter(),
        lambda: adapted.unmerge_adapter(),
        lambda: adapted.base_model.disable_adapter_layers(),
    ):
        switch()
        texts.append(adapted.generate(**options))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert adapted.generate(**options, custom_generate=SPEED).equal(texts[-1])
    assert len({str(text.tolist()) for text in texts}) >= 3


@pytest.mark.parametrize("changed", ["in the family's file", "in the table of implementations"])
def test_masks_that_a_user_makes_are_followed(
    model: Any, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they come after an engine was made, and hide places that no probe reaches."""
    model.generate(IDS, **OPTIONS, custom_generate=SPEED)

    def near(batch: Any, head: Any, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return row - place < 3

    if changed == "in the family's file":
        right = modeling_llama.create_causal_mask

        def create(*given: Any, **named: Any) -> Any:
            return right(*given, **named, and_mask_function=near)

        monkeypatch.setattr(modeling_llama, "create_causal_mask", create)
        why = "its create_causal_mask is not that of transformers"
    else:
        table, sdpa = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, masking_utils.sdpa_mask

        def mask(*given: Any, mask_function: Any, **named: Any) -> Any:
            named["allow_is_causal_skip"] = False
            return sdpa(*given, mask_function=masking_utils.and_masks(mask_function, near), **named)

        monkeypatch.setitem(table._global_mapping, "sdpa", mask)
        why = "its mask of the attention implementation 'sdpa' is a function of"
    expected = model.generate(IDS, **OPTIONS)
    with one_warning(why):
        assert model.generate(IDS, **OPTIONS, custom_generate=SPEED).equal(expected)
    monkeypatch.undo()
    got = model.generate(IDS, **OPTIONS, custom_generate=SPEED)
    assert got.equal(model.generate(IDS, **OPTIONS)) and not got.equal(expected)


def test_a_window_that_layers_ignore_and_caches_do_not(model: Any) -> None:
    before = model.generate(IDS, **OPTIONS, custom_generate=SPEED)
    model.config.sliding_window = 3
    expected = model.generate(IDS, **OPTIONS)
    assert not expected.equal(before)
    with one_warning("its configuration has a sliding_window of 3"):
        assert model.generate(IDS, **OPTIONS, custom_generate=SPEED).equal(expected)
    model.config.sliding_window = 512  # all of its context
    assert model.generate(IDS, **OPTIONS, custom_generate=SPEED).equal(before)


class Louder(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = function(*given, **(named or {}))
        return result * 2 if function is nn.functional.silu else result


class Halved(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = function(*given, **(named or {}))
        return result / 2 if function is torch.ops.aten.silu.default else result


@pytest.mark.parametrize("mode", [Louder, Halved])
def test_modes_of_torch_see_every_operation(model: Any, mode: Callable[[], Any]) -> None:
    before = model.generate(IDS, **OPTIONS, custom_generate=SPEED)
    with mode():
        expected = model.generate(IDS, **OPTIONS)
    assert not expected.equal(before)
    with mode(), one_warning("a torch mode that intercepts every operation"):
        assert model.generate(IDS, **OPTIONS, custom_generate=SPEED).equal(expected)
    with torch.device("cpu"), warnings.catch_warnings():  # a mode, too
        warnings.simplefilter("error")
        assert model.generate(IDS, **OPTIONS, custom_generate=SPEED).equal(before)


def test_processes_that_go_in_step(model: Any) -> None:
    """Transformers hands a callable no `synced_gpus`: the own loop has to know of it."""
    with pytest.raises(ValueError) as expected:
        model.generate(IDS, **OPTIONS, synced_gpus=True)
    with one_warning("synced_gpus"), pytest.raises(ValueError, match=f"^{expected.value}$"):
        model.generate(IDS, **OPTIONS, synced_gpus=True, custom_generate=SPEED)


def test_beams_are_not_streamed(model: Any) -> None:
    options = OPTIONS | {"num_beams": 2}
    with pytest.raises(ValueError, match="beam search"):
        model.generate(IDS, **options, streamer=Collect())
    streamer = Collect()
    with one_warning("beam search"), pytest.raises(UserError, match="streamer"):
        model.generate(IDS, **options, streamer=streamer, custom_generate=SPEED)
    assert streamer.ends == 1  # its reader does not wait for ever


def test_no_prompts(model: Any) -> None:
    with (
        one_warning("an empty prompt"),
        pytest.raises(RuntimeError, match="0 elements"),
    ):  # its own error
        model.generate(IDS[:0], **OPTIONS, custom_generate=SPEED)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", [False, True])
def test_weights_that_are_not_finite(
    model: Any, value: float, dtype: torch.dtype, after: bool
) -> None:
    """The model's own text of them is nobody's, and ours would be another one."""
    model, ours = model.to(dtype), custom_generate()
    if after:
        model.generate(IDS, **OPTIONS, custom_generate=ours)
    model.lm_head.weight.data[3, 4] = value
    expected = model.generate(IDS, **OPTIONS)
    with one_warning("lm_head.weight holds values that are not finite"):
        assert model.generate(IDS, **OPTIONS, custom_generate=ours).equal(expected)


def test_logits_that_rule_tokens_out(model: Any) -> None:
    """An infinite bias is no defect where others are left."""
    head = nn.Linear(64, 261)
    head.weight.data = model.lm_head.weight.data
    head.bias.data.zero_()[100:] = -torch.inf
    model.lm_head = head
    model.bfloat16()
    engine = attach(model)
    text = engine.generate(IDS.tolist(), stop=engine.stopping(10)).sequences[0]
    assert max(text) < 100


def test_an_error_of_the_models_own_loop_beyond_the_context() -> None:
    config = transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=12)
    model = transformers.GPT2LMHeadModel(config).eval()
    with pytest.raises(IndexError) as expected:
        model.generate(IDS, **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(IndexError, match=str(expected.value)):
            model.generate(IDS, **OPTIONS, custom_generate=SPEED)
    ours = [str(one.message) for one in caught if "multirate" in str(one.message)]
    assert len(ours) == 1 and "beyond the model's context of 12 tokens" in ours[0]
