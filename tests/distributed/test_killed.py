"""Streaming by two processes of which one is killed or stopped, or finds the disk full, before any exchange with the
other or operation on a file."""

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.streams import assert_alike_folders, assert_same_folders, saved
from tests.faults.faulty import ENDED, Runs, state
from tests.helpers import free_port, tiny_llama, token_batches

HAS_BOTH = hasattr(os, "fork") and Path("/proc/self").exists()
pytestmark = [pytest.mark.skipif(not HAS_BOTH, reason="needs fork and /proc"), pytest.mark.slow]
CASES = 12  # of the about 310 that there are; drawn with the number of the case as seed


@dataclass
class World:
    """A source, the folder that two processes end in, and how many operations each of them takes to get there."""

    folder: Path
    runs: Runs
    expected: Path
    operations: list[int] = field(default_factory=list)

    def start(
        self, target: Path, size: int, at: tuple[int, int | str] | None = None, what: str = "kill", **more: Any
    ) -> list[int]:
        """Start processes; ``at``: which of them is killed, or meets another fault, and before which of its
        operations."""
        port, batches = free_port(), [batch.tolist() for batch in token_batches(3)]
        given = {"source": self.folder / "dense", "target": target, "batches": batches, "method": "sparsegpt"}
        given |= {"reconstruct": 1, "size": size, "port": port, **more}
        faults = {at[0]: {"fault": {"what": what}, "at": at[1]}} if at is not None else {}
        return [
            self.runs.start("stream as rank", {**given, "rank": rank}, files=target.parent, **faults.get(rank, {}))
            for rank in range(size)
        ]

    def finish(self, target: Path, size: int) -> list[dict[str, Any]]:
        """Go on with so many processes, to the end."""
        ended = [self.runs.wait(each) for each in self.start(target, size)]
        assert [code for code, _ in ended] == [0] * size, ended
        return [found for _, found in ended]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("killed")
    saved(folder / "dense", lambda: tiny_llama(num_hidden_layers=2), max_shard_size=40_000)
    world = World(folder, Runs(folder), folder / "two" / "sparse")
    world.expected.parent.mkdir()
    world.operations += [each["operations"] for each in world.finish(world.expected, 2)]
    yield world
    world.runs.close()


def kill(world: World, target: Path, victim: int, at: int, then: int) -> None:
    """Kill a process before one of its operations, and go on with ``then`` processes.

    The one that is left stops with an error that says so. Nothing can be taken for the target before it is whole. The
    next run ends in the bits of a run that nobody disturbed; by another number of processes, but for roundings.
    """
    case = f"process {victim} at {at}, then {then}"
    target.parent.mkdir()
    ended = [world.runs.wait(each) for each in world.start(target, 2, (victim, at))]
    assert ended[victim][0] == -signal.SIGKILL, case
    code, found = ended[1 - victim]
    if code == 0:  # it had finished before
        assert target.exists(), case
    else:
        assert found["error"].startswith("RankError: "), f"{case}: {found}"
    if target.exists():
        assert_same_folders(target, world.expected)
        return
    world.finish(target, then)
    assert [path.name for path in target.parent.iterdir()] == ["sparse"], case
    compare = assert_same_folders if then == 2 else assert_alike_folders
    compare(target, world.expected)


@pytest.mark.parametrize("case", range(CASES))
def test_a_process_is_killed_and_another_number_of_them_goes_on(world, tmp_path, case):
    draw, victim = random.Random(case), case % 2
    at, then = draw.randint(1, world.operations[victim]), draw.choice([1, 2, 3])
    kill(world, tmp_path / "place" / "sparse", victim, at, then)


@pytest.mark.skipif("EVERY_KILL" not in os.environ, reason="all operations, by hand: EVERY_KILL=1")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_before_every_operation(world, tmp_path, victim):
    for at in range(1, world.operations[victim] + 1):
        kill(world, tmp_path / f"{at}" / "sparse", victim, at, 1 + at % 3)
    print(world.operations)


# a full disk ----------------------------------------------------------------------------------------------------------

FULL: dict[str, tuple[int, str, dict[str, Any]]] = {  # whose, before what, and what is asked for
    "the first's, which writes": (0, "*block-00000.json", {}),
    "the second's, which spills": (1, "the files of block 0", {"spill": True}),
}


@pytest.mark.parametrize("whose", FULL)
def test_the_disk_of_one_process_is_full(world, tmp_path, whose):
    (victim, at, more), target = FULL[whose], tmp_path / "place" / "sparse"
    target.parent.mkdir()
    ended = [world.runs.wait(each) for each in world.start(target, 2, (victim, at), "full", **more)]
    error = f"OSError: '{target}' could not be written, because the disk is full ("
    assert ended[victim][1]["error"].startswith(error)
    assert ended[1 - victim][1]["error"].startswith(f"RankError: rank {victim} stopped: {error}")
    assert all(found["error"].endswith(f"blocks are kept in '{target}.partial'") for _, found in ended)
    (found, *_) = world.finish(target, 3)
    assert found["notes"][-1] == "1 of 2 blocks were reused from a stopped run of 2 processes"
    assert_alike_folders(target, world.expected)


# a process that is stopped, and may go on -----------------------------------------------------------------------------


def start_stopped(world: World, target: Path, victim: int) -> list[int]:
    """Two processes, of which one has stopped in the second block."""
    target.parent.mkdir()
    processes = world.start(target, 2, (victim, "the files of block 1"), "stop")
    while state(processes[victim]) != "T":
        assert state(processes[victim]) not in ENDED
        time.sleep(0.01)
    return processes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped_is_waited_for_and_its_target_is_locked(world, tmp_path, victim):
    target = tmp_path / "place" / "sparse"
    processes = start_stopped(world, target, victim)
    error = f"ValueError: '{target}.partial' is being written to by another run: wait for it"
    ended = [world.runs.wait(each) for each in world.start(target, 2)]
    assert [found["error"] for _, found in ended] == [error, f"RankError: rank 0 stopped: {error}"]
    assert state(processes[1 - victim]) not in ENDED
    os.kill(processes[victim], signal.SIGCONT)
    assert [world.runs.wait(each)[0] for each in processes] == [0, 0]
    assert_same_folders(target, world.expected)


def test_a_process_that_was_stopped_does_no_harm_to_a_new_attempt(world, tmp_path):
    """Its leader was killed, others have finished the run, and then it goes on."""
    target = tmp_path / "place" / "sparse"
    first, second = start_stopped(world, target, 1)
    os.kill(first, signal.SIGKILL)
    assert world.runs.wait(first)[0] == -signal.SIGKILL
    world.finish(target, 2)
    os.kill(second, signal.SIGCONT)
    code, found = world.runs.wait(second)
    assert code == 1
    assert found["error"].startswith("RankError: another process of this run died, left or")
    assert [path.name for path in target.parent.iterdir()] == ["sparse"]
    assert_same_folders(target, world.expected)
