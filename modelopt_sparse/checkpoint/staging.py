"""A folder that is written beside its place and takes it when all of it is there, whoever else writes or is killed."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from modelopt_sparse.checkpoint.files import hold, is_full
from modelopt_sparse.checkpoint.format import DESCRIPTION, move_in


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write to beside ``folder``; it takes its place at the end, or is removed if anything fails."""
    folder = folder.resolve()
    made = [parent for parent in folder.parents if not parent.exists()]
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
            left = f"it has no {DESCRIPTION} now and may mix old and new files, save again"
            move_in(staging, folder, sorted(path.name for path in staging.iterdir()))
    except (OSError, SafetensorError) as error:
        advice = "; the disk is full: free space and save again" if is_full(error) else ""
        raise OSError(f"{str(folder)!r} could not be written ({left}): {error}{advice}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        for parent in made:
            with suppress(OSError):  # it is not empty, all went well
                parent.rmdir()


def _remove_what_was_killed(folder: Path) -> None:
    """Folders that saves to this place were writing to when their process ended: those that no process holds."""
    name = re.compile(rf"\.{re.escape(folder.name)}\..+\.\d+\.partial")
    found: list[Path] = []
    with suppress(OSError):  # it may be no folder yet, or one that cannot be listed
        found += [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]
    for path in found:
        with suppress(OSError):  # it is held, or cannot be locked
            lock = hold(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _made_and_held(staging: Path) -> int | None:
    """Make the folder anew, and lock it, so that no other process takes it for a killed one's. Another may have done
    so in the moment between."""
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
    """Whether ``folder`` was new, and is what was staged now. Another process may make it at the same time."""
    if folder.exists():
        return False
    try:
        staging.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return False
    return True
