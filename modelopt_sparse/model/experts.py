"""Fused experts: one parameter [E, ...] holds a matrix for each expert, and the router decides which rows go to which.

transformers calls experts in four ways:

- its experts interface, and classes that are called like it: hidden states, and the chosen experts of each token;
- Llama 4: hidden states, scaled by the router's score;
- JetMoe's ParallelExperts: rows sorted by expert;
- Inkling's shared experts, which see every token: hidden states, and a factor for each expert.

Forward pre-hooks see these arguments, so that the model runs its own implementation.

Shape letters: E experts, R rows (out features), C columns (in features), T tokens.
"""

import inspect
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.layers import Adapter, TokenMasks, real_rows
from modelopt_sparse.model.masking import dense_class

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
    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> Iterator[Route]:
        """The rows of each expert that gets any, padding left out."""

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks, expert: int) -> Tensor:
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

    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> Iterator[Route]:
        real = tuple(map(real_rows, inputs, token_masks))
        for route in self.chosen(real, experts_of(module)):
            if self.second:
                route = Route(route.expert, self.hidden(module, route.expert, route.rows), slots=route.slots)
            yield route

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks, expert: int) -> Tensor:
        rows = self.everyone(tuple(map(real_rows, inputs, token_masks)), expert)
        return self.hidden(module, expert, rows) if self.second else rows

    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        """The rows of the first matrix of each expert that is chosen. An index of ``experts`` or more is an expert that
        another process holds, or one without weights (LongCat-Flash)."""
        x, index, gates, *_ = inputs
        sizes = index.flatten().bincount(minlength=experts).tolist()
        for expert, slots in enumerate(index.flatten().argsort(stable=True).split(sizes)[:experts]):
            at = slots // index.shape[-1]
            if len(slots) and self.gates_inside:
                yield Route(expert, x[at] * gates.flatten()[slots, None], slots=slots)
            elif len(slots):
                yield Route(expert, x, at, slots)

    @abstractmethod
    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        """The rows of the first matrix of one expert, if every token were routed to it."""

    def output(self, module: Any, expert: int, rows: Tensor, name: str = SECOND) -> Tensor:
        """Multiply rows with a matrix of an expert, by default its second one, with its present weights."""
        weight = self.matrix(module, stored(module, name).detach()[expert].to(rows.device))
        has_bias = getattr(module, "has_bias", False)
        bias = stored(module, f"{name}_bias").detach()[expert].to(rows.device) if has_bias else None
        return F.linear(rows, weight, bias)

    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        """The rows of an expert's second matrix, computed from ``rows`` of the first with its present weights."""
        gated = getattr(module, "has_gate", True)  # in transformers 5.0 all experts are gated
        made = self.output(module, expert, rows, FIRST[0] if gated else FIRST[1])
        if not gated:
            return module.act_fn(made)
        if (apply_gate := getattr(module, "_apply_gate", None)) is not None:
            return apply_gate(made)
        gate, up = made.chunk(2, dim=-1)
        return module.act_fn(gate) * up


class _InterfaceAdapter(_FusedAdapter):
    """Classes made with transformers' ``use_experts_implementation``, called with (hidden_states, top_k_index, ...).

    Those of LIKE_INTERFACE lack the attributes that it adds to a class.
    """

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """Rows [T, C], the experts chosen for each [T, k], and the gates of these [T, k], or of all experts [T, E]."""
        hidden, index, gates, *_ = _arguments(module, args, kwargs)
        index = index.reshape(-1, index.shape[-1])
        return hidden.reshape(-1, hidden.shape[-1]), index, gates.reshape(len(index), -1)

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        return inputs[0]


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

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        x, _, gates, logits = inputs
        return x * logits[:, expert, None].float().sigmoid().to(gates.dtype)


class _ParallelAdapter(RoutedAdapter):
    """JetMoe's ParallelExperts: called with the rows sorted by expert, and with the number of rows of each expert.

    Rows of tokens that were not routed to an expert are not known here.
    """

    sees_all_tokens = False

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        rows, sizes = _arguments(module, args, kwargs)
        sizes = torch.as_tensor(sizes, device=rows.device)
        return rows, torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes)

    def routes(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> Iterator[Route]:
        rows, index = (x if mask is None else x[mask] for x, mask in zip(inputs, token_masks))
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

    def rows(self, module: Any, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> Iterator[Tensor]:
        flat = [*map(real_rows, inputs, token_masks)]
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
            sorted_rows = any(kind.endswith("ParallelExperts") for kind in _kinds(child))
            if "Llama4TextExperts" in _kinds(child):
                mixtures[child] = Mixture(hooked_module=parent)
            elif sorted_rows and dense_class(router).__name__.endswith("TopKGating"):
                mixtures[child] = Mixture(router=router)
    return mixtures


def expert_adapter(module: nn.Module, param: str, mixture: Mixture) -> Adapter | str | None:
    """What a parameter of fused experts is: its adapter, or the reason why it cannot be pruned.

    None for a parameter that belongs to no fused experts.
    """
    weight = module.get_parameter(param)
    if _has_interface(module) or not _kinds(module).isdisjoint(LIKE_INTERFACE):
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
    if "InklingSharedExperts" in _kinds(module):
        return SHARED_DOWN if param == SECOND else SHARED_UP
    if param in (*FIRST, SECOND, "gate_proj", "w1", "w2", "w3") or "experts" in dense_class(module).__name__.lower():
        name = f"{dense_class(module).__name__}.{param}"
        return f"no adapter for {name}: fused experts outside of transformers' experts interface"
    return None


def _has_interface(module: nn.Module) -> bool:
    """Whether the class was made with ``use_experts_implementation``, which adds these two attributes."""
    return callable(getattr(module, "_apply_gate", None)) and isinstance(getattr(module, "is_transposed", None), bool)


def _kinds(module: nn.Module) -> set[str]:
    """The names of the module's class and of its base classes."""
    return {base.__name__ for base in type(module).__mro__}
