"""A forward zeroes a weight after whatever may have written to it, and only then."""

import pickle
import threading
from collections.abc import Callable
from operator import methodcaller

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import modelopt_sparse as mts
from modelopt_sparse.model import masking
from modelopt_sparse.model.masking import MaskedParameter, write_zeros
from tests.model.sparse_modules import (
    CASES,
    COPIES,
    Case,
    every_case,
    is_plus_zero,
    lost_zeros,
    output,
    random_mask,
    sparse_and_dense,
    sparse_linear,
    written_on_purpose,
)

pytestmark = written_on_purpose

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(11))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights that were zeroed since `clear`."""
    seen, write = [], masking.write_zeros

    def counted(tensor: Tensor, mask: Tensor) -> None:
        seen.append(tensor.shape)
        write(tensor, mask)

    monkeypatch.setattr(masking, "write_zeros", counted)
    return seen


def masked_output(module: nn.Linear, mask: Tensor) -> Tensor:
    """By hand, from a copy of whatever the weight holds."""
    weight = module.weight.detach().clone()
    weight[~mask] = 0
    return F.linear(X, weight, module.bias)


# writes ---------------------------------------------------------------------------------------------------------------

VALUES = torch.randn(8, 8, generator=torch.Generator().manual_seed(12))


def other_values() -> dict[str, Tensor]:
    return {"weight": VALUES.clone(), "bias": torch.ones(8)}


def moving_average(module: nn.Linear) -> None:
    """Weights averaged without masks, swapped in as trainers do."""
    for parameter in module.parameters():
        parameter.data.copy_(parameter.detach() * 0.9 + 0.1)


def to_another_type_and_back(module: nn.Linear) -> None:
    module.double().type(torch.float32)
    module.weight.data[0] = 4.0


def another_thread(module: nn.Linear) -> None:
    thread = threading.Thread(target=torch.no_grad()(lambda: module.weight.add_(1)))
    thread.start()
    thread.join()


def inference_mode(module: nn.Linear) -> None:
    with torch.inference_mode():
        module.weight.add_(1)


def manual_step(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[nn.Linear], None]:
    """A step with a dense gradient, as one has it that comes from elsewhere; the gradient stays, as after backward."""

    def write(module: nn.Linear) -> None:
        module.weight.grad = VALUES.clone()
        make([module.weight]).step()

    return write


STEPS = {
    f"{kind.__name__} {name}": manual_step(lambda weights, kind=kind, options=options: kind(weights, lr=0.1, **options))
    for kind in (torch.optim.SGD, torch.optim.AdamW)
    for name, options in {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items()
}


def fused_step_whose_gradient_goes(module: nn.Linear) -> None:
    STEPS["AdamW fused"](module)
    module.zero_grad()


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "add": lambda m: m.weight.add_(1),
    "copy": lambda m: m.weight.copy_(VALUES),
    "index": lambda m: m.weight.__setitem__(slice(2, 5), 3.0),
    "through a detached tensor": lambda m: m.weight.detach().add_(1),
    "through a view": lambda m: m.weight.view(-1)[::3].fill_(5.0),
    "as output": lambda m: torch.mul(VALUES, 2, out=m.weight),
    "foreach": lambda m: torch._foreach_add_([m.weight], 1.0),
    "foreach of data": lambda m: torch._foreach_add_([m.weight.data], 1.0),
    "add to data": lambda m: m.weight.data.add_(1),
    "copy to data": lambda m: m.weight.data.copy_(VALUES),
    "set data": lambda m: setattr(m.weight, "data", VALUES.clone()),
    "copy to the storage": lambda m: m.weight.untyped_storage().copy_(VALUES.untyped_storage()),
    "set the storage": lambda m: m.weight.set_(VALUES.clone()),
    "vector": lambda m: vector_to_parameters(torch.randn(72), m.parameters()),
    "load": lambda m: m.load_state_dict(other_values()),
    "load and assign": lambda m: m.load_state_dict(other_values(), assign=True),
    "new parameter": lambda m: setattr(m, "weight", nn.Parameter(VALUES.clone())),
    **{write.__name__: write for write in (moving_average, to_another_type_and_back, another_thread, inference_mode)},
    **STEPS,
    "fused step, gradient gone": fused_step_whose_gradient_goes,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_forward_after_a_write_is_masked_and_the_next_one_costs_nothing(write, mode, passes: list):
    module, mask = sparse_linear()
    with mode():
        module(X)
    with torch.no_grad():
        write(module)
    expected = masked_output(module, mask)
    with mode():
        assert torch.equal(module(X), expected)
        assert is_plus_zero(module.weight[~mask])
        module.weight.grad = None  # a step that may follow a gradient is always feared
        module(X)
        passes.clear()
        assert torch.equal(module(X), expected)
    assert not passes


def test_a_fused_optimizer_that_moves_pruned_weights_is_seen_whenever_gradients_go():
    """It does not count up the version. Its momentum is older than the mask, so it writes under it."""
    module = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True)
    module(X).sum().backward()
    optimizer.step()
    mts.set_mask(module, "weight", mask := random_mask(module.weight))
    for order in ("forward, evaluation, backward", "evaluation, forward, backward"):
        outputs = {}
        for part in order.split(", ")[:2]:
            with torch.set_grad_enabled(part == "forward"):
                outputs[part] = module(X)
        outputs["forward"].sum().backward()
        weight = module.weight  # to read the attribute zeros it
        version = weight._version
        optimizer.step()
        assert weight._version == version
        assert weight[~mask].any()
        optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(module(X), masked_output(module, mask)), order


@every_case
def test_a_forward_without_gradients_runs_on_the_parameters_themselves(case: Case, passes: list):
    sparse, dense, _ = sparse_and_dense(case)
    inputs = case.inputs()
    pointers = {p.untyped_storage().data_ptr() for p in sparse.parameters()}
    with torch.no_grad():
        for _ in range(2):
            passes.clear()
            torch.testing.assert_close(output(sparse, *inputs), output(dense, *inputs))
        assert not passes
    assert {p.untyped_storage().data_ptr() for p in sparse.parameters()} == pointers


def test_frozen_weights_cost_nothing_with_gradients_either(passes: list):
    module, mask = sparse_linear()
    module.requires_grad_(False)
    x = X.clone().requires_grad_()
    module(x)
    passes.clear()
    module(x).sum().backward()
    assert not passes
    torch.testing.assert_close(x.grad, (module.weight * mask).sum(0).expand(3, 8))


@pytest.mark.parametrize("write", [lambda m: m.weight.add_(1), lambda m: mts.set_mask(m, "weight", ~m.weight_mask)])
def test_a_graph_that_was_made_with_other_values_is_not_used(write):
    """A mask that is set counts as a write."""
    module = sparse_linear()[0].requires_grad_(False)
    loss = module(X.clone().requires_grad_()).sum()
    write(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_mask_that_is_changed_in_place_is_seen(passes: list):
    module, mask = sparse_linear()
    with torch.no_grad():
        module(X)
        module.weight_mask[0] = False
        expected = masked_output(module, module.weight_mask)
        assert torch.equal(module(X), expected)
        assert is_plus_zero(module.weight[0])
        module.weight_mask.copy_(mask)  # back: what was zeroed stays zero
        assert torch.equal(module(X), expected)
        passes.clear()
        module(X)
    assert not passes


def test_all_masks_of_a_module_are_asked_for():
    module, mask = sparse_linear()
    mts.set_mask(module, "bias", kept := torch.arange(8) % 2 == 0)
    with torch.no_grad():
        module(X)
        for name in ("bias", "weight"):
            module.get_parameter(name).data.fill_(3.0)
            assert torch.equal(module(X), F.linear(X, module.weight * mask, 3.0 * kept))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("make", [torch.fx.symbolic_trace, lambda model: torch.jit.trace(model, X)])
@pytest.mark.parametrize("module", [lambda: sparse_linear()[0], lambda: sparse_and_dense(CASES["own_parameter"])[0]])
def test_graphs_that_run_later_have_the_mask_inside(make, module, gradients: bool):
    model = nn.Sequential(module())
    with torch.set_grad_enabled(gradients):
        expected = model(X).detach()
        graph = make(model)
    for name, mask in mts.named_masks(model):
        model.get_parameter(name).data[~mask] = 7.0
    with torch.no_grad():
        torch.testing.assert_close(graph(X), expected)


def test_weights_that_autocast_has_cast_are_not_cast_again_and_a_new_mask_holds_in_the_next_forward():
    """As of a dense module: casts of a Parameter live as long as the region, whoever writes to it."""
    module, mask = sparse_linear()
    casts = []

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].shape == (8, 8):
                casts.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module(X)
        with Casts():
            module(X)
            module(X)
        assert len(casts) <= 1
        mts.set_mask(module, "weight", torch.zeros_like(mask))
        assert torch.equal(module(X), module.bias.bfloat16().expand(3, 8))


@pytest.mark.parametrize("made", ["weight", "mask", "both"])
def test_tensors_made_in_inference_mode_are_masked_in_each_call(made: str):
    """They have no version."""
    with torch.inference_mode(made != "mask"):
        module = nn.Linear(8, 8).requires_grad_(False)
    mask = random_mask(module.weight)
    mts.set_mask(module, "weight", mask)
    if made != "weight":
        with torch.inference_mode():
            module.weight_mask = mask.clone()
    for _ in range(2):
        with torch.inference_mode():
            module.weight.add_(1)
        with torch.no_grad():
            assert torch.equal(module(X), masked_output(module, mask))


CALLS: dict[str, Callable[[nn.Module], object]] = {"apply_masks": mts.apply_masks, "export": mts.export}
CALLS |= {name: methodcaller(name) for name in ("train", "eval", "state_dict")}


@pytest.mark.parametrize("how", CALLS)
def test_calls_that_zero_whatever_wrote(how: str):
    """NumPy's alias is one that no forward can see."""
    module, mask = sparse_linear()
    alias = module.weight.detach().numpy()
    module.train(how != "train")
    with torch.no_grad():
        module(X)
    alias[:] = 2.0
    CALLS[how](module)
    assert is_plus_zero(module.weight.detach()[~mask])
    assert (module.weight.detach()[mask] == 2).all()


def test_evaluation_between_forward_and_backward_is_no_write():
    """Zeros written again are the zeros that the forward has used."""
    module, mask = sparse_linear()
    loss = module(X).sum()
    for how in ("eval", "state_dict", "apply_masks", "train"):
        CALLS[how](module)
    loss.backward()
    assert is_plus_zero(module.weight.grad[~mask])


# copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [COPIES[how] for how in ("deepcopy", "pickle4", "torch.save")])
def test_copies_watch_their_own_weights(make: Callable[[nn.Module], nn.Module], passes: list):
    module, mask = sparse_linear()
    module.weight.requires_dense = True  # an attribute of the user's
    with torch.no_grad():
        expected = module(X)
        other = make(module)
        other.weight.data.add_(1)
        assert torch.equal(other(X), masked_output(other, mask))
        passes.clear()
        other(X)
        assert not passes
        assert torch.equal(module(X), expected)
        module.weight.data.add_(1)
        assert torch.equal(module(X), masked_output(module, mask))
    assert not lost_zeros(other)


def test_pickles_hold_nothing_of_this_package():
    """A state dict that was pickled whole is read where this package is not installed."""
    module, _ = sparse_linear()
    module.weight.requires_dense = True
    with torch.no_grad():
        module(X)
    data = pickle.dumps(dict(module.named_parameters()))
    assert b"modelopt_sparse" not in data
    weight = pickle.loads(data)["weight"]
    assert type(weight) is nn.Parameter
    assert weight.requires_dense
    assert torch.equal(weight, module.weight)


def test_the_callers_parameters_are_not_written_to():
    """Neither plain ones nor those of another sparse module, which has a mask of its own."""
    module, mask = sparse_linear()
    other = nn.Linear(8, 8)
    mts.set_mask(other, "weight", ~mask)
    for weight in (nn.Parameter(VALUES.clone()), other.weight):
        before = weight.detach().clone()
        with torch.no_grad():
            result = torch.func.functional_call(module, {"weight": weight}, (X,))
        assert torch.equal(weight, before)
        torch.testing.assert_close(result, F.linear(X, before * mask, module.bias))


def test_tied_weights_are_zero_under_both_masks():
    first, mask = sparse_linear()
    second = nn.Linear(8, 8)
    second.weight = first.weight
    mts.set_mask(second, "weight", other := random_mask(first.weight, seed=4))
    with torch.no_grad():
        first.weight.data.fill_(1.0)
        first(X)
        second(X)
    assert torch.equal(first.weight.detach(), (mask & other).float())
    mts.export(second)
    assert type(first.weight) is MaskedParameter
    mts.export(first)
    assert type(first.weight) is nn.Parameter
    assert not first.weight.__dict__


def test_a_swapped_tensor_is_seen():
    module, mask = sparse_linear()
    with torch.no_grad():
        module(X)
        torch.utils.swap_tensors(module.weight, nn.Parameter(VALUES.clone()))
        for _ in range(2):
            assert torch.equal(module(X), masked_output(module, mask))


# bits -----------------------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
DTYPES += [torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["small", "large", "transposed", "experts", "empty", "scalar"])
def test_zeros_are_written_bit_by_bit(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch):
    """NaN, infinities and -0.0 become +0.0 where they are pruned, and stay what they are where they are kept."""
    monkeypatch.setattr(masking, "PIECE", 1024)
    shape = {"small": (3, 5), "experts": (4, 30, 40), "empty": (0, 8), "scalar": ()}.get(layout, (70, 90))
    values = torch.randn(shape).clamp(-2, 2).to(dtype)
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        if place < values.numel() and (dtype != torch.float8_e4m3fn or value == 0):
            values.view(-1)[place::7] = torch.tensor(value).to(dtype)
    if layout == "transposed":
        values = values.t()
    mask = torch.rand(values.shape) > 0.5
    expected = torch.where(mask.unsqueeze(-1), bits(values), 0)
    write_zeros(values, mask)
    assert torch.equal(bits(values), expected)


def bits(tensor: Tensor) -> Tensor:
    """[..., bytes of a number]"""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(*tensor.shape, tensor.element_size()).clone()


def test_a_gradient_that_somebody_else_has_too_stays_as_it_is():
    """Addition hands one gradient tensor to both of its inputs."""

    module = nn.Module()
    module.left, module.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    mts.set_mask(module, "left", torch.tensor([True, False, True, False]))
    (module.left + module.right).backward(torch.arange(1.0, 5.0))
    assert (module.left.grad.tolist(), module.right.grad.tolist()) == ([1, 0, 3, 0], [1, 2, 3, 4])
