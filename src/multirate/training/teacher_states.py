"""The base model's outputs on the training samples, computed once by its fastest decoder and
stored. Opt-in.

By default the teacher runs in every step. If the same samples are seen several times, or several
accelerators are trained on them, that repeats most of the work. With a folder of states a step runs
only the layers below the last gate, and no product with the whole vocabulary. For every token the
folder holds the final residual h_L (2 · hidden_size bytes), the `TOP` likeliest next tokens with
their log-probabilities (6 bytes each) and, for methods that read them, the residuals entering inner
layers, the taps (2 · hidden_size bytes each).

Each sample's are tensors of their own in safetensors files: other data, or another split of it,
uses the existing ones and appends its own, and so does a method that reads other taps. The same
call continues an interrupted computation.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from multirate.decoding.prefill import read_in_pieces
from multirate.errors import UserError
from multirate.io import locked, parse_json, write_atomically, written_elsewhere
from multirate.methods._shared.distillation import TopTokens
from multirate.methods._shared.teacher import Known
from multirate.runtime.decoder import Decoder
from multirate.training.data import Sample

INDEX, FILE = "teacher_states.json", "states-{:05}.safetensors"
FINAL, TOKENS, LOG_PROBS = "final", "tokens", "log_probs"
TOP = 32
ROWS_PER_CALL = 1024
SAVE_SECONDS, SAVE_TOKENS = 20.0, 8192


class TeacherStates:
    """h_L, the likeliest tokens, and what enters the layers `taps`, of every sample, on disk.
    ``batch`` reads them; samples with equal ids share theirs. top: likeliest tokens kept of each;
    default TOP.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[Sample],
        hidden_size: int,
        fingerprint: str,
        top: int | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        self.folder, self.taps, self._top = folder, tuple(sorted(taps)), top or TOP
        self._width = hidden_size
        self._identity = {"base": fingerprint, "hidden_size": hidden_size, "top": self._top}
        self._bytes_of = {FINAL: 2 * hidden_size, TOKENS: 4 * self._top, LOG_PROBS: 2 * self._top}
        self._bytes_of |= {str(tap): 2 * hidden_size for tap in self.taps}
        self._files = 0
        self._where: dict[str, Any] = {}  # the open file of each tensor
        self._unsaved: dict[str, Tensor] = {}
        self._keys = [_key(sample) for sample in samples]
        self._samples = dict(zip(self._keys, samples, strict=True))
        alone = self._hold()
        self._read()
        self._missing = [key for key in self._samples if any(self._lacking(key))]
        if self._missing and not alone:
            raise written_elsewhere(self.folder)
        self._begin()
        if self.complete:
            self._release()

    def _hold(self) -> bool:
        """Whether no other process adds to the folder; none does then until `_release`."""
        self._release: Callable[[], object] = lambda: None
        with suppress(OSError):  # `_begin` says it
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
            self._release = weakref.finalize(self, os.close, handle)
            return locked(handle)
        return True

    def _lacking(self, key: str) -> Iterator[str]:
        """The parts of a sample that are not on disk."""
        return (part for part in self._bytes_of if f"{key}.{part}" not in self._where)

    @property
    def bytes(self) -> int:
        """Size of the samples' states, with those that are missing."""
        tokens = sum(len(sample.ids) for sample in self._samples.values())
        return tokens * sum(self._bytes_of.values())

    def _read(self) -> None:
        """Opens what is on disk. Raises UserError if the folder belongs to another base."""
        path = self.folder / INDEX
        if not path.exists():
            return
        try:
            identity = parse_json(path.read_bytes(), path)["identity"]
            for file in sorted(self.folder.glob(FILE.format(0).replace("00000", "*"))):
                self._add_file(file)
        except (OSError, UserError, SafetensorError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} is damaged, or not a file of teacher states; choose another "
                "--teacher-states folder or delete the states in this one"
            ) from None
        if identity != self._identity:
            raise UserError(
                f"{self.folder} holds the states of another base model; choose another "
                "--teacher-states folder or delete it"
            )

    def _add_file(self, path: Path) -> None:
        self._files = max(self._files, int(path.stem.rpartition("-")[2]))
        file = safe_open(path, framework="pt")
        self._where.update(dict.fromkeys(file.keys(), file))

    def _begin(self) -> None:
        """An index first: without it, files of these names are someone else's."""
        needed = sum(
            len(self._samples[key].ids) * sum(map(self._bytes_of.__getitem__, self._lacking(key)))
            for key in self._missing
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            full = needed > shutil.disk_usage(self.folder).free
            reason = "no space left on device" if full else ""
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        if reason:
            raise UserError(
                f"cannot store {needed / 1e9:.1f} GB of teacher states in {self.folder}: {reason}"
            )
        if not (self.folder / INDEX).exists():
            first = self.folder / FILE.format(1)
            if first.exists():
                raise UserError(
                    f"{first} exists and does not belong to teacher states, so it is not "
                    "replaced; choose another --teacher-states folder"
                )
            write_atomically(self.folder / INDEX, json.dumps({"identity": self._identity}))

    @property
    def complete(self) -> bool:
        return not self._missing

    @torch.no_grad()
    def compute(self, decoder: Decoder, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the base over what is missing. ``progress(done, of)`` counts distinct samples."""
        if self.complete:
            return
        of, saved, unsaved = len(self._samples), time.monotonic(), 0
        try:
            while self._missing:
                count = tokens = 0
                for key in self._missing:
                    length = len(self._samples[key].ids)
                    if count and tokens + length > ROWS_PER_CALL:
                        break
                    count, tokens = count + 1, tokens + length
                self._add(decoder, self._missing[:count])
                del self._missing[:count]
                unsaved += tokens
                if unsaved > SAVE_TOKENS or time.monotonic() - saved > SAVE_SECONDS:
                    self._save()
                    saved, unsaved = time.monotonic(), 0
                if progress is not None:
                    progress(of - len(self._missing), of)
        finally:
            self._save()
            if self.complete:
                self._release()

    def _save(self) -> None:
        if self._unsaved:
            path = self.folder / FILE.format(self._files + 1)
            write_atomically(path, save(self._unsaved))
            self._unsaved = {}
            self._add_file(path)

    def _add(self, decoder: Decoder, keys: Sequence[str]) -> None:
        texts = {b: self._samples[key].ids.tolist() for b, key in enumerate(keys)}
        cache = decoder.new_cache(len(keys), max(map(len, texts.values())))
        lacking = {part for key in keys for part in self._lacking(key)}
        taps = [tap for tap in self.taps if str(tap) in lacking]
        ends = FINAL in lacking
        last = decoder.info.num_layers if ends else max(taps)
        pieces = [states for _, states in read_in_pieces(decoder, cache, texts, taps, stop=last)]
        values = {str(tap): torch.cat([states[tap] for states in pieces]) for tap in taps}
        if ends:
            hidden = torch.cat([states[last] for states in pieces])
            values |= {FINAL: hidden, **self._likeliest(decoder, hidden)}
        lengths = [len(text) for text in texts.values()]
        for part, rows in values.items():
            if rows.dtype != torch.int32 and part != LOG_PROBS:
                rows = rows.bfloat16()
            for key, own in zip(keys, rows.cpu().split(lengths), strict=True):
                if f"{key}.{part}" not in self._where:
                    self._unsaved[f"{key}.{part}"] = own.clone()

    def _likeliest(self, decoder: Decoder, hidden: Tensor) -> Mapping[str, Tensor]:
        """[n, top] of each row: tokens int32, log-probabilities float16; -inf where a small
        vocabulary has no more.
        """
        likeliest = torch.zeros(len(hidden), self._top, dtype=torch.int32, device="cpu")
        said = torch.full(likeliest.shape, -torch.inf, dtype=torch.float16, device="cpu")
        step = ROWS_PER_CALL // 8
        for begin in range(0, len(hidden), step):
            logits = decoder.logits(hidden[begin : begin + step])
            best, tokens = logits.topk(min(self._top, logits.shape[-1]), dim=-1)
            place = slice(begin, begin + step), slice(0, tokens.shape[-1])
            likeliest[place] = tokens.cpu().int()
            said[place] = (best - logits.logsumexp(-1, keepdim=True)).cpu().half()
        return {TOKENS: likeliest, LOG_PROBS: said}

    def batch(self, indices: Sequence[int], length: int) -> Known:
        """What is known of the samples ``indices``: [B, length, …], zeros after a sample's end."""

        def read(part: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            found = torch.zeros(len(indices), length, width, dtype=dtype, device="cpu")
            for b, key in enumerate(self._keys[i] for i in indices):
                name = f"{key}.{part}"
                found[b, : len(self._samples[key].ids)] = self._where[name].get_tensor(name)
            return found

        top = TopTokens(read(TOKENS, self._top, torch.int64), read(LOG_PROBS, self._top))
        residual = {tap: read(str(tap), self._width) for tap in self.taps}
        return Known(read(FINAL, self._width), top, residual)


def _key(sample: Sample) -> str:
    """Which sample this is, whatever data it is part of."""
    return hashlib.sha256(sample.ids.astype(np.int32).tobytes()).hexdigest()[:32]


def report_to_terminal(seconds: float = 20.0) -> Callable[[int, int], None]:
    """A progress line that is rewritten; in a log file, a new line at intervals, with the rate."""
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
        line = f"running the base model on the samples: {done} of {of}{left}"
        end = "\n" if done == of or not terminal else ""
        sys.stderr.write(f"\r{line:<70}{end}" if terminal else f"{line}{end}")
        sys.stderr.flush()

    return report
