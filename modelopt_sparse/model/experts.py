"""Fused experts of transformers' mixtures: one parameter [E, ...] holds a matrix for each expert, and the router says
which rows meet which.

Three ways to call them: transformers' experts interface (hidden states and the chosen experts of each token), Llama 4
(hidden states scaled by the router's score), and JetMoe's ParallelExperts (rows sorted by expert). Forward pre-hooks
see all of that, so that the model runs its own implementation and nothing is registered anywhere.

Shape letters: E experts, T tokens, K experts of a token, S = T * K routed rows, R rows and C columns of a matrix.
"""

import inspect
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.model.adapters import Adapter
from modelopt_sparse.model.masking import dense_class
from modelopt_sparse.model.offload import stored

FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"


@dataclass(frozen=True)
class Route:
    """Rows that meet the matrix of one expert: ``source[at]`` [T, C], or all of ``source``. Routes may share one."""

    expert: int
    source: Tensor
    at: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        return self.source if self.at is None else self.source[self.at]


class RoutedAdapter(Adapter):
    """A fused parameter as ``[E, R, C]``, each of whose matrices meets rows of its own."""

    title = "Experts"
    # whether it can be told what an expert would see if every token went to it
    sees_all_tokens = True

    @abstractmethod
    def routes(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None) -> Iterator[Route]:
        """The rows of each expert that is given any. ``keep`` (bool, one for each row of the inputs) drops padding."""

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None, expert: int) -> Tensor:
        """The rows ``[T, C]`` that one expert would meet if every token were routed to it."""
        # adapters that cannot tell have sees_all_tokens = False, and the plan refuses experts="all_tokens" for them
        raise NotImplementedError(f"{self.title} are given their own rows alone")

    def signature(self, module: Any) -> tuple:
        del module
        return (self,)  # gate_up and down are told from the same inputs and do not see the same


class _FusedAdapter(RoutedAdapter):
    """gate_up_proj (or up_proj) and down_proj of one module; the second sees what the first one makes of its rows."""

    def __init__(self, *, second: bool) -> None:
        self.second = second

    def transposed(self, module: Any) -> bool:
        """Whether matrices are stored as [C, R]."""
        return module.is_transposed

    def matrix(self, module: Any, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed(module) else weight

    def unmatrix(self, module: Any, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.transposed(module) else matrix

    def routes(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None) -> Iterator[Route]:
        for route in self.chosen(inputs if keep is None else tuple(x[keep] for x in inputs), _experts_of(module)):
            yield Route(route.expert, self.hidden(module, route.expert, route.rows)) if self.second else route

    def all_tokens(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None, expert: int) -> Tensor:
        rows = self.everyone(inputs if keep is None else tuple(x[keep] for x in inputs), expert)
        return self.hidden(module, expert, rows) if self.second else rows

    @abstractmethod
    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        """The rows that the first matrix of each expert meets."""

    @abstractmethod
    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        """The rows that the first matrix of one expert would meet if every token were routed to it."""

    @abstractmethod
    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        """What the second matrix of an expert is given for these rows of the first, with the weights as they are."""


class _InterfaceAdapter(_FusedAdapter):
    """Classes made with transformers' ``use_experts_implementation``, called with (hidden_states, top_k_index, ...)."""

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        given = inspect.signature(dense_class(module).forward).bind(module, *args, **kwargs).arguments
        _, hidden, index, *_ = given.values()
        return hidden.reshape(-1, hidden.shape[-1]), index.reshape(-1, index.shape[-1])

    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        x, index = inputs
        order = index.flatten().argsort(stable=True) // index.shape[-1]
        # an index of E or more stands for an expert that another process holds
        sizes = index.flatten().bincount(minlength=experts).tolist()
        for expert, token in enumerate(order.split(sizes)[:experts]):
            if len(token):
                yield Route(expert, x, token)

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        del expert
        return inputs[0]

    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        gated = getattr(module, "has_gate", True)  # transformers 5.0 knows no other
        name = FIRST[0] if gated else FIRST[1]
        weight = self.matrix(module, stored(module, name).detach()[expert].to(rows.device))
        bias = stored(module, f"{name}_bias").detach()[expert].to(rows.device) if module.has_bias else None
        made = F.linear(rows, weight, bias)
        return module._apply_gate(made) if gated else module.act_fn(made)


class _Llama4Adapter(_FusedAdapter):
    """Llama4TextExperts, seen where the mixture around it is called: its rows are scaled by the router's score."""

    def transposed(self, module: Any) -> bool:
        del module
        return True

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        return (hidden, *module.router(hidden))

    def chosen(self, inputs: tuple[Tensor, ...], experts: int) -> Iterator[Route]:
        x, scores, _ = inputs  # the score of an expert that was not chosen is 0
        for expert in range(experts):
            token = scores[:, expert].nonzero().squeeze(-1)
            if len(token):
                yield Route(expert, x[token] * scores[token, expert, None])

    def everyone(self, inputs: tuple[Tensor, ...], expert: int) -> Tensor:
        x, scores, logits = inputs
        return x * logits[:, expert, None].float().sigmoid().to(scores.dtype)

    def hidden(self, module: Any, expert: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ stored(module, FIRST[0]).detach()[expert].to(rows.device)).chunk(2, dim=-1)
        return up * module.act_fn(gate)


class _ParallelAdapter(RoutedAdapter):
    """JetMoe's ParallelExperts (also of Granite before it took up the interface): called with rows sorted by expert,
    and how many each of them gets. What other rows would look like is not known here."""

    sees_all_tokens = False

    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        given = inspect.signature(dense_class(module).forward).bind(module, *args, **kwargs).arguments
        _, rows, sizes = given.values()
        sizes = torch.as_tensor(sizes, device=rows.device)
        return rows, torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes)

    def routes(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None) -> Iterator[Route]:
        rows, index = inputs if keep is None else (x[keep] for x in inputs)
        for expert, part in enumerate(rows.split(index.bincount(minlength=_experts_of(module)).tolist())):
            if len(part):
                yield Route(expert, part)


def _experts_of(module: Any) -> int:
    return next(parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3).shape[0]


UP, DOWN = _InterfaceAdapter(second=False), _InterfaceAdapter(second=True)
LLAMA4_UP, LLAMA4_DOWN = _Llama4Adapter(second=False), _Llama4Adapter(second=True)
PARALLEL = _ParallelAdapter()


@dataclass(frozen=True)
class Mixture:
    """What stands around a module of fused experts: where its rows are seen, and the router that sorted them."""

    hooked_module: nn.Module | None = None
    router: nn.Module | None = None


def find_mixtures(model: nn.Module) -> dict[nn.Module, Mixture]:
    """Modules of fused experts that are not seen where they are called themselves, or not without their router."""
    found: dict[nn.Module, Mixture] = {}
    for parent in model.modules():
        router = getattr(parent, "router", None)
        if not isinstance(router, nn.Module):
            continue
        for child in parent.children():
            if _is(child, "Llama4TextExperts"):
                found[child] = Mixture(hooked_module=parent)
            elif _is_parallel(child) and dense_class(router).__name__.endswith("TopKGating"):
                found[child] = Mixture(router=router)
    return found


def expert_adapter(module: nn.Module, param: str, mixture: Mixture | None) -> RoutedAdapter | str | None:
    """The adapter of a parameter of fused experts, the reason why it cannot be pruned, or None for all others."""
    weight = module.get_parameter(param)
    if _has_interface(module):
        if weight.dim() == 3 and param in (*FIRST, SECOND):
            return DOWN if param == SECOND else UP
        if weight.dim() == 2 and param.endswith("_bias"):
            return "bias of fused experts"
    if weight.dim() != 3:
        return None
    if mixture is not None and mixture.hooked_module is not None and param in (FIRST[0], SECOND):
        return LLAMA4_DOWN if param == SECOND else LLAMA4_UP
    if mixture is not None and mixture.router is not None and param == "weight":
        return PARALLEL
    if param in (*FIRST, SECOND, "gate_proj", "w1", "w2", "w3") or "experts" in dense_class(module).__name__.lower():
        return (
            f"no adapter for {dense_class(module).__name__}.{param}: fused experts outside of transformers' experts "
            "interface"
        )
    return None


def _has_interface(module: nn.Module) -> bool:
    """Whether the class was made with ``use_experts_implementation``, which leaves these on it and on its instances."""
    return callable(getattr(module, "_apply_gate", None)) and isinstance(getattr(module, "is_transposed", None), bool)


def _is(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _is_parallel(module: nn.Module) -> bool:
    return any(base.__name__.endswith("ParallelExperts") for base in type(module).__mro__)
