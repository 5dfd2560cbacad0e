"""Samples questions from SmolLM2 and writes its greedy answers to these and to other questions, a
thousand sequences at once: 8.1M tokens in 75 seconds on an H200.

    python lab/recipes/smollm2/answers_on_gpu.py --out DIR \
        --questions 24000 --data questions.jsonl …

Writes DIR/self.jsonl and DIR/own.jsonl in the format of `multirate answers`, as training data. That
command works with any model and generates 17,000 tokens/s on the same GPU. This script only works
with Llama models: its step has static shapes and picks tokens on the device, so all of it is one
captured CUDA graph. `--check` compares three answers with `generate`. It also runs on a CPU,
slowly.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.loading.hub import load_model
from multirate.training.data import normalised, read_conversations, render_prompt
from multirate.training.fingerprint import fingerprint
from multirate.training.own_answers import record
from multirate.training.own_tokens import ANSWERS, MARK, Said, text_of
from multirate.training.question_filter import QuestionFilter
from multirate.training.sampled_questions import user_turn

LONGEST_QUESTION = 160
LEAST_SHARE = math.log(0.03)
"""Tokens of a question have at least this share of the most likely token's probability."""
TOKENS_PER_QUESTION = 62
LONGEST_PROMPT = 760
SPAN = 64
"""The attended length is rounded up to a multiple of this; each length is captured once."""
PREFILL_TOKENS = 1 << 16


class Weights:
    """The weights of a Llama, with q, k and v as one matrix, and gate and up as another."""

    def __init__(self, model: Any, device: torch.device) -> None:
        model = model.to(device)
        config = model.config
        self.device, self.size, self.eps = device, config.hidden_size, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.head_dim or self.size // self.heads
        theta = config.rope_parameters["rope_theta"]
        steps = torch.arange(0, self.dim, 2, device=device).float()
        self.frequencies = theta ** (-steps / self.dim)
        self.embedding, self.norm = model.model.embed_tokens.weight, model.model.norm.weight
        self.head = model.lm_head.weight
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(self.head.dtype), angles.sin().to(self.head.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Lanes:
    """`count` sequences of at most `slots` tokens, each at its own position.

    token, position [count]: input of the next step. said [steps, count]: its output, in row `at`.
    """

    def __init__(self, weights: Weights, count: int, slots: int, steps: int) -> None:
        self.weights, self.count, self.slots = weights, count, slots
        w, device = weights, weights.device
        shape = (count, w.kv_heads, slots, w.dim)
        self.keys = [torch.zeros(shape, device=device, dtype=w.head.dtype) for _ in w.layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.token, self.position = (
            torch.zeros(count, dtype=torch.long, device=device) for _ in range(2)
        )
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.said = torch.zeros(steps, count, dtype=torch.int32, device=device)
        self._captured: dict[Any, torch.cuda.CUDAGraph] = {}

    def prefill(self, ids: Tensor) -> None:
        """Keys and values of prompts ids [n, P], padded on the right, in the first n lanes."""
        w = self.weights
        per = max(1, PREFILL_TOKENS // ids.shape[1])
        for begin in range(0, len(ids), per):
            x = F.embedding(ids[begin : begin + per], w.embedding)
            n, length, _ = x.shape
            cos, sin = (
                part[None, None] for part in w.rotary(torch.arange(length, device=w.device))
            )
            for i, (norm, qkv, o, mlp_norm, gate_up, down) in enumerate(w.layers):
                y = F.linear(F.rms_norm(x, (w.size,), norm, w.eps), qkv)
                y = y.view(n, length, w.heads + 2 * w.kv_heads, w.dim).transpose(1, 2)
                q, k, v = y.split([w.heads, w.kv_heads, w.kv_heads], dim=1)
                q, k = rotated(q, cos, sin), rotated(k, cos, sin)
                self.keys[i][begin : begin + n, :, :length] = k
                self.values[i][begin : begin + n, :, :length] = v
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = x + F.linear(mixed.transpose(1, 2).reshape(n, length, -1), o)
                x = x + self._mlp(x, mlp_norm, gate_up, down)

    def logits(self, span: int) -> Tensor:
        """One step of all lanes, which attend to their first `span` slots at most → [count, V]."""
        w = self.weights
        x = F.embedding(self.token, w.embedding)
        cos, sin = w.rotary(self.position[:, None])
        seen = torch.arange(span, device=w.device) <= self.position[:, None]
        mask = torch.zeros(seen.shape, device=w.device, dtype=x.dtype)
        mask = mask.masked_fill(~seen, -torch.inf)[:, None, None]
        slot = self.position[:, None, None, None].expand(-1, w.kv_heads, 1, w.dim)
        for i, (norm, qkv, o, mlp_norm, gate_up, down) in enumerate(w.layers):
            y = F.linear(F.rms_norm(x, (w.size,), norm, w.eps), qkv)
            y = y.view(self.count, w.heads + 2 * w.kv_heads, w.dim)
            turned = rotated(y[:, : w.heads + w.kv_heads], cos, sin)
            self.keys[i].scatter_(2, slot, turned[:, w.heads :, None])
            self.values[i].scatter_(2, slot, y[:, w.heads + w.kv_heads :, None])
            keys, values = self.keys[i][:, :, :span], self.values[i][:, :, :span]
            q = turned[:, : w.heads].reshape(self.count, w.kv_heads, -1, w.dim) * w.dim**-0.5
            weight = torch.softmax((q @ keys.transpose(-1, -2) + mask).float(), -1).to(x.dtype)
            x = x + F.linear((weight @ values).reshape(self.count, -1), o)
            x = x + self._mlp(x, mlp_norm, gate_up, down)
        return F.linear(F.rms_norm(x, (w.size,), w.norm, w.eps), w.head)

    def _mlp(self, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        w = self.weights
        gate, up = F.linear(F.rms_norm(x, (w.size,), norm, w.eps), gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    def advance(self, chosen: Tensor, token: Tensor, position: Tensor) -> None:
        """Notes what was chosen [count]; the next step reads `token` at `position`."""
        self.said.index_copy_(0, self.at, chosen.int()[None])
        self.at.add_(1)
        self.token.copy_(token)
        self.position.copy_(position)

    def repeat(self, key: Any, step: Callable[[], None]) -> None:
        """Runs `step`; on a GPU it is recorded once for each key."""
        if self.weights.device.type != "cuda":
            step()
            return
        if key not in self._captured:
            state = [x.clone() for x in (self.token, self.position, self.at)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
                step()
            torch.cuda.current_stream().wait_stream(side)
            for x, before in zip((self.token, self.position, self.at), state, strict=True):
                x.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            self._captured[key] = graph
        self._captured[key].replay()


def sample_questions(
    weights: Weights, prefix: Sequence[int], ends: set[int], wanted: int, count: int
) -> list[list[int]]:
    """About `wanted` user turns (token ids) that follow `prefix`, sampled at temperature 1. A lane
    whose question ends begins the next one at once.
    """
    first = len(prefix) - 1
    steps = wanted * TOKENS_PER_QUESTION // count + LONGEST_QUESTION // 2
    lanes = Lanes(weights, count, first + 1 + LONGEST_QUESTION, steps + 4)
    lanes.prefill(torch.tensor(prefix, device=weights.device).expand(count, -1))
    lanes.token.fill_(prefix[-1])
    lanes.position.fill_(first)

    def step() -> None:
        logits = lanes.logits(lanes.slots).float()
        likely = logits >= logits.amax(-1, keepdim=True) + LEAST_SHARE
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        new = logits.masked_fill(~likely, -torch.inf).sub_(noise).argmax(-1)
        ended = torch.zeros_like(new, dtype=torch.bool)
        for end in ends:
            ended = ended | (new == end)
        full = lanes.position + 2 >= lanes.slots
        over = ended | full
        lanes.advance(
            torch.where(full & ~ended, -1, new),
            torch.where(over, prefix[-1], new),
            torch.where(over, first, lanes.position + 1),
        )

    for _ in range(steps):
        lanes.repeat("question", step)
    found = []
    for row in lanes.said[:steps].T.cpu().tolist():
        question: list[int] = []
        for token in row:
            if token in ends:
                found.append(question)
            if token in ends or token < 0:
                question = []
            else:
                question.append(token)
    return found


def answer(lanes: Lanes, prompts: Sequence[Sequence[int]], most: int, end: int) -> list[list[int]]:
    """The greedy answers of up to `most` tokens, without the one that ended them."""
    n, longest, device = len(prompts), max(map(len, prompts)), lanes.weights.device
    ids = torch.zeros(n, longest, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    lanes.prefill(ids.to(device))
    for state in (lanes.token, lanes.position, lanes.at):
        state.zero_()
    # the last token is read again: its step says the first one of the answer
    lanes.position[:n] = lengths.to(device) - 1
    lanes.token[:n] = ids[torch.arange(n), lengths - 1].to(device)

    def step(span: int) -> None:
        new = lanes.logits(span).argmax(-1)
        lanes.advance(new, new, (lanes.position + 1).clamp(max=lanes.slots - 1))

    made = 0
    while made < most:
        span = min(lanes.slots, -(-(longest + made + 1) // SPAN) * SPAN)
        lanes.repeat(span, lambda span=span: step(span))
        made += 1
        if made % 32 == 0 and bool((lanes.said[:made, :n] == end).any(0).all()):
            break
    rows = lanes.said[:made, :n].T.cpu().tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    rendered = render_prompt(tokenizer, [("user", text)])
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def answer_all(
    weights: Weights,
    tokenizer: Any,
    texts: list[str],
    out: Path,
    most: int,
    batch: int,
    end: int,
    model: str,
) -> None:
    """Writes a record for each text whose prompt is not too long; model: its fingerprint."""
    made_by = {MARK: ANSWERS, "model": model, "max_new_tokens": most}
    prompts = [prompt_ids(tokenizer, text) for text in texts]
    order = [i for i in range(len(texts)) if len(prompts[i]) <= LONGEST_PROMPT]
    order.sort(key=lambda i: len(prompts[i]))
    began, tokens, lanes = time.perf_counter(), 0, None
    if len(order) < len(texts):
        print(f"{out.name}: {len(texts) - len(order)} prompts are longer than {LONGEST_PROMPT}")
    with out.open("x", encoding="utf-8") as handle:  # what is there is not replaced
        for begin in range(0, len(order), batch):
            part = order[begin : begin + batch]
            slots = -(-(len(prompts[part[-1]]) + most) // 128) * 128
            if lanes is None or lanes.slots != slots:
                lanes = None  # its memory first
                lanes = Lanes(weights, batch, slots, most + 4)
            answers = answer(lanes, [prompts[i] for i in part], most, end)
            tokens += sum(map(len, answers))
            for i, found in zip(part, answers, strict=True):
                said = Said.of(prompts[i], found, "length")
                if len(found) < most:
                    said = Said.of(prompts[i], [*found, end], "eos")
                text = text_of(tokenizer, said.answer.tolist())
                line = record([("user", texts[i]), ("assistant", text)], [said], made_by)
                handle.write(json.dumps(line) + "\n")
            seconds = time.perf_counter() - began
            print(f"{out.name}: {begin + len(part)} of {len(order)}, {tokens / seconds:.0f} tok/s")


def check(weights: Weights, model: Any, tokenizer: Any, end: int) -> None:
    texts = ["What is a comet?", "Write two lines about the sea.", "Name three rivers."]
    prompts = [prompt_ids(tokenizer, text) for text in texts]
    answers = answer(Lanes(weights, 4, 256, 44), prompts, 40, end)
    for text, prompt, got in zip(texts, prompts, answers, strict=True):
        ids = torch.tensor([prompt], device=weights.device)
        said = model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
        said = said[: said.index(end)] if end in said else said
        same = next((i for i, (a, b) in enumerate(zip(got, said, strict=False)) if a != b), None)
        where = "as generate's" if got == said else f"differs from token {same} on"
        print(f"{text} → {where}: {tokenizer.decode(got)[:60]!r}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=0, help="how many to sample")
    parser.add_argument("--data", nargs="*", default=[], help="files of other questions")
    parser.add_argument("--heldout", nargs="*", default=[], help="files whose questions to avoid")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for file in (given.out / "self.jsonl", given.out / "own.jsonl"):
        if file.exists():
            parser.error(f"{file} is there already: choose another --out")
    torch.manual_seed(given.seed)
    loaded = load_model(given.model, "bfloat16", "cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    end, known = int(model.generation_config.eos_token_id), fingerprint(model)
    weights = Weights(model, model.device)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.check:
        check(weights, model, tokenizer, end)

    def first_turns(files: list[str]) -> list[str]:
        turns = (c.turns for f in files for c in read_conversations(f, answered=False))
        return [next(text for role, text in of_one if role == "user") for of_one in turns]

    heldout = {normalised(text) for text in first_turns(given.heldout)}
    most, batch = given.max_new_tokens, given.batch
    if given.questions:
        turn = user_turn(tokenizer, [end])
        accepts, kept = QuestionFilter(max(2, given.questions // 100)), []
        ends = set(turn.ends)
        # four of ten are left out, above all those that begin as many others
        sampled = sample_questions(weights, turn.prefix, ends, given.questions * 8 // 5, 2 * batch)
        for tokens in sampled:
            text = tokenizer.decode(tokens).strip()
            usable = not turn.special & set(tokens) and normalised(text) not in heldout
            if len(kept) < given.questions and usable and accepts.keep(text):
                kept.append(text)
        print(
            f"{len(kept)} questions of {len(sampled)} sampled; left out: {dict(accepts.left_out)}"
        )
        answer_all(weights, tokenizer, kept, given.out / "self.jsonl", most, batch, end, known)
    others = [t for t in dict.fromkeys(first_turns(given.data)) if normalised(t) not in heldout]
    if others:
        answer_all(weights, tokenizer, others, given.out / "own.jsonl", most, batch, end, known)


if __name__ == "__main__":
    main()
