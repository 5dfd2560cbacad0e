"""What a decoding method is to the rest of the package: one `MethodSpec`, registered by its folder.

Engine, training, benchmarks, model cards and tables use this registry; none of them names a method.
A folder `methods/<name>/` registers in its `spec.py`. An installed package registers through the
entry point group `multirate.methods`, whose value is a module that calls `register`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import pkgutil
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multirate.decoding.speculate.drafter import Drafter
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.errors import UserError
from multirate.methods._shared.branch_tracing import BranchTracer
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.objective import Objective
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.runtime.decoder import Decoder
from multirate.torch_modes import building

PLAIN = "autoregressive"
"""Plain decoding, one token per pass: the baseline for answers and speedups."""
_ENTRY_POINTS = "multirate.methods"
_PACKAGES = ("multirate.methods", "multirate.lab.depth_baselines")
_SHARED_FOLDER = "_shared"


@dataclass(frozen=True)
class Published:
    """A layout in which other projects publish a method's accelerators. All three functions raise
    UserError naming file and field.
    """

    found: Callable[[Path], bool]
    """found(folder): whether the folder holds such an accelerator."""
    read: Callable[[Path, BaseShape, Tensor], tuple[MethodConfig, dict[str, Tensor]]]
    """read(folder, base, input embeddings [V, d]): its config, and the tensors of the method's
    modules.
    """
    write: Callable[[Path, Any, dict[str, Any]], None]
    """write(folder, modules, the base's entry of accelerator.json)."""


Start = Callable[[Teacher, Any, Iterable[tuple[Tensor, Tensor, Any]]], None]


@dataclass(frozen=True)
class Training:
    config: type[MethodConfig]
    """Dataclass of its config, stored as JSON in accelerator.json."""
    module: type[nn.Module]
    """Class of its modules, built as module(config, base)."""
    objective: Callable[..., Objective]
    """objective(teacher, modules): the `Objective` to minimise
    (methods/_shared/objective.py).
    """
    configure: Callable[..., MethodConfig] | None = None
    """configure(base, **options): the config's defaults for a base. None: `config.for_base`."""
    start: Start | None = None
    """start(teacher, modules, batches of (ids, mask, known)): initialises modules that do not start
    at random or at zero.
    """
    added: Mapping[str, Start] = field(default_factory=dict)
    """Parts of the modules that a run may add to an accelerator it starts from, because they change
    nothing at first. Each has a function that initialises the rest, called like ``start``. A run
    may also leave them out.
    """
    published: Published | None = None
    """Another layout that can be read and written."""

    def config_for(self, base: BaseShape, **options: Any) -> Any:
        """The config for a base model. Raises UserError for options that cannot be used."""
        make: Any = self.configure or self.config.for_base
        return make(base, **options)

    def build(self, config: Any, base: BaseShape, device: str = "cpu") -> Any:
        """Untrained float32 modules for this config and base, on a device."""
        make: Any = self.module
        with building(torch.float32, device):
            return make(config, base)


PROBABILITIES = tuple(1 / (1 + math.exp(-step / 2)) for step in range(14, -3, -1))
"""A `DynamicMode.path` for scores that are probabilities: logits from 7 down to -1. It goes below
one half because some scores come from classes that training balanced; where most tokens agree, a
lower score may be safe.
"""


@dataclass(frozen=True)
class DynamicMode:
    """How a method's tokens leave early, and what `multirate calibrate` may choose."""

    gates: Callable[[Any], tuple[int, ...]]
    """gates(module): the layers after which tokens may leave."""
    settings: Callable[[Any, float | None], dict[str, Any]]
    """settings(module, threshold): method settings with which a token leaves if a gate's score is
    at least the threshold; with None, no token leaves. `module` is None for a method without
    training.
    """
    path: tuple[float, ...]
    """The thresholds that calibration tries, from the most cautious to the boldest."""
    others: tuple[DynamicMode, ...] = ()
    """Dials of the same method with another score, each with its own path, which a comparison of
    dynamic modes measures as well.
    """

    @property
    def dials(self) -> tuple[DynamicMode, ...]:
        return self, *self.others

    def along(self, count: int | None = None) -> tuple[float, ...]:
        """`count` thresholds spread evenly over the path, including both ends; None: all."""
        last = len(self.path) - 1
        if count is None or count > last:
            return self.path
        if count < 2:
            return self.path[:1]
        return tuple(self.path[round(i * last / (count - 1))] for i in range(count))


@dataclass(frozen=True)
class SecondModel:
    """A model that a method runs beside the base model."""

    name: str
    """As the user called it."""
    decoder: Decoder
    tokenizer: Any
    base_tokenizer: Any


@dataclass(frozen=True)
class MethodSpec:
    name: str
    """As users write it."""
    title: str
    """For tables and model cards."""
    summary: str
    """One line of help, which follows the method's name."""
    plain_name: str = ""
    """Its name in the demo's table, in plain words. Empty: the demo leaves its accelerator out."""
    drafter: Callable[[Decoder, Any, Any], Drafter | None] | None = None
    """drafter(decoder, module, settings): a Drafter; None: plain decoding. `module` is None for
    methods without training.
    """
    step: Callable[[Decoder, Any, Any], Step] | None = None
    """step(decoder, module, settings): the decoding step, for methods that do not always use a
    SpeculativeStep over the drafter, such as a DynamicDepthStep.
    """
    settings: type[MethodConfig] | None = None
    """Dataclass of what a user may set when decoding."""
    training: Training | None = None
    """How its accelerator is trained. None: it needs no training."""
    dynamic: DynamicMode | None = None
    """Its dynamic mode, if any; lossy, whatever `lossless` says."""
    tracer: Callable[[Decoder, Any], BranchTracer] | None = None
    """tracer(decoder, module): exposes its accelerated residual stream, if it has one."""
    second_model: Callable[[Any], str | None] | None = None
    """second_model(settings): the name of a model that runs beside the base model, or None. drafter
    and step then receive it, a SecondModel, as their module.
    """
    tunable: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The settings that decide its speed on a machine, each with the values that `multirate tune`
    tries, in all combinations.
    """
    role: Literal["drafter", "depth", "experts"] = "drafter"
    """"drafter" proposes tokens that the base model verifies; "depth" decides how many layers a
    token gets; "experts" predicts the experts of a mixture and decodes no text.
    """
    lossless: bool = True
    """Whether the output is the base model's own."""
    recommended: bool = False
    """Whether it is the default of its role."""
    yardstick: bool = False
    """Whether `multirate tune` also measures it beside other methods: it needs no training and is
    hard to beat.
    """

    def read_settings(self, values: Any = None) -> Any:
        """The settings, from None (defaults), a mapping of fields, or an instance. Raises UserError
        for anything else.
        """
        if self.settings is None:
            if values:
                raise UserError(f"method {self.name} has no settings, but {values!r} was given")
            return None
        if isinstance(values, self.settings):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise UserError(
                f"settings of method {self.name} are {values!r}; accepted: a mapping of "
                f"{', '.join(self.settings.names())}"
            )
        for name in values or {}:
            if name not in self.settings.names():
                raise UserError(
                    f"method {self.name} has no setting {name!r}; "
                    f"accepted: {', '.join(self.settings.names())}"
                )
        return self.settings(**(values or {}))

    def make_step(
        self, decoder: Decoder, accelerator: Any = None, settings: Any = None
    ) -> Step | None:
        """The step that decodes with this method; None: plain decoding.

        accelerator: a loaded one, or its module. Raises UserError for settings or an accelerator
        that cannot be used.
        """
        if self.step is not None:
            return self.step(decoder, self._module(accelerator), self.read_settings(settings))
        drafter = self.make_drafter(decoder, accelerator, settings)
        return None if drafter is None else SpeculativeStep(drafter)

    def make_drafter(
        self, decoder: Decoder, accelerator: Any = None, settings: Any = None
    ) -> Drafter | None:
        """This method's drafter; None: plain decoding. Arguments and errors as in `make_step`."""
        if self.drafter is None:
            raise UserError(f"method {self.name} does not draft; it {self.summary}")
        return self.drafter(decoder, self._module(accelerator), self.read_settings(settings))

    def _module(self, accelerator: Any) -> Any:
        module = getattr(accelerator, "module", accelerator)
        if self.training is not None and not isinstance(module, self.training.module):
            given = getattr(accelerator, "method", "none")
            raise UserError(
                f"method {self.name} needs an accelerator trained with --method {self.name} "
                f"(multirate train); given: {given}"
            )
        return module

    def dynamic_mode(self) -> DynamicMode:
        """Its dynamic mode. Raises UserError if it has none."""
        if self.dynamic is None:
            raise UserError(
                f"method {self.name} has no dynamic mode; accepted: an accelerator of "
                f"{', '.join(dynamic_methods(trained=True))}"
            )
        return self.dynamic


_SPECS: dict[str, MethodSpec] = {}


def register(spec: MethodSpec) -> MethodSpec:
    """Registers a method under its name. Raises ValueError if the name is taken."""
    if spec.name in _SPECS:
        raise ValueError(f"method {spec.name} is registered twice")
    _SPECS[spec.name] = spec
    return spec


def all_specs() -> dict[str, MethodSpec]:
    """All registered methods, sorted by name."""
    for package in _PACKAGES:
        for folder in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if folder.ispkg and folder.name != _SHARED_FOLDER:
                importlib.import_module(f"{package}.{folder.name}.spec")
    for point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        point.load()
    return dict(sorted(_SPECS.items()))


def find(name: str) -> MethodSpec:
    """The method called `name`. Raises UserError listing the accepted names."""
    found = known(name)
    if found is None:
        raise UserError(f"method {name!r} is unknown; accepted: {', '.join(all_specs())}")
    return found


def known(name: str) -> MethodSpec | None:
    """The method called `name`, or None. Searches for methods only if the name is new, because
    every generation calls this.
    """
    return _SPECS.get(name) or all_specs().get(name)


def trainable() -> list[str]:
    """The names that `multirate train --method` accepts."""
    return [name for name, spec in all_specs().items() if spec.training is not None]


def dynamic_methods(trained: bool) -> list[str]:
    """The names of the methods that have a dynamic mode, with or without training."""
    return [
        name
        for name, spec in all_specs().items()
        if spec.dynamic is not None and (spec.training is not None) == trained
    ]


def untrained_drafters() -> list[str]:
    """The names of the lossless methods that draft without an accelerator."""
    return [
        name
        for name, spec in all_specs().items()
        if spec.training is None and spec.role == "drafter" and spec.lossless and name != PLAIN
    ]


def joined_variant(name: str, spec: MethodSpec) -> str | None:
    """The method's name with the setting that combines its drafts with suffix-automaton lookup
    (`lookup=sam`); None if it has none or needs a second model.
    """
    if spec.settings is None or spec.second_model or "lookup" not in spec.settings.names():
        return None
    return write_variant(name, {"lookup": "sam"})


def find_training(name: str) -> Training:
    """How the method called `name` is trained. Raises UserError for a method that is unknown or not
    trained.
    """
    spec = all_specs().get(name)
    if spec is None or spec.training is None:
        raise UserError(
            f"method {reprlib.repr(name)} cannot be trained; accepted: {', '.join(trainable())}"
        )
    return spec.training


def recommended(role: str = "drafter", trained: bool = True) -> str:
    """The default method of a role, with or without training."""
    return next(
        name
        for name, spec in all_specs().items()
        if spec.recommended and spec.role == role and (spec.training is not None) == trained
    )


def parse_variant(name: str) -> tuple[str, dict[str, Any]]:
    """A method's name with settings: "NAME:nodes=5" → ("NAME", {"nodes": 5}). Raises UserError
    without "=".
    """
    base, *parts = name.split(":")
    return base, parse_settings(parts, f"in method {name!r},")


def write_variant(name: str, settings: Mapping[str, Any]) -> str:
    """The name that `parse_variant` reads as this method with these settings."""

    def written(value: Any) -> str:
        text = json.dumps(value, separators=(",", ":"))
        word = isinstance(value, str) and parse_settings([f"x={value}"], "")["x"] == value
        return value if word else text

    return ":".join([name, *(f"{k}={written(v)}" for k, v in settings.items())])


def parse_settings(given: Sequence[str], where: str) -> dict[str, Any]:
    """["nodes=5", "gates=[6]", "exit_score=arla"] → values, read as JSON or else as words. Raises
    UserError, starting with `where`.
    """
    values: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UserError(f"{where} {text!r} is not NAME=VALUE")
        if name in values:
            raise UserError(f"{where} {name} is given twice")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value  # a word, such as mlp_adapter=lora
    return values
