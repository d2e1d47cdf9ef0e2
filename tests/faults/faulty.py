"""Runs in processes of their own, for the tests of faults: killed, short of disk or memory, with files that go.

``python -m tests.faults.faulty`` imports everything once and forks for each run, which then has nothing to import any
more. A line of JSON on its input is {"start": job}, answered by the number of the process, or {"wait": number},
answered by {"code": exit code, "result": what the run has written}. `Runs` is the other end.

A job: ``do`` is a key of ``DO`` with its arguments in ``given``; ``files``: prefix of the paths
whose operations are counted; ``at``: the operation before which ``fault`` strikes, a number or a part of a path;
``states``: [a folder, where to put a copy of it before each operation that finds it changed].
"""

import ctypes
import fnmatch
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from subprocess import PIPE
from typing import Any

ROOT = Path(__file__).parent.parent.parent
NOT_KEPT = ("writing", "converted")  # parts of a work folder that the next start deletes
OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod")
EXCHANGE = "exchange"  # with the other processes of a run
ENDED = ("Z", "X")  # states of a process: a zombie until it is waited for


# the tests' end -------------------------------------------------------------------------------------------------------


class Runs:
    """Starts runs, and waits for them or kills them."""

    def __init__(self, scratch: Path, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.faults.faulty"]
        own = {**os.environ, "TMPDIR": str(scratch), **environment}
        self._server = subprocess.Popen(command, cwd=ROOT, env=own, stdin=PIPE, stdout=PIPE, text=True)
        assert self._ask({"ready": True}) == "yes"

    def _ask(self, line: dict[str, Any]) -> Any:
        self._server.stdin.write(json.dumps(line, default=str) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, do: str, given: dict[str, Any], **job: Any) -> int:
        return self._ask({"start": {"do": do, "given": given, **job}})

    def wait(self, pid: int) -> tuple[int, dict[str, Any]]:
        """-> (exit code, negative for the signal that killed it; what the run has to say)."""
        answer = self._ask({"wait": pid})
        return answer["code"], answer["result"]

    def run(self, do: str, given: dict[str, Any], **job: Any) -> tuple[int, dict[str, Any]]:
        return self.wait(self.start(do, given, **job))

    def start_stopped(self, do: str, given: dict[str, Any], at: str, files: Path) -> int:
        """Start a run that stops before an operation on a path, and wait until it has -> its number."""
        pid = self.start(do, given, files=files, at=at, fault={"what": "stop"})
        while state(pid) != "T":
            assert state(pid) not in ENDED, f"no operation on {at}"
        return pid

    def close(self) -> None:
        """Runs that are still there are killed."""
        self._server.communicate()


def state(pid: int) -> str:
    """The state of a process: a letter of /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


# the process that forks -----------------------------------------------------------------------------------------------


def serve() -> None:
    running: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(read)
                code = 3
                try:
                    code = _run(asked["start"], write)
                finally:
                    os._exit(code)
            os.close(write)
            running[pid] = read
            answer: Any = pid
        elif "wait" in asked:
            with os.fdopen(running.pop(asked["wait"]), encoding="utf-8") as pipe:
                said = pipe.read()
            code = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
            answer = {"code": code, "result": json.loads(said) if said else {}}
        else:
            answer = "yes"
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _run(job: dict[str, Any], pipe: int) -> int:
    """One run, in its own process -> its exit code."""
    counted = Operations(job)
    if "files" in job:
        sys.addaudithook(counted)
    result: dict[str, Any] = {}
    try:
        code, found = DO[job["do"]](**job["given"])
        result.update(found)
    except BaseException as error:
        chain: list[str] = []
        link: BaseException | None = error
        while link is not None:
            chain.append(f"{type(link).__name__}: {link}")
            link = link.__cause__ or link.__context__
        code, result = 1, {"error": chain[0], "because": chain[1:]}
    result["operations"] = counted.number
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write(pipe, json.dumps(result).encode())
    return code


class Operations:
    """An audit hook that counts operations on files, and lets the fault strike."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._prefix, self._at, self._fault = str(job.get("files")), job.get("at"), job.get("fault")
        self._states, self._last = job.get("states"), []
        self.number = 0

    def __call__(self, event: str, args: tuple) -> None:
        if event not in (*OPERATIONS, EXCHANGE):
            return
        paths = [os.fsdecode(arg) for arg in args[:2] if isinstance(arg, (str, bytes, os.PathLike))]
        inside = event == EXCHANGE or any(path.startswith(self._prefix) for path in paths)
        if not inside and not (event in ("os.remove", "os.rmdir") and args[-1] != -1):  # rmtree goes by descriptors
            return
        self.number += 1
        if self._states is not None:
            (place, copies), self._states = self._states, None  # copying is no operation of the run
            self._keep(Path(place), Path(copies) / f"{self.number:05d}")
            self._states = place, copies
        if self._fault is None:
            return
        now = self._at == self.number if isinstance(self._at, int) else fnmatch.fnmatch(paths[-1], str(self._at))
        if now:
            fault, self._fault = self._fault, None
            FAULTS[fault["what"]](**{key: value for key, value in fault.items() if key != "what"})

    def _keep(self, place: Path, copy: Path) -> None:
        """Copy what a kill would leave now, if it is something else than the last copy holds."""
        there = [path for path in sorted(place.rglob("*")) if not {*NOT_KEPT} & {*path.parts}]
        facts = [path.stat() for path in there]
        state = [(path, path.is_file() and (x.st_ino, x.st_size, x.st_mtime_ns)) for path, x in zip(there, facts)]
        if state != self._last:
            shutil.copytree(place, copy, ignore=shutil.ignore_patterns(*NOT_KEPT))
        self._last = state


def count_exchanges() -> None:
    """Each exchange with the other processes of a run is an operation, too, from here to the end of this process."""
    from modelopt_sparse.distributed import Processes

    gather = Processes._gather

    def counted(self: Any, what: str, header: tuple) -> list[Any]:
        sys.audit(EXCHANGE, what)
        return gather(self, what, header)

    Processes._gather = counted


# faults ---------------------------------------------------------------------------------------------------------------


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _fill_disk(left: int = 0) -> None:
    """No file can grow beyond ``left`` bytes any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))


def truncate(file: str) -> None:
    os.truncate(file, os.path.getsize(file) - 5)


def flip(file: str, place: float = 0.5) -> None:
    """Flip a bit of a file, in place; ``place`` is a share of its length, or a number of bytes from 1 on."""
    with open(file, "r+b") as opened:
        at = int(place if place >= 1 else place * os.path.getsize(file))
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


FAULTS: dict[str, Callable[..., None]] = {
    "kill": partial(_send, signal.SIGKILL),
    "stop": partial(_send, signal.SIGSTOP),
    "full": _fill_disk,
    "remove": lambda file: os.remove(file),
    "truncate": truncate,
    "flip": flip,
}


# what runs do ---------------------------------------------------------------------------------------------------------


def overflowing() -> Any:
    """Wanda whose 21st layer, the last of block 2 of a Llama, comes out as large as float16 can be."""
    from modelopt_sparse import Solution
    from modelopt_sparse.methods.scores import Wanda

    class Overflowing(Wanda):
        name = "overflowing"
        solved = 0

        def solve(self, weight, state, pattern, options):
            found = super().solve(weight, state, pattern, options)
            self.solved += 1
            return Solution(found.weight.sign() * 6e4, found.mask, found.error) if self.solved == 21 else found

    return Overflowing()


def _stream(batches: Any, **given: Any) -> tuple[int, dict[str, Any]]:
    import torch

    import modelopt_sparse as mts

    data = [torch.tensor(batch) for batch in batches]
    if given["method"] == "overflowing":
        given["method"] = overflowing()
    report = mts.sparsify_checkpoint(data_loader=data, progress=False, **given)
    return 0, {"notes": report.notes}


def _stream_as_rank(
    rank: int, size: int, port: int, pages_at: str | None = None, **given: Any
) -> tuple[int, dict[str, Any]]:
    """Stream as one of several processes; at the exchange ``pages_at`` all of them look at their pages of the source,
    while none goes on."""
    from modelopt_sparse.distributed import Processes, launched_group

    count_exchanges()
    gather, pages = Processes._gather, []

    def looked(self: Any, what: str, header: tuple) -> list[Any]:
        if what == pages_at:
            gather(self, what, header)
            pages.extend(_mapped_pages(given["source"]))
            gather(self, what, header)
        return gather(self, what, header)

    Processes._gather = looked
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with launched_group():
        code, found = _stream(**given)
    return code, {**found, "pages": pages}


def _mapped_pages(folder: str) -> tuple[int, int]:
    """Bytes of the files of a folder that are in the memory of this process, and its share of them: pages that several
    processes have are divided among them. Without what the process has changed, which is its own."""
    of_file, sums = False, dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name:  # addresses, and the path
            of_file = f" {folder}/" in line
        elif of_file and name in sums:
            sums[name] += 1024 * int(value.split()[0])
    return sums["Rss"] - sums["Anonymous"], sums["Pss"] - sums["Anonymous"]


def _on_a_small_disk(disk: str, room: int, copy: str, **given: Any) -> tuple[int, dict[str, Any]]:
    """Stream to a file system in memory that has ``room`` bytes left, then to one that has enough, and ``copy`` what
    came of it: the file system is gone with the process."""
    if problem := _mount(disk, 4 * 2**20):
        return 0, {"skipped": problem}
    ballast = Path(disk) / "ballast"
    with ballast.open("wb") as file:
        file.write(bytes(4 * 2**20 - room))
    first = ""
    try:
        _stream(**given)
    except OSError as error:
        first = str(error)
    ballast.unlink()
    code, found = _stream(**given)
    left = sorted(path.name for path in Path(disk).iterdir())
    shutil.copytree(given["target"], copy, dirs_exist_ok=True)
    return code, {**found, "first": first, "left": left}


def _mount(folder: str, size: int) -> str:
    """A file system of ``size`` bytes for this process alone -> why there can be none, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x00020000, 0x10000000, (1 << 18) | (1 << 14)
    if libc.unshare(new_mounts | (0 if os.geteuid() == 0 else new_user)):
        return f"no mounts of its own: {os.strerror(ctypes.get_errno())}"
    failed = libc.mount(b"none", b"/", None, private, None)
    options = f"size={size}".encode()
    if failed or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options):
        return f"cannot mount: {os.strerror(ctypes.get_errno())}"
    return ""


def _save(model: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Save the sparse model of one folder to another."""
    import modelopt_sparse as mts

    mts.save(mts.load(model), folder, overwrite=True, max_shard_size=40_000)
    return 0, {}


def run_command(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """The command line -> its exit code, and what it printed."""
    from modelopt_sparse.cli.commands import main

    sys.argv = ["modelopt-sparse", *arguments]
    out, err = StringIO(), StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as done:
            code = done.code or 0
    return code, {"out": out.getvalue(), "err": err.getvalue()}


def _solve(method: str, rows: int, columns: int, room: int | None, **options: Any) -> tuple[int, dict[str, Any]]:
    """Make one layer sparse with ``room`` bytes of address space more than it takes to hold it."""
    import hashlib

    import torch
    from torch import nn

    import modelopt_sparse as mts

    small = nn.Sequential(nn.Linear(64, 64))  # so that what is set up at the first use has been
    mts.sparsify(small, method, data_loader=[torch.randn(8, 64)], include="0", progress=False, **options)
    torch.manual_seed(0)
    dense = nn.Linear(columns, rows, bias=False)
    model = nn.Sequential(dense)
    data = [torch.randn(64, columns)]
    if room is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        mts.sparsify(model, method, data_loader=data, include="0", progress=False, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (layer,) = mts.report(model).layers
    mask = dict(mts.named_masks(model))["0.weight"]
    return 0, {
        "notes": layer.notes,
        "mask": hashlib.sha256(mask.numpy().tobytes()).hexdigest(),
        "norm": float(dense.weight.detach().double().norm()),
    }


DO: dict[str, Callable[..., tuple[int, dict[str, Any]]]] = {
    "stream": _stream,
    "stream as rank": _stream_as_rank,
    "small disk": _on_a_small_disk,
    "save": _save,
    "cli": run_command,
    "solve": _solve,
}


if __name__ == "__main__":
    import torch

    # once, for all that are forked
    for name in ("modelopt_sparse.cli.inputs", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    package = importlib.import_module("modelopt_sparse")
    for name in package.__all__:  # what is imported on first use
        getattr(package, name)
    torch.set_num_threads(1)
    serve()
