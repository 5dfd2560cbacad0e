"""The base's final residuals of the training samples, computed once and kept in a file. Opt-in.

By default the teacher runs in every step. Where the same samples are seen several times, or several
accelerators are trained on them, that repeats most of the work: with a states folder a step runs
only the layers below the last gate. The file takes 2 · hidden_size bytes per distinct token. An
interrupted computation is continued.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.io import parse_json, write_atomically
from multirate.model.decoder import Decoder
from multirate.model.rows import Rows
from multirate.training.data import Sample

STATES, INDEX = "final_residuals.bf16", "final_residuals.json"
ROWS_PER_CALL = 1024


class TeacherStates:
    """h_L of every sample, bfloat16 on disk. ``batch`` reads them; samples with equal ids share
    their rows.
    """

    def __init__(
        self, folder: Path, samples: Sequence[Sample], hidden_size: int, fingerprint: str
    ) -> None:
        self.folder, self._size = folder, hidden_size
        self._place: list[int] = []  # sample → row of its first token
        self._distinct: list[Sample] = []
        rows: dict[bytes, int] = {}
        digest = hashlib.sha256(fingerprint.encode())
        total = 0
        for sample in samples:
            key = sample.ids.tobytes()
            if key not in rows:
                rows[key] = total
                total += len(sample.ids)
                self._distinct.append(sample)
                digest.update(key)
                digest.update(b"|")
            self._place.append(rows[key])
        self._identity = {
            "samples_sha256": digest.hexdigest(),
            "tokens": total,
            "hidden_size": hidden_size,
        }
        self._lengths = [len(s.ids) for s in samples]
        self._total = total
        self._open()

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return 2 * self._total * self._size

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / STATES
            self._done = self._progress()
            fresh = not path.exists() or path.stat().st_size != self.bytes
            if fresh:
                self._done = 0
            self._rows = np.memmap(
                path, np.uint16, "w+" if fresh else "r+", shape=(self._total, self._size)
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            size = f"{self.bytes / 1e9:.1f} GB"
            raise UserError(
                f"teacher states of {size} cannot be kept in {self.folder}: {reason}"
            ) from None

    def _progress(self) -> int:
        """How many distinct samples are on disk; UserError when the folder belongs to other data or
        another base.
        """
        path = self.folder / INDEX
        if not path.exists():
            return 0
        try:
            saved = parse_json(path.read_bytes(), path)
            done, identity = int(saved["done"]), saved["identity"]
        except (UserError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} is damaged; delete the folder {self.folder} to start over"
            ) from None
        if identity != self._identity:
            raise UserError(
                f"{self.folder} holds the states of other samples or another base model; choose "
                "another --teacher-states folder or delete it"
            )
        return done

    def _save_progress(self) -> None:
        self._rows.flush()
        text = json.dumps({"identity": self._identity, "done": self._done})
        write_atomically(self.folder / INDEX, text.encode())

    @property
    def complete(self) -> bool:
        """Whether every sample's residuals are on disk."""
        return self._done == len(self._distinct)

    @torch.no_grad()
    def compute(self, decoder: Decoder, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the base over what is missing. ``progress(done, of)`` counts distinct samples."""
        if self.complete:
            return
        place = sum(len(s.ids) for s in self._distinct[: self._done])
        try:
            while not self.complete:
                end, count = self._done, 0
                for sample in itertools.islice(self._distinct, self._done, None):
                    if count and count + len(sample.ids) > ROWS_PER_CALL:
                        break
                    end, count = end + 1, count + len(sample.ids)
                part = self._distinct[self._done : end]
                hidden = self._forward(decoder, part)
                self._rows[place : place + len(hidden)] = (
                    hidden.to(torch.bfloat16).view(torch.uint16).cpu().numpy()
                )
                place += len(hidden)
                self._done += len(part)
                if self._done % 256 < len(part):
                    self._save_progress()
                if progress is not None:
                    progress(self._done, len(self._distinct))
        finally:
            self._save_progress()

    def _forward(self, decoder: Decoder, samples: Sequence[Sample]) -> Tensor:
        cache = decoder.new_cache(len(samples), max(len(s.ids) for s in samples))
        rows = Rows.concat([Rows.causal(b, 0, len(s.ids)) for b, s in enumerate(samples)])
        ids = torch.from_numpy(np.concatenate([s.ids for s in samples]).astype(np.int64)).to(
            decoder.info.device
        )
        return decoder.layers(decoder.embed(ids, rows.pos), rows, 0, decoder.info.num_layers, cache)

    def batch(self, indices: Sequence[int], length: int) -> Tensor:
        """float32 [B, length, d] of the samples ``indices``, zeros after a sample's end."""
        out = torch.zeros(len(indices), length, self._size)
        for b, i in enumerate(indices):
            rows = self._rows[self._place[i] : self._place[i] + self._lengths[i]]
            out[b, : len(rows)] = torch.from_numpy(np.array(rows)).view(torch.bfloat16).float()
        return out


def report_to_terminal(done: int, of: int) -> None:
    """One line, rewritten."""
    if sys.stderr.isatty() or done == of or done % 2048 < 8:
        sys.stderr.write(f"\rteacher states: {done} of {of} samples" + ("\n" if done == of else ""))
        sys.stderr.flush()
