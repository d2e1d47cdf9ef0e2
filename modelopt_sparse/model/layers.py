"""The prunable layers of a model, why other weights stay dense, and the stacks of blocks that layers lie in."""

import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D as HFConv1D

from modelopt_sparse.model.adapters import (
    CONV,
    HF_CONV1D,
    IN_PROJ,
    LINEAR,
    OUT_PROJ,
    SEPARATE_PROJ,
    Adapter,
    Mixture,
    RowAdapter,
    expert_adapter,
    find_mixtures,
)
from modelopt_sparse.model.devices import full_name, parameter_of, stored, unwrapped
from modelopt_sparse.model.forwards import has_own_forward, is_other, why_other
from modelopt_sparse.model.masking import dense_class, named_masks

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
    def values(self) -> Tensor:
        """Where the parameter's values really are: accelerate may hold them elsewhere between calls."""
        return stored(self.owner, self.param).detach()

    @property
    def mask(self) -> Tensor | None:
        """What all modules that hold the parameter keep by their masks, True = kept, ``[..., R, C]``; None without a
        mask."""
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
        """Those of the modules that multiply with the weight whose forward is not the one of a library."""
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


@dataclass(frozen=True)
class Unprunable:
    """A parameter of two or more dimensions that is no layer and always stays dense.

    names: of the parameter, several if several modules hold it.
    module: the first module that holds it.
    shape: of the parameter.
    reason: why it is no layer, as the plan shows it.
    """

    names: tuple[str, ...]
    module: nn.Module
    shape: tuple[int, ...]
    reason: str

    @property
    def name(self) -> str:
        return self.names[0]


def as_row(model: nn.Module, parameter_name: str) -> Layer:
    """A parameter that is no prunable layer, as a layer of one row that has no input. Its name is the parameter's.

    Raises AttributeError if the model has no such parameter.
    """
    path, _, param = parameter_name.rpartition(".")
    owner = model.get_submodule(path)
    parameter_of(owner, param)
    return Layer(parameter_name, parameter_name, owner, param, RowAdapter(param), ())


class PackedLayer(nn.Module):
    """A layer whose weight is packed for a 2:4 kernel. It can neither be pruned, verified nor restored into.

    The packed layers of runtime/ inherit from it, so that `usable` need not import them.
    """


def model_inside(model: Any) -> nn.Module:
    """The model inside its wrappers. Raises TypeError for what is no ``nn.Module``, and ValueError for a module whose
    code or shapes cannot be used."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give an nn.Module, such as from_pretrained returns")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is a ScriptModule, whose code is fixed: take the module that it was made from")
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ValueError(f"{where} is a {type(module).__name__} without shapes yet: run the model once first")
    return unwrapped(model)


def usable(model: Any, done: str, *, packed: bool = False) -> nn.Module:
    """`model_inside`. Raises ValueError for one that cannot be ``done`` ("pruned"): with parts that have wrappers of
    their own, whose prefixes stand in the middle of names; and with packed layers, unless ``packed`` allows them."""
    model = model_inside(model)
    for name, module in model.named_modules():
        if isinstance(module, PackedLayer) and not packed:
            raise ValueError(f"layer {name!r} is packed 2:4 and cannot be {done}: call to_dense(model) first")
        if unwrapped(module) is not module:
            wrapper = type(module).__name__
            raise ValueError(f"{name!r} is wrapped by {wrapper}, the model cannot be {done}: unwrap it, wrap it after")
    return model


def find_layers(model: nn.Module) -> tuple[list[Layer], list[Unprunable]]:
    """Every parameter of two or more dimensions, as a layer or with the reason why it is none; in model order.

    A parameter that several modules hold is listed once, under its first name. It is a layer only if all of them use it
    in the same way: a weight shared by a Linear and an Embedding is none.
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
        names = tuple(path if param == "weight" and path else full_name(path, param) for path, _, param in held)
        classified = [_classify(owner, held_as, attention_out, mixtures[owner]) for _, owner, held_as in held]
        reasons = [reason for reason in classified if isinstance(reason, str)]
        adapters = [adapter for adapter in classified if isinstance(adapter, Adapter)]
        uses = {(adapter, held_as, adapter.signature(owner)) for adapter, (_, owner, held_as) in zip(adapters, held)}
        if not reasons and len(uses) == 1:
            fused = mixtures[module]
            layers.append(
                Layer(
                    names[0],
                    full_name(path, param),
                    module,
                    param,
                    adapters[0],
                    hooked_modules=tuple(
                        attention_out.get(owner, fused.hooked_module or owner) for _, owner, _ in held
                    ),
                    tied_modules=tuple(owner for _, owner, _ in held[1:]),
                    tied_names=names[1:],
                    router=fused.router,
                    mixture=_mixture(model, path),
                )
            )
            continue
        reason = reasons[0] if len(held) == 1 or not adapters else f"tied: also held by {', '.join(names[1:])}"
        others.append(Unprunable(names, module, tuple(parameter_of(module, param).shape), reason))
    return layers, others


def _mixture(model: nn.Module, path: str) -> str | None:
    """A module path with ``*`` in the place of its expert's index; None outside of a list (or dict) of experts."""
    parts = path.split(".")
    for place in range(1, len(parts)):
        if "experts" in parts[place - 1]:
            listed = model.get_submodule(".".join(parts[:place]))
            if isinstance(listed, (nn.ModuleList, nn.ModuleDict)) and len(listed) > 1:
                return ".".join([*parts[:place], "*", *parts[place + 1 :]])
    return None


# classes of a module -> what its weight is
BY_CLASS: dict[Any, Adapter | str] = {
    nn.Linear: LINEAR,
    HFConv1D: HF_CONV1D,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): CONV,
    nn.Embedding: "embedding",
}


def _classify(
    module: nn.Module, param: str, attention_out: Mapping[nn.Module, nn.Module], mixture: Mixture
) -> Adapter | str:
    """The adapter of a parameter, or the reason why it is not prunable."""
    if parameter_of(module, param).is_complex():
        return "complex weights: methods prune real ones"
    if isinstance(module, nn.MultiheadAttention):
        if param == "in_proj_weight":
            return IN_PROJ
        if param in SEPARATE_PROJ:
            return SEPARATE_PROJ[param]
    if param == "weight":
        if module in attention_out:
            return OUT_PROJ
        for classes, kind in BY_CLASS.items():
            if isinstance(module, classes):
                return kind
    fused = expert_adapter(module, param, mixture)
    if fused is not None:
        return fused
    if "router" in type(module).__name__.lower():
        return "MoE router"
    return _computed(module, param) or f"no adapter for {type(module).__name__}.{param}"


# (end of a parameter's name, end of a name beside it): the function that ends the computing of a weight from both
UNDONE_BY = {
    ("orig", "mask"): "prune.remove",
    ("orig", "u"): "remove_spectral_norm",
    ("g", "v"): "remove_weight_norm",
    ("v", "g"): "remove_weight_norm",
}


def _computed(module: nn.Module, param: str) -> str | None:
    """What to say of a parameter that torch computes a weight from in each forward; None for any other parameter."""
    undone_by = "parametrize.remove_parametrizations" if isinstance(module, ParametrizationList) else None
    whole, _, part = param.rpartition("_")
    for (own, other), function in UNDONE_BY.items():
        if part == own and isinstance(getattr(module, f"{whole}_{other}", None), Tensor):
            undone_by = function
    return undone_by and f"a weight is computed from it: call torch.nn.utils.{undone_by} first"


# what stays dense by its role -----------------------------------------------------------------------------------------

OUTPUT_HEAD, MOE_ROUTER, ROUTER = "output head", "MoE router", "router"
TUNER = "adapter beside the layer (PEFT, LoRA)"
OUTSIDE = "outside the model's blocks (name it in include to prune it)"
# names of a model's own child that turns features into its output
HEAD_NAMES = ("lm_head", "classifier", "head", "fc")


def protected_modules(model: nn.Module, prunable: Collection[nn.Module], *, one_block: bool) -> dict[nn.Module, str]:
    """Modules whose weights stay dense unless they are named in full -> the reason.

    ``prunable`` are the modules of prunable layers. ``one_block``: the model has no stack, so that its heads do not lie
    outside of its blocks.
    """
    reasons = {**dict.fromkeys(_tuners(model), TUNER), **dict(_within_blocks(model))}
    heads = [module.get_output_embeddings() for module in model.modules() if isinstance(module, PreTrainedModel)]
    if one_block:
        heads += _heads(model, set(prunable))
    if isinstance(lm_head := dict(model.named_children()).get("lm_head"), nn.Module):
        heads += lm_head.modules()
    for head in heads:
        if head is not None:
            reasons.setdefault(head, OUTPUT_HEAD)
    return reasons


def _tuners(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold weights of adapters: what one of PEFT's layers holds beside the layer that it wraps, and
    whatever is called ``lora_...``, as other libraries do.

    PEFT is not imported here: if nobody has imported it, the model has none of its layers.
    """
    wrapper = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    for module in model.modules():
        for name, child in module.named_children():
            if name.lower().startswith("lora_") or (isinstance(module, wrapper) and name != "base_layer"):
                yield from child.modules()


def _heads(model: nn.Module, prunable: set[nn.Module]) -> list[nn.Module]:
    """What a model without a stack puts on top of its features.

    Of transformers' models that is all that lies outside of their base model. Of any other model it is its last layer,
    if the child that holds it has a head's name, and something is left beside it.
    """
    if isinstance(model, PreTrainedModel):
        body = set(model.base_model.modules())
        outside = [module for module in model.modules() if module not in body and module in prunable]
        return outside if prunable & body else []
    layers = [module for module in model.modules() if module in prunable]
    named = [child for name, child in model.named_children() if name in HEAD_NAMES]
    last = [layers[-1]] if len(layers) > 1 else []
    return [layer for layer in last if any(layer in set(child.modules()) for child in named)]


def _within_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Routers, by the class or the name, or by the experts beside them; and what a parent reads without calling it."""
    for module in model.modules():
        for name, child in module.named_children():
            has_experts = any(
                other.startswith("experts") or "experts" in dense_class(beside).__name__.lower()
                for other, beside in module.named_children()
            )
            is_gate = name in ("gate", "router", "wg") and has_experts
            if is_gate or "router" in type(child).__name__.lower() or name == "shared_expert_gate":
                yield from ((inner, MOE_ROUTER) for inner in child.modules())
            elif name == "router" or name.endswith("_router"):
                yield from ((inner, ROUTER) for inner in child.modules())
            if name == "dt_proj" and "mamba" in type(module).__name__.lower():
                yield child, f"{type(module).__name__} reads the weight without calling the module"


# stacks: lists of blocks that run one after the other -----------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """One list of blocks. ``name`` is the module path of the list, ``names[i]`` that of ``blocks[i]``."""

    name: str
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]


def find_stacks(model: nn.Module, prunable: Collection[nn.Module]) -> list[Stack]:
    """The stacks of a model, in module order; a model without one is a single stack with a single block.

    ``prunable`` are the modules of the prunable layers. A stack is an nn.ModuleList or nn.Sequential of blocks, and its
    blocks are those of its children that hold prunable layers. At least one of them holds two or more (a whole
    attention, MLP or residual branch), and all of them are of one class. Two more rules:

    - A list of mixed classes counts if each block holds two prunable layers or more, and no list of one class encloses
      it (hybrids of attention and state space layers).
    - Of nested stacks the inner ones count if they hold every prunable layer of the outer one (the stages of a ResNet).
      Otherwise the outer one counts (a mixture of experts, whose experts are a list as well).
    """
    prunable = set(prunable)
    whole = [Stack("", ("",), (model,))] if _count(model, prunable) else []
    return _search(model, "", prunable, mixed_allowed=True) or whole


def _count(module: nn.Module, prunable: set[nn.Module]) -> int:
    """How many prunable layers a module holds."""
    return sum(child in prunable for child in module.modules())


def _search(module: nn.Module, path: str, prunable: set[nn.Module], *, mixed_allowed: bool) -> list[Stack]:
    """The stacks in and below a module that lies at ``path``."""
    own = _as_stack(module, path, prunable, mixed_allowed=mixed_allowed)
    inside: list[Stack] = []
    for name, child in module.named_children():
        inside += _search(child, full_name(path, name), prunable, mixed_allowed=mixed_allowed and own is None)
    if own is None:
        return inside
    inner = sum(_count(block, prunable) for stack in inside for block in stack.blocks)
    return inside if inner == _count(module, prunable) else [own]


def _as_stack(module: nn.Module, path: str, prunable: set[nn.Module], *, mixed_allowed: bool) -> Stack | None:
    """A module as a stack, or None if it is none."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return None
    counts = {name: _count(child, prunable) for name, child in module.named_children()}
    members = {name: child for name, child in module.named_children() if counts[name]}
    if not members or max(counts.values()) < 2:
        return None
    one_class = len({type(child) for child in members.values()}) == 1
    if not one_class and not (mixed_allowed and min(counts[name] for name in members) >= 2):
        return None
    names = tuple(full_name(path, name) for name in members)
    return Stack(path, names, tuple(members.values()))
