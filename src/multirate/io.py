"""Files that appear whole or not at all, and the folder for those that can be made again."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from multirate.errors import UserError

T = TypeVar("T")
_PREFIX = ".multirate-"
"""What the names of files begin with that are there for a moment only."""


def cache_folder() -> Path:
    """Where what can be made again is kept between runs: $MULTIRATE_CACHE/multirate, else
    $XDG_CACHE_HOME/multirate, else ~/.cache/multirate. It may be a place that cannot be used: who
    keeps something there copes with every OSError, as its work can be done without.
    """
    named = os.environ.get("MULTIRATE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(named or _home() / ".cache") / "multirate"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user whom the system does not know: nothing can be kept
        return Path(os.devnull)


def check_text(text: str, where: str) -> str:
    """The text, after a check that UTF-8 can encode it. Command-line bytes that are not UTF-8 reach
    Python as surrogates, which no tokenizer accepts. Raises UserError, starting with `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = len(text[: error.start].encode())
        raise UserError(f"{where}: not UTF-8 text (byte {before})") from None
    return text


def decoded(content: bytes, where: str | Path) -> str:
    """UTF-8 text from outside, without the byte order mark that some editors begin it with. Line
    ends become "\n", as Python reads files. Raises UserError, begun by `where`.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start})") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: str | Path) -> bytes:
    """A file's content. Raises UserError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {path}: {reason.lower()}") from None


def read_text(path: str | Path) -> str:
    """A file's text, as `decoded` returns it. Raises UserError if it cannot be read."""
    return decoded(read_bytes(path), path)


def parse_json(content: str | bytes, where: str | Path) -> Any:
    """The value of a JSON text from any source. Raises UserError, starting with `where`, for text
    that is not valid, is nested too deeply, has a number of thousands of digits or a lone
    surrogate, which no tokenizer accepts.
    """
    try:
        if isinstance(content, str):
            content = content.removeprefix("\ufeff")
        found = json.loads(content)
        escaped = content if isinstance(content, bytes) else content.encode()
        if b"\\ud" in escaped.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except json.JSONDecodeError as error:
        if error.lineno > 1:
            where = f"{where}, line {error.lineno}"
        reason = error.msg
    except RecursionError:
        reason = "nested too deeply"
    except UnicodeEncodeError:
        reason = "a surrogate stands alone"
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except ValueError:
        reason = "a number has too many digits"
    raise UserError(f"{where}: not valid JSON ({reason})")


def read_json(path: Path, most: int = 1 << 20) -> Any:
    """The value of a small JSON file from any source; None if there is no such file. Raises
    UserError if it cannot be read or has more than `most` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read {path}: {reason}") from None
    if len(content) > most:
        raise UserError(f"{path} has more than {most} bytes, the maximum")
    return parse_json(content, path)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """The path of an empty file beside `path`. After the block it is written to the disk and
    renamed to `path`. A file that is there keeps its permissions, a link stays a link. Raises
    OSError, also for what is no regular file. If the block fails, nothing is left.
    """
    path = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        there = path.stat().st_mode
        if not stat.S_ISREG(there):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        mode = stat.S_IMODE(there)
    # not the file's own name with more to it, which the system may find too long
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX)
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes `data` with `replacing`."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(data)


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Writes a file with `replace_file`, text as UTF-8. Raises UserError if it cannot be
    written.
    """
    # A file name that is not UTF-8 may be part of the text.
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    try:
        replace_file(Path(path), content)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {reason}") from None


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Writes indented JSON; rejects numbers that JSON does not have."""
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def locked(handle: int) -> bool:
    """Whether the open file or folder is now this process's until it is closed, and not another's
    already. Where the system has no locks it is.
    """
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def written_elsewhere(path: Path) -> UserError:
    """The error for what another process has locked."""
    return UserError(f"{path} is being written by another process")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Two runs that write into one folder would each replace what the other made: the second one
    gets a UserError.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not locked(handle):
            raise written_elsewhere(folder)
        yield
    finally:
        os.close(handle)


def spread(records: list[T], limit: int | None) -> list[T]:
    """At most `limit` of a file's records, evenly over all of them; None: all."""
    if limit is None or limit >= len(records):
        return records
    return [records[i * len(records) // limit] for i in range(limit)]


def check_writable(
    path: str | Path, what: str = "", wrote: Callable[[Path], bool] | None = None
) -> Path:
    """The path, after a trial write beside it.

    A long run must not end at an output that cannot be written, and no file of the user's must be
    replaced by mistake. wrote: whether a file is what this command writes (`what`, in words), so
    that it may be replaced; None: any. Changes nothing. Raises UserError.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder; give a file name")
        there = path.exists()
        if there and not path.is_file():
            raise UserError(f"cannot write {path}: it is not a regular file")
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=_PREFIX):
            pass
        if there and not os.access(path, os.W_OK):
            raise UserError(f"cannot write {path}: permission denied")
        empty = not there or path.stat().st_size == 0
    except OSError as error:
        raise UserError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    if wrote is not None and not empty and not wrote(path):
        raise UserError(
            f"{path} exists and is not {what}, so it is not replaced; choose another file or "
            "delete it"
        )
    return path


def check_folder(path: str | Path) -> Path:
    """The path of a folder to write into, after a trial; what the trial had to make is removed, so
    that a run which ends without a result leaves nothing. Raises UserError.
    """
    path = Path(path)
    missing: list[Path] = []
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        check_writable(path / "results")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot create the folder {path}: {reason}") from None
    finally:
        for folder in missing:
            with suppress(OSError):  # it was not made, or someone else has put something there
                folder.rmdir()
    return path
