"""Checkpoints made smaller block by block: the bits of `shrink` in memory, also of runs that were stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.streamed import Streamed
from modelopt_sparse.model.hf import model_class
from modelopt_sparse.shrinking import importance as choose
from modelopt_sparse.shrinking import shrink as smaller
from tests.checkpoint.streams import assert_same_folders, blocks_in_memory, saved
from tests.helpers import plain_from_pretrained
from tests.interruptions import interrupted
from tests.models.shrinkable import BLOCKS, calls, shrinkable

LLAMA, GPT2, T5 = "Llama", "GPT2/GPT2LMHeadModel", "T5/T5ForConditionalGeneration"
FISHER = {"epochs": 1, "metric": "fisher"}
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "channels": (LLAMA, {"mlp": 0.25}, torch.float32),
    "blocks by influence, tuned": (LLAMA, {"mlp": 12, "blocks": 2, "reconstruct": 1}, torch.float32),
    "the first and the last block": (LLAMA, {"blocks": [0, 3], "reconstruct": 1}, torch.float32),
    "Conv1D and ties": (GPT2, {"mlp": 0.25, "blocks": [0]}, torch.float32),
    "gate and up in one, half precision": ("Phi3", {"mlp": 12, "reconstruct": 1}, torch.bfloat16),
    "lists in the config": ("Gemma2", {"blocks": 1, "reconstruct": FISHER}, torch.float32),
    "names that differ on disk": ("Mixtral", {"blocks": [1], "reconstruct": 1}, torch.float32),
    "experts, tuned": ("Mixtral", {"experts": 1, "blocks": [1], "reconstruct": 1}, torch.bfloat16),
    "experts and heads": ("DeepseekV3", {"experts": 0.25, "criterion": "reap_sum"}, torch.float32),
    "two stacks": (T5, {"to": {"num_decoder_layers": 2, "d_ff": 40}, "reconstruct": 1}, torch.float32),
    "by the norm, as they are": (LLAMA, {"mlp": 0.5, "criterion": "norm", "refit": False}, torch.bfloat16),
}


def dense(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """Random weights, in several files."""
    return saved(folder / "dense", lambda: shrinkable(name, **more), dtype, max_shard_size=20_000)


def given(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"data_loader": list(calls(shrinkable(name))), "progress": False, **options}


def in_memory(source: Path, folder: Path, options: dict[str, Any]) -> Path:
    """The oracle: the whole model loaded, made smaller and saved."""
    model = model_class(AutoConfig.from_pretrained(source), source).from_pretrained(source, dtype="auto")
    mts.save(mts.shrink(model, **{"blocks_by": "influence", **options}), folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_streaming_gives_the_bits_of_the_model_in_memory(tmp_path, case):
    name, options, dtype = CASES[case]
    source, options = dense(tmp_path, name, dtype), given(name, options)
    report: Any = mts.shrink_checkpoint(source, tmp_path / "streamed", spill=True, **options)
    whole = mts.report(in_memory(source, tmp_path / "whole", options)).shrunk
    assert_same_folders(tmp_path / "streamed", tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "streamed", "whole"]
    for what in ("sizes", "criterion", "kept", "scores", "tokens", "errors", "tried"):
        assert getattr(report.shrunk, what) == getattr(whole, what), what
    assert report.shrunk.costs == whole.costs
    assert report.shrunk.kl == {}
    assert mts.report(tmp_path / "streamed").as_dict() == report.as_dict()
    cls = model_class(AutoConfig.from_pretrained(tmp_path / "streamed"), tmp_path / "streamed")
    model = plain_from_pretrained(tmp_path / "streamed", cls)
    assert sum(p.numel() for p in model.parameters()) == report.shrunk.costs["parameters"][1]
    index = json.loads((tmp_path / "streamed" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == report.shrunk.costs["parameters"][1]
    stacks = {T5: ("encoder.block", "decoder.block"), GPT2: ("transformer.h",)}.get(name, ("model.layers",))
    files = 1 + sum(len(model.get_submodule(stack)) for stack in stacks)
    assert len(set(index["weight_map"].values())) == files


@pytest.mark.parametrize("keeps", [0, 2])
def test_blocks_with_the_least_influence_go(tmp_path, keeps):
    """By hooks on a model in memory; padding counts for nothing."""
    source, batches = dense(tmp_path, LLAMA), list(calls(shrinkable(LLAMA)))
    if keeps:
        for batch in batches:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, keeps:] = 0
    model = AutoModelForCausalLM.from_pretrained(source)
    seen: dict[str, list[float]] = {}
    for name, block in zip((f"model.layers.{i}" for i in range(BLOCKS)), model.model.layers):

        def see(module: Any, args: tuple, found: torch.Tensor, name: str = name) -> None:
            for row, cosines in enumerate(nn.functional.cosine_similarity(args[0], found, dim=-1).tolist()):
                seen.setdefault(name, []).extend(1 - x for x in cosines[: keeps if keeps and row else None])

        block.register_forward_hook(see)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    report: Any = mts.shrink_checkpoint(source, tmp_path / "out", blocks=2, data_loader=batches, progress=False)
    (tried,) = report.shrunk.tried
    assert tried == pytest.approx({name: sum(each) / len(each) for name, each in seen.items()}, rel=1e-4)
    gone = sorted(tried, key=tried.__getitem__)[:2]
    stay = [place for place in range(BLOCKS) if f"model.layers.{place}" not in gone]
    assert report.shrunk.kept["blocks"] == {"model.layers": stay}


def test_one_block_has_weights_at_any_time(tmp_path, monkeypatch):
    source = dense(tmp_path, LLAMA)

    def watching(*args: Any, channels: Any = choose.channels) -> Any:
        choices = channels(*args)
        each = [choice for of_block in choices.values() for choice in of_block]
        files.append([choice.values.untyped_storage().filename is not None for choice in each])
        return choices

    files: list[list[bool]] = []
    monkeypatch.setattr(choose, "channels", watching)
    with blocks_in_memory() as counts:
        mts.shrink_checkpoint(source, tmp_path / "out", **given(LLAMA, {"mlp": 0.25, "blocks": [1], "reconstruct": 1}))
    assert set(counts) == {1}
    assert files == [[True] * (BLOCKS - 1)]  # the new values of what takes the channels


# stopped --------------------------------------------------------------------------------------------------------------


RESUMED: dict[str, tuple[str, dict[str, Any], Any, str, int, int]] = {  # where it stops, and how many blocks are done
    "in the first block": (LLAMA, {"mlp": 0.25, "reconstruct": 1}, smaller, "reconstruct", 1, 0),
    "while it tunes": (LLAMA, {"mlp": 0.25, "blocks": 1, "reconstruct": 1}, smaller, "reconstruct", 3, 2),
    "while it cuts": (LLAMA, {"mlp": 0.25, "blocks": 1}, Streamed, "_write", 3, 2),
    "after a block that goes": (LLAMA, {"blocks": [1], "reconstruct": 1}, smaller, "reconstruct", 2, 2),
    "with fewer experts": ("Mixtral", {"experts": 1, "reconstruct": 1}, smaller, "reconstruct", 3, 2),
    "with names that differ on disk": ("Mixtral", {"blocks": [0], "reconstruct": 1}, smaller, "reconstruct", 3, 2),
    "at the end": (LLAMA, {"mlp": 0.25, "blocks": 1}, Streamed, "outside", 1, 3),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path, monkeypatch, case):
    name, options, owner, function, at, done = RESUMED[case]
    source, options = dense(tmp_path, name), given(name, options)
    with interrupted(owner, function, at):
        mts.shrink_checkpoint(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("block-*.json"))) == done
    if done:
        with pytest.raises(ValueError, match="started with something else"):
            mts.shrink_checkpoint(source, tmp_path / "out", **{**options, "refit": False})
    with monkeypatch.context() as patch:
        for chooses in ("gram_scores", "blocks_by_influence") if done else ():  # nothing is chosen again
            patch.setattr(choose, chooses, None)
        report = mts.shrink_checkpoint(source, tmp_path / "out", **options)
    fresh = mts.shrink_checkpoint(source, tmp_path / "fresh", **options)
    assert_same_folders(tmp_path / "out", tmp_path / "fresh")
    assert report.shrunk == fresh.shrunk
    assert [(x.name, x.error_after) for x in report.blocks] == [(x.name, x.error_after) for x in fresh.blocks]
    assert report.notes[len(fresh.notes) :] == ([f"{done} of 4 blocks were reused from a stopped run"] if done else [])
    assert not (tmp_path / "out.partial").exists()


def test_a_choice_is_taken_back(tmp_path):
    source = dense(tmp_path, LLAMA)
    mts.shrink_checkpoint(source, tmp_path / "first", **given(LLAMA, {"mlp": 0.25, "blocks": 1}))
    kept = json.loads((tmp_path / "first" / "sparsity.json").read_text())["report"]["shrunk"]
    mts.shrink_checkpoint(source, tmp_path / "second", **given(LLAMA, {"kept": kept}))
    assert_same_folders(tmp_path / "first", tmp_path / "second")


# what cannot be streamed ----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget": (
        {"mlp": None, "budget": "70% params"},
        "^budget runs the whole model, .*: give mlp=, blocks= or to=, or",
    ),
    "blocks by KL": ({"blocks": 1, "blocks_by": "kl"}, "^blocks_by='kl' runs the whole model"),
    "distill": ({"distill": True}, "^distill runs the whole model, .*or load the model and call shrink$"),
    "text of its own": ({"self_data": 4}, "^self_data=4 runs the whole model"),
    "no data": ({"data_loader": None}, "needs calibration data"),
}


def test_best_leaves_distillation_out_and_says_so(tmp_path):
    options = given(LLAMA, {"mlp": 0.25, "quality": "best", "reconstruct": 1})
    report = mts.shrink_checkpoint(dense(tmp_path, LLAMA), tmp_path / "out", **options)
    assert report.distillation is None
    assert "no distillation: each step takes a pass over all weights, which lie on disk" in report.notes


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(tmp_path, case):
    more, problem = REFUSED[case]
    source = dense(tmp_path, LLAMA)
    with pytest.raises((ValueError, TypeError), match=problem):
        mts.shrink_checkpoint(source, tmp_path / "out", **given(LLAMA, {"mlp": 0.25, **more}))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_sparse_source_is_refused(tmp_path):
    mts.save(mts.sparsify(shrinkable(LLAMA), "magnitude", pattern="2:4"), tmp_path / "sparse")
    with pytest.raises(ValueError, match="is sparse: shrink the model that it was made of"):
        mts.shrink_checkpoint(tmp_path / "sparse", tmp_path / "out", **given(LLAMA, {"mlp": 0.25}))
