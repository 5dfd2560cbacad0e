"""`attach` prepares a model for decoding; `Engine.generate` decodes, with or without an
accelerator.
"""

from __future__ import annotations

import operator
import os
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from multirate import guarantee as guarantees
from multirate import tuned
from multirate.decoding import generation_config
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.prompts import as_lists
from multirate.decoding.results import DecodeStats, GenerationOutput, OnTokens
from multirate.decoding.speculate.acceptance_statistics import OverallRates
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.trial import TEXTS, try_drafts
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import Notice, UserError, say_once
from multirate.experts.load import load_offloaded
from multirate.generation_lock import GenerationLock, lock_of
from multirate.guarantee import Guarantee, check_quality
from multirate.loading.hub import (
    LoadedModel,
    check_weights_option,
    load_model,
    packaged_accelerators,
    resolve_accelerator,
)
from multirate.methods import spec
from multirate.methods.spec import PLAIN, MethodSpec, SecondModel, write_variant
from multirate.runtime.attention_kernels import kernels_of_any_shape
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.load import load_decoder, quantised_for_kernel
from multirate.runtime.machine import machine_name
from multirate.runtime.quantised import expanded, formats, formats_line, is_quantised
from multirate.runtime.weight_watch import WeightWatch
from multirate.torch_modes import Modes
from multirate.training.checkpoint import Accelerator
from multirate.training.fingerprint import fingerprint

if TYPE_CHECKING:
    from multirate.experts.model import OffloadedExperts

SPECULATE = ("auto", "always", "never")
MODES = ("lossless", "dynamic")
KEPT_BYTES = 256 << 20
"""Default of `Engine.keep_bytes`."""


def attach(
    model: Any,
    accelerator: str | os.PathLike[str] | Accelerator | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    experts: str | os.PathLike[str] | None = None,
    expert_memory: str | int | None = None,
    expert_policy: str | None = None,
    expert_predictor: str | os.PathLike[str] | None = None,
    weights: str = "file",
) -> Engine:
    """Makes an engine for a causal language model. The model itself stays unchanged.

        engine = multirate.attach("smollm2")
        prompt = engine.tokenizer("The capital of France is")["input_ids"]
        output = engine.generate([prompt], stop=engine.stopping(max_new_tokens=32))
        print(engine.tokenizer.decode(output.sequences[0]))

    model: a causal LM of transformers, a local folder, a GGUF file, a hub id, a short name such as
        "smollm2", or what hub.load_model returned.
    accelerator: a trained one: its folder, its hub id, or the name of one that this package has for
        the model. None: a method that needs no training (`Engine.default`). An accelerator that was
        trained for other weights of the same shape (a fine-tuned or quantised copy) is accepted;
        before its first drafts the engine measures it on a few short texts and reports the result.
    backend: "native" runs packed bf16 weights with the C kernel, "hf" runs the model's own layers,
        "auto" uses the kernel if it can run the model.
    tokenizer: needed for stop strings and for that measurement. A model loaded by name brings its
        own.
    experts: for a mixture of experts given by name: the store (`multirate pack`) to read its
        experts from as they are needed.
    expert_memory: how much memory the experts may use, such as "2GB" (default: all of them). This
        and the next two need experts on disk.
    expert_policy: see experts/named_policies.py (default: aot).
    expert_predictor: folder or hub id of a predictor from `multirate train --objective experts`.
    weights: "file": as they are, so that the kernel runs a GGUF file's own formats; "bf16": a GGUF
        file expanded; "q8_0", "q4_0" or "q4_1": a copy of any other model, quantised now, which
        the engine has as its `model`.

    Raises UserError, with the reason, for anything that cannot be used.
    """
    check_weights_option(weights)
    if experts is not None and weights != "file":
        raise UserError(f"weights {weights} do not work with experts=DIR: leave weights out")
    if not isinstance(model, (str, os.PathLike, LoadedModel, nn.Module)):
        raise UserError(
            f"the model is {model!r}; accepted: a causal LM of transformers, or its folder or "
            "hub id"
        )
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        if experts is None:
            model, weights = load_model(name, weights=weights), "file"
        else:
            model = load_offloaded(name, experts)
    elif experts is not None:
        raise UserError("experts=DIR needs the model's folder or hub id, not a loaded model")
    from multirate.experts.model import experts_on_disk

    if isinstance(model, LoadedModel):
        model, tokenizer = model.model, tokenizer or model.tokenizer
    if type(model).__name__ == "OptimizedModule":  # torch.compile's, around the model
        model = model._orig_mod
    if weights != "file":
        model = _with_weights(model, weights)
    with lock_of(
        model
    ).held():  # building a decoder may run the model, and exchanges what reads its experts
        offloaded = experts_on_disk(model)
        if offloaded is None:
            for what, value in (
                ("expert_memory", expert_memory),
                ("expert_predictor", expert_predictor),
            ):
                if value is not None:
                    raise UserError(
                        f"{what} is {value!r}, but the model has no experts on disk; "
                        "leave it out, or name a store with experts=DIR"
                    )
            engine = Engine(model, load_decoder(model, backend), tokenizer, backend)
        else:
            if expert_predictor is not None:
                offloaded.add(expert_predictor)
            engine = Engine(
                model, offloaded.start(backend, expert_policy, expert_memory), tokenizer, backend
            )
            engine.experts = offloaded
            engine.default = PLAIN  # every row of a draft has experts to read
    if accelerator is not None:
        engine.add(accelerator)
    return engine


def _with_weights(model: Any, weights: str) -> Any:
    """A loaded model with these weights: see `attach`."""
    if weights != "bf16":
        return quantised_for_kernel(model, weights)
    if not is_quantised(model) and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise UserError(f"weights is 'bf16', but the model is {dtype}: call model.bfloat16() first")
    return expanded(model)


def check_mode(mode: str, quality: float | None, speculate: str) -> None:
    """Raises UserError for invalid values or combinations of these arguments of
    `Engine.generate`.
    """
    if speculate not in SPECULATE:
        raise UserError(f"speculate is {speculate!r}; accepted: {', '.join(SPECULATE)}")
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}; accepted: {', '.join(MODES)}")
    if mode == "lossless":
        if quality is not None:
            raise UserError(f"quality {quality!r} needs mode 'dynamic', not 'lossless'")
        return
    if quality is None:
        raise UserError(
            "mode 'dynamic' needs a quality: a number above 0 and at most 1, the share of "
            "tokens that must match the full model"
        )
    check_quality(quality)
    if speculate == "never":
        raise UserError(
            "speculate 'never' decodes without drafts; with mode 'dynamic' use 'auto' or 'always'"
        )


@dataclass
class _Decoding:
    """A method's step, the acceptance rates of its drafts so far, and in dynamic mode its
    calibration.
    """

    step: Step
    acceptance: OverallRates
    guarantee: Guarantee | None = None

    def observe(self, stats: DecodeStats) -> None:
        self.acceptance.observe(stats.sequence_steps, stats.drafted_levels, stats.accepted)


class Engine:
    """One model with its decoder and any number of accelerators by name. `attach` makes it.

    Attributes:

    default: the method that `generate` uses if you name none. It is the first accelerator's.
        Without one it is `sam`, text lookup that needs no training, with the native backend, and
        plain decoding otherwise (backend "hf", or experts on disk).
    notice: what you should know about the last call, for example that its method is lossy or that
        drafting is not faster here; else None.
    guarantee: in dynamic mode, what calibration measured for the last call; else None.
    used: the method of the last call; "" before the first. It is "autoregressive" if the engine
        decoded without drafts because they are not faster.
    accelerators: the attached accelerators, by name.
    experts: where the experts are read from, if they are on disk.
    uses_tuned: whether a method named without settings uses the ones that `multirate tune` found
        fastest on this machine (reported once). Default: False.
    tuned_settings: the tuned settings in use, by method.
    keep_bytes: how much K/V memory, in bytes, the engine keeps from the last generation of each
        method, newest first (default: 256 MiB). A prompt that begins with the same tokens, such as
        a conversation's next turn, then reads only the new ones. 0 keeps nothing; `forget` drops
        what is kept.

    Threads: any number of threads may use an engine; it runs one generation at a time. Several
    engines run side by side, even for one model, unless they use the model's own modules (backend
    "hf") or read experts from disk. `notice` belongs to the last call of any thread. on_tokens
    cannot start another generation with the same engine.

    Processes: a forked process may use its parent's engines; torch then runs on one thread there.
    With experts on disk it must load the model itself.
    """

    def __init__(
        self, model: Any, decoder: Decoder, tokenizer: Any = None, backend: str = "auto"
    ) -> None:
        self.model = model
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.accelerators: dict[str, Accelerator] = {}
        self.default = spec.recommended(trained=False) if self.backend == "native" else PLAIN
        self.notice: str | None = None
        self.guarantee: Guarantee | None = None
        self.used = ""
        self.keep_bytes = KEPT_BYTES
        self.uses_tuned = False
        self.tuned_settings: dict[str, dict[str, Any]] = {}
        self.experts: OffloadedExperts | None = None
        self._lock = lock_of(model) if decoder.runs_the_model else GenerationLock()
        self._generating_in: int | None = None  # the process; a forked one inherits its parent's
        self._requested = backend
        self._watch = WeightWatch(model)
        self._decodings: dict[str, _Decoding] = {}
        self._prefix_caches: dict[str, PrefixCache] = {}  # the newest last
        self._second_models: dict[str, SecondModel] = {}
        self._tried: set[str] = set()  # accelerators for a relative of this model

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "an engine cannot be copied or pickled because it holds packed weights and locks; "
            "copy the model and call multirate.attach on the copy"
        )

    @property
    def backend(self) -> str:
        """ "native" or "hf"."""
        return "hf" if isinstance(self.decoder, HFDecoder) else "native"

    @property
    def weights(self) -> str:
        """What the backend runs: the formats of quantised weights, such as "Q4_1 210 tensors, F32
        61, Q8_0 1", else the dtype.
        """
        if self.backend == "native" and is_quantised(self.model):
            return formats_line(self.model)
        return str(self.decoder.info.dtype).removeprefix("torch.")

    def add(
        self, accelerator: str | os.PathLike[str] | Accelerator, name: str | None = None
    ) -> str:
        """Adds an accelerator under `name` (default: its method's name) and returns that name.

        The first accelerator that drafts becomes the default. One that predicts experts serves the
        expert policies accelerated and aot. Raises UserError for an accelerator that does not fit
        the model and for a name that is not allowed.
        """
        if not isinstance(accelerator, Accelerator):
            folder = resolve_accelerator(accelerator, self.model.config)
            accelerator = Accelerator.from_pretrained(folder, self.model)
        name = name or accelerator.method
        with self._lock.held():
            return self._add(accelerator, name)

    def _add(self, accelerator: Accelerator, name: str) -> str:
        if spec.find(accelerator.method).role == "experts":
            if self.experts is None:
                raise UserError(
                    "this accelerator predicts experts, but the model's experts are all in "
                    "memory; it needs a model with experts on disk (experts=DIR, "
                    "expert_predictor)"
                )
            self.experts.add(accelerator)
            self.experts.use_policy(self.experts.policy, self.experts.memory)
            return name
        if ":" in name:
            raise UserError(
                f"an accelerator cannot be named {name!r}: a ':' separates a method's name from "
                "its settings"
            )
        if name in (PLAIN, "generate"):
            raise UserError(f"an accelerator cannot be named {name!r}: a baseline has that name")
        self.accelerators[name] = accelerator
        self._tried.discard(name)
        for known in (self._decodings, self._prefix_caches):
            for variant in [v for v in known if spec.parse_variant(v)[0] == name]:
                del known[variant]
        if self.default in (PLAIN, spec.recommended(trained=False)):
            self.default = name
        return name

    def methods(self) -> list[str]:
        """The method names that `generate` accepts: the attached accelerators, and the methods that
        need no training.
        """
        untrained = [name for name, known in spec.all_specs().items() if known.training is None]
        return [*self.accelerators, *(name for name in untrained if name not in self.accelerators)]

    def lossless(self, method: str) -> bool:
        """Whether a method's output is the base model's own."""
        with self._lock.held():
            decoding = self._decoding(method)
        return self._spec(method).lossless and (decoding is None or decoding.step.lossless)

    def guarantee_of(self, method: str) -> Guarantee | None:
        """The calibration of a method name with a quality; None for a lossless method. Raises
        UserError if none is stored.
        """
        with self._lock.held():
            decoding = self._decoding(method)
        return None if decoding is None else decoding.guarantee

    def costs(self, method: str) -> CostModel | None:
        """Measured times of a plain step, a draft step and a verification for this method; None if
        it does not draft.
        """
        with self._lock.held():
            decoding = self._decoding(method)
            return None if decoding is None else decoding.step.costs(self.decoder)

    def sampling(self, **given: Any) -> SamplingSettings:
        """The sampling settings of the model's generation_config, with the given fields of
        SamplingSettings replaced.

        Warns once about settings that it ignores, and if the generation_config asks for sampling
        and you gave no temperature.
        """
        config = self._generation_config()
        info = self.decoder.info
        ends = eos_token_ids(self.model, self.tokenizer)
        found = generation_config.sampling_of(config, ends, info.vocab_size, info.device, given)
        others = generation_config.unfollowed(config)
        if others:
            say_once(
                f"{generation_config.WHERE} asks for {', '.join(others)}, which multirate "
                "ignores: the text may differ from that of transformers' generate"
            )
        if generation_config.samples(config) and "temperature" not in given and not found.greedy:
            say_once(
                f"{generation_config.WHERE} asks for sampling, so multirate samples (temperature "
                f"{found.temperature:g}, top_k {found.top_k}, top_p {found.top_p:g}); set "
                "temperature 0 for greedy decoding"
            )
        return found

    def stopping(
        self, max_new_tokens: int | None = 256, stop_strings: Sequence[str] | None = None
    ) -> StopSettings:
        """Stop settings with the model's end-of-text tokens and the tokenizer.

        max_new_tokens: default 256; None for no limit but the context.
        stop_strings: None uses those of the model's generation_config.
        """
        if stop_strings is None:
            stop_strings = self._stop_strings()
        return StopSettings(
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids(self.model, self.tokenizer),
            stop_strings=stop_strings,  # type: ignore[arg-type]  # one text or several
            decode=None if self.tokenizer is None else self.tokenizer.decode,
        )

    def stopping_after(
        self, prompts: Sequence[Sequence[int]], stop_strings: Sequence[str] | None = None
    ) -> StopSettings:
        """`stopping` with the length that the model's generation_config sets for these prompts
        (max_new_tokens or max_length), or 256 new tokens.
        """
        longest = max(map(len, prompts), default=0)
        most = generation_config.new_tokens(self._generation_config(), longest, 256)
        return self.stopping(most, stop_strings)

    def _generation_config(self) -> Any:
        return getattr(self.model, "generation_config", None)

    def _stop_strings(self) -> Sequence[str]:
        asked = generation_config.stop_strings(self._generation_config())
        if asked and self.tokenizer is None:
            say_once(
                f"ignoring stop_strings in {generation_config.WHERE}: they need the model's "
                "tokenizer"
            )
            return ()
        return asked

    def generate(
        self,
        prompts: Any,
        sampling: SamplingSettings | None = None,
        stop: StopSettings | None = None,
        method: str | None = None,
        on_tokens: OnTokens | None = None,
        speculate: str = "auto",
        mode: str = "lossless",
        quality: float | None = None,
    ) -> GenerationOutput:
        """Continues every prompt and returns the new tokens, why each sequence ended, and counts.

        prompts: lists of token ids, tensors or arrays of them without padding, or a tokenizer's
            output with its attention mask.
        sampling: default: what the model's generation_config asks for, greedy decoding if it asks
            for nothing (see `sampling`).
        stop: default: the model's end-of-text tokens and the length in its generation_config, or
            256 new tokens (see `stopping_after`).
        method: default: `Engine.default`. It may carry settings, as in
            "m2r2-carry:lookup=0:nodes=5".
        on_tokens: on_tokens(b, tokens) is called with the new tokens of prompt b as they are
            emitted.
        speculate: "auto" drafts wherever measurements show that it is faster, also within a text.
            It decodes without drafts, and sets `notice`, if no acceptance rate could make drafts
            faster on this machine or if drafts could change the text (below float32 with the
            model's own layers; see docs/lossless.md). "always" drafts as the method alone would.
            "never" decodes without drafts.
        mode: "lossless", or "dynamic" to let tokens leave early at a quality that `multirate
            calibrate` has stored.
        quality: for mode "dynamic": the share of tokens that must match the full model, above 0 and
            at most 1. Afterwards `guarantee` holds what calibration measured. The method
            "m2r2-carry:quality=0.99" does the same.

        Waits while another thread generates with this engine. Raises UserError for an unknown
        method, an empty prompt, one longer than the context, a token id out of range, or a quality
        that is not calibrated.
        """
        check_mode(mode, quality, speculate)
        for what, value, kind in (
            ("sampling", sampling, SamplingSettings),
            ("stop", stop, StopSettings),
            ("method", method, str),
        ):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{what} is {value!r}; accepted: a {kind.__name__}")
        if mode == "dynamic":
            method = f"{method or self.default}:quality={check_quality(quality)!r}"
        if on_tokens is not None:
            on_tokens = Modes.now().around(on_tokens)
        ids = as_lists(prompts, self._padding())
        with self._turn():
            sampling = self.sampling() if sampling is None else sampling
            stop = self.stopping_after(ids) if stop is None else stop
            return self._generate(ids, sampling, stop, method, on_tokens, speculate)

    def _padding(self) -> int | None:
        """The id that prompts are padded with, where there is one."""
        sources = (self.tokenizer, self._generation_config())
        found = (getattr(source, "pad_token_id", None) for source in sources)
        return next((token for token in found if isinstance(token, int)), None)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits for this thread's turn to generate."""
        with self._lock.held():
            if self._lock.inherited and self.experts is not None:
                raise UserError(
                    "threads of the parent process read this engine's experts; load the model "
                    "and attach in this process, or start processes with multiprocessing's spawn"
                )
            if self._generating_in == os.getpid():
                raise UserError(
                    "this engine is already generating: on_tokens or a streamer cannot start "
                    "another generation with it; attach a second engine (multirate.attach)"
                )
            self._generating_in = os.getpid()
            try:
                yield
            finally:
                self._generating_in = None

    @kernels_of_any_shape()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        stop: StopSettings,
        method: str | None,
        on_tokens: OnTokens | None,
        speculate: str,
    ) -> GenerationOutput:
        self.notice = self.guarantee = None
        self._follow_model()
        decoding = None
        if speculate != "never" and len(prompts):
            decoding = self._decoding(method or self.default)
        sampling = sampling or SamplingSettings()
        if decoding is not None and self._may_change_text(decoding.step, speculate):
            decoding = None
        if decoding is not None:
            self.guarantee = decoding.guarantee
            self._try_relative(decoding, spec.parse_variant(method or self.default)[0])
            adapts = decoding.step.adapt(self.decoder, speculate == "auto")
            if speculate == "auto" and not self._pays(decoding, adapts):
                decoding = None
        self.used = used = PLAIN if decoding is None else (method or self.default)
        if decoding is not None:
            self._say_lossy(used, decoding.step, chosen=method is not None)
        step: Step = PlainStep() if decoding is None else decoding.step
        kept = (
            self._prefix_caches.pop(used, PrefixCache())
            if len(prompts) == 1 and self.keep_bytes
            else None
        )
        output = generate(self.decoder, step, prompts, sampling, stop, on_tokens, prefix_cache=kept)
        info, limit = self.decoder.info, stop.context_limit  # the caller's own limit is no news
        own = limit is None or (info.max_positions is not None and limit >= info.max_positions)
        if own and "context" in output.finish_reasons:
            cut_off = f"cut off after {info.context}"
            self.notice = cut_off if self.notice is None else f"{self.notice}; {cut_off}"
        if decoding is not None:
            decoding.observe(output.stats)
        if kept is not None:
            self._keep(used, kept)
        return output

    def forget(self) -> None:
        """Drops the kept K/V: the next prompt is read from its first token, in the memory they
        used.
        """
        with self._lock.held():
            for kept in self._prefix_caches.values():
                kept.tokens = []

    def _follow_model(self) -> None:
        """Makes a new decoder if the model changed since the last one was made: packed weights are
        copies, and kept K/V belong to the old weights. Raises UserError if the backend can no
        longer run the model.
        """
        if not self._watch.changed():
            return
        packed, before = self.backend == "native", self.decoder.info
        self._decodings.clear()
        self._prefix_caches.clear()
        if self.experts is None:
            self.decoder = load_decoder(self.model, self._requested)
        else:
            self.experts.native = None
            self.decoder = self.experts.start(self._requested)
        self._watch.renew()
        now = self.decoder.info
        if (now.dtype, now.device) != (before.dtype, before.device):
            for accelerator in self.accelerators.values():
                accelerator.module.to(now.device, now.dtype)
        if packed and self.backend == "native":
            warnings.warn(
                "the model changed after its weights were packed; packed them again",
                Notice,
                stacklevel=3,
            )

    def _keep(self, name: str, prefix_cache: PrefixCache) -> None:
        self._prefix_caches[name] = prefix_cache
        while sum(kept.nbytes() for kept in self._prefix_caches.values()) > self.keep_bytes:
            self._prefix_caches.pop(next(iter(self._prefix_caches)))

    def _spec(self, name: str, besides: Sequence[str] = ()) -> MethodSpec:
        """The method of this engine with that name, which may carry settings. besides: other names
        that the caller accepts, for the error message.
        """
        name, _ = spec.parse_variant(name)
        if name in self.accelerators:
            return spec.find(self.accelerators[name].method)
        found = spec.known(name)
        if found is None or found.training is not None:
            raise UserError(
                f"method {name!r} cannot be used{_lacking(found)}; accepted: "
                f"{', '.join([*besides, *self.methods()])}{self._to_attach()}"
            )
        return found

    def _to_attach(self) -> str:
        """The methods that further accelerators would add, for the error message."""
        packaged = packaged_accelerators(self.model.config)
        trained = [
            name
            for name, known in spec.all_specs().items()
            if known.training is not None
            and known.role != "experts"
            and name not in self.accelerators
        ]
        ours = [name for name in trained if name in packaged]
        theirs = [name for name in trained if name not in packaged]
        sources = (
            ("from this package (-a NAME, or Engine.add in Python)", ours),
            ("of your own (-a FOLDER)", theirs),
        )
        return "".join(
            f"; with an accelerator {source}: {', '.join(names)}"
            for source, names in sources
            if names
        )

    def _decoding(self, name: str) -> _Decoding | None:
        if name not in self._decodings:
            base, settings = spec.parse_variant(name)
            accelerator = self.accelerators.get(base)
            if accelerator is not None:
                accelerator.check_fits(self.model)
            guarantee = None
            if "quality" in settings:
                quality = check_quality(settings.pop("quality"))
                guarantee = self._guaranteed(base, quality)
                if quality == 1 and not self._spec(base).lossless:
                    settings |= self._never_leaving(base)
                if guarantee is not None and settings:
                    raise UserError(
                        f"method {name!r} has other settings beside the quality; a calibration "
                        "covers only the settings it was made with, so give the quality alone"
                    )
                settings = settings if guarantee is None else guarantee.settings
            known = self._spec(base)
            if self.uses_tuned and known.tunable and name == base:
                settings = self._tuned(base)
            beside: Accelerator | SecondModel | None = accelerator
            if beside is None and known.second_model is not None:
                beside = self._second_model(known, settings)
            step = known.make_step(self.decoder, beside, settings)
            if step is None:
                return None
            # what its card says was measured on other weights
            relative = accelerator is not None and accelerator.other_weights is not None
            rates = [] if relative else _card_rates(accelerator)
            step.expect(rates)
            self._decodings[name] = _Decoding(step, OverallRates(rates), guarantee)
        return self._decodings[name]

    def _tuned(self, name: str) -> dict[str, Any]:
        """The settings that `multirate tune` stored for a method here, or {}."""
        beside = self.accelerators.get(name)
        folder, weights = (None, "") if beside is None else (beside.folder, beside.weights_sha256)
        found = tuned.find(folder, name, fingerprint(self.model), weights, self.machine)
        if found is None:
            return {}
        self._spec(name).read_settings(found.settings)
        if found.settings:
            chosen = write_variant(name, found.settings)
            say_once(f"using settings tuned for this machine on {found.date[:10]}: {chosen}")
        self.tuned_settings[name] = found.settings
        return found.settings

    @property
    def machine(self) -> str:
        """What tuned settings are stored for: the machine, the backend that runs the model on it,
        and the formats of quantised weights.
        """
        found = f"{machine_name(self.decoder.info.device)}, backend {self.backend}"
        quantised = self.backend == "native" and is_quantised(self.model)
        return f"{found}, weights {' '.join(formats(self.model))}" if quantised else found

    def spec_of(self, name: str, besides: Sequence[str] = ()) -> MethodSpec:
        """The method that a name of this engine stands for. Raises UserError for an unknown name
        and lists the accepted ones, including `besides`, which the caller accepts as well.
        """
        return self._spec(name, besides)

    def drop(self, name: str) -> None:
        """Frees a method's step and its packed weights. The next use makes them again."""
        with self._lock.held():
            self._decodings.pop(name, None)
            self._prefix_caches.pop(name, None)

    def _second_model(self, known: MethodSpec, settings: Any) -> SecondModel | None:
        """The model that a method runs beside this one, in the same dtype; loaded once."""
        assert known.second_model is not None
        name = known.second_model(known.read_settings(settings))
        if name is None:
            return None
        if name not in self._second_models:
            info = self.decoder.info
            loaded = load_model(name, str(info.dtype).removeprefix("torch."), str(info.device))
            self._second_models[name] = SecondModel(
                name, load_decoder(loaded.model, self._requested), loaded.tokenizer, self.tokenizer
            )
        return self._second_models[name]

    def _guaranteed(self, name: str, quality: float) -> Guarantee | None:
        """The calibration stored beside the accelerator for a quality; None for quality 1, which is
        lossless.
        """
        mode = self._spec(name).dynamic_mode()
        if quality == 1:
            return None
        if name not in self.accelerators:
            raise UserError(
                f"method {name} needs no training, so it has no accelerator folder to keep a "
                "calibration in; use its own settings (docs/methods/README.md) or a quality of 1"
            )
        accelerator = self.accelerators[name]
        return guarantees.find(
            accelerator.folder,
            name,
            quality,
            fingerprint(self.model),
            accelerator.weights_sha256,
            mode.gates(accelerator.module),
        )

    def _never_leaving(self, name: str) -> dict[str, Any]:
        """Settings with which a lossy method decodes exactly as the model does."""
        accelerator = self.accelerators.get(name)
        mode = self._spec(name).dynamic_mode()
        return mode.settings(None if accelerator is None else accelerator.module, None)

    def _may_change_text(self, step: Step, speculate: str) -> bool:
        """Whether to skip a lossless step because its passes have other sizes than plain decoding's
        and this decoder's results depend on that. Sets `notice`, also if the step runs anyway.
        """
        precision = self.decoder.pass_dependent
        if precision is None or not step.lossless:
            return False
        fact = (
            f"with the model's own layers in {precision}, drafts can change the text where two "
            "tokens are about equally likely"
        )
        if speculate == "auto":
            self.notice = f"decoded without drafts: {fact}; speculate=always drafts anyway"
            return True
        self.notice = f"{fact} (float32 prevents this)"
        return False

    def _say_lossy(self, name: str, step: Step, chosen: bool) -> None:
        """For a lossy method, or lossy settings, without a quality: says so in `notice` if you
        chose the method, else in a warning.
        """
        lossless = step.lossless and self._spec(name).lossless
        if lossless or "quality" in spec.parse_variant(name)[1]:
            return
        fact = f"{name} is lossy: its text may differ from the model's own"
        if chosen:
            self.notice = fact
        else:
            say_once(fact)

    def _try_relative(self, decoding: _Decoding, name: str) -> None:
        """Before the first drafts of an accelerator that was trained for other weights: measures
        how many of its drafts are accepted, and reports it.
        """
        accelerator = self.accelerators.get(name)
        if accelerator is None or accelerator.other_weights is None or name in self._tried:
            return
        self._tried.add(name)
        fact = accelerator.other_weights
        if self._spec(name).role == "depth":
            say_once(f"{fact}: more of its tokens may differ from the model's own")
            return
        own = "; the text stays the model's own" if decoding.step.lossless else ""
        if self.tokenizer is None:
            say_once(f"{fact}: fewer of its drafts may be accepted{own}")
            return
        seen = try_drafts(
            self.decoder, decoding.step, [self.tokenizer(text)["input_ids"] for text in TEXTS]
        )
        decoding.observe(seen)
        say_once(
            f"{fact}: on {seen.first_tokens} short texts it gives {seen.tokens_per_step:.2f} "
            f"tokens per step (without drafts: 1.00){own}"
        )

    def _pays(self, decoding: _Decoding, adapts: bool) -> bool:
        """Whether to start with drafts. A step that adapts finds out by itself, unless no
        acceptance rate is high enough and the method has no text lookup, which may be faster where
        its own drafts cannot be.
        """
        rates = decoding.acceptance.rates()
        if rates is None:
            return True
        costs = decoding.step.costs(self.decoder)
        if costs is None:
            return True
        verdict = costs.verdict(rates)
        finds_out = verdict.break_even is not None or decoding.step.looks_up
        if verdict.pays or (adapts and finds_out):
            return True
        self.notice = verdict.message
        return False


def _lacking(known: MethodSpec | None) -> str:
    """Why a known method cannot be used without an accelerator."""
    if known is None:
        return ""
    if known.role == "experts":
        return " (it predicts experts and does not decode text)"
    return " (it needs a trained accelerator, and none is attached)"


def eos_token_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a text, from the model's generation config, else its config, else the
    tokenizer.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        try:
            found = [operator.index(token) for token in np.atleast_1d(np.asarray(ids))]
        except (TypeError, ValueError):
            raise UserError(
                f"eos_token_id of the {type(source).__name__} is {reprlib.repr(ids)}; accepted: "
                "a token id, or a list of token ids"
            ) from None
        return tuple(token for token in found if token >= 0)  # a negative one is never met
    return ()


def _card_rates(accelerator: Accelerator | None) -> list[float]:
    """Top-1 agreement by draft step at the first gate, as measured in training. The last value
    stands for deeper steps.

    A step's agreement is measured on drafts whose predecessors need not agree, so it is the
    conditional acceptance at that depth.
    """
    terms = (accelerator.results.get("terms") or []) if accelerator is not None else []
    gates = [term["gate"] for term in terms]
    rates = [
        float(t["agreement"])
        for t in sorted(terms, key=lambda t: t["draft_step"])
        if t["gate"] == min(gates)
    ]
    return [*rates, *[rates[-1]] * (8 - len(rates))] if rates else []
