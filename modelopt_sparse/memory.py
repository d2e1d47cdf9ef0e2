"""What a run that streams a checkpoint holds at its peak, in all: upper bounds, from shapes alone."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor, nn

from modelopt_sparse.blocks import Stack
from modelopt_sparse.config import SparsifyConfig
from modelopt_sparse.experts import RoutedKind

if TYPE_CHECKING:
    from modelopt_sparse.plan import LayerPlan

HOST = "host"
SUM = 4  # bytes of a number of an input that statistics are summed of


def streamed_memory(
    model: nn.Module,
    planned: "Sequence[LayerPlan]",
    stacks: Sequence[Stack],
    config: SparsifyConfig,
    beside: Mapping[str, int],
    tokens: int | None,
    experts_per_token: int | None,
) -> dict[str, dict[str, int]]:
    """Place ("host", and the device if there is another one) -> what lies there -> bytes; {} for a model that has no
    blocks. ``beside``: the estimate of the same run in memory; ``tokens``: of the calibration data, if they are known.
    """
    blocks = {name: block for stack in stacks for name, block in zip(stack.names, stack.blocks)}
    if "" in blocks:
        return {}
    outside, largest = _weights(model, blocks)
    masks = max(_by_block(planned, lambda item: item.size).values()) if config.enforce else 0
    batch = 0
    if tokens is not None:
        rows = min(tokens, config.batch_size * (tokens // config.num_samples))
        batch = rows * max(_by_block(planned, lambda item: _row(item, experts_per_token)).values())
    solving = {
        "statistics_of_one_block": beside["statistics_of_one_block"],
        # one after the other: a batch goes through the block, a layer is solved, the block is tuned
        "workspace": max(beside["solver_workspace"], beside.get("reconstruction_of_one_block", 0), batch),
    }
    if "routed_tokens_of_one_block" in beside:
        solving["routed_tokens_of_one_block"] = beside["routed_tokens_of_one_block"]
    host = {"outside_of_the_blocks": outside, "one_block_twice": 2 * largest, "masks_of_one_block": masks}
    if tokens is not None:
        host["activations"] = activations(model, planned, config, tokens)
    if config.device is None or config.device.type == "cpu":
        return {HOST: host | solving}
    return {HOST: host, str(config.device): {"one_block": largest, "masks_of_one_block": masks, **solving}}


def activations(model: nn.Module, planned: "Sequence[LayerPlan]", config: SparsifyConfig, tokens: int) -> int:
    """Bytes that are kept from block to block; 0 where nothing is calibrated, or the width is not known."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if hidden is None or not any(item.calibrated for item in planned):
        return 0
    copies = 1 if config.reconstruct is None else 2 if config.reconstruct.target == "sparse" else 3
    if config.sequential == "none":  # a block's inputs stay until all of its outputs are there
        copies = max(copies, 2)
    return copies * tokens * hidden * next(model.parameters()).element_size()


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


def _row(item: "LayerPlan", experts_per_token: int | None) -> int:
    """Bytes of one token's inputs and outputs of a layer, and of the input as statistics are summed."""
    *_, rows, columns = item.shape
    times = item.matrices if not isinstance(item.layer.kind, RoutedKind) else experts_per_token or item.matrices
    return times * ((rows + columns) * item.layer.parameter.element_size() + columns * SUM)


def _by_block(planned: "Sequence[LayerPlan]", count: "Callable[[LayerPlan], int]") -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for item in planned:
        found[item.block] = found.get(item.block, 0) + count(item)
    return found
