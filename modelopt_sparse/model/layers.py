"""Layers: prunable weights, how each type of them is seen as a matrix [..., R, C], and which rows [..., T, C] it is
multiplied with.

Shape letters: R rows (out features), C columns (in features), T tokens, K kernel positions, I input channels per
group, E experts. Leading dimensions are independent matrices (convolution groups; q, k and v of a fused projection;
experts, which are in model/experts.py).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.model.devices import parameter_of, stored
from modelopt_sparse.model.forwards import has_own_forward, is_other, why_other
from modelopt_sparse.model.masking import dense_class, named_masks

# for each input of a layer a bool mask shaped like it without its last dimension, True = a real token, False = padding;
# None: there is no padding
TokenMasks = Sequence[Tensor | None]


# how a weight is seen as a matrix -------------------------------------------------------------------------------------


class Adapter:
    """How one type of weight is seen as a matrix, and how its inputs are read: here that of nn.Linear.

    Adapters hold no state, and there is one instance of each.

    ``module`` is in each method the module that holds the weight. ``argument`` is the name of the module's input.
    """

    argument = "input"

    def matrix(self, module: Any, weight: Tensor) -> Tensor:
        """Weight as the module holds it -> ``[..., R, C]`` (a view where the layout allows it)."""
        return weight

    def unmatrix(self, module: Any, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix

    def columns(self, module: Any, weight: Tensor) -> int:
        """How many consecutive input channels there are for N:M groups to lie in."""
        return self.matrix(module, weight).shape[-1]

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """The tensors that the weight is multiplied with in one call of the hooked module, from its arguments."""
        return (args[0] if args else kwargs[self.argument],)

    def rows(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> Iterator[Tensor]:
        """Inputs as chunks of rows ``[..., T, C]``, padding left out."""
        yield from map(real_rows, inputs, token_masks)

    def signature(self, module: Any) -> tuple:
        """Layers with the same input share statistics only if their signatures are equal."""
        return ()


def real_rows(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """``[..., C]`` as ``[T, C]``, without padding."""
    return x.reshape(-1, x.shape[-1]) if token_mask is None else x[token_mask]


class _HFConv1DAdapter(Adapter):
    """transformers' Conv1D (GPT-2): a linear layer whose weight is stored as [in, out]."""

    argument = "x"

    def matrix(self, module: Any, weight):
        return weight.mT

    def unmatrix(self, module: Any, matrix):
        return matrix.mT.contiguous()


class _ConvAdapter(Adapter):
    """Convolutions: [out, I, *kernel] as [groups, out / groups, K * I], input channels innermost.

    So an N:M group lies along the input channels at one kernel position, as 2:4 hardware reads the weight.
    """

    def matrix(self, module: Any, weight):
        matrix = weight.movedim(1, -1).flatten(1)
        return matrix if module.groups == 1 else matrix.unflatten(0, (module.groups, -1))

    def unmatrix(self, module: Any, matrix):
        kernel = module.kernel_size
        weight = matrix if module.groups == 1 else matrix.flatten(0, 1)
        return weight.unflatten(1, (*kernel, -1)).movedim(-1, 1).contiguous()

    def columns(self, module: Any, weight):
        return weight.shape[1]

    def rows(self, module: Any, inputs, token_masks):
        (x,), (token_mask,) = inputs, token_masks
        assert token_mask is None  # patches mix padding with real tokens; the run refuses such inputs before
        spatial = len(module.kernel_size)
        if x.dim() == spatial + 1:  # unbatched
            x = x.unsqueeze(0)
        x = _pad(module, x)
        # one sample at a time, or more while the unfolded rows stay small
        unfolded = max(x[0].numel() * math.prod(module.kernel_size), 1)
        for chunk in x.split(max(2**24 // unfolded, 1)):
            patches = chunk
            for dim in range(spatial):
                kernel, stride, dilation = module.kernel_size[dim], module.stride[dim], module.dilation[dim]
                span = dilation * (kernel - 1) + 1
                patches = patches.unfold(2 + dim, span, stride)[..., ::dilation]
            # [B, channels, *positions, *kernel] -> [groups, T, K * I]
            patches = patches.unflatten(1, (module.groups, -1))
            order = [1, 0, *range(3, 3 + 2 * spatial), 2]
            rows = patches.permute(order).flatten(1, 1 + spatial).flatten(2)
            yield rows[0] if module.groups == 1 else rows

    def signature(self, module: Any):
        padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
        shape = (tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation))
        return (*shape, module.groups, padding, module.padding_mode)


def _pad(module: Any, x: Tensor) -> Tensor:
    """``x`` with the padding that the convolution itself would add, in each of torch's modes."""
    if module.padding == "valid":
        return x
    sides: list[int] = []
    for dim in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[dim] * (module.kernel_size[dim] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [module.padding[dim]] * 2
    return F.pad(x, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


class _InProjAdapter(Adapter):
    """nn.MultiheadAttention's fused in_proj_weight [3E, E] as [3, E, E]: q, k and v, each with its own input."""

    def matrix(self, module: Any, weight):
        return weight.unflatten(0, (3, -1))

    def unmatrix(self, module: Any, matrix):
        return matrix.flatten(0, 1)

    def inputs(self, module: Any, args, kwargs):
        q, k, v = _query_key_value(args, kwargs)
        return (q,) if q is k and k is v else (q, k, v)

    def rows(self, module: Any, inputs, token_masks):
        flat = [*map(real_rows, inputs, token_masks)]
        if len(flat) == 1:
            yield flat[0]  # one Gram matrix serves all three
            return
        longest = max(len(x) for x in flat)  # keys may be longer than queries; zero rows add nothing to the sums
        yield torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in flat])

    def signature(self, module: Any):
        return ("in_proj",)


class _SeparateProjAdapter(Adapter):
    """nn.MultiheadAttention's q_proj_weight, k_proj_weight or v_proj_weight (kdim or vdim given)."""

    def __init__(self, position: int) -> None:
        self.position = position

    def inputs(self, module: Any, args, kwargs):
        return (_query_key_value(args, kwargs)[self.position],)


class _WithoutHooks(nn.Module):
    """Calls a module's forward without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


class _OutProjAdapter(Adapter):
    """nn.MultiheadAttention's out_proj: a Linear whose weight the attention reads without calling it.

    Its input is what the attention returns when the output projection is replaced by the identity (and its mask by
    one that is True everywhere).
    """

    def inputs(self, module: Any, args, kwargs):
        weight, bias = module.out_proj.weight, module.out_proj.bias
        replaced = {"module.out_proj.weight": torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device)}
        if bias is not None:
            replaced["module.out_proj.bias"] = torch.zeros_like(bias)
        for name, mask in module.out_proj.named_buffers():
            replaced[f"module.out_proj.{name}"] = torch.ones_like(mask)
        # its own hooks have run: the arguments are as they left them
        return (torch.func.functional_call(_WithoutHooks(module), replaced, args, kwargs)[0],)


class RowAdapter(Adapter):
    """A parameter that is no layer (a bias, a norm, an embedding), as one row ``[1, numel]``; it reads no input."""

    def __init__(self, param: str) -> None:
        self.param = param

    def matrix(self, module: Any, weight):
        return weight.reshape(1, -1)

    def unmatrix(self, module: Any, matrix):
        return matrix.reshape(module.get_parameter(self.param).shape)

    def inputs(self, module: Any, args, kwargs):
        return ()


def _query_key_value(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    names = ("query", "key", "value")
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))  # type: ignore[return-value]


LINEAR, HF_CONV1D, CONV = Adapter(), _HFConv1DAdapter(), _ConvAdapter()
IN_PROJ, OUT_PROJ = _InProjAdapter(), _OutProjAdapter()
SEPARATE_PROJ = {f"{letter}_proj_weight": _SeparateProjAdapter(i) for i, letter in enumerate("qkv")}


# layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One prunable parameter, ``owner.param``, and where its input is read.

    name: the module's path, or the parameter's full name if it is not called "weight".
    parameter_name: as in ``model.named_parameters()``.
    owner, param: the module that holds the parameter, and the parameter's name there.
    adapter: how the weight is seen as a matrix, and which rows it is multiplied with.
    hooked_modules: the modules whose arguments hold the input.
    tied_modules: further modules that hold the same Parameter under the same name (a tied pair of Linears).
    tied_names: the names that the layer has there.
    router: of experts that are called with sorted rows; its second output says which token each row is.
    mixture: of an expert that is a module of its own in a list or dict: the layer's module path with ``*`` in the place
      of the expert's index. All experts of a mixture share it.
    """

    name: str
    parameter_name: str
    owner: nn.Module
    param: str
    adapter: Adapter
    hooked_modules: tuple[nn.Module, ...]
    tied_modules: tuple[nn.Module, ...] = ()
    tied_names: tuple[str, ...] = ()
    router: nn.Module | None = None
    mixture: str | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return parameter_of(self.owner, self.param)

    @property
    def parameter_names(self) -> list[str]:
        """All names of the parameter in the model."""
        ending = ".weight" if self.param == "weight" else ""
        return [self.parameter_name, *(f"{name}{ending}" for name in self.tied_names)]

    @property
    def values(self) -> Tensor:
        """The tensor that holds the parameter's values: accelerate may hold them elsewhere between calls."""
        return stored(self.owner, self.param).detach()

    @property
    def mask(self) -> Tensor | None:
        """The mask that all modules which hold the parameter agree on, True = kept, ``[..., R, C]``; None without."""
        masks = [dict(named_masks(module)).get(self.param) for module in (self.owner, *self.tied_modules)]
        carried = [self.matrix(mask) for mask in masks if mask is not None]
        return functools.reduce(torch.logical_and, carried) if carried else None

    def matrix(self, weight: Tensor) -> Tensor:
        return self.adapter.matrix(self.owner, weight)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        return self.adapter.unmatrix(self.owner, matrix)

    def columns(self, weight: Tensor) -> int:
        return self.adapter.columns(self.owner, weight)

    @property
    def own_forwards(self) -> list[nn.Module]:
        """The modules that multiply with the weight and whose forward is not that of a library."""
        modules = (self.owner, *self.tied_modules) if self.adapter in (LINEAR, HF_CONV1D, CONV) else ()
        return [module for module in modules if has_own_forward(module, dense_class(module))]

    def is_other(self, x: Tensor | None = None) -> bool | None:
        """Whether one of these makes something else of an input than its class says; see `forwards.is_other`."""
        tried = {is_other(module, dense_class(module), x) for module in self.own_forwards}
        return True if True in tried else None if None in tried else False

    @property
    def why_other(self) -> str:
        """Why it stays dense if one does."""
        return why_other(dense_class(self.owner))


def as_row(model: nn.Module, parameter_name: str) -> Layer:
    """A parameter that is no prunable layer, as a layer of one row that has no input. Its name is the parameter's.

    Raises AttributeError if the model has no such parameter.
    """
    path, _, param = parameter_name.rpartition(".")
    owner = model.get_submodule(path)
    parameter_of(owner, param)
    return Layer(parameter_name, parameter_name, owner, param, RowAdapter(param), ())
