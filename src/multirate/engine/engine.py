"""The engine: one model, decoded by any of its methods."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.prompts import as_lists
from multirate.decoding.results import GenerationOutput, OnTokens
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine.arguments import check_mode
from multirate.engine.defaults import GenerationDefaults
from multirate.engine.method_steps import MethodStep, MethodSteps
from multirate.errors import Notice, UserError, say_once
from multirate.generation_lock import GenerationLock, lock_of
from multirate.guarantee import Guarantee, check_quality
from multirate.loading.hub import resolve_accelerator
from multirate.methods import spec
from multirate.methods.spec import PLAIN, MethodSpec
from multirate.runtime.attention_kernels import kernels_of_any_shape
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.quantised import formats_line, is_quantised
from multirate.runtime.weight_watch import WeightWatch
from multirate.torch_modes import Modes
from multirate.training.checkpoint import Accelerator

if TYPE_CHECKING:
    from multirate.experts.model import OffloadedExperts

KEPT_BYTES = 256 << 20
"""Default of `Engine.keep_bytes`."""


class Engine(GenerationDefaults):
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
        self._steps = MethodSteps(model, decoder, tokenizer, backend)
        self.accelerators = self._steps.accelerators
        self.tuned_settings = self._steps.tuned_settings
        self.default = spec.recommended(trained=False) if self.backend == "native" else PLAIN
        self.notice: str | None = None
        self.guarantee: Guarantee | None = None
        self.used = ""
        self.keep_bytes = KEPT_BYTES
        self.experts: OffloadedExperts | None = None
        self._lock = lock_of(model) if decoder.runs_the_model else GenerationLock()
        self._generating_in: int | None = None  # the process; a forked one inherits its parent's
        self._requested = backend
        self._watch = WeightWatch(model)
        self._prefix_caches: dict[str, PrefixCache] = {}  # the newest last

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "an engine cannot be copied or pickled because it holds packed weights and locks; "
            "copy the model and call multirate.attach on the copy"
        )

    @property
    def backend(self) -> str:
        """ "native" or "hf"."""
        return self._steps.backend

    @property
    def machine(self) -> str:
        return self._steps.machine

    @property
    def uses_tuned(self) -> bool:
        return self._steps.uses_tuned

    @uses_tuned.setter
    def uses_tuned(self, on: bool) -> None:
        self._steps.uses_tuned = on

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
        self._steps.add(accelerator, name)
        for variant in [v for v in self._prefix_caches if spec.parse_variant(v)[0] == name]:
            del self._prefix_caches[variant]
        if self.default in (PLAIN, spec.recommended(trained=False)):
            self.default = name
        return name

    def methods(self) -> list[str]:
        """The method names that `generate` accepts: the attached accelerators, and the methods that
        need no training.
        """
        return self._steps.names()

    def spec_of(self, name: str, besides: Sequence[str] = ()) -> MethodSpec:
        """The method that a name of this engine stands for, which may carry settings. Raises
        UserError for an unknown name and lists the accepted ones, including `besides`, which the
        caller accepts as well.
        """
        return self._steps.spec_of(name, besides)

    def lossless(self, method: str) -> bool:
        """Whether a method's output is the base model's own."""
        with self._lock.held():
            decoding = self._steps.of(method)
        return self.spec_of(method).lossless and (decoding is None or decoding.step.lossless)

    def guarantee_of(self, method: str) -> Guarantee | None:
        """The calibration of a method name with a quality; None for a lossless method. Raises
        UserError if none is stored.
        """
        with self._lock.held():
            decoding = self._steps.of(method)
        return None if decoding is None else decoding.guarantee

    def costs(self, method: str) -> CostModel | None:
        """Measured times of a plain step, a draft step and a verification for this method; None if
        it does not draft.
        """
        with self._lock.held():
            decoding = self._steps.of(method)
            return None if decoding is None else decoding.step.costs(self.decoder)

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

    @contextmanager
    def _turn(self) -> Iterator[None]:
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
        decoding = self._decoding(method, speculate if len(prompts) else "never")
        used = self.used
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

    def _decoding(self, method: str | None, speculate: str) -> MethodStep | None:
        """How this method decodes; None: without drafts. Sets `used` and `notice`."""
        self.notice = self.guarantee = None
        self._follow_model()
        decoding = None
        if speculate != "never":
            decoding = self._steps.of(method or self.default)
        if decoding is not None and self._may_change_text(decoding.step, speculate):
            decoding = None
        if decoding is not None:
            self.guarantee = decoding.guarantee
            self._steps.try_relative(decoding, spec.parse_variant(method or self.default)[0])
            adapts = decoding.step.adapt(self.decoder, speculate == "auto")
            if speculate == "auto" and not self._pays(decoding, adapts):
                decoding = None
        self.used = PLAIN if decoding is None else (method or self.default)
        if decoding is not None:
            self._say_lossy(self.used, decoding.step, chosen=method is not None)
        return decoding

    @contextmanager
    def stepping(
        self, method: str | None = None, speculate: str = "auto"
    ) -> Iterator[tuple[Decoder, Step]]:
        """The decoder and a step, for code that runs its steps itself (decoding/batch.py); other
        threads wait until it is done. method, speculate: as `generate`. Raises UserError for a
        method that several requests cannot share.
        """
        check_mode("lossless", None, speculate)
        with self._turn(), kernels_of_any_shape():
            decoding = self._decoding(method, speculate)
            if decoding is not None and not decoding.step.joins:
                name = method or self.default
                raise UserError(
                    f"method {name!r} cannot serve requests that come and go; accepted: "
                    f"{', '.join(self._joining())}"
                )
            yield self.decoder, PlainStep() if decoding is None else decoding.step

    def _joining(self) -> list[str]:
        """The methods whose steps sequences can join."""
        found = list[str]()
        for name in self.methods():
            with suppress(UserError):  # it needs settings, such as a draft model
                one = self._steps.of(name)
                if one is None or one.step.joins:
                    found.append(name)
        return found

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
        self._prefix_caches.clear()
        if self.experts is None:
            self.decoder = load_decoder(self.model, self._requested)
        else:
            self.experts.native = None
            self.decoder = self.experts.start(self._requested)
        self._steps.renew(self.decoder)
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

    def drop(self, name: str) -> None:
        """Frees a method's step and its packed weights. The next use makes them again."""
        with self._lock.held():
            self._steps.drop(name)
            self._prefix_caches.pop(name, None)

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
        lossless = step.lossless and self.spec_of(name).lossless
        if lossless or "quality" in spec.parse_variant(name)[1]:
            return
        fact = f"{name} is lossy: its text may differ from the model's own"
        if chosen:
            self.notice = fact
        else:
            say_once(fact)

    def _pays(self, decoding: MethodStep, adapts: bool) -> bool:
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
