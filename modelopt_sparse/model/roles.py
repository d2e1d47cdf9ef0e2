"""Layers that stay dense for what they do in the model: heads, routers, adapters, weights that are read, not called."""

from collections.abc import Collection, Iterator

from torch import nn
from transformers import PreTrainedModel

from modelopt_sparse.model.masking import dense_class
from modelopt_sparse.model.tuners import REASON as TUNER
from modelopt_sparse.model.tuners import tuner_modules

OUTPUT_HEAD, MOE_ROUTER, ROUTER = "output head", "MoE router", "router"
# names of a model's own child that turns features into its output
HEAD_NAMES = ("lm_head", "classifier", "head", "fc")


def protected_modules(model: nn.Module, prunable: Collection[nn.Module], *, one_block: bool) -> dict[nn.Module, str]:
    """Modules whose weights stay dense unless they are named in full -> the reason.

    ``prunable`` are the modules of prunable layers. ``one_block``: the model has no stack, so that its heads do not lie
    outside of its blocks.
    """
    reasons = {**dict.fromkeys(tuner_modules(model), TUNER), **dict(_within_blocks(model))}
    heads = [*_output_embeddings(model), *(_heads(model, set(prunable)) if one_block else ())]
    for name, module in model.named_children():
        if name == "lm_head":
            heads += module.modules()
    for head in heads:
        reasons.setdefault(head, OUTPUT_HEAD)
    return reasons


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            yield head


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
