"""Loading a folder into packed layers."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import save as checkpoint
from modelopt_sparse.runtime.convert import Settings, loading_place
from modelopt_sparse.runtime.linear import SemiStructuredLinear
from modelopt_sparse.runtime.timing import Place
from tests.helpers import assert_bits, tiny_llama
from tests.runtime.unpacking import place_for


@pytest.fixture
def folder(tmp_path):
    model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    mts.save(mts.sparsify(model.to(torch.bfloat16), "magnitude", pattern="2:4", progress=False), tmp_path / "sparse")
    return tmp_path / "sparse"


def test_load_packs_each_layer_on_its_way(backend, folder, monkeypatch):
    """The layers are packed before the model as a whole is moved, which then moves what stayed dense."""
    moved = []
    original = nn.Module.to

    def to(self, *args, **kwargs):
        moved.append(sum(isinstance(module, SemiStructuredLinear) for module in self.modules()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(), place_for(backend)))
    monkeypatch.setattr(type(tiny_llama()), "to", to)
    model, dense = mts.load(folder, semi_structured=True), mts.export(mts.load(folder))
    assert moved == [14]
    assert dict(mts.named_masks(model)) == {}
    assert mts.report(model).layers
    assert len(mts.semi_structured_report(model).packed) == 14
    for name, weight in mts.to_dense(model).state_dict().items():
        assert_bits(weight, dense.state_dict()[name])


def test_load_refuses_before_it_reads(folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError, match="packs layers for a CUDA device and there is none here"):
        mts.load(folder, semi_structured=True)
    for device_map in ("auto", "cpu", {"model": 0, "lm_head": 1}):
        with pytest.raises(ValueError, match="2:4 layers are packed for one CUDA device, such as 'cuda:0'"):
            mts.load(folder, semi_structured=True, device_map=device_map)
    with pytest.raises(ValueError, match="option 'tun' is not known"):
        mts.load(folder, semi_structured={"tun": 1})


@pytest.mark.parametrize("device_map", [None, "cuda", "cuda:0", torch.device("cuda"), {"": "cuda:0"}])
def test_load_takes_the_device_that_is_named(monkeypatch, device_map):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Place, "of", lambda *options: options)
    settings, place = loading_place(device_map, {"quantize": "fp8", "timing": "graph", "backend": "cutlass"})
    assert place == (torch.device("cuda:0"), "cutlass", "fp8", "graph")
    assert settings.quantize == "fp8"


def test_load_still_checks_weights_against_masks(backend, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(), place_for(backend)))
    original = checkpoint.read_masks
    monkeypatch.setattr(checkpoint, "read_masks", lambda *args: {name: ~mask for name, mask in original(*args).items()})
    with pytest.raises(ValueError, match="is not zero in 2048 places where its mask is False"):
        mts.load(folder, semi_structured=True)
