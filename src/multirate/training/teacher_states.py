"""The base model's outputs on the training samples, computed once by its fastest decoder and
stored. Opt-in.

By default the teacher runs in every step. If the same samples are seen several times, or several
accelerators are trained on them, that repeats most of the work. With a folder of states a step runs
only the layers below the last gate, and no product with the whole vocabulary. For every token the
folder holds the final residual h_L (2 · hidden_size bytes), the `TOP` likeliest next tokens with
their log-probabilities (6 bytes each) and, for methods that read them, the residuals entering inner
layers, the taps (2 · hidden_size bytes each).

States are stored by sample: other data, or another split of it, uses the existing ones and appends
its own, and so does a method that reads other taps. The same call continues an interrupted
computation.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from multirate.decoding.prefill import read_in_pieces
from multirate.errors import UserError
from multirate.io import locked, parse_json, write_atomically, written_elsewhere
from multirate.methods._shared.distillation import TopTokens
from multirate.methods._shared.teacher import Known
from multirate.runtime.decoder import Decoder
from multirate.training.data import Sample

INDEX = "teacher_states.json"
FINAL, TOKENS, LOG_PROBS = "final_residuals.bf16", "top_tokens.int32", "top_log_probs.fp16"
TAP = "residual_{}.bf16"
TOP = 32
ROWS_PER_CALL = 1024
SAVE_SECONDS = 20.0


class _Store:
    """Files whose rows are tokens, those of a sample one after the other. place: sample's key → row
    of its first token; columns: file name → (numpy type, numbers a token).
    """

    def __init__(self, columns: Mapping[str, tuple[Any, int]]) -> None:
        self.columns = dict(columns)
        self.rows, self.place = 0, dict[str, int]()
        self._maps: dict[str, np.memmap] = {}

    @property
    def row_bytes(self) -> int:
        return sum(np.dtype(kind).itemsize * width for kind, width in self.columns.values())

    def read(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """The index's entry; ValueError where it does not fit the files."""
        self.rows = int(saved["rows"])
        self.place = {str(key): int(row) for key, row in saved["samples"].items()}
        short = any(
            (folder / name).stat().st_size < self.rows * width * np.dtype(kind).itemsize
            for name, (kind, width) in self.columns.items()
        )
        if short or any(not 0 <= row < max(self.rows, 1) for row in self.place.values()):
            raise ValueError("rows are missing")

    def entry(self) -> dict[str, Any]:
        """For the index, once the rows are on disk."""
        for file in self._maps.values():
            file.flush()
        return {"rows": self.rows, "samples": self.place}

    def open(self, folder: Path, more: int) -> None:
        """Maps the files, grown to hold as many more rows."""
        total = self.rows + more
        for name, (kind, width) in self.columns.items():
            path = folder / name
            path.touch()
            if more:
                with path.open("r+b") as file:
                    _reserve(file, total * width * np.dtype(kind).itemsize)
            if total:
                self._maps[name] = np.memmap(path, kind, "r+", shape=(total, width))

    def cut(self, folder: Path) -> None:
        """The files end after the rows that there are."""
        for name, (kind, width) in self.columns.items():
            if (folder / name).exists():
                os.truncate(folder / name, self.rows * width * np.dtype(kind).itemsize)

    def write(self, name: str, row: int, values: np.ndarray) -> None:
        """values [n, at most the file's width]."""
        self._maps[name][row : row + len(values), : values.shape[1]] = values

    def read_rows(self, name: str, key: str, count: int) -> np.ndarray:
        """[count, width], of a sample."""
        row = self.place[key]
        return np.array(self._maps[name][row : row + count])


def _reserve(file: IO[bytes], size: int) -> None:
    """At least so many bytes, on the disk: one that is full would end the process as the map is
    written. Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    elif os.fstat(file.fileno()).st_size < size:
        file.truncate(size)


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.bfloat16).view(torch.uint16).cpu().numpy()


def _from_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


class TeacherStates:
    """h_L, the likeliest tokens, and what enters the layers `taps`, of every sample, on disk.
    ``batch`` reads them; samples with equal ids share their rows. top: likeliest tokens kept of
    each; default TOP.
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
        self._said = _Store(
            {
                FINAL: (np.uint16, hidden_size),
                TOKENS: (np.int32, self._top),
                LOG_PROBS: (np.float16, self._top),
            }
        )
        self._tapped = {tap: self._tap_store(tap) for tap in self.taps}
        self._keys = [_key(sample) for sample in samples]
        self._lengths = [len(sample.ids) for sample in samples]
        alone = self._hold()
        self._read_index()
        distinct = dict(zip(self._keys, samples, strict=True))
        self._missing = [
            (key, sample)
            for key, sample in distinct.items()
            if any(key not in store.place for store in self._stores)
        ]
        if self._missing and not alone:
            raise written_elsewhere(self.folder)
        self._open()
        if self.complete:
            self._release()

    def _hold(self) -> bool:
        """Whether no other process adds to the folder; none does then until `_release`."""
        self._release: Callable[[], object] = lambda: None
        with suppress(OSError):  # `_open` says it
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
            self._release = weakref.finalize(self, os.close, handle)
            return locked(handle)
        return True

    def _tap_store(self, tap: int) -> _Store:
        return _Store({TAP.format(tap): (np.uint16, self._width)})

    @property
    def _stores(self) -> list[_Store]:
        """Those that this run reads."""
        return [self._said, *(self._tapped[tap] for tap in self.taps)]

    def _rows_missing(self, store: _Store) -> int:
        return sum(len(sample.ids) for key, sample in self._missing if key not in store.place)

    @property
    def bytes(self) -> int:
        """Size of the files that are read, with what is still missing."""
        return sum(
            store.row_bytes * (store.rows + self._rows_missing(store)) for store in self._stores
        )

    def _read_index(self) -> None:
        """What is on disk. Raises UserError if the folder belongs to another base."""
        path = self.folder / INDEX
        if not path.exists():
            return
        try:
            saved = parse_json(path.read_bytes(), path)
            if saved["identity"] == self._identity:
                self._said.read(self.folder, saved)
                for tap, entry in saved.get("taps", {}).items():  # other runs' as well
                    store = self._tapped.setdefault(int(tap), self._tap_store(int(tap)))
                    store.read(self.folder, entry)
                return
        except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path} is damaged, or not a file of teacher states; choose another "
                "--teacher-states folder or delete the states in this one"
            ) from None
        raise UserError(
            f"{self.folder} holds the states of another base model; choose another "
            "--teacher-states folder or delete it"
        )

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / INDEX).exists():
                self._begin()
            for store in self._stores:
                store.open(self.folder, self._rows_missing(store))
        except OSError as error:
            for store in self._stores:
                with suppress(OSError):
                    store.cut(self.folder)
            reason = (error.strerror or str(error)).lower()
            size = f"{self.bytes / 1e9:.1f} GB"
            raise UserError(
                f"cannot store {size} of teacher states in {self.folder}: {reason}"
            ) from None

    def _begin(self) -> None:
        """An index of no rows: without it, files of these names are someone else's."""
        paths = [self.folder / name for store in self._stores for name in store.columns]
        for path in paths:
            if path.exists() and (not path.is_file() or path.stat().st_size):
                raise UserError(
                    f"{path} exists and does not belong to teacher states, so it is not "
                    "replaced; choose another --teacher-states folder"
                )
        for path in paths:
            path.touch()
        self._save_index()

    def _save_index(self) -> None:
        taps = {str(tap): store.entry() for tap, store in self._tapped.items()}
        content = {"identity": self._identity, **self._said.entry(), "taps": taps}
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
            if self.complete:
                self._release()

    def _add(self, decoder: Decoder, part: Sequence[tuple[str, Sample]]) -> None:
        samples = [sample for _, sample in part]
        cache = decoder.new_cache(len(samples), max(len(s.ids) for s in samples))
        texts = {b: sample.ids.tolist() for b, sample in enumerate(samples)}
        taps = [
            tap for tap in self.taps if any(key not in self._tapped[tap].place for key, _ in part)
        ]
        ends = any(key not in self._said.place for key, _ in part)
        last = decoder.info.num_layers if ends else max(taps)
        pieces = [states for _, states in read_in_pieces(decoder, cache, texts, taps, stop=last)]
        for tap in taps:
            residual = torch.cat([states[tap] for states in pieces])
            self._keep(self._tapped[tap], part, {TAP.format(tap): _bits(residual)})
        if not ends:
            return
        hidden = torch.cat([states[last] for states in pieces])
        likeliest, log_probs = [], []
        for some in hidden.split(ROWS_PER_CALL // 8):
            logits = decoder.logits(some)
            best, tokens = logits.topk(min(self._top, logits.shape[-1]), dim=-1)
            likeliest.append(tokens)
            log_probs.append((best - logits.logsumexp(-1, keepdim=True)).float())
        kept = np.full((len(hidden), self._top), -np.inf, np.float16)  # of a small vocabulary
        said = torch.cat(log_probs).cpu().numpy()
        kept[:, : said.shape[1]] = said
        values = {FINAL: _bits(hidden), TOKENS: torch.cat(likeliest).cpu().numpy()}
        self._keep(self._said, part, values | {LOG_PROBS: kept})

    @staticmethod
    def _keep(
        store: _Store, part: Sequence[tuple[str, Sample]], values: Mapping[str, np.ndarray]
    ) -> None:
        """The values' rows are those of the samples `part`, one after the other; new ones are
        kept.
        """
        begin = 0
        for key, sample in part:
            end = begin + len(sample.ids)
            if key not in store.place:
                for name, rows in values.items():
                    store.write(name, store.rows, rows[begin:end])
                store.place[key] = store.rows
                store.rows += end - begin
            begin = end

    def batch(self, indices: Sequence[int], length: int) -> Known:
        """What is known of the samples ``indices``: [B, length, …], zeros after a sample's end."""

        def empty(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(len(indices), length, width, dtype=dtype, device="cpu")

        final, log_probs = empty(self._width), empty(self._top)
        tokens = empty(self._top, torch.int64)
        residual = {tap: empty(self._width) for tap in self.taps}
        for b, i in enumerate(indices):
            key, count = self._keys[i], self._lengths[i]
            final[b, :count] = _from_bits(self._said.read_rows(FINAL, key, count))
            tokens[b, :count] = torch.from_numpy(self._said.read_rows(TOKENS, key, count)).long()
            log_probs[b, :count] = torch.from_numpy(
                self._said.read_rows(LOG_PROBS, key, count)
            ).float()
            for tap, rows in residual.items():
                found = self._tapped[tap].read_rows(TAP.format(tap), key, count)
                rows[b, :count] = _from_bits(found)
        return Known(final, TopTokens(tokens, log_probs), residual)


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
