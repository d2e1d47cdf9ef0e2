"""`torchrun ... -m modelopt_sparse sparsify --stream`, in which one of two processes is killed or finds the disk full.

Each process is an interpreter of its own, with its own order of hashes.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import modelopt_sparse as mts
from tests.checkpoint.streams import assert_alike_folders
from tests.faults.faulty import Runs
from tests.helpers import ROOT, TESTBED

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.slow,
]
# in bfloat16 a rounding grows from block to block
FLAGS = "--stream --method sparsegpt --num-samples 13 --seq-len 32 --batch-size 1 --dtype float32 --no-progress"
LIMIT = 600  # seconds, about 20 on a quiet machine: far from it torch's own start hangs


def arguments(target: Path, *more: str) -> list[str]:
    data = ["--data", str(TESTBED / "calibration.txt"), "--out", str(target)]
    return ["sparsify", str(TESTBED / "tiny-llama"), *FLAGS.split(), *data, *more]


def torchrun(*command: str, restarts: int) -> tuple[int, str]:
    """-> torchrun's exit code, and what it and both processes have printed on standard error."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    running = subprocess.Popen(
        [sys.executable, *launcher, "--max-restarts", str(restarts), "-m", *command],
        cwd=ROOT,
        env={name: value for name, value in {**os.environ, "OMP_NUM_THREADS": "1"}.items() if name != "PYTHONHASHSEED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = running.communicate(timeout=LIMIT)[1]
        return running.returncode, said
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGTERM)  # on which it ends the processes that it has started
        pytest.fail(f"hangs: {running.communicate()[1]}")


VARYING = ("seconds", "peak_memory", "checksum")
REUSED = re.compile(r"\d of 6 blocks were reused from a stopped run")


def facts_of(folder: Path) -> dict[str, Any]:
    """The SHA-256 of each file; of sparsity.json all but times, memory, and what was reused."""
    facts: dict[str, Any] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
    }
    described = json.loads(
        (folder / "sparsity.json").read_text(),
        object_hook=lambda pairs: {key: value for key, value in pairs.items() if key not in VARYING},
    )
    notes = described["report"]["notes"]
    notes[:] = [note for note in notes if not REUSED.fullmatch(note)]
    return facts | {"sparsity.json": described}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("scratch"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """What two processes make that nobody disturbs."""
    target = tmp_path_factory.mktemp("undisturbed") / "sparse"
    code, said = torchrun("modelopt_sparse", *arguments(target), restarts=0)
    assert code == 0, said
    return target


def with_a_fault(target: Path, *more: str, restarts: int, **job: Any) -> tuple[int, str]:
    job["files"] = str(target.parent)
    return torchrun("tests.distributed.attempts", json.dumps(job), *arguments(target, *more), restarts=restarts)


def test_torchrun_starts_all_again_when_one_is_killed(expected, tmp_path):
    target = tmp_path / "sparse"
    code, said = with_a_fault(target, restarts=2, rank=1, at="the files of block 1", fault={"what": "kill"})
    assert code == 0, said
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1", said)
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]
    report = json.loads((target / "sparsity.json").read_text())["report"]
    assert report["settings"]["processes"] == 2
    (reused,) = [note for note in report["notes"] if REUSED.fullmatch(note)]
    assert reused[0] in "12"  # the other process may have written the second block by then
    assert facts_of(target) == facts_of(expected)


FULL = {  # which process finds the disk full, and where: in what the first writes, or in what each spills
    "the first": (0, "*model-00003-of-00007*", ()),
    "the second": (1, "the files of block 1", ("--spill",)),
}


@pytest.mark.parametrize("which", FULL)
def test_the_disk_is_full_for_one_process_and_then_has_room(runs, expected, tmp_path, which):
    """A line says whose it is. torchrun ends with 1, as ever, and stops the processes that have not ended when the
    first has: with exit code 2 where the disk is full, with 2 or 3 in the one that notices."""
    (rank, at, more), target = FULL[which], tmp_path / "sparse"
    code, said = with_a_fault(target, *more, restarts=0, rank=rank, at=at, fault={"what": "full"})
    speaker = "modelopt-sparse: rank 1: " if rank else "modelopt-sparse: "
    assert code == 1, said
    assert f"\n{speaker}{str(target)!r} could not be written, because the disk is full (" in f"\n{said}"
    assert re.search(r"exitcode +: [23] ", said), said
    code, said = runs.run("cli", {"arguments": arguments(target, *more)})
    assert code == 0, said
    assert [note for note in mts.report(target).notes if note.endswith("a stopped run of 2 processes")]
    assert_alike_folders(target, expected)
