"""Fine-tunes the upper layers of a model, or all of it, on questions and answers.

    python lab/recipes/tasks/tune.py --model FOLDER --data runs/tasks/tuning.jsonl \
        --out runs/tasks/model

It uses AdamW on the cross-entropy of the answers' tokens and end tokens. By default embeddings,
head and the layers below `--first-layer` are frozen, which takes a third less time on a CPU than
LoRA in all layers. `--whole` trains everything; `--rank` trains LoRA in every layer (arXiv
2106.09685). The state is saved every `--checkpoint-steps`, and the same command resumes.

`--exits` is LayerSkip's training (arXiv 2404.16710): in each step the head also reads the residual
at one of these exits, and layers are dropped at random, deeper ones more often (`--dropout`):

    python lab/recipes/tasks/tune.py --model smollm2 --data runs/equal/own.jsonl --first-layer 0 \
        --steps 300 --exits 7 --out runs/layerskip/model
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from multirate.loading.hub import load_model
from multirate.training.data import Batch, BatchPlan, load_samples

STATE = "tuning_state.pt"
MOST_TOKENS = 768
"""Of a sample; the rest is cut off."""


class LowRank(nn.Module):
    """LoRA: a weight [out, in] plus up [out, rank] · down [rank, in]; up begins at zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, size = weight.shape
        self.down = nn.Parameter(torch.empty(rank, size, device=weight.device))
        self.up = nn.Parameter(torch.zeros(out, rank, device=weight.device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_low_rank(layers: nn.Module, rank: int) -> list[nn.Parameter]:
    """Gives every linear layer in `layers` a LowRank of its own → their parameters."""
    parameters: list[nn.Parameter] = []
    for linear in [m for m in layers.modules() if isinstance(m, nn.Linear)]:
        low_rank = LowRank(linear.weight, rank)
        parametrize.register_parametrization(linear, "weight", low_rank)
        parameters += low_rank.parameters()
    return parameters


def merge_low_rank(layers: nn.Module) -> None:
    """Adds what add_low_rank's parameters learned to the weights themselves."""
    for linear in [m for m in layers.modules() if parametrize.is_parametrized(m, "weight")]:
        parametrize.remove_parametrizations(linear, "weight")


def answer_loss(model: Any, batch: Batch, exit_layer: int | None = None) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens; the head sees only the rows that predict one. With
    an exit, the mean of that at the end and that after `exit_layer` layers.
    """
    taken = model.model(input_ids=batch.ids, output_hidden_states=exit_layer is not None)
    following = torch.roll(batch.ids, -1, 1)[batch.mask]
    read = [taken.last_hidden_state[batch.mask]]
    if exit_layer is not None:
        read.append(model.model.norm(taken.hidden_states[exit_layer][batch.mask]))
    losses = [F.cross_entropy(model.lm_head(hidden), following) for hidden in read]
    return torch.stack(losses).mean()


def drop_layers(layers: Any, most: float) -> None:
    """From now on each layer is left out of a step at random: the first never, the last with
    probability `most`, between them p = most · (2^(l / (L − 1)) − 1) (LayerSkip's layer dropout, of
    a batch at once).
    """

    def hook_of(probability: float) -> Any:
        def passed_by(_: Any, entering: Any, leaving: Any) -> Any:
            return entering[0] if torch.rand(()) < probability else leaving

        return passed_by

    for index, layer in enumerate(layers):
        layer.register_forward_hook(hook_of(most * (2 ** (index / (len(layers) - 1)) - 1)))


def exits_of(text: str) -> list[int]:
    """ "4,7" → [4, 7]."""
    exits = [int(part) for part in text.split(",")]
    if min(exits) < 1:
        raise argparse.ArgumentTypeError("layer counts from 1 on, as 4,7")
    return exits


def rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, action="append", required=True, help="repeatable")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--first-layer", type=int, help="default: half of the layers")
    parser.add_argument("--whole", action="store_true", help="embeddings, head and norms, too")
    parser.add_argument("--rank", type=int, help="LoRA of this rank, in every layer")
    parser.add_argument("--exits", type=exits_of, help="LayerSkip: after so many layers, as 4,7")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="of the last layer; with --exits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--checkpoint-steps", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    loaded = load_model(arguments.model, "float32", "auto")
    tokenizer, model = loaded.tokenizer, loaded.model
    layers = model.model.layers
    first = len(layers) // 2 if arguments.first_layer is None else arguments.first_layer
    model.requires_grad_(False)
    if arguments.rank:
        parameters = add_low_rank(layers, arguments.rank)
    else:
        tuned = [model] if arguments.whole else layers[first:]
        parameters = [p.requires_grad_() for part in tuned for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.lr, weight_decay=0.0)
    samples = load_samples(arguments.data, tokenizer, MOST_TOKENS)
    plan = BatchPlan(samples, arguments.tokens_per_batch, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    state_file = arguments.out / STATE
    step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    model.train()
    if arguments.exits:
        if max(arguments.exits) >= len(layers):
            parser.error(f"--exits {max(arguments.exits)}; accepted: below {len(layers)}")
        drop_layers(layers, arguments.dropout)
    started, seen = time.monotonic(), 0
    for batch in plan.batches(start=step):
        batch = replace(batch, ids=batch.ids.to(model.device), mask=batch.mask.to(model.device))
        if step >= arguments.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(step, arguments.steps, arguments.lr, arguments.steps // 20 + 1)
        exits = arguments.exits
        loss = answer_loss(model, batch, exits[step % len(exits)] if exits else None)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        seen += batch.ids.numel()
        if step % 5 == 0:
            pace = seen / (time.monotonic() - started)
            print(
                f"step {step}/{arguments.steps}: loss {loss:.3f}, {pace:.0f} tokens/s", flush=True
            )
        if step % arguments.checkpoint_steps == 0:
            state = {
                "parameters": [p.data for p in parameters],
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
    if arguments.rank:
        merge_low_rank(layers)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    state_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
