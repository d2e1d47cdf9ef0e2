"""The Fisher metric: which directions of a block's output depends on what the model puts out.

With labels y drawn from the model's own predictions and g the gradient of -log p(y) by a block's output, the mean of
g g^T is the block of the Fisher information that belongs to that output: a small change d of the output moves the
predictions by d^T E[g g^T] d / 2 nats (Amari 1998; used for pruning by Theis et al. 2018, arXiv 1801.05787).
Of a squared error g is the gradient of the output times random signs, and the mean of g g^T the Gauss-Newton matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelopt_sparse.accuracy.tuning import only_these_require_grad
from modelopt_sparse.calibration.data import batch_rows
from modelopt_sparse.calibration.forward import CalibrationData, NumberedCall
from modelopt_sparse.model.devices import (
    dense_rows,
    flat_tensors,
    forwards_replaced,
    has_hook,
    input_device,
    map_tensors,
)
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.output import OutputError, size_of
from modelopt_sparse.run import Run

# a backward pass that holds one block at a time -----------------------------------------------------------------------
# Blocks keep nothing but their inputs for it, and run once more in it (Chen et al. 2016, arXiv 1604.06174).


@contextmanager
def blocks_recomputed(run: Run) -> Iterator[None]:
    """While entered, every block that runs with gradients is recomputed in the backward pass, where it has its weights,
    read from disk or moved to the run's device, until the next one has: a backward pass through a block uses the
    weights that it ran with."""
    device, onloaded = run.config.device, ExitStack()

    def with_weights(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        onloaded.close()  # the block before goes back
        run.storage.load(block)
        if device is not None and not has_hook(block) and (home := input_device(block)) != device:
            onloaded.callback(block.to, home)
            block.to(device)
        args, kwargs = map_tensors(torch.clone, (args, kwargs))  # it may write to them, and runs twice
        return forward(*args, **kwargs)

    def recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        again = partial(with_weights, block, forward)
        return checkpoint(again, *args, use_reentrant=False, **kwargs)

    with onloaded, forwards_replaced([block for block in run.plan.blocks if block is not run.model], recomputed):
        yield


# sums over the gradients of one backward pass -------------------------------------------------------------------------


METRIC_ROWS = 32  # rows of calibration data in all processes, at least one call of each
LOSS_ROWS = 16  # of them are enough for the losses of layers
PLAIN = 0.85  # share of the plain squared error in the metric; figures are in examples/benchmarks/README.md


@dataclass
class Gradients:
    """Sums over the gradients of `Output.drawn_loss`.

    tokens: what they are relative to, see `size_of`: how many tokens were predicted.
    informations: block -> the sum of g g^T over the gradients of its output.
    rows: layer name -> ``[..., R]``, the sum over calls of the squared gradient of each row of its weight. As gradients
      of tokens are uncorrelated, or nearly, it is the sum of |g_r|^2 |x|^2 over tokens, for any kind of layer.
    """

    tokens: float
    informations: dict[nn.Module, Tensor]
    rows: dict[str, Tensor]


def gradients_of(data: CalibrationData, blocks: Sequence[nn.Module], layers: Sequence[Layer]) -> Gradients | None:
    """One forward and one backward of the dense model over the first rows of the user's data, with labels drawn from
    its predictions; of all processes together. None where no gradient of the output reaches blocks and layers. Raises
    OutputError where it is not known what counts of the output."""
    run, indices = data.run, {block: index for index, block in enumerate(blocks)}
    numbers = users_first(data, METRIC_ROWS if blocks else LOSS_ROWS)
    weights = {layer.parameter: layer for layer in layers}
    under_way: list[NumberedCall] = []
    sums: dict[int | str, Tensor] = {}  # over this process's calls: of blocks by their index, of layers by their name
    moments: list[list[float]] = []

    def add(key: int | str, values: Tensor) -> None:
        sums[key] = sums[key] + values if key in sums else values

    def take_output(index: int, gradient: Tensor) -> None:
        rows = dense_rows(gradient.detach()).flatten(0, -2).float()
        add(index, rows.T @ rows)

    def take_gradient(layer: Layer, weight: Tensor) -> None:
        assert weight.grad is not None
        add(layer.name, layer.matrix(weight.grad).double().square().sum(-1).cpu())
        weight.grad = None

    def after_block(block: nn.Module, args: tuple, output: Any) -> None:
        state = next(iter(flat_tensors(output)), None)
        if state is not None and state.dim() in (2, 3) and torch.is_grad_enabled():
            state.requires_grad_(True)  # nothing before it may ask for gradients
            state.register_hook(partial(take_output, indices[block]))

    def after_model(model: nn.Module, args: tuple, output: Any) -> None:
        numbered = under_way.pop()
        counts = data.counted(output, numbered.masks.at(data.sides[run.model]))
        if counts.values.requires_grad:
            step, row = numbered.call.step, numbered.call.row
            number = numbered.number * run.processes.size + run.processes.rank - data.written if step is None else step
            # each batch has random numbers of its own, so that any number of processes draws the same labels
            losses = counts.drawn_loss((run.config.seed * 1_000_003 + number) % 2**63, row)
            moments.append(counts.moments(len(losses)))
            losses.sum().backward()

    with ExitStack() as hooks:
        hooks.enter_context(only_these_require_grad(run.model, weights))
        hooks.enter_context(blocks_recomputed(run))
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(after_block))
        for weight, layer in weights.items():
            hooks.callback(weight.register_post_accumulate_grad_hook(partial(take_gradient, layer)).remove)
        hooks.enter_context(run.model.register_forward_hook(after_model))
        hooks.enter_context(torch.enable_grad())
        data.run_model(under_way.append, numbers=numbers)
    totals = run.processes.sum_by_key("gradients", sums, run.config.device or torch.device("cpu"))
    by_call = [values for by_rank in run.processes.all_gather("the tokens of gradients", moments) for values in by_rank]
    tokens = size_of([sum(column) for column in zip(*by_call)] or [0.0])
    if not tokens:
        return None
    shapes = {layer.name: layer.matrix(layer.parameter).shape[:-1] for layer in layers}
    rows = {
        name: totals.get(name, torch.zeros(shape, dtype=torch.float64, device="cpu")) for name, shape in shapes.items()
    }
    return Gradients(tokens, {block: totals[index] for block, index in indices.items() if index in totals}, rows)


# the metric -----------------------------------------------------------------------------------------------------------


def wants_metrics(run: Run) -> bool:
    """Whether `reconstruct` asks for metrics. "auto" asks a streamed model for none: all of it would be read twice."""
    metric = run.config.reconstruct and run.config.reconstruct.metric
    return metric == "fisher" or (metric == "auto" and run.storage.resident)


def with_metrics(data: CalibrationData, gradients: Gradients | None = None) -> CalibrationData:
    """Find the metric of each block's output, if `reconstruct` asks for one, from these ``gradients`` or by a pass of
    its own.

    Raises ValueError where there is none; with metric="auto" the report says why errors are plain.
    """
    run, options = data.run, data.run.config.reconstruct
    if options is None or options.metric == "plain" or data.metrics:
        return data
    why = "no gradient of the output reaches a block that puts out [samples, channels] or [samples, tokens, channels]"
    try:
        if not wants_metrics(run):
            why = "the model is streamed"
        elif data.calls is None:
            why = "a forward_loop calls the model in its own way"
        elif (gradients := gradients or gradients_of(data, run.plan.blocks, [])) is not None and gradients.informations:
            return replace(data, metrics={block: metric(fisher) for block, fisher in gradients.informations.items()})
    except OutputError as error:
        why = str(error)
    if options.metric == "fisher":
        raise ValueError(f"reconstruct's metric='fisher': {why}: leave it out")
    run.report.notes.append(f"reconstruct's metric is the plain squared error: {why}")
    return data


def metric(fisher: Tensor) -> Tensor:
    """Fisher information [D, D] up to a factor -> R [D, D], symmetric: ``|(y - goal) R|^2`` is the error of an output,
    in which a mean direction counts as in the plain squared error."""
    size, trace = fisher.shape[0], float(fisher.double().trace())
    identity = torch.eye(size, dtype=torch.float64, device=fisher.device)
    scaled = fisher.double() * (size / trace) if trace > 0 else identity
    values, vectors = torch.linalg.eigh((1 - PLAIN) * scaled + PLAIN * identity)
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def users_first(data: CalibrationData, wanted: int) -> list[int]:
    """Numbers of this process's share of the user's first calls, which have ``wanted`` rows together over all
    processes; at least one call of each process. Text that the model wrote is left out."""
    assert data.calls is not None
    processes, rows, chosen = data.run.processes, 0, set[int]()
    sizes = {
        number * processes.size + processes.rank: batch_rows(call.args, call.kwargs)
        for number, call in enumerate(data.calls)
    }
    for number, size in sorted(processes.gather_numbered("rows of calls", sizes).items()):
        if number >= data.written and (rows < wanted or len(chosen) < processes.size):
            chosen.add(number)
            rows += size
    return [number // processes.size for number in sizes if number in chosen]
