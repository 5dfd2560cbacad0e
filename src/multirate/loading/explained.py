"""What goes wrong while a model or an accelerator is loaded, in one sentence for the user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from multirate.errors import UserError
from multirate.loading.names import NAMED

_KNOWN = {
    GatedRepoError: "is gated; request access on its page at huggingface.co, then log in with "
    "`hf auth login`",
    RepositoryNotFoundError: "was not found; check the name, or log in with `hf auth login` if it "
    "is private",
    HFValidationError: "was not found; it is neither a local folder nor a valid hub id such as "
    "owner/name",
}
_NO_CONNECTION = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns any exception that libraries raise while loading into a one-sentence UserError. The
    original is its cause, and in the log.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("cannot load %s", what, exc_info=True)
        raise UserError(_sentence(what, error)) from error


def _sentence(what: str, error: BaseException) -> str:
    causes = list(_chain(error))
    for kind, reason in _KNOWN.items():
        if any(isinstance(cause, kind) for cause in causes):
            return f"{what} {reason}"
    if any(isinstance(cause, _NO_CONNECTION) for cause in causes):
        return _unreachable(what)
    if isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        return f"{what} cannot be loaded: {(error.strerror or str(error)).lower()}{place}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])[:300].rstrip(".")
    if not said or not isinstance(error, (OSError, ValueError, RuntimeError, ImportError)):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"{what} cannot be loaded: {said}"


def _unreachable(what: str) -> str:
    """what: "model NAME" or "accelerator NAME"."""
    names = list(NAMED)
    if what.startswith("accelerator "):
        names = sorted({name for known in NAMED.values() for name in known.found_accelerators()})
    return (
        f"{what} is not on this machine and {why_unreachable()}; name a local folder, or "
        f"{' or '.join(names)}, or connect to use a hub id"
    )


def why_unreachable() -> str:
    """Why nothing can be downloaded, in words that go on a sentence."""
    if is_offline_mode():
        return "the hub cannot be reached because HF_HUB_OFFLINE is set"
    return f"the hub cannot be reached ({constants.ENDPOINT})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
