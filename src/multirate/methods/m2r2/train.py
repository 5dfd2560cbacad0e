"""M2R2's objective: every gate and every own-draft step towards the full model's distribution, in
one pass.

Frozen base, online teacher. Loss = Σ w · KL(head(h_L) ‖ head(p)) / Σ w over response rows. Its
terms are every gate at draft step 1 (weight 1 each; re-initialisation makes the gates independent:
paper) and, with carry, the first gate at draft steps s = 2..S (`step_weight`) [ours]. Step s
carries the stream's own output of step s − 1 at t − 1, and its block sees the K/V that drafting s
tokens ahead sees (``OwnAttention.forward``): what happens at decode time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.distillation import Distilled, distil
from multirate.methods._shared.feature_objective import feature_distances, uniform_noise
from multirate.methods._shared.layers import KeysValues
from multirate.methods._shared.least_squares import LeastSquares, direction
from multirate.methods._shared.objective import (
    Objective,
    Report,
    Term,
    balanced_bce,
    shift,
    step_weight,
)
from multirate.methods._shared.teacher import Known, SlowPass, Teacher
from multirate.methods.m2r2.modules import AcceleratedStream

TAP_BATCHES = 8
"""Number of batches for measuring the sizes of the taps' channels."""


class M2R2Objective(Objective):
    """(ids [B, T], response mask [B, T]) → loss and report. Only ``stream`` holds parameters."""

    def __init__(self, teacher: Teacher, stream: AcceleratedStream) -> None:
        super().__init__(teacher)
        self.stream = stream
        self.has_arla = stream.arla is not None

    @property
    def terms(self) -> list[Term]:
        """Every (gate, draft step) that enters the loss, in the order of the report."""
        config = self.stream.config
        first = [Term(gate, 1, 1.0) for gate in config.gates]
        later = range(2, config.unroll_steps + 1)
        return first + [Term(config.gates[0], s, step_weight(s)) for s in later]

    def slow(self, ids: Tensor, known: Known | None = None) -> SlowPass:
        """The teacher's pass, with everything that the stream reads."""
        config = self.stream.config
        read = config.gates + config.taps
        return self._teacher[0].slow(ids, shared=config.gates[-1], gates=read, known=known)

    def first_step(
        self, slow: SlowPass, noise: Tensor | None = None
    ) -> tuple[list[Tensor], KeysValues | None]:
        """Draft step 1, true carried residual (noise [B, T, d] is added): the stream at every gate
        [B, T, d], and the first block's K/V.
        """
        config, stream = self.stream.config, self.stream
        inner = {tap: slow.residual[tap].float() for tap in config.taps}
        carried = shift(stream.carried(slow.final.float(), inner))
        if noise is not None:
            carried = carried + noise
        x = stream.start(slow.residual[0].float(), carried)
        outputs: list[Tensor] = []
        keys_values: KeysValues | None = None
        previous = 0
        for gate in config.gates:
            if previous and config.reinitialise:
                x = slow.residual[previous].float()
            x, kv = self._interval(x, slow, previous, gate, carried, [])
            keys_values = kv if previous == 0 else keys_values
            outputs.append(x)
            previous = gate
        return outputs, keys_values

    def next_step(
        self, slow: SlowPass, own: Tensor, earlier: list[KeysValues]
    ) -> tuple[Tensor, KeysValues | None]:
        """One more draft step to the first gate, which carries the stream's own output ``own`` [B,
        T, d] of the previous step.
        """
        carried = shift(own)
        x = self.stream.start(slow.residual[0].float(), carried)
        return self._interval(x, slow, 0, self.stream.config.gates[0], carried, earlier)

    def _interval(
        self,
        x: Tensor,
        slow: SlowPass,
        begin: int,
        gate: int,
        carried: Tensor,
        earlier: list[KeysValues],
    ) -> tuple[Tensor, KeysValues | None]:
        adapters = self.stream.layer_adapters()
        for i in range(begin, gate):
            x = self._teacher[0].accelerated_layer(i, x, slow, adapters.get(i))
        x = self.stream.fuse(gate, x, carried)
        block = self.stream.block(gate)
        return (x, None) if block is None else block(x, earlier)

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """ids int64 [B, T]; mask bool [B, T], true where the row's *next* token is a response
        token; known: see ``Teacher.slow``.
        """
        slow = self.slow(ids, known)
        width, noise = self.stream.config.noise, None
        if width and self.stream.training:
            noise = uniform_noise(ids, shift(slow.final.float()), width)
        outputs, kv = self.first_step(slow, noise)
        earlier = [] if kv is None else [kv]
        own = outputs[0]
        for _ in range(1, self.stream.config.unroll_steps):
            own, kv = self.next_step(slow, own, earlier)
            if kv is not None:
                earlier.append(kv)
            outputs.append(own)
        return self._score(outputs, slow, mask)

    def _score(self, outputs: list[Tensor], slow: SlowPass, mask: Tensor) -> tuple[Tensor, Report]:
        teacher, stream = self._teacher[0], self.stream
        normed = torch.stack([teacher.norm(x[mask]) for x in outputs])  # [K, N, d]
        result = distil(normed, slow.target(mask), teacher.head, stream.draft_tokens)
        losses = result.kl
        if stream.config.feature_weight:
            distances = feature_distances(normed, slow.normed[mask].float())
            losses = losses + stream.config.feature_weight * distances
        loss, weight = self.weighted(losses)
        loss = loss / weight
        report = Report(self.terms, result, float(loss.detach()))
        if stream.arla is not None and normed.shape[1]:
            logits = self.arla_logits(normed.detach().float())
            # Its own parameters only (the stream is detached): added to the loss, it changes
            # nothing for the stream.
            loss = (
                loss
                + torch.stack(
                    [balanced_bce(logits[k], result.agree[k]) for k in range(len(logits))]
                ).mean()
            )
            report.arla = logits.detach().float().sigmoid()
        return loss, report

    def arla_logits(self, normed: Tensor) -> Tensor:
        """normed [K, N, d] in the order of ``terms`` → [K, N]. Later draft steps use only the first
        gate.
        """
        assert self.stream.arla is not None
        count = len(self.stream.config.gates)
        rows = normed.transpose(0, 1)  # [N, K, d]
        at_gates = [self.stream.arla(rows[:, : j + 1]) for j in range(count)]
        later = [self.stream.arla(rows[:, k : k + 1]) for k in range(count, normed.shape[0])]
        return torch.stack(at_gates + later)

    @torch.no_grad()
    def early_exit(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[list[Term], Distilled]:
        """The base's plain early exit at every gate, which training must beat."""
        teacher, slow = self._teacher[0], self.slow(ids, known)
        normed = torch.stack(
            [teacher.norm(slow.residual[g][mask]) for g in self.stream.config.gates]
        )
        return [t for t in self.terms if t.step == 1], distil(
            normed, slow.target(mask), teacher.head
        )


@torch.no_grad()
def start_taps(
    teacher: Teacher, stream: AcceleratedStream, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """The sizes of the taps' channels: root mean squares over response rows, relative to h_L's
    median channel, so that a step of any size in W has the same effect in every channel.
    """
    features = stream.features
    assert features is not None
    inner, final = [], []
    for ids, mask, known in islice(batches, TAP_BATCHES):
        slow = teacher.slow(ids, shared=0, gates=features.taps, known=known)
        inner.append(features.read(slow.residual)[mask].float())
        final.append(slow.final[mask].float())
    sizes, unit = (torch.cat(x).square().mean(0).sqrt() for x in (inner, final))
    features.sizes.copy_((sizes / unit.median()).clamp(min=1e-6))


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, stream: AcceleratedStream, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Initialises every fusion by least squares: the linear map from its input that best predicts
    the direction of h_L, over the response rows of ``batches`` of (ids, mask, known). [ours]

    The block's output starts at zero, so this decides the loss of the first step: near 4 nats on a
    vocabulary of 49,152 instead of 13.
    """
    batches = iter(batches)
    if stream.features is not None:
        first = list(islice(batches, TAP_BATCHES))
        start_taps(teacher, stream, first)
        batches = chain(first, batches)
    if not stream.fusions:
        return
    gates, d = stream.config.gates, teacher.shape.hidden_size
    inputs = 2 * d if stream.config.carry else d
    fits = {gate: LeastSquares(inputs, d) for gate in gates}
    for ids, mask, known in batches:
        slow = teacher.slow(ids, shared=0, gates=gates, known=known)
        final = slow.final.float()
        wanted = direction(final)[mask]
        for gate in gates:
            fusion: Any = stream.fusions[str(gate)]
            fits[gate].add(fusion.read(slow.residual[gate].float(), shift(final))[mask], wanted)
    for gate in gates:
        fusion = stream.fusions[str(gate)]
        best = fits[gate].solution()
        fusion.stream.weight.copy_(best[:d].T)
        if fusion.carried is not None:
            fusion.carried.weight.copy_(best[d:].T)
