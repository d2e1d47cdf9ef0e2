"""Tricky models: each is made sparse, saved, restored and exported with equal outputs, or refused by one error."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import modelopt_sparse as mts
from tests.helpers import assert_bits, assert_same_masks, assert_same_state, state_of
from tests.models.tricky import REFUSED, ROUND_TRIPS

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning"),
]


@torch.no_grad()
def outputs(model: nn.Module) -> list[Any]:
    dtype = next(model.parameters()).dtype
    return tree_leaves(model(torch.linspace(-2, 2, 64, dtype=dtype).view(8, 8).sin()))


def built(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return ROUND_TRIPS[name]()


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_tricky_model_comes_back_with_equal_outputs(name, tmp_path):
    """Of the dense weights times the masks, the sparse model, the restored one, and both exported."""
    dense, model, fresh = built(name, 0), built(name, 0), built(name, 1)
    planned = mts.make_plan(model, "magnitude", pattern="2:4")
    mts.sparsify(model, "magnitude", pattern="2:4", progress=False)
    masks = dict(mts.named_masks(model))
    parameters = {model.get_parameter(layer.layer.parameter_name) for layer in planned.layers}
    assert parameters == {model.get_parameter(each) for each in masks}
    with torch.no_grad():
        for each, mask in masks.items():
            assert torch.equal(mask.view(-1).float().mean(), torch.tensor(0.5)), each
            dense.get_parameter(each).masked_fill_(~mask, 0)
    wanted, found = outputs(dense), {"sparse": outputs(model)}
    mts.save(model, tmp_path / "model")
    mts.restore(fresh, tmp_path / "model")
    assert_same_masks(fresh, masks)
    found |= {"restored": outputs(fresh)}
    for how, one in {"exported": model, "restored and exported": fresh}.items():
        assert not [*mts.named_masks(mts.export(one))]
        found[how] = outputs(one)
    for how, out in found.items():
        assert len(out) == len(wanted), how
        for one, other in zip(out, wanted, strict=True):
            if isinstance(one, torch.Tensor):
                assert_bits(one, other)
            else:
                assert one == other


WITHOUT_VALUES = ("lazy", "on meta", "scripted child", "wholly scripted")  # or with values that torch shows otherwise


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_sparse_is_refused_and_left_as_it_was(name):
    build, words = REFUSED[name]
    model = build()
    before = None if name in WITHOUT_VALUES else state_of(model)
    with pytest.raises(ValueError, match=words) as caught:
        mts.sparsify(model, "magnitude", pattern="2:4", progress=False)
    assert len(str(caught.value).splitlines()) <= 2
    if before is not None:
        assert_same_state(model, before)


@pytest.mark.skipif("exaone" not in CONFIG_MAPPING, reason="this transformers has no EXAONE")
def test_a_type_that_the_class_of_another_runs_keeps_its_config(tmp_path):
    """EXAONE is a LlamaForCausalLM with other names on disk. Saved, loaded and saved again, packed, and streamed."""
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("exaone", **sizes))
    model.save_pretrained(tmp_path / "dense")
    mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "streamed", "magnitude", progress=False)
    mts.save(mts.sparsify(model, "magnitude", progress=False), tmp_path / "saved")
    mts.save(mts.load(tmp_path / "saved"), tmp_path / "again", packed=True)
    for name in ("saved", "again", "streamed"):
        assert AutoConfig.from_pretrained(tmp_path / name).model_type == "exaone", name
        assert_same_state(mts.load(tmp_path / name), state_of(model))
