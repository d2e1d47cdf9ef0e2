"""NaN in the place of pruned weights, in and out, and `finalize`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelopt_sparse import training
from modelopt_sparse.training import checkpoints
from tests.helpers import assert_bits, refused


def sparse_model():
    torch.manual_seed(0)
    return training.Static(0.5, include="*.weight").apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))


def test_there_and_back():
    state = sparse_model().state_dict()
    marked = training.to_sentinel(state)
    assert set(marked) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(marked["0.weight"].isnan(), ~state["0.weight_mask"])
    assert torch.equal(marked["0.bias"], state["0.bias"])
    back = training.from_sentinel(marked)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert_bits(back[name], value)


def test_optimizer_state_of_the_same_shape_is_marked_too():
    model = sparse_model()
    state = {"0.weight": {"exp_avg": torch.zeros(8, 8), "step": torch.tensor(3.0)}}
    training.to_sentinel(model.state_dict(), state)
    assert torch.equal(state["0.weight"]["exp_avg"].isnan(), ~model[0].weight_mask)
    assert state["0.weight"]["step"] == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_live_weight_of_zero_is_not_pruned_and_inf_is_damage(dtype):
    with pytest.raises(ValueError, match="'weight' holds inf, which marks no pruned weight"):
        training.from_sentinel({"weight": torch.tensor([torch.inf])})
    back = training.from_sentinel({"weight": torch.tensor([0.0, torch.nan, 1.0]).to(dtype)})
    assert back["weight_mask"].tolist() == [True, False, True]
    assert (back["weight"].dtype, back["weight"].float().tolist()) == (dtype, [0.0, 0.0, 1.0])


def test_finalize(run, tmp_path, monkeypatch):
    model = sparse_model()
    source, destination = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(training.to_sentinel(model.state_dict()), source, metadata={"format": "pt"})

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full_disk)
        refused(training.finalize, source, destination, match="No space left", error=OSError)
    assert [*tmp_path.iterdir()] == [source]  # so that the next attempt is not refused
    assert "2 of 4 tensors" in run("finalize", "--input", source, "--output", destination).well()
    dense = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    dense.load_state_dict(load_file(destination))
    assert torch.equal(dense[0].weight == 0, ~model[0].weight_mask)
    run("finalize", "--input", source, "--output", destination).wrong("exists already")


@pytest.mark.parametrize("name", ["model.mdl", "model.pt"])
def test_finalize_refuses_other_files(name, tmp_path):
    with pytest.raises(ValueError, match=r"is no safetensors file: write its state dict as safetensors"):
        training.finalize(tmp_path / name, tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        training.finalize(tmp_path / "none.safetensors", tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())
