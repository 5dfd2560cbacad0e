"""Pretrains a small transformers model (a Llama or a mixture of experts) with Muon and AdamW, in
phases.

    python lab/recipes/pretraining/pretrain.py --config lab/recipes/tiny/tiny.yaml \
        --data runs/tiny/data --out runs/tiny/base

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


def build_model(config: dict[str, Any]) -> Any:
    torch.manual_seed(config["seed"])
    shape = AutoConfig.for_model(
        config.get("architecture", "llama"),
        **config["model"],
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.02,
    )
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    layers = model.config.num_hidden_layers
    with torch.no_grad():  # residual writers start small, so depth does not blow up the stream
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(1 / (2 * layers) ** 0.5)
    if is_mixture(model):
        grouped_experts.use(model, PRODUCTS)
    elif config.get("compile", True):
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
    every_source = sorted({name for phase in phases for name in phase["mix"]})
    sources = {name: TokenSource(args.data / f"train_{name}.bin") for name in every_source}
    rng = np.random.default_rng(config["seed"])
    step, phase_index, phase_step, tokens_seen = 0, 0, 0, 0
    model = build_model(config)
    optims = optimizers(model, config)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for optim, state in zip(optims, saved["optimizers"], strict=True):
            optim.load_state_dict(state)
        rng.bit_generator.state = saved["rng"]
        step, phase_index, phase_step, tokens_seen = saved["progress"]
        print(f"resumed at step {step}", flush=True)

    def save() -> None:
        save_atomically(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optims],
                "rng": rng.bit_generator.state,
                "progress": (step, phase_index, phase_step, tokens_seen),
            },
            checkpoint,
        )

    mixture = is_mixture(model)
    began, since = time.time(), tokens_seen
    while phase_index < len(phases) and not stop:
        phase = phases[phase_index]
        # a short window's scores fit the caches: there plain attention beats the fused one of
        # torch's CPU build
        model.config._attn_implementation = "eager" if phase["window"] <= 256 else "sdpa"
        names, weights = list(phase["mix"]), np.array(list(phase["mix"].values()))
        base_lrs = [config["optimizer"]["muon_lr"], config["optimizer"]["adamw_lr"]]
        while phase_step < phase["steps"] and not stop:
            start, end = phase["lr"]
            factor = start + (end - start) * phase_step / phase["steps"]
            factor *= min(1.0, (step + 1) / config["optimizer"]["warmup_steps"])
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
