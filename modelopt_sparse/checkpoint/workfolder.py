"""The work folder of a streaming run: its unfinished target, what it was started with, and the blocks that are done.

``TARGET.partial`` stands beside the target until the run is finished, or stops before its first block is done: there is
nothing to go on from then. It holds:

  started.json          what the run was started with, so that only such a run continues it
  block-00003.json      block 3 is done: its files with their hashes, its masks, and its part of the report
  budget.json           what the layers become under a budget, or what stays of a model that shrinks, from before the
                        first block is done
  report.json           all blocks are done, and this is the report
  finished.json         ``folder`` holds the whole target, and only has to be moved to its place
  folder/               the target's files, under their final names
  masks/                masks of each block
  named/                weights of each block under the model's own names, if the target has other names
  writing/              files that are being written; deleted at the next start
  converted/            what transformers converts at load; deleted at the next start
  lock                  locked by the run that is going on

Of several processes the first one leads: it alone holds the lock and writes here, but for spilled activations and
converted weights, which each writes for itself. The others read. Another number of them may go on: started.json says
how many have begun.

Every file is written in ``writing/``, synced and renamed, and after that the .json file is written that lists it. So a
run may be killed at any moment.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from modelopt_sparse.checkpoint.folder import (
    DESCRIPTION,
    is_occupied,
    make_durable,
    missing_parents,
    move_in,
    read_json,
    remove_empty,
    renamed_if_absent,
    size_and_hash,
    sync,
)
from modelopt_sparse.distributed import Processes
from modelopt_sparse.reports.text import first_few

STARTED, BUDGET, REPORT, FINISHED = "started.json", "budget.json", "report.json", "finished.json"
LOCK = "lock"
FOLDERS = ("folder", "masks", "named")
SCRATCH = ("writing", "converted")
# what a run is started with and is known only when it has been read
DATA, SOURCE, PROCESSES = "calibration data", "source file ", "processes"


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


# where it is, and whose -----------------------------------------------------------------------------------------------


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


@contextmanager
def locked(final_folder: Path) -> Iterator[None]:
    """Hold the lock of a target, from the start of a run to its end: no other run can write there.

    The lock ends with the process, however that ends. Raises ValueError if another run holds it.
    """
    if sys.platform == "win32":  # it has no such locks: nothing keeps two runs apart there
        yield
        return
    import fcntl  # Windows has none

    path = work_path(final_folder)
    made, file = [path, *missing_parents(path)], path / LOCK
    with ExitStack() as closing:
        closing.callback(remove_empty, made)
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = closing.enter_context(file.open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(lock, file):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # not found: the other run is ending, and has removed it
            raise ValueError(f"{str(path)!r} is being written to by another run: wait for it") from None
        try:
            yield
        finally:
            with suppress(FileNotFoundError):  # the folder has been moved
                if _is_at(lock, file):  # it is removed before it is let go of
                    file.unlink()


def _is_at(lock: IO[str], file: Path) -> bool:
    return os.path.samestat(os.fstat(lock.fileno()), file.stat())


@contextmanager
def opened(
    final_folder: Path, started: Mapping[str, Any], processes: Processes, *, overwrite: bool
) -> Iterator["WorkFolder"]:
    """The work folder of a run, locked until the end; without a block that is done by then it is removed. All of the
    ``processes`` open it together.

    ``started`` is what this run is started with. Raises ValueError if another run holds the folder, or if something
    else is at its place. Also if it is damaged, or holds a run that was started with something else, unless
    ``overwrite`` is True: then that run is deleted. A run of which no block is done is always deleted.
    """
    work = WorkFolder(final_folder, started, processes, overwrite=overwrite)
    if not work.leads:
        work.join()
        yield work
        return
    of_a_run = {*FOLDERS, *SCRATCH, LOCK, STARTED, BUDGET, REPORT}
    present = {path.name for path in work.path.iterdir()} if work.path.is_dir() else set()
    if work.path.is_file() or (not present <= of_a_run and not work.has_blocks()):
        raise ValueError(f"{str(work.path)!r}: something else is there: move it, or give another target")
    with locked(final_folder):
        try:
            work.begin()
            work.join()
            yield work
        finally:
            if not work.has_blocks():
                work.empty((*FOLDERS, *SCRATCH))


class WorkFolder:
    """The work folder of a run; `opened` makes and locks it.

    leads: whether this process writes, and is the only one that does.
    done: index of a block -> its record, for blocks that are done.
    budget: what an earlier run has kept of its budget.
    report: of an earlier run, if it has done all blocks.
    finished: whether an earlier run has finished the target, and not yet moved all of it to its place.
    """

    def __init__(
        self, final_folder: Path, started: Mapping[str, Any], processes: Processes, *, overwrite: bool
    ) -> None:
        self.final_folder, self.path = final_folder.resolve(), work_path(final_folder)
        self.leads = processes.rank == 0
        self.done: dict[int, BlockRecord] = {}
        self.budget: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        self.finished = False
        self._processes = processes
        self._is_same: bool | None = None  # None: not compared yet
        self._overwrite = overwrite
        self._started: dict[str, Any] = json.loads(json.dumps({**started, PROCESSES: processes.size}, default=str))

    # what was there before --------------------------------------------------------------------------------------------

    def has_blocks(self) -> bool:
        """Whether a block is done, so that there is something to go on from."""
        return (self.path / STARTED).is_file() and any(self.path.glob("block-*.json"))

    @property
    def begun_by(self) -> int:
        """How many processes have begun the run."""
        return self._started[PROCESSES]

    def begin(self) -> None:
        """Go on from what is there, or start anew."""
        if not self.has_blocks():
            self.empty()
        elif problem := self._problem():
            self._throw_away(problem)
        for name in SCRATCH:
            shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / name).mkdir()
        if not (self.path / STARTED).is_file():
            self.write_json(STARTED, self._started)
        self.finished = is_finished(self.final_folder)

    def join(self) -> None:
        """Let the other processes know what the one that leads has found, once it has begun."""
        if self._processes.size == 1:
            return
        seal = self.path / "writing" / f"seal-{secrets.token_hex(8)}"
        if self.leads:
            seal.touch()
        facts = self.done, self.budget, self.report, self.finished, self._started, seal.name
        facts = self._processes.all_gather("the work folder", facts if self.leads else None)[0]
        self.done, self.budget, self.report, self.finished, self._started, name = facts
        if not (self.path / "writing" / name).is_file():
            problem = f"of rank 0 is not there for rank {self._processes.rank}"
            raise ValueError(f"{str(self.path)!r} {problem}: put it where all processes see it")

    def converted(self) -> Path:
        """Where this process converts weights to."""
        folder = self.path / "converted" / str(self._processes.rank)
        folder.mkdir()
        return folder

    def _problem(self) -> str:
        """Why the run that is there cannot be continued; "" if it can. Reads what it has left."""
        try:
            started = read_json(self.path / STARTED)
            if difference := _difference(_at_once(started), _at_once(self._started)):
                return difference
            for path in () if is_finished(self.final_folder) else sorted(self.path.glob("block-*.json")):
                record = BlockRecord(**read_json(path))
                for name, expected in record.files.items():
                    if not (self.path / name).is_file() or size_and_hash(self.path / name) != expected:
                        return _damage(name, record)
                self.done[int(path.stem.rpartition("-")[2])] = record
            earlier = (self.path / BUDGET, self.path / REPORT)
            self.budget, self.report = (read_json(file) if file.is_file() else None for file in earlier)
        except (ValueError, TypeError, AttributeError) as error:
            return f"is damaged: {error}"
        self._started = started
        return ""

    def check(self, files: Mapping[str, str], data: str | None) -> None:
        """Compare the source (file name -> SHA-256) and the calibration data (its SHA-256) with those of the run that
        this one continues, once.

        If they differ, ValueError is raised; with ``overwrite`` that run is deleted instead.
        """
        if self._is_same is None:
            read = {f"{SOURCE}{name}": sha256 for name, sha256 in files.items()} | {DATA: data}
            same = self._compare(read) if self.leads else False
            self._is_same = bool(self._processes.all_gather("the data of the work folder", same)[0])
            if not self._is_same:
                self.done, self.budget, self.report, self.finished = {}, None, None, False

    def _compare(self, read: Mapping[str, Any]) -> bool:
        started = {name: value for name, value in self._started.items() if _is_read(name)}
        difference = _difference(started or read, read)
        if difference:
            self._throw_away(difference)
        if difference or not started:
            self._started = {**_at_once(self._started), PROCESSES: self._processes.size, **read}
            self.write_json(STARTED, self._started)
        return not difference

    def check_files(self) -> None:
        """Raise ValueError if a file of a finished block is not there any more, or has another size."""
        for record in self.done.values():
            for name, expected in record.files.items():
                path = self.path / name
                if not path.is_file() or path.stat().st_size != expected["size"]:
                    raise self._error(_damage(name, record))

    def _throw_away(self, problem: str) -> None:
        """Delete the run that is there. Without ``overwrite`` ValueError says why."""
        if not self._overwrite:
            raise self._error(problem)
        self.empty()
        self.done.clear()

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} {problem}: give another target, or overwrite=True to throw it away")

    # what is written --------------------------------------------------------------------------------------------------

    def empty(self, folders: Iterable[str] = FOLDERS) -> None:
        """Delete all JSON files, and these folders.

        Records of blocks are deleted first, and the file that says what the run was started with last of the files. If
        this is killed in between, the folder is still a valid one.
        """
        for path in sorted(self.path.glob("*.json"), key=lambda path: path.name == STARTED):
            path.unlink()
        for name in folders:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def scratch(self) -> Path:
        """An empty folder to write to."""
        folder = self.path / "writing" / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def place(self, file: Path, name: str) -> dict[str, dict[str, Any]]:
        """Move a written file to its place in the work folder, where it appears whole -> {name: its size and hash}."""
        described = {name: size_and_hash(file)}
        sync(file)
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        file.replace(place)
        sync(place.parent)
        return described

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the work folder."""
        file = self.path / "writing" / name
        file.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        self.place(file, name)

    def finish_block(self, index: int, record: BlockRecord) -> None:
        """Record that a block is done; all of its files are in their places."""
        self.write_json(f"block-{index:05d}.json", vars(record))
        self.done[index] = record

    def share_block(self, index: int) -> None:
        """Let the other processes know that a block is done; they wait for it."""
        self.done[index] = self._processes.all_gather(f"the files of block {index}", self.done.get(index))[0]

    def finish(self) -> None:
        """Move ``folder``, which is complete, to the target's place.

        Raises ValueError if a target has come into being since the run started, unless ``overwrite`` is True.
        """
        if is_occupied(self.final_folder) and not self._overwrite:
            raise ValueError(f"{str(self.final_folder)!r} has come into being since the start: give overwrite=True")
        folder = self.path / "folder"
        make_durable(folder)
        self.write_json(FINISHED, sorted(path.name for path in folder.iterdir()))
        self.put_in_place()

    def put_in_place(self) -> None:
        """Move a finished folder to the target. It is called again if the run was killed while it did so.

        In a target that exists, files that are not the model's stay.
        """
        folder = self.path / "folder"
        if (folder / DESCRIPTION).is_file() and not renamed_if_absent(folder, self.final_folder):
            move_in(folder, self.final_folder, read_json(self.path / FINISHED))
        sync(self.final_folder)
        sync(self.final_folder.parent)
        self.path = self.path.rename(_finished_path(self.final_folder))  # from here on there is no run to continue
        remove_leftovers(self.final_folder)


def _at_once(started: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a run before it has read anything."""
    return {name: value for name, value in started.items() if name != PROCESSES and not _is_read(name)}


def _is_read(name: str) -> bool:
    """Whether it is of the source or of the data."""
    return name == DATA or name.startswith(SOURCE)


def _difference(started: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a run was started with (``there``) that is something else ``now``; "" if nothing is."""
    keys = [key for key in {**started, **now} if started.get(key) != now.get(key)]
    differences = [f"{key}: {started.get(key)} there, {now.get(key)} now" for key in keys]
    return f"holds a run that was started with something else ({first_few(differences)})" if differences else ""


def _damage(name: str, record: BlockRecord) -> str:
    return f"is damaged: {name!r} is not as block {record.block!r} left it"
