"""The memory of a run, estimated from shapes alone: upper bounds in bytes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from modelopt_sparse.checks import grouped
from modelopt_sparse.model.devices import bytes_of, input_device
from modelopt_sparse.model.experts import UP
from modelopt_sparse.model.find import Stack
from modelopt_sparse.model.hf import default_seq_len, redraws_text, text_config_of, writes_text
from modelopt_sparse.model.layers import CONV
from modelopt_sparse.plan.options import OWN_BATCH, OWN_WINDOWS, STEP_TOKENS, TOKENS_TO_MOVE, SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.text import first_few

HOST = "host"  # the place that is the CPU's memory
BYTES_PER_SUM = 4  # of a number of a layer's input, which is cast to float32 for its statistics
# the most that a solver holds beside statistics and masks: copies of the weight, and of the statistics
WORKSPACE_WEIGHTS, WORKSPACE_GRAMS = 10, 4
# copies of a block's weights that reconstruction holds: the optimizer's own, gradients, two moments, the best so far,
# and the masked weights of the graph; beside these the dense ones where masks move
RECONSTRUCTION = 6
# bytes for each number of a Gram matrix, and of a weight, that the choice of channels and the refit hold beside the
# sums: five and nine copies in float64, and the sum of both Gram matrices in float32
CHOICE_GRAMS, CHOICE_WEIGHTS = 5 * 8 + 4, 9 * 8
ROUTE = 20  # bytes of a token and an expert that it is routed to: two places and a gate
# copies of the logits in a step of distillation: those of the dense and the sparse model, and three gradients
LOGITS = 5


def estimated(
    model: nn.Module,
    planned: Sequence[LayerPlan],
    stacks: Sequence[Stack],
    config: SparsifyConfig,
    takers: Mapping[str, bool] | None = None,
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """(memory, streamed memory) of a run: part -> bytes.

    memory: of a run of `sparsify`, beside the model.
    streamed memory: of a run of `sparsify_checkpoint` (with ``takers``, layers -> whether they are refit when channels
      or experts go: of `shrink_checkpoint`), with the model, by place; {} for a model without blocks.
    """
    text, reconstruct, distill = text_config_of(model), config.reconstruct, config.distill
    window, added = config.seq_len or default_seq_len(model), _own_windows(model, config)
    tokens = (config.num_samples + added) * window if config.holds_text else 0  # 0: not known before they are read
    calibrated = takers is not None or any(layer_plan.calibrated for layer_plan in planned)
    widens, per_token = calibrated and config.widens(model), experts_per_token(model)
    layers = [_layer_bytes(layer_plan, config, per_token, widens=widens) for layer_plan in planned]
    if takers is not None:
        layers = [_choice_bytes(layer, layer_plan, takers, per_token) for layer, layer_plan in zip(layers, planned)]
        tokens = 0 if config.data_loader is not None else config.num_samples * window
    # layers outside of the blocks count each by itself, or all as one more block
    largest = _largest(layers, [x.name if x.block is None else x.block for x in planned])
    together, in_all = _largest(layers, [x.block for x in planned]), _largest(layers, [None] * len(planned))
    value = next(model.parameters()).element_size()
    hidden = value * (getattr(getattr(model, "config", None), "hidden_size", None) or 0)  # bytes of a token

    memory = {
        "statistics_of_one_block": largest["statistics"],
        "solver_workspace": max(layer["workspace"] for layer in layers),
    }
    if pieces := max(layer["pieces"] for layer in layers):
        memory["solutions_of_one_layer"] = pieces
    if widens:  # modules that are held in float32, each for the length of a call
        by_module = grouped(planned, lambda layer_plan: layer_plan.layer.owner).values()
        memory["layer_in_float32"] = BYTES_PER_SUM * max(sum(x.size for x in plans) for plans in by_module)
    if config.enforce:
        memory["masks"] = in_all["masks"]
    if config.budget is not None:  # the solutions of the choice and of the plain plan, which are compared
        memory["weights_of_two_plans"] = 2 * in_all["gradients"]
    if reconstruct is not None:
        memory |= _reconstruction_bytes(planned, config, tokens, largest["tuned"])
    if distill is not None:
        logits = LOGITS * max(STEP_TOKENS, window) * getattr(text, "vocab_size", 0) * value
        memory["distillation"] = in_all["states"] + together["gradients"] + logits
        # the best values so far, and what the dense model's output head was called with
        memory["distillation_on_the_host"] = in_all["best"] + tokens * hidden
    # held from block to block: what the block before has put out; and what the dense block before has, and the dense
    # block itself, which blocks are tuned towards
    activations = (1 if reconstruct is None else 3) * hidden if calibrated else 0
    token_bytes = {"routed_tokens_of_one_block": largest["routed"], "cached_activations": activations}
    memory |= {part: tokens * size for part, size in token_bytes.items() if tokens and size}
    # how many tokens a data_loader, a forward_loop or a processor yields is not known yet; a streamed model writes none
    known = calibrated and config.data_loader is None and config.forward_loop is None and config.processor is None
    of_text = _text_bytes(model, config, window, added, value, together["batch"]) if known else {}
    memory |= of_text if config.holds_text else {}
    activations *= config.num_samples * window if known else 0
    return memory, _streamed(model, stacks, config, memory | of_text, together["size"], activations)


def _streamed(
    model: nn.Module,
    stacks: Sequence[Stack],
    config: SparsifyConfig,
    memory: Mapping[str, int],
    block_size: int,
    activations: int,
) -> dict[str, dict[str, int]]:
    """Place -> part -> bytes of a run of `sparsify_checkpoint`. ``block_size``: the most weights that a block has in
    layers. ``activations``: bytes between two blocks."""
    by_block = parameters_by_block(model, (name for stack in stacks for name in stack.names))
    if "" in by_block:
        return {}
    sizes = [sum(x.nbytes for x in parameters.values() if not x.is_sparse) for parameters in by_block.values()]
    largest = max(sizes)
    outside = sum(x.nbytes for x in (*model.parameters(), *model.buffers()) if not x.is_sparse) - sum(sizes)
    masks = block_size if config.enforce else 0
    held = {"activations": activations} if activations else {}
    # they share it, one after the other: a batch runs through the block, a layer is solved, the block is tuned
    in_turn = ("solver_workspace", "reconstruction_of_one_block", "one_batch_in_one_block")
    workspace = max(memory.get(part, 0) for part in in_turn)

    def as_above(*parts: str) -> dict[str, int]:
        return {part: memory[part] for part in parts if part in memory}

    solving = {**as_above("statistics_of_one_block"), "workspace": workspace}
    solving |= as_above("routed_tokens_of_one_block", "solutions_of_one_layer")
    host = {"outside_of_the_blocks": outside, "one_block_twice": 2 * largest, "masks_of_one_block": masks}
    if config.reconstruct is not None and config.reconstruct.metric == "fisher":  # "auto" is plain here
        host |= as_above("fisher_metrics")
    host |= as_above("layer_in_float32", "logits_of_one_batch")
    if config.device is None or config.device.type == "cpu":
        return {HOST: host | held | solving}
    device = {"one_block": largest, "masks_of_one_block": masks, **solving}
    return {HOST: host | held, str(config.device): device}


def experts_at_once(layer_plan: LayerPlan, config: SparsifyConfig) -> int | None:
    """Number of experts of a mixture that are solved together under ``memory_limit``; None if all are, or it is no
    mixture.

    Raises ValueError if not even one fits.
    """
    if config.memory_limit is None or not layer_plan.routed:
        return None
    expert_bytes = sum(_matrix_bytes(layer_plan))
    if expert_bytes > config.memory_limit:
        problem = f"one expert takes {expert_bytes:,} bytes, more than memory_limit={config.memory_limit:,}"
        raise ValueError(f"layer {layer_plan.name!r}: {problem}: raise it, or use a method that needs no Gram matrix")
    fit = config.memory_limit // expert_bytes
    return None if fit >= layer_plan.shape[0] else fit


def experts_per_token(model: nn.Module) -> int | None:
    """How many experts of a mixture the config says that a token goes through; None: it does not say, and all of them
    count here, for no run of the model has counted them."""
    return getattr(text_config_of(model), "num_experts_per_tok", None)


def lacking(plan: Plan, config: SparsifyConfig) -> str | None:
    """Say which layers need more at once than their device has, whatever else is freed and however small their pieces,
    and what to do. They need room for the sums of their inputs, and beside those of a matrix for what `sparsegpt`,
    `alps` and polish make of them: the damped Gram matrix, and two more on the way to its factor, or to the scaled
    one."""
    short, ask_once = [], cache(bytes_of)  # it reads files: a tenth of a run on a tiny model
    for layer_plan in plan.layers:
        device = config.device or input_device(layer_plan.layer.owner)
        solver = layer_plan.choices or "polish" in layer_plan.steps or layer_plan.method.name in ("sparsegpt", "alps")
        apart = layer_plan.layer.adapter is CONV or (layer_plan.routed and layer_plan.at_once is None)
        least = _matrix_bytes(layer_plan)[0] * ((3 if solver else 0) + (layer_plan.matrices if apart else 1))
        if least > (most := ask_once(device)[0]):
            short.append(f"{layer_plan.name} takes {least:,} bytes at once, {device} has {most:,.0f}")
    advice = "exclude such layers, or give them a method without Gram matrices: rules={'NAME': {'method': 'wanda'}}"
    return f"more memory than there is for {len(short)} layers: {first_few(short)}: {advice}" if short else None


def tight(plan: Plan, config: SparsifyConfig) -> str | None:
    """Say where a run may take more than is free now, and what to do."""
    layer = plan.layers[0].layer
    device = str(config.device or input_device(layer.owner))
    for name, parts in (plan.streamed if plan.streamed and layer.values.is_meta else {device: plan.memory}).items():
        _, free = bytes_of(torch.device("cpu" if name == HOST else name))
        if (most := sum(parts.values())) > free:
            sizes = f"takes {most:,} bytes at most on {name}, where {max(free, 0):,.0f} are free"
            return f"this run {sizes}: free some, exclude the largest layers, or use a method without Gram matrices"
    return None


# parts ----------------------------------------------------------------------------------------------------------------


def _own_windows(model: nn.Module, config: SparsifyConfig) -> int:
    """How many windows of text the model adds to the user's, at most."""
    if not isinstance(added := config.self_data, str):
        return added
    adds = config.split_data and (added == "auto" or redraws_text(model))
    return OWN_WINDOWS[added] * config.num_samples if adds else 0


def _reconstruction_bytes(
    planned: Sequence[LayerPlan], config: SparsifyConfig, tokens: int, tuned: int
) -> dict[str, int]:
    """Part -> bytes of reconstruction, and of its metrics. ``tuned``: of the values of the largest block."""
    options = config.reconstruct
    assert options is not None
    few = tokens and tokens < TOKENS_TO_MOVE * min(layer_plan.shape[-1] for layer_plan in planned)
    copies = RECONSTRUCTION + (options.masks == "move" or (options.masks == "auto" and not few))
    parts = {"reconstruction_of_one_block": copies * tuned}
    if options.metric != "plain":  # in float32, as wide as a block's output, and so as its first layer's input
        widths = {x.block: x.shape[-1] for x in reversed(planned) if x.block is not None}
        parts["fisher_metrics"] = sum(4 * width**2 for width in widths.values())
    return parts


def _text_bytes(
    model: nn.Module, config: SparsifyConfig, window: int, added: int, value: int, token: int
) -> dict[str, int]:
    """Part -> bytes of calls on text: what goes in and out of a block's layers, ``token`` bytes of each token; what the
    first one puts out, which goes to the end of the model; keys and values of ``added`` windows that the model writes
    itself. ``value``: bytes of a number."""
    text = text_config_of(model)
    vocabulary, layers = (getattr(text, name, None) or 0 for name in ("vocab_size", "num_hidden_layers"))
    windows = config.windows_per_batch(config.num_samples, window, config.device or input_device(model))
    tokens, written = min(config.num_samples, windows) * window, config.num_samples if config.writes_its_data else added
    parts = {"one_batch_in_one_block": tokens * token}
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        parts["logits_of_one_batch"] = tokens * vocabulary * value
    if written and writes_text(model):
        differ = getattr(text, "is_heterogeneous", False)  # as heads of Gemma 4 do
        channels = sum(map(_key_channels, text.per_layer_config if differ else [text] * layers))
        parts["cache_of_own_text"] = 2 * channels * min(OWN_BATCH, written) * window * value
    return parts


def _key_channels(config: Any) -> int:
    """Channels of the keys of one token in a block."""
    names = ("num_attention_heads", "head_dim", "hidden_size", "num_key_value_heads")
    heads, size, hidden, shared = (getattr(config, name, None) or 0 for name in names)
    return (size or hidden // max(heads, 1)) * (shared or heads)


def _layer_bytes(layer_plan: LayerPlan, config: SparsifyConfig, chosen: int | None, *, widens: bool) -> dict[str, int]:
    """Part -> bytes of one layer; "routed" and "batch" -> bytes of one token in it. ``chosen``: experts per token."""
    *_, rows, columns = layer_plan.shape
    layer, matrices, size = layer_plan.layer, layer_plan.matrices, layer_plan.size
    value, number = layer.parameter.element_size(), _bytes_per_number(layer_plan)
    statistics, solver = _matrix_bytes(layer_plan)
    workspace, routed, pieces = matrices * solver, 0, 0
    if layer_plan.at_once is not None:  # an expert's Gram matrix is made when it is solved, from its rows
        workspace = layer_plan.at_once * (statistics + solver)
        pieces = 2 * size * (value + 1)  # weights and masks as they are solved, and all of them put together
        statistics = min(statistics, number * columns)
        if _needs(layer_plan) == "gram":  # those that see all tokens, which may be all, have rows of their own
            passes = [chosen or matrices] + [matrices] * (config.experts == "all_tokens")
            routed = (len(passes) if layer.adapter is UP else sum(passes)) * columns * value
    # a token goes through all matrices, or through some of the experts
    through = chosen or matrices if layer_plan.routed else matrices
    remaining = round(size * (1 - layer_plan.pattern.sparsity))
    moment = 2 if config.distill is not None and config.distill.moments == "bfloat16" else number
    return {
        "statistics": matrices * statistics,
        "workspace": workspace,
        "pieces": pieces,
        "size": size,
        "masks": size * (1 + len(layer.tied_modules)),
        "tuned": number * size,
        "gradients": value * size,
        "states": (number + 2 * moment) * remaining,
        "best": value * remaining,
        "routed": routed,
        "batch": through * ((rows + columns) * (value + widens * BYTES_PER_SUM) + columns * BYTES_PER_SUM),
    }


def _choice_bytes(
    layer: Mapping[str, int], layer_plan: LayerPlan, takers: Mapping[str, bool], per_token: int | None
) -> dict[str, int]:
    """Part -> bytes of one layer whose channels or experts are chosen and refit, which no method solves.

    ``layer``: what `_layer_bytes` gives. ``takers``: layer name -> whether it is refit.
    """
    chosen = per_token or layer_plan.matrices
    layer, (*_, rows, columns) = {**layer, "statistics": 0, "workspace": 0, "routed": 0, "pieces": 0}, layer_plan.shape
    if layer_plan.name not in takers:
        return layer
    if not layer_plan.routed:
        layer["statistics"] = 2 * BYTES_PER_SUM * columns**2  # what is fitted to and what judges, apart
        layer["workspace"] = CHOICE_GRAMS * columns**2 + CHOICE_WEIGHTS * layer_plan.size
        return layer
    layer["batch"] += 2 * BYTES_PER_SUM * chosen * rows  # what each expert puts out, and the same times its gate
    if takers[layer_plan.name]:
        # of each token: what the mixture takes in, what the smaller one puts out less than it, gates and places, and of
        # one expert at a time what its last matrix takes in
        value = layer_plan.layer.parameter.element_size()
        layer["routed"] = (value + BYTES_PER_SUM) * rows + ROUTE * chosen + BYTES_PER_SUM * columns
        # copies of all matrices; the sums of one expert, of what it takes in and of what the output lacks
        layer["workspace"] = 2 * BYTES_PER_SUM * layer_plan.size + CHOICE_GRAMS * (columns + rows) ** 2
    return layer


def _matrix_bytes(layer_plan: LayerPlan) -> tuple[int, int]:
    """Bytes of the statistics of one matrix of a layer, and of what its solver holds beside them at its peak."""
    *_, rows, columns = layer_plan.shape
    needed = {"nothing": 0, "square_sums": columns, "gram": columns**2}[_needs(layer_plan)]
    number = _bytes_per_number(layer_plan)
    return number * needed, number * (WORKSPACE_WEIGHTS * rows * columns + WORKSPACE_GRAMS * needed)


def _needs(layer_plan: LayerPlan) -> str:
    """The statistics that are collected for a layer; choices are weighed by SparseGPT's solutions."""
    return "gram" if layer_plan.choices else layer_plan.needs


def _bytes_per_number(layer_plan: LayerPlan) -> int:
    """Bytes of a number of a layer's statistics and solver: they are in float32, of a float64 layer in float64."""
    return max(4, layer_plan.layer.parameter.element_size())


def _largest(layers: Sequence[Mapping[str, int]], blocks: Sequence[str | None]) -> dict[str, int]:
    """Part -> the largest sum over the layers of a block. ``blocks``: that of each layer."""
    sums: dict[str | None, Counter[str]] = defaultdict(Counter)
    for layer, block in zip(layers, blocks):
        sums[block].update(layer)
    return {part: max(block_sums[part] for block_sums in sums.values()) for part in layers[0]}


def parameters_by_block(model: nn.Module, blocks: Iterable[str]) -> dict[str, dict[str, nn.Parameter]]:
    """Block -> the parameters that no other part of the model holds, each under the first of its names."""
    by_block: dict[str, dict[str, nn.Parameter]] = {block: {} for block in blocks}
    holders: dict[nn.Parameter, dict[str, str]] = {}  # -> block, or "", -> the first name there
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((path for path in accumulate(name.split("."), "{}.{}".format) if path in by_block), "")
        holders.setdefault(parameter, {}).setdefault(block, name)
    for parameter, names in holders.items():
        (block, name), *others = names.items()
        if block and not others:
            by_block[block][name] = parameter
    return by_block
