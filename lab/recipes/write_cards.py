"""Writes the model cards of the shipped accelerators again, from their accelerator.json.

python lab/recipes/write_cards.py
"""

from pathlib import Path

from multirate.training.description import read_description
from multirate.training.model_card import model_card

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (
    "src/multirate/reference/smollm2/*",
    "src/multirate/reference/tiny/accelerators/*",
    "lab/accelerators/*",
    "lab/models/*/predictor",
)


def main() -> None:
    for pattern in FOLDERS:
        for file in sorted(ROOT.glob(f"{pattern}/accelerator.json")):
            card = model_card(read_description(file, file.read_bytes()))
            (file.parent / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
