"""What the base says to the training samples: computed once by its fastest decoder, kept. Opt-in.

By default the teacher runs in every step. Where the same samples are seen several times, or several
accelerators are trained on them, that repeats most of the work: with a folder of states a step runs
only the layers below the last gate, and no product with the whole vocabulary. Kept are, for every
token, the final residual h_L (2 · hidden_size bytes) and the `TOP` likeliest next tokens with their
log-probabilities (6 bytes each).

States are kept by sample: other data, or another split of it, uses those that are there and adds
its own at the end. An interrupted computation is continued.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multirate.errors import UserError
from multirate.io import parse_json, write_atomically
from multirate.methods.common.distillation import TopTokens
from multirate.methods.common.teacher import Known
from multirate.model.decoder import Decoder
from multirate.model.rows import Rows
from multirate.training.data import Sample

INDEX = "teacher_states.json"
FINAL, TOKENS, LOG_PROBS = "final_residuals.bf16", "top_tokens.int32", "top_log_probs.fp16"
TOP = 32
ROWS_PER_CALL = 1024
SAVE_SECONDS = 20.0


class TeacherStates:
    """h_L and the likeliest tokens of every sample, on disk. ``batch`` reads them; samples with
    equal ids share their rows. top: likeliest tokens kept of each; default TOP.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[Sample],
        hidden_size: int,
        fingerprint: str,
        top: int | None = None,
    ) -> None:
        self.folder = folder
        top = top or TOP
        self._columns: dict[str, tuple[Any, int]] = {
            FINAL: (np.uint16, hidden_size),
            TOKENS: (np.int32, top),
            LOG_PROBS: (np.float16, top),
        }
        self._identity = {"base": fingerprint, "hidden_size": hidden_size, "top": top}
        self._keys = [_key(sample) for sample in samples]
        self._lengths = [len(sample.ids) for sample in samples]
        self._place = self._read_index()  # key → row of the first token
        missing = {
            key: sample
            for key, sample in zip(self._keys, samples, strict=True)
            if key not in self._place
        }
        self._missing = list(missing.items())
        self._open()

    @property
    def bytes(self) -> int:
        """Size of the files, with what is still missing."""
        per_row = sum(np.dtype(kind).itemsize * width for kind, width in self._columns.values())
        return per_row * (self._rows + sum(len(sample.ids) for _, sample in self._missing))

    def _read_index(self) -> dict[str, int]:
        """Samples that are on disk; UserError when the folder belongs to another base."""
        path = self.folder / INDEX
        self._rows = 0
        if not path.exists():
            return {}
        try:
            saved = parse_json(path.read_bytes(), path)
            identity, rows = saved["identity"], int(saved["rows"])
            place = {str(key): int(row) for key, row in saved["samples"].items()}
            short = any(
                (self.folder / name).stat().st_size < rows * width * np.dtype(kind).itemsize
                for name, (kind, width) in self._columns.items()
            )
        except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged() from None
        if identity != self._identity:
            raise UserError(
                f"{self.folder} holds the states of another base model; choose another "
                "--teacher-states folder or delete it"
            )
        if short or any(not 0 <= row < max(rows, 1) for row in place.values()):
            raise self._damaged()
        self._rows = rows
        return place

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.folder / INDEX} is damaged; delete the folder {self.folder} to start over"
        )

    def _open(self) -> None:
        """Maps the files, grown to hold what is missing."""
        total = self._rows + sum(len(sample.ids) for _, sample in self._missing)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._maps = {}
            for name, (kind, width) in self._columns.items():
                path = self.folder / name
                path.touch()
                size = total * width * np.dtype(kind).itemsize
                if path.stat().st_size < size:
                    with path.open("r+b") as file:
                        file.truncate(size)
                if total:
                    self._maps[name] = np.memmap(path, kind, "r+", shape=(total, width))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            size = f"{self.bytes / 1e9:.1f} GB"
            raise UserError(
                f"teacher states of {size} cannot be kept in {self.folder}: {reason}"
            ) from None

    def _save_index(self) -> None:
        for file in self._maps.values():
            file.flush()
        content = {"identity": self._identity, "rows": self._rows, "samples": self._place}
        write_atomically(self.folder / INDEX, json.dumps(content).encode())

    @property
    def complete(self) -> bool:
        """Whether every sample's states are on disk."""
        return not self._missing

    @torch.no_grad()
    def compute(self, decoder: Decoder, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the base over what is missing. ``progress(done, of)`` counts distinct samples."""
        if self.complete:
            return
        of, saved = len(set(self._keys)), time.monotonic()
        try:
            while self._missing:
                count = tokens = 0
                for _, sample in self._missing:
                    if count and tokens + len(sample.ids) > ROWS_PER_CALL:
                        break
                    count, tokens = count + 1, tokens + len(sample.ids)
                self._add(decoder, self._missing[:count])
                del self._missing[:count]
                if time.monotonic() - saved > SAVE_SECONDS:
                    self._save_index()
                    saved = time.monotonic()
                if progress is not None:
                    progress(of - len(self._missing), of)
        finally:
            self._save_index()

    def _add(self, decoder: Decoder, part: Sequence[tuple[str, Sample]]) -> None:
        samples = [sample for _, sample in part]
        cache = decoder.new_cache(len(samples), max(len(s.ids) for s in samples))
        rows = Rows.concat([Rows.causal(b, 0, len(s.ids)) for b, s in enumerate(samples)])
        ids = torch.from_numpy(np.concatenate([s.ids for s in samples]).astype(np.int64)).to(
            decoder.info.device
        )
        x = decoder.embed(ids, rows.pos)
        hidden = decoder.layers(x, rows, 0, decoder.info.num_layers, cache)
        end = self._rows + len(hidden)
        self._maps[FINAL][self._rows : end] = (
            hidden.to(torch.bfloat16).view(torch.uint16).cpu().numpy()
        )
        for begin in range(0, len(hidden), ROWS_PER_CALL // 8):
            logits = decoder.logits(hidden[begin : begin + ROWS_PER_CALL // 8])
            best, tokens = logits.topk(min(self._top, logits.shape[-1]), dim=-1)
            best = best - logits.logsumexp(-1, keepdim=True)
            at = slice(self._rows + begin, self._rows + begin + len(logits))
            self._maps[TOKENS][at, : tokens.shape[-1]] = tokens.cpu().numpy()
            self._maps[LOG_PROBS][at] = -np.inf  # a vocabulary may have fewer tokens
            self._maps[LOG_PROBS][at, : best.shape[-1]] = best.float().cpu().numpy()
        for key, sample in part:
            self._place[key] = self._rows
            self._rows += len(sample.ids)

    @property
    def _top(self) -> int:
        return self._columns[TOKENS][1]

    def batch(self, indices: Sequence[int], length: int) -> Known:
        """What is known of the samples ``indices``: [B, length, …], zeros after a sample's end."""
        final, tokens, log_probs = (
            torch.zeros(len(indices), length, width, dtype=dtype)
            for (_, width), dtype in zip(
                self._columns.values(), (torch.float32, torch.int64, torch.float32), strict=True
            )
        )
        for b, i in enumerate(indices):
            first, count = self._place[self._keys[i]], self._lengths[i]
            at = slice(first, first + count)
            bits = torch.from_numpy(np.array(self._maps[FINAL][at]))
            final[b, :count] = bits.view(torch.bfloat16).float()
            tokens[b, :count] = torch.from_numpy(np.array(self._maps[TOKENS][at], np.int64))
            log_probs[b, :count] = torch.from_numpy(np.array(self._maps[LOG_PROBS][at], np.float32))
        return Known(final, TopTokens(tokens, log_probs))


def _key(sample: Sample) -> str:
    """Which sample this is, whatever data it is part of."""
    return hashlib.sha256(sample.ids.astype(np.int32).tobytes()).hexdigest()[:32]


def report_to_terminal(seconds: float = 20.0) -> Callable[[int, int], None]:
    """A line that is rewritten; in a log file one every so many seconds, with the rate."""
    begun = said = time.monotonic()
    first: int | None = None

    def report(done: int, of: int) -> None:
        nonlocal said, first
        if first is None:
            first = done
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not terminal and done < of and now - said < seconds:
            return
        said = now
        rate = (done - first) / max(now - begun, 1e-9)
        left = f", {(of - done) / rate / 60:.0f} min left" if rate and done < of else ""
        line = f"the base reads the samples: {done} of {of}{left}"
        end = "\n" if done == of or not terminal else ""
        sys.stderr.write(f"\r{line:<70}{end}" if terminal else f"{line}{end}")
        sys.stderr.flush()

    return report
