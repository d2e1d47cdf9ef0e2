"""Recognizing a full disk in the errors of those who write files."""

import errno
import os

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
