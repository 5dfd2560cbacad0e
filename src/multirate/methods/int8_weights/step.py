"""Plain decoding whose passes read the model's weights in 8 bits: what these alone bring, without
any drafts.
"""

from __future__ import annotations

import torch

from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.errors import say_once
from multirate.methods.common.fused_steps import REFRESH
from multirate.methods.int8_weights.config import Int8WeightsConfig
from multirate.model.decoder import Decoder
from multirate.model.native.decoder import NativeDecoder, narrow_weights
from multirate.model.rows import Rows


class NarrowPlainStep(PlainStep):
    """One token per sequence and pass. Where the margin between the two best logits is too small,
    the model's own weights run the token again, and with it the newest ones before it that only the
    narrow weights have run, whose keys and values become exact by it.

    Greedy only: sampled text and penalised one is plain decoding's.
    """

    lossless = False

    def __init__(self, decoder: Decoder, settings: Int8WeightsConfig) -> None:
        self._narrow: NativeDecoder | None = None
        if narrow_weights(decoder):
            self._narrow = decoder.in_8_bits()
        else:
            say_once(
                "method int8_weights has no effect here: only the native kernel reads 8-bit "
                "weights, on a processor with byte multiplication (AVX-512 with VNNI); decoding "
                "with the full-precision weights"
            )
            self.lossless = True
        if settings.prompt_weights == "narrow":
            self.prompt_decoder = self._narrow
        self._margin = settings.margin
        self._narrow_rows: dict[int, int] = {}  # newest tokens that only narrow weights have run

    def begin(self, session: Session, resumed: bool) -> None:
        self._narrow_rows = {}

    def run(self, session: Session) -> None:
        if self._narrow is None or not session.sampler.plain:
            if self.prompt_decoder is not None:  # the model's own weights go on from what it read
                for b in session.active:
                    session.note_narrow(b, session.cache.lengths[b])
            super().run(session)
            return
        cache, sampler, seqs = session.cache, session.sampler, session.active
        rows = Rows.concat([Rows.causal(b, cache.lengths[b], 1) for b in seqs])
        ids = torch.tensor([sampler.tokens[b][-1] for b in seqs], dtype=torch.int64, device="cpu")
        x = self._narrow.embed(ids, rows.pos)
        x = self._narrow.layers(x, rows, 0, session.decoder.info.num_layers, cache)
        logits = self._narrow.logits(x)
        tokens = dict(zip(seqs, sampler.choose(logits, seqs), strict=True))
        for b in seqs:
            session.note_narrow(b, cache.lengths[b])
            self._narrow_rows[b] = self._narrow_rows.get(b, 0) + 1
        if self._margin > 0:
            best = logits.topk(2, dim=1).values
            # a margin that is no number is in doubt, too
            sure = ((best[:, 0] - best[:, 1]) >= self._margin).tolist()
            doubted = [b for b, is_sure in zip(seqs, sure, strict=True) if not is_sure]
            if doubted:
                tokens.update(self._settled(session, doubted))
        for b in seqs:
            cache.commit(b, 1)
            session.emit(b, [tokens[b]])

    def _settled(self, session: Session, seqs: list[int]) -> dict[int, int]:
        """The next tokens of sequences, by the model's own weights."""
        cache, sampler, ids, parts, last = session.cache, session.sampler, [], [], []
        for b in seqs:
            count = min(self._narrow_rows.pop(b), REFRESH)
            parts.append(Rows.causal(b, cache.lengths[b] + 1 - count, count))
            ids += sampler.tokens[b][-count:]
            last.append(len(ids) - 1)
        rows = Rows.concat(parts)
        _, tokens = session.decoder.next_tokens(rows, cache, ids)
        session.stats.doubted += len(seqs)
        return {b: tokens[at] for b, at in zip(seqs, last, strict=True)}
