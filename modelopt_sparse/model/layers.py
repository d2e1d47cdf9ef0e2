"""What is prunable: modules' weights as matrices [..., R, C], and the inputs that meet them as rows [..., T, C].

Shape letters: R rows (out features), C columns (in features), T tokens, K kernel positions, I input channels per
group. Leading dimensions are independent matrices (convolution groups; q, k and v of a fused projection).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as HFConv1D

from modelopt_sparse.model.adapters import Kind
from modelopt_sparse.model.experts import Mixture, expert_kind, find_mixtures


class _LinearKind(Kind):
    title = "Linear"

    def inputs(self, module: Any, args, kwargs):
        return (args[0] if args else kwargs["input"],)


class _HFConv1DKind(_LinearKind):
    """transformers' Conv1D (GPT-2): a linear layer whose weight is stored as [in, out]."""

    title = "Conv1D"

    def matrix(self, module: Any, weight):
        return weight.mT

    def unmatrix(self, module: Any, matrix):
        return matrix.mT.contiguous()

    def inputs(self, module: Any, args, kwargs):
        return (args[0] if args else kwargs["x"],)


class _ConvKind(Kind):
    """Convolutions: [out, I, *kernel] as [groups, out / groups, K * I], input channels innermost.

    So an N:M group lies along the input channels at one kernel position, as 2:4 hardware reads it.
    """

    title = "Conv"

    def matrix(self, module: Any, weight):
        matrix = weight.movedim(1, -1).flatten(1)
        return matrix if module.groups == 1 else matrix.unflatten(0, (module.groups, -1))

    def unmatrix(self, module: Any, matrix):
        kernel = module.kernel_size
        weight = matrix if module.groups == 1 else matrix.flatten(0, 1)
        return weight.unflatten(1, (*kernel, -1)).movedim(-1, 1).contiguous()

    def columns(self, module: Any, weight):
        return weight.shape[1]

    def inputs(self, module: Any, args, kwargs):
        return (args[0] if args else kwargs["input"],)

    def rows(self, module: Any, inputs, keep):
        assert keep is None  # patches mix padding with its neighbours; such inputs are refused before they come here
        (x,) = inputs
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
    """The convolution's own padding, applied: "same", "valid", numbers; zeros, reflect, replicate or circular."""
    if module.padding == "valid":
        return x
    sides: list[int] = []
    for dim in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[dim] * (module.kernel_size[dim] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [module.padding[dim]] * 2
    if module.padding_mode == "zeros":
        return F.pad(x, sides)
    return F.pad(x, sides, mode=module.padding_mode)


class _InProjKind(Kind):
    """nn.MultiheadAttention's fused in_proj_weight [3E, E] as [3, E, E]: q, k and v, each with its own input."""

    title = "MultiheadAttention.in_proj"

    def matrix(self, module: Any, weight):
        return weight.unflatten(0, (3, -1))

    def unmatrix(self, module: Any, matrix):
        return matrix.flatten(0, 1)

    def inputs(self, module: Any, args, kwargs):
        q, k, v = _query_key_value(args, kwargs)
        return (q,) if q is k and k is v else (q, k, v)

    def rows(self, module: Any, inputs, keep):
        flat = [x.reshape(-1, x.shape[-1]) if keep is None else x[keep] for x in inputs]
        if len(flat) == 1:
            yield flat[0]  # one Gram matrix serves all three
            return
        counts = {len(x) for x in flat}
        longest = max(counts)  # keys may be longer than queries; zero rows add nothing to the sums
        yield torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in flat])

    def signature(self, module: Any):
        return ("in_proj",)


class _SeparateProjKind(_LinearKind):
    """nn.MultiheadAttention's q_proj_weight, k_proj_weight or v_proj_weight (kdim or vdim given)."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.title = f"MultiheadAttention.{'qkv'[position]}_proj"

    def inputs(self, module: Any, args, kwargs):
        return (_query_key_value(args, kwargs)[self.position],)


class _OutProjKind(_LinearKind):
    """nn.MultiheadAttention's out_proj: a Linear whose weight the attention reads without calling it.

    Its input is what the attention gives when the output projection is the identity, with a mask that keeps all of it.
    """

    title = "MultiheadAttention.out_proj"

    def inputs(self, module: Any, args, kwargs):
        weight, bias = module.out_proj.weight, module.out_proj.bias
        replaced = {"out_proj.weight": torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device)}
        if bias is not None:
            replaced["out_proj.bias"] = torch.zeros_like(bias)
        for name, mask in module.out_proj.named_buffers():
            replaced[f"out_proj.{name}"] = torch.ones_like(mask)
        return (torch.func.functional_call(module, replaced, args, kwargs)[0],)


def _query_key_value(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    names = ("query", "key", "value")
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))  # type: ignore[return-value]


LINEAR, HF_CONV1D, CONV = _LinearKind(), _HFConv1DKind(), _ConvKind()
IN_PROJ, OUT_PROJ = _InProjKind(), _OutProjKind()
SEPARATE_PROJ = {f"{letter}_proj_weight": _SeparateProjKind(i) for i, letter in enumerate("qkv")}


@dataclass(frozen=True)
class Layer:
    """One prunable parameter: ``owner.param``; its input is seen where one of ``observed`` is called.

    ``twins`` are further modules that hold the same Parameter under the same name (a tied pair of Linears).
    ``router``: the second of its outputs says which token each row of the input is, where experts are given rows that
    are sorted already. ``expert_of``: of an expert that is a module of its own in a list or dict, its name with ``*``
    for which one it is, the same for its fellows.
    """

    name: str
    parameter_name: str  # as in model.named_parameters()
    owner: nn.Module
    param: str
    kind: Kind
    observed: tuple[nn.Module, ...]
    twins: tuple[nn.Module, ...] = ()
    router: nn.Module | None = None
    expert_of: str | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner.get_parameter(self.param)

    def matrix(self, weight: Tensor) -> Tensor:
        return self.kind.matrix(self.owner, weight)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        return self.kind.unmatrix(self.owner, matrix)

    def columns(self, weight: Tensor) -> int:
        return self.kind.columns(self.owner, weight)


@dataclass(frozen=True)
class Unprunable:
    """A parameter of two or more dimensions that stays dense whatever the user asks for, and why.

    ``names`` are all of its names, if several modules hold it.
    """

    names: tuple[str, ...]
    module: nn.Module
    shape: tuple[int, ...]
    reason: str

    @property
    def name(self) -> str:
        return self.names[0]


def find_layers(model: nn.Module) -> tuple[list[Layer], list[Unprunable]]:
    """Every parameter with two or more dimensions, as a layer or with the reason why it is none; in model order.

    A parameter that several modules hold is listed once, under its first name; held by a Linear and an Embedding it
    is no layer.
    """
    attention_out: dict[nn.Module, nn.Module] = {
        m.out_proj: m for m in model.modules() if isinstance(m, nn.MultiheadAttention)
    }
    mixtures = find_mixtures(model)
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for param, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight.dim() >= 2:
                holders.setdefault(id(weight), []).append((path, module, param))
    layers: list[Layer] = []
    others: list[Unprunable] = []
    for held in holders.values():
        path, module, param = held[0]
        parameter_name = f"{path}.{param}".removeprefix(".")
        names = tuple(
            path if param == "weight" and path else f"{path}.{param}".removeprefix(".") for path, _, param in held
        )
        found = [_classify(owner, held_as, attention_out, mixtures.get(owner)) for _, owner, held_as in held]
        reasons = [kind for kind in found if isinstance(kind, str)]
        kinds = [kind for kind in found if isinstance(kind, Kind)]
        uses = {(kind, held_as, kind.signature(owner)) for kind, (_, owner, held_as) in zip(kinds, held)}
        if not reasons and len(uses) == 1:
            mixture = mixtures.get(module, Mixture())
            observed = tuple(attention_out.get(owner, mixture.observed or owner) for _, owner, _ in held)
            twins = tuple(owner for _, owner, _ in held[1:])
            fellows = _fellows(model, path)
            kind = kinds[0]
            layers.append(
                Layer(names[0], parameter_name, module, param, kind, observed, twins, mixture.router, fellows)
            )
            continue
        reason = reasons[0] if len(held) == 1 or not kinds else f"tied: also held by {names[1]}"
        others.append(Unprunable(names, module, tuple(module.get_parameter(param).shape), reason))
    return layers, others


def _fellows(model: nn.Module, path: str) -> str | None:
    """``path`` with ``*`` for the expert that it lies in, if experts are a list (or a dict) of modules."""
    parts = path.split(".")
    for place in range(1, len(parts)):
        if "experts" in parts[place - 1]:
            listed = model.get_submodule(".".join(parts[:place]))
            if isinstance(listed, (nn.ModuleList, nn.ModuleDict)) and len(listed) > 1:
                return ".".join([*parts[:place], "*", *parts[place + 1 :]])
    return None


def _classify(
    module: nn.Module, param: str, attention_out: Mapping[nn.Module, nn.Module], mixture: Mixture | None
) -> Kind | str:
    """The kind of a parameter, or the reason why it is not prunable."""
    if isinstance(module, nn.MultiheadAttention):
        if param == "in_proj_weight":
            return IN_PROJ
        if param in SEPARATE_PROJ:
            return SEPARATE_PROJ[param]
    if param == "weight":
        if module in attention_out:
            return OUT_PROJ
        if isinstance(module, nn.Linear):
            return LINEAR
        if isinstance(module, HFConv1D):
            return HF_CONV1D
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return CONV
        if isinstance(module, nn.Embedding):
            return "embedding"
    fused = expert_kind(module, param, mixture)
    if fused is not None:
        return fused
    if "router" in type(module).__name__.lower():
        return "MoE router"
    return f"no adapter for {type(module).__name__}.{param}"
