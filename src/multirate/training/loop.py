"""Train an accelerator beside a frozen base: one process, or several under ``accelerate launch``.

On CPU, several processes need ``accelerate launch --multi_gpu --num_processes N`` (without a GPU it
uses gloo) or ``torchrun``: with ``--cpu`` accelerate starts a single process unless mpirun starts
the others.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as Launcher
from torch import Tensor, nn

from multirate.errors import Diverged, UserError
from multirate.io import held
from multirate.loading.hub import load_model
from multirate.methods._shared.objective import Summary
from multirate.methods._shared.teacher import Known, Teacher
from multirate.methods.spec import Training, find_training, recommended
from multirate.runtime.attention_kernels import kernels_of_any_shape
from multirate.runtime.load import load_decoder
from multirate.runtime.quantised import expanded, is_quantised
from multirate.torch_modes import own_modes
from multirate.training.checkpoint import Accelerator, describe_base
from multirate.training.data import (
    Batch,
    BatchPlan,
    Sample,
    first_of_each_prompt,
    load_samples,
    set_aside,
)
from multirate.training.divergence import check_results, check_step, check_weights
from multirate.training.evaluation import evaluate
from multirate.training.first_weights import choose_draft_tokens, continue_from
from multirate.training.memory import RELEASE_EVERY, bound_product_caches, memory_releaser
from multirate.training.optimizers import learning_rate, optimizers
from multirate.training.precision import low_precision
from multirate.training.progress import TrainProgress, describe
from multirate.training.prompt_fingerprints import prompt_fingerprint
from multirate.training.provenance import model_name, provenance
from multirate.training.settings import TrainSettings
from multirate.training.state import (
    PEAK,
    STATE,
    load_state,
    prepare_output,
    remove_state,
    save_state,
)
from multirate.training.teacher_states import TeacherStates, report_to_terminal

CHECKPOINT_SECONDS = 120.0
"""Between checkpoints."""
GRADIENT_NORM = 1.0
"""Maximum norm of the gradient."""
STARTING_BATCHES = 16
"""Of the training data, for methods that start from what the base does with them …"""
STARTING_BATCHES_OF_STATES = 256
"""… and where the base need not run for it, or not further than its first layers."""


@dataclass(frozen=True)
class TrainResult:
    finished: bool
    """False if the run was interrupted; the same call resumes it."""
    steps: int
    """Optimizer steps done."""
    directory: Path
    """The output folder."""
    results: dict[str, Any]
    """Held-out measurements, as in the model card."""


@own_modes(gradients=True)
def train(
    model: str | Path | Any,
    data_files: Sequence[str | Path],
    out_dir: str | Path,
    method: str | None = None,
    settings: TrainSettings | None = None,
    options: dict[str, Any] | None = None,
    tokenizer: Any = None,
) -> TrainResult:
    """Trains an accelerator for ``model`` into ``out_dir``.

    model: a path, a hub id, or a loaded causal LM with ``tokenizer``.
    data_files: JSONL or JSON files of samples (docs/training.md lists the accepted forms).
    method: the method to train; default: m2r2-carry.
    settings: default: ``TrainSettings()``.
    options: replace fields of the method's config (``gates``, ``rank``, …).

    If Ctrl-C, SIGTERM or kill interrupts it, the same call resumes and ends with the weights of an
    uninterrupted run. Raises UserError for anything that you can fix, before training starts:
    method, options, output folder, model, data. Raises Diverged if training produces values that
    are not finite.
    """
    settings = settings or TrainSettings()
    method = method or recommended()
    find_training(method)
    bound_product_caches()
    out = Path(out_dir)
    prepare_output(out, settings.overwrite)
    launcher = Launcher(mixed_precision="no", cpu=not torch.cuda.is_available())
    name = model_name(model)
    model, tokenizer = _prepared(model, tokenizer, settings.precision)
    # the seed is this run's, and not that of what the caller draws afterwards
    devices = [launcher.device] if launcher.device.type == "cuda" else []
    with kernels_of_any_shape(), torch.random.fork_rng(devices), ExitStack() as stack:
        if launcher.is_main_process:
            stack.enter_context(held(out))
        run = _Run(
            launcher, model, tokenizer, name, data_files, out, method, settings, options or {}
        )
        return run.run()


def _prepared(model: Any, tokenizer: Any, precision: str) -> tuple[Any, Any]:
    """The model, loaded if it is a name, with weights that torch trains with."""
    dtype = "float32" if precision == "fp32" else "bfloat16"
    if isinstance(model, (str, Path)):
        weights = "bf16" if dtype == "bfloat16" else "file"
        loaded = load_model(str(model), dtype, "cpu", weights)
        return loaded.model, loaded.tokenizer
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UserError(
            "the model was created in torch.inference_mode(), so it cannot be trained with; "
            "load it outside inference mode"
        )
    if is_quantised(model):
        return expanded(model, getattr(torch, dtype)), tokenizer
    return model.float() if precision == "fp32" else model, tokenizer


class _Run:
    def __init__(
        self,
        launcher: Launcher,
        model: Any,
        tokenizer: Any,
        name: str,
        data_files: Sequence[str | Path],
        out: Path,
        method: str,
        settings: TrainSettings,
        options: dict[str, Any],
    ) -> None:
        self.launcher, self.out, self.method, self.settings = launcher, out, method, settings
        self.main = launcher.is_main_process
        torch.manual_seed(settings.seed)
        model.to(launcher.device)
        self.teacher = Teacher(model)
        trained = find_training(method)
        self.before = self._before(model)
        if self.before is None:
            self.config = trained.config_for(self.teacher.shape, **options)
        else:
            changed = self.before.config.to_json() | options
            self.config = type(self.before.config).from_json(changed)
        self.samples, self.heldout = self._data(data_files, tokenizer)
        self.base = describe_base(model, name)
        self.states = self._teacher_states(model)
        fast = low_precision(launcher.device) == torch.bfloat16
        self.bf16 = settings.precision == "bf16" or (settings.precision == "auto" and fast)
        if not self.bf16:
            model.float()
        self.stream = trained.build(self.config, self.teacher.shape)
        self._begin(trained, "draft_vocab" in options)
        self.objective: Any = trained.objective(self.teacher, self.stream)
        self.optimizers = optimizers(self.stream, settings.lr)
        self.provenance = provenance(
            data_files,
            self.samples,
            self.heldout,
            settings,
            launcher.num_processes,
            None if self.before is None else self.before.training,
        )
        if settings.compile:
            for layer in self.teacher.parts.layers:
                layer.module.compile()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.rates: list[dict[str, Any]] = []

    def _data(
        self, files: Sequence[str | Path], tokenizer: Any
    ) -> tuple[list[Sample], list[Sample]]:
        limit, vocabulary = self.settings.max_length, self.teacher.shape.vocab_size
        samples = load_samples(files, tokenizer, limit, vocabulary)
        most = self.settings.heldout_samples
        if not self.settings.heldout_files:
            return set_aside(samples, most, self.settings.seed)
        trained_on = {s.prompt for s in samples}
        given = load_samples(self.settings.heldout_files, tokenizer, limit, vocabulary)
        heldout = [s for s in given if s.prompt not in trained_on]
        if len(heldout) < len(given) and self.main:
            print(
                f"skipping {len(given) - len(heldout)} of {len(given)} held-out samples, whose "
                "prompts are in the training data",
                file=sys.stderr,
            )
        return samples, first_of_each_prompt(heldout)[:most]

    def _before(self, model: Any) -> Accelerator | None:
        """The accelerator that this run goes on from, if any."""
        folder = self.settings.start_from
        if folder is None:
            return None
        before = Accelerator.from_pretrained(folder, model, torch.float32)
        if before.method != self.method:
            raise UserError(
                f"start_from: the accelerator in {folder} was trained with --method "
                f"{before.method}, but this run uses --method {self.method}"
            )
        return before

    def _begin(self, trained: Training, other_tokens: bool) -> None:
        """Gives the stream the weights of its method's start, or of the accelerator before it."""
        self.stream.to(device=self.launcher.device, dtype=torch.float32)
        if self.before is None or other_tokens:
            choose_draft_tokens(self.stream, self.samples, self.teacher.shape.vocab_size)
        if self.before is not None:
            continue_from(
                self.before,
                self.stream,
                trained,
                self.teacher,
                other_tokens,
                self._starting_batches,
            )
        elif trained.start is not None:
            trained.start(self.teacher, self.stream, self._starting_batches())

    def _starting_batches(self) -> Iterator[tuple[Tensor, Tensor, Known | None]]:
        """Those that weights are fitted to before the first step."""
        plan = BatchPlan(self.samples, self.settings.tokens_per_batch, self.settings.seed)
        deepest = max(getattr(self.config, "gates", ()), default=0)
        cheap = self.states is not None and deepest <= self.teacher.shape.num_layers // 4
        most = STARTING_BATCHES_OF_STATES if cheap else STARTING_BATCHES
        return map(self._on_device, islice(plan.batches(), min(most, len(plan.epoch(0)))))

    def _identity(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "config": self.config.to_json(),
            "base fingerprint": self.base["fingerprint"],
            "training data": self.provenance["data_sha256"],
            "process count": self.launcher.num_processes,
            "weights to start from": None if self.before is None else self.before.weights_sha256,
            **{
                f"setting {k}": list(v) if isinstance(v, tuple) else v
                for k, v in self.settings.decides_result().items()
            },
        }

    def _autocast(self) -> Any:
        return torch.autocast(self.launcher.device.type, torch.bfloat16, enabled=self.bf16)

    def run(self) -> TrainResult:
        """Train to the last step or an interruption, then evaluate and save."""
        state = load_state(self.out, self._identity())
        if state is not None:
            self.stream.load_state_dict(state["stream"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
            self._rates_before(state)
        self.launcher.wait_for_everyone()
        try:
            with _stop_requests() as stop_asked:
                if not self._steps(stop_asked):
                    return TrainResult(False, self.step, self.out, {})
            check_weights(self.stream, self.step, self.settings.lr)
            results = self._evaluate()
            check_results(results, self.step, self.settings.lr)
        except Diverged as error:
            raise Diverged(f"{error}; {self._what_is_kept()}") from None
        if self.main:
            if not (self.out / STATE).exists():
                self._save()  # of files without it and without a description no one is the owner
            training = {
                **self.provenance,
                "steps": self.step,
                "tokens": self.tokens,
                "seconds": round(self.seconds),
                **({"earlier_rates": self.rates} if self.rates else {}),
            }
            Accelerator(
                self.method,
                self.config,
                self.stream,
                self.base,
                training,
                results,
                prompts=self._prompts(),
            ).save_pretrained(self.out)
            remove_state(self.out)
        self.launcher.wait_for_everyone()
        return TrainResult(True, self.step, self.out, results)

    def _rates_before(self, state: dict[str, Any]) -> None:
        """Higher learning rates that the run had until a step, for the card."""
        self.rates, rate = list(state.get("rates", [])), state["identity"][PEAK]
        if rate == self.settings.lr:
            return
        self.rates.append({"lr": rate, "until_step": self.step})
        if self.main:
            print(
                f"resuming after step {self.step} with a peak rate of {self.settings.lr:g} "
                f"instead of {rate:g}",
                file=sys.stderr,
            )

    def _what_is_kept(self) -> str:
        if not (self.out / STATE).exists():
            return "nothing was saved"
        return (
            f"the last checkpoint is kept in {self.out / STATE}, and the same call with a lower "
            "lr resumes from it"
        )

    def _prompts(self) -> frozenset[int] | None:
        """Fingerprints of the prompts of this run and those before it; None: of one it is not
        known.
        """
        own = frozenset(prompt_fingerprint(sample.prompt) for sample in self.samples)
        if self.before is None:
            return own
        return None if self.before.prompts is None else own | self.before.prompts

    def _steps(self, stop_asked: Callable[[], bool]) -> bool:
        """All remaining steps; False when interrupted (a checkpoint is then on disk)."""
        s, world, rank = self.settings, self.launcher.num_processes, self.launcher.process_index
        forward = self.launcher.prepare(self.objective) if world > 1 else self.objective
        plan = BatchPlan(self.samples, s.tokens_per_batch, s.seed)
        batches = plan.batches(self.step * s.gradient_accumulation * world + rank, world)
        summary, losses = Summary.empty(self.objective.terms, self.objective.has_arla), []
        saved_at, clock = time.monotonic(), time.monotonic()
        release = memory_releaser()
        with TrainProgress(s.steps, self.step, self.main) as progress:
            while self.step < s.steps:
                seen = 0
                for micro in range(s.gradient_accumulation):
                    batch = next(batches)
                    sync = micro == s.gradient_accumulation - 1 or world == 1
                    with nullcontext() if sync else forward.no_sync():
                        with self._autocast():
                            loss, report = forward(*self._on_device(batch))
                        (loss / s.gradient_accumulation).backward()
                    summary.add(report.sums())
                    losses.append(report.loss)
                    seen += batch.ids.numel()
                norm = nn.utils.clip_grad_norm_(self.stream.parameters(), GRADIENT_NORM)
                # the norm is of all processes' gradients, so that all of them end here
                loss_of_step = sum(losses[-s.gradient_accumulation :]) if world == 1 else 0.0
                check_step(self.step, loss_of_step, float(norm), s.lr)
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(self.step, s) * group.get("share", 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                self.step += 1
                if self.step % RELEASE_EVERY == 0:
                    release()
                stop, seen = self._together(stop_asked(), seen)
                self.tokens += seen
                progress.advance(self.step, seen)
                now = time.monotonic()
                self.seconds, clock = self.seconds + now - clock, now
                if self.step % s.log_every == 0 or progress.due():
                    progress.report(
                        self.step,
                        describe(summary, sum(losses) / len(losses), self.objective.predicts),
                    )
                    summary, losses = (
                        Summary.empty(self.objective.terms, self.objective.has_arla),
                        [],
                    )
                stop = stop and self.step < s.steps
                due = s.checkpoint_steps is not None and self.step % s.checkpoint_steps == 0
                if self.main and (stop or due or now - saved_at > CHECKPOINT_SECONDS):
                    self._save()
                    saved_at = time.monotonic()
                if stop:
                    return False
        return True

    def _teacher_states(self, model: Any) -> TeacherStates | None:
        """What the base says to all samples, the held-out ones after the others, when a folder
        for it was given; computed by the fastest decoder.
        """
        folder = self.settings.teacher_states
        if folder is None:
            return None
        if self.launcher.num_processes > 1:
            raise UserError(
                "teacher_states works only in a single process; leave it out under accelerate "
                "launch"
            )
        states = TeacherStates(
            Path(folder),
            [*self.samples, *self.heldout],
            self.teacher.shape.hidden_size,
            self.base["fingerprint"],
            taps=getattr(self.config, "taps", ()),  # of methods that read inner residuals
        )
        if not states.complete:
            states.compute(load_decoder(model), report_to_terminal())
        return states

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor, Known | None]:
        known = None
        if self.states is not None:
            known = self.states.batch(batch.indices, batch.ids.shape[1]).to(self.launcher.device)
        return batch.ids.to(self.launcher.device), batch.mask.to(self.launcher.device), known

    def _heldout_known(self, batch: Batch) -> Known | None:
        if self.states is None:
            return None
        indices = [len(self.samples) + i for i in batch.indices]
        return self.states.batch(indices, batch.ids.shape[1])

    def _together(self, asked: bool, seen: int) -> tuple[bool, int]:
        """Whether any process was asked to stop (all leave after the same step), and the tokens of
        all of them.
        """
        if self.launcher.num_processes == 1:
            return asked, seen
        both = torch.tensor(
            [float(asked), float(seen)], device=self.launcher.device, dtype=torch.float32
        )
        stops, tokens = self.launcher.reduce(both).tolist()
        return stops > 0, int(tokens)

    def _save(self) -> None:
        check_weights(self.stream, self.step, self.settings.lr)
        save_state(
            self.out,
            {
                "identity": self._identity(),
                "stream": self.stream.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "rates": self.rates,
            },
        )

    def _evaluate(self) -> dict[str, Any]:
        if not self.heldout:
            return {}
        self.stream.eval()
        with self._autocast():
            results = evaluate(
                self.objective,
                self.heldout,
                self.settings.tokens_per_batch,
                self.launcher,
                self._heldout_known,
            )
        self.stream.train()
        return results


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the current step instead of in the middle of it."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals stay the caller's
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
