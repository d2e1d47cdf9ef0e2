"""Saving where something is, and saving that fails or is stopped."""

import copy
import errno
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import folder as format
from modelopt_sparse.checkpoint import save as checkpoint
from modelopt_sparse.checkpoint.folder import DESCRIPTION
from tests.checkpoint.folders import files_of, outputs, scrambled, sparse
from tests.helpers import TESTBED, assert_bits, assert_same_state, refused, state_of, tiny_llama
from tests.interruptions import interrupted
from tests.models.net import Net, net

MINE = ("notes.txt", "model_ema.safetensors", "model-old.safetensors", "model.fp16.safetensors")


SHARDS: dict[str, Any] = {"max_shard_size": "20KB"}
PACKED: dict[str, Any] = {"packed": True, **SHARDS}


def test_saving_over_a_folder_leaves_only_the_new_model(tmp_path):
    """One file over shards and back, plain over packed: nothing of the old model is read again, other people's files
    stay."""
    first, second = sparse("llama"), mts.sparsify(tiny_llama(), "magnitude", pattern="1:4")
    out = tmp_path / "out"
    out.mkdir()
    for name in MINE:
        (out / name).write_text("mine")
    for model, options in ((first, {}), (second, SHARDS), (first, {}), (second, PACKED), (first, {})):
        mts.save(model, out, overwrite=True, **options)
        written = {path.name for path in out.glob("*model*")} - {*MINE}
        assert (written == {"model.safetensors"}) == (not options)
        assert any(name.endswith(".index.json") for name in written) == bool(options)
        assert {name.startswith("packed.") for name in written} == {"packed" in options}
        assert_same_state(mts.load(out), state_of(model))
        if "packed" not in options:
            assert_bits(outputs("llama", AutoModelForCausalLM.from_pretrained(out)), outputs("llama", model))
    assert {name: (out / name).read_text() for name in MINE} == dict.fromkeys(MINE, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def test_an_adapter_is_no_part_of_the_new_model(tmp_path):
    """transformers would add it to the weights; one that comes later is named."""
    model, out, options = sparse("llama"), tmp_path / "out", {"method": "magnitude", "replace": True}
    out.mkdir()
    for name in ADAPTERS:
        (out / name).write_text("{}")
    mts.save(model, out, overwrite=True)
    assert not [name for name in ADAPTERS if (out / name).exists()]
    assert_bits(outputs("llama", AutoModelForCausalLM.from_pretrained(out)), outputs("llama", model))
    mts.verify(out)
    (out / "adapter_config.json").write_text("{}")
    for read in (mts.load, mts.verify, partial(mts.sparsify_checkpoint, target=tmp_path / "x", **options)):
        refused(read, out, match=r"holds adapter_config.json, an adapter that .*: move it to another fol")
    mts.restore(scrambled("llama"), out)
    mts.pack(out, tmp_path / "packed")
    mts.load(tmp_path / "packed")


def test_a_module_that_is_not_of_transformers_leaves_no_config_of_one(tmp_path):
    """A file of that name that is the user's stays."""
    mts.save(sparse("llama"), tmp_path)
    mts.save(sparse("net"), tmp_path, overwrite=True)
    assert not (tmp_path / "config.json").exists()
    refused(mts.verify, tmp_path, match=r"holds no config.json: restore it into its model")
    (tmp_path / "config.json").write_text('{"width": 8}')
    mts.save(sparse("net"), tmp_path, overwrite=True)
    assert (tmp_path / "config.json").read_text() == '{"width": 8}'


@pytest.mark.parametrize("how", ["saved", "streamed"])
def test_a_folder_that_is_a_mounted_volume_is_written_to(tmp_path, monkeypatch, how):
    """Nothing can be renamed into it from beside it."""
    out = tmp_path / "out"
    mts.save(sparse("llama"), out, companions=[AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")])
    before = files_of(out)
    tiny_llama().save_pretrained(tmp_path / "dense")
    replace = os.replace

    def across(source: Any, target: Any) -> None:
        if Path(target).parent == out:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, across)
    if how == "saved":
        mts.save(sparse("llama", pattern="1:4"), out, overwrite=True)
    else:
        mts.sparsify_checkpoint(tmp_path / "dense", out, "magnitude", pattern="1:4", overwrite=True, progress=False)
    assert {layer.pattern for layer in mts.verify(out).layers} == {"1:4"}
    assert files_of(out)["tokenizer.json"] == before["tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


class Wait:
    """A companion that is saved when both of two threads have come so far."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)

    def save_pretrained(self, staging: Path) -> None:
        del staging
        self.barrier.wait()


@pytest.mark.parametrize("overwrite", [True, False])
def test_threads_that_save_into_one_folder_leave_the_whole_of_one_model(tmp_path, overwrite):
    out, wait = tmp_path / "out", Wait()
    models = sparse("net"), mts.sparsify(net(), "magnitude", pattern="1:4")
    if overwrite:
        mts.save(models[0], out)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4 if overwrite else 1):
            done = [pool.submit(mts.save, m, out, overwrite=overwrite, companions=[wait]) for m in models]
            errors = [each.exception() for each in done]
            assert [type(error) for error in errors if error] == ([] if overwrite else [ValueError]), errors
            restored = outputs("net", mts.restore(net(), out))
            assert any(torch.equal(restored, outputs("net", model)) for model in models)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    """Its number may be that of another process now, this one too."""
    for number in (2**22 + 1, os.getpid()):
        (tmp_path / f".out.{socket.gethostname()}.{number}.7.ab.partial").mkdir()
    mts.save(sparse("net"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_not_empty_is_written_to_only_when_asked(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mts.save(sparse("net"), out)  # an empty one is a new one
    before = files_of(out)
    for folder in (out, tmp_path):  # the second holds no model
        with pytest.raises(ValueError, match=r"exists and is not empty: give another path, or overwrite=True"):
            mts.save(sparse("llama"), folder)
    assert files_of(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    mts.save(sparse("llama"), out, overwrite=True)
    assert_same_state(mts.load(out), state_of(sparse("llama")))


class Rival:
    """A companion that is saved while somebody else writes to the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_pretrained(self, staging: Path) -> None:
        del staging
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text("precious")


def test_a_folder_that_others_have_filled_meanwhile_stays_as_they_left_it(tmp_path):
    for out in (tmp_path / "new", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"has come into being meanwhile: give another, or overwrite=True"):
            mts.save(sparse("llama"), out, companions=[Rival(out)])
        assert files_of(out) == {"config.json": b"precious"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_working_directory_and_what_is_above_it_are_refused(tmp_path, monkeypatch, overwrite):
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    (here / "model-00001-of-00002.safetensors").write_bytes(b"weights of yours")
    before = files_of(here)
    monkeypatch.chdir(here)
    for folder in ("", ".", Path(), here, tmp_path / "link", "..", tmp_path, tmp_path / "above" / "here" / "x" / ".."):
        with pytest.raises(ValueError, match="is the current directory or a folder above it"):
            mts.save(sparse("net"), folder, overwrite=overwrite)
    assert files_of(here) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["above", "link"]
    mts.save(sparse("net"), "some/where")  # a folder in it is none of these
    mts.restore(scrambled("net"), here / "some" / "where")


class Around(nn.Module):
    """A module of the user's own with a model of transformers inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


READ: dict[str, Callable[[Path], nn.Module]] = {
    "load": mts.load,
    "restore": lambda folder: mts.restore(scrambled("llama"), folder),
    "from_pretrained": LlamaForCausalLM.from_pretrained,
    "inside": lambda folder: Around(LlamaForCausalLM.from_pretrained(folder)),
    "another class": lambda folder: LlamaForCausalLM.from_pretrained(folder).model,
    "copied": lambda folder: copy.deepcopy(mts.load(folder)),
    "exported": lambda folder: mts.export(mts.load(folder)),
}


@pytest.mark.parametrize("how", READ)
def test_the_folder_that_the_weights_come_from_is_refused(broken, tmp_path, monkeypatch, how):
    """Under each of its names, whatever ``overwrite`` says. Another folder is not."""
    folder = broken("llama")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "elsewhere").mkdir()
    before = files_of(folder)
    monkeypatch.chdir(tmp_path)
    model = READ[how](Path("llama") if how != "load" else tmp_path / "link")
    for place in ("llama", folder, "./llama/", "link", tmp_path / "elsewhere" / ".." / "llama"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match="is the folder that the weights come from, which would be lost"):
                mts.save(model, place, overwrite=overwrite)
    assert files_of(folder) == before
    if how in ("load", "restore"):  # these know it wherever the process has gone since
        monkeypatch.chdir(tmp_path / "elsewhere")
        refused(mts.save, model, folder, overwrite=True, match="is the folder that the weights come from")
        monkeypatch.chdir(tmp_path)
    for _ in range(2):
        mts.save(model, "other", overwrite=True)
    own = broken("net")  # a module of the user's own is remembered as well
    with pytest.raises(ValueError, match="is the folder that the weights come from"):
        mts.save(mts.restore(scrambled("net"), own), own, overwrite=True)


@pytest.mark.parametrize("step", ["save_file", "write_masks", "write_description"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_save_that_is_stopped_changes_nothing(broken, tmp_path, step, existing):
    folder = broken("net") if existing else tmp_path / "deep" / "er" / "out"
    before = files_of(folder) if existing else None
    with interrupted(checkpoint, step):
        mts.save(sparse("net"), folder, overwrite=existing)
    assert [path.name for path in tmp_path.iterdir()] == ["net"] * existing
    assert not existing or files_of(folder) == before
    mts.save(sparse("net"), folder, overwrite=existing)
    mts.restore(scrambled("net"), folder)


def test_a_save_that_is_stopped_while_files_are_replaced_leaves_no_description(broken, monkeypatch):
    folder = broken("net")

    def stop(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(format.shutil, "move", stop)
    with pytest.raises(OSError, match=r"has no sparsity\.json now .*save again.*Input/output error"):
        mts.save(sparse("net"), folder, overwrite=True)
    assert not (folder / DESCRIPTION).exists()
    assert [path.name for path in folder.parent.iterdir()] == ["net"]


def test_the_name_of_a_folder_may_be_as_long_as_the_system_allows(tmp_path):
    mts.save(tiny_llama(), folder := tmp_path / ("n" * 255))
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_oserror_with_its_name(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"out' could not be written .*Permission denied"):
        mts.save(sparse("net"), tmp_path / "out")


@pytest.mark.parametrize("name", ["model.pth", "model.PT", "pytorch_model.bin", "model.pkl", "model.ckpt"])
def test_pickle_paths_are_refused_with_the_folder_form(tmp_path, name):
    path = tmp_path / name
    advice = "looks like a pickle file.*give a folder"
    refused(mts.save, sparse("net"), path, match=advice)
    assert list(tmp_path.iterdir()) == []
    torch.save({}, path)
    for read in (partial(mts.restore, net()), mts.load, mts.report):
        refused(read, path, match=advice)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


class Odd(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"anything": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


class Graph(nn.Module):
    """Multiplies with a sparse matrix that is no weight."""

    def __init__(self, layout: torch.layout, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(9).to_sparse(layout=layout), persistent=persistent)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sparse.mm(self.adjacency, self.up(x)).relu())


def of_complex_numbers() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("turn", torch.ones(8, dtype=torch.complex128))
    return model


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
UNSAVABLE: list[tuple[Callable[[], nn.Module], str]] = [
    (of_complex_numbers, r"'turn' is torch\.complex128, which safetensors does not store: convert it"),
    (on_meta, r"'first\.weight' is on the meta device.*load the model before saving"),
    (lambda: nn.Sequential(Odd(8, 4)), r"'0\._extra_state' is a dict: only tensors can be saved without pickle"),
    *((partial(Graph, x, True), "'adjacency' is a sparse or nested tensor: .* persistent=False") for x in SPARSE),
]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("make", "words"), UNSAVABLE)
def test_what_has_no_dense_values_is_named_and_nothing_is_written(tmp_path, make, words):
    with pytest.raises(ValueError, match=words):
        mts.save(make(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_masks_that_cannot_be_added_leave_the_folder_as_it_is(tmp_path):
    mts.save(mts.sparsify(nn.Sequential(nn.Linear(8, 4)), "magnitude", include="*"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="only tensors can be saved"):
        checkpoint.add_masks(nn.Sequential(Odd(8, 4)), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_buffers_are_planned_around(tmp_path, layout):
    data = [torch.randn(9, 16) for _ in range(2)]
    model = mts.sparsify(Graph(layout, False), "wanda", pattern="2:4", data_loader=data, progress=False)
    mts.save(model, tmp_path / "out")
    again = mts.restore(Graph(layout, False), tmp_path / "out")
    assert len([*mts.named_masks(again)]) == 2
    stacked = nn.Sequential(*(Graph(layout, False) for _ in range(2)))
    assert len(mts.make_plan(nn.ModuleDict({"layers": nn.ModuleList(stacked)}), "magnitude").layers) == 4
    assert torch.equal(again.up.weight, model.up.weight)
