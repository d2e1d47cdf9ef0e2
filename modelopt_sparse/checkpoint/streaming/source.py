"""The source of a streaming run: its folder, and the check that its files stay the same from the start to the end."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils import cached_file

from modelopt_sparse.calibration.storage import Unreadable
from modelopt_sparse.checkpoint.files import file_hash
from modelopt_sparse.checkpoint.format import INDEX, WEIGHTS, weight_files

GET_IT_AGAIN = "get the file again, and start the run again"


class SourceFiles:
    """The weight files of a folder, and its ``config.json``. ``hashes``: file name -> SHA-256.

    Raises ValueError for a file that is missing, or that is not as long as its own header says. Wrong numbers in a file
    cannot be noticed, as safetensors stores no checksums.
    """

    def __init__(self, folder: Path) -> None:
        weights = _existing_weight_files(folder)
        self._as_seen: dict[Path, tuple[int, ...]] = {}
        self.hashes: dict[str, str] = {}
        for name in ("config.json", *weights):
            path = folder / name
            self._as_seen[path.resolve()] = _look(path)
            if name in weights:
                try:
                    with safe_open(path, framework="pt"):
                        pass
                except (SafetensorError, OSError) as error:
                    raise ValueError(
                        f"{str(path)!r} is truncated or damaged ({error}): get the file again, or convert the model if "
                        "it is of another format"
                    ) from None
            self.hashes[name] = file_hash(path)

    def check(self, path: Path) -> None:
        """Raise Unreadable (a ValueError) if a file of the source is gone, or has changed since it was hashed.

        A change is told by its size, its time and its place on the disk. Nothing happens for other files.
        """
        before = self._as_seen.get(path.resolve())
        if before is None:
            return
        try:
            now = _look(path)
        except OSError as error:
            raise Unreadable(f"{str(path)!r} has gone since the run started ({error}): {self._advice()}") from None
        if now != before:
            raise Unreadable(f"{str(path)!r} has changed since the run started: {self._advice()}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If reading fails inside and a file of the source has changed, raise Unreadable in the place of the error."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            try:
                self.check_all()
            except Unreadable as reason:
                raise reason from error
            raise

    def check_all(self) -> None:
        """`check` all files of the source."""
        for path in self._as_seen:
            self.check(path)

    def _advice(self) -> str:
        return (
            "put back the file that the run was started with, and start it again with the same arguments; the blocks "
            "that are done are kept"
        )


def _existing_weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files. Raises ValueError if one of them is missing."""
    names = weight_files(folder)
    for name in names:
        if (folder / name).is_file():
            continue
        if (folder / INDEX).is_file():
            raise ValueError(f"{str(folder)!r} lacks {name!r}, which its {INDEX} lists: {GET_IT_AGAIN}")
        raise ValueError(
            f"{str(folder)!r} holds no {name!r}: streaming reads safetensors files; load the model and save it "
            "with save_pretrained if it has others"
        )
    return names


def _look(path: Path) -> tuple[int, ...]:
    """What tells whether a file has changed: device, inode, size and time."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def local_folder(source: str | Path, revision: str | None, remote: Mapping[str, Any]) -> Path:
    """The folder of a checkpoint. For a hub name its files are downloaded, and it is a folder in the hub's cache.

    Raises ValueError if ``source`` is neither a folder of a model nor a checkpoint on the hub.
    """
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise ValueError(f"{str(source)!r} holds no config.json: it is not a folder of a transformers model")
        return Path(source)
    name = str(source)
    try:
        config = cached_file(name, "config.json", revision=revision)
        index = cached_file(name, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
        folder = Path(str(config)).parent
        for file in [WEIGHTS] if index is None else weight_files(folder):
            cached_file(name, file, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is neither a folder nor a checkpoint that the hub gives: {error}") from None
    for loader in (AutoConfig, AutoTokenizer, AutoProcessor):
        try:
            loader.from_pretrained(name, revision=revision, **remote)  # this downloads its files
        except (OSError, ValueError, KeyError, ImportError):
            continue
    return folder
