"""Dynamic depth as a step: a token is emitted as soon as its row leaves, after as many layers as a
policy decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from multirate.decoding.depth import DepthPolicy, LayerRange
from multirate.decoding.session import Session
from multirate.decoding.step import Hole, Step
from multirate.runtime.decoder import Decoder, LayerAdapter
from multirate.runtime.rows import Rows

KVOfSkippedLayers = Literal["propagate", "deferred", "none"]
KV_OF_SKIPPED_LAYERS: tuple[KVOfSkippedLayers, ...] = ("propagate", "deferred", "none")


@dataclass(frozen=True)
class _Pending:
    """Consecutive tokens whose deeper layers are still to run: slots [first, first + m).

    hidden [m, d] enters layer `depth`.
    """

    first: int
    hidden: Tensor
    depth: int

    @property
    def last(self) -> int:
        return self.first + len(self.hidden)


class DynamicDepthStep(Step):
    """One token per sequence and step; nothing is verified. Each row of a batch leaves at its own
    layer.

    kv: where the K/V come from that later tokens need of the layers a row has skipped:
      propagate  from the residual the row left with, as if it entered each of these layers
                 (`Decoder.fill_kv`). Cheap and inexact: from the first such token on, K/V are not
                 those of a prefill, and no later prompt may reuse them
                 (`Session.note_inexact`).
      deferred   from the layers themselves, later: the row waits with its residual until a row of
                 its sequence goes deeper, and then goes with it, as deep as that one goes. K/V are
                 those of a prefill of the emitted tokens, bit for bit where the decoder's rows are
                 independent of one another.
      none       from nowhere: for schedules, whose set of layers never grows, so that no later row
                 looks for them (SkipDecode). ValueError when one does grow.

    With "deferred" the depths of waiting tokens never rise with their position (a row that goes
    deeper than those before it takes them along), so they are a stack for each sequence.
    """

    def __init__(self, policy: DepthPolicy, kv: KVOfSkippedLayers = "propagate") -> None:
        if kv not in KV_OF_SKIPPED_LAYERS:
            raise ValueError(f"kv={kv!r}; accepted: {', '.join(KV_OF_SKIPPED_LAYERS)}")
        self.policy, self.kv = policy, kv
        self.lossless = policy.lossless
        self._pending: dict[int, list[_Pending]] = {}
        self._ran: dict[int, frozenset[int]] = {}  # the layers that a sequence's last token ran
        self._holes: dict[int, list[Hole]] = {}

    def begin(self, session: Session, resumed: bool) -> None:
        exits, layers = self.policy.exits, session.decoder.info.num_layers
        if list(exits) != sorted(set(exits)) or not all(0 < exit < layers for exit in exits):
            raise ValueError(
                f"exits are {exits}; accepted for a model with {layers} layers: increasing "
                f"numbers from 1 to {layers - 1}"
            )
        self._pending, self._ran, self._holes = {}, {}, {}
        self.policy.begin(session)

    def prefilled(
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.policy.after_prompt(torch.stack([read[-1] for read in hidden]), seqs)

    def holes(self, seq: int) -> list[Hole]:
        waiting = self._pending.get(seq, [])
        return [
            *self._holes.get(seq, []),
            *(Hole(part.first, part.last, part.depth, _ALL_LAYERS) for part in waiting),
        ]

    def run(self, session: Session) -> None:
        seqs = session.active
        ranges = self.policy.schedule(session, seqs)
        if ranges is not None:
            _check(ranges, session.decoder)
        if (ranges is not None) != (self.kv == "none"):
            raise ValueError(
                "kv='none' needs a schedule, and a schedule needs it: rows that leave one at a "
                "time need K/V in every layer"
            )
        if ranges is None:
            tokens = self._run_to_exits(session, seqs)
        else:
            tokens = self._run_ranges(session, seqs, ranges)
        for b in seqs:
            session.cache.commit(b, 1)
            session.emit(b, [tokens[b]])

    def finish(self, session: Session) -> None:
        # what waits would have to be read again by the next turn, row by row the same work
        if session.keeps_prefix:
            self.flush(session)

    def flush(self, session: Session) -> None:
        """Runs all waiting tokens through the rest of the layers."""
        layers = session.decoder.info.num_layers
        for b, waiting in self._pending.items():
            while waiting:
                part = self._joined(b, None, waiting[-1].depth)
                assert part is not None
                stop = waiting[-1].depth if waiting else layers
                alone = {b: part}
                rows = _rows_of(alone, False)
                hidden = _run(session, alone, rows, part.depth, stop)[0][b].hidden
                if stop < layers:
                    waiting.append(_Pending(part.first, hidden, stop))

    # -- rows that leave one by one ----------------------------------------------------------------

    def _run_to_exits(self, session: Session, seqs: list[int]) -> dict[int, int]:
        """Every sequence's last token, with the waiting ones it takes along → the next tokens."""
        decoder, cache, policy = session.decoder, session.cache, self.policy
        layers = decoder.info.num_layers
        exits = policy.exits
        waiting = {part.depth for b in seqs for part in self._pending.get(b, [])}
        tokens: dict[int, int] = {}
        x, _ = _enter(session, seqs)
        going = {b: _Pending(cache.lengths[b], x[i : i + 1], 0) for i, b in enumerate(seqs)}
        beside: Tensor | None = None  # the accelerated rows' residuals, in the order of `going`
        if exits:
            beside = policy.start_accelerated(0, x, seqs, None)
        at = 0
        rows: Rows | None = None
        for stop in sorted({*exits, *waiting, layers}):
            if at in waiting:
                going = {b: self._joined(b, part, at) or part for b, part in going.items()}
                rows = None
            rows = _rows_of(going, beside is not None) if rows is None else rows
            going, beside = _run(session, going, rows, at, stop, beside, policy.adapters)
            at = stop
            if stop not in exits and stop < layers:
                continue
            here = list(going)
            last = torch.cat([going[b].hidden[-1:] for b in here])
            shown = last if beside is None else beside
            if stop == layers:
                leaving, logits = [True] * len(here), None
            else:
                said = policy.leave(stop, shown, here)
                leaving, logits = list(said.rows), said.logits
            out = [i for i, leaves in enumerate(leaving) if leaves]
            stay = [i for i, leaves in enumerate(leaving) if not leaves]
            if beside is not None:
                beside = (
                    policy.start_accelerated(
                        stop, last[stay], [here[i] for i in stay], beside[stay]
                    )
                    if stay and stop < exits[-1]
                    else None
                )
                rows = None
            if not out:
                continue
            left, rows = [here[i] for i in out], None
            if logits is not None:
                logits = logits[out]
            elif stop < layers:
                logits = policy.logits(decoder, stop, shown[out])
            else:
                logits = decoder.logits(last[out])
            tokens.update(zip(left, session.sampler.choose(logits, left), strict=True))
            session.stats.count_exits(stop, len(left))
            policy.after_token(stop, last[out], left)
            if stop < layers:
                self._leave(session, [going[b] for b in left], left)
            going = {b: part for b, part in going.items() if b not in tokens}
            if not going:
                break
        return tokens

    def _leave(self, session: Session, parts: list[_Pending], seqs: list[int]) -> None:
        """The rows left above the last layer: their K/V of the layers above are filled in, or
        wait.
        """
        if self.kv == "deferred":
            for b, part in zip(seqs, parts, strict=True):
                self._pending.setdefault(b, []).append(part)
            return
        rows = Rows.concat(
            [Rows.causal(b, part.first, 1) for b, part in zip(seqs, parts, strict=True)]
        )
        hidden = torch.cat([part.hidden for part in parts])
        layers = session.decoder.info.num_layers
        session.decoder.fill_kv(rows, hidden, parts[0].depth, layers, session.cache)
        for b, part in zip(seqs, parts, strict=True):
            session.note_inexact(b, part.first)

    def _joined(self, seq: int, part: _Pending | None, depth: int) -> _Pending | None:
        """part, about to enter layer `depth`, with the sequence's tokens that wait there before
        it.
        """
        waiting, parts = self._pending.get(seq, []), [] if part is None else [part]
        while waiting and waiting[-1].depth == depth:
            parts.insert(0, waiting.pop())
        if len(parts) <= 1:
            return parts[0] if parts else None
        return _Pending(parts[0].first, torch.cat([p.hidden for p in parts]), depth)

    # -- a schedule for the whole batch ------------------------------------------------------------

    def _run_ranges(
        self, session: Session, seqs: list[int], ranges: Sequence[LayerRange]
    ) -> dict[int, int]:
        decoder, cache = session.decoder, session.cache
        layers = decoder.info.num_layers
        x, rows = _enter(session, seqs)
        at = 0
        skipped: list[LayerRange] = []
        for start, stop in [*ranges, (layers, layers)]:
            if at < start:
                skipped.append((at, start))
            x = decoder.layers(x, rows, start, stop, cache)
            at = stop
        self._note_skipped(session, seqs, frozenset(i for r in ranges for i in range(*r)), skipped)
        if skipped:
            for b in seqs:
                session.note_inexact(b, cache.lengths[b])
        last = ranges[-1][1]
        session.stats.count_exits(sum(stop - start for start, stop in ranges), len(seqs))
        self.policy.after_token(last, x, seqs)
        logits = self.policy.logits(decoder, last, x) if last < layers else decoder.logits(x)
        return dict(zip(seqs, session.sampler.choose(logits, seqs), strict=True))

    def _note_skipped(
        self, session: Session, seqs: list[int], ran: frozenset[int], skipped: list[LayerRange]
    ) -> None:
        for b in seqs:
            if not ran <= self._ran.get(b, ran):
                grown = sorted(ran - self._ran[b])
                raise ValueError(
                    f"kv='none' does not work here: layers {grown} run again after a token that "
                    "skipped them"
                )
            self._ran[b] = ran
            slot, holes = session.cache.lengths[b], self._holes.setdefault(b, [])
            for start, stop in skipped:
                holes.append(Hole(slot, slot + 1, start, stop))


_ALL_LAYERS = 1 << 30


def _enter(session: Session, seqs: list[int]) -> tuple[Tensor, Rows]:
    """The residuals [n, d] with which the sequences' last tokens enter layer 0, and their rows."""
    decoder, cache = session.decoder, session.cache
    rows = Rows.concat([Rows.causal(b, cache.lengths[b], 1) for b in seqs])
    ids = torch.tensor(
        [session.sampler.tokens[b][-1] for b in seqs], device=decoder.info.device, dtype=torch.int64
    )
    return decoder.embed(ids, rows.pos), rows


def _rows_of(going: dict[int, _Pending], accelerated: bool) -> Rows:
    """The rows of all sequences' parts, and after them an accelerated one of each last token."""
    parts = [Rows.causal(b, part.first, len(part.hidden)) for b, part in going.items()]
    if accelerated:
        parts += [Rows.accelerated_at(b, part.last - 1) for b, part in going.items()]
    return Rows.concat(parts)


def _run(
    session: Session,
    going: dict[int, _Pending],
    rows: Rows,
    start: int,
    stop: int,
    beside: Tensor | None = None,
    adapters: Mapping[int, LayerAdapter] | None = None,
) -> tuple[dict[int, _Pending], Tensor | None]:
    """Layers [start, stop) on all sequences' parts in one call, and on an accelerated row of each
    one's last token, entering with beside [n, d]. rows: those of `_rows_of`.
    """
    if start == stop:
        return going, beside
    hidden = [part.hidden for part in going.values()]
    if beside is not None:
        hidden.append(beside)
    x = session.decoder.layers(
        hidden[0] if len(hidden) == 1 else torch.cat(hidden),
        rows,
        start,
        stop,
        session.cache,
        None if beside is None else adapters,
    )
    at, ran = 0, {}
    for b, part in going.items():
        ran[b] = _Pending(part.first, x[at : at + len(part.hidden)], stop)
        at += len(part.hidden)
    return ran, None if beside is None else x[at:]


def _check(ranges: Sequence[LayerRange], decoder: Decoder) -> None:
    ends = [end for layer_range in ranges for end in layer_range]
    layers = decoder.info.num_layers
    rising = ends == sorted(ends) and all(start < stop for start, stop in ranges)
    if not ends or not rising or ends[0] < 0 or ends[-1] > layers:
        raise ValueError(
            f"schedule is {list(ranges)}; accepted: increasing layer ranges within 0 to {layers}"
        )
