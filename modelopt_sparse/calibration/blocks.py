"""What is made sparse together, and in which order: blocks with their layers, as the dense run has shown them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from torch import nn

from modelopt_sparse.calibration.calls import Inputs, WholeModel
from modelopt_sparse.calibration.dense import in_call_order, run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.layers import Stack
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.values import grouped


@dataclass(frozen=True)
class BlockTask:
    """The layers of one block, or one layer outside of every stack.

    layer_plans: in the order of their first calls. A block without any is still run through.
    input_of: layer name -> the first layer with the same input.
    block: where the layers are; None for a layer outside of the stacks.
    inputs: gives the inputs of its layers, from when the work on the block begins.
    one_pass: whether one pass over the calls gives all statistics of its layers.
    """

    name: str
    layer_plans: list[LayerPlan]
    input_of: Mapping[str, str]
    block: nn.Module | None
    inputs: Callable[[], Inputs]
    one_pass: bool = True

    def by_input(self) -> list[list[LayerPlan]]:
        """The layers by the input that they share, in call order."""
        return list(grouped(self.layer_plans, lambda each: self.input_of[each.name]).values())

    def stages(self, sequential: str) -> list[list[LayerPlan]]:
        """The layers that are solved before the inputs of the next ones are collected."""
        if sequential != "stage":
            return [self.layer_plans] if self.layer_plans else []
        # experts in a list are collected together, for one may need the tokens of the others
        return list(grouped(self.layer_plans, lambda each: each.layer.mixture or self.input_of[each.name]).values())


def blocks_in_call_order(run: Run, data: CalibrationData | None) -> list[BlockTask]:
    """Blocks with their layers, and each layer outside of the blocks, in the order of their first calls.

    Without ``data``, which no layer wants then, in the order of the model. With ``sequential="none"``, what is
    collected through the whole model comes first, while all of it is dense.
    """
    if data is None:
        return _without_data(run)
    dense = data.dense or run_dense(data).dense
    in_order, by_block = in_call_order(run.plan, dense)
    stacks = [start for start in in_order if isinstance(start, Stack) and start not in dense.whole]
    home = {block: stack for stack in stacks for block in stack.blocks}
    if run.config.sequential == "none":
        in_order.sort(key=lambda start: start in stacks)

    def task(stack: Stack, block: nn.Module, inputs: Callable[[], Inputs]) -> BlockTask:
        name = stack.names[stack.blocks.index(block)]
        plans = by_block.get(name, [])
        one_pass = run.config.experts != "all_tokens" and not dense.inputs.varying & {plan.name for plan in plans}
        return BlockTask(name or type(run.model).__name__, plans, dense.inputs.input_of, block, inputs, one_pass)

    # blocks that no call comes to may have layers that need no data
    named = {b for stack in home.values() for name, b in zip(stack.names, stack.blocks) if by_block.get(name)}
    blocks = [block for block in dense.order.blocks if block in home]
    blocks += [block for block in home if block in named and block not in blocks]
    walk, whole_model = dense.walk(data, blocks), WholeModel(data)
    tasks: list[BlockTask] = []
    for blockwise, starts in groupby(in_order, lambda start: start in stacks):
        group = list(starts)
        if blockwise:  # blocks of stacks that follow each other, in the order in which calls come to them
            here = [block for block in blocks if home[block] in group]
            tasks += [task(home[block], block, partial(walk.at, block)) for block in here]
            continue
        for start in group:
            if isinstance(start, Stack):
                tasks += [task(start, block, lambda: whole_model) for block in start.blocks]
            else:
                tasks.append(BlockTask(start.name, [start], dense.inputs.input_of, None, lambda: whole_model))
    return tasks


def _without_data(run: Run) -> list[BlockTask]:
    no_data = WholeModel(None)
    tasks = []
    for name, layer_plans in run.plan.by_block.items():
        input_of = {layer_plan.name: layer_plan.name for layer_plan in layer_plans}
        title = layer_plans[0].name if name is None else name or type(run.model).__name__
        block = None if name is None else run.plan.named_blocks[name]
        tasks.append(BlockTask(title, layer_plans, input_of, block, lambda: no_data))
    return tasks
