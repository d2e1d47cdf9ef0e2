"""Streaming by two processes of which one is killed, before any exchange with the other or operation on a file."""

import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.streams import assert_same_folders, saved
from tests.faults.faulty import Runs
from tests.helpers import tiny_llama, token_batches

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self").exists(), reason="needs fork and /proc"),
    pytest.mark.slow,
]
CASES = 40  # of the about 310 that there are; drawn with the number of the case as seed


@dataclass
class World:
    """A source, the folder that it ends in, and how many operations each of two processes takes to get there."""

    folder: Path
    runs: Runs
    expected: Path
    operations: list[int] = field(default_factory=list)

    def start(self, target: Path, size: int, at: tuple[int, int] | None = None) -> list[int]:
        """Start processes; ``at``: which of them is killed, and before which of its operations."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        batches = [batch.tolist() for batch in token_batches(3)]
        given = {"source": self.folder / "dense", "target": target, "batches": batches, "method": "sparsegpt"}
        fault = {"fault": {"what": "kill"}, "at": at[1]} if at is not None else {}
        return [
            self.runs.start(
                "stream as rank",
                {**given, "reconstruct": 1, "rank": rank, "size": size, "port": port},
                files=target.parent,
                **(fault if at is not None and rank == at[0] else {}),
            )
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
    world = World(folder, Runs(folder), folder / "alone" / "sparse")
    for target, size in ((folder / "two" / "sparse", 2), (world.expected, 1)):
        target.parent.mkdir()
        found = world.finish(target, size)
        world.operations = world.operations or [each["operations"] for each in found]
    assert_same_folders(folder / "two" / "sparse", world.expected)
    yield world
    world.runs.close()


def kill(world: World, target: Path, victim: int, at: int, then: int) -> None:
    """Kill a process before one of its operations, and go on with ``then`` processes.

    The one that is left stops with an error that says so. Nothing can be taken for the target before it is whole. The
    next run ends in the bits of a run that nobody disturbed.
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
    if not target.exists():
        world.finish(target, then)
        assert [path.name for path in target.parent.iterdir()] == ["sparse"], case
    assert_same_folders(target, world.expected)


@pytest.mark.parametrize("case", range(CASES))
def test_a_process_is_killed_and_another_number_of_them_goes_on(world, tmp_path, case):
    draw, victim = random.Random(case), case % 2
    kill(
        world, tmp_path / "place" / "sparse", victim, draw.randint(1, world.operations[victim]), draw.choice([1, 2, 3])
    )


@pytest.mark.skipif("EVERY_KILL" not in os.environ, reason="all operations, by hand: EVERY_KILL=1")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_before_every_operation(world, tmp_path, victim):
    for at in range(1, world.operations[victim] + 1):
        kill(world, tmp_path / f"{at}" / "sparse", victim, at, 1 + at % 3)
    print(world.operations)
