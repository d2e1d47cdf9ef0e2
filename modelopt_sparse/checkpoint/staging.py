"""Writing a folder at another place beside its own, and moving it there when it is complete.

So the folder is never seen half written, even if this process is killed, or if others write the same folder.
"""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from modelopt_sparse.checkpoint.files import hold, is_full, missing_parents, remove_empty
from modelopt_sparse.checkpoint.format import DESCRIPTION, move_in
from modelopt_sparse.checkpoint.place import is_occupied


@contextmanager
def staged(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder to write to, beside ``folder``. At the end it is moved to ``folder``; after an error it is removed.

    Raises OSError if it cannot be written, with a text that says what is at ``folder`` now. Raises ValueError if there
    are files in ``folder`` at the end, unless ``overwrite`` is True.
    """
    folder = folder.resolve()
    made = missing_parents(folder)
    writer = f"{socket.gethostname()}.{os.getpid()}"  # several processes may write the same folder
    staging = folder.with_name(f".{folder.name}.{writer}.partial")
    left = "what was there before is complete" if folder.exists() else "nothing is left of it"
    lock = None
    try:
        _remove_what_was_killed(folder)
        lock = _made_and_held(staging)
        yield staging
        mode = (staging / DESCRIPTION).stat().st_mode
        for path in staging.iterdir():
            path.chmod(mode)  # safetensors' files are for their owner alone, this one is like any new file
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        if not _took_its_place(staging, folder):
            if not overwrite and is_occupied(folder):
                raise ValueError(
                    f"{str(folder)!r} has come into being meanwhile, and is left as it is: give another path, or "
                    "overwrite=True (--overwrite)"
                )
            left = f"it has no {DESCRIPTION} now and may mix old and new files, save again"
            move_in(staging, folder, sorted(path.name for path in staging.iterdir()))
    except Exception as error:
        # tokenizers raise a bare Exception when the disk is full
        if not isinstance(error, (OSError, SafetensorError)) and not is_full(error):
            raise
        advice = "; the disk is full: free space and save again" if is_full(error) else ""
        raise OSError(f"{str(folder)!r} could not be written ({left}): {error}{advice}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        remove_empty(made)  # they are not empty if all went well


def _remove_what_was_killed(folder: Path) -> None:
    """Remove the staging folders for this place whose process was killed: those that no process has locked."""
    name = re.compile(rf"\.{re.escape(folder.name)}\..+\.\d+\.partial")
    stagings: list[Path] = []
    with suppress(OSError):  # the parent may not be there yet, or cannot be listed
        stagings += [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]
    for path in stagings:
        with suppress(OSError):  # another process holds the lock, or it cannot be locked
            lock = hold(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _made_and_held(staging: Path) -> int | None:
    """Make an empty folder and lock it -> the lock; None if there are no locks.

    Between the two steps another process may take the folder for one of a killed process, and lock or remove it. Then
    it is made once more.
    """
    while True:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True, exist_ok=True)
        try:
            lock = hold(staging)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:  # a file system without locks
            return None
        if staging.exists():
            return lock
        if lock is not None:
            os.close(lock)


def _took_its_place(staging: Path, folder: Path) -> bool:
    """Rename the staging folder to ``folder``, unless that exists -> whether it was renamed.

    Another process may make ``folder`` at the same moment.
    """
    if folder.exists():
        return False
    try:
        staging.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return False
    return True
