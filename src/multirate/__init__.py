"""Faster text generation for Hugging Face language models on CPU, with the model's own text.

multirate drafts several tokens, verifies them in one pass of the model and keeps the ones that the
model itself would have chosen. It includes M2R2 (Mixture of Multi-rate Residuals, arXiv 2502.02040)
and other ways to draft.

    engine = multirate.attach("smollm2")
    prompt = engine.tokenizer("The capital of France is")["input_ids"]
    output = engine.generate([prompt])
    print(engine.tokenizer.decode(output.sequences[0]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.decoding.results import DecodeStats, GenerationOutput
    from multirate.decoding.stopping import StopSettings
    from multirate.engine import Engine, attach
    from multirate.errors import UserError
    from multirate.integration.callable import custom_generate
    from multirate.integration.offload import offload
    from multirate.training.checkpoint import Accelerator
    from multirate.training.loop import train
    from multirate.training.settings import TrainSettings

_HOMES = {
    "Accelerator": "multirate.training.checkpoint",
    "DecodeStats": "multirate.decoding.results",
    "Engine": "multirate.engine",
    "GenerationOutput": "multirate.decoding.results",
    "SamplingSettings": "multirate.decoding.logits",
    "StopSettings": "multirate.decoding.stopping",
    "TrainSettings": "multirate.training.settings",
    "UserError": "multirate.errors",
    "attach": "multirate.engine",
    "custom_generate": "multirate.integration.callable",
    "offload": "multirate.integration.offload",
    "train": "multirate.training.loop",
}

__all__ = [
    "Accelerator",
    "DecodeStats",
    "Engine",
    "GenerationOutput",
    "SamplingSettings",
    "StopSettings",
    "TrainSettings",
    "UserError",
    "__version__",
    "attach",
    "custom_generate",
    "offload",
    "train",
]


def __getattr__(name: str) -> Any:
    # On first use: `multirate --help` must not wait seconds for torch and transformers.
    if name not in _HOMES:
        raise AttributeError(f"module 'multirate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
