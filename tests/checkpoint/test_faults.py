"""Real faults, in processes of their own: kills, full disks, files that go or change, two runs at once, no memory.

After each the source is untouched, the target complete and verified or plainly incomplete, nothing else is left lying
about, and the next start ends in the bits of a run that nothing disturbed. What is refused and reused is in
test_resume.py.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.folder import is_full
from tests.checkpoint.folders import files_of
from tests.checkpoint.streams import assert_same_folders, saved, weights
from tests.faults import faulty
from tests.faults.faulty import Runs
from tests.helpers import TESTBED, assert_equal, refused, tiny_llama, token_batches

HAS_FORK_AND_PROC = hasattr(os, "fork") and Path("/proc/self").exists()
pytestmark = pytest.mark.skipif(not HAS_FORK_AND_PROC, reason="needs fork and /proc")

BLOCKS = 4
KILL, FULL = {"what": "kill"}, {"what": "full"}
KILLED = -signal.SIGKILL
DATA = [batch.tolist() for batch in token_batches(3)]
RECIPES: dict[str, dict[str, Any]] = {
    "sparsegpt": {"method": "sparsegpt"},
    "tuned": {"method": "wanda", "permute": True, "reconstruct": 1},
    "dense inputs": {"method": "wanda", "sequential": "none"},
}


@dataclass
class World:
    """What all tests share: a source in several files, what they hold, and runs that nothing disturbs."""

    folder: Path
    source: Path
    content: dict[str, bytes]
    runs: Runs
    known: dict[str, tuple[Path, int]]
    old: dict[str, bytes]

    def ended(self, do: str, given: dict[str, Any], code: int = 0, **more: Any) -> dict[str, Any]:
        """A run that ends with this exit code -> what it has found."""
        found_code, found = self.runs.run(do, given, **more)
        assert found_code == code, found
        return found

    def given(self, target: Path, recipe: str = "sparsegpt") -> dict[str, Any]:
        return {"source": self.source, "target": target, "batches": DATA, **RECIPES[recipe]}

    def undisturbed(self, recipe: str = "sparsegpt") -> tuple[Path, int]:
        """The folder that a recipe ends in, and the operations on files that it takes."""
        if recipe not in self.known:
            target = self.folder / recipe
            found = self.ended("stream", self.given(target, recipe), files=str(target))
            self.known[recipe] = target, found["operations"]
        return self.known[recipe]

    def states(self, do: str, where: str) -> list[Path]:
        """What a kill before each operation of a run leaves, to "stream" or "save" a model to a "new" place or "over"
        one: folders that hold the target, in order, without those that are equal to the one before."""
        target, states = self.folder / f"{do} {where}" / "sparse", self.folder / f"{do} {where}, states"
        target.parent.mkdir()
        if where == "over":
            self.old = old_model(target)
        given = {**self.given(target), "overwrite": where == "over"} if do == "stream" else self.saving(target)
        self.ended(do, given, files=target.parent, states=[target.parent, states])
        return sorted(states.iterdir())

    def saving(self, target: Path) -> dict[str, Any]:
        return {"model": self.undisturbed()[0], "folder": target}

    def check(self) -> None:
        assert files_of(self.source) == self.content
        assert not list((self.folder / "scratch").iterdir())


def old_model(folder: Path) -> dict[str, bytes]:
    """Another model, with 2:4 in every layer too -> its files. Files of somebody else's lie beside its own."""
    mts.save(mts.sparsify(tiny_llama(num_hidden_layers=BLOCKS), "magnitude"), folder, max_shard_size=60_000)
    (folder / "notes.txt").write_text("mine")
    return files_of(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "scratch").mkdir()
    source = saved(folder / "dense", lambda: tiny_llama(num_hidden_layers=BLOCKS), max_shard_size=40_000)
    assert len(list(source.glob("model-*"))) > BLOCKS
    runs = Runs(folder / "scratch")
    yield World(folder, source, files_of(source), runs, {}, {})
    runs.close()


@pytest.fixture
def target(tmp_path, world) -> Iterator[Path]:
    """A place for a target, beside a file of somebody else's. In the end the target is there, and nothing more."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "thesis.txt").write_text("precious")
    yield place / "sparse"
    world.check()
    assert sorted(path.name for path in place.iterdir()) == ["sparse", "thesis.txt"]
    assert (place / "thesis.txt").read_text() == "precious"


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def assert_plain(world: World, target: Path, recipe: str = "sparsegpt") -> int:
    """After a fault: the target is complete, or nothing can take it for a model -> the blocks that are done."""
    world.check()
    partial = partial_of(target)
    if target.exists():
        assert_same_folders(target, world.undisturbed(recipe)[0])
    else:
        for pattern in (None, "2:4"):
            refused(mts.verify, target, pattern, match="is not a folder")
        assert not any((partial / name).exists() for name in ("config.json", "model.safetensors.index.json"))
    return len(list(partial.glob("block-*.json")))


def assert_goes_on(world: World, target: Path, recipe: str = "sparsegpt", **more: Any) -> None:
    """Started again, the run ends in the bits of one that nobody disturbed, and says what it has reused."""
    partial = partial_of(target)
    done = len(list(partial.glob("block-*.json")))
    shards = finished_shards(partial)
    complete, solved = not partial.exists() and target.exists(), (partial / "report.json").exists()
    code, found = world.runs.run("stream", {**world.given(target, recipe), **more})
    if complete:
        assert found["error"].startswith(f"ValueError: '{target}' exists and is not empty"), found
    else:
        assert code == 0, found
        expected = [f"{done} of {BLOCKS} blocks were reused from a stopped run"] if done and not solved else []
        assert found["notes"] == mts.report(target).notes == expected
    assert_same_folders(target, world.undisturbed(recipe)[0])
    assert len(mts.verify(target, "2:4").layers) == 7 * BLOCKS
    for name, (inode, changed) in shards.items():  # nothing has written them again
        assert ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) == (inode, changed)


def finished_shards(partial: Path) -> dict[str, tuple[int, int]]:
    """The shards of the blocks that are done -> inode and time of their last change."""
    records = [json.loads(path.read_text()) for path in partial.glob("block-*.json")]
    files = [name for record in records for name in record["files"] if name.startswith("folder/")]
    there = {Path(name).name: partial / name for name in files if (partial / name).exists()}
    return {name: (path.stat().st_ino, path.stat().st_mtime_ns) for name, path in there.items()}


# killed ---------------------------------------------------------------------------------------------------------------


def test_killed_between_any_two_operations_on_files(world):
    """All that a kill can leave: kept by one run before each of its operations. From every third of these states it
    goes on; the others hold as many blocks as one of those."""
    states = world.states("stream", "new")
    found = {state: assert_plain(world, state / "sparse") for state in states}
    done = [blocks for state, blocks in found.items() if not (state / "sparse").exists()]
    assert done == sorted(done)
    assert {*done} == {*range(BLOCKS + 1)}
    assert len(states) > 5 * BLOCKS
    for state in [*states[:-3:4], *states[-3:]]:
        assert_goes_on(world, state / "sparse")
        assert {path.name for path in state.iterdir()} == {"sparse"}
    world.check()


AT_ITS_BEGINNING = ["*/folder", "*/started.json", "*/writing/*/model.safetensors", "*/block-00000.json"]


@pytest.mark.parametrize("before", AT_ITS_BEGINNING)
def test_killed_before_its_first_block_is_done_it_blocks_nothing(world, target, before):
    """A run that is started with something else takes its place, and nothing of the first is left in its folder."""
    world.ended("stream", world.given(target), files=str(target), at=before, fault=KILL, code=KILLED)
    assert assert_plain(world, target) == 0
    assert partial_of(target).exists()
    assert world.ended("stream", world.given(target, "dense inputs"))["notes"] == []
    assert_same_folders(target, world.undisturbed("dense inputs")[0])


@pytest.mark.parametrize("do", ["stream", "save"])
def test_killed_while_it_replaces_a_model(world, do):
    """Before any operation. The old model is whole until the new one is; between, there is none. What a model in memory
    has left behind is removed by the next one that is saved there."""
    states = world.states(do, "over")
    found = [assert_old_or_new_or_none(state / "sparse", world.old, world) for state in states]
    assert [*dict.fromkeys(found)] == ["old", "none", "new"]
    assert found == sorted(found, key=["old", "none", "new"].index)
    moving = found.index("none")
    assert do == "stream" or any(path.name.startswith(".sparse.") for path in states[moving].iterdir())
    for state in [states[moving // 2], states[moving - 1], *states[moving::3], states[-1]]:
        target = state / "sparse"
        if do == "stream" and not partial_of(target).exists():
            assert "exists" in world.runs.run("stream", world.given(target))[1]["error"]
        else:
            given = {**world.given(target), "overwrite": True} if do == "stream" else world.saving(target)
            world.ended(do, given)
        assert_same_folders(target, world.undisturbed()[0])
        assert (target / "notes.txt").read_text() == "mine"
        assert do == "stream" or [path.name for path in state.iterdir()] == ["sparse"]
    world.check()


def assert_old_or_new_or_none(folder: Path, old: dict[str, bytes], world: World) -> str:
    """What a folder is that was being replaced. What is half old and half new, whose layers all hold 2:4, must be taken
    for a model by nobody."""
    if files_of(folder) == old:
        return "old"
    if (folder / "sparsity.json").exists():
        assert_same_folders(folder, world.undisturbed()[0])
        return "new"
    if files_of(folder) == {name: content for name, content in old.items() if name != "sparsity.json"}:
        return "none"  # after the first step: all that is there is old
    if (folder / "config.json").exists():  # before the last step: all of it is new
        assert_equal(weights(folder), weights(world.undisturbed()[0]))
        return "none"
    for pattern in (None, "2:4"):
        refused(mts.verify, folder, pattern, match=r"holds no config\.json|there is no report")
    refused(mts.load, folder, error=(OSError, ValueError))
    refused(AutoModelForCausalLM.from_pretrained, folder, error=(OSError, ValueError))
    return "none"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_again_and_again(world, target, recipe):
    chance = random.Random(recipe)
    kills, most = 0, 0.5 * world.undisturbed(recipe)[1]
    while not target.exists() or partial_of(target).exists():
        fault = {"files": str(target), "at": int(chance.uniform(0.2, 1) * most), "fault": KILL}
        code, found = world.runs.run("stream", world.given(target, recipe), **fault)
        assert code in (0, KILLED), found
        kills += code != 0
        assert_plain(world, target, recipe)
        most *= 1.1  # so that it ends
    assert kills > 1
    assert_goes_on(world, target, recipe)


# a full disk ----------------------------------------------------------------------------------------------------------


SAID = [
    ("Error while serializing: I/O error: No space left on device (os error 28)", True),
    ("unable to resize file <a> to the right size: No space left on device (28)", True),
    ("unable to open file <a> in read-write mode: Permission denied (13)", False),
    ("the size of tensor a (28) must match the size of tensor b (27)", False),
]


@pytest.mark.parametrize(("text", "full"), SAID)
def test_what_safetensors_and_torch_say_of_a_full_disk(text, full):
    outer = RuntimeError("in between")
    outer.__cause__ = RuntimeError(text)
    assert is_full(outer) == full


DISKS = [("start", 0, False), (0, 0, False), (1, 0, False), (2, 3000, False), (3, 0, True), (4, 30_000, False)]


@pytest.mark.parametrize(("seed", "left", "spill"), DISKS)
def test_a_full_disk(world, target, seed, left, spill):
    """No file grows beyond ``left`` bytes from an operation on, the first or one drawn at random: writing fails in the
    kernel, as it does where there is no space. In the same process it can be tried again."""
    last = 1 if seed == "start" else int(0.9 * world.undisturbed()[1])
    at = random.Random(f"full {seed}").randint(1, last)
    given = {**world.given(target), "spill": spill}
    found = world.ended("stream", given, files=str(target), at=at, fault={**FULL, "left": left}, code=1)
    assert found["error"].startswith(f"OSError: '{target}' could not be written, because the disk is full (")
    assert "free space and start the run again" in found["error"]
    assert found["because"]
    kept = f"blocks are kept in '{partial_of(target)}'"
    assert found["error"].endswith(kept if assert_plain(world, target) else "nothing is left of it")
    assert partial_of(target).exists() == (kept in found["error"])
    assert_goes_on(world, target, spill=spill)


@pytest.mark.parametrize(("room", "spill"), [(24 * 2**10, True), (72 * 2**10, True), (180 * 2**10, False)])
def test_a_small_file_system_that_is_full(world, tmp_path, target, room, spill):
    """Where the system lets a process mount one. Files that are mapped into memory (``spill``) have no room there that
    was not asked for first: else the process is killed when it writes to them."""
    (tmp_path / "disk").mkdir()
    small = {"disk": tmp_path / "disk", "room": room, "copy": target}
    given = {**world.given(tmp_path / "disk" / "sparse"), "spill": spill}
    code, found = world.runs.run("small disk", {**given, **small})
    target.mkdir(exist_ok=True)
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert code == 0, found
    assert "could not be written, because the disk is full (" in found["first"]
    assert "No space left on device" in found["first"]
    assert found["left"] == ["sparse"]
    assert_same_folders(target, world.undisturbed()[0])


def test_a_disk_that_is_full_when_a_model_is_replaced(world, tmp_path):
    """config.json fits, the weights do not."""
    place, old = tmp_path / "sparse", old_model(tmp_path / "sparse")
    fault = {"at": 1, "fault": {**FULL, "left": 1500}}
    found = world.ended("save", world.saving(place), files=str(tmp_path), **fault, code=1)
    assert found["error"].startswith(f"OSError: '{place}' could not be written (what was there before is complete): ")
    assert found["error"].endswith("; the disk is full: free space and save again")
    assert files_of(place) == old
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]


# files of the source --------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, world) -> Path:
    return shutil.copytree(world.source, tmp_path / "dense")


def shard_of(folder: Path, block: int) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return folder / index[f"model.layers.{block}.self_attn.q_proj.weight"]


BROKEN = {
    "remove": Path.unlink,
    "truncate": faulty.truncate,
    "header": lambda file: faulty.flip(file, 1),  # its length
    "dtype": lambda file: faulty.flip(file, place_of(file, b'"F32"') + 3),  # of numbers
}


def place_of(file: Path, what: bytes) -> int:
    return Path(file).read_bytes().index(what)


@pytest.mark.parametrize("damage", BROKEN)
def test_a_shard_that_is_broken_before_the_start(tmp_path, copied, damage):
    shard = shard_of(copied, 2)
    BROKEN[damage](shard)
    with pytest.raises(ValueError, match=rf"/{shard.name}' is missing, truncated or damaged \(.*: get it again"):
        mts.sparsify_checkpoint(copied, tmp_path / "sparse", "magnitude", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


# where no block is done: before the model is built
@pytest.mark.parametrize(("damage", "done"), [("remove", 0), ("remove", 2), ("truncate", 2), ("flip", 2)])
def test_a_shard_that_is_broken_while_the_run_goes_on(world, target, copied, damage, done):
    """The fourth block lies in that file. Put right, the run goes on."""
    when = "block-00001.json" if done else "started.json"
    shard = shard_of(copied, 3)
    whole = shard.read_bytes()
    given = {**world.given(target), "source": copied}
    fault = {"what": damage, "file": str(shard)}
    found = world.ended("stream", given, files=str(target), at=f"*/{when}", fault=fault, code=1)
    assert "has changed since the run started: " in found["error"], found
    assert found["error"].split(": ")[1].startswith(f"'{shard}'")
    assert "put it back, and start again" in found["error"]
    assert assert_plain(world, target) == done
    shard.write_bytes(whole)
    assert_goes_on(world, target, source=copied)


def test_a_finished_shard_that_disappears_while_the_run_goes_on(world, target):
    """Of the target: the run must not end in a model that lacks it."""
    shard = partial_of(target) / "folder" / f"model-00002-of-{BLOCKS + 1:05d}.safetensors"
    fault = {"what": "remove", "file": str(shard)}
    found = world.ended("stream", world.given(target), files=str(target), at="*/report.json", fault=fault, code=1)
    assert f"is damaged: 'folder/{shard.name}' is not as block 'model.layers.0' left it: give an" in found["error"]
    assert "give another target, or over" in found["error"]
    assert assert_plain(world, target) == BLOCKS
    assert world.ended("stream", {**world.given(target), "overwrite": True})["notes"] == []
    assert_same_folders(target, world.undisturbed()[0])


@pytest.mark.parametrize("left", [0, 2000, 100_000])  # config.json, the weights or the tokenizer is the first too long
def test_the_command_line_says_in_one_line_that_a_model_in_memory_has_no_room(tmp_path, world, left):
    source = saved(tmp_path / "dense", tiny_llama)
    AutoTokenizer.from_pretrained(TESTBED / "tiny-llama").save_pretrained(source)
    out = tmp_path / "new" / "sparse"
    arguments = ["sparsify", str(source), "--out", str(out), "--method", "magnitude"]
    fault = {"at": 1, "fault": {**FULL, "left": left}}
    found = world.ended("cli", {"arguments": arguments}, files=str(out.parent), **fault, code=2)
    (line,) = found["err"].splitlines()
    assert found["out"] == ""
    assert line.startswith(f"modelopt-sparse: '{out}' could not be written (nothing is left of it): ")
    assert line.endswith("; the disk is full: free space and save again")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


# numbers that are not finite ------------------------------------------------------------------------------------------


NOT_FINITE = "layer 'model.layers.3.self_attn.q_proj': its input holds NaN or inf"


@pytest.fixture
def half(tmp_path) -> Path:
    """The source in float16."""
    return saved(tmp_path / "half", lambda: tiny_llama(num_hidden_layers=BLOCKS), dtype=torch.float16)


def test_an_activation_that_is_not_finite_at_block_3(world, target, half):
    """Block 2 has been given weights so large that it overflows. The blocks up to it are done, and started again the
    run stops at the same place."""
    given = {**world.given(target), "source": half, "method": "overflowing"}
    for _ in range(2):
        found = world.ended("stream", given, code=1)
        assert found["error"].startswith(f"ValueError: {NOT_FINITE}, now that the layers before it are sparse"), found
        assert "run the model in bfloat16 or float32" in found["error"]
        assert assert_plain(world, target) == 3
    found = world.ended("stream", {**given, "dtype": "float32"}, code=1)
    assert "started with something else (dtype: auto there, torch.float32 now)" in found["error"]
    assert world.ended("stream", {**given, "dtype": "float32", "overwrite": True})["notes"] == []
    assert len(mts.verify(target, "2:4").layers) == 7 * BLOCKS


# two at once ----------------------------------------------------------------------------------------------------------


def test_the_second_of_two_runs_on_one_target_is_refused(world, target):
    """The first is held still while the second tries, and then ends as if nothing had been."""
    first = world.runs.start_stopped("stream", world.given(target), at="*/block-00001.json*", files=partial_of(target))
    for overwrite in (False, True):
        found = world.ended("stream", {**world.given(target), "overwrite": overwrite}, code=1)
        assert "is being written to by another run: wait for it" in found["error"]
    os.kill(first, signal.SIGCONT)
    assert world.runs.wait(first)[0] == 0
    assert_same_folders(target, world.undisturbed()[0])


@pytest.mark.parametrize("second", [("--method", "magnitude"), ("--overwrite",), ("--stream",)])
def test_the_second_of_two_runs_of_the_command_line_to_one_folder_is_refused(tmp_path, world, second):
    """The first, which holds its model in memory, is stopped before it writes, while the second tries."""
    out = tmp_path / "new" / "sparse"
    command = ["sparsify", str(world.source), "--out", str(out), "--method", "magnitude"]
    first = world.runs.start_stopped("cli", {"arguments": command}, at="*/.sparse.*.partial", files=out.parent)
    found = world.ended("cli", {"arguments": [*command, "--pattern", "1:4", *second]}, code=2)
    (line,) = found["err"].splitlines()
    assert found["out"] == ""
    assert line == (f"modelopt-sparse: '{partial_of(out)}' is being written to by another run: wait for it")
    os.kill(first, signal.SIGCONT)
    code, found = world.runs.wait(first)
    assert (code, found["err"]) == (0, "")
    assert {layer.pattern for layer in mts.verify(out).layers} == {"2:4"}
    assert [path.name for path in out.parent.iterdir()] == ["sparse"]


def test_a_run_in_memory_leaves_alone_what_a_streaming_run_has_done(world, target):
    world.ended("stream", world.given(target), files=str(target), at="*/block-00001.json", fault=KILL, code=KILLED)
    command = ["sparsify", str(world.source), "--out", str(target), "--method", "magnitude"]
    world.ended("cli", {"arguments": command})
    shutil.rmtree(target)
    assert_goes_on(world, target)


# no memory ------------------------------------------------------------------------------------------------------------


def test_a_layer_that_does_not_fit_into_memory_is_solved_in_pieces(world):
    """For real: the process gets 100 MiB of address space more than it has, and a layer whose solver takes more."""
    layer = {"method": "sparsegpt", "rows": 8192, "columns": 512, "pattern": "2:4"}
    whole = world.ended("solve", {**layer, "room": None})
    assert whole["notes"] == []
    pieces = world.ended("solve", {**layer, "room": 100 * 2**20})
    (note,) = pieces["notes"]
    assert note.startswith("solved ")
    assert note.endswith(" rows at a time, because memory ran out")
    assert pieces["mask"] == whole["mask"]
    assert pieces["norm"] == pytest.approx(whole["norm"], rel=1e-6)


def test_a_layer_for_which_there_is_no_memory_at_all(world):
    layer = {"method": "alps", "rows": 8192, "columns": 512, "pattern": "2:4"}
    found = world.ended("solve", {**layer, "room": 70 * 2**20}, code=1)
    assert found["error"].startswith("MemoryError: layer '0' [8192, 512]: out of memory while it was solved")
    assert "DefaultCPUAllocator: can't allocate memory" in found["because"][0]
