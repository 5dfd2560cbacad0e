"""Options of the commands that generate text, and the code behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.errors import UserError, say_once

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.results import GenerationOutput
    from multirate.engine import Engine


ENDINGS = {
    "eos": "ended by the model",
    "stop_string": "ended at a stop text",
    "length": "ended at the token limit",
    "context": "ended at the context limit",
}


@dataclass(frozen=True)
class Sampling:
    """Fields of SamplingSettings. None: from the model's generation_config."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy; above 0 samples (default: from the model's generation_config, else "
            "greedy)."
        ),
    ] = None
    top_k: Annotated[
        int | None, options.sampling(help="Sample from the k most probable tokens; 0: all.")
    ] = None
    top_p: Annotated[
        float | None,
        options.sampling(help="Sample from the smallest set with this total probability; 1: all."),
    ] = None
    min_p: Annotated[
        float | None,
        options.sampling(help="Drop tokens below this fraction of the top token's probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        options.sampling(help="Above 1: makes tokens that already occurred less likely."),
    ] = None
    seed: Annotated[
        int | None, options.sampling(help="Random seed. The same seed gives the same text.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that are set. UserError for a value that cannot be used."""
        from multirate.decoding.logits import SamplingSettings

        found = {name: value for name, value in asdict(self).items() if value is not None}
        SamplingSettings(**found)
        return found


@dataclass(frozen=True)
class How:
    method: Annotated[
        str | None,
        typer.Option(
            help="Decoding method (default: the accelerator's). Add settings after colons, as in "
            "m2r2-carry:lookup=0."
        ),
    ] = None
    speculate: options.Speculate = "auto"
    mode: options.Mode = "lossless"
    quality: options.Quality = None


@dataclass(frozen=True)
class OfExperts:
    experts: options.Experts = None
    expert_memory: options.ExpertMemory = None
    expert_policy: options.ExpertPolicy = "aot"
    expert_predictor: options.ExpertPredictor = None

    def check(self) -> None:
        """UserError for wrong values, before anything is loaded."""
        from multirate.experts.named_policies import parse_bytes, policy_named

        policy_named(self.expert_policy)
        parse_bytes(self.expert_memory)
        if self.experts is None and self.expert_memory is not None:
            raise UserError(
                "--expert-memory needs --experts FOLDER, a store made with multirate pack"
            )


def ready_engine(
    model: str | None,
    accelerator: str | None,
    how: How,
    tuned: bool,
    machine: options.Machine,
    experts: OfExperts,
) -> Engine:
    """An engine with the model and its accelerator. UserError for options that do not fit, before
    anything is loaded.
    """
    from multirate.engine import check_mode

    check_mode(how.mode, how.quality, how.speculate)
    experts.check()
    engine = _engine(model, machine, experts)
    engine.uses_tuned = tuned
    options.add_accelerator(engine, model, accelerator, how.method)
    return engine


def _engine(model: str | None, machine: options.Machine, experts: OfExperts) -> Engine:
    from multirate.engine import attach
    from multirate.loading.names import DEFAULT
    from multirate.runtime.quantised import ON_LOAD

    loaded = machine.load(model, experts.experts)
    if machine.weights in ON_LOAD:
        say_once(
            f"the text is that of the model in {machine.weights.upper()}; `multirate info "
            f"{model or DEFAULT} --weights {machine.weights}` measures how close it is to the full "
            "model"
        )
    engine = attach(
        loaded,
        backend=machine.backend,
        expert_memory=experts.expert_memory,
        expert_policy=experts.expert_policy,
        expert_predictor=experts.expert_predictor,
    )
    runtime = None if engine.experts is None else engine.experts.runtime
    if runtime is not None and runtime.note:
        options.note(f"note: {runtime.note}")
    return engine


def remarks(engine: Engine, sampling: SamplingSettings) -> list[str]:
    """What the engine says about its last generation."""
    found = []
    if engine.guarantee is not None:
        changed = "text with penalties or forbidden tokens" if sampling.uses_context else ""
        found.append(engine.guarantee.sentence(changed if sampling.greedy else "sampled text"))
    if engine.notice:
        found.append(engine.notice)
    return found


def print_stats(engine: Engine, output: GenerationOutput, ending: str) -> None:
    """Prints speed, method and acceptance to stderr. ending: why the text ended, in words."""
    from multirate.methods.spec import PLAIN

    seen = output.stats
    options.note(
        f"{seen.tokens} tokens in {seen.seconds:.2f} s: "
        f"{seen.tokens / max(seen.seconds, 1e-9):.1f} tokens/s, "
        f"{ending}"
    )
    options.note(
        f"method {engine.used}, {engine.backend} backend, "
        f"{options.threads_line(engine.decoder)}, weights {engine.weights}"
    )
    if seen.drafted:
        drafts = f"{100 * seen.acceptance:.0f}% of the drafted tokens were accepted"
        counted = f"{seen.tokens_per_step:.2f} tokens per pass"
        options.note(f"{drafts}, {counted}")
    elif engine.used != PLAIN:
        options.note("no tokens were drafted")
    if seen.exits:
        left = ", ".join(f"{n} after {layers}" for layers, n in sorted(seen.exits.items()))
        options.note(f"tokens by the number of layers they used: {left}")
    if engine.experts is not None and engine.experts.runtime is not None:
        options.note(options.expert_line(engine.experts.runtime))
