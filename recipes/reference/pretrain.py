"""Pretrain a reference model of transformers (Llama, or a mixture of experts), Muon + AdamW, phases
with depth growth.

    python recipes/reference/pretrain.py --config recipes/reference/reference.yaml \
        --data runs/reference/data --out runs/reference/base

Resumable: Ctrl-C (or a kill between checkpoints) loses at most ``checkpoint_every`` steps.
The finished model is written to OUT/model as bf16 safetensors with tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import grouped_experts  # beside this file
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from multirate.training.muon import Muon
from multirate.training.precision import low_precision

PRODUCTS = low_precision(
    torch.device("cpu")
)  # bf16 where the processor multiplies it, fp32 elsewhere


class TokenSource:
    """Random windows of one token file. State is the generator alone, so a resume is exact."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def window(self, length: int, rng: np.random.Generator) -> np.ndarray:
        start = int(rng.integers(0, len(self.tokens) - length - 1))
        return self.tokens[start : start + length + 1].astype(np.int64)


class TiedHeadLoss(torch.autograd.Function):
    """Mean cross-entropy of ``hidden [N, d]`` through ``weight [V, d]``, a chunk of rows at a time.

    The gradient is formed in the forward pass, so the [N, V] logits never exist at once: on two
    cores this takes a third of the time of a full fp32 logits tensor.
    """

    CHUNK = 512

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        n = hidden.shape[0]
        low_weight, low_hidden = weight.to(PRODUCTS), hidden.to(PRODUCTS)
        grad_hidden = torch.empty_like(low_hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32)
        for rows in range(0, n, TiedHeadLoss.CHUNK):
            part = slice(rows, rows + TiedHeadLoss.CHUNK)
            target = targets[part, None]
            logits = (low_hidden[part] @ low_weight.T).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += (normaliser - logits.gather(1, target)).sum()
            grad = logits.sub_(normaliser).exp_()
            grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            low_grad = grad.mul_(1 / n).to(PRODUCTS)
            grad_hidden[part] = low_grad @ low_weight
            grad_weight += low_grad.T @ low_hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.hidden_dtype = hidden.dtype
        return total / n

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.to(ctx.hidden_dtype) * upstream, grad_weight * upstream, None


def build_model(config: dict[str, Any], layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = AutoConfig.for_model(
        config.get("architecture", "llama"),
        **config["model"],
        num_hidden_layers=layers,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.02,
    )
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    with torch.no_grad():  # residual writers start small, so depth does not blow up the stream
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(1 / (2 * layers) ** 0.5)
    if is_mixture(model):
        grouped_experts.use(model, PRODUCTS)
    else:
        for layer in model.model.layers:
            layer.compile()  # one graph serves every layer
    return model


def is_mixture(model: Any) -> bool:
    return any(".experts." in name for name, _ in model.named_parameters())


def imbalance(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch Transformer's auxiliary loss (eq. 4), mean over layers: experts · Σ token share · mean
    probability; 1 when every expert has as many tokens as any other.
    """
    total = torch.zeros(())
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(
            1, probabilities.topk(top_k, dim=-1).indices, 1.0
        )
        total = total + logits.shape[-1] * (chosen.mean(0) / top_k * probabilities.mean(0)).sum()
    return total / len(router_logits)


def stack(depth: int, layers: int) -> list[tuple[int, bool]]:
    """Depth growth by stacking: the trained layers, repeated in order."""
    return [(i % depth, False) for i in range(layers)]


def deepen(depth: int, layers: int) -> list[tuple[int, bool]]:
    """Depth growth by identity: copies of evenly spaced layers follow their originals, their
    residual writers zero.

    The grown model computes what the small one did; training then puts the new layers to use.
    """
    after = {round((j + 1) * depth / (layers - depth)) - 1 for j in range(layers - depth)}
    origin = [
        (i, copy) for i in range(depth) for copy in ((False, True) if i in after else (False,))
    ]
    assert len(origin) == layers, "identity growth doubles each layer at most once"
    return origin


def grow(small: Any, config: dict[str, Any], origin: list[tuple[int, bool]], seed: int) -> Any:
    """A deeper model: layer i is the small model's layer origin[i][0], its residual writers zero if
    origin[i][1].
    """
    big = build_model(config, len(origin), seed)
    source = small.state_dict()
    grown = {}
    for name in big.state_dict():
        parts = name.split(".")
        silent = False
        if parts[:2] == ["model", "layers"]:
            index, silent = origin[int(parts[2])]
            parts[2] = str(index)
        grown[name] = source[".".join(parts)]
        if silent and parts[-2] in ("o_proj", "down_proj"):
            grown[name] = torch.zeros_like(grown[name])
    big.load_state_dict(grown)
    return big


GROWTH = {"stack": stack, "identity": deepen}


def optimizers(model: Any, config: dict[str, Any]) -> list[torch.optim.Optimizer]:
    o = config["optimizer"]
    small = ("embed", "mlp.gate.")  # an embedding and a router are no maps between residuals
    others = [
        p for n, p in model.named_parameters() if p.ndim < 2 or any(part in n for part in small)
    ]
    known = {id(p) for p in others}
    matrices = [p for p in model.parameters() if id(p) not in known]
    return [
        Muon(matrices, lr=o["muon_lr"], weight_decay=o["weight_decay"]),
        torch.optim.AdamW(
            others, lr=o["adamw_lr"], betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]


@torch.no_grad()
def heldout_loss(model: Any, data: Path, name: str, windows: int = 12, length: int = 512) -> float:
    tokens = np.fromfile(data / f"heldout_{name}.bin", dtype=np.uint16).astype(np.int64)
    starts = np.linspace(0, len(tokens) - length - 2, windows).astype(int)
    ids = torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.bfloat16 == PRODUCTS):
        logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).item()


def save_atomically(state: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--start-from", type=Path, help="a finished model in place of the phases before --phase"
    )
    parser.add_argument(
        "--phase", help="with --start-from: the phase to begin with (default: the last)"
    )
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"
    stop = False

    def ask_to_stop(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)

    phases = config["phases"]
    first = 0  # the phase whose optimizer state begins empty
    if args.start_from:
        first = [phase["name"] for phase in phases].index(args.phase or phases[-1]["name"])
    every_source = sorted({name for phase in phases for name in phase["mix"]})
    sources = {name: TokenSource(args.data / f"train_{name}.bin") for name in every_source}
    rng = np.random.default_rng(config["seed"])
    step, phase_index, phase_step, tokens_seen = 0, 0, 0, 0
    model = build_model(config, phases[0]["layers"], config["seed"])
    states = None
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model = build_model(config, saved["layers"], config["seed"])
        model.load_state_dict(saved["model"])
        states = saved["optimizers"]
        rng.bit_generator.state = saved["rng"]
        step, phase_index, phase_step, tokens_seen = saved["progress"]
        print(f"resumed at step {step}", flush=True)
    elif args.start_from:
        trained = AutoModelForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
        model = build_model(config, trained.config.num_hidden_layers, config["seed"])
        model.load_state_dict(trained.state_dict())
        phase_index = first
        step = sum(phase["steps"] for phase in phases[:phase_index])
        tokens_seen = sum(
            phase["steps"] * phase["batch"] * phase["window"] for phase in phases[:phase_index]
        )

    optims = optimizers(model, config)  # of the model chosen above, whichever it is
    if states is not None:
        for optim, state in zip(optims, states, strict=True):
            optim.load_state_dict(state)

    def save() -> None:
        save_atomically(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optims],
                "rng": rng.bit_generator.state,
                "layers": model.config.num_hidden_layers,
                "progress": (step, phase_index, phase_step, tokens_seen),
            },
            checkpoint,
        )

    mixture = is_mixture(model)
    began, since = time.time(), tokens_seen
    while phase_index < len(phases) and not stop:
        phase = phases[phase_index]
        if phase["layers"] != model.config.num_hidden_layers:
            origin = GROWTH[phase.get("growth", "stack")](
                model.config.num_hidden_layers, phase["layers"]
            )
            model = grow(model, config, origin, config["seed"])
            optims = optimizers(model, config)
        # a short window's scores fit the caches: there plain attention beats the fused one of
        # torch's CPU build
        model.config._attn_implementation = "eager" if phase["window"] <= 256 else "sdpa"
        trained_here = {
            id(p) for optim in optims for group in optim.param_groups for p in group["params"]
        }
        assert trained_here == {id(p) for p in model.parameters()}, (
            "the optimizers belong to another model"
        )
        names, weights = list(phase["mix"]), np.array(list(phase["mix"].values()))
        base_lrs = [config["optimizer"]["muon_lr"], config["optimizer"]["adamw_lr"]]
        while phase_step < phase["steps"] and not stop:
            start, end = phase["lr"]
            factor = start + (end - start) * phase_step / phase["steps"]
            fresh = phase_index == first or phases[phase_index - 1]["layers"] != phase["layers"]
            warm = phase_step if fresh else config["optimizer"]["warmup_steps"]
            factor *= min(1.0, (warm + 1) / config["optimizer"]["warmup_steps"])
            for optim, lr in zip(optims, base_lrs, strict=True):
                for group in optim.param_groups:
                    group["lr"] = lr * factor
            picks = rng.choice(len(names), size=phase["batch"], p=weights / weights.sum())
            batch = torch.from_numpy(
                np.stack([sources[names[i]].window(phase["window"], rng) for i in picks])
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.bfloat16 == PRODUCTS):
                out = model.model(
                    batch[:, :-1],
                    use_cache=False,
                    **({"output_router_logits": True} if mixture else {}),
                )
            hidden = out.last_hidden_state
            loss = TiedHeadLoss.apply(
                hidden.flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten()
            )
            balance = (
                imbalance(out.router_logits, model.config.num_experts_per_tok)
                if mixture
                else torch.zeros(())
            )
            (loss + config.get("balance", 0.0) * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["optimizer"]["grad_clip"])
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=True)
            step, phase_step, tokens_seen = (
                step + 1,
                phase_step + 1,
                tokens_seen + batch[:, 1:].numel(),
            )
            if step % config["log_every"] == 0:
                rate = (tokens_seen - since) / (time.time() - began)
                more = f"balance {balance.item():.2f} " if mixture else ""
                print(
                    f"{phase['name']} {phase_step}/{phase['steps']} step {step} loss "
                    f"{loss.item():.3f} {more}tokens {tokens_seen / 1e6:.2f}M {rate:.0f} tok/s",
                    flush=True,
                )
            if step % config["checkpoint_every"] == 0:
                save()
            if step % 200 == 0:
                losses = {n: round(heldout_loss(model, args.data, n), 3) for n in names}
                print(f"held-out {json.dumps(losses)}", flush=True)
        if phase_step >= phase["steps"]:
            phase_index, phase_step = phase_index + 1, 0
        save()
    if stop:
        print(f"stopped at step {step}; the same command resumes", flush=True)
        return
    losses = {n: round(heldout_loss(model, args.data, n, windows=40), 4) for n in every_source}
    model.to(torch.bfloat16).save_pretrained(args.out / "model")
    AutoTokenizer.from_pretrained(args.data / "tokenizer").save_pretrained(args.out / "model")
    facts = {
        "steps": step,
        "tokens": tokens_seen,
        "seed": config["seed"],
        "heldout_loss_nats": losses,
    }
    (args.out / "facts.json").write_text(json.dumps(facts, indent=2))
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
