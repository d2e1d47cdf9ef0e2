"""Streaming runs that are killed or stopped go on where they were, to the same bits, or say why they cannot."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertForMaskedLM

import modelopt_sparse as mts
from modelopt_sparse import stream
from modelopt_sparse.methods.wanda import Wanda
from tests.helpers import ROOT, tiny_llama, token_batches
from tests.test_stream import assert_same_folders, saved

pytestmark = pytest.mark.core

BLOCKS = 4
# for each line of its input one run in a process of its own, which has nothing to import any more
SERVER = """
import json, os, sys
import torch
import modelopt_sparse as mts
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        given = json.loads(line)
        data = [torch.tensor(batch) for batch in given.pop("batches")]
        mts.sparsify_checkpoint(data_loader=data, progress=False, **given)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
DATA = [batch.tolist() for batch in token_batches(4)]


class Runs:
    """Starts runs, and kills them."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def run(self, kill_when: Callable[[], bool] | None = None, **given: Any) -> int:
        """-> the exit code; that of a run killed when ``kill_when`` holds is -9."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"batches": DATA, **given}, default=str) + "\n")
        self._server.stdin.flush()
        pid = int(self._answer())
        while kill_when is not None:
            try:
                if kill_when():
                    os.kill(pid, signal.SIGKILL)
                    break
                os.kill(pid, 0)
            except ProcessLookupError:  # it was faster
                break
        return int(self._answer())

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    found.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """Blocks large enough that a write of them can be watched."""

    def make() -> torch.nn.Module:
        return tiny_llama(hidden_size=96, intermediate_size=384, num_hidden_layers=BLOCKS)

    return saved(tmp_path_factory.mktemp("resume") / "dense", make)


RECIPES: dict[str, dict[str, Any]] = {
    "sparsegpt": {"method": "sparsegpt"},
    "tuned": {"method": "wanda", "permute": True, "reconstruct": 1},
    "dense inputs": {"method": "wanda", "sequential": "none"},
}


@pytest.fixture(scope="module")
def undisturbed(dense, runs) -> Callable[[str], tuple[Path, float]]:
    """The folder that a recipe gives when nothing happens, and the seconds that it takes."""
    seconds: dict[str, float] = {}

    def folder(recipe: str) -> tuple[Path, float]:
        target = dense.parent / recipe
        if recipe not in seconds:
            began = time.perf_counter()
            assert runs.run(source=dense, target=target, **RECIPES[recipe]) == 0
            seconds[recipe] = time.perf_counter() - began
        return target, seconds[recipe]

    return folder


def assert_incomplete(target: Path) -> None:
    """Nothing can take what is there for a model."""
    assert not target.exists()
    with pytest.raises(ValueError, match="is not a folder"):
        mts.verify(target)
    partial = target.with_name(f"{target.name}.partial")
    assert not any((partial / name).exists() for name in ("config.json", "model.safetensors.index.json"))


def finished_blocks(partial: Path) -> dict[str, tuple[int, int]]:
    """The shards of the blocks that are done -> inode and time of their last change."""
    records = [json.loads(path.read_text()) for path in partial.glob("block-*.json")]
    files = [name for record in records for name in record["files"] if name.startswith("folder/")]
    found = {Path(name).name: (partial / name).stat() for name in files}
    return {name: (of.st_ino, of.st_mtime_ns) for name, of in found.items()}


# killed ---------------------------------------------------------------------------------------------------------------

MOMENTS = [
    "started.json",
    "writing/files/model.safetensors",  # while it is written
    "folder/model-00002-of-*",
    "block-00000.json",
    "block-00002.json",
    "report.json",
    "folder/model-00001-of-*",
    "folder/sparsity.json",
    "finished.json",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_a_moment_goes_on(tmp_path, dense, runs, undisturbed, moment):
    target, partial = tmp_path / "sparse", tmp_path / "sparse.partial"
    given = {"source": dense, "target": target, **RECIPES["sparsegpt"]}
    code = runs.run(lambda: bool(list(partial.glob(moment))), **given)
    assert code in ((-9, 0) if moment == "finished.json" else (-9,))
    before = finished_blocks(partial) if (partial / "folder").is_dir() else {}
    if target.exists():
        assert moment == "finished.json"
    else:
        assert_incomplete(target)
    if partial.exists():
        assert runs.run(**given) == 0
    assert not partial.exists()
    assert_same_folders(target, undisturbed("sparsegpt")[0])
    for name, (inode, changed) in before.items():
        assert ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) == (inode, changed)
    if moment in MOMENTS[2:5]:
        assert mts.report(target).notes == [f"{len(before)} of {BLOCKS} blocks were reused from a stopped run"] * (
            len(before) > 0
        )
        assert len(before) >= {"block-00000.json": 1, "block-00002.json": 3}.get(moment, 0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path, dense, runs, undisturbed, recipe):
    chance = random.Random(recipe)
    target, partial = tmp_path / "sparse", tmp_path / "sparse.partial"
    given = {"source": dense, "target": target, **RECIPES[recipe]}
    expected, whole = undisturbed(recipe)
    kills = 0
    while True:
        limit = time.perf_counter() + chance.uniform(0.4, 0.9) * whole
        code = runs.run(lambda limit=limit: time.perf_counter() > limit, **given)
        if code == 0:
            break
        assert code == -9
        kills += 1
        if not target.exists():
            assert_incomplete(target)
        whole *= 1.3  # so that it ends
    assert kills
    assert not partial.exists()
    assert_same_folders(target, expected)


def test_two_runs_cannot_write_one_target(tmp_path, dense, runs):
    target, partial = tmp_path / "sparse", tmp_path / "sparse.partial"
    refused: list[str] = []

    def meanwhile() -> bool:
        if not (partial / "started.json").exists():
            return False
        with pytest.raises(ValueError, match="is being written to by another run") as caught:
            mts.sparsify_checkpoint(dense, target, "magnitude", overwrite=True)
        refused.append(str(caught.value))
        return True

    assert runs.run(meanwhile, source=dense, target=target, method="sparsegpt") == -9
    assert refused


# stopped, and started with something else -----------------------------------------------------------------------------


class Stopping(Wanda):
    """Wanda that is interrupted at its ``at``-th layer, once."""

    name = "stopping"

    def __init__(self, at: int) -> None:
        self.left = at

    def solve(self, weight, state, pattern, options):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().solve(weight, state, pattern, options)


@pytest.fixture
def stopped(tmp_path) -> tuple[Path, Path, dict[str, Any]]:
    """A source, a target of which one of three blocks is done, and the arguments of the run that was stopped."""
    source = saved(tmp_path / "dense", lambda: tiny_llama(num_hidden_layers=3))
    given: dict[str, Any] = {"method": Stopping(10), "data_loader": token_batches(3), "progress": False}
    with pytest.raises(KeyboardInterrupt):
        mts.sparsify_checkpoint(source, tmp_path / "sparse", **given)
    assert_incomplete(tmp_path / "sparse")
    return source, tmp_path / "sparse", given


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def other_weights(source: Path) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


def other_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"pattern": "1:4"}, ["layer model.layers.0.self_attn.q_proj: stopping 2:4 there, stopping 1:4 now"]),
        ({"seed": 7}, ["seed: 0 there, 7 now"]),
        ({"exclude": "*.up_proj"}, ["layer model.layers.0.mlp.up_proj: stopping 2:4 there, none now"]),
        ({"sequential": "none"}, ["sequential: block there, none now"]),
        ({"enforce": False}, ["enforce: true there, false now"]),
        ({"reconstruct": 2}, ["stopping 2:4 there, stopping+reconstruct 2:4 now", "and 17 more"]),
        ({"dtype": torch.bfloat16}, ["dtype: auto there, torch.bfloat16 now"]),
        ({"method": "wanda"}, ["stopping 2:4 there, wanda 2:4 now"]),
        ({"data_loader": token_batches(3, seed=5)}, ["calibration data: ", " there, "]),
        (other_weights, ["source file model.safetensors: ", " there, "]),
        (other_config, ["source file config.json: "]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(map(str, value))[:40],
)
def test_started_with_something_else_it_refuses_and_says_what_differs(stopped, changes, parts):
    source, target, given = stopped
    before = content(target.with_name("sparse.partial"))
    if callable(changes):
        changes(source)
        changes = {}
    else:
        changes = {**changes}
    again = {**given, **changes}
    with pytest.raises(ValueError, match="holds a run that was started with something else") as caught:
        mts.sparsify_checkpoint(source, target, **again)
    for part in [*parts, "give another target, or overwrite=True (--overwrite)"]:
        assert part in str(caught.value)
    assert content(target.with_name("sparse.partial")) == before
    mts.sparsify_checkpoint(source, target, overwrite=True, **again)
    fresh = mts.sparsify_checkpoint(source, target.with_name("fresh"), **again)
    assert_same_folders(target, target.with_name("fresh"))
    assert mts.report(target).notes == fresh.notes == []


def test_started_again_it_goes_on(stopped):
    source, target, given = stopped
    given["method"].left = 0
    report = mts.sparsify_checkpoint(source, target, **given)
    assert given["method"].left == -14  # two blocks
    assert report.notes == ["1 of 3 blocks were reused from a stopped run"]
    assert [layer.name for layer in report.layers] == [
        f"model.layers.{i}.{name}"
        for i in range(3)
        for name in (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
    ]
    mts.sparsify_checkpoint(source, target.with_name("fresh"), **given)
    assert_same_folders(target, target.with_name("fresh"))


def test_overwrite_goes_on_with_a_run_of_the_same_arguments(stopped):
    source, target, given = stopped
    given["method"].left = 0
    report = mts.sparsify_checkpoint(source, target, overwrite=True, **given)
    assert report.notes == ["1 of 3 blocks were reused from a stopped run"]


def test_data_is_compared_after_the_last_block_as_well(stopped, monkeypatch):
    """A run that was stopped while it finished solves nothing again, and still takes no other data."""
    source, target, given = stopped

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            mts.sparsify_checkpoint(source, target, **given)
    with pytest.raises(ValueError, match="calibration data: "):
        mts.sparsify_checkpoint(source, target, **{**given, "data_loader": token_batches(3, seed=5)})
    left = given["method"].left
    report = mts.sparsify_checkpoint(source, target, **given)
    assert given["method"].left == left
    assert len(report.layers) == 21
    mts.sparsify_checkpoint(source, target.with_name("fresh"), **given)
    assert_same_folders(target, target.with_name("fresh"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_finished_block_that_has_changed_is_refused(stopped, damage):
    source, target, given = stopped
    (shard,) = target.with_name("sparse.partial").glob("folder/model-00002-of-*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flipped" else data[:-1])
    with pytest.raises(ValueError, match=r"is damaged: 'folder/model-00002-of-00004.safetensors' is not as block"):
        mts.sparsify_checkpoint(source, target, **given)
    report = mts.sparsify_checkpoint(source, target, overwrite=True, **given)
    assert len(report.layers) == 21
    assert not report.notes


def test_other_versions_are_refused(stopped):
    source, target, given = stopped
    started = target.with_name("sparse.partial") / "started.json"
    started.write_text(started.read_text().replace(f'"{torch.__version__}"', '"2.0.0"'))
    with pytest.raises(ValueError, match=rf"version of torch: 2\.0\.0 there, {torch.__version__.split('+')[0]}"):
        mts.sparsify_checkpoint(source, target, **given)


def test_what_stands_in_the_way_is_left_alone(tmp_path):
    source = saved(tmp_path / "dense", tiny_llama)
    partial = tmp_path / "sparse.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="something else is there"):
            mts.sparsify_checkpoint(source, tmp_path / "sparse", "magnitude", overwrite=overwrite)
    assert [path.name for path in partial.iterdir()] == ["thesis.txt"]


# a target that exists -------------------------------------------------------------------------------------------------


def test_overwrite_replaces_a_model_and_leaves_other_files(tmp_path):
    source = saved(tmp_path / "dense", lambda: tiny_llama(num_hidden_layers=3))
    old = saved(tmp_path / "sparse", lambda: tiny_llama(num_hidden_layers=4), max_shard_size=20_000)
    (old / "notes.txt").write_text("mine")
    before = content(old)
    with pytest.raises(ValueError, match="exists: give another target, or overwrite=True"):
        mts.sparsify_checkpoint(source, old, "magnitude")
    assert content(old) == before
    mts.sparsify_checkpoint(source, old, "magnitude", overwrite=True)
    mts.sparsify_checkpoint(source, tmp_path / "fresh", "magnitude")
    assert_same_folders(old, tmp_path / "fresh")
    assert (old / "notes.txt").read_text() == "mine"
    assert {path.name for path in old.iterdir()} - {"notes.txt"} == {p.name for p in (tmp_path / "fresh").iterdir()}


def test_killed_while_it_replaces_a_model(tmp_path, dense, runs, undisturbed):
    """The old model is whole until the new one is; between, nothing says that it is."""
    target, partial = tmp_path / "sparse", tmp_path / "sparse.partial"
    mts.save(mts.sparsify(tiny_llama(), "magnitude"), target)
    given = {"source": dense, "target": target, "overwrite": True, **RECIPES["sparsegpt"]}
    old = content(target)
    assert runs.run(lambda: (partial / "folder" / "sparsity.json").exists(), **given) in (-9, 0)
    if (target / "sparsity.json").exists() and not (partial / "finished.json").exists() and partial.exists():
        assert content(target) == old
    if partial.exists():
        assert runs.run(**given) == 0
    assert_same_folders(target, undisturbed("sparsegpt")[0])
    assert not partial.exists()


def test_a_target_that_came_into_being_meanwhile_is_kept(tmp_path):
    source = saved(tmp_path / "dense", tiny_llama)
    target = tmp_path / "sparse"

    class Rival(Wanda):
        name = "rival"

        def solve(self, weight, state, pattern, options):
            target.mkdir(exist_ok=True)
            (target / "config.json").write_text("{}")
            return super().solve(weight, state, pattern, options)

    given = {"data_loader": token_batches(2), "progress": False}
    with pytest.raises(ValueError, match="has come into being since the run started"):
        mts.sparsify_checkpoint(source, target, Rival(), **given)
    assert (target / "config.json").read_text() == "{}"
    shutil.rmtree(target)
    report = mts.sparsify_checkpoint(source, target, Rival(), **given)
    assert len(report.layers) == len(mts.verify(target, "2:4").layers) == 14


# what cannot be streamed ----------------------------------------------------------------------------------------------


def test_refused_before_any_work_with_what_to_do(tmp_path):
    source = saved(tmp_path / "dense", tiny_llama)
    data = {"data_loader": token_batches(2)}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"pattern": 0.5, "allocation": "search", **data}, r"allocation='search' measures the whole dense model"),
        ({"pattern": 0.5, "quality": "balanced", "method": None, **data}, r"allocation='block'.*allocation='uniform'"),
        ({"forward_loop": lambda model: None}, "forward_loop runs the whole model .* give data_loader= or data="),
        ({"include": ["lm_head"], **data}, "nothing to prune|lm_head"),
        ({"pattern": "2:4", "dampin": 1}, "option 'dampin' is not known"),
        ({}, "needs calibration data"),
    ]
    for options, text in refused:
        with pytest.raises(ValueError, match=text):
            mts.sparsify_checkpoint(source, tmp_path / "sparse", **{"method": "sparsegpt", **options})
    assert not (tmp_path / "sparse").exists()


def test_an_output_head_takes_a_run_of_its_own_and_is_refused(tmp_path):
    source = saved(tmp_path / "dense", lambda: tiny_llama(tie_word_embeddings=False, vocab_size=96))
    with pytest.raises(ValueError, match=r"layer 'lm_head' is not in one block.*exclude it, or load the model"):
        mts.sparsify_checkpoint(source, tmp_path / "sparse", "wanda", include=["lm_head"], data_loader=token_batches(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_sources_that_are_refused(tmp_path):
    source = saved(tmp_path / "dense", tiny_llama)
    target = tmp_path / "sparse"
    with pytest.raises(ValueError, match="is the source"):
        mts.sparsify_checkpoint(source, source, "magnitude", overwrite=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        mts.sparsify_checkpoint(tmp_path / "empty", target, "magnitude")
    with pytest.raises(ValueError, match=r"looks like a pickle file"):
        mts.sparsify_checkpoint(source, tmp_path / "model.pth", "magnitude")
    for name in ("quantized", "pickled", "holed", "infinite"):
        shutil.copytree(source, tmp_path / name)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "quantized" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ValueError, match=r"is quantized \(fp8\): give dequantize=True"):
        mts.sparsify_checkpoint(tmp_path / "quantized", target, "magnitude")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no 'model.safetensors': streaming reads safetensors files"):
        mts.sparsify_checkpoint(tmp_path / "pickled", target, "magnitude")
    assert not (tmp_path / "sparse.partial").exists()
    weights = load_file(source / "model.safetensors")
    some = {name: x for name, x in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(some, tmp_path / "holed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold a whole LlamaForCausalLM: 'model.layers.1.mlp.up_proj"):
        mts.sparsify_checkpoint(tmp_path / "holed", target, "magnitude", overwrite=True)
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("inf")
    save_file(weights, tmp_path / "infinite" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layer 'model.layers.1.mlp.up_proj': its weight holds NaN or inf"):
        mts.sparsify_checkpoint(tmp_path / "infinite", target, "magnitude", overwrite=True)
    assert not target.exists()


def test_a_stack_that_cannot_be_chained_is_refused(tmp_path):
    """ALBERT calls one block several times."""
    config = AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    source = saved(tmp_path / "dense", lambda: AlbertForMaskedLM(config))
    with pytest.raises(ValueError, match=r"stack 'albert\..*not called once each, in order: streaming would read all"):
        mts.sparsify_checkpoint(source, tmp_path / "sparse", "wanda", data_loader=token_batches(2), progress=False)
    assert not (tmp_path / "sparse").exists()
