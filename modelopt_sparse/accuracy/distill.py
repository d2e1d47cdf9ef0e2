"""Distillation: the whole sparse model learns to put out what the dense one did, with masks frozen.

No second model is held. What the dense model's output head was called with is kept from before anything is pruned, and
goes through the head once more beside the sparse model's own (Hinton et al. 2015, arXiv 1503.02531, for the loss). Of
what is no logits of a head, the output itself is kept.
"""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.accuracy.fisher import blocks_recomputed
from modelopt_sparse.accuracy.tuning import (
    BatchNumbers,
    TunedWeights,
    only_these_require_grad,
    outputs_of,
    tunable,
    tune,
)
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.methods.base import Method
from modelopt_sparse.model.devices import bytes_of, input_device, refuse_offloaded
from modelopt_sparse.model.hf import is_encoder_decoder
from modelopt_sparse.model.masking import named_masks, without_masks
from modelopt_sparse.model.output import Output
from modelopt_sparse.plan.options import HELD_BACK_FOR_OUTPUTS, SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.values import Distilled, in_words
from modelopt_sparse.run import Run

# the divergence before it, in nats, or in parts of the variance, from which on the whole learning rate is taken
FULL_RATE_KL, FULL_RATE_SQUARED = 1.0, 0.1
# arguments of the model's own loss, and of what its output is put into
OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "return_dict")


@dataclass(frozen=True)
class Teacher:
    """What the dense model puts out on the calibration data.

    head: the model's output head, and answers: what it was called with in each call, by its number, on the host. Of
    what is no logits of a head ``answers`` are what counts of the output.
    """

    data: CalibrationData
    head: nn.Module | None
    answers: list[Tensor]

    @classmethod
    def of(cls, data: CalibrationData) -> "Teacher":
        """Record the dense model's outputs in one run over the data.

        Raises ValueError where it is not known what counts of the output, and for a model that does more with what its
        head puts out than sample by sample.
        """
        model, answers, head_inputs = data.run.model, list[Tensor](), list[Tensor]()
        first: list[Output] = []
        assert data.calls is not None
        which, calls = data.run.config.output, [without_loss(model, call) for call in data.calls]
        if isinstance(which, int) and any(call.labels is not None for call in calls):
            raise ValueError(f"output={which} counts the loss, and labels are left out here: give a name")
        data = replace(data, calls=calls, metrics={})
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        pruned = {module for x in data.run.plan.layers for module in (x.layer.owner, *x.layer.tied_modules)}
        if head is not None and not pruned.isdisjoint(head.modules()):
            head = None  # it will be another one

        def before_head(module: nn.Module, args: tuple) -> None:
            head_inputs[:] = [args[0]]

        def after_model(module: nn.Module, args: tuple, output: Any) -> None:
            counts = data.counted(output)
            first[:] = first or [counts]
            answer = head_inputs[0] if head_inputs and counts.is_logits else counts.values
            answers.append(answer.detach().to("cpu", copy=True))

        with ExitStack() as hooks:
            if head is not None:
                hooks.enter_context(head.register_forward_pre_hook(before_head))
            hooks.enter_context(model.register_forward_hook(after_model))
            data.run_model()
        teacher = cls(data, head if head_inputs and first[0].is_logits else None, answers)
        teacher._check_itself(first[0].values.detach())
        return teacher

    def divergence(self, index: int) -> list[float]:
        """The sums of how far the sparse output of call ``index`` is from the dense one, see `Output.sums`."""
        dense, sparse = self.outputs(index)
        return dense.sums(sparse)

    def outputs(self, index: int, answer: Tensor | None = None) -> tuple[Output, Output]:
        """(dense, sparse) output of call ``index``; ``answer``: another one than that of the dense model."""
        answer = self.answers[index] if answer is None else answer

        def beside(module: nn.Module, args: tuple) -> tuple:
            return (torch.cat([answer.to(args[0].device), args[0]]), *args[1:])

        with nullcontext() if self.head is None else self.head.register_forward_pre_hook(beside):
            both = self.data.counted(*self.data.output_of(index))
        if self.head is None:
            return replace(both, values=answer), both
        dense, sparse = both.values.detach()[: len(answer)], both.values[len(answer) :]
        return replace(both, values=dense), replace(both, values=sparse)

    def _check_itself(self, predicted: Tensor) -> None:
        """Check that the first call puts out ``predicted`` again beside another answer than its own."""
        try:
            _, again = self.outputs(0, self.answers[0] / 2)
            if not _close(again.values.detach(), predicted):
                raise ValueError("predictions differ")
        except ValueError as error:
            problem = f"the output head puts out something else beside other samples ({error})"
            if self.data.run.config.distill is None:  # it judges what shrink does
                raise ValueError(f"{problem}: give output=, another tensor that counts") from error
            raise ValueError(f"distill: {problem}: leave distill out") from error


# whether a model can be asked -----------------------------------------------------------------------------------------


def refuse_to_distill(model: nn.Module, config: SparsifyConfig) -> None:
    """Raise ValueError for a model that is not whole on one device."""
    refuse_offloaded(model, [model], "distill")
    home, device = input_device(model), config.device
    if device is not None and (device.type != home.type or device.index not in (None, home.index)):
        raise ValueError(
            f"distill runs the whole model, which is on {home}, and device={str(device)!r} "
            "moves one block at a time: move the model there itself, or leave distill out"
        )


def distillable(data: CalibrationData, method: Method) -> CalibrationData:
    """Try to distill with one call of the dense model. If distillation is optional and fails, the run leaves it out,
    and the report says why; otherwise ValueError is raised."""
    run, why = data.run, None
    try:
        if data.calls is None or not run.config.enforce:
            raise ValueError(f"{'enforce=False' if data.calls else 'a forward_loop'} goes with none")
        if not run.storage.resident:
            raise ValueError("each step takes a pass over all weights, which lie on disk")
        refuse_to_distill(run.model, run.config)
        needed, free = run.plan.memory["distillation"], bytes_of(input_device(run.model))[1]
        if needed > free and not run.config.must_distill:
            raise ValueError(f"it takes {needed:,} bytes on {input_device(run.model)}, where {free:,.0f} are free")
        Teacher.of(replace(data, calls=data.calls[:1]))
    except ValueError as error:
        if run.config.must_distill:
            raise
        why = str(error).removeprefix("distill: ").removesuffix(": leave distill out")
    why = next(filter(None, run.processes.all_gather("whether the model can be distilled", why)), None)
    if why is None:
        return data
    run.report.settings["distill"] = None
    run.report.notes.append(f"no distillation: {why}")
    config = replace(run.config, distill=None)
    return replace(data, run=replace(run, plan=plan_for(run.model, method, config), config=config))


# distillation ---------------------------------------------------------------------------------------------------------


def distill_from(teacher: Teacher, run: Run) -> None:
    """Tune the kept weights, norms, biases and other vectors of the whole model by Adam on the mean divergence from the
    dense model's output, and report it. Never worse on the steps held back, a quarter of them, see `tune`; where no
    epoch is better, all are made again at a quarter of the rate."""
    options, model = run.config.distill, run.model
    assert options is not None
    layers = [layer_plan.layer for layer_plan in run.plan.layers]
    masks = {layer.parameter: dict(named_masks(layer.owner)).get(layer.param) for layer in layers}
    outputs = outputs_of(run.plan.layers)
    # what the head holds, or a module around it adds to its logits, makes the dense model's predictions as well
    stays = {p for part in model.modules() if teacher.head in {*part.modules()} for p in part.parameters(recurse=False)}
    chosen = {p: mask for p, mask in tunable(model, model, masks, vectors=True) if p not in stays}
    batches = BatchNumbers.of_calls(teacher.data, one_of=HELD_BACK_FOR_OUTPUTS)
    measure = run.report.settings.get("divergence")
    began = time.perf_counter()

    def loss(index: int) -> Tensor:
        # the sum: means of many small gradients would leave float16's range
        dense, sparse = teacher.outputs(index)
        return dense.apart(sparse).sum()

    def judge() -> float:
        divergence = batches.validation_error(teacher.divergence)
        bar.say(f"{in_words(measure)[0]} {before:.4f} -> {divergence:.4f}", run.memory_in_use())
        return divergence

    with (
        without_masks(model),  # as in `reconstruct`
        only_these_require_grad(model, chosen),
        blocks_recomputed(run),
    ):
        moments = torch.bfloat16 if options.moments == "bfloat16" else None
        before = batches.validation_error(teacher.divergence)
        try:
            for rate in (options.learning_rate, options.learning_rate / 4):
                # places of all weights of the model would take as much memory as their values
                weights = TunedWeights(chosen, outputs, rate, None, moments, holds_places=False)
                weights.scale_rate(before, FULL_RATE_SQUARED if measure == "squared" else FULL_RATE_KL)
                with run.bar("distill", "step", options.epochs * len(batches.steps)) as bar:
                    best, epoch, notes = tune(
                        weights, batches, options.epochs, run.config.seed, loss, judge, before, bar
                    )
                del weights  # the next ones take as much memory
                if epoch:  # else larger steps lost more than they gained
                    break
        except BaseException:
            run.report.notes.append("distillation was broken off; the model has the best values up to then")
            raise
    run.report.distilled(Distilled(before, best, epoch, round(time.perf_counter() - began, 3), notes))


def without_loss(model: nn.Module, call: Call) -> Call:
    """The call without arguments of the model's own loss, whose batch would have another size."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in OF_THE_LOSS}
    labels = call.kwargs.get("labels")
    of_tokens = labels is not None and labels.dim() > 1  # those of a classifier are one for each sample
    if is_encoder_decoder(model) and of_tokens and "decoder_input_ids" not in kwargs:
        if (shifted := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is None:
            raise ValueError(f"a {type(model).__name__} tells no decoder_input_ids from labels: give both")
        kwargs["decoder_input_ids"] = shifted(labels)
    return replace(call, kwargs=kwargs, labels=labels)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to a few roundings of the dtype, or some of TF32, measured against the tensor's own scale: a GPU takes
    other kernels for other numbers of rows.

    Rows of padding may be NaN or inf: that is equal to itself here.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(8 * torch.finfo(a.dtype).eps, 2**-8) * scale, equal_nan=True)
