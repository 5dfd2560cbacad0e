"""How likely a given text is under the full model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multirate.decoding.prefill import score
from multirate.runtime.decoder import Decoder
from multirate.torch_modes import own_modes


@own_modes()
def log_likelihood(
    decoder: Decoder, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """(the sum of the continuation's log-probabilities after the context, in nats; whether greedy
    decoding would say it), from one reading through all layers.

    context: at least one token. The sum is 0 and greedy for an empty continuation.
    """
    each, chosen = score(decoder, context, continuation)
    return math.fsum(each), chosen == list(continuation)
