"""Copies a model that pretrain.py made, and its accelerators, into a folder, and writes its card.

    python lab/recipes/pretraining/install.py --base runs/tiny/base \
        --config lab/recipes/tiny/tiny.yaml \
        --target src/multirate/reference/tiny/model \
        --accelerator runs/tiny/m2r2 src/multirate/reference/tiny/accelerators/m2r2

The card's title and first sentences are the configuration's `title` and `about`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {title}

{about}

| | |
|---|---|
| steps, tokens | {steps}, {tokens:.1f}M |
| seed | {seed} |
| held-out loss (nats per token) | {losses} |
| licence | Apache-2.0 |
| recipe | `{recipe}` |

**Data**, in English and all permissive: {data}.

```yaml
{phases}```
"""
BOOKS = "classic books (public domain)"
SOURCES = {
    "books": BOOKS,
    "stories": BOOKS,
    "assistant": "GPTeacher roleplay (MIT), rasbt instruction data (Apache-2.0), "
    "Self-Instruct seed tasks (Apache-2.0)",
    "gsm8k": "GSM8K train (MIT)",
    "medquad": "MedQuAD (CC BY 4.0; Ben Abacha and Demner-Fushman, "
    '"A Question-Entailment Approach to Question Answering", BMC Bioinformatics 2019)',
}
UNFINISHED = shutil.ignore_patterns("training_state*", "*.pt", "log*")


def card(config: dict[str, Any], facts: dict[str, Any], recipe: Path, parameters: float) -> str:
    """A model's card. parameters: in millions; recipe: its configuration file."""
    shape = config["model"]
    sources = sorted({SOURCES[name] for phase in config["phases"] for name in phase["mix"]})
    about = config["about"].format(
        parameters=parameters,
        layers=shape["num_hidden_layers"],
        width=shape["hidden_size"],
        vocab=shape["vocab_size"],
    )
    return CARD.format(
        title=config["title"],
        about=about.strip(),
        steps=facts["steps"],
        tokens=facts["tokens"] / 1e6,
        seed=facts["seed"],
        losses=", ".join(f"{name} {loss:.2f}" for name, loss in facts["heldout_loss_nats"].items()),
        recipe=recipe,
        data=", ".join(sources),
        phases=yaml.safe_dump(
            config["phases"], sort_keys=False, default_flow_style=None, width=110
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "config", "target"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--accelerator",
        type=Path,
        nargs=2,
        action="append",
        default=[],
        metavar=("FROM", "TO"),
        help="a trained accelerator and the folder to copy it to (repeatable)",
    )
    args = parser.parse_args()
    shutil.copytree(args.base / "model", args.target, dirs_exist_ok=True)
    facts = json.loads((args.base / "facts.json").read_text())
    config = yaml.safe_load(args.config.read_text())
    parameters = (args.target / "model.safetensors").stat().st_size / 2e6  # bf16: two bytes each
    (args.target / "README.md").write_text(card(config, facts, args.config, parameters))
    for source, target in args.accelerator:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=UNFINISHED)
    written = [args.target, *(target for _, target in args.accelerator)]
    files = {path for folder in written for path in folder.rglob("*") if path.is_file()}
    print(f"{args.target}: {sum(path.stat().st_size for path in files) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
