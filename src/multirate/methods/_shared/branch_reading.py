"""How far a draft branch has read each sequence: the tokens whose keys and values its own layer
has, and those that wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirate.methods._shared.draft_runner import DraftRunner
from multirate.runtime.fused import FusedSequences, PendingTokens
from multirate.runtime.rows import Rows


@dataclass
class DraftInput(PendingTokens):
    """What a sequence's next draft must know: its unread tokens, and `last` [d], what is carried of
    its last committed token.
    """

    last: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))


class BranchReading:
    """What waits for `runner`'s own layer. A sequence that `fused` has entered waits there.

    backfill: whether the branch has K/V of its own; without them nothing waits.
    backfilled, seen_from: of sequence 0, the tokens whose K/V in the own layer are final, but for
        those before `seen_from`, which are not there: its window ended after them.
    """

    def __init__(self, runner: DraftRunner, fused: FusedSequences | None, backfill: bool) -> None:
        self._runner, self._fused, self._backfill = runner, fused, backfill
        self.pending: dict[int, DraftInput] = {}
        self.backfilled = self.seen_from = 0

    def begin(self) -> None:
        self.pending, self.backfilled, self.seen_from = {}, 0, 0

    def left_behind(self) -> DraftInput:
        """The tokens after the backfilled ones of sequence 0 that the own layer could read."""
        if self._fused is not None and 0 in self._fused:
            unread = self._fused.unread(0)
            return DraftInput(list(unread.ids), list(unread.carried))
        return self.pending.get(0) or DraftInput()

    def usable(self, length: int) -> int:
        """How many of sequence 0's first `length` tokens a next generation can continue from."""
        if not self._backfill:
            return length
        length = min(length, self.backfilled + len(self.left_behind().ids))
        window = self._runner.window
        if window is not None and self.seen_from and length - window < self.seen_from:
            # the text parts from the earlier one where the own layer sees what it has not read
            return max(0, length - window)
        return length

    def resume(self, behind: DraftInput, length: int) -> None:
        """Sequence 0 continues from its first `length` tokens. behind: `left_behind`, asked for
        before the generation began.
        """
        backfilled, seen_from = self.backfilled, self.seen_from
        self.begin()
        if seen_from:  # where it lies ahead, what has been kept ends before, and the rest is read
            self.seen_from = min(seen_from, length + 1)
        # the token after the kept ones is read again and gives no carried residual of its own: what
        # is known of it is kept as well
        self.backfilled = min(backfilled, length + 1)
        behind.keep(length + 1 - self.backfilled)
        if behind.ids:
            self.pending[0] = behind

    def prefill(self, seq: int, prompt: Sequence[int], hidden: Tensor, unseen: bool) -> None:
        """The model has read a prompt. hidden: [n, d], what is carried of its last n tokens, before
        which the own layer is to read nothing if `unseen`.
        """
        pending = self.pending.setdefault(seq, DraftInput(last=hidden[-1]))
        pending.last = hidden[-1]
        first, carried = len(prompt) - len(hidden), hidden[:-1]
        if first:
            # the first token read again has its K/V in the own layer, or is not seen; what it gives
            # is the next one's h_L
            first += 1
        else:
            carried = torch.cat([torch.zeros_like(hidden[:1]), carried])
        if unseen:
            pending.keep(0)
        if self._backfill and first < len(prompt):
            pending.add(prompt[first:], carried)
        forgotten = pending.keep_newest(self._runner.window)
        if seq == 0:
            self.backfilled = len(prompt) - len(pending.ids)
            if unseen or forgotten:
                self.seen_from = self.backfilled

    def behind(self, seq: int) -> int:
        """Rows that the sequence's next draft catches up on."""
        if self._fused is not None and seq in self._fused:
            return self._fused.behind(seq)
        return len(self.pending[seq].ids)

    def settle(self, seq: int, length: int) -> bool:
        """The own layer reads what it has not of a sequence of `length` committed tokens, as far as
        it sees them. Returns whether it can: not before the prompt has been read.
        """
        if self._fused is not None and seq in self._fused:
            self._fused.settle(seq)
            return True
        pending = self.pending.get(seq)
        if pending is None:
            return False
        pending.keep_newest(self._runner.window)
        if pending.ids:
            count = len(pending.ids)
            rows = Rows.causal(seq, length - count, count)
            carried = torch.cat(pending.carried) if pending.carried else None
            self._runner.step(pending.ids, rows, carried, 0)
            pending.keep(0)
        return True

    def leave(self, seq: int) -> None:
        self.pending.pop(seq, None)

    def step_begins(self, seq: int, length: int) -> None:
        """The branch drafts below `length` committed tokens: it reads all of them that it has not
        and sees, and the last one enters with its true carried residual.
        """
        if seq == 0:
            window = self._runner.window
            if window is not None and self.behind(0) > window:
                self.seen_from = length - window
            self.backfilled = length + 1

    def accepted(self, seq: int, tokens: Sequence[int], carried: Tensor, drafted: bool) -> None:
        """A step has emitted the last len(carried) of `tokens`. carried: [n, d], of the token
        before them and of all but the last. drafted: whether the branch has read that token.
        """
        pending, count = self.pending[seq], len(carried)
        if self._backfill:
            if not drafted:
                pending.add(tokens[-count - 1 : -count], pending.last[None])
            if count > 1:
                # before the last token come the accepted nodes, whose carried residuals are now
                # known
                pending.add(tokens[-count:-1], carried[:-1])
        pending.last = carried[-1]
