"""Modules become sparse in place and plain again, with and without accelerate's hooks."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import assert_same_masks, refused
from tests.model.sparse_modules import (
    Case,
    drift,
    every_case,
    is_plus_zero,
    lost_zeros,
    random_mask,
    sparse_linear,
    written_on_purpose,
)

pytestmark = written_on_purpose


@every_case
def test_module_becomes_sparse_in_place_and_plain_again_on_export(case: Case):
    module = case.build()
    module.get_parameter(case.names[0]).requires_grad_(False)
    parameters = dict(module.named_parameters())
    wanted = {name: parameter.requires_grad for name, parameter in parameters.items()}
    classes, keys = [type(child) for child in module.modules()], list(module.state_dict())
    attributes = [set(child.__dict__) | set(child._buffers) for child in module.modules()]
    masks = {name: random_mask(parameters[name], seed) for seed, name in enumerate(case.names)}
    for name, mask in masks.items():
        mts.set_mask(module, name, mask)

    assert isinstance(module, classes[0])
    assert_same_masks(module, masks)
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad == wanted[name]
    assert not lost_zeros(module)

    assert mts.export(module) is module
    assert list(module.state_dict()) == keys
    assert [type(child) for child in module.modules()] == classes
    assert [set(child.__dict__) | set(child._buffers) for child in module.modules()] == attributes
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert {name: parameter.requires_grad for name, parameter in module.named_parameters()} == wanted
    assert all(is_plus_zero(parameters[name].detach()[~mask]) for name, mask in masks.items())


def test_a_second_mask_replaces_the_first():
    """It is a copy of the caller's."""
    module, _ = sparse_linear()
    second = random_mask(module.weight, seed=9)
    kept_by_both = module.weight.detach().clone() * second
    mts.set_mask(module, "weight", given := second.clone())
    given.fill_(False)
    ((name, mask),) = mts.named_masks(module)
    assert name == "weight"
    assert torch.equal(mask, second)
    assert torch.equal(module.weight.detach(), kept_by_both)


def test_set_mask_refuses_what_does_not_fit_and_leaves_the_module_as_it_was():
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("weight_mask", torch.ones(8, 8, dtype=torch.bool))

    kept, replaced = torch.ones(8, 8, dtype=torch.bool), nn.Linear(8, 8)
    replaced.forward = lambda x: F.linear(x, replaced.weight)  # type: ignore[method-assign]
    plain = nn.Linear(8, 8)
    for module, name, mask, message in [
        (plain, "wieght", kept, "Linear has no parameter 'wieght'.*full name"),
        (plain, "0.weight", kept, "no parameter '0.weight'"),
        (nn.Linear(8, 8, bias=False), "bias", kept, "no parameter 'bias'"),
        (plain, "weight", kept[:4], r"'weight' is torch.strided torch.bool \[4, 8\] .*: give torch.bool \[8, 8\]"),
        (plain, "weight", kept.float(), r"torch.float32 \[8, 8\] on cpu: give torch.bool.*True = kept"),
        (plain, "weight", None, r"mask of 'weight' is a NoneType: give a torch\.bool tensor, True = kept"),
        (plain, "weight", kept.tolist(), r"mask of 'weight' is a list: give a torch\.bool tensor"),
        (plain, "weight", kept.numpy(), r"mask of 'weight' is a ndarray: give a torch\.bool tensor"),
        (plain, "weight", kept.to("meta"), r"\[8, 8\] on meta: give .* with values"),
        (plain, "weight", kept.to_sparse(), "mask of 'weight' is torch.sparse_coo torch.bool"),
        (plain, 5, kept, "Linear has no parameter 5: give a full name"),
        (Masked(), "weight", ~kept, "Masked has an attribute 'weight_mask', where.*enforce=False"),
        (replaced, "weight", ~kept, "forward of this Linear was replaced on the instance.*subclass"),
    ]:
        error = ValueError if isinstance(mask, Tensor) else TypeError
        refused(mts.set_mask, module, name, mask, match=message, error=error)
        assert not list(mts.named_masks(module)) or type(module) is Masked


@pytest.mark.parametrize(
    "weight", [torch.eye(4).to_sparse(), torch.ones(1, 4).expand(4, 4), torch.eye(4).to(torch.float8_e5m2)]
)
def test_weights_that_take_no_zeros_leave_a_plain_module(weight):
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match="'weight' is sparse, quantized or expanded, and takes no zeros"):
        mts.set_mask(module, "weight", torch.ones(4, 4).bool())
    assert type(module) is nn.Linear
    assert [*module.state_dict()] == ["weight", "bias"]


def test_a_module_with_a_mask_is_asked_as_well_before_it_gets_another():
    module, kept = nn.Linear(4, 4), torch.eye(4).bool()
    module.register_buffer("weight_mask", own := torch.full((4, 4), 0.5))
    module.bias = nn.Parameter(torch.ones(1).expand(4))
    module.scale = nn.Parameter(torch.ones(4))
    mts.set_mask(module, "scale", kept[0])
    for name, mask, words in [("weight", kept, "an attribute 'weight_mask'"), ("bias", kept[0], "'bias' .* expanded")]:
        refused(mts.set_mask, module, name, mask, match=words)
    assert module.weight_mask is own
    assert [name for name, _ in mts.named_masks(module)] == ["scale"]


def test_attributes_of_the_users_own_stay_theirs():
    class Adapted(nn.Module):
        told = 3

        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(4, 4), nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.told * x @ self.down @ self.up

    module, dense, kept = Adapted(), Adapted(), torch.ones(4, 4).tril().bool()
    dense.load_state_dict(module.state_dict())
    mts.set_mask(module, "up", kept)
    with torch.no_grad():
        dense.up.mul_(kept)
        for made in (lambda: module, lambda: copy.deepcopy(module), lambda: mts.export(module)):
            torch.testing.assert_close(made()(torch.eye(4)), dense(torch.eye(4)))


def test_repr_shows_the_share_of_zeros_and_needs_no_values():
    module, _ = sparse_linear()
    assert repr(module) == "SparseLinear(in_features=8, out_features=8, bias=True, weight: 50.0% zeros)"
    assert "weight: ? zeros" in repr(module.to("meta"))


def test_hooks_that_came_and_went_hide_neither_the_sparse_forward_nor_the_plain_one():
    module = nn.Linear(8, 8)
    add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(module)  # leaves nn.Linear.forward bound in the instance
    mts.set_mask(module, "weight", mask := random_mask(module.weight))
    drift(module)
    module(torch.ones(1, 8)).sum().backward()
    assert is_plus_zero(module.weight.grad[~mask])
    add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(module)  # leaves the sparse forward bound
    mts.export(module)
    assert type(module) is nn.Linear
    module.zero_grad()
    module(torch.ones(1, 8)).sum().backward()
    assert module.weight.grad.all()


def test_export_leaves_alone_a_forward_that_others_have_wrapped_since():
    """As accelerate's prepare wraps the forward of a whole model, here a single layer, for mixed precision."""
    module, _ = sparse_linear()
    module.forward = functools.partial(type(module).forward, module)
    mts.export(module)
    assert not list(mts.named_masks(module))
    module(torch.ones(1, 8)).sum().backward()
    assert module.weight.grad.all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize_per_tensor:UserWarning")
def test_sparse_first_exported_then_quantized():
    """What docs/training.md says: quantize_dynamic passes over sparse modules, and keeps the zeros of exported ones."""
    torch.manual_seed(0)
    model = mts.sparsify(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), "magnitude", pattern="2:4")
    zeros = ~dict(mts.named_masks(model))["0.weight"]
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert [type(module).__name__ for module in quantized] == ["SparseLinear", "ReLU", "SparseLinear"]
    quantized = torch.ao.quantization.quantize_dynamic(mts.export(model), {nn.Linear}, dtype=torch.qint8)
    assert "DynamicQuantizedLinear" in repr(quantized[0])
    weight = quantized[0].weight().dequantize()
    assert weight.any()
    assert not weight[zeros].any()


def test_a_parameter_without_elements_carries_a_mask():
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.empty(0, 8))
    mts.set_mask(model, "weight", torch.ones(0, 8, dtype=torch.bool))
    assert model.state_dict()["weight"].shape == (0, 8)
