"""What is made sparse together, and in which order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from modelopt_sparse.calibration.dense_run import run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import Inputs, NoData, StackInputs, WholeModel
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.layers import Stack
from modelopt_sparse.plan.plan import LayerPlan, Plan


@dataclass(frozen=True)
class BlockTask:
    """The layers of one block, or one layer outside of every stack.

    layer_plans: in the order of their first calls. A block without any is still run through.
    input_of: layer name -> the first layer with the same input.
    stack, position: where the block is; None for a layer outside of the stacks.
    inputs: gives the inputs of its layers. Those of a later stack are recorded when they are first asked for.
    """

    name: str
    layer_plans: list[LayerPlan]
    input_of: Mapping[str, str]
    stack: Stack | None
    position: int
    inputs: Callable[[], Inputs]

    @property
    def block(self) -> nn.Module | None:
        return None if self.stack is None else self.stack.blocks[self.position]

    def by_input(self) -> list[list[LayerPlan]]:
        """The layers by the input that they share, in call order."""
        groups: dict[str, list[LayerPlan]] = {}
        for layer_plan in self.layer_plans:
            groups.setdefault(self.input_of[layer_plan.name], []).append(layer_plan)
        return list(groups.values())

    def stages(self, sequential: str) -> list[list[LayerPlan]]:
        """The layers that are solved before the inputs of the next ones are collected."""
        if sequential != "stage":
            return [self.layer_plans] if self.layer_plans else []
        groups: dict[str, list[LayerPlan]] = {}
        for layer_plan in self.layer_plans:
            # experts in a list are collected together, for one may need the tokens of the others
            groups.setdefault(layer_plan.layer.mixture or self.input_of[layer_plan.name], []).append(layer_plan)
        return list(groups.values())


def blocks_in_call_order(run: Run, data: CalibrationData | None) -> list[BlockTask]:
    """Blocks with their layers, and each layer outside of the blocks, in the order of their first calls.

    Without ``data``, which no layer wants then, in the order of the model. The blocks of a stack stay together. With
    ``sequential="none"``, what is collected through the whole model comes first, while all of it is dense.
    """
    if data is None:
        return _without_data(run)
    block_of = _block_of_layers(run.plan)
    dense = run_dense(data, block_of)
    order, input_of = dense.seen.order, dense.seen.input_of
    by_block: dict[str | None, list[LayerPlan]] = {}
    for layer_plan in sorted(run.plan.layers, key=lambda layer_plan: order[layer_plan.name]):
        by_block.setdefault(block_of[layer_plan.name], []).append(layer_plan)

    starts: list[tuple[int, Stack | LayerPlan]] = []
    for stack in run.plan.stacks:
        if calls := [order[layer_plan.name] for name in stack.names for layer_plan in by_block.get(name, [])]:
            starts.append((min(calls), stack))
    starts += [(order[layer_plan.name], layer_plan) for layer_plan in by_block.get(None, [])]

    tasks: list[BlockTask] = []
    whole_model = WholeModel(data)
    for _, start in sorted(starts, key=lambda pair: pair[0]):
        if isinstance(start, LayerPlan):
            tasks.append(BlockTask(start.name, [start], input_of, None, 0, lambda: whole_model))
            continue
        pruned = sum(bool(by_block.get(name)) for name in start.names)
        inputs = StackInputs(data, dense.recorders.pop(start), pruned)
        tasks += [
            BlockTask(name or type(run.model).__name__, by_block.get(name, []), input_of, start, position, inputs)
            for position, name in enumerate(start.names)
        ]
    if run.config.sequential == "none":
        tasks.sort(key=lambda task: isinstance(task.inputs, StackInputs) and not task.inputs.through_whole_model)
    return tasks


def _without_data(run: Run) -> list[BlockTask]:
    homes = {name: (stack, place) for stack in run.plan.stacks for place, name in enumerate(stack.names)}
    by_block: dict[str | None, list[LayerPlan]] = {}
    for layer_plan in run.plan.layers:
        by_block.setdefault(layer_plan.block, []).append(layer_plan)
    no_data = NoData()
    tasks = []
    for block, layer_plans in by_block.items():
        stack, position = (None, 0) if block is None else homes[block]
        input_of = {layer_plan.name: layer_plan.name for layer_plan in layer_plans}
        title = layer_plans[0].name if block is None else block or type(run.model).__name__
        tasks.append(BlockTask(title, layer_plans, input_of, stack, position, lambda: no_data))
    return tasks


def _block_of_layers(plan: Plan) -> dict[str, str | None]:
    """Layer name -> the block that it is used in. A tied weight that is used in several blocks sees all of its inputs
    in the whole model alone: None."""
    home = {m: name for stack in plan.stacks for name, b in zip(stack.names, stack.blocks) for m in b.modules()}
    block_of: dict[str, str | None] = {}
    for layer_plan in plan.layers:
        used_in = {home.get(module) for module in layer_plan.layer.hooked_modules}
        block_of[layer_plan.name] = used_in.pop() if len(used_in) == 1 else None
    return block_of
