"""Settings of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from multirate.errors import MOST_SEED
from multirate.methods._shared.config import MethodConfig

MOST_RATE = 1e30


@dataclass(frozen=True)
class TrainSettings(MethodConfig):
    """Settings of a training run, besides model, data and method. Invalid values raise
    UserError.
    """

    steps: int = 2000
    """Number of optimizer steps."""
    tokens_per_batch: int = 4096
    """Tokens per forward pass and process, padding included; at least max_length."""
    max_length: int = 512
    """Maximum number of tokens per sample; longer samples are cut."""
    gradient_accumulation: int = 1
    """Forward passes per optimizer step."""
    lr: float = 4e-3
    """Peak learning rate, of batched Muon on matrices and AdamW on the rest."""
    warmup_steps: int = 50
    """Steps until the learning rate reaches its peak."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto, bf16 or fp32. auto: bf16 if the hardware supports it."""
    seed: int = 0
    """Random seed."""
    heldout_files: tuple[str, ...] = ()
    """Data for the final evaluation (repeatable; default: part of --data)."""
    heldout_samples: int = 256
    """Maximum number of samples to evaluate."""
    checkpoint_steps: int | None = None
    """Also write a checkpoint after this many steps (default: only every two minutes)."""
    log_every: int = 20
    """Steps between progress lines."""
    teacher_states: str | None = None
    """Keep the base model's outputs in this folder, so that each sample runs through it only once.
    """
    start_from: str | None = None
    """Continue from this trained accelerator, with other data or settings."""
    compile: bool = False
    """Compile the base model's layers (worth it on long runs)."""
    overwrite: bool = False
    """Replace a finished accelerator in the output folder."""

    def check(self) -> None:
        for name in ("steps", "gradient_accumulation", "log_every", "heldout_samples"):
            self.require(getattr(self, name) >= 1, name, "at least 1")
        self.require(self.max_length >= 2, "max_length", "at least 2")
        self.require(
            self.tokens_per_batch >= self.max_length,
            "tokens_per_batch",
            f"at least max_length ({self.max_length}, which --max-length sets)",
        )
        self.require(self.lr > 0, "lr", "above 0")
        # float32 goes on from there
        self.require(self.lr <= MOST_RATE, "lr", f"at most {MOST_RATE:g}")
        self.require(self.warmup_steps >= 0, "warmup_steps", "0 or more")
        self.require(0 <= self.seed <= MOST_SEED, "seed", f"0 to {MOST_SEED}")
        self.require(
            self.checkpoint_steps is None or self.checkpoint_steps >= 1,
            "checkpoint_steps",
            "null or at least 1",
        )

    def decides_result(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the interrupted one."""
        free = {
            "heldout_files",
            "checkpoint_steps",
            "log_every",
            "compile",
            "teacher_states",
            "start_from",  # its weights decide, wherever they lie
            "overwrite",
        }
        return {k: v for k, v in asdict(self).items() if k not in free}
