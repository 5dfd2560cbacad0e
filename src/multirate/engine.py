"""A model made ready to decode, plainly or with an accelerator: `attach`, then `Engine.generate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multirate.decoding.acceptance_statistics import OverallRates
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.results import DecodeStats, GenerationOutput, OnTokens
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.hub import LoadedModel, load_model, load_offloaded, resolve_accelerator
from multirate.methods import registry
from multirate.methods.m2r2.config import PRESETS
from multirate.methods.trained import EXPERTS
from multirate.model.decoder import Decoder, load_decoder
from multirate.model.hf.decoder import HFDecoder
from multirate.training.checkpoint import Accelerator

if TYPE_CHECKING:
    from multirate.experts.model import OffloadedExperts

PLAIN = "autoregressive"
TRAINED = (*PRESETS, "kangaroo")
SPECULATE = ("auto", "always", "never")
KEPT_BYTES = 256 << 20  # K/V of finished generations kept for a conversation's next turn, all methods together


def attach(
    model: Any,
    accelerator: str | os.PathLike[str] | Accelerator | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    experts: str | os.PathLike[str] | None = None,
    expert_memory: str | int | None = None,
    expert_policy: str | None = None,
    expert_predictor: str | os.PathLike[str] | None = None,
) -> Engine:
    """An engine for a causal LM of transformers (or its folder, hub id, or what hub.load_model gave), never changed.

    accelerator: a trained one, its folder or hub id, or the name of an embedded one; None: plain decoding and the
    methods that need no training. backend: "auto", "hf" (the model's own layers) or "native" (packed bf16 weights).
    tokenizer: needed with stop strings only.
    experts: for a mixture of experts named by folder or hub id, the store (`multirate pack`) that its experts are read
    from as they are needed. For it, or a model that `offload` gave: expert_memory: how much of them is held, such as
    "2GB" (default: all); expert_policy: see experts/arms.py (default: aot); expert_predictor: what `train --objective
    experts` made, a folder or hub id.
    Raises UserError with the reason for what cannot be used.
    """
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        model = load_model(name) if experts is None else load_offloaded(name, experts)
    elif experts is not None:
        raise UserError("experts=DIR needs the model's folder or hub id, not a loaded model")
    from multirate.experts.model import experts_on_disk

    if isinstance(model, LoadedModel):
        model, tokenizer = model.model, tokenizer or model.tokenizer
    offloaded = experts_on_disk(model)
    if offloaded is None:
        engine = Engine(model, load_decoder(model, backend), tokenizer)
    else:
        if expert_predictor is not None:
            offloaded.add(expert_predictor)
        engine = Engine(model, offloaded.start(backend, expert_policy, expert_memory), tokenizer)
        engine.experts = offloaded
    if accelerator is not None:
        engine.add(accelerator)
    return engine


@dataclass
class _Speculation:
    """A speculative step and how well its drafts have been accepted so far."""

    step: SpeculativeStep
    acceptance: OverallRates

    def observe(self, stats: DecodeStats) -> None:
        self.acceptance.observe(stats.sequence_steps, stats.drafted_levels, stats.accepted)


class Engine:
    """One model, its decoder, and any number of accelerators by name.

    notice: what the user should know about the last call (that speculation does not pay here, with the numbers), else
    None. default: the method that `generate` uses when none is named. experts: where they are read from, if on disk.
    keep_bytes: the last generation of each method stays in memory, up to so many bytes of K/V in all (newest first), so
    that a prompt which begins with the same tokens, as a conversation's next turn does, reads only what is new. 0 keeps
    none; `forget` drops them.
    """

    def __init__(self, model: Any, decoder: Decoder, tokenizer: Any = None) -> None:
        self.model = model
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.accelerators: dict[str, Accelerator] = {}
        self.default = PLAIN
        self.notice: str | None = None
        self.keep_bytes = KEPT_BYTES
        self.experts: OffloadedExperts | None = None
        self._speculations: dict[str, _Speculation] = {}
        self._prefix_caches: dict[str, PrefixCache] = {}  # the newest last

    @property
    def backend(self) -> str:
        """ "native" or "hf"."""
        return "hf" if isinstance(self.decoder, HFDecoder) else "native"

    def add(self, accelerator: str | os.PathLike[str] | Accelerator, name: str | None = None) -> str:
        """Adds an accelerator under `name` (default: its method's) → that name. The first that drafts becomes the
        default; one that names experts is used by the policies accelerated and aot."""
        if not isinstance(accelerator, Accelerator):
            accelerator = Accelerator.from_pretrained(resolve_accelerator(accelerator), self.model)
        name = name or accelerator.method
        if accelerator.method == EXPERTS:
            if self.experts is None:
                raise UserError("this accelerator names experts, and the model's are all in memory: it is for models "
                                "with experts on disk (experts=DIR, expert_predictor)")  # fmt: skip
            self.experts.add(accelerator)
            self.experts.use_policy(self.experts.policy, self.experts.memory)
            return name
        if ":" in name:
            raise UserError(f"an accelerator cannot be named {name!r}: what follows a ':' are a method's settings")
        if name in (PLAIN, "generate"):
            raise UserError(f"an accelerator cannot be named {name!r}: that is the name of a baseline")
        self.accelerators[name] = accelerator
        for known in (self._speculations, self._prefix_caches):
            for variant in [v for v in known if registry.parse_variant(v)[0] == name]:
                del known[variant]
        if self.default == PLAIN:
            self.default = name
        return name

    def methods(self) -> list[str]:
        """The method names that `generate` accepts: the attached accelerators' and those that need no training."""
        trained = set(TRAINED)
        return [*self.accelerators, *(m for m in registry.methods() if m not in trained and m not in self.accelerators)]

    def lossless(self, method: str) -> bool:
        """Whether a method's output is the base model's own."""
        return registry.method(self._registered(method)).lossless

    def stopping(self, max_new_tokens: int | None = 256, stop_strings: Sequence[str] = ()) -> StopSettings:
        """Stop settings with the model's EOS ids, and the tokenizer for stop strings."""
        return StopSettings(
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids(self.model, self.tokenizer),
            stop_strings=tuple(stop_strings),
            decode=None if self.tokenizer is None else self.tokenizer.decode,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings | None = None,
        stop: StopSettings | None = None,
        method: str | None = None,
        on_tokens: OnTokens | None = None,
        speculate: str = "auto",
    ) -> GenerationOutput:
        """Continues every prompt (token ids). Defaults: greedy, 256 new tokens or the model's EOS, the first
        accelerator's method.

        speculate: "auto" decodes plainly, and says so in `notice`, where measured costs and acceptance show that
        drafts do not pay on this machine; "always" drafts all the same; "never" decodes plainly.
        method may carry settings of its drafts, as in "m2r2-carry:lookup=0:nodes=5".
        on_tokens(b, tokens) is called with the new tokens of prompt b as they are emitted.
        Raises UserError for an unknown method, an empty prompt, one longer than the context, or an id out of range.
        """
        if speculate not in SPECULATE:
            raise UserError(f"speculate is {speculate!r}; accepted: {', '.join(SPECULATE)}")
        self.notice = None
        stop = stop or self.stopping()
        speculation = self._speculation(method or self.default) if speculate != "never" else None
        if speculation is not None and speculate == "auto" and not self._pays(speculation):
            speculation = None
        used = PLAIN if speculation is None else (method or self.default)
        step: Step = PlainStep() if speculation is None else speculation.step
        kept = self._prefix_caches.pop(used, PrefixCache()) if len(prompts) == 1 and self.keep_bytes else None
        output = generate(self.decoder, step, prompts, sampling, stop, on_tokens, prefix_cache=kept)
        if speculation is not None:
            speculation.observe(output.stats)
        if kept is not None:
            self._keep(used, kept)
        return output

    def forget(self) -> None:
        """Drops the kept prefixes: the next prompt is read from its first token (in the memory they had)."""
        for kept in self._prefix_caches.values():
            kept.tokens = []

    def _keep(self, name: str, prefix_cache: PrefixCache) -> None:
        self._prefix_caches[name] = prefix_cache
        while sum(kept.nbytes() for kept in self._prefix_caches.values()) > self.keep_bytes:
            self._prefix_caches.pop(next(iter(self._prefix_caches)))

    def _registered(self, name: str) -> str:
        """The registry's name for a method of this engine, whose name may carry settings."""
        name, _ = registry.parse_variant(name)
        if name in self.accelerators:
            return self.accelerators[name].method
        if name not in self.methods():
            known = ", ".join(self.methods())
            hint = " (it needs a trained accelerator, and none is attached)" if name in TRAINED else ""
            raise UserError(f"method {name!r} cannot be used{hint}; accepted: {known}")
        return name

    def _speculation(self, name: str) -> _Speculation | None:
        if name not in self._speculations:
            base, settings = registry.parse_variant(name)
            accelerator = self.accelerators.get(base)
            drafter = registry.method(self._registered(base)).drafter(self.decoder, accelerator, settings or None)
            if drafter is None:
                return None
            self._speculations[name] = _Speculation(
                SpeculativeStep(drafter), OverallRates(_card_rates(accelerator))
            )
        return self._speculations[name]

    def _pays(self, speculation: _Speculation) -> bool:
        rates = speculation.acceptance.rates()
        if rates is None:
            return True
        verdict = speculation.step.costs(self.decoder).verdict(rates)
        if not verdict.pays:
            self.notice = verdict.message
        return verdict.pays


def eos_token_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a text: the model's generation config, else its config, else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(int(token) for token in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return ()


def _card_rates(accelerator: Accelerator | None) -> list[float]:
    """Top-1 agreement by draft step at the first gate, as measured in training; the last value stands for deeper steps.

    A step's agreement is of drafts whose predecessors need not agree, so it is the conditional acceptance of a depth.
    """
    terms = (accelerator.results.get("terms") or []) if accelerator is not None else []
    gates = [term["gate"] for term in terms]
    rates = [float(t["agreement"]) for t in sorted(terms, key=lambda t: t["draft_step"]) if t["gate"] == min(gates)]
    return [*rates, *[rates[-1]] * (8 - len(rates))] if rates else []
