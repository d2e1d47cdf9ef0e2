"""State dicts, copies and pickles of sparse modules."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import modelopt_sparse as mts
from tests.helpers import assert_same_masks, refused
from tests.model.sparse_modules import (
    COPIES,
    Case,
    drift,
    every_case,
    is_plus_zero,
    lost_zeros,
    output,
    random_mask,
    sparse_and_dense,
    sparse_linear,
    written_on_purpose,
)

pytestmark = [pytest.mark.core, written_on_purpose]


@every_case
def test_state_dict_has_weight_and_mask_and_loads_back(case: Case):
    """And zeros where something wrote over them."""
    sparse, dense, masks = sparse_and_dense(case)
    drift(sparse)
    state = sparse.state_dict()
    assert not lost_zeros(sparse)
    assert state.keys() == dense.state_dict().keys() | {f"{name}_mask" for name in masks}
    for name, mask in masks.items():
        assert torch.equal(state[f"{name}_mask"], mask)
        assert is_plus_zero(state[name][~mask])
        assert torch.equal(state[name], dense.get_parameter(name))
    other, _, _ = sparse_and_dense(case)
    for parameter in other.parameters():
        parameter.data.normal_()
    other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), state, rtol=0, atol=0)


@every_case
@pytest.mark.parametrize("assign", [False, True])
def test_strict_load_of_a_dense_state_dict_keeps_the_modules_mask(case: Case, assign: bool):
    module, dense, masks = sparse_and_dense(case)
    for parameter in dense.parameters():
        parameter.data.normal_()
    state = nn.ModuleDict({"inner": dense}).state_dict()
    given = copy.deepcopy(state)
    result = nn.ModuleDict({"inner": module}).load_state_dict(given, strict=True, assign=assign)
    assert not [*result.missing_keys, *result.unexpected_keys]
    torch.testing.assert_close(dict(given), dict(state), rtol=0, atol=0)  # the caller's dict and tensors are untouched
    for name, mask in masks.items():
        dense.get_parameter(name).data[~mask] = 0
        assert torch.equal(module.get_parameter(name), dense.get_parameter(name))
    assert_same_masks(module, masks)
    inputs = case.inputs()
    torch.testing.assert_close(output(module, *inputs), output(dense, *inputs))


@pytest.mark.parametrize("assign", [False, True])
def test_strict_load_of_a_sparse_state_dict_takes_its_mask(assign: bool):
    module, _ = sparse_linear()
    other = nn.Linear(8, 8)
    mts.set_mask(other, "weight", theirs := random_mask(other.weight, seed=4))
    state = copy.deepcopy(other.state_dict())
    state["weight"][~theirs] = 5.0  # drifted before it was saved
    module.load_state_dict(state, strict=True, assign=assign)
    assert torch.equal(next(mts.named_masks(module))[1], theirs)
    assert torch.equal(module.weight, other.weight)
    assert (state["weight"][~theirs] == 5.0).all()
    module.weight_mask.fill_(False)
    assert torch.equal(state["weight_mask"], theirs)


def test_unexpected_and_missing_keys_are_still_reported():
    module, _ = sparse_linear()
    state = nn.Linear(8, 8).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        module.load_state_dict({**state, "other": torch.zeros(1)})
    refused(module.load_state_dict, {"weight": state["weight"]}, match=r'Missing key.*"bias"', error=RuntimeError)


@pytest.mark.parametrize("how", COPIES)
@every_case
def test_copies_are_sparse_modules_of_their_own(case: Case, how: str):
    module, dense, masks = sparse_and_dense(case)
    output(module, *case.inputs()).sum().backward()  # copied in the middle of training
    copied = COPIES[how](module)
    assert isinstance(copied, type(dense))
    torch.testing.assert_close(copied.state_dict(), module.state_dict(), rtol=0, atol=0)
    shared = {id(t) for t in (*module.parameters(), *module.buffers())}
    assert not shared & {id(t) for t in (*copied.parameters(), *copied.buffers())}
    drift(copied)
    assert not lost_zeros(module)
    inputs = case.inputs()
    copied.zero_grad()
    for attribute in ("calls", "seen"):  # the user's subclass counts its calls
        if hasattr(copied, attribute):
            setattr(copied, attribute, getattr(dense, attribute))
    torch.testing.assert_close(output(copied, *inputs), output(dense, *inputs))
    output(copied, *inputs).sum().backward()
    assert all(is_plus_zero(copied.get_parameter(name).grad[~mask]) for name, mask in masks.items())
    mts.export(copied)
    assert type(copied) is type(dense)


def test_masks_survive_changes_of_dtype_and_shared_memory():
    module, mask = sparse_linear()
    module.half().float().to(torch.bfloat16).share_memory()
    assert torch.equal(next(mts.named_masks(module))[1], mask)
    assert not lost_zeros(module)


def test_a_model_that_an_older_version_wrote_whole_is_read():
    """`torch.save(model)` of 801f29a: the names of functions and classes in the file are still found."""
    model = torch.load(Path(__file__).parent / "golden" / "torch_save_801f29a.pt", weights_only=False)
    weight = torch.arange(1.0, 17.0).view(4, 4)
    weight[:, :2] = 0  # 2:4 by magnitude of rising numbers
    drift(model)
    for (name, mask), layer in zip(mts.named_masks(model), model, strict=True):
        assert name.endswith(".weight")
        assert torch.equal(mask, weight != 0)
        assert torch.equal(layer(torch.ones(1, 4)).detach(), weight.sum(1)[None] + layer.bias)
    assert len(mts.verify(model, "2:4").layers) == len(mts.report(model).layers) == 2
    assert type(mts.export(model)[0]) is nn.Linear


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize(
    "how", [{"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["one by one", "at once"]
)
def test_an_average_has_the_masks_of_its_model_or_is_refused(how, use_buffers):
    """Masks that stay are no matter. If they move, an average of buffers keeps what any of the models has kept."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)).train()
    masks = {name: torch.rand(model.get_parameter(name).shape) < 0.3 for name in ("0.weight", "2.weight")}
    for name, mask in masks.items():
        mts.set_mask(model, name, mask)
    average = AveragedModel(model, use_buffers=use_buffers, **how)
    for _ in range(3):
        average.update_parameters(model)
    average.eval()
    for _ in range(3):
        for name, mask in masks.items():
            mts.set_mask(model, name, mask.roll(1, 1))
            masks[name] = mask.roll(1, 1)
        average.update_parameters(model)
    if use_buffers:
        run, export = lambda: average(torch.ones(1, 16)), lambda: mts.export(average.module)
        for door in (run, export, average.train, average.state_dict):
            refused(door, match=r"the mask of '0\.weight' keeps \d+ weights, and kept .*use_buffers")
    for name, mask in masks.items():  # as docs/training.md says
        mts.set_mask(average.module, name, mask)
    average.train()
    assert not lost_zeros(average.module)
    assert_same_masks(average.module, masks)
    again = copy.deepcopy(average.module)
    again.load_state_dict({key: x.roll(1) for key, x in average.module.state_dict().items()})
    again.eval()
