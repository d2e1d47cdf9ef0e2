"""What files of the system take: locks, full disks, hashes."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two runs apart
    fcntl = None


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or folder for as long as the descriptor that this returns is open; None where there are no locks.
    However the process ends, its lock ends with it.

    Raises BlockingIOError if somebody holds it, OSError if it cannot be locked.
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


# no space left; the user's quota; a limit on the size of files
FULL = {errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else [])}


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that there is no space left. safetensors and torch say so in words,
    with the number of the system's error."""
    while error is not None:
        text = str(error)
        if any(f"(os error {number})" in text or f"{os.strerror(number)} ({number})" in text for number in FULL):
            return True
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def size_and_hash(path: Path) -> dict[str, Any]:
    """A file as ``sparsity.json`` lists it."""
    return {"size": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
