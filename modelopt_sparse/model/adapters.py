"""Adapters: how a type of weight is seen as a matrix [..., R, C], and which rows [..., T, C] it is multiplied with.

Shape letters: R rows (out features), C columns (in features), T tokens, K kernel positions, I input channels per
group, E experts. Leading dimensions are independent matrices (convolution groups; q, k and v of a fused projection;
experts).
"""

import inspect
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.masking import dense_class


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

    def rows(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> Iterator[Tensor]:
        """Inputs as chunks of rows ``[..., T, C]``.

        ``token_mask`` (bool, shaped like an input without its last dimension) is True for real tokens and False for
        padding, which is left out. None: there is no padding.
        """
        (x,) = inputs
        yield real_rows(x, token_mask)

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

    def rows(self, module: Any, inputs, token_mask):
        assert token_mask is None  # patches mix padding with real tokens; the run refuses such inputs before
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

    def rows(self, module: Any, inputs, token_mask):
        flat = [real_rows(x, token_mask) for x in inputs]
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


class _OutProjAdapter(Adapter):
    """nn.MultiheadAttention's out_proj: a Linear whose weight the attention reads without calling it.

    Its input is what the attention returns when the output projection is replaced by the identity (and its mask by
    one that is True everywhere).
    """

    def inputs(self, module: Any, args, kwargs):
        weight, bias = module.out_proj.weight, module.out_proj.bias
        replaced = {"out_proj.weight": torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device)}
        if bias is not None:
            replaced["out_proj.bias"] = torch.zeros_like(bias)
        for name, mask in module.out_proj.named_buffers():
            replaced[f"out_proj.{name}"] = torch.ones_like(mask)
        return (torch.func.functional_call(module, replaced, args, kwargs)[0],)


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


# fused experts --------------------------------------------------------------------------------------------------------
# In transformers' mixtures one parameter [E, ...] holds a matrix for each expert, and the router decides which rows go
# to which expert. transformers calls experts in four ways:
#
# - its experts interface, and classes that are called like it: hidden states, and the chosen experts of each token;
# - Llama 4: hidden states, scaled by the router's score;
# - JetMoe's ParallelExperts: rows sorted by expert;
# - Inkling's shared experts, which see every token: hidden states, and a factor for each expert.
#
# Forward pre-hooks see these arguments, so that the model runs its own implementation.

FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"
# classes without transformers' experts interface that are called, and laid out, as it has them by default
LIKE_INTERFACE = ("LongcatFlashExperts", "Step3p7Experts")


@dataclass(frozen=True)
class Route:
    """The rows [T, C] of one expert: ``source[at]``, or all of ``source`` if ``at`` is None.

    Several routes may share one ``source``, each with its own ``at``. slots: where the rows stand in the flat index of
    chosen experts [tokens, k], if the experts are called with one.
    """

    expert: int
    source: Tensor
    at: Tensor | None = None
    slots: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        return self.source if self.at is None else self.source[self.at]


class RoutedAdapter(Adapter):
    """A fused parameter as ``[E, R, C]``: each of its matrices is multiplied with rows of its own."""

    sees_all_tokens = True  # whether `all_tokens` is implemented; if not, the plan refuses experts="all_tokens"

    @abstractmethod
    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> Iterator[Route]:
        """The rows of each expert that gets any.

        ``token_mask`` (bool, one for each row of the inputs) is True for real tokens and False for padding, which is
        left out. None: there is no padding.
        """

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None, expert: int) -> Tensor:
        """The rows ``[T, C]`` that one expert would get if every token were routed to it."""
        raise NotImplementedError

    def signature(self, module: Any) -> tuple:
        return (self,)  # gate_up and down are hooked at the same module, and their rows are not the same


class _FusedAdapter(RoutedAdapter):
    """gate_up_proj (or up_proj) and down_proj of one module.

    ``second`` is True for down_proj, whose rows are computed from those of the first matrix. ``gates_inside``: gates
    scale what the experts get, not what they put out.
    """

    gates_inside = False

    def __init__(self, *, second: bool) -> None:
        self.second = second

    def transposed(self, module: Any) -> bool:
        """Whether matrices are stored as [C, R]."""
        return getattr(module, "is_transposed", False)

    def matrix(self, module: Any, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed(module) else weight

    def unmatrix(self, module: Any, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.transposed(module) else matrix

    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> Iterator[Route]:
        real = tuple(real_rows(x, token_mask) for x in inputs)
        for route in self.chosen(real, experts_of(module)):
            if self.second:
                route = Route(route.expert, self.hidden(module, route.expert, route.rows), slots=route.slots)
            yield route

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None, expert: int) -> Tensor:
        rows = self.everyone(tuple(real_rows(x, token_mask) for x in inputs), expert)
        return self.hidden(module, expert, rows) if self.second else rows

    @abstractmethod
    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        """The rows of the first matrix of each expert."""

    @abstractmethod
    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        """The rows of the first matrix of one expert, if every token were routed to it."""

    def output(self, module: Any, expert: int, rows: Tensor, name: str = SECOND) -> Tensor:
        """What a matrix of an expert, by default its second one, makes of rows, with its present weights."""
        weight = self.matrix(module, stored(module, name).detach()[expert].to(rows.device))
        has_bias = getattr(module, "has_bias", False)
        bias = stored(module, f"{name}_bias").detach()[expert].to(rows.device) if has_bias else None
        return F.linear(rows, weight, bias)

    @abstractmethod
    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        """The rows of an expert's second matrix, computed from ``rows`` of the first with its present weights."""


class _InterfaceAdapter(_FusedAdapter):
    """Classes made with transformers' ``use_experts_implementation``, called with (hidden_states, top_k_index, ...).

    Those of LIKE_INTERFACE lack the attributes that it adds to a class.
    """

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """Rows [T, C], the experts chosen for each [T, k], and the gates of these [T, k], or of all experts [T, E]."""
        hidden, index, gates, *_ = _arguments(module, args, kwargs)
        index = index.reshape(-1, index.shape[-1])
        return hidden.reshape(-1, hidden.shape[-1]), index, gates.reshape(len(index), -1)

    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        x, index, _ = inputs
        for expert, slots in _slots(index, experts):
            yield Route(expert, x, slots // index.shape[-1], slots)

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        return inputs[0]

    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        gated = getattr(module, "has_gate", True)  # in transformers 5.0 all experts are gated
        made = self.output(module, expert, rows, FIRST[0] if gated else FIRST[1])
        if not gated:
            return module.act_fn(made)
        if (apply_gate := getattr(module, "_apply_gate", None)) is not None:
            return apply_gate(made)
        gate, up = made.chunk(2, dim=-1)
        return module.act_fn(gate) * up


def _slots(index: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, where it stands in the flat index of chosen experts [tokens, k]), of those that were chosen. An index of
    E or more is an expert that another process holds, or one without weights (LongCat-Flash)."""
    sizes = index.flatten().bincount(minlength=experts).tolist()
    for expert, slots in enumerate(index.flatten().argsort(stable=True).split(sizes)[:experts]):
        if len(slots):
            yield expert, slots


class _Llama4Adapter(_FusedAdapter):
    """Llama4TextExperts, hooked at the mixture around it: its rows are scaled by their gates."""

    gates_inside = True

    def transposed(self, module: Any) -> bool:
        return True

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """Rows [T, C], the experts chosen for each [T, k], the gates of these [T, k], and the logits of all [T, E]."""
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = module.router(hidden)
        index = logits.topk(module.top_k, dim=1).indices
        return hidden, index, scores.gather(1, index), logits

    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        x, index, gates, _ = inputs
        for expert, slots in _slots(index, experts):
            yield Route(expert, x[slots // index.shape[-1]] * gates.flatten()[slots, None], slots=slots)

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        x, _, gates, logits = inputs
        return x * logits[:, expert, None].float().sigmoid().to(gates.dtype)

    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ stored(module, FIRST[0]).detach()[expert].to(rows.device)).chunk(2, dim=-1)
        return up * module.act_fn(gate)


class _ParallelAdapter(RoutedAdapter):
    """JetMoe's ParallelExperts: called with the rows sorted by expert, and with the number of rows of each expert.

    Rows of tokens that were not routed to an expert are not known here.
    """

    sees_all_tokens = False

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        rows, sizes = _arguments(module, args, kwargs)
        sizes = torch.as_tensor(sizes, device=rows.device)
        return rows, torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes)

    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> Iterator[Route]:
        rows, index = inputs if token_mask is None else (x[token_mask] for x in inputs)
        for expert, part in enumerate(rows.split(index.bincount(minlength=experts_of(module)).tolist())):
            if len(part):
                yield Route(expert, part)


class _SharedAdapter(Adapter):
    """Inkling's shared experts: gate_proj, up_proj and down_proj [E, R, C], and each expert sees every token.

    They are called with (hidden_states, gammas); gammas [..., E] scale the rows of down_proj, for which ``second`` is
    True.
    """

    def __init__(self, *, second: bool) -> None:
        self.second = second

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        hidden, gammas = _arguments(module, args, kwargs)
        return (hidden, gammas.reshape(*hidden.shape[:-1], -1)) if self.second else (hidden,)

    def rows(self, module: Any, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> Iterator[Tensor]:
        flat = [real_rows(x, token_mask) for x in inputs]
        if not self.second:
            yield flat[0]  # one Gram matrix serves all experts
            return
        x, gammas = flat
        gate, up = (
            torch.einsum("tc,erc->etr", x, stored(module, name).detach().to(x.device))
            for name in ("gate_proj", "up_proj")
        )
        yield module.act_fn(gate) * up * gammas.mT[..., None]

    def signature(self, module: Any) -> tuple:
        return (self,)  # what the third matrix sees is another thing than its module does


def _arguments(module: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments of one call of the module, in the order of its forward."""
    return list(inspect.signature(dense_class(module).forward).bind(module, *args, **kwargs).arguments.values())[1:]


def experts_of(module: Any) -> int:
    """The experts that have both matrices: LongCat-Flash also holds a first one for those without weights."""
    return min(parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3)


UP, DOWN = _InterfaceAdapter(second=False), _InterfaceAdapter(second=True)
LLAMA4_UP, LLAMA4_DOWN = _Llama4Adapter(second=False), _Llama4Adapter(second=True)
PARALLEL = _ParallelAdapter()
LAST = (DOWN, LLAMA4_DOWN)  # of the last matrices of experts that a router chooses among
SHARED_UP, SHARED_DOWN = _SharedAdapter(second=False), _SharedAdapter(second=True)


@dataclass(frozen=True)
class Mixture:
    """The modules around fused experts that are needed to read their rows.

    hooked_module: the module whose arguments hold the rows, if it is not the experts' own.
    router: the module that sorted the rows, if they come sorted.
    """

    hooked_module: nn.Module | None = None
    router: nn.Module | None = None


def find_mixtures(model: nn.Module) -> dict[nn.Module, Mixture]:
    """Modules of fused experts whose rows cannot be read from their own arguments alone, each with its `Mixture`; an
    empty one for any other module."""
    mixtures: dict[nn.Module, Mixture] = defaultdict(Mixture)
    for parent in model.modules():
        router = getattr(parent, "router", None)
        if not isinstance(router, nn.Module):
            continue
        for child in parent.children():
            if _is(child, "Llama4TextExperts"):
                mixtures[child] = Mixture(hooked_module=parent)
            elif dense_class(router).__name__.endswith("TopKGating") and any(
                base.__name__.endswith("ParallelExperts") for base in type(child).__mro__
            ):
                mixtures[child] = Mixture(router=router)
    return mixtures


def expert_adapter(module: nn.Module, param: str, mixture: Mixture) -> Adapter | str | None:
    """What a parameter of fused experts is: its adapter, or the reason why it cannot be pruned.

    None for a parameter that belongs to no fused experts.
    """
    weight = module.get_parameter(param)
    if _has_interface(module) or any(_is(module, name) for name in LIKE_INTERFACE):
        if weight.dim() == 3 and param in (*FIRST, SECOND):
            return DOWN if param == SECOND else UP
        if weight.dim() == 2 and param.endswith("_bias"):
            return "bias of fused experts"
    if weight.dim() != 3:
        return None
    if mixture.hooked_module is not None and param in (FIRST[0], SECOND):
        return LLAMA4_DOWN if param == SECOND else LLAMA4_UP
    if mixture.router is not None and param == "weight":
        return PARALLEL
    if _is(module, "InklingSharedExperts"):
        return SHARED_DOWN if param == SECOND else SHARED_UP
    if param in (*FIRST, SECOND, "gate_proj", "w1", "w2", "w3") or "experts" in dense_class(module).__name__.lower():
        name = f"{dense_class(module).__name__}.{param}"
        return f"no adapter for {name}: fused experts outside of transformers' experts interface"
    return None


def _has_interface(module: nn.Module) -> bool:
    """Whether the class was made with ``use_experts_implementation``, which adds these two attributes."""
    return callable(getattr(module, "_apply_gate", None)) and isinstance(getattr(module, "is_transposed", None), bool)


def _is(module: nn.Module, name: str) -> bool:
    """Whether the module's class or one of its base classes has this name."""
    return any(base.__name__ == name for base in type(module).__mro__)
