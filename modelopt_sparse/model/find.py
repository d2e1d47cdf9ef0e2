"""What a model consists of: its prunable layers, why other weights stay dense, and the stacks of blocks that layers lie
in."""

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

from modelopt_sparse.model.devices import full_name, identity_of, parameter_of, unwrapped
from modelopt_sparse.model.experts import Mixture, expert_adapter, find_mixtures
from modelopt_sparse.model.layers import (
    CONV,
    HF_CONV1D,
    IN_PROJ,
    LINEAR,
    OUT_PROJ,
    SEPARATE_PROJ,
    Adapter,
    Layer,
)
from modelopt_sparse.model.masking import dense_class

# models that can be used ----------------------------------------------------------------------------------------------


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


# layers, and what is none ---------------------------------------------------------------------------------------------


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
                holders.setdefault(identity_of(module, param), []).append((path, module, param))
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
    for index in range(1, len(parts)):
        if "experts" in parts[index - 1]:
            listed = model.get_submodule(".".join(parts[:index]))
            if isinstance(listed, (nn.ModuleList, nn.ModuleDict)) and len(listed) > 1:
                return ".".join([*parts[:index], "*", *parts[index + 1 :]])
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
    attention = module if isinstance(module, nn.MultiheadAttention) else attention_out.get(module)
    if attention is not None and dense_class(attention).forward is not nn.MultiheadAttention.forward:
        return f"{dense_class(attention).__name__} has a forward of its own, which may do something else with it"
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
    """Reason to leave a parameter alone from which torch computes a weight in each forward; None for any other."""
    undone_by = "parametrize.remove_parametrizations" if isinstance(module, ParametrizationList) else None
    whole, _, part = param.rpartition("_")
    for (ending, partner), function in UNDONE_BY.items():
        if part == ending and isinstance(getattr(module, f"{whole}_{partner}", None), Tensor):
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
    """The modules on top of the features of a model without a stack.

    Of transformers' models these are all that lie outside of their base model. Of any other model it is its last layer,
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
                sibling.startswith("experts") or "experts" in dense_class(beside).__name__.lower()
                for sibling, beside in module.named_children()
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
    attention, MLP or residual branch), and all of them are of one class. Three more rules:

    - A block that is a list itself, as of an attention and an MLP, stands for the modules in it.
    - A list of mixed classes counts if each block holds two prunable layers or more, and no list of one class encloses
      it (hybrids of attention and state space layers).
    - Of nested stacks the inner ones count if they hold every prunable layer of the outer one (the stages of a ResNet).
      Otherwise the outer one counts (a mixture of experts, whose experts are a list as well), unless it is one module
      with others that hold no layers (a model behind a normalization).
    """
    prunable = set(prunable)
    whole = [Stack("", ("",), (model,))] if _count(model, prunable) else []
    return _search(model, "", prunable, mixed_allowed=True) or whole


def _count(module: nn.Module, prunable: set[nn.Module]) -> int:
    """How many prunable layers a module holds."""
    return sum(child in prunable for child in module.modules())


def _search(module: nn.Module, path: str, prunable: set[nn.Module], *, mixed_allowed: bool) -> list[Stack]:
    """The stacks in and below a module that lies at ``path``."""
    stack = _as_stack(module, path, prunable, mixed_allowed=mixed_allowed)
    counts = [_count(child, prunable) for child in module.children()]
    around = stack is None or sum(map(bool, counts)) == 1 < len(counts)
    inside: list[Stack] = []
    for name, child in module.named_children():
        inside += _search(child, full_name(path, name), prunable, mixed_allowed=mixed_allowed and around)
    if stack is None or (around and inside):
        return inside
    inner = sum(_count(block, prunable) for stack in inside for block in stack.blocks)
    return inside if inner == _count(module, prunable) else [stack]


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
    blocks = dict(
        part for name, child in members.items() for part in _called_parts(full_name(path, name), child, prunable)
    )
    return Stack(path, tuple(blocks), tuple(blocks.values()))


def _called_parts(path: str, module: nn.Module, prunable: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """A module by its path, or what it lists that holds prunable layers: a list itself is never called."""
    if dense_class(module).forward is not nn.Module.forward:
        yield path, module
        return
    for name, child in module.named_children():
        if _count(child, prunable):
            yield from _called_parts(full_name(path, name), child, prunable)
