"""What the model card says of a run: its data, settings and versions."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import multirate
from multirate.training.data import Sample
from multirate.training.settings import TrainSettings

_KEPT = (
    *("data", "data_sha256", "samples", "distinct_prompts", "steps", "tokens", "seconds"),
    *("settings", "argv", "notes", "torch", "transformers"),
)


def model_name(model: Any) -> str:
    """A hub id, or a folder's last component: absolute paths stay private."""
    if isinstance(model, (str, Path)):
        source = str(model)
    else:
        source = str(getattr(model.config, "_name_or_path", "") or "")
    return Path(source).name if Path(source).exists() else source


def provenance(
    files: Sequence[str | Path],
    samples: Sequence[Sample],
    heldout: Sequence[Sample],
    settings: TrainSettings,
    processes: int,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """The "training" of accelerator.json, without what only the end of the run knows. Paths say
    something about the machine, not about the run: only their last components are kept. before: the
    "training" of the accelerator that the run starts from.
    """
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.ids.tobytes())
    said = {**settings.to_json(), "heldout_files": _names(settings.heldout_files)}
    for name in ("teacher_states", "start_from"):
        if said[name] is not None:
            said[name] = Path(said[name]).name
    return {
        "data": _names(files),
        "samples": len(samples),
        "distinct_prompts": len({s.prompt for s in samples}),
        "heldout_samples": len(heldout),
        "heldout_prompts": len({s.prompt for s in heldout}),
        "data_sha256": digest.hexdigest(),
        "settings": said,
        "processes": processes,
        "argv": [Path(a).name if a.startswith("/") else a for a in sys.argv],
        "multirate": multirate.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        **({} if before is None else {"before": _history(before)}),
    }


def _names(files: Sequence[str | Path]) -> list[str]:
    return [Path(file).name for file in files]


def _history(training: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that the model card lists, the latest one last."""
    return [*training.get("before", []), {k: training[k] for k in _KEPT if k in training}]
