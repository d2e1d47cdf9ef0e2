"""`torchrun ... -m modelopt_sparse sparsify --stream`, in which one of two processes is killed.

Each process is an interpreter of its own, with its own order of hashes.
"""

import json
import os
import re
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

import modelopt_sparse as mts
from tests.checkpoint.streams import assert_same_folders
from tests.distributed import ranks
from tests.helpers import ROOT

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"), pytest.mark.slow]
LIMIT = 600  # seconds, about 20 on a quiet machine: far from it torch's own start hangs


def torchrun(*program: str) -> str:
    """What torchrun and both processes have printed on standard error."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *launcher, "-m", *program]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    running = subprocess.Popen(command, cwd=ROOT, env=own, stdout=PIPE, stderr=PIPE, text=True)
    try:
        said = running.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGTERM)  # on which it ends the processes that it has started
        pytest.fail(f"hangs: {running.communicate()[1]}")
    assert running.returncode == 0, said
    return said


def test_torchrun_starts_all_again_when_one_is_killed(tmp_path, folder, results):
    """The folder is that of two processes that nobody disturbed."""
    assert [found["code"] for found in results("launched to stream", ranks.command_that_streams)] == [0, 0]
    target = tmp_path / "sparse"
    job = {"rank": 1, "at": "the files of block 1", "fault": {"what": "kill"}, "files": str(tmp_path)}
    command = ranks.sparsify_command(target, ranks.STREAMED_BY_COMMAND)
    said = torchrun("tests.distributed.attempts", json.dumps(job), *command)
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1", said)
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]
    report = mts.report(target)
    assert report.settings["processes"] == 2
    # the other process may have written the second block by then
    (_,) = [note for note in report.notes if re.fullmatch("[12] of 6 blocks were reused from a stopped run", note)]
    assert_same_folders(target, folder / "launched-to-stream")
