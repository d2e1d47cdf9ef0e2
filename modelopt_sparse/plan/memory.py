"""The memory of a run, estimated from shapes alone: upper bounds in bytes.

For `sparsify` it is what the run holds beside the model. For `sparsify_checkpoint`, which streams the model from its
files, it is everything that the run holds.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.experts import UP, RoutedAdapter
from modelopt_sparse.model.hf import default_seq_len, writes_text
from modelopt_sparse.model.layers import Stack
from modelopt_sparse.plan.options import OWN_WINDOWS, STEP_TOKENS, Distill, SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan

HOST = "host"  # the place that is the CPU's memory
# bytes of a number of a layer's input while statistics are summed up from it: the input is cast to float32 for that
BYTES_PER_SUM = 4
# what a solver holds at its peak beside statistics and masks, at most, as multiples of the size of the weight ...
WORKSPACE_WEIGHTS = 10
# ... and of the size of the Gram matrix
WORKSPACE_GRAMS = 4
# copies of a block's weights that reconstruction holds: the optimizer's own, their gradients, its two moments, the best
# weights so far, and the masked weights of the graph
RECONSTRUCTION = 6
# copies of the logits of a step of distillation: the dense model's and the sparse one's, and the gradients of both and
# of one
LOGITS = 5
# copies of the statistics with deterministic=True: the sums of one call, those of another process, and the totals,
# which count twice, as they are in float64
DETERMINISTIC_COPIES = 4


def estimated(
    model: nn.Module, planned: Sequence[LayerPlan], stacks: Sequence[Stack], config: SparsifyConfig
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """(memory, streamed memory) of a run, in bytes.

    memory: what the bytes hold -> how many a run of `sparsify` takes beside the model.
    streamed memory: place ("host", and the device if it is another) -> what lies there -> how many bytes a run of
      `sparsify_checkpoint` takes in all; {} for a model without blocks.
    """
    experts_per_token = getattr(_text_config(model), "num_experts_per_tok", None)
    window = config.seq_len or default_seq_len(model)
    text_tokens = (config.num_samples + _own_windows(model, config)) * window if config.holds_text else None
    beside = beside_the_model(model, planned, config, text_tokens, experts_per_token)
    calibrated = any(layer_plan.calibrated for layer_plan in planned)
    # how many tokens a data_loader, a forward_loop or a processor yields is not known yet
    known = calibrated and config.data_loader is None and config.forward_loop is None and config.processor is None
    tokens = config.num_samples * window if known else None  # a streamed model writes none
    return beside, _streamed(model, planned, stacks, config, beside, tokens, experts_per_token)


def _own_windows(model: nn.Module, config: SparsifyConfig) -> int:
    """How many windows of text the model writes itself."""
    if config.self_data == "auto":
        return OWN_WINDOWS * config.num_samples if writes_text(model) and config.split_data else 0
    return int(config.self_data)


def experts_at_once(layer_plan: LayerPlan, config: SparsifyConfig) -> int | None:
    """How many experts of a mixture are solved together under ``memory_limit``; None if all of them are, or no mixture.

    Raises ValueError if not even one fits.
    """
    if config.memory_limit is None or not isinstance(layer_plan.layer.adapter, RoutedAdapter):
        return None
    each = sum(stats_and_workspace_numbers(layer_plan)) * bytes_per_number(layer_plan)
    if each > config.memory_limit:
        raise ValueError(
            f"layer {layer_plan.name!r}: statistics and solver of one expert take {each:,} bytes, more than "
            f"memory_limit={config.memory_limit:,}: raise it, or use a method that needs no Gram matrix"
        )
    fit = config.memory_limit // each
    return None if fit >= layer_plan.shape[0] else fit


def beside_the_model(
    model: nn.Module,
    planned: Sequence[LayerPlan],
    config: SparsifyConfig,
    tokens: int | None,
    experts_per_token: int | None,
) -> dict[str, int]:
    """What the bytes hold -> how many a run of `sparsify` takes beside the model.

    tokens: how many the calibration data has, None if that is not known.
    experts_per_token: of a mixture, None if the model's config names no number.
    """
    # by block; a layer outside of the blocks is alone
    statistics: dict[str, int] = {}
    tuned: dict[str, int] = {}
    routed: dict[str, int] = {}
    workspace = 0
    for layer_plan in planned:
        width, (needed, solver) = bytes_per_number(layer_plan), stats_and_workspace_numbers(layer_plan)
        together = layer_plan.name if layer_plan.block is None else layer_plan.block
        if layer_plan.at_once is None:
            statistics[together] = statistics.get(together, 0) + width * layer_plan.matrices * needed
            workspace = max(workspace, width * layer_plan.matrices * solver)
        else:  # an expert's Gram matrix is formed when it is solved; until then its square sums and its rows are held
            sums = layer_plan.matrices * layer_plan.shape[-1] if layer_plan.needs != "nothing" else 0
            statistics[together] = statistics.get(together, 0) + width * sums
            workspace = max(workspace, width * layer_plan.at_once * (needed + solver))
            if tokens is not None and experts_per_token is not None and layer_plan.needs == "gram":
                rows = tokens * layer_plan.shape[-1] * (1 if layer_plan.layer.adapter is UP else experts_per_token)
                routed[together] = routed.get(together, 0) + rows * layer_plan.layer.parameter.element_size()
        dense = 1 if config.reconstruct is not None and config.reconstruct.masks != "frozen" else 0
        tuned[together] = tuned.get(together, 0) + (RECONSTRUCTION + dense) * width * layer_plan.size
    copies = DETERMINISTIC_COPIES if config.deterministic else 1
    memory = {"statistics_of_one_block": copies * max(statistics.values()), "solver_workspace": workspace}
    if config.enforce:
        memory["masks"] = sum(layer_plan.size * (1 + len(layer_plan.layer.tied_modules)) for layer_plan in planned)
    if config.reconstruct is not None:
        memory["reconstruction_of_one_block"] = max(tuned.values())
        if config.reconstruct.metric != "plain":
            memory["fisher_metrics"] = _metrics(planned)
    if (distill := config.distill) is not None:
        tuning = _distillation(model, planned, config, distill, tokens)
        memory["distillation"], memory["distillation_on_the_host"] = tuning
    if routed:
        memory["routed_tokens_of_one_block"] = max(routed.values())
    if tokens is not None and (cached := _activations(model, planned, config, tokens)):
        memory["cached_activations"] = cached
    return memory


def _distillation(
    model: nn.Module, planned: Sequence[LayerPlan], config: SparsifyConfig, distill: Distill, tokens: int | None
) -> tuple[int, int]:
    """Bytes that tuning the whole model takes where the model is: value and two moments of each weight that stays, the
    gradients of one block, the logits of a step; and on the host: the best values so far, and what the dense model's
    output head was called with, if it is known how much that is."""
    remaining = {layer_plan.name: round(layer_plan.size * (1 - layer_plan.pattern.sparsity)) for layer_plan in planned}
    states = sum(_adam(layer_plan, distill) * remaining[layer_plan.name] for layer_plan in planned)
    best = sum(layer_plan.layer.parameter.element_size() * remaining[layer_plan.name] for layer_plan in planned)
    gradients = _by_block(planned, lambda layer_plan: layer_plan.size * layer_plan.layer.parameter.element_size())
    size = next(model.parameters()).element_size()
    step = max(STEP_TOKENS, config.seq_len or default_seq_len(model))
    logits = LOGITS * step * getattr(_text_config(model), "vocab_size", 0) * size
    answers = (tokens or 0) * (_hidden(model) or 0) * size
    return states + max(gradients.values()) + logits, best + answers


def _adam(layer_plan: LayerPlan, options: Distill) -> int:
    """Bytes of a value that is tuned and its two moments."""
    value = bytes_per_number(layer_plan)
    return value + 2 * (2 if options.moments == "bfloat16" else value)


def _metrics(planned: Sequence[LayerPlan]) -> int:
    """Bytes of a float32 matrix for each block's output, which is as wide as the input of the block's first layer."""
    first: dict[str, int] = {}
    for layer_plan in planned:
        if layer_plan.block is not None:
            first.setdefault(layer_plan.block, layer_plan.shape[-1])
    return sum(4 * width**2 for width in first.values())


def _streamed(
    model: nn.Module,
    planned: Sequence[LayerPlan],
    stacks: Sequence[Stack],
    config: SparsifyConfig,
    beside: Mapping[str, int],
    tokens: int | None,
    experts_per_token: int | None,
) -> dict[str, dict[str, int]]:
    """Place -> what lies there -> how many bytes a run of `sparsify_checkpoint` takes in all."""
    blocks = {name: block for stack in stacks for name, block in zip(stack.names, stack.blocks)}
    if "" in blocks:
        return {}
    outside, largest = _weights(model, blocks)
    masks = max(_by_block(planned, lambda layer_plan: layer_plan.size).values()) if config.enforce else 0
    batch = 0
    if tokens is not None:
        window = tokens // config.num_samples
        size = config.windows_per_batch(config.num_samples, window, config.device or input_device(model))
        rows = min(tokens, size * window)
        of_a_token = _by_block(planned, lambda layer_plan: bytes_per_token(layer_plan, experts_per_token))
        batch = rows * max(of_a_token.values())
    solving = {
        "statistics_of_one_block": beside["statistics_of_one_block"],
        # three steps share it, as they come one after the other: a batch runs through the block, a layer is solved, the
        # block is tuned
        "workspace": max(beside["solver_workspace"], beside.get("reconstruction_of_one_block", 0), batch),
    }
    if "routed_tokens_of_one_block" in beside:
        solving["routed_tokens_of_one_block"] = beside["routed_tokens_of_one_block"]
    host = {"outside_of_the_blocks": outside, "one_block_twice": 2 * largest, "masks_of_one_block": masks}
    if "fisher_metrics" in beside:
        host["fisher_metrics"] = beside["fisher_metrics"]
    held = {} if tokens is None else {"activations": _activations(model, planned, config, tokens)}
    if config.device is None or config.device.type == "cpu":
        return {HOST: host | held | solving}
    # activations are held on the device if there is room for them, which cannot be told here: count them in both places
    device = {"one_block": largest, "masks_of_one_block": masks, **held, **solving}
    return {HOST: host | held, str(config.device): device}


def _activations(model: nn.Module, planned: Sequence[LayerPlan], config: SparsifyConfig, tokens: int) -> int:
    """Bytes of the activations that are held from block to block.

    It is 0 if nothing is calibrated, or if the model's config does not tell how wide its hidden states are.
    """
    hidden = _hidden(model)
    if hidden is None or not any(layer_plan.calibrated for layer_plan in planned):
        return 0
    return activation_copies(config) * tokens * hidden * next(model.parameters()).element_size()


def _hidden(model: nn.Module) -> int | None:
    """How wide the hidden states are; None if the model's config does not tell."""
    return getattr(getattr(model, "config", None), "hidden_size", None)


def activation_copies(config: SparsifyConfig) -> int:
    """How many copies of the calibration data's activations are held from block to block, at most."""
    copies = 1 if config.reconstruct is None else 2 if config.reconstruct.target == "sparse" else 3
    if config.sequential == "none":  # a block's inputs stay until all of its outputs are there
        copies = max(copies, 2)
    return copies


def _weights(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[int, int]:
    """(bytes outside of the blocks, bytes of the largest block); what several blocks share counts as outside."""
    holders: dict[Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        paths = accumulate(name.split("."), "{}.{}".format)
        holders.setdefault(parameter, set()).add(next((path for path in paths if path in blocks), ""))
    own = dict.fromkeys(blocks, 0)
    outside = sum(buffer.nbytes for buffer in model.buffers())
    for parameter, where in holders.items():
        if len(where) == 1 and "" not in where:
            own[where.pop()] += parameter.nbytes
        else:
            outside += parameter.nbytes
    return outside, max(own.values())


def bytes_per_token(layer_plan: LayerPlan, experts_per_token: int | None) -> int:
    """Bytes that one token takes in a layer: its input, its output, and the input once more, in the dtype of sums."""
    *_, rows, columns = layer_plan.shape
    matrices = layer_plan.matrices
    if isinstance(layer_plan.layer.adapter, RoutedAdapter):  # a token goes to some of the experts
        matrices = experts_per_token or matrices
    return matrices * ((rows + columns) * layer_plan.layer.parameter.element_size() + columns * BYTES_PER_SUM)


def _by_block(planned: Sequence[LayerPlan], count: Callable[[LayerPlan], int]) -> dict[str | None, int]:
    """The sums of ``count`` over the layers of each block; None is the key of the layers outside of the blocks."""
    counts: dict[str | None, int] = {}
    for layer_plan in planned:
        counts[layer_plan.block] = counts.get(layer_plan.block, 0) + count(layer_plan)
    return counts


def stats_and_workspace_numbers(layer_plan: LayerPlan) -> tuple[int, int]:
    """(numbers in the statistics, numbers that the solver holds beside them at its peak) of one matrix of a layer."""
    *_, rows, columns = layer_plan.shape
    needed = {"nothing": 0, "square_sums": columns, "gram": columns**2}[layer_plan.needs]
    return needed, WORKSPACE_WEIGHTS * rows * columns + WORKSPACE_GRAMS * needed


def bytes_per_number(layer_plan: LayerPlan) -> int:
    """Bytes of a number of a layer's statistics and solver: they are in float32, of a float64 layer in float64."""
    return max(4, layer_plan.layer.parameter.element_size())


def _text_config(model: nn.Module) -> Any:
    """The config of a model, or of the text model inside it; None if the model has none."""
    config = getattr(model, "config", None)
    return config.get_text_config() if isinstance(config, PreTrainedConfig) else config
