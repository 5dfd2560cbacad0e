"""The ways to run with experts on disk, by the names that the command line, Python and the bench
share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from multirate.errors import UserError

_UNITS = {"": 1, "b": 1} | {
    unit + suffix: base**power
    for power, unit in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True)
class Policy:
    """The eviction policy and the predictor (policies.py, model.PREDICTORS)."""

    eviction: str
    predictor: str
    description: str


FIXED_POLICIES: Mapping[str, Policy] = {
    "on_demand": Policy("none", "none", "no cache: every use reads from disk"),
    "lru": Policy("lru", "none", "a cache that evicts the least recently used expert"),
    "least_stale": Policy(
        "least_stale", "none", "a cache that evicts experts left over from earlier tokens first"
    ),
    "lrfu": Policy(
        "lrfu", "none", ("a cache that evicts the least used expert, with old uses weighted less")
    ),
    "previous_token": Policy(
        "lrfu", "previous_token", "and prefetches the experts of the previous token"
    ),
    "popularity": Policy("lrfu", "popularity", "and prefetches the most used experts"),
    "next_layer_gate": Policy(
        "lrfu",
        "next_layer_gate",
        ("and prefetches what the next layer's router chooses from the current residual"),
    ),
    "accelerated": Policy(
        "lrfu", "accelerated", "the same, but the router reads the accelerated residual"
    ),
}
AHEAD_OF_TIME = "aot"
_BEST = Policy(
    "lrfu",
    "next_layer_gate",
    ("and prefetches with the predictor that measures fastest here, or with none"),
)
POLICIES = (*FIXED_POLICIES, AHEAD_OF_TIME)


def policy_named(policy: str) -> Policy:
    """The parts of a policy. "aot" (ahead of time) uses what measures fastest here: the next
    layer's gate, the accelerated residual if a trained one was added, or no prediction
    (controller.py).

    Raises UserError for an unknown name.
    """
    if policy == AHEAD_OF_TIME:
        return _BEST
    if policy not in FIXED_POLICIES:
        raise UserError(f"expert policy {policy!r} is unknown; accepted: {', '.join(POLICIES)}")
    return FIXED_POLICIES[policy]


def parse_bytes(text: str | int | None, name: str = "expert memory") -> int | None:
    """2GB, 512MiB, 1.5g or a number of bytes → bytes (GB is 10⁹, GiB 2³⁰); None stays None. Raises
    UserError for anything else.
    """
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UserError(
            f"{name} is {text!r}; accepted: a size such as 2GB, 512MiB or a number of bytes"
        )
    return int(float(match[1]) * _UNITS[match[2]])
