"""What is cut of a model: which channels, experts and blocks stay; and the model without the others, in calls and for
good."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.accuracy.distill import without_loss
from modelopt_sparse.accuracy.tuning import called_with
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import flat_tensors, forwards_replaced
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.run import Run
from modelopt_sparse.shrinking.resize import (
    ChannelGroup,
    ExpertGroup,
    clone,
    resize_module,
    select,
    twin_of,
    write_aliases,
)
from modelopt_sparse.shrinking.sizes import TargetSizes

# what rounding may change: of channels as a share of what zeros in their place change, of experts in another order as a
# share of what matrices of other experts change. Without blocks the others are called as they were: nothing is rounded
SAME, SAME_IN_16_BITS = 0.001, 0.1
CHANGED = "the model computes something else with"


@dataclass(frozen=True)
class Choice:
    """The channels of a layer, or the experts of a mixture, that ``stay``.

    stay: their indices, ascending. scores: one for each that there was, larger = keep; empty if the choice was given.
    values: of the layer that takes the channels, or of the experts' last matrices, for those that stay, shaped like the
      parameter; None: those that they have.
    errors: of the output as it is then, and with these values.
    tokens: how many each expert got.
    """

    group: ChannelGroup | ExpertGroup
    stay: Tensor
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    values: Tensor | None = None
    errors: tuple[float, ...] = ()
    tokens: Tensor | None = None

    def with_zeros(self) -> Tensor:
        """The layer's values, with zeros for the channels that go."""
        old, dim = self.group.consumer.values, self.group.span.dim
        stay = self.stay.to(old.device)
        return torch.zeros_like(old).index_copy(dim, stay, old.index_select(dim, stay))


# other forwards -------------------------------------------------------------------------------------------------------


def skipped(model: nn.Module, names: Iterable[str]) -> AbstractContextManager[None]:
    """While entered, these blocks put out what they are called with, wherever else they are called."""

    def skip(_: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, hidden = forward(*args, **kwargs), flat_tensors((args, kwargs))[0]
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    return forwards_replaced(map(model.get_submodule, names), skip)


def changed_in_calls(
    model: nn.Module, names: Iterable[str], change: Callable[[nn.Module, str], None]
) -> AbstractContextManager[None]:
    """While entered, each call of a block of these ``names`` runs a copy of it that ``change`` has changed in place."""

    blocks = {model.get_submodule(name): name for name in names}

    def call(block: nn.Module, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        changed = clone(block, hooks=False)
        vars(changed).pop("forward")
        change(changed, blocks[block])
        return changed.forward(*args, **kwargs)

    return forwards_replaced(blocks, call)


def first_output(data: CalibrationData) -> Tensor:
    """The first tensor that the model puts out in the first call of this process, without NaN and inf. Not its loss."""
    data = replace(data, calls=[without_loss(data.run.model, call) for call in (data.calls or ())[:1]])
    return torch.nan_to_num(flat_tensors(data.output_of(0)[0])[0].float(), posinf=0, neginf=0)


def rounding(run: Run) -> float:
    """The share that rounding may change."""
    model: Any = run.model
    return SAME if run.config.autocast is None and model.dtype.itemsize > 2 else SAME_IN_16_BITS


# the cut --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cutting:
    """What is cut of a model, by name of the block.

    dense, narrow: the model's twins as it is, and with fewer channels or experts and all blocks.
    groups: channels that go together, or mixtures of experts. choices: which of them stay.
    stay: indices of the blocks that stay in their stack, once they are chosen.
    """

    sizes: TargetSizes
    dense: PreTrainedModel
    narrow: PreTrainedModel
    groups: Mapping[str, Sequence[Any]]
    choices: Mapping[str, Sequence[Choice]] = field(default_factory=dict)
    stay: Sequence[int] | None = None

    @classmethod
    def tried(cls, data: CalibrationData, sizes: TargetSizes) -> "Cutting":
        """Try with some channels, or experts, how tensors are cut. Raises ValueError if the model computes something
        else then."""
        model: Any = data.run.model
        cutting = cls(sizes, twin_of(model, {}), sizes.narrow(model), sizes.groups_in(model, data.run.plan))
        if sizes.experts:
            cutting.try_experts(data)
            return cutting
        for interleaved in (False, True):
            groups = {name: [replace(x, interleaved=interleaved) for x in xs] for name, xs in cutting.groups.items()}
            some = {name: [*map(random_channels, xs)] for name, xs in groups.items()}
            if not groups or not replace(cutting, choices=some).differs(data):
                return replace(cutting, groups=groups)
        raise ValueError(f"{CHANGED} fewer channels than with zeros: MLPs cannot be cut")

    def try_experts(self, data: CalibrationData) -> None:
        """Check that experts can go: the model computes the same with its experts in another order, and can be called
        with fewer of them. Raises ValueError otherwise."""
        model: Any = data.run.model
        fewer = {name: [*map(first_experts, mixtures)] for name, mixtures in self.groups.items()}

        def reordered(order: Callable[[ExpertGroup], Mapping[tuple[str, int], Tensor]]) -> Tensor:
            def change(block: nn.Module, name: str) -> None:
                for mixture in self.groups[name]:
                    select(block, order(mixture))

            with changed_in_calls(model, self.groups, change):
                return first_output(data)

        differs = False
        if data.calls:
            dense = first_output(data)
            try:
                with replace(self, choices=fewer).in_calls(model):
                    data.output_of(0)
            except ValueError as error:  # which names the batch
                problem = f"this {type(model).__name__} cannot be called with fewer experts"
                raise ValueError(f"{problem}: {error.__cause__ or error}") from error
            # not of what fewer experts change, which is as little as rounding in bfloat16 where one of many goes
            changed, wrong = (reordered(order) - dense for order in (permute_experts, swap_outputs_only))
            differs = not float(changed.norm()) <= rounding(data.run) * float(wrong.norm())
        if any(data.run.processes.all_gather("how the model is cut", differs)):
            raise ValueError(f"{CHANGED} its experts in another order: none of them can go")

    def with_blocks(self, data: CalibrationData, stay: Sequence[int]) -> "Cutting":
        """Keep these blocks alone. Raises ValueError unless the model computes what it does with the others skipped."""
        cutting = replace(self, stay=stay)
        without_groups = replace(self.sizes, width={}, experts={})
        if replace(cutting, sizes=without_groups, groups={}).differs(data):
            problem = f"{CHANGED} the blocks {[*stay]} alone than with the others skipped"
            raise ValueError(f"{problem}: blocks depend on their index, or read from others")
        groups = {name: block_groups for name, block_groups in self.groups.items() if name not in cutting.gone}
        return replace(cutting, groups=groups)

    @property
    def gone(self) -> list[str]:
        """The blocks that go."""
        blocks = () if self.stay is None or self.sizes.depth is None else self.sizes.depth.blocks
        return [name for index, name in enumerate(blocks) if index not in (self.stay or ())]

    def names(self, plan: Plan) -> dict[str, str]:
        """Block that stays -> its name in the smaller model."""
        staying = [([name for name in stack.names if name not in self.gone], stack.names) for stack in plan.stacks]
        return {old: new for names in staying for old, new in zip(*names)}

    @property
    def chosen(self) -> list[Choice]:
        return [choice for block_choices in self.choices.values() for choice in block_choices]

    def differs(self, data: CalibrationData) -> bool:
        """Whether the model with fewer channels, or else with fewer blocks, puts out something else in the first call
        than this one with zeros for what goes."""
        differs, model = False, data.run.model
        if data.calls:
            dense = first_output(data)
            if self.choices:
                with self.in_calls(model):
                    narrow = first_output(data)
            else:
                small = clone(model)
                self.everything(small)
                run = replace(data.run, model=small, plan=plan_for(small, Magnitude(), data.run.config))
                try:
                    narrow = first_output(replace(data, run=run))
                except ValueError as error:
                    problem = f"this {type(model).__name__} cannot be called with fewer blocks"
                    raise ValueError(f"{problem}: {error.__cause__ or error}") from error
            zeros = called_with({choice.group.consumer: choice.with_zeros for choice in self.chosen})
            with skipped(model, self.gone), zeros:
                wanted = first_output(data)
            bound = rounding(data.run) if self.choices else SAME
            differs = not float((narrow - wanted).norm()) <= bound * float((wanted - dense).norm())
        return any(data.run.processes.all_gather("how the model is cut", differs))

    def in_calls(self, model: nn.Module, *, values: bool = False) -> AbstractContextManager[None]:
        """While entered, a block that is called runs as one with fewer channels or experts; ``values``: with better
        ones."""
        return changed_in_calls(model, self.choices, partial(self.block, values=values))

    def block(self, block: nn.Module, name: str, *, values: bool = True) -> None:
        """Cut a block in place; ``values``: with better ones. One that has been cut stays so."""
        cuts: dict[tuple[str, int], Tensor] = {}
        new: dict[str, Tensor] = {}
        for choice in self.choices.get(name, ()):
            span = choice.group.span
            cuts |= choice.group.cuts(choice.stay)
            if values and choice.values is not None and block.get_parameter(span.name).shape[span.dim] == span.old:
                new[span.name] = choice.values
        if cuts:
            resize_module(block, self.dense.get_submodule(name), self.narrow.get_submodule(name), cuts)
        for parameter_name, better in new.items():
            block.get_parameter(parameter_name).data.copy_(better)

    def everything(self, model: Any) -> None:
        """Cut what is not cut yet, which needs no data, and write the config."""
        dense, twin = clone(self.dense), self.sizes.narrow(self.dense, self.stay)
        depth, stay = self.sizes.depth, self.stay or ()
        if depth is None or len(model.get_submodule(depth.stack)) == len(depth.blocks):  # else all are cut
            for name in sorted(self.choices):
                self.block(model.get_submodule(name), name)
        if depth is not None and stay:
            for whole in (model, dense):
                depth.drop(whole, stay)
        resize_module(model, dense, twin, {})
        for name in self.sizes.experts:
            write_aliases(model.config, name)


# what is tried --------------------------------------------------------------------------------------------------------


def random_channels(group: ChannelGroup) -> Choice:
    stay = torch.randperm(group.span.old, generator=torch.Generator().manual_seed(0), device="cpu")[: group.span.new]
    return Choice(group, stay.sort().values)


def first_experts(mixture: ExpertGroup) -> Choice:
    """As many experts as will stay, the first of each group."""
    in_groups = torch.arange(mixture.span.old, device="cpu").view(mixture.groups, -1)
    return Choice(mixture, in_groups[:, : mixture.span.new // mixture.groups].flatten())


def permute_experts(mixture: ExpertGroup) -> dict[tuple[str, int], Tensor]:
    """Indices that permute experts within each group. What the mixture puts out must not change."""
    return mixture.cuts(torch.arange(mixture.span.old, device="cpu").view(mixture.groups, -1).roll(1, 1).flatten())


def swap_outputs_only(mixture: ExpertGroup) -> dict[tuple[str, int], Tensor]:
    """The indices of `permute_experts` for the last matrices alone, so that each expert gets those of another one."""
    return {key: order for key, order in permute_experts(mixture).items() if key[0] == mixture.span.name}
