"""GGUF files converted once, into a model's folder in the user's cache."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from multirate.errors import say_once
from multirate.gguf_models.file import GgufFile
from multirate.gguf_models.load import load_gguf
from multirate.io import cache_folder, replace_file

MANIFEST = "converted.json"
_FORMAT = 3  # of what a conversion writes: another one is converted again
_CHUNK = 16 << 20
_BYTES = 2  # of a value in bf16


def _kept_model(name: str, identity: str) -> Path | None:
    """The folder of a model that was converted before, compared with its checksums; None: there is
    none, it is of another file than the one with this identity, or it is damaged.
    """
    folder = _root() / name
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError:  # none, or in a place that cannot be used, which is said where one is kept
        return None
    try:
        manifest = json.loads(content)
        if manifest["format"] != _FORMAT or identity != manifest["identity"]:
            return None
        sound = all(_checksum(folder / file) == sum_ for file, sum_ in manifest["files"].items())
    except FileNotFoundError:  # another process exchanges it
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        say_once(f"{folder} is damaged; ignoring it")
    return folder if sound else None


def keep_model(path: Path, name: str, identity: str) -> Path:
    """The folder that a GGUF file's model is kept in, converted to bf16 if it is not yet: it
    appears whole, and a process that finds another one at it waits for that.

    Raises OSError when it cannot be kept, UserError for the file as load_gguf does.
    """
    found = _kept_model(name, identity)
    if found is not None:
        return found
    root = _root()
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{name}.lock", name):
        found = _kept_model(name, identity)
        if found is not None:
            return found
        for left in root.glob(f".{name}.part-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        _check_room(root, path)
        scratch = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}.part-"))
        try:
            _convert(path, scratch, identity)
            _exchange(scratch, root / name)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return root / name


def _convert(path: Path, folder: Path, identity: str) -> None:
    model, tokenizer = load_gguf(path)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # it says why only in words
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "its name is not UTF-8") from None
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for file in files:
        file.chmod(0o644)  # others may share the folder
        with file.open("rb") as content:
            os.fsync(content.fileno())
    sums = {file.name: _checksum(file) for file in files}
    about = {"format": _FORMAT, "source": path.name, "identity": identity, "files": sums}
    replace_file(folder / MANIFEST, json.dumps(about, indent=2).encode())
    folder.chmod(0o755)


def _exchange(new: Path, place: Path) -> None:
    """Puts a folder in the place of what is there; a process that reads the old files goes on."""
    if place.exists():
        old = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.part-"))
        os.replace(place, old)
        os.replace(new, place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(new, place)


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say_once(f"another process is converting {name}; waiting for it")
        lock.acquire()
    except NotImplementedError as error:  # a file system without locks
        raise OSError(errno.ENOLCK, str(error)) from None
    try:
        yield
    finally:
        lock.release()


def _check_room(root: Path, path: Path) -> None:
    needed = _BYTES * sum(math.prod(tensor.shape) for tensor in GgufFile(path).tensors.values())
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, f"no space left on device: {needed / 1e6:.0f} MB are needed")


def _checksum(path: Path) -> int:
    """CRC-32: against damage, and read as fast as the file is."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _root() -> Path:
    return cache_folder() / "models"
