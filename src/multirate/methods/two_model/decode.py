"""Another model drafts [Leviathan et al. 2023; Chen et al. 2023]. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits, Verified
from multirate.methods._shared.joined_drafter import JoinedConfig
from multirate.runtime.decoder import Decoder, argmax_rows
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


@dataclass(frozen=True)
class TwoModelConfig(JoinedConfig):
    METHOD: ClassVar[str] = "two_model"

    draft: str | None = None
    """The draft model: a name, folder, GGUF file or hub id. Required."""
    tokens: int = 4
    """Maximum number of drafted tokens."""

    def check(self) -> None:
        super().check()
        self.require_count("tokens")


_PIECE = 1024  # rows of one pass over text that was not read yet
_SHORT = 4  # unread tokens of a sequence that are read in the pass that drafts


class TwoModelDrafter(Drafter):
    """Chains of the tokens that the draft model would take by its own logits, with the noise that
    the base model's will get.

    Its cache has the K/V of a beginning of every sequence's text: what was verified counts as
    committed there, the rest of a draft is written over. What it has not read yet (the prompt, a
    step without a draft, a draft's last token) it reads before it drafts.
    """

    def __init__(self, decoder: Decoder, draft: Decoder, config: TwoModelConfig) -> None:
        self._draft = draft
        self.traits = Traits(max_nodes=config.tokens)
        self._vocab = min(decoder.info.vocab_size, draft.info.vocab_size)
        self._whole = self._vocab == draft.info.vocab_size
        self._base_cache: KVCache | None = None
        self._cache: KVCache | None = None
        self._sampler: Sampler | None = None
        self._written: dict[int, int] = {}  # drafted tokens in the cache, by sequence

    def trial_step(self) -> Callable[[], object]:
        cache, rows = self._draft.new_cache(1, 64), Rows.causal(0, 40, 1)
        return lambda: self._draft.next_tokens(rows, cache, [0])

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        if self._cache is not None:
            self._draft.release_cache(self._cache)
        self._cache = self._draft.new_cache(cache.batch, cache.capacity)
        self._base_cache, self._sampler, self._written = cache, sampler, {}

    def usable(self, cache: KVCache, length: int) -> int:
        return length if cache is self._base_cache else 0

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        assert self._cache is not None
        self._cache.truncate(0, min(self._cache.lengths[0], cache.lengths[0]))
        self._sampler, self._written = sampler, {}

    def behind(self, seqs: Sequence[int]) -> int:
        if self._cache is None or self._sampler is None:
            return 0
        return sum(len(self._unread(b)) - 1 for b in seqs)

    def draft(self, request: DraftRequest) -> list[Draft]:
        """Sequences that want shorter drafts drop out of the passes."""
        seqs = request.seqs
        depths = [self._depth(b, limit) for b, limit in request.pairs]
        tokens: list[list[int]] = [[] for _ in seqs]
        live = [i for i, depth in enumerate(depths) if depth]
        if live:
            self._read_ahead([seqs[i] for i in live])
        while live:
            entering = [tokens[i][-1:] or self._unread(seqs[i]) for i in live]
            paths = [tokens[i] for i in live]
            chosen = self._pass([seqs[i] for i in live], entering, paths, request.sampler)
            for i, token in zip(live, chosen, strict=True):
                tokens[i].append(token)
            live = [i for i in live if len(tokens[i]) < depths[i]]
        for b, drafted in zip(seqs, tokens, strict=True):
            self._written[b] = max(len(drafted) - 1, 0)
        return [Draft.chain(drafted) for drafted in tokens]

    def accept(self, seq: int, verified: Verified) -> None:
        assert self._cache is not None
        accepted = len(verified.path) - 1
        self._cache.commit(seq, min(accepted, self._written.pop(seq, 0)))

    def _unread(self, seq: int) -> list[int]:
        """The tokens of the text whose K/V are not in the cache; at least the last one."""
        assert self._cache is not None and self._sampler is not None
        return self._sampler.tokens[seq][self._cache.lengths[seq] :]

    def _depth(self, seq: int, limit: int) -> int:
        """How many tokens can be drafted for a sequence."""
        depth, info = min(limit, self.traits.max_nodes), self._draft.info
        if depth and max(self._unread(seq)) >= info.vocab_size:
            return 0  # a token that the draft model does not have
        if info.max_positions is not None:
            assert self._sampler is not None
            depth = min(depth, info.max_positions - len(self._sampler.tokens[seq]) + 1)
        return max(depth, 0)

    def _read_ahead(self, seqs: Sequence[int]) -> None:
        """Long unread parts but for their last tokens; only their K/V are of use."""
        assert self._cache is not None
        for b in seqs:
            unread = self._unread(b)
            while len(unread) > _SHORT:
                part = unread[:-1][:_PIECE]
                self._layers(part, Rows.causal(b, self._cache.lengths[b], len(part)))
                self._cache.commit(b, len(part))
                unread = unread[len(part) :]

    def _layers(self, ids: Sequence[int], rows: Rows) -> Tensor:
        """ids [n] through the draft model → h_L [n, d]."""
        assert self._cache is not None
        return self._draft.first_layers(ids, rows, self._draft.info.num_layers, self._cache)

    def _pass(
        self,
        seqs: Sequence[int],
        entering: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        sampler: Sampler,
    ) -> list[int]:
        """One pass of all sequences' entering tokens, which end in each one's last or newest
        drafted token → the next token of each.
        """
        assert self._cache is not None
        parts, lasts, at = [], [], -1
        for b, ids, path in zip(seqs, entering, paths, strict=True):
            # drafted tokens come after the text, whose unread part the first level committed
            begin = self._cache.lengths[b] + max(len(path) - 1, 0)
            parts.append(Rows.causal(b, begin, len(ids)))
            at += len(ids)
            lasts.append(at)
        rows, flat = Rows.concat(parts), [token for ids in entering for token in ids]
        if self._whole and sampler.by_argmax(seqs):
            each = [i for i, ids in enumerate(entering) for _ in ids]
            noise = sampler.noises([seqs[i] for i in each], [len(paths[i]) for i in each])
            _, found = self._draft.next_tokens(rows, self._cache, flat, noise=noise)
            tokens = [found[last] for last in lasts]
        else:
            logits = self._draft.logits(self._layers(flat, rows)[lasts])[:, : self._vocab]
            tokens = argmax_rows(sampler.perturbed(logits, seqs, paths))
        for b, ids, path in zip(seqs, entering, paths, strict=True):
            if not path:
                self._cache.commit(b, len(ids))
        return tokens
