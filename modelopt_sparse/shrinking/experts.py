"""Which experts of a mixture go, by sums over the tokens that the router sends to each.

Shape letters: R rows, T tokens, k experts chosen for each, E experts.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.calls import Inputs
from modelopt_sparse.calibration.dense import BlockTask
from modelopt_sparse.calibration.forward import CalibrationData, NumberedCall
from modelopt_sparse.calibration.stats import no_data_message
from modelopt_sparse.model.layers import Layer, TokenMasks, real_rows
from modelopt_sparse.run import Run
from modelopt_sparse.shrinking.cutting import Choice, Cutting, changed_in_calls
from modelopt_sparse.shrinking.importance import by_block
from modelopt_sparse.shrinking.least_squares import RoutedCall, largest, refit_experts
from modelopt_sparse.shrinking.resize import ExpertGroup
from modelopt_sparse.shrinking.sizes import ShrinkRequest


@dataclass
class ExpertSums:
    """Sums over the real tokens of a mixture, in float64.

    tokens, gated_norms: ``[E]``, of each expert over the tokens that are routed to it: how many, and the sum of the
      gate that the model applies times the norm of what the expert puts out. Where gates scale what experts get (Llama
      4), that is what comes of it, and is not multiplied by the gate again.
    """

    tokens: Tensor
    gated_norms: Tensor

    @classmethod
    def of(cls, experts: int) -> "ExpertSums":
        return cls(*torch.zeros(2, experts, device="cpu").double())

    def add(self, outputs_TkR: Tensor, index_Tk: Tensor, gates_Tk: Tensor, *, inside: bool = False) -> None:
        """Add some tokens; ``inside``: gates have scaled what the experts get. An index of E or more: an expert without
        weights, which is left out."""
        known_Tk = index_Tk < len(self.tokens)
        index = index_Tk.where(known_Tk, 0).cpu()
        counted_Tk = known_Tk.double()
        factors_Tk = counted_Tk if inside else gates_Tk * counted_Tk
        gated_norms_Tk = outputs_TkR.norm(dim=-1) * factors_Tk
        for total, values in ((self.tokens, counted_Tk), (self.gated_norms, gated_norms_Tk)):
            total.index_add_(0, index.flatten(), values.double().flatten().cpu())

    def scores(self, criterion: str) -> Tensor:
        """The importance of each expert, larger = keep, ``[E]``.

        "reap": the mean of gate times norm (Lasby et al. 2025, REAP, arXiv 2510.13999). "reap_sum": their sum.
        "frequency": its tokens. Experts that no token reached have 0.
        """
        mean = self.gated_norms / self.tokens.clamp_min(1)
        return {"reap": mean, "reap_sum": self.gated_norms, "frequency": self.tokens}[criterion]

    def choice(self, mixture: ExpertGroup, request: ShrinkRequest) -> Choice:
        """Choose the experts of a mixture that stay, by the criterion, as many in each group."""
        fixed = request.fixed.get(mixture.consumer.name)
        if fixed is None:
            scores, groups = self.scores(request.criterion), mixture.groups
            stay = largest(scores.view(groups, -1), mixture.span.new // groups)
            stay = (stay + torch.arange(groups, device="cpu")[:, None] * (len(scores) // groups)).flatten()
        else:
            stay, scores = torch.tensor(list(fixed), device="cpu"), torch.zeros(0, device="cpu")
        return Choice(mixture, stay, scores, tokens=self.tokens)


def experts(
    data: CalibrationData, cutting: Cutting, batches: BatchNumbers, request: ShrinkRequest
) -> dict[str, list[Choice]]:
    """Block -> what stays of the experts of each of its mixtures. One pass over the model as it is now; with refit each
    block runs twice more, cut to its size."""

    def choose(task: BlockTask, inputs: Inputs, run: Run) -> list[Choice]:
        by_layer = {mixture.consumer.name: mixture for mixture in cutting.groups[task.name]}
        sums = {name: ExpertSums.of(mixture.span.old) for name, mixture in by_layer.items()}
        seen = _SeenExperts(sums, run, whole=bool(request.refit))
        consumers = [layer_plan for layer_plan in task.layer_plans if layer_plan.name in by_layer]
        inputs.collect(consumers, seen.see, seen.begin, go_on=not request.refit)
        choices = [seen.of_all(name).choice(mixture, request) for name, mixture in by_layer.items()]
        if request.refit:
            choices = _refitted(task, replace(cutting, choices={task.name: choices}), seen, inputs, batches)
            inputs.advance()
        return choices

    return by_block(data, "choose experts", cutting.groups, choose)


@dataclass
class _SeenExperts:
    """Collects the sums of a block's mixtures in one pass, by layer; with ``whole`` also the output of each call of a
    mixture, and its padding, by the ``number`` of the model's call in this process."""

    sums: dict[str, ExpertSums]
    run: Run
    whole: bool
    number: int = 0
    outputs: dict[tuple[str, int], list[tuple[Tensor, TokenMasks]]] = field(default_factory=dict)

    def begin(self, numbered: NumberedCall) -> None:
        self.number = numbered.number

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> None:
        inputs = tuple(map(real_rows, inputs, token_masks))
        _, index_Tk, gates, *_ = inputs
        adapter: Any = layer.adapter
        outputs = None
        for route in adapter.routes(layer.owner, inputs, [None] * len(inputs)):
            expert_output = adapter.output(layer.owner, route.expert, route.rows).float()
            if outputs is None:
                outputs = expert_output.new_zeros(index_Tk.numel(), expert_output.shape[-1])
            outputs.index_copy_(0, route.slots, expert_output)
        if outputs is None:
            return
        outputs_TkR = outputs.view(*index_Tk.shape, -1)
        gates_Tk = (gates if gates.shape == index_Tk.shape else gates.gather(1, index_Tk)).float()
        self.sums[layer.name].add(outputs_TkR, index_Tk, gates_Tk, inside=adapter.gates_inside)
        if self.whole:
            whole_TR = (outputs_TkR if adapter.gates_inside else outputs_TkR * gates_Tk[..., None]).sum(1)
            held = self.run.storage.hold(whole_TR), token_masks
            self.outputs.setdefault((layer.name, self.number), []).append(held)

    def of_all(self, name: str) -> ExpertSums:
        """The sums of a layer over all processes. Raises ValueError if no token has reached it, or if one is not
        finite."""
        sums, run = self.sums[name], self.run
        run.processes.all_reduce("experts", [*vars(sums).values()])
        if not sums.tokens.any():
            raise ValueError(no_data_message(name))
        if not torch.isfinite(sums.gated_norms).all():
            raise ValueError(f"layer {name!r}: its experts put out NaN or inf; run the model in bfloat16 or float32")
        return sums


def _refitted(
    task: BlockTask, cutting: Cutting, seen: _SeenExperts, inputs: Inputs, batches: BatchNumbers
) -> list[Choice]:
    """Fit the experts that stay by a pass over the smaller block -> its choices with better values."""
    run, choices = seen.run, cutting.choices[task.name]
    paths = {module: path for path, module in task.block.named_modules()} if task.block is not None else {}
    calls: dict[str, list[RoutedCall]] = {choice.group.consumer.name: [] for choice in choices}
    modules: dict[str, nn.Module] = {}

    def change(block: nn.Module, name: str) -> None:
        cutting.block(block, name, values=False)
        for choice in choices:
            layer = choice.group.consumer
            modules[layer.name] = block.get_submodule(paths[layer.owner])
            (hooked,) = layer.hooked_modules
            hooked_module = block.get_submodule(paths[hooked])
            hooked_module.register_forward_pre_hook(partial(hold, layer), with_kwargs=True)

    def hold(layer: Layer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (left := seen.outputs.get((layer.name, seen.number))):
            return  # no token was routed
        whole, token_masks = left.pop(0)
        rows, *routed = map(real_rows, layer.adapter.inputs(module, args, kwargs), token_masks)
        inputs = run.storage.hold(rows), *routed
        call = RoutedCall.of(seen.number, modules[layer.name], layer.adapter, inputs, whole.to(rows.device))
        call.residual = run.storage.hold(call.residual)
        calls[layer.name].append(call)

    with changed_in_calls(run.model, [task.name], change):
        inputs.collect([], seen.see, seen.begin, go_on=False)
    refitted = []
    for choice in choices:
        layer = choice.group.consumer
        values, errors = refit_experts(modules[layer.name], layer.adapter, calls[layer.name], batches, run)
        refitted.append(replace(choice, values=run.storage.hold(values, weights=True), errors=tuple(errors)))
    modules.clear()  # their hooks hold them
    return refitted
