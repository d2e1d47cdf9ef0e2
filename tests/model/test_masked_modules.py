"""Forward and backward passes of sparse modules, under torch.func, in replicas and in threads."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.model.sparse_modules import (
    Case,
    drift,
    every_case,
    is_plus_zero,
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
