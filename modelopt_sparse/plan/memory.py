"""What a run holds: beside the model, or in all where a checkpoint is streamed. Upper bounds, from shapes alone."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from modelopt_sparse.model.experts import UP, RoutedAdapter
from modelopt_sparse.model.hf import default_seq_len
from modelopt_sparse.model.stacks import Stack
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan

HOST = "host"
SUM = 4  # bytes of a number of an input that statistics are summed of
# what a solver holds at its peak beside statistics and masks, at most, in numbers of its working precision
WORKSPACE_WEIGHTS = 10  # times the weights
WORKSPACE_GRAMS = 4  # times the Gram matrix
# copies of a block's weights: the optimizer's, their gradients, two moments, the best so far, a graph's masked ones
RECONSTRUCTION = 6
IN_ORDER = 4  # deterministic: sums of one call, those of another process, and totals in float64


def estimated(
    model: nn.Module, planned: Sequence[LayerPlan], stacks: Sequence[Stack], config: SparsifyConfig
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Bytes beside the model, by what they hold; and those of the same run if it streams a checkpoint, in all: place
    ("host", and the device if there is another one) -> what lies there -> bytes, {} for a model without blocks."""
    chosen = getattr(_text_config(model), "num_experts_per_tok", None)
    window = config.seq_len or default_seq_len(model)
    beside = _beside(model, planned, config, None if config.data is None else config.num_samples * window, chosen)
    # how much a data_loader or a forward_loop gives is not known yet
    known = config.data_loader is None and config.forward_loop is None and any(item.calibrated for item in planned)
    tokens = config.num_samples * window if known else None
    return beside, _streamed(model, planned, stacks, config, beside, tokens, chosen)


def experts_at_once(item: LayerPlan, config: SparsifyConfig) -> int | None:
    """How many experts of a mixture the memory limit leaves room for; None if it leaves room for all."""
    if config.memory_limit is None or not isinstance(item.layer.adapter, RoutedAdapter):
        return None
    each = sum(_numbers(item)) * _width(item)
    if each > config.memory_limit:
        raise ValueError(
            f"layer {item.name!r}: statistics and solver of one expert take {each:,} bytes, more than "
            f"memory_limit={config.memory_limit:,}: raise it, or use a method that needs no Gram matrix"
        )
    fit = config.memory_limit // each
    return None if fit >= item.shape[0] else fit


def _beside(
    model: nn.Module, planned: Sequence[LayerPlan], config: SparsifyConfig, tokens: int | None, chosen: int | None
) -> dict[str, int]:
    """``tokens``: of the calibration data, if they are known; ``chosen``: experts for each."""
    statistics: dict[str, int] = {}
    tuned: dict[str, int] = {}
    kept: dict[str, int] = {}
    workspace = 0
    for item in planned:
        width, (needed, solver) = _width(item), _numbers(item)
        together = item.name if item.block is None else item.block
        if item.at_once is None:
            statistics[together] = statistics.get(together, 0) + width * item.matrices * needed
            workspace = max(workspace, width * item.matrices * solver)
        else:  # Gram matrices are formed as experts are solved, and square sums are all that is held of the others
            sums = item.matrices * item.shape[-1] if item.needs != "nothing" else 0
            statistics[together] = statistics.get(together, 0) + width * sums
            workspace = max(workspace, width * item.at_once * (needed + solver))
            if tokens is not None and chosen is not None and item.needs == "gram":
                rows = tokens * item.shape[-1] * (1 if item.layer.adapter is UP else chosen)
                kept[together] = kept.get(together, 0) + rows * item.layer.parameter.element_size()
        tuned[together] = tuned.get(together, 0) + RECONSTRUCTION * width * item.size
    copies = IN_ORDER if config.deterministic else 1
    memory = {"statistics_of_one_block": copies * max(statistics.values()), "solver_workspace": workspace}
    if config.enforce:
        memory["masks"] = sum(item.size * (1 + len(item.layer.tied_modules)) for item in planned)
    if config.reconstruct is not None:
        memory["reconstruction_of_one_block"] = max(tuned.values())
    if kept:
        memory["routed_tokens_of_one_block"] = max(kept.values())
    if tokens is not None and (cached := _activations(model, planned, config, tokens)):
        memory["cached_activations"] = cached
    return memory


def _streamed(
    model: nn.Module,
    planned: Sequence[LayerPlan],
    stacks: Sequence[Stack],
    config: SparsifyConfig,
    beside: Mapping[str, int],
    tokens: int | None,
    chosen: int | None,
) -> dict[str, dict[str, int]]:
    blocks = {name: block for stack in stacks for name, block in zip(stack.names, stack.blocks)}
    if "" in blocks:
        return {}
    outside, largest = _weights(model, blocks)
    masks = max(_by_block(planned, lambda item: item.size).values()) if config.enforce else 0
    batch = 0
    if tokens is not None:
        rows = min(tokens, config.batch_size * (tokens // config.num_samples))
        batch = rows * max(_by_block(planned, lambda item: _row(item, chosen)).values())
    solving = {
        "statistics_of_one_block": beside["statistics_of_one_block"],
        # one after the other: a batch goes through the block, a layer is solved, the block is tuned
        "workspace": max(beside["solver_workspace"], beside.get("reconstruction_of_one_block", 0), batch),
    }
    if "routed_tokens_of_one_block" in beside:
        solving["routed_tokens_of_one_block"] = beside["routed_tokens_of_one_block"]
    host = {"outside_of_the_blocks": outside, "one_block_twice": 2 * largest, "masks_of_one_block": masks}
    held = {} if tokens is None else {"activations": _activations(model, planned, config, tokens)}
    if config.device is None or config.device.type == "cpu":
        return {HOST: host | held | solving}
    # activations are held on the device if there is room for them, which cannot be told before
    device = {"one_block": largest, "masks_of_one_block": masks, **held, **solving}
    return {HOST: host | held, str(config.device): device}


def _activations(model: nn.Module, planned: Sequence[LayerPlan], config: SparsifyConfig, tokens: int) -> int:
    """Bytes that are kept from block to block; 0 where nothing is calibrated, or the width is not known."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if hidden is None or not any(item.calibrated for item in planned):
        return 0
    return states(config) * tokens * hidden * next(model.parameters()).element_size()


def states(config: SparsifyConfig) -> int:
    """How many activations of all calibration data are held from block to block, at most."""
    copies = 1 if config.reconstruct is None else 2 if config.reconstruct.target == "sparse" else 3
    if config.sequential == "none":  # a block's inputs stay until all of its outputs are there
        copies = max(copies, 2)
    return copies


def _weights(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Bytes outside of the blocks, with what several of them share, and those of the largest block."""
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


def _row(item: LayerPlan, chosen: int | None) -> int:
    """Bytes of one token's inputs and outputs of a layer, and of the input as statistics are summed."""
    *_, rows, columns = item.shape
    times = item.matrices if not isinstance(item.layer.adapter, RoutedAdapter) else chosen or item.matrices
    return times * ((rows + columns) * item.layer.parameter.element_size() + columns * SUM)


def _by_block(planned: Sequence[LayerPlan], count: Callable[[LayerPlan], int]) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for item in planned:
        found[item.block] = found.get(item.block, 0) + count(item)
    return found


def _numbers(item: LayerPlan) -> tuple[int, int]:
    """How many numbers the statistics of one of a layer's matrices hold, and its solver beside them at its peak."""
    *_, rows, columns = item.shape
    needed = {"nothing": 0, "square_sums": columns, "gram": columns**2}[item.needs]
    return needed, WORKSPACE_WEIGHTS * rows * columns + WORKSPACE_GRAMS * needed


def _width(item: LayerPlan) -> int:
    """Bytes of a number: statistics and solvers work in float32 or better."""
    return max(4, item.layer.parameter.element_size())


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if isinstance(config, PreTrainedConfig) else config
