"""The work folder of a streaming run: its unfinished target, what it was started with, and the blocks that are done.

``TARGET.partial`` stands beside the target until the run is finished, or stops before its first block is done: there is
nothing to go on from then. It holds:

  started.json          what the run was started with, so that only such a run continues it
  block-00003.json      block 3 is done: its files with their hashes, its masks, and its part of the report
  report.json           all blocks are done, and this is the report
  finished.json         ``folder`` holds the whole target, and only has to be moved to its place
  folder/               the target's files, under their final names
  masks/                masks of each block
  named/                weights of each block under the model's own names, if the target has other names
  writing/              files that are being written; deleted at the next start
  converted/            what transformers converts at load; deleted at the next start
  lock                  locked by the run that is going on

Every file is written in ``writing/``, synced and renamed, and after that the .json file is written that lists it. So a
run may be killed at any moment.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelopt_sparse.checkpoint.folder import (
    DESCRIPTION,
    hold_file,
    is_occupied,
    missing_parents,
    move_in,
    remove_empty,
    size_and_hash,
)
from modelopt_sparse.reports.fold import first_few

STARTED, REPORT, FINISHED, LOCK = "started.json", "report.json", "finished.json", "lock"
FOLDERS = ("folder", "masks", "named")
SCRATCH = ("writing", "converted")
DATA = "calibration data"


@dataclass(frozen=True)
class BlockRecord:
    """A block that is done.

    block: the block's module path.
    files: path in the work folder -> size and SHA-256.
    masks: parameter name -> shape of its mask, and how many weights are kept.
    layers, blocks: the block's part of the report.
    """

    block: str
    files: dict[str, dict[str, Any]]
    masks: dict[str, dict[str, Any]]
    layers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]


class WorkFolder:
    """The work folder of a run, locked for as long as it is open. ``started`` is what this run is started with.

    done: index of a block -> its record, for blocks that are done.
    resumed: whether an earlier run has done some of them.
    finished: whether an earlier run has finished the target, and not yet moved all of it to its place.

    Raises ValueError if another run holds the folder, or if something else is at its place. Also if it is damaged, or
    holds a run that was started with something else, unless ``overwrite`` is True: then that run is deleted. A run of
    which no block is done is always deleted.
    """

    def __init__(self, final_folder: Path, started: Mapping[str, Any], *, overwrite: bool) -> None:
        self.final_folder, self.path = final_folder, work_path(final_folder)
        self.done: dict[int, BlockRecord] = {}
        self._overwrite = overwrite
        self._started = json.loads(json.dumps(started, default=str))
        self._refuse_strange_files()
        self._made = missing_parents(self.path)
        try:
            self._lock = _locked(self.path / LOCK)
        except BaseException:
            remove_empty([self.path, *self._made])
            raise
        try:
            self._begin(overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, overwrite: bool) -> None:
        problem = self._problem() if self._has_work() else ""
        if problem and not overwrite:
            raise ValueError(f"{str(self.path)!r} {problem}")
        if problem or not self._has_work():
            _empty(self.path, but={LOCK})
            self.done.clear()
        self.finished = (self.path / FINISHED).is_file()
        for name in SCRATCH:
            shutil.rmtree(self.path / name, ignore_errors=True)
        self._make_folders()
        if not (self.path / STARTED).is_file():
            self.write_json(STARTED, self._started)
        self.resumed = bool(self.done)

    def _make_folders(self) -> None:
        for name in (*FOLDERS, *SCRATCH):
            (self.path / name).mkdir(exist_ok=True)

    # what was there before --------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        """Whether a block is done, so that there is something to go on from."""
        return (self.path / STARTED).is_file() and any(self.path.glob("block-*.json"))

    def _problem(self) -> str:
        """Why the run in the folder cannot be continued, or "". Reads the records of its blocks."""
        started = self._read_json(STARTED)
        if differences := _differences({**started, DATA: None}, {**self._started, DATA: None}):
            return _refusal(differences)
        self._started = started
        if (self.path / FINISHED).is_file():
            return ""
        for path in sorted(self.path.glob("block-*.json")):
            record = BlockRecord(**self._read_json(path.name))
            for name, expected in record.files.items():
                if not (self.path / name).is_file() or size_and_hash(self.path / name) != expected:
                    return _damage(name, record)
            self.done[int(path.stem.rpartition("-")[2])] = record
        return ""

    def _refuse_strange_files(self) -> None:
        """Raise ValueError if something at the folder's path was not made by a run."""
        if not self.path.exists() or self._has_work():
            return
        of_a_run = {*FOLDERS, *SCRATCH, LOCK, STARTED, REPORT}
        if self.path.is_file() or not {path.name for path in self.path.iterdir()} <= of_a_run:
            raise ValueError(
                f"{str(self.path)!r} is where the unfinished target would be written, and something else is there: "
                "move it, or give another target"
            )

    def check_data(self, sha256: str | None) -> bool:
        """Whether this run has the calibration data, with this hash, of the run that it continues.

        It is True if that run had not read its data yet. If the data differs, ValueError is raised; with ``overwrite``
        that run is deleted instead, and False returned.
        """
        differences = _differences({DATA: self._started.get(DATA, sha256)}, {DATA: sha256})
        if differences and not self._overwrite:
            raise ValueError(f"{str(self.path)!r} {_refusal(differences)}")
        if differences:
            _empty(self.path, but={LOCK, *SCRATCH})
            self.done.clear()
            self.resumed = False
            self._make_folders()
        if differences or DATA not in self._started:
            self._started[DATA] = sha256
            self.write_json(STARTED, self._started)
        return not differences

    # what is written --------------------------------------------------------------------------------------------------

    def scratch(self) -> Path:
        """An empty folder to write to."""
        folder = self.path / "writing" / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def place(self, file: Path, name: str) -> dict[str, Any]:
        """Sync a written file and move it to its place in the work folder -> its size and hash."""
        size_and_sha256 = size_and_hash(file)
        _sync(file)
        file.replace(self.path / name)
        _sync((self.path / name).parent)
        return size_and_sha256

    def finish_block(self, index: int, record: BlockRecord) -> None:
        """Record that a block is done; all of its files are in their places."""
        self.write_json(f"block-{index:05d}.json", vars(record))
        self.done[index] = record

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the work folder, so that it appears whole or not at all."""
        file = self.path / "writing" / name
        file.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        _sync(file)
        file.replace(self.path / name)
        _sync(self.path)

    def check_files(self) -> None:
        """Raise ValueError if a file of a finished block is not there any more, or has another size."""
        for record in self.done.values():
            for name, expected in record.files.items():
                path = self.path / name
                if not path.is_file() or path.stat().st_size != expected["size"]:
                    raise ValueError(f"{str(self.path)!r} {_damage(name, record)}")

    def read_report(self) -> dict[str, Any] | None:
        """The report, if all blocks are done, else None."""
        return self._read_json(REPORT) if (self.path / REPORT).is_file() else None

    def _read_json(self, name: str) -> Any:
        return _read_json(self.path / name)

    def finish(self) -> None:
        """Move ``folder``, which is complete, to the target's place.

        Raises ValueError if a target has come into being since the run started, unless ``overwrite`` is True.
        """
        folder = self.path / "folder"
        if is_occupied(self.final_folder) and not self._overwrite:
            raise ValueError(
                f"{str(self.final_folder)!r} has come into being since the run started: move it and start again, or "
                "give overwrite=True (--overwrite); nothing will be solved again"
            )
        mode = (folder / DESCRIPTION).stat().st_mode
        for path in folder.iterdir():
            path.chmod(mode)  # safetensors' files are for their owner alone, this one is like any new file
            _sync(path)
        self.write_json(FINISHED, sorted(path.name for path in folder.iterdir()))
        self.put_in_place()

    def put_in_place(self) -> None:
        """Move a finished folder to the target. It is called again if the run was killed while it did so.

        In a target that exists, files that are not the model's stay.
        """
        folder, names, final_folder = self.path / "folder", self._read_json(FINISHED), self.final_folder
        if not final_folder.exists():
            folder.rename(final_folder)
        elif (folder / DESCRIPTION).is_file():
            move_in(folder, final_folder, names)
        _sync(final_folder)
        _sync(final_folder.parent)
        self.path.rename(_finished_path(final_folder))  # with this single step there is no run to continue any more
        remove_leftovers(final_folder)

    def close(self) -> None:
        """Release the lock of the folder. If no block is done, the folder is removed."""
        if self.path.exists() and not self._has_work():
            for name in (*FOLDERS, *SCRATCH):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in (REPORT, STARTED, LOCK):
                (self.path / name).unlink(missing_ok=True)
            remove_empty([self.path, *self._made])
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def reserved(final_folder: Path) -> Iterator[None]:
    """Hold the lock of a target for a run in memory, from its start to its end: no other run can write there.

    What is there of a streaming run that was stopped stays. Raises ValueError if another run holds the lock.
    """
    path = work_path(final_folder)
    made = missing_parents(path)
    try:
        lock = _locked(path / LOCK)
        try:
            yield
        finally:
            (path / LOCK).unlink(missing_ok=True)
            if lock is not None:
                os.close(lock)
    finally:
        remove_empty([path, *made])


def work_path(final_folder: Path) -> Path:
    """The path of a target's work folder."""
    final_folder = final_folder.resolve()
    return final_folder.with_name(f"{final_folder.name}.partial")


def is_finished(final_folder: Path) -> bool:
    """Whether a run has finished the target, and was killed before all of it was in its place."""
    return (work_path(final_folder) / FINISHED).is_file()


def remove_leftovers(final_folder: Path) -> None:
    """Delete what is left of a run that was killed after its target was in place."""
    shutil.rmtree(_finished_path(final_folder), ignore_errors=True)


def _finished_path(final_folder: Path) -> Path:
    """The path that the work folder is renamed to when its target is in place, to be deleted."""
    path = work_path(final_folder)
    return path.with_name(f"{path.name}.over")


def _locked(path: Path) -> int | None:
    """A lock on a file, as an open descriptor. Raises ValueError if another run holds it."""
    try:
        return hold_file(path)
    except BlockingIOError:
        raise ValueError(
            f"{str(path.parent)!r} is being written to by another run: wait for it, or give another target"
        ) from None


def _empty(folder: Path, *, but: Collection[str]) -> None:
    """Delete everything in a work folder, except for the names in ``but``.

    Records of blocks are deleted first, and the file that says what the run was started with last. If this is killed in
    between, the folder is still a valid one.
    """
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == STARTED, path.suffix != ".json")):
        if path.name in but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each key whose value in the folder (``there``) is not that of this run (``now``)."""
    keys = [*there, *(key for key in now if key not in there)]
    return [
        f"{key}: {_shown(there.get(key))} there, {_shown(now.get(key))} now"
        for key in keys
        if there.get(key) != now.get(key)
    ]


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _damage(name: str, record: BlockRecord) -> str:
    return (
        f"is damaged: {name!r} is not as block {record.block!r} left it; give overwrite=True (--overwrite) to start "
        "anew"
    )


def _refusal(differences: list[str]) -> str:
    return (
        f"holds a run that was started with something else ({first_few(differences)}): start it with "
        "what it was started with, give another target, or overwrite=True (--overwrite) to throw it away"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
