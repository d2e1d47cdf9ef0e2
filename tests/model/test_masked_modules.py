"""Sparse modules: forward and backward passes, under torch.func, in replicas and in threads; how masks come into a
module and how it becomes plain again, with and without accelerate's hooks."""

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
    output,
    own_deprecations,
    random_mask,
    sparse_and_dense,
    sparse_linear,
    written_on_purpose,
)

pytestmark = written_on_purpose


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@every_case
@pytest.mark.parametrize("mode", [*MODES, "functional_call"])
def test_output_is_the_dense_modules_with_zeros_whatever_lies_under_the_mask(case: Case, mode: str):
    sparse, dense, _ = sparse_and_dense(case)
    drift(sparse)
    inputs = case.inputs()
    expected = output(dense, *inputs)
    if mode == "functional_call":
        drifted = {name: parameter.detach().clone() for name, parameter in sparse.named_parameters()}
        given = copy.deepcopy(drifted)
        found = torch.func.functional_call(sparse, given, tuple(inputs))
        torch.testing.assert_close(given, drifted, rtol=0, atol=0)  # the caller's tensors are the caller's
    else:
        with MODES[mode]():
            found = sparse(*inputs)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, expected)


@every_case
def test_gradients_are_the_dense_modules_with_zeros_at_pruned_places(case: Case):
    sparse, dense, masks = sparse_and_dense(case)
    drift(sparse)
    given, given_dense = case.inputs(), case.inputs()
    output(sparse, *given).square().sum().backward()
    output(dense, *given_dense).square().sum().backward()
    for (name, parameter), reference in zip(sparse.named_parameters(), dense.parameters()):
        assert parameter.grad is not None, name
        expected = reference.grad
        if name in masks:
            assert is_plus_zero(parameter.grad[~masks[name]])
            assert parameter.grad[masks[name]].any()
            expected = expected.masked_fill(~masks[name], 0)
        torch.testing.assert_close(parameter.grad, expected)
    torch.testing.assert_close([x.grad for x in given], [x.grad for x in given_dense])


def test_nan_and_infinite_gradients_at_pruned_places_stay_out():
    module = nn.Linear(2, 2)
    mts.set_mask(module, "weight", torch.tensor([[True, False], [True, True]]))
    module(torch.tensor([[1.0, torch.nan]])).backward(torch.tensor([[1.0, 2.0]]))
    # d/dw_rc = upstream_r * x_c: column 1 is NaN, and pruned in row 0
    torch.testing.assert_close(module.weight.grad, torch.tensor([[1.0, 0.0], [2.0, torch.nan]]), equal_nan=True)
    module.weight.grad = None
    module(torch.ones(1, 2)).backward(torch.tensor([[1.0, torch.inf]]))
    # row 0 gets 1, row 1 gets inf
    torch.testing.assert_close(module.weight.grad, torch.tensor([[1.0, 0.0], [torch.inf, torch.inf]]))


@every_case
def test_no_masked_copy_of_a_weight_is_kept_for_the_backward_pass(case: Case):
    sparse, _, masks = sparse_and_dense(case)
    for _, mask in mts.named_masks(sparse):
        mask[:] = mask.clone()  # a mask of its own storage
    theirs = {t.untyped_storage().data_ptr() for t in (*sparse.parameters(), *sparse.buffers())}
    sizes = {mask.numel() for mask in masks.values()}
    inputs = [torch.randn(11, *x.shape[1:], requires_grad=True) for x in case.inputs()]  # 11 is no weight's size
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output(sparse, *inputs)
    like_weights = [t for t in saved if t.numel() in sizes]
    assert like_weights
    assert all(t.untyped_storage().data_ptr() in theirs for t in like_weights)


@pytest.mark.parametrize("called", [1, 2])
def test_the_gradient_of_one_call_is_masked_without_a_copy(called: int):
    """Of several calls it is masked once more, after they are added up: other readers may be among them."""
    module, mask = sparse_linear()
    seen: list[Tensor] = []
    module.weight.register_hook(seen.append)
    torch.stack([module(torch.ones(1, 8)) for _ in range(called)]).sum().backward()
    assert hasattr(seen[0], "masked") == (called == 1)
    assert is_plus_zero(module.weight.grad[~mask])
    assert module.weight.grad[mask].eq(called).all()


def test_second_derivatives_are_right():
    module, _ = sparse_linear(4, 3)
    module.double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: module(x).tanh(), x)
    dense = mts.export(copy.deepcopy(module))
    mts.set_mask(module, "weight", mask := random_mask(module.weight))
    for each in (module, dense):
        (gradient,) = torch.autograd.grad(each(x).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    torch.testing.assert_close(module.weight.grad, dense.weight.grad * mask)


def test_mask_set_in_inference_mode_can_be_trained():
    module = nn.Linear(8, 8)
    with torch.inference_mode():
        mts.set_mask(module, "weight", mask := random_mask(module.weight))
    module(torch.ones(1, 8)).sum().backward()
    assert is_plus_zero(module.weight.grad[~mask])


@own_deprecations
def test_function_transforms_see_masked_weights_and_masked_gradients():
    module, mask = sparse_linear(4, 3)
    x = torch.randn(5, 4)
    dense = mts.export(copy.deepcopy(module))
    drift(module)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for gradient, sample in zip(per_sample["weight"], x):
        dense.zero_grad()
        dense(sample).square().sum().backward()
        torch.testing.assert_close(gradient, dense.weight.grad * mask)
    # the module's own parameters, as captured by a transform over the input
    torch.testing.assert_close(torch.func.vmap(module)(x), dense(x))
    found, expected = (torch.func.hessian(lambda x, m=m: m(x).tanh().sum())(x[0]) for m in (module, dense))
    torch.testing.assert_close(found, expected)


def test_ensemble_of_stacked_modules_uses_each_members_mask():
    members = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for seed, member in enumerate(members):
        mts.set_mask(member, "weight", random_mask(member.weight, seed))
    weights, buffers = torch.func.stack_module_state(members)
    skeleton = copy.deepcopy(members[0]).to("meta")
    x = torch.randn(2, 4)
    found = torch.func.vmap(lambda w, b: torch.func.functional_call(skeleton, (w, b), (x,)))(weights, buffers)
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]))


def test_replicas_of_data_parallel_enforce_the_mask():
    """nn.DataParallel gives each replica its weights as plain attributes; done here as its replicate does it."""
    module, mask = sparse_linear()
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    copied, x = torch.randn(8, 8, requires_grad=True), torch.randn(3, 8)
    replica.weight, replica.bias = copied.clone(), module.bias
    found = replica(x)
    torch.testing.assert_close(found, F.linear(x, copied * mask, module.bias))
    found.sum().backward()
    assert is_plus_zero(copied.grad[~mask])
    assert copied.grad[mask].all()


def test_gradients_of_a_conjugate_are_cut():
    module, kept = nn.Module(), torch.eye(4).bool()
    module.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64).conj())
    mts.set_mask(module, "weight", kept)
    (module.weight.conj() * torch.ones(4, 4)).abs().square().sum().backward()
    torch.testing.assert_close(module.weight.grad, 2 * module.weight.detach())
    assert not module.weight[~kept].any()


# into a module and out of it ----------------------------------------------------------------------------------------


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
