"""Locks on files, folders that are made for a while, errors of a full disk, and hashes of files."""

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two runs apart
    fcntl = None


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or folder -> an open descriptor, which holds the lock until it is closed.

    The lock ends with the process, however that ends. None is returned on systems without locks. Raises BlockingIOError
    if another process holds the lock, OSError if the path cannot be locked.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def hold_file(path: Path) -> int | None:
    """Make a file, its folder too, and lock it -> an open descriptor; None on systems without locks.

    Who holds such a lock removes the file before letting go of it. If that happens between opening and locking, the
    file is made once more. Raises BlockingIOError if another process holds the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = hold(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the folder has just been removed
            continue
        if descriptor is None or _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def missing_parents(path: Path) -> list[Path]:
    """The folders that are missing above a path, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


# numbers of the errors: no space left; the limit on a file's size is reached; the user's quota is
FULL = {errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else [])}


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that there is no space left.

    The errors of safetensors and torch have the number of the system's error in their text.
    """
    while error is not None:
        text = str(error)
        if any(f"(os error {number})" in text or f"{os.strerror(number)} ({number})" in text for number in FULL):
            return True
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def size_and_hash(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256, as ``sparsity.json`` lists them."""
    return {"size": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
