"""What transformers' `generate` knows but does not hand to a custom decoding method."""

from __future__ import annotations

import sys
from typing import Any


def argument_of_generate(name: str, kind: type | tuple[type, ...] = object) -> Any:
    """The value that the nearest running `GenerationMixin.generate` was given for `name`; None when
    there is none.

    transformers passes a callable neither `streamer` (it drops it) nor a folder's function the
    folder's own address (it excludes `custom_generate`). Both are locals of the calling frame, and
    nowhere else.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "generate"
            and "custom_generate" in frame.f_locals
            and "self" in frame.f_locals
        ):
            value = frame.f_locals.get(name)
            if value is not None and isinstance(value, kind):
                return value
        frame = frame.f_back  # type: ignore[assignment]
    return None
