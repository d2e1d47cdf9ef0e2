"""Sparse modules: how masks are put on, what a forward and a backward see, what is saved, and how masks come off.

The oracle everywhere is the dense module with zeros written into its weights, and autograd on it.
"""

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D as HFConv1D

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches

pytestmark = pytest.mark.core


class Scaled(nn.Linear):
    """A user's subclass with its own forward, an attribute and a buffer that the forward updates, and a property."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    @property
    def scale(self) -> float:
        return 1.0 + self.calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + len(x)
        return super().forward(x) * self.scale


class Mixing(nn.Module):
    """No layer type at all: a parameter of the user's own, used by a method that forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 8))

    def mix(self, x: Tensor) -> Tensor:
        return torch.einsum("tc,rc->tr", x, self.kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).relu()


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the inputs

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in self.shapes]


TOKENS = ((2, 3, 8),) * 3
CASES = {
    "linear": Case(lambda: nn.Linear(8, 6), ("weight",), ((3, 8),)),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3, padding=1), ("weight",), ((2, 4, 7),)),
    "conv2d": Case(lambda: nn.Conv2d(8, 4, 3, stride=2, groups=2), ("weight",), ((2, 8, 7, 7),)),
    "conv3d": Case(lambda: nn.Conv3d(4, 4, 2, padding_mode="circular"), ("weight",), ((1, 4, 3, 3, 3),)),
    "hf_conv1d": Case(lambda: HFConv1D(6, 8), ("weight",), ((2, 3, 8),)),
    "attention": Case(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), ("in_proj_weight", "out_proj.weight"), TOKENS
    ),
    "attention_out_proj": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), ("out_proj.weight",), TOKENS),
    "attention_separate": Case(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"),
        ((2, 3, 8), (2, 5, 6), (2, 5, 4)),
    ),
    "lstm": Case(lambda: nn.LSTM(8, 4, batch_first=True), ("weight_ih_l0", "weight_hh_l0"), ((2, 3, 8),)),
    "subclass": Case(lambda: Scaled(8, 6), ("weight",), ((3, 8),)),
    "own_parameter": Case(Mixing, ("kernel",), ((3, 8),)),
}
# torch 2.13's own compiler and torch.func call functions that torch has deprecated
own_deprecations = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def random_mask(weight: Tensor, seed: int = 0) -> Tensor:
    """Half of the entries kept."""
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    return (order % 2 == 0).view(weight.shape)


def sparse_and_dense(case: Case) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A sparse module, the dense one with the same weights and plain zeros, and the masks."""
    torch.manual_seed(3)
    dense = case.build()
    sparse = copy.deepcopy(dense)
    masks = {name: random_mask(dense.get_parameter(name), seed) for seed, name in enumerate(case.names)}
    for name, mask in masks.items():
        mts.set_mask(sparse, name, mask)
        with torch.no_grad():
            dense.get_parameter(name)[~mask] = 0
    return sparse, dense, masks


def sparse_linear(inputs: int = 8, outputs: int = 8) -> tuple[nn.Module, Tensor]:
    module = nn.Linear(inputs, outputs)
    mask = random_mask(module.weight)
    mts.set_mask(module, "weight", mask)
    return module, mask


def drift(module: nn.Module, value: float = 7.0) -> None:
    """Write under every mask, as an optimizer or a merge may do."""
    for name, mask in mts.named_masks(module):
        module.get_parameter(name).data[~mask] = value


def output(module: nn.Module, *inputs: Tensor) -> Tensor:
    found = module(*inputs)
    return found[0] if isinstance(found, tuple) else found


def is_plus_zero(tensor: Tensor) -> bool:
    return not tensor.count_nonzero() and not torch.signbit(tensor).any()


def at_rest(module: nn.Module) -> bool:
    """Whether every pruned weight is exactly +0.0, looked at without calling the module or its state dict."""
    return all(is_plus_zero(module.get_parameter(name).detach()[~mask]) for name, mask in mts.named_masks(module))


# on and off ---------------------------------------------------------------------------------------------------------


@every_case
def test_module_becomes_sparse_in_place_and_plain_again_on_export(case: Case):
    module = case.build()
    module.get_parameter(case.names[0]).requires_grad_(False)
    parameters = dict(module.named_parameters())
    wanted = {name: parameter.requires_grad for name, parameter in parameters.items()}
    classes = [type(child) for child in module.modules()]
    attributes = [set(child.__dict__) | set(child._buffers) for child in module.modules()]
    masks = {name: random_mask(parameters[name], seed) for seed, name in enumerate(case.names)}
    for name, mask in masks.items():
        mts.set_mask(module, name, mask)
        mts.observe_gradient(module, name, print)

    assert isinstance(module, classes[0])
    assert {name: mask.tolist() for name, mask in mts.named_masks(module)} == {
        name: mask.tolist() for name, mask in masks.items()
    }
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.requires_grad == wanted[name]
    assert at_rest(module)

    assert mts.export(module) is module
    assert [type(child) for child in module.modules()] == classes
    assert [set(child.__dict__) | set(child._buffers) for child in module.modules()] == attributes
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert {name: parameter.requires_grad for name, parameter in module.named_parameters()} == wanted
    assert all(is_plus_zero(parameters[name].detach()[~mask]) for name, mask in masks.items())


def test_export_bakes_zeros_over_what_was_written_under_the_mask():
    module, mask = sparse_linear()
    drift(module, -1.0)
    mts.export(module)
    assert is_plus_zero(module.weight.detach()[~mask])


def test_a_second_mask_replaces_the_first():
    module, _ = sparse_linear()
    second = random_mask(module.weight, seed=9)
    kept_by_both = module.weight.detach().clone() * second
    mts.set_mask(module, "weight", second)
    ((name, mask),) = mts.named_masks(module)
    assert name == "weight"
    assert torch.equal(mask, second)
    assert torch.equal(module.weight.detach(), kept_by_both)


def test_the_mask_is_a_copy_of_the_callers():
    module = nn.Linear(8, 8)
    mask = random_mask(module.weight)
    mts.set_mask(module, "weight", mask)
    mask.fill_(False)
    assert next(mts.named_masks(module))[1].any()


def test_set_mask_refuses_what_does_not_fit_and_leaves_the_module_as_it_was():
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("weight_mask", torch.ones(8, 8, dtype=torch.bool))

    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: F.linear(x, replaced.weight)  # type: ignore[method-assign]
    kept = torch.ones(8, 8, dtype=torch.bool)
    for module, name, mask, message in [
        (nn.Linear(8, 8), "wieght", kept, "Linear has no parameter 'wieght'.*full name"),
        (nn.Linear(8, 8), "0.weight", kept, "no parameter '0.weight'"),
        (nn.Linear(8, 8, bias=False), "bias", kept, "no parameter 'bias'"),
        (nn.Linear(8, 8), "weight", kept[:4], r"'weight' is torch.bool \[4, 8\]: it must be torch.bool \[8, 8\]"),
        (nn.Linear(8, 8), "weight", kept.float(), r"torch.float32 \[8, 8\]: it must be torch.bool.*True = kept"),
        (Masked(), "weight", ~kept, "Masked has an attribute 'weight_mask' of its own.*enforce=False"),
        (replaced, "weight", ~kept, "forward of this Linear was replaced on the instance.*subclass"),
    ]:
        before, kind = copy.deepcopy(module.state_dict()), type(module)
        with pytest.raises(ValueError, match=message):
            mts.set_mask(module, name, mask)
        assert type(module) is kind
        assert not list(mts.named_masks(module)) or kind is Masked
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_save_pretrained_hides_masks_only_as_long_as_they_are_there():
    model = tiny_llama()
    before = {name: set(inner._keys_to_ignore_on_save or ()) for name, inner in _pretrained(model)}
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        mts.set_mask(model, name, random_mask(model.get_parameter(name)))
    ignored = {name: set(inner._keys_to_ignore_on_save) - before[name] for name, inner in _pretrained(model)}
    assert ignored == {
        "": {"model.layers.0.mlp.up_proj.weight_mask", "model.layers.1.self_attn.q_proj.weight_mask"},
        "model": {"layers.0.mlp.up_proj.weight_mask", "layers.1.self_attn.q_proj.weight_mask"},
    }
    mts.export(model)
    assert {name: set(inner._keys_to_ignore_on_save or ()) for name, inner in _pretrained(model)} == before


def _pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, inner) for name, inner in model.named_modules() if hasattr(inner, "_keys_to_ignore_on_save"))


def test_repr_shows_the_share_of_zeros_and_needs_no_values():
    module, _ = sparse_linear()
    assert repr(module) == "SparseLinear(in_features=8, out_features=8, bias=True, weight: 50.0% zeros)"
    assert "weight: ? zeros" in repr(module.to("meta"))


# forward ------------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode", "functional_call"])
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
        with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
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
    x = torch.tensor([[1.0, torch.nan]])
    module(x).backward(torch.tensor([[1.0, 2.0]]))
    # d/dw_rc = upstream_r * x_c: column 1 is NaN, and pruned in row 0
    torch.testing.assert_close(module.weight.grad, torch.tensor([[1.0, 0.0], [2.0, torch.nan]]), equal_nan=True)
    module.weight.grad = None
    module(torch.ones(1, 2)).backward(torch.tensor([[1.0, torch.inf]]))
    # row 0 gets 1, row 1 gets inf
    torch.testing.assert_close(module.weight.grad, torch.tensor([[1.0, 0.0], [torch.inf, torch.inf]]))


def test_observer_is_handed_the_gradient_before_masking():
    module, mask = sparse_linear()
    dense = copy.deepcopy(module)
    mts.export(dense)
    seen: list[Tensor] = []
    mts.observe_gradient(module, "weight", seen.append)
    x = torch.randn(3, 8)
    module(x).square().sum().backward()
    dense(x).square().sum().backward()
    (gradient,) = seen
    assert not gradient.requires_grad
    torch.testing.assert_close(gradient, dense.weight.grad)
    assert gradient[~mask].any()
    torch.testing.assert_close(module.weight.grad, dense.weight.grad * mask)

    mts.observe_gradient(module, "weight", None)
    module(x).sum().backward()
    assert len(seen) == 1


def test_observer_is_refused_where_there_is_no_mask():
    with pytest.raises(ValueError, match="'weight' carries no mask; set one with set_mask"):
        mts.observe_gradient(nn.Linear(4, 4), "weight", print)


@every_case
def test_no_masked_copy_of_a_weight_is_kept_for_the_backward_pass(case: Case):
    sparse, _, masks = sparse_and_dense(case)
    for _, mask in mts.named_masks(sparse):
        mask[:] = mask.clone()  # a mask of its own storage
    theirs = {t.untyped_storage().data_ptr() for t in (*sparse.parameters(), *sparse.buffers())}
    shapes = {shape for mask in masks.values() for shape in (mask.shape, mask.shape[::-1])}
    inputs = [torch.randn(11, *x.shape[1:], requires_grad=True) for x in case.inputs()]  # 11 is no weight's size
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output(sparse, *inputs)
    like_weights = [t for t in saved if t.shape in shapes]
    assert like_weights
    assert all(t.untyped_storage().data_ptr() in theirs for t in like_weights)


def test_one_module_used_twice_in_a_graph_sums_both_gradients():
    module, mask = sparse_linear()
    dense = mts.export(copy.deepcopy(module))
    x = torch.randn(3, 8)
    module(module(x).tanh()).sum().backward()
    dense(dense(x).tanh()).sum().backward()
    torch.testing.assert_close(module.weight.grad, dense.weight.grad * mask)


def test_two_modules_can_share_a_sparse_parameter():
    first, mask = sparse_linear()
    pair = nn.Sequential(first, nn.Linear(8, 8))
    pair[1].weight = first.weight
    mts.set_mask(pair, "1.weight", mask)
    pair(torch.ones(1, 8)).sum().backward()
    assert is_plus_zero(first.weight.grad[~mask])
    assert pair[1].weight is first.weight


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


def test_a_weight_changed_between_forward_and_backward_is_still_an_error():
    module, _ = sparse_linear()
    loss = module(torch.ones(1, 8, requires_grad=True)).sum()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool):
    module, mask = sparse_linear()
    plain = copy.deepcopy(module)
    drift(module)
    x = torch.randn(3, 8, requires_grad=True)
    checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    assert is_plus_zero(module.weight.grad[~mask])


def test_mask_set_in_inference_mode_can_be_trained_and_saved():
    module = nn.Linear(8, 8)
    with torch.inference_mode():
        mts.set_mask(module, "weight", mask := random_mask(module.weight))
    module(torch.ones(1, 8)).sum().backward()
    assert is_plus_zero(module.weight.grad[~mask])
    with torch.inference_mode():
        frozen = nn.Linear(8, 8).requires_grad_(False)
        mts.set_mask(frozen, "weight", mask)
        drift(frozen)
    torch.testing.assert_close(frozen(torch.ones(1, 8)), F.linear(torch.ones(1, 8), frozen.weight * mask, frozen.bias))
    assert is_plus_zero(frozen.state_dict()["weight"][~mask])


# torch.func, replicas, threads --------------------------------------------------------------------------------------


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
    torch.testing.assert_close(
        torch.func.hessian(lambda x: module(x).tanh().sum())(x[0]),
        torch.func.hessian(lambda x: dense(x).tanh().sum())(x[0]),
    )


def test_ensemble_of_stacked_modules_uses_each_members_mask():
    members = []
    for seed in (1, 2):
        member = nn.Linear(4, 4)
        mts.set_mask(member, "weight", random_mask(member.weight, seed))
        members.append(member)
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
    copied = torch.randn(8, 8, requires_grad=True)
    replica.weight, replica.bias = copied.clone(), module.bias
    x = torch.randn(3, 8)
    found = replica(x)
    torch.testing.assert_close(found, F.linear(x, copied * mask, module.bias))
    found.sum().backward()
    assert is_plus_zero(copied.grad[~mask])
    assert copied.grad[mask].all()


def test_two_threads_in_the_same_module_at_the_same_time_do_not_meet():
    meet = threading.Barrier(2, timeout=20)

    class Meeting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            meet.wait()  # both are inside now
            found = super().forward(x)
            meet.wait()
            return found

    module = Meeting(8, 8)
    parameter, mask = module.weight, random_mask(module.weight)
    mts.set_mask(module, "weight", mask)
    reference = F.linear
    weight, bias = parameter.detach().clone(), module.bias.detach().clone()
    problems: list[str] = []

    def work(index: int) -> None:
        for step in range(5):
            x = torch.full((2, 8), float(10 * index + step))
            with torch.set_grad_enabled(index == 0):
                found = module(x)
            if not torch.allclose(found, reference(x, weight, bias)):
                problems.append(f"thread {index}, step {step}: wrong output")
            if module.weight is not parameter or module._parameters["weight"] is not parameter:
                problems.append(f"thread {index}, step {step}: the Parameter is not in its place")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# what a forward does to its own module ------------------------------------------------------------------------------


def test_what_a_forward_keeps_on_itself_stays_with_the_module():
    module = Scaled(8, 6)
    mts.set_mask(module, "weight", random_mask(module.weight))
    dense = mts.export(copy.deepcopy(module))
    for _ in range(2):
        torch.testing.assert_close(module(torch.ones(3, 8)), dense(torch.ones(3, 8)))
    assert module.calls == dense.calls == 2
    assert module.seen == dense.seen == 6
    assert "seen" in module._buffers


def test_attributes_set_deleted_or_set_before_an_error_are_what_the_dense_module_would_have():
    class Untidy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            if hasattr(self, "once"):
                del self.once
            self.bias = nn.Parameter(self.bias.detach() + 1)
            if len(x) == 0:
                raise RuntimeError("no input")
            return super().forward(x)

    module = Untidy(8, 8)
    mts.set_mask(module, "weight", random_mask(module.weight))
    module.once = True
    bias = module.bias.detach().clone()
    module(torch.ones(1, 8))
    assert not hasattr(module, "once")
    with pytest.raises(RuntimeError, match="no input"):
        module(torch.ones(0, 8))
    assert module.calls == 2
    torch.testing.assert_close(module.bias.detach(), bias + 2)
    assert isinstance(module.bias, nn.Parameter)


def test_a_forward_that_replaces_its_weight_leaves_a_parameter():
    class Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.detach() / self.weight.detach().norm())
            return super().forward(x)

    module = Normed(8, 8)
    mts.set_mask(module, "weight", mask := random_mask(module.weight))
    module(torch.ones(1, 8))
    assert isinstance(module.weight, nn.Parameter)
    torch.testing.assert_close(module.weight.norm().item(), 1.0)
    assert is_plus_zero(module.weight.detach()[~mask])


# accelerate's hooks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offloaded", [False, True])
def test_modules_with_accelerate_hooks_run_masked_and_come_back(offloaded: bool):
    """The hook binds the old forward to the instance: the mask must be enforced under it all the same."""
    model = nn.Sequential(nn.Linear(8, 8))
    (module,) = model
    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(module).__name__)
            return args, kwargs

    if offloaded:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        add_hook_to_module(module, Counting())
    mask = random_mask(torch.empty(8, 8))
    mts.set_mask(model, "0.weight", mask)
    held = module._hf_hook.weights_map["weight"] if offloaded else module.weight.data
    bias = module._hf_hook.weights_map["bias"] if offloaded else module.bias.data
    assert is_plus_zero(held[~mask])
    held.fill_(1.0)  # drift that only a masked forward can undo
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 8)), mask.float().sum(1)[None] + bias)
    if not offloaded:
        model(torch.ones(1, 8)).sum().backward()
        assert is_plus_zero(module.weight.grad[~mask])
        assert calls == ["SparseLinear"] * 2

    mts.export(model)
    assert type(module) is nn.Linear
    torch.testing.assert_close(model(torch.ones(1, 8)).detach(), mask.float().sum(1)[None] + bias)


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
    module.zero_grad()
    module(torch.ones(1, 8)).sum().backward()
    assert module.weight.grad.all()


def test_attention_with_a_hook_reads_its_output_projection_masked():
    """Its own class is swapped as well, because it reads that weight itself."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    add_hook_to_module(attention, ModelHook())
    mts.set_mask(attention, "out_proj.weight", random_mask(attention.out_proj.weight))
    x = torch.randn(2, 3, 8)
    expected = output(attention, x, x, x)
    drift(attention)
    with torch.no_grad():
        torch.testing.assert_close(output(attention, x, x, x), expected)


def test_export_leaves_alone_a_forward_that_others_have_wrapped_since():
    """As accelerate's prepare wraps the forward of a whole model, here a single layer, for mixed precision."""
    module, _ = sparse_linear()
    module.forward = functools.partial(type(module).forward, module)
    mts.export(module)
    assert not list(mts.named_masks(module))
    module(torch.ones(1, 8)).sum().backward()
    assert module.weight.grad.all()


# state dicts, copies, pickles ---------------------------------------------------------------------------------------


@every_case
def test_state_dict_has_weight_and_mask_and_loads_back(case: Case):
    sparse, dense, masks = sparse_and_dense(case)
    state = sparse.state_dict()
    assert state.keys() == dense.state_dict().keys() | {f"{name}_mask" for name in masks}
    for name, mask in masks.items():
        assert torch.equal(state[f"{name}_mask"], mask)
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
    holder, dense_holder = nn.ModuleDict({"inner": module}), nn.ModuleDict({"inner": dense})
    for parameter in dense.parameters():
        parameter.data.normal_()
    state = dense_holder.state_dict()
    given = copy.deepcopy(state)
    result = holder.load_state_dict(given, strict=True, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    torch.testing.assert_close(dict(given), dict(state), rtol=0, atol=0)  # the caller's dict and tensors are untouched
    for name, mask in masks.items():
        assert torch.equal(
            module.get_parameter(name).detach(), dense.get_parameter(name).detach().masked_fill(~mask, 0)
        )
        assert torch.equal(dict(mts.named_masks(module))[name], mask)
    inputs = case.inputs()
    with torch.no_grad():
        for name, mask in masks.items():
            dense.get_parameter(name)[~mask] = 0
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


def test_unexpected_and_missing_keys_are_still_reported():
    module, _ = sparse_linear()
    state = nn.Linear(8, 8).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        module.load_state_dict({**state, "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        module.load_state_dict({"weight": state["weight"]})


def test_state_dict_restores_zeros_that_something_wrote_over():
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    for name in ("0.weight", "1.in_proj_weight", "1.out_proj.weight"):
        mts.set_mask(model, name, random_mask(model.get_parameter(name)))
    drift(model)
    state = model.state_dict()
    for name, mask in mts.named_masks(model):
        assert is_plus_zero(state[name][~mask])
        assert state[name][mask].all()
    assert at_rest(model)


def through_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch_save,
    **{
        f"pickle{protocol}": lambda module, protocol=protocol: pickle.loads(pickle.dumps(module, protocol))
        for protocol in (2, 3, 4, 5)
    },
}


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
    assert at_rest(module)
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
    assert at_rest(module)


# torch.compile and torch.export -------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module, backend: str = "aot_eager_decomp_partition") -> Callable[..., Any]:
    """Dynamo, AOTAutograd and the partitioner of the default backend, without its code generation."""
    return torch.compile(module, fullgraph=True, backend=backend)


COMPILED = ("linear", "conv2d", "hf_conv1d", "attention", "attention_separate", "own_parameter")


@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_modules_ignore_what_lies_under_the_mask_and_give_the_same_gradients(name: str):
    case = CASES[name]
    sparse, dense, masks = sparse_and_dense(case)
    drift(sparse)
    fast = compiled(sparse)
    inputs, inputs_dense = case.inputs(), case.inputs()
    found = fast(*inputs)
    found, expected = found[0] if isinstance(found, tuple) else found, output(dense, *inputs_dense)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), reference in zip(sparse.named_parameters(), dense.parameters()):
        reference = reference.grad if name not in masks else reference.grad.masked_fill(~masks[name], 0)
        torch.testing.assert_close(parameter.grad, reference)
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in inputs_dense])
    with torch._dynamo.config.patch(error_on_recompile=True):
        fast(*inputs)
    with torch.no_grad():
        drift(sparse)
        again = fast(*inputs)
        torch.testing.assert_close(again[0] if isinstance(again, tuple) else again, expected)


@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_subclass_follows_its_attributes():
    class Adjustable(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.factor, self.calls = 2.0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (self.factor if self.training else 1.0)

    module = Adjustable()
    mts.set_mask(module, "weight", random_mask(module.weight))
    fast, x = compiled(module, "eager"), torch.randn(3, 8)
    for change in (lambda: None, lambda: setattr(module, "factor", 3.0), module.eval):
        change()
        found, calls = fast(x), module.calls
        torch.testing.assert_close(found, module(x))
        assert module.calls == calls + 1
    assert module.calls == 6


@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_graphs_keep_no_masked_copy_for_the_backward_pass():
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))
    for index in (0, 2, 4):
        mts.set_mask(model, f"{index}.weight", random_mask(model[index].weight))
    theirs = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    shapes = {shape for _, mask in mts.named_masks(model) for shape in (mask.shape, mask.shape[::-1])}
    fast, x = compiled(model), torch.randn(5, 16)
    fast(x)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = fast(x).sum()
    like_weights = [t for t in saved if t.shape in shapes]
    assert like_weights
    assert all(t.untyped_storage().data_ptr() in theirs for t in like_weights)
    loss.backward()
    assert model[2].weight.grad.any()


@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its new name is newer than 5.0
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_llama_trains_and_keeps_its_zeros(checkpointed: bool):
    model = tiny_llama(num_hidden_layers=1)
    mts.sparsify(model, "magnitude", progress=False)
    eager = copy.deepcopy(model)
    if checkpointed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    (tokens,) = token_batches(1)
    losses = {}
    for name, each, run in (("compiled", model, compiled(model)), ("eager", eager, eager)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(3):
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert at_rest(model)
    assert losses["compiled"][-1] < 0.9 * losses["compiled"][0]
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-3)


@pytest.mark.slow
@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
def test_default_compiler_backend_trains_and_keeps_zeros():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    for index in (0, 2):
        mts.set_mask(model, f"{index}.weight", random_mask(model[index].weight))
    fast = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    losses = []
    for _ in range(10):
        loss = F.mse_loss(fast(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert at_rest(model)


@own_deprecations
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_masks_its_weights(strict: bool):
    module, _ = sparse_linear()
    program = torch.export.export(module, (torch.ones(1, 8),), strict=strict)
    expected = module(torch.ones(1, 8))
    drift(module)
    torch.testing.assert_close(program.module()(torch.ones(1, 8)), expected)
