"""Sparse-IFT from one knob, the level: the model, its sparse training, and the plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm, Static
from modelopt_sparse.training.iso_flop.members import Activation
from modelopt_sparse.training.iso_flop.plan import IsoPlan
from modelopt_sparse.training.iso_flop.replace import members_for
from modelopt_sparse.training.iso_flop.wide import wide_of

MEMBERS = ("wide", "parallel", "factorized", "doped")
ISO = ("layers", "model")


@dataclass(frozen=True)
class SparseIFT:
    """What `sparse_ift` returns: the model, the sparse training that makes it iso-FLOP, and the plan.

    >>> ift.sparsity.apply(ift.model)
    >>> ift.sparsity.apply(optimizer)
    """

    model: nn.Module
    sparsity: Group
    plan: IsoPlan


def sparse_ift(
    model_or_config: nn.Module | PretrainedConfig,
    sparsity: float,
    member: str = "wide",
    *,
    rule: Callable[[float], SparsityAlgorithm] = Static,
    iso: str = "layers",
    multiple: int = 1,
    include: Any = None,
    activation: Activation = nn.ReLU,
    example: Any = None,
) -> SparseIFT:
    """A model with larger, sparser layers of the same FLOPs, to be trained from scratch.

    model_or_config: a model; a config of transformers for "wide", which then gives a model on the meta device: build
      yours from ``ift.model.config``. A model on meta stays there.
    sparsity: the level, in [0, 1), which says how much larger layers become.
    member: what becomes larger. All but "wide" replace layers of the model in place, with new random weights:
      "wide": a new model of the same class, ``sqrt(1 / (1 - level))`` times as wide, with random weights. Of a model
        of transformers the config is scaled. In any other model Linear, convolutions, embeddings and norms are made
        wider; what it reads and gives keeps its size, and the layers there stay dense.
      "parallel": 1 / (1 - level) layers beside each other, each with its own non-linearity, added up.
      "factorized": two layers with a non-linearity between them.
      "doped": the layer, sparse, plus two dense ones of low rank.
    rule: level -> sparsity algorithm, for each level that occurs: ``lambda level: SET(level, update=100)``.
    iso: "layers": the level of each layer is solved so that its FLOPs are those of the dense one. "model" (wide): one
      level for all, so that those of the whole model are, its head included.
    multiple: widths are rounded up to a multiple of this.
    include: globs of layers to replace. The default is all of the blocks but attention's projections; a model without
      blocks keeps its first and its last layer.
    activation: a class of non-linearities for "parallel" and "factorized"; None: none.
    example: an input of the model, a tuple of positional arguments or a mapping of keywords, which the model is run on.
      FLOPs are then those of this input, else of a token. Sparse Wide needs it for a model that is not of transformers,
      and ``iso="model"`` for convolutions.

    Raises ValueError, with the model as it was, for a level or a model that does not work, and names the nearest levels
    that do.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity!r}: the level must be in [0, 1), for example 0.75; at 1 nothing is left")
    if member not in MEMBERS:
        raise ValueError(f"member={member!r}: allowed are {', '.join(MEMBERS)}")
    if iso not in ISO:
        raise ValueError(f"iso={iso!r}: allowed are {', '.join(ISO)}")
    level = float(sparsity)
    if member == "wide":
        if include is not None:
            raise ValueError("include is for the members that replace layers; Sparse Wide widens the whole model")
        wide, plan = wide_of(model_or_config, level, iso, multiple, example)
        return SparseIFT(wide, _group({layer.name: layer.level for layer in plan.layers}, rule), plan)
    model = model_or_config
    if not isinstance(model, nn.Module):
        raise ValueError(f"member {member!r} replaces layers of a model: build it from the config first")
    if iso == "model" or multiple != 1:
        raise ValueError(f"member {member!r} is iso-FLOP layer by layer: iso='model' and multiple are for 'wide'")
    modules, levels, plan = members_for(model, level, member, include, activation, example)
    group = _group(levels, rule)
    for name, module in modules.items():  # nothing has changed up to here
        model.set_submodule(name, module)
    return SparseIFT(model, group, plan)


def _group(levels: Mapping[str, float], rule: Callable[[float], SparsityAlgorithm]) -> Group:
    """One algorithm for each level that occurs; weights at level 0 stay dense."""
    by_level: dict[float, list[str]] = {}
    for name, level in levels.items():
        if level > 0:
            by_level.setdefault(level, []).append(name)
    group = Group()
    for level, names in by_level.items():
        group.add(names, rule(level))
    return group
