"""Locks that end with the process that holds them, however it ends."""

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two runs apart
    fcntl = None


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or folder for as long as the descriptor that this returns is open; None where there are no locks.

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
