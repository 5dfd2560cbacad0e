r"""The trained mixture with experts of another size: each is widened by neurons of zeros, which
change no token.

    python benchmarks/wide_experts.py --out runs/wide --width 512
    multirate pack runs/wide --out runs/wide-experts
    multirate bench runs/wide --experts runs/wide-experts --methods experts ... \
        --expert-predictor lab/models/mixture/predictor

Real experts are a hundred times as large as our mixture's (0.1 MB), and what a read costs besides
its bytes weighs as much less. Routers trained on text together with experts of that size cannot be
had here; these are trained routers, and reads and products of a larger size. Text, routing and
predictions are the mixture's.

Experts of 0.8 MB have a width of 512 in bf16; packed with --weights q8_0, 960; with q4_0, 1792.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MIXTURE = Path(__file__).resolve().parent.parent / "lab/models/mixture"


def widened(name: str, weight: torch.Tensor, width: int) -> torch.Tensor:
    """gate and up [I, H] get rows of zeros, down [H, I] columns, up to `width`."""
    if ".experts." not in name:
        return weight
    inner = 1 if "down_proj" in name else 0
    shape = list(weight.shape)
    shape[inner] = width - shape[inner]
    return torch.cat([weight, weight.new_zeros(shape)], dim=inner).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=512, help="of an expert; the mixture has 64")
    args = parser.parse_args()
    source = MIXTURE
    config = json.loads((source / "config.json").read_text())
    if args.width <= config["moe_intermediate_size"] or args.width % 32:
        parser.error(
            f"--width must be a multiple of 32 above {config['moe_intermediate_size']}, not "
            f"{args.width}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, args.out)
    config["moe_intermediate_size"] = args.width
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = load_file(source / "model.safetensors")
    wide = {name: widened(name, weight, args.width) for name, weight in tensors.items()}
    save_file(wide, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
