"""The half-finished target of a streaming run, on disk: what the run was started with, and the blocks that are done.

``TARGET.partial`` stands beside the target until all of it is done:

  started.json          what the run was started with, so that nothing else continues it
  block-00003.json      block 3 is done: its files with their hashes, its masks, and its part of the report
  report.json           all blocks are done, and this is the report
  finished.json         ``folder`` holds the whole target, and only has to be put in its place
  folder/               the target's files, under their final names
  masks/, named/        masks of each block; its weights under the model's own names where the target's differ
  writing/, converted/  what is being written; what transformers converts at load. Gone at the next start
  lock                  held by the run that is going on

Every file is written elsewhere, synced and renamed, and the .json file that says so comes after it. So a run may be
killed at any moment.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelopt_sparse.checkpoint.files import hold, size_and_hash
from modelopt_sparse.checkpoint.format import DESCRIPTION, move_in
from modelopt_sparse.reports.text import first_few

STARTED, REPORT, FINISHED, LOCK = "started.json", "report.json", "finished.json", "lock"
FOLDERS = ("folder", "masks", "named")
SCRATCH = ("writing", "converted")
DATA = "calibration data"


@dataclass(frozen=True)
class BlockRecord:
    """A block that is done. ``files``: path in the work folder -> size and hash; ``masks``: parameter name -> shape and
    number kept; ``layers`` and ``blocks``: its part of the report."""

    block: str
    files: dict[str, dict[str, Any]]
    masks: dict[str, dict[str, Any]]
    layers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]


class WorkFolder:
    """``started``: what this run is started with. Raises ValueError if the folder holds a run that was started with
    something else, or is damaged, unless ``overwrite`` is set: then that run is thrown away."""

    def __init__(self, target: Path, started: Mapping[str, Any], *, overwrite: bool) -> None:
        self.target, self.path = target, work_path(target)
        self.done: dict[int, BlockRecord] = {}
        self._overwrite = overwrite
        self._started = json.loads(json.dumps(started, default=str))
        self._refuse_strange_files()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path / LOCK)
        try:
            self._begin(overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, overwrite: bool) -> None:
        problem = self._problem()
        if problem and not overwrite:
            raise ValueError(f"{str(self.path)!r} {problem}")
        if problem:
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

    def _problem(self) -> str:
        """Why what the folder holds cannot be continued, or ""."""
        if not (self.path / STARTED).is_file():
            return ""
        there = self._read_json(STARTED)
        if differences := _differences({**there, DATA: None}, {**self._started, DATA: None}):
            return _refusal(differences)
        self._started = there
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
        if not self.path.exists() or (self.path / STARTED).is_file():
            return
        if self.path.is_file() or not {path.name for path in self.path.iterdir()} <= {*FOLDERS, *SCRATCH, LOCK}:
            raise ValueError(
                f"{str(self.path)!r} is where the unfinished target would be written, and something else is there: "
                "move it, or give another target"
            )

    def check_data(self, sha256: str | None) -> bool:
        """Whether this run has the data of the one that it continues, as far as that has come. If not, raises
        ValueError, or throws that run away if ``overwrite`` is set."""
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
        """Move a written file to its place in the work folder, safe from now on -> its size and hash."""
        found = size_and_hash(file)
        _sync(file)
        file.replace(self.path / name)
        _sync((self.path / name).parent)
        return found

    def finish_block(self, index: int, record: BlockRecord) -> None:
        self.write_json(f"block-{index:05d}.json", vars(record))
        self.done[index] = record

    def write_json(self, name: str, value: Any) -> None:
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
        """The report of a run all of whose blocks are done."""
        return self._read_json(REPORT) if (self.path / REPORT).is_file() else None

    def _read_json(self, name: str) -> Any:
        return _read_json(self.path / name)

    def finish(self) -> None:
        """``folder`` is complete: put it in the target's place."""
        folder = self.path / "folder"
        if self.target.exists() and not self._overwrite:
            raise ValueError(
                f"{str(self.target)!r} has come into being since the run started: move it and start again, or give "
                "overwrite=True (--overwrite); nothing will be solved again"
            )
        mode = (folder / DESCRIPTION).stat().st_mode
        for path in folder.iterdir():
            path.chmod(mode)  # safetensors' files are for their owner alone, this one is like any new file
            _sync(path)
        self.write_json(FINISHED, sorted(path.name for path in folder.iterdir()))
        self.put_in_place()

    def put_in_place(self) -> None:
        """Move a finished folder to the target; again, if the run was killed while it did so. In a target that exists,
        other files than the model's stay."""
        folder, names, target = self.path / "folder", self._read_json(FINISHED), self.target
        if not target.exists():
            folder.rename(target)
        elif (folder / DESCRIPTION).is_file():
            move_in(folder, target, names)
        _sync(target)
        _sync(target.parent)
        self.path.rename(_over(target))  # from one moment to the next there is nothing to continue
        remove_leftovers(target)

    def close(self) -> None:
        """Let go of the folder, finished or not."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def work_path(target: Path) -> Path:
    target = target.resolve()
    return target.with_name(f"{target.name}.partial")


def is_finished(target: Path) -> bool:
    """Whether a run has made all of the target, and was killed before all of it was in its place."""
    return (work_path(target) / FINISHED).is_file()


def remove_leftovers(target: Path) -> None:
    """What is left of a run that was killed after its target was in place."""
    shutil.rmtree(_over(target), ignore_errors=True)


def _over(target: Path) -> Path:
    path = work_path(target)
    return path.with_name(f"{path.name}.over")


def _locked(path: Path) -> int | None:
    """An open descriptor that keeps other runs out for as long as this process holds it."""
    try:
        return hold(path, os.O_RDWR | os.O_CREAT)
    except BlockingIOError:
        raise ValueError(
            f"{str(path.parent)!r} is being written to by another run: wait for it, or give another target"
        ) from None


def _empty(folder: Path, *, but: Collection[str]) -> None:
    """Records first, and last of all what says whose folder it is: killed in between, it is still a whole one."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == STARTED, path.suffix != ".json")):
        if path.name in but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
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
