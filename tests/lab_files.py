"""Models and texts in the repository's lab/ folder, which the package does not contain."""

from __future__ import annotations

from pathlib import Path

LAB = Path(__file__).resolve().parent.parent / "lab"
MIXTURE = LAB / "models/mixture"
DRAFT_MODEL = LAB / "models/smollm2-draft"
TEXTS = LAB / "texts/smollm2.safetensors"
