"""Which of two kinds of steps to run, by the seconds that a token took in each. [ours]

A kind that has not run for a while is thought to take what it usually takes, times what has changed
for the one that ran: the text and the machine's speed change both alike. It is tried again for a
share of the time, so that it can come back.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNSEEN = 1.1  # times the other kind's: what one that has not run is thought to take
_USUAL, _LATELY = 0.999, 0.98  # what is remembered of a token: of about a thousand, and of fifty
_STRENGTH = 50.0  # tokens that what a kind usually takes counts as
_TRIAL = 8  # tokens of a trial, at least
_TRIED = 0.01  # of the time, for a kind that is slower by what is known
_MOST_CREDIT = 2.0  # trials' time that may be saved for one
_SLOWEST = 3.0  # times what was expected: more is an interruption


@dataclass
class _Pace:
    """Seconds and tokens that fade."""

    seconds: float = 0.0
    tokens: float = 0.0

    def fade(self, share: float) -> None:
        self.seconds *= share
        self.tokens *= share

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.tokens += tokens


class FasterKind:
    """Chooses between kind 0, which is run first, and kind 1."""

    def __init__(self) -> None:
        self._usual, self._lately = [_Pace(), _Pace()], [_Pace(), _Pace()]
        self._running = 0
        self._credit = 0.0  # seconds that may be lost to trials
        self._trial = 0  # tokens that the trial under way is still to bring
        self._first = True

    def begin(self) -> None:
        """A generation begins: its first step may read what no other has to."""
        self._first = True

    def choose(self) -> int:
        """The kind of the next step."""
        if self._trial > 0 or not any(pace.tokens for pace in self._usual):
            return self._running
        paces = self.seconds_per_token()
        faster = int(paces[1] < paces[0])
        cost = _TRIAL * (paces[1 - faster] - paces[faster])
        # one that seems far too slow is tried when all credit has been saved: it may seem wrong
        if cost <= self._credit or self._credit >= _MOST_CREDIT * _TRIAL * paces[faster]:
            self._credit -= cost
            self._trial, self._running = _TRIAL, 1 - faster
        else:
            self._running = faster
        return self._running

    def seconds_per_token(self) -> tuple[float, float]:
        """What a token of either kind is thought to take now."""
        usual = [pace.seconds / pace.tokens if pace.tokens else 0.0 for pace in self._usual]
        for kind in (0, 1):
            usual[kind] = usual[kind] or _UNSEEN * usual[1 - kind]
        recent, changed = self._lately[self._running], 1.0
        if recent.tokens:
            expected = usual[self._running] * (recent.tokens + _STRENGTH)
            changed += (recent.seconds - usual[self._running] * recent.tokens) / expected
        first, second = (
            (pace.seconds + _STRENGTH * changed * usual[kind]) / (pace.tokens + _STRENGTH)
            for kind, pace in enumerate(self._lately)
        )
        return first, second

    def observe(self, kind: int, seconds: float, tokens: int) -> None:
        """A step of this kind took so long and emitted so many tokens."""
        self._trial -= tokens
        if self._first:
            self._first = False
            return
        if self._usual[kind].tokens:
            most = _SLOWEST * self.seconds_per_token()[kind] * max(tokens, _TRIAL)
            seconds = min(seconds, most)
        for pace in self._lately:
            pace.fade(_LATELY**tokens)
        self._usual[kind].fade(_USUAL**tokens)
        for those in (self._usual, self._lately):
            those[kind].add(seconds, tokens)
        faster = min(self.seconds_per_token())
        self._credit = min(self._credit + _TRIED * seconds, _MOST_CREDIT * _TRIAL * faster)
