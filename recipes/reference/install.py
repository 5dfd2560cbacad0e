"""Put the trained reference model and its accelerators into the package, with the model's card.

    python recipes/reference/install.py --base runs/reference/base --data runs/reference/data \
        --accelerators runs/reference/accelerators --package src/multirate/reference
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml

FRONT = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
"""
DATA = """\
**Data**, all permissive: classic books (public domain), GSM8K train (MIT), GPTeacher roleplay
(MIT), rasbt instruction
data (Apache-2.0), Self-Instruct seed tasks (Apache-2.0), MedQuAD (CC BY 4.0; Ben Abacha and
Demner-Fushman, "A
Question-Entailment Approach to Question Answering", BMC Bioinformatics 2019).
"""
CARD = (
    FRONT
    + """# multirate reference model

A {parameters:.1f}M-parameter Llama ({layers} layers, width {width}, vocabulary {vocab}) that
exists so that
`multirate demo` and the benchmarks run offline on a model whose origin is known. It writes
mostly grammatical English, but under greedy decoding soon repeats itself, and it knows almost
nothing: it must not be
used for advice, least of all medical.

| | |
|---|---|
| steps, tokens | {steps}, {tokens:.1f}M |
| seed | {seed} |
| held-out loss (nats per token) | {losses} |
| recipe | `recipes/reference/` (prepare.py, pretrain.py, reference.yaml) |

{data}
Depth was grown twice: ten trained layers were repeated to twenty, later five copies that began as
the identity were
inserted. The committed weights differ from the schedule in two respects: the first 121 steps of
"deepen" followed a
schedule of 240 steps, which was then shortened to 170; and "answers" began with fresh optimizers
(`--start-from`).
Phases ran in bf16, "deepen" in fp32. Schedule:

```yaml
{phases}```

    python recipes/reference/prepare.py  --data DATA --out runs/reference/data
    python recipes/reference/pretrain.py --config recipes/reference/reference.yaml \\
        --data runs/reference/data --out runs/reference/base
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "data", "accelerators", "package"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    target = args.package / "model"
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted((args.base / "model").iterdir()):
        shutil.copyfile(path, target / path.name)
    facts = json.loads((args.base / "facts.json").read_text())
    config = json.loads((target / "config.json").read_text())
    recipe = yaml.safe_load((Path(__file__).parent / "reference.yaml").read_text())
    size = (target / "model.safetensors").stat().st_size / 2
    (target / "README.md").write_text(
        CARD.format(
            data=DATA,
            parameters=size / 1e6,
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            vocab=config["vocab_size"],
            steps=facts["steps"],
            tokens=facts["tokens"] / 1e6,
            seed=facts["seed"],
            losses=", ".join(f"{k} {v:.2f}" for k, v in facts["heldout_loss_nats"].items()),
            phases=yaml.safe_dump(
                recipe["phases"], sort_keys=False, default_flow_style=None, width=110
            ),
        )
    )
    for source in sorted(args.accelerators.iterdir()):
        if (source / "accelerator.json").exists():
            shutil.copytree(source, args.package / "accelerators" / source.name, dirs_exist_ok=True)
    total = sum(p.stat().st_size for p in args.package.rglob("*") if p.is_file())
    print(f"{args.package}: {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
