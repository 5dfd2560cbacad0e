"""Put the trained mixture and its predictor of experts into the package, with the model's card.

python recipes/reference/install_mixture.py --base runs/mixture/base --predictor
    runs/mixture/predictor \ --target src/multirate/reference/mixture
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml
from install import DATA, FRONT  # beside this file

CARD = (
    FRONT
    + """# multirate reference mixture of experts

A {parameters:.1f}M-parameter Qwen3-MoE ({layers} layers, {experts} experts of {inner} x {width},
{top_k} for a token,
vocabulary {vocab}) that exists so that loading experts ahead of time can be shown and measured
offline on routers that
were trained. It knows almost nothing and must not be used for advice, least of all medical.

| | |
|---|---|
| steps, tokens | {steps}, {tokens:.1f}M |
| seed | {seed} |
| held-out loss (nats per token) | {losses} |
| load-balancing loss | {balance} x Switch Transformer's |
| recipe | `recipes/reference/` (prepare.py, pretrain.py), `recipes/mixture/mixture.yaml` |

{data}
`predictor/` holds the accelerated residual that names its experts ahead of time, with a card of
its own.

```yaml
{phases}```

    python recipes/reference/prepare.py  --data DATA --out runs/reference/data
    python recipes/reference/pretrain.py --config recipes/mixture/mixture.yaml \\
        --data runs/reference/data --out runs/mixture/base
    bash recipes/mixture/predictor.sh runs/mixture/base/model runs/reference/data \\
        runs/mixture/predictor
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "predictor", "target"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    shutil.copytree(args.base / "model", args.target, dirs_exist_ok=True)
    kept = shutil.ignore_patterns("training_state*", "*.pt", "log*")
    shutil.copytree(args.predictor, args.target / "predictor", dirs_exist_ok=True, ignore=kept)
    facts = json.loads((args.base / "facts.json").read_text())
    config = json.loads((args.target / "config.json").read_text())
    recipe = yaml.safe_load((Path(__file__).parents[1] / "mixture" / "mixture.yaml").read_text())
    size = (args.target / "model.safetensors").stat().st_size / 2
    (args.target / "README.md").write_text(
        CARD.format(
            data=DATA,
            parameters=size / 1e6,
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            experts=recipe["model"]["num_experts"],
            inner=config["moe_intermediate_size"],
            top_k=config["num_experts_per_tok"],
            vocab=config["vocab_size"],
            steps=facts["steps"],
            tokens=facts["tokens"] / 1e6,
            seed=facts["seed"],
            balance=recipe["balance"],
            losses=", ".join(f"{k} {v:.2f}" for k, v in facts["heldout_loss_nats"].items()),
            phases=yaml.safe_dump(
                recipe["phases"], sort_keys=False, default_flow_style=None, width=110
            ),
        )
    )
    total = sum(path.stat().st_size for path in args.target.rglob("*") if path.is_file())
    print(f"{args.target}: {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
