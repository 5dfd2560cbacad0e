"""How an engine's methods decode: their accelerators, settings and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multirate import guarantee as guarantees
from multirate import tuned
from multirate.decoding.results import DecodeStats
from multirate.decoding.speculate.acceptance_statistics import OverallRates
from multirate.decoding.speculate.trial import TEXTS, try_drafts
from multirate.decoding.step import Step
from multirate.errors import UserError, say_once
from multirate.guarantee import Guarantee, check_quality
from multirate.loading.hub import load_model, packaged_accelerators
from multirate.methods import spec
from multirate.methods.spec import MethodSpec, SecondModel, write_variant
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.machine import machine_name
from multirate.runtime.quantised import formats, is_quantised
from multirate.training.checkpoint import Accelerator
from multirate.training.fingerprint import fingerprint


@dataclass
class MethodStep:
    """A method's step, the acceptance rates of its drafts so far, and in dynamic mode its
    calibration.
    """

    step: Step
    acceptance: OverallRates
    guarantee: Guarantee | None = None

    def observe(self, stats: DecodeStats) -> None:
        self.acceptance.observe(stats.sequence_steps, stats.drafted_levels, stats.accepted)


class MethodSteps:
    """Makes and keeps the step of each method for one model.

    accelerators: by name. uses_tuned, tuned_settings: as the engine's. backend: what was asked for.
    """

    def __init__(self, model: Any, decoder: Decoder, tokenizer: Any, backend: str) -> None:
        self.model, self.decoder, self.tokenizer = model, decoder, tokenizer
        self.accelerators: dict[str, Accelerator] = {}
        self.uses_tuned = False
        self.tuned_settings: dict[str, dict[str, Any]] = {}
        self._requested = backend
        self._made: dict[str, MethodStep] = {}
        self._second_models: dict[str, SecondModel] = {}
        self._tried: set[str] = set()  # accelerators for a relative of this model

    @property
    def backend(self) -> str:
        """ "native" or "hf"."""
        return self.decoder.backend

    @property
    def machine(self) -> str:
        """What tuned settings are stored for: the machine, the backend that runs the model on it,
        and the formats of quantised weights.
        """
        found = f"{machine_name(self.decoder.info.device)}, backend {self.backend}"
        quantised = self.backend == "native" and is_quantised(self.model)
        return f"{found}, weights {' '.join(formats(self.model))}" if quantised else found

    def renew(self, decoder: Decoder) -> None:
        """The model changed: steps are made anew, for this decoder."""
        self._made.clear()
        self.decoder = decoder

    def add(self, accelerator: Accelerator, name: str) -> None:
        """Steps of this name are made anew, with this accelerator."""
        self.accelerators[name] = accelerator
        self._tried.discard(name)
        for variant in [v for v in self._made if spec.parse_variant(v)[0] == name]:
            del self._made[variant]

    def drop(self, name: str) -> None:
        """Frees a method's step and its packed weights."""
        self._made.pop(name, None)

    def names(self) -> list[str]:
        """The attached accelerators, and the methods that need no training."""
        untrained = [name for name, known in spec.all_specs().items() if known.training is None]
        return [*self.accelerators, *(name for name in untrained if name not in self.accelerators)]

    def spec_of(self, name: str, besides: Sequence[str] = ()) -> MethodSpec:
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
                f"{', '.join([*besides, *self.names()])}{self._to_attach()}"
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

    def of(self, name: str) -> MethodStep | None:
        if name not in self._made:
            base, settings = spec.parse_variant(name)
            accelerator = self.accelerators.get(base)
            if accelerator is not None:
                accelerator.check_fits(self.model)
            guarantee = None
            if "quality" in settings:
                quality = check_quality(settings.pop("quality"))
                guarantee = self._guaranteed(base, quality)
                if quality == 1 and not self.spec_of(base).lossless:
                    settings |= self._never_leaving(base)
                if guarantee is not None and settings:
                    raise UserError(
                        f"method {name!r} has other settings beside the quality; a calibration "
                        "covers only the settings it was made with, so give the quality alone"
                    )
                settings = settings if guarantee is None else guarantee.settings
            known = self.spec_of(base)
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
            self._made[name] = MethodStep(step, OverallRates(rates), guarantee)
        return self._made[name]

    def _tuned(self, name: str) -> dict[str, Any]:
        """The settings that `multirate tune` stored for a method here, or {}."""
        beside = self.accelerators.get(name)
        folder, weights = (None, "") if beside is None else (beside.folder, beside.weights_sha256)
        found = tuned.find(folder, name, fingerprint(self.model), weights, self.machine)
        if found is None:
            return {}
        self.spec_of(name).read_settings(found.settings)
        if found.settings:
            chosen = write_variant(name, found.settings)
            say_once(f"using settings tuned for this machine on {found.date[:10]}: {chosen}")
        self.tuned_settings[name] = found.settings
        return found.settings

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
        mode = self.spec_of(name).dynamic_mode()
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
        mode = self.spec_of(name).dynamic_mode()
        return mode.settings(None if accelerator is None else accelerator.module, None)

    def try_relative(self, decoding: MethodStep, name: str) -> None:
        """Before the first drafts of an accelerator that was trained for other weights: measures
        how many of its drafts are accepted, and reports it.
        """
        accelerator = self.accelerators.get(name)
        if accelerator is None or accelerator.other_weights is None or name in self._tried:
            return
        self._tried.add(name)
        fact = accelerator.other_weights
        if self.spec_of(name).role == "depth":
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


def _lacking(known: MethodSpec | None) -> str:
    """Why a known method cannot be used without an accelerator."""
    if known is None:
        return ""
    if known.role == "experts":
        return " (it predicts experts and does not decode text)"
    return " (it needs a trained accelerator, and none is attached)"


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
