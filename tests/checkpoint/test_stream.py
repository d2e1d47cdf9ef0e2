"""Checkpoints made sparse block by block: the same bits as in memory, nothing more in memory, and runs that go on."""

import errno
import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import streamed as blocks
from modelopt_sparse.checkpoint.stream import copy_companions
from modelopt_sparse.checkpoint.streamed import spilled, write_index
from modelopt_sparse.model import hf
from modelopt_sparse.plan.options import QUALITIES
from tests.checkpoint.streams import assert_same_folders, batches, blocks_in_memory, in_memory, saved, streamed
from tests.helpers import assert_bits, assert_same_state, refused, run_python, state_of, tiny_llama
from tests.models.tiny import tiny_gpt2, tiny_mixtral, tiny_qwen, tiny_t5, tiny_yolos

pytestmark = pytest.mark.core


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny_llama(num_hidden_layers=3),
    "qwen": tiny_qwen,
    "gpt2": lambda: tiny_gpt2(n_layer=3, bos_token_id=0, eos_token_id=0),
    "t5": tiny_t5,
    "mixtral": lambda: tiny_mixtral(intermediate_size=64),
}
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "sparsegpt": {"method": "sparsegpt"},
    "balanced": {"method": None, "quality": "balanced", "reconstruct": 1},
    "budget": {"method": "wanda", "budget": "40% zeros", "choices": ["dense", "2:4", "30%", "60%"]},
    "fisher": {"method": "wanda", "reconstruct": {"epochs": 1, "masks": "move", "metric": "fisher"}},
}


def assert_streamed_as_in_memory(source: Path, folder: Path, **options: Any) -> tuple[mts.Report, mts.Report]:
    """The report of a streamed run, and that of a run in memory that ends in the same bits."""
    report = streamed(source, folder / "streamed", **options)
    options.pop("spill", None)
    whole = in_memory(source, folder / "whole", **options)
    assert_same_folders(folder / "streamed", whole)
    return report, mts.report(whole)


def test_best_is_that_of_memory_without_text_of_its_own_metric_and_distillation(tmp_path):
    """The report says so."""
    MODELS["llama"]().save_pretrained(tmp_path / "dense")
    options = {"data_loader": batches("llama"), "pattern": "2:4"}
    report = streamed(tmp_path / "dense", tmp_path / "out", None, quality="best", **options)
    assert "the model writes no text itself: each token takes a pass over all weights" in " ".join(report.notes)
    assert "reconstruct's metric is the plain squared error: the model is streamed" in report.notes
    assert "no distillation: each step takes a pass over all weights, which lie on disk" in report.notes
    plain = {**QUALITIES["best"].options["reconstruct"], "metric": "plain"}
    alone = {"self_data": 0, "distill": None, "reconstruct": plain}
    model = mts.sparsify(MODELS["llama"](), quality="best", progress=False, **alone, **options)
    assert_same_state(mts.load(tmp_path / "out"), state_of(model))
    ways = [(block.error_before, block.error_after, block.way) for block in report.blocks]
    assert ways == [(block.error_before, block.error_after, block.way) for block in mts.report(model).blocks]
    assert {way.partition(", ")[2] for *_, way in ways} == {"masks frozen, plain metric"}


# masks that are there -------------------------------------------------------------------------------------------------


def test_a_source_that_carries_masks(tmp_path):
    """Their zeros would have to stay, and streaming reads weights alone."""
    mts.save(mts.sparsify(MODELS["llama"](), "magnitude", pattern="2:4"), tmp_path / "sparse")
    with pytest.raises(ValueError, match=r"(?s)holds 21 masks.*replace=True"):
        streamed(tmp_path / "sparse", tmp_path / "out", "magnitude", pattern="1:4")
    assert not (tmp_path / "out").exists()
    report = streamed(tmp_path / "sparse", tmp_path / "out", "magnitude", pattern="25%", replace=True)
    assert report.sparsity == 0.25
    whole = in_memory(tmp_path / "sparse", tmp_path / "whole", "magnitude", pattern="25%")
    assert_same_folders(tmp_path / "out", whole)


def test_what_was_done_to_the_source_stands_in_the_report(tmp_path):
    data = {"data_loader": batches("llama"), "progress": False}
    model = mts.shrink(MODELS["llama"](), mlp=0.5, **data)
    mts.sparsify(model, "magnitude", include="*.layers.0.*", enforce=False, progress=False)
    mts.save(model, tmp_path / "source")
    report = streamed(tmp_path / "source", tmp_path / "out", "magnitude", include="*.layers.1.*")
    expected = mts.report(mts.sparsify(model, "magnitude", include="*.layers.1.*", progress=False))
    assert report.summaries()[1] == expected.summaries()[1]
    for of_folder in (report, mts.report(tmp_path / "out")):
        assert [layer.name for layer in of_folder.layers] == [layer.name for layer in expected.layers]
        assert (of_folder.weights, of_folder.shrunk) == (expected.weights, expected.shrunk)
        assert [run["layers"] for run in of_folder.earlier] == [run["layers"] for run in expected.earlier]


# the same bits --------------------------------------------------------------------------------------------------------


WANDA, SPARSEGPT = {"method": "wanda"}, {"method": "sparsegpt"}
IN_SHARDS = {"dtype": torch.bfloat16, "max_shard_size": 20_000}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # the model, the run, how the source is saved
    **{f"{name} {method}": (name, METHODS[method], {}) for name in ("llama", "mixtral") for method in METHODS},
    **{f"t5 {method}": ("t5", METHODS[method], {}) for method in ("magnitude", "balanced", "fisher")},
    "qwen balanced": ("qwen", METHODS["balanced"], {}),
    "gpt2 sparsegpt": ("gpt2", SPARSEGPT, {}),
    "float16": ("llama", WANDA, {"dtype": torch.float16}),
    "t5 in shards": ("t5", WANDA, IN_SHARDS),
    "mixtral in shards": ("mixtral", WANDA, IN_SHARDS),
    "dense inputs": ("qwen", {**SPARSEGPT, "sequential": "none"}, {}),
    "no data": ("qwen", {"method": "magnitude", "sequential": "none"}, {}),
    "stages": ("qwen", {**SPARSEGPT, "sequential": "stage"}, {}),
    "not enforced": ("qwen", {**WANDA, "pattern": "60%", "enforce": False}, {}),
    "polish": ("qwen", {"method": "alps", "reconstruct": 1, "polish": 2}, {}),
    "spill and permute": ("qwen", {**SPARSEGPT, "spill": True, "reconstruct": 1, "permute": True}, {}),
    "another dtype": ("qwen", {**SPARSEGPT, "dtype": torch.bfloat16}, {}),
    "the head": ("qwen", {"method": "magnitude", "include": ["lm_head", "*.layers.1.*"]}, {}),
    "rules": ("qwen", {**WANDA, "rules": {"*.layers.1.*": None, "*.layers.2.*": {"pattern": "1:4"}}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_streaming_gives_the_bits_of_the_model_in_memory(tmp_path, case):
    name, options, how = CASES[case]
    source = saved(tmp_path / "dense", MODELS[name], **how)
    assert (len(list(source.glob("*.safetensors"))) > 2) == ("max_shard_size" in how)
    data = {} if options["method"] == "magnitude" else {"data_loader": batches(name)}
    report, other = assert_streamed_as_in_memory(source, tmp_path, **options, **data)
    for x, y in zip(report.layers, other.layers, strict=True):
        assert (x.name, x.recipe, x.zeros, x.error, x.tokens) == (y.name, y.recipe, y.zeros, y.error, y.tokens)
    assert [(x.name, x.error_after) for x in report.blocks] == [(x.name, x.error_after) for x in other.blocks]
    assert report.calibration == other.calibration
    assert mts.report(tmp_path / "streamed").as_dict() == report.as_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "streamed", "whole"]


@pytest.mark.parametrize("options", [{}, {"spill": True, "reconstruct": 1}, {"sequential": "none"}], ids=str)
def test_what_a_model_adds_between_blocks_is_streamed_as_well(tmp_path, options):
    """The blocks can be run one by one, as they have to; the position embeddings between them are recorded."""
    source = saved(tmp_path / "dense", tiny_yolos)
    data = {"data_loader": [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(2)]}
    report, _ = assert_streamed_as_in_memory(source, tmp_path, method="sparsegpt", **options, **data)
    assert [note for note in report.notes if "outside of the blocks" not in note] == []  # heads are much of it


COPIED = ("LICENSE", "README.md", "merges.txt", "preprocessor_config.json", "tokenizer.json", "tokenizer.model")


def test_what_travels_with_a_model(tmp_path):
    """What tokenizers and processors write, and anything else but weights and what is nobody's business."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    templates, tool_use = source / "additional_chat_templates", "additional_chat_templates/tool_use.jinja"
    templates.mkdir(parents=True)
    folder.mkdir()
    (tmp_path / "id_rsa").write_text("secret")
    for name in COPIED:
        (source / name).write_text(name)
    (source / "README.md").unlink()
    (source / "README.md").symlink_to("LICENSE")
    (source / "NOTICE").symlink_to("../id_rsa")
    (source / "onnx").mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "rag.jinja").symlink_to("../../id_rsa")
    (source / "gone.md").symlink_to("nowhere.md")
    (templates / ".env.jinja").write_text("a secret")
    for name in ("old.bin", "old.H5", ".env", "model.safetensors", "mtp.safetensors"):
        (source / name).write_text("weights of another format, or a secret")
    link, other = "a link to nothing, or out of the folder", "weights of another format"
    left = {".env": "hidden", "NOTICE": link, f"{templates.name}/.env.jinja": "hidden"}
    left |= {f"{templates.name}/rag.jinja": link, "gone.md": link, "mtp.safetensors": "other weights"}
    left |= {"old.H5": other, "old.bin": other, "onnx": "a folder"}
    assert copy_companions(source, folder) == [
        f"copied from the source: {', '.join(sorted([*COPIED, tool_use]))}",
        f"left behind: {', '.join(f'{name} ({why})' for name, why in left.items())}",
    ]
    there = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert there == {**dict(zip(COPIED, COPIED)), "README.md": "LICENSE", tool_use: "{{ tools }}"}


@pytest.mark.slow
def test_a_hub_name_is_read_from_the_cache(tmp_path):
    """A cache as the hub's client lays it out, without a connection."""
    cache = tmp_path / "cache" / "models--someone--tiny"
    source = saved(cache / "snapshots" / "1234abcd", MODELS["llama"], max_shard_size=40_000)
    (cache / "blobs").mkdir()
    for path in source.iterdir():
        path.replace(cache / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (cache / "blobs" / "license").write_text("free")
    (source / "LICENSE").symlink_to("../../blobs/license")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1234abcd")
    out = tmp_path / "out"
    whole = in_memory(source, tmp_path / "whole", "magnitude")
    code = f"import modelopt_sparse as m, shutil\nout, source = {str(out)!r}, {str(source)!r}\n"
    code += "m.sparsify_checkpoint('someone/tiny', out, 'magnitude')\n"
    code += "shutil.rmtree(source)\nshutil.copytree(out, source)\n"
    code += "m.verify(m.load('someone/tiny'), '2:4')\nm.load('someone/else')"
    ran = run_python("-c", code, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert "ValueError: 'someone/else' is neither a folder nor a model that the hub gives" in ran.stderr
    assert (out / "LICENSE").read_text() == "free"
    assert_same_folders(out, whole)


def test_a_parameter_that_blocks_share_stays_one(tmp_path, monkeypatch):
    """All blocks have one norm: it is read once, stays in memory, and is stored as the in-memory way stores it."""

    class Shared(LlamaForCausalLM):
        _tied_weights_keys = {
            "lm_head.weight": "model.embed_tokens.weight",
            **{f"model.layers.{i}.input_layernorm.weight": "model.layers.0.input_layernorm.weight" for i in (1, 2)},
        }

    Shared.__name__ = "SharedForCausalLM"
    monkeypatch.setattr(hf.transformers, "SharedForCausalLM", Shared, raising=False)
    config: Any = MODELS["llama"]().config
    source = saved(tmp_path / "dense", lambda: Shared(config))
    with safe_open(source / "model.safetensors", framework="pt") as opened:
        norms = [name for name in opened.keys() if "input_layernorm" in name]  # noqa: SIM118
    assert norms == ["model.layers.0.input_layernorm.weight"]
    assert_streamed_as_in_memory(source, tmp_path, method="sparsegpt", data_loader=batches())


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_one_block_has_weights_at_any_time(tmp_path, name):
    source = saved(tmp_path / "dense", MODELS[name])
    with blocks_in_memory() as counts:
        streamed(source, tmp_path / "sparse", "sparsegpt", data_loader=batches(name), reconstruct=1)
    assert len(counts) > 9
    assert set(counts) == {1}


READINGS = [({"method": "magnitude"}, 1), ({"method": "sparsegpt"}, 3), ({"method": "wanda", "reconstruct": 1}, 3)]


@pytest.mark.parametrize(("options", "readings"), READINGS, ids=["magnitude", "sparsegpt", "reconstruct"])
def test_how_often_the_source_is_read(tmp_path, monkeypatch, options, readings):
    """In the dense run, in the rehearsal, and for the solution. With data, files are hashed in the first
    of these, each when the first block is read from it."""
    source = saved(tmp_path / "dense", MODELS["llama"], max_shard_size="60KB")
    events: list[Any] = []
    fill, file_hash = blocks.Streamed._fill, blocks.file_hash

    def filling(self, block):
        fill(self, block)
        events.append(self._blocks.index(block))

    def hashing(path):
        events.append(path.name)
        return file_hash(path)

    monkeypatch.setattr(blocks.Streamed, "_fill", filling)
    monkeypatch.setattr(blocks, "file_hash", hashing)
    streamed(source, tmp_path / "sparse", data_loader=[x["input_ids"] for x in batches()], **options)
    assert [each for each in events if isinstance(each, int)] == [0, 1, 2] * readings
    hashed = [each for each in events if isinstance(each, str)]
    assert sorted(hashed) == sorted({"config.json", *(path.name for path in source.glob("*.safetensors"))})
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    first = {file for name, file in weight_map.items() if name.startswith("model.layers.0.")}
    assert readings == 1 or {*events[: events.index(0)]} == first


def test_masks_and_weights_of_a_block_are_gone_after_its_turn(tmp_path, monkeypatch):
    source = saved(tmp_path / "dense", MODELS["llama"])
    alive: list[weakref.ref] = []
    write = blocks.Streamed._write
    numbers = []

    def watching(self, index, layers, tuned):
        gc.collect()
        numbers.append(sum(ref() is not None for ref in alive))
        for _, mask in mts.named_masks(self.model):
            alive.append(weakref.ref(mask))
        write(self, index, layers, tuned)

    monkeypatch.setattr(blocks.Streamed, "_write", watching)
    streamed(source, tmp_path / "sparse", "sparsegpt", data_loader=batches())
    assert (len(alive), numbers) == (21, [0, 0, 0])


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "scalar", "empty"])
def test_spilled_tensors_are_the_same_tensors_in_a_file(tmp_path, layout):
    x = torch.randn(3, 5, 7).to(torch.bfloat16)
    layouts = {"contiguous": x, "transposed": x.permute(2, 0, 1), "expanded": x[:1].expand(4, 5, 7)}
    x = (layouts | {"scalar": x.sum(), "empty": x[:0]})[layout]
    before = x.clone()
    y = spilled(x, tmp_path)
    assert_bits(y, before)
    assert y.stride() == x.clone().stride()
    assert not list(tmp_path.iterdir())
    if x.numel():
        x.zero_() if layout != "expanded" else None
        assert_bits(y, before)
        assert y.is_shared()
        assert not before.is_shared()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve bytes of a file here")
def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    """Writing to a mapped file there would kill the process."""

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {size} bytes from {begin}")

    monkeypatch.setattr(os, "posix_fallocate", full)
    refused(spilled, torch.ones(3, 5), tmp_path, match="no room for 60 bytes from 0", error=OSError)
    assert not list(tmp_path.iterdir())


# files ----------------------------------------------------------------------------------------------------------------


def test_the_index_is_the_one_that_transformers_writes(tmp_path):
    model = MODELS["llama"]()
    saved(tmp_path, lambda: model, max_shard_size=40_000)
    path = tmp_path / "model.safetensors.index.json"
    expected = json.loads(path.read_text())
    path.unlink()
    write_index(tmp_path, sum(p.numel() for p in model.parameters()))
    assert json.loads(path.read_text()) == expected


# the benchmark --------------------------------------------------------------------------------------------------------


@pytest.fixture
def curve(run_script, tmp_path) -> Callable[[str], tuple[list[list[float]], str]]:
    """Options -> the rows of the table that the benchmark prints, and all that it prints."""

    def call(options: str) -> tuple[list[list[float]], str]:
        ran = run_script("streaming.py", "--width", 1024, "--threads", 1, *options.split(), "--work", tmp_path)
        assert ran.code == 0, ran.err
        rows = [line for line in ran.out.splitlines() if line.startswith("|")][2:]
        return [[float(cell) for cell in row.split("|")[1:-1]] for row in rows], ran.out

    return call


@pytest.mark.slow
def test_the_benchmark_prints_a_curve(curve, tmp_path):
    """Of two depths: 0.14 GB more of weights take nowhere near as much memory beyond the plan of the smaller, as they
    would if blocks were not dropped. The peaks are those of samples, which may miss one."""
    rows, printed = curve("--sizes 0.07,0.21 --method magnitude")
    (small, *_, planned), (large, blocks, _, _, _, peak, _) = rows
    assert (round(small, 1), round(large, 1)) == (0.1, 0.2)
    assert blocks > 4
    assert peak - planned < 0.4 * (large - small) * 1e9 / 2**20
    assert printed.count("#") > 40
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_plan_states_what_streaming_holds(curve):
    """The measured peak stays below the estimate, but for what the C library keeps of freed memory (at these sizes up
    to half as much again), and the estimate is not several times as large."""
    ((*_, peak, stated),), _ = curve("--sizes 0.06 --batches 4 --batch 2 --length 256")
    assert stated / 3 < peak < 1.5 * stated
