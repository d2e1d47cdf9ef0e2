"""Cases of modules that carry masks, and what is asked of them."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as HFConv1D

import modelopt_sparse as mts


class Scaled(nn.Linear):
    """A user's subclass with its own forward, an attribute and a buffer that the forward updates, and a property."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    @property
    def scale(self) -> float:
        return 1.0 + self.calls / 100  # the product is still the one of nn.Linear but for rounding

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


def through_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "torch.save": through_torch_save}
COPIES |= {f"pickle{p}": lambda module, p=p: pickle.loads(pickle.dumps(module, p)) for p in (2, 3, 4, 5)}

# torch 2.13's own compiler and torch.func call functions that torch has deprecated
own_deprecations = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
written_on_purpose = pytest.mark.filterwarnings("ignore:.* were written to pruned places:UserWarning")


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


def lost_zeros(module: nn.Module) -> list[str]:
    """The masked parameters that are not exactly +0.0 at every pruned place, looked at as they are: to call the module,
    its state dict or an attribute of it would zero them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [name for name, mask in mts.named_masks(module) if not is_plus_zero(parameters[name].detach()[~mask])]
