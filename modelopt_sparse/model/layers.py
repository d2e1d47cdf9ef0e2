"""Which parameters of a model are prunable layers, and why the others are not."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as HFConv1D

from modelopt_sparse.model.adapters import (
    CONV,
    HF_CONV1D,
    IN_PROJ,
    LINEAR,
    OUT_PROJ,
    SEPARATE_PROJ,
    Adapter,
    RowAdapter,
)
from modelopt_sparse.model.experts import Mixture, expert_adapter, find_mixtures
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.offload import stored
from modelopt_sparse.model.reparametrized import reparametrization


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
        return self.owner.get_parameter(self.param)

    @property
    def values(self) -> Tensor:
        """Where the parameter's values really are: accelerate may hold them elsewhere between calls."""
        return stored(self.owner, self.param).detach()

    @property
    def mask(self) -> Tensor | None:
        """The mask that the parameter carries, True = kept, ``[..., R, C]``: of several modules that hold it, what all
        of them keep. None if it carries none."""
        masks = [dict(named_masks(module)).get(self.param) for module in (self.owner, *self.tied_modules)]
        carried = [self.matrix(mask) for mask in masks if mask is not None]
        return functools.reduce(torch.logical_and, carried) if carried else None

    def matrix(self, weight: Tensor) -> Tensor:
        return self.adapter.matrix(self.owner, weight)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        return self.adapter.unmatrix(self.owner, matrix)

    def columns(self, weight: Tensor) -> int:
        return self.adapter.columns(self.owner, weight)


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
    owner.get_parameter(param)
    return Layer(parameter_name, parameter_name, owner, param, RowAdapter(param), ())


class PackedLayer(nn.Module):
    """A layer whose weight is packed for a 2:4 kernel. It can neither be pruned, verified nor restored into.

    The packed layers of runtime/ inherit from it, so that `refuse_packed` need not import them.
    """


def refuse_packed(model: nn.Module, done: str) -> None:
    """Raise ValueError if a layer of the model is packed. ``done`` says in the message what it cannot be: "pruned"."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLayer):
            raise ValueError(
                f"layer {name!r} is packed 2:4 and cannot be {done}: call modelopt_sparse.to_dense(model) first"
            )


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
        parameter_name = f"{path}.{param}".removeprefix(".")
        names = tuple(
            path if param == "weight" and path else f"{path}.{param}".removeprefix(".") for path, _, param in held
        )
        classified = [_classify(owner, held_as, attention_out, mixtures.get(owner)) for _, owner, held_as in held]
        reasons = [reason for reason in classified if isinstance(reason, str)]
        adapters = [adapter for adapter in classified if isinstance(adapter, Adapter)]
        uses = {(adapter, held_as, adapter.signature(owner)) for adapter, (_, owner, held_as) in zip(adapters, held)}
        if not reasons and len(uses) == 1:
            fused = mixtures.get(module, Mixture())
            layers.append(
                Layer(
                    names[0],
                    parameter_name,
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
        others.append(Unprunable(names, module, tuple(module.get_parameter(param).shape), reason))
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


def _classify(
    module: nn.Module, param: str, attention_out: Mapping[nn.Module, nn.Module], mixture: Mixture | None
) -> Adapter | str:
    """The adapter of a parameter, or the reason why it is not prunable."""
    if module.get_parameter(param).is_complex():
        return "complex weights: methods prune real ones"
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
    fused = expert_adapter(module, param, mixture)
    if fused is not None:
        return fused
    if "router" in type(module).__name__.lower():
        return "MoE router"
    return reparametrization(module, param) or f"no adapter for {type(module).__name__}.{param}"
