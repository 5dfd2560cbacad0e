"""Who knows best whether a gate's token is the full model's: ARLA, plain confidences, the states'
saturation; on the accelerated stream and, at the same layer, on the model's own residual.

    python benchmarks/exit_judges.py smollm2 -a m2r2-carry --data answers.jsonl --json out.json

answers.jsonl: the model's own answers (`multirate answers`) to questions that no accelerator was
trained on. Half of them, whole texts, fit ARLA anew with different inputs; on the other half every
judge is scored: its AUC, and the share of tokens that may leave at the gate so that 99%, 95% or 90%
of all tokens are the full model's. The text is the model's own, every carried residual is true:
this is about judges, not about speed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.cli.progress import Bar
from multirate.loading.hub import load_model, resolve_accelerator
from multirate.methods._shared.branch_tracing import BranchTracer, Interval
from multirate.methods._shared.objective import (
    BINS,
    auc,
    balanced_bce,
    expected_calibration_error,
)
from multirate.methods.m2r2.arla import ARLA
from multirate.methods.spec import find
from multirate.provenance import collect
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.rows import Rows
from multirate.training.checkpoint import Accelerator
from multirate.training.data import Sample, load_samples

KEPT = (0.99, 0.95, 0.9)
CHUNK = 64
EPOCHS, BATCH, RATE = 12, 512, 1e-3
SATURATION, CONFIDENCE, MARGIN = "saturation", "top-1 probability", "top-1 minus top-2"

Seen = dict[str, Tensor]
"""By name, of the rows of many texts: what a judge may look at, [n] scores, [n, d] residuals (after
the final norm), and agree [n], bool.
"""


def look(logits: Tensor, target: Tensor, before: Tensor, after: Tensor) -> Seen:
    """What may be known of rows [n] at a gate without ARLA. before, after [n, d]: the states around
    the last layer below it.
    """
    top = torch.softmax(logits, dim=-1).topk(2, dim=-1).values
    return {
        "agree": logits.argmax(dim=-1) == target,
        CONFIDENCE: top[:, 0],
        MARGIN: top[:, 0] - top[:, 1],
        SATURATION: F.cosine_similarity(before.float(), after.float(), dim=-1),
    }


def of_gate(
    decoder: Decoder, states: Sequence[Tensor], interval: Interval, wanted: Tensor
) -> dict[str, Seen]:
    """What the two streams show at a gate, of the wanted rows (bool [n]): "accelerated", "plain".

    states: the model's own residuals, entering each layer, and the last one's output.
    """
    start, gate = interval.start, interval.gate
    kept = [state[wanted] for state in states]
    target = decoder.logits(kept[-1]).argmax(dim=-1)
    read, own = interval.read[wanted], kept[gate]
    last = interval.states[-2][wanted], interval.states[-1][wanted]
    accelerated = look(interval.logits[wanted], target, *last)
    plain = look(decoder.logits(own), target, kept[gate - 1], own)
    accelerated["shipped"] = torch.tensor(interval.scores.get("ARLA", []))[
        wanted if "ARLA" in interval.scores else slice(0)
    ]
    accelerated["residual"] = decoder.norm(read).float()
    accelerated["velocity"] = decoder.norm(read - kept[start]).float()
    accelerated["own residual"] = plain["residual"] = decoder.norm(own).float()
    plain["velocity"] = decoder.norm(own - kept[start]).float()
    return {"accelerated": accelerated, "plain": plain}


@torch.no_grad()
def read_texts(
    decoder: Decoder, tracer: BranchTracer, samples: Sequence[Sample]
) -> list[dict[str, Seen]]:
    """For each gate what the streams show, over the response rows of all samples."""
    found: list[dict[str, dict[str, list[Tensor]]]] = [
        {stream: defaultdict(list) for stream in ("accelerated", "plain")} for _ in tracer.gates
    ]
    layers = decoder.info.num_layers
    with Bar("reading", len(samples)) as bar:
        for sample in samples:
            cache = decoder.new_cache(1, len(sample.ids))
            tracer.begin(cache)
            answered = torch.from_numpy(sample.response)
            for start in range(0, len(sample.ids) - 1, CHUNK):
                ids = sample.ids[start : start + CHUNK]
                ids = ids[: len(sample.ids) - 1 - start]
                rows = Rows.causal(0, start, len(ids))
                x = decoder.embed(torch.from_numpy(ids).long(), rows.pos)
                last, taps = decoder.layers_with_taps(x, rows, 0, layers, cache, range(1, layers))
                cache.commit(0, len(ids))
                states = [x, *(taps[layer] for layer in range(1, layers)), last]
                wanted = answered[start + 1 : start + 1 + len(ids)]
                intervals = tracer.trace(ids.tolist(), start, states)
                if not wanted.any():
                    continue
                for into, interval in zip(found, intervals, strict=True):
                    for stream, seen in of_gate(decoder, states, interval, wanted).items():
                        for name, values in seen.items():
                            into[stream][name].append(values)
            decoder.release_cache(cache)
            bar.advance()
    return [
        {
            stream: {name: torch.cat(parts) for name, parts in seen.items()}
            for stream, seen in gate.items()
        }
        for gate in found
    ]


def fitted(inputs: Tensor, agree: Tensor, latent: int, seed: int = 0) -> ARLA:
    """An ARLA over inputs [n, j, d], trained as shipped ones are, at the epoch that knows the last
    tenth of the rows best.
    """
    torch.manual_seed(seed)
    arla = ARLA(inputs.shape[-1], latent, inputs.shape[1])
    optimizer = torch.optim.Adam(arla.parameters(), lr=RATE)
    held = len(inputs) - len(inputs) // 10
    best, state = -1.0, arla.state_dict()
    for _ in range(EPOCHS):
        for part in torch.randperm(held).split(BATCH):
            loss = balanced_bce(arla(inputs[part]), agree[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            score = exact_auc(arla(inputs[held:]), agree[held:])
        if score is not None and score > best:
            best = score
            state = {name: value.clone() for name, value in arla.state_dict().items()}
    arla.load_state_dict(state)
    return arla.eval()


def exact_auc(score: Tensor, agree: Tensor) -> float | None:
    """Area under the ROC curve of scores in [0, 1] or of logits, by BINS bins of their ranks."""
    rank = score.float().argsort().argsort().float() / max(len(score), 1)
    hits, misses = (torch.histc(rank[which], 50 * BINS, 0, 1).double() for which in (agree, ~agree))
    return auc(hits, misses)


def leaving(score: Tensor, agree: Tensor, kept: float) -> float:
    """The largest share of tokens that may leave, the surest first, so that `kept` of all are the
    full model's.
    """
    wrong = (~agree[score.argsort(descending=True)]).cumsum(0)
    return float((wrong <= (1 - kept) * len(agree)).sum()) / len(agree)


def scored(name: str, score: Tensor, agree: Tensor, probability: bool) -> dict[str, Any]:
    """A judge's row. probability: the score is one, so that it can be calibrated."""
    row: dict[str, Any] = {"judge": name, "auc": exact_auc(score, agree)}
    if probability:
        hits, misses = (torch.histc(score[m].float(), BINS, 0, 1).double() for m in (agree, ~agree))
        row["ece"] = expected_calibration_error(hits, misses)
    row["leaving"] = {f"{kept:g}": leaving(score, agree, kept) for kept in KEPT}
    return row


def combined(fit: Iterable[Tensor], agree: Tensor, test: Iterable[Tensor]) -> Tensor:
    """Logistic regression over scores [n] each, fitted on the first → probabilities of the test's
    rows.
    """
    known, asked = torch.stack([*fit], dim=1), torch.stack([*test], dim=1)
    mean, spread = known.mean(0), known.std(0).clamp(min=1e-6)
    line = torch.nn.Linear(known.shape[1], 1)
    optimizer = torch.optim.LBFGS(line.parameters(), max_iter=100)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(
            line((known - mean) / spread)[:, 0], agree.float()
        )
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return line((asked - mean) / spread)[:, 0].sigmoid()


def judges(
    fit: list[dict[str, Seen]], test: list[dict[str, Seen]], gate: int, stream: str, latent: int
) -> dict[str, Any]:
    """All judges of one stream at one gate (its number)."""
    known, asked = fit[gate][stream], test[gate][stream]
    agree = asked["agree"]
    rows = [
        scored("oracle", agree.float(), agree, True),
        scored(CONFIDENCE, asked[CONFIDENCE], agree, True),
        scored(MARGIN, asked[MARGIN], agree, False),
        scored(SATURATION, asked[SATURATION], agree, False),
    ]
    if len(asked.get("shipped", ())):
        rows.append(scored("ARLA, as trained with the stream", asked["shipped"], agree, True))
        # it has seen neither half; one that was fitted on the first half knows that too well
        parts = [
            (s["shipped"].logit(1e-4), s[CONFIDENCE].logit(1e-4), s[MARGIN]) for s in (known, asked)
        ]
        joint = combined(parts[0], known["agree"], parts[1])
        rows.append(scored("that ARLA and the probabilities", joint, agree, True))
    names = {"this gate's residual": ["residual"], "its velocity": ["velocity"]}
    names["residual and velocity"] = ["velocity", "residual"]
    if stream == "accelerated":
        names["residual and the model's own there"] = ["own residual", "residual"]

    def seen(of: list[dict[str, Seen]], inputs: Sequence[str]) -> Tensor:
        return torch.stack([of[gate][stream][name] for name in inputs], dim=1)

    def all_gates(of: list[dict[str, Seen]]) -> Tensor:
        return torch.stack([of[j][stream]["residual"] for j in range(gate + 1)], dim=1)

    inputs = {name: (seen(fit, of), seen(test, of)) for name, of in names.items()}
    if gate:
        inputs["all gates' residuals"] = all_gates(fit), all_gates(test)
    for name, (knows, asks) in inputs.items():
        arla = fitted(knows, known["agree"], latent)
        with torch.no_grad():
            score = arla(asks).sigmoid()
        rows.append(scored(f"ARLA, fitted here: {name}", score, agree, True))
    return {"agreement": float(agree.float().mean()), "rows": len(agree), "judges": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-a", "--accelerator", required=True)
    parser.add_argument("--data", type=Path, required=True, nargs="+")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loaded = load_model(args.model)
    decoder = load_decoder(loaded.model)
    folder = resolve_accelerator(args.accelerator, loaded.model.config)
    accelerator = Accelerator.from_pretrained(folder, loaded.model)
    tracer_of = find(accelerator.method).tracer
    if tracer_of is None:
        parser.error(f"{args.accelerator}: a {accelerator.method} has no stream to judge")
    samples = load_samples(args.data, loaded.tokenizer, args.max_length)
    tracer = tracer_of(decoder, accelerator.module)
    fit, test = (read_texts(decoder, tracer, samples[begin::2]) for begin in (0, 1))
    latent = accelerator.config.arla_dim or 64
    gates = {
        str(number): {s: judges(fit, test, j, s, latent) for s in ("accelerated", "plain")}
        for j, number in enumerate(tracer.gates)
    }
    result = {
        **collect(decoder.info.device),
        "accelerator": args.accelerator,
        "layers": decoder.info.num_layers,
        "texts": len(samples),
        "gates": gates,
    }
    for number, streams in gates.items():
        for stream, about in streams.items():
            print(f"gate {number}, {stream}: agreement {about['agreement']:.3f}")
            for row in about["judges"]:
                shares = "  ".join(f"{100 * share:5.1f}%" for share in row["leaving"].values())
                print(f"  {row['judge']:48} AUC {row['auc']:.3f}  leaving {shares}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
