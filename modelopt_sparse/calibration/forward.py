"""Running a model over the calibration data: hooks that see the inputs of layers, the data itself, and the context that
forwards run in."""

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.calibration.data import Call, batch_rows, digest_of, held_back, load_calls, source_of, split_steps
from modelopt_sparse.calibration.own_text import (
    calls_from_nothing,
    joined,
    monotonous,
    own_calls,
    token_rows,
    why_no_text,
)
from modelopt_sparse.calibration.padding import Around, PaddingError, PaddingOfCall, PaddingOfInputs, sides_of
from modelopt_sparse.calibration.rerun import Answer, Source, Unknown, drawing_from
from modelopt_sparse.model.devices import (
    dense_rows,
    flat_tensors,
    in_float32,
    input_device,
    is_out_of_memory,
    map_batch,
    map_leaves,
    onloaded,
    version,
)
from modelopt_sparse.model.layers import Layer, TokenMasks
from modelopt_sparse.model.output import Output, OutputError, name_of
from modelopt_sparse.plan.options import OWN_WINDOWS
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.run import Run, Unreadable

# hooks that see the inputs of layers ----------------------------------------------------------------------------------


See = Callable[[Layer, tuple[Tensor, ...], TokenMasks], None]


@contextmanager
def input_hooks(
    layer_plans: Iterable[LayerPlan], blocks: Sequence[nn.Module], sides: Mapping[nn.Module, Around], see: See
) -> Iterator[PaddingOfInputs]:
    """While entered, ``see(layer, inputs, token_masks)`` is called for all inputs of the layers, in the model or in
    ``blocks`` by themselves. What this gives is to be told the masks of each call of the model."""
    padding = PaddingOfInputs(sides)
    layers: dict[nn.Module, list[Layer]] = {}
    for layer_plan in layer_plans:
        for module in layer_plan.layer.hooked_modules:
            layers.setdefault(module, []).append(layer_plan.layer)
    inside = False

    def on_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal inside
        if module not in layers:  # it is in a copy of the model
            return
        padding.refuse_unseen(layers[module][0])
        if inside:  # an adapter is running the module to see behind it
            return
        inside = True
        try:
            # a user's loop may run the model in inference mode, whose tensors could not be added to later
            with torch.inference_mode(False), torch.no_grad():
                for layer in layers[module]:
                    inputs = tuple(map(dense_rows, layer.adapter.inputs(module, args, kwargs)))
                    for x in inputs:
                        if isinstance(x, Unknown):  # by another way than the arguments of its block
                            x.need()
                    see(layer, inputs, [padding.token_mask(module, layer, x) for x in inputs])
        finally:
            inside = False

    routers = {layer.router for module_layers in layers.values() for layer in module_layers if layer.router is not None}
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(padding.on_block, with_kwargs=True))
        for module in layers:
            hooks.enter_context(module.register_forward_pre_hook(on_layer, with_kwargs=True))
        for router in routers:
            hooks.enter_context(router.register_forward_hook(padding.on_router))
        yield padding


def input_key(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple:
    """A key that two layers' inputs have in common while both are alive: the same objects, with nothing written to them
    in between, that meet the weights in the same way."""
    uncounted = layer.name if any(x.is_inference() for x in inputs) else None  # writes to such tensors
    return (*((id(x), version(x)) for x in inputs), layer.adapter.signature(layer.owner), uncounted)


def output_tensor(output: Any, *, first_alone: bool = False) -> Tensor:
    """What is compared of a block's output: its first tensor of numbers; where it is ``[samples, tokens, channels]``,
    with those of as many samples and channels behind it, as of two streams (Flux, Stable Diffusion 3)."""
    numbers = [dense_rows(x) for x in flat_tensors(output) if x.is_floating_point() or x.is_complex()]
    if not numbers:
        raise ValueError("a block puts out no tensor of numbers")
    first, *others = numbers
    streams = [x for x in others if x.dim() == first.dim() == 3 and x.shape[::2] == first.shape[::2]]
    return first if first_alone or not streams else torch.cat([first, *streams], 1)


def record_outputs(run: Callable[[], Any], modules: Sequence[nn.Module], take: Callable[[Any], Tensor]) -> list[Tensor]:
    """What ``take`` makes of the output of each of the ``modules`` in what ``run`` runs, as soon as it is there."""
    outputs: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = take(output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(see))
        run()
    return [outputs[module] for module in modules]


# the model and its data -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class NumberedCall:
    """Call ``number`` of the model in this process, and its way through the blocks.

    masks: its padding. random: the states of the random numbers that it begins with; None: they follow from its number.
    way: the blocks that it comes to, in order, each as often as the call comes to it; empty before that is seen.
    needed: each tensor of a block's output that is needed later -> the index of the last visit that needs it; None:
      that is not known, and what blocks put out may also decide where the call goes.
    answers: those of its first visits, which are over for good. keeps_all: with all that blocks have put out.
    starts_again: whether it may, because blocks that have answered are what they were.
    """

    number: int
    call: Call
    masks: PaddingOfCall
    random: list[Any] | None = None
    way: tuple[nn.Module, ...] = ()
    needed: Mapping[Source, int] | None = None
    answers: list[Answer] = field(default_factory=list)
    keeps_all: bool = False
    starts_again: bool = True

    def going_on(self) -> "NumberedCall":
        """A copy that goes on from its answers, and keeps all later ones that may be needed. It cannot start again."""
        keeps_all = self.keeps_all or self.needed is None
        return replace(self, answers=[*self.answers], keeps_all=keeps_all, starts_again=False)


Begin = Callable[[NumberedCall], object]  # gets each call of the model before it runs


NONE_WRITTEN = "the model writes no text itself"


@dataclass
class CalibrationData:
    """The model of a run, and the calls of it that are this process's share of the calibration data.

    calls: None for a forward_loop, whose calls are not known before it runs.
    written: how many calls of all processes, the first ones, hold text that the model has written itself.
    metrics: block -> R, which errors of its output are measured with (accuracy/fisher.py); the plain ones without.
    sha256: of the data of all processes, if it is known before the model runs.
    dense: what running the dense model has shown, if that was asked for before (calibration/dense.py).
    """

    run: Run
    calls: list[Call] | None
    sha256: str | None = None
    written: int = 0
    metrics: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    dense: Any = None

    @classmethod
    def load(cls, run: Run, calls: list[Call] | None = None) -> "CalibrationData":
        """Read the data, unless ``calls`` has all of it, and take this process's share."""
        run.report.calibration["source"] = source_of(run.config)
        if run.config.forward_loop is not None:
            _self_written(None, run)
            return cls(_settled(run, own_text=False), None)
        if run.config.writes_its_data:
            calls = _written(run, lambda: calls_from_nothing(run.model, run.config, run.processes))
        elif calls is None:
            calls = load_calls(run.config, run.model, run.report.notes)
        written, processes = _self_written(calls, run), run.processes
        shared = run.config.split_data and processes.size > 1
        sha256 = digest_of([*written, *calls]) if shared else None
        if shared and run.config.in_steps:
            calls, written = split_steps(calls, processes.size), split_steps(written, processes.size, -len(written))
        calls = [*written, *calls]
        if shared:
            _check_share(calls, sha256, run)
            calls = calls[processes.rank :: processes.size]
        elif processes.size > 1:  # steps of processes that have data of their own are others
            calls = [
                call if call.step is None else replace(call, step=call.step * processes.size + processes.rank)
                for call in calls
            ]
        return cls(_settled(run, own_text=bool(written)), calls, sha256, len(written))

    def only(self, numbers: Sequence[int]) -> "CalibrationData":
        """The user's calls with these numbers alone."""
        assert self.calls is not None
        dense = self.dense and replace(self.dense, calls=[self.dense.calls[number] for number in numbers])
        return replace(self, calls=[self.calls[number] for number in numbers], written=0, dense=dense)

    @cached_property
    def sides(self) -> Mapping[nn.Module, Around]:
        return sides_of(self.run)

    def masks_of(self, call: Call, part: nn.Module | None = None) -> PaddingOfCall:
        """The padding of a call of the model, as far as its arguments tell it; or of a ``part`` by itself, whose
        masks are those of the model meanwhile."""
        model, part = self.run.model, self.run.model if part is None else part
        masks = PaddingOfCall(part, self.run.report.notes)
        if not self.run.config.count_padding:
            masks.tell(part, call.args, call.kwargs if call.labels is None else {**call.kwargs, "labels": call.labels})
            masks.told |= {(model, side): real for (_, side), real in masks.told.items()}
        masks.first = dict(masks.told)
        return masks

    def run_model(
        self,
        begin: Begin = lambda numbered: None,
        hooks: AbstractContextManager[PaddingOfInputs] | None = None,
        numbers: Collection[int] | None = None,
    ) -> None:
        """Run the whole model over all calls, or over those with these ``numbers``. ``begin`` is called with each,
        ``hooks`` are entered meanwhile."""
        run, calls = self.run, self.calls
        number, masks = -1, PaddingOfCall(run.model)
        under_way: list[nn.Module] = []  # the model, or the part of it that a loop calls by itself, and parts inside
        told = {run.model, *(module for module, _ in self.sides[run.model])}
        parts = [part for part in run.model.modules() if part in told or isinstance(part, PreTrainedModel)]

        def on_call(module: nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal number, masks
            under_way.append(module)
            if len(under_way) > 1:
                if module in told and not run.config.count_padding:
                    masks.tell(module, args, kwargs)
                return
            call = Call(args, kwargs) if calls is None else replace(calls[number], args=args, kwargs=kwargs)
            masks = self.masks_of(call, module)
            if padding is not None:
                padding.begin(masks)
            if module is run.model:
                number += calls is None
                begin(NumberedCall(number, call, masks))

        def after_call(*_: Any) -> None:
            del under_way[-1:]  # a hook of the user's may have stopped the call before ours
            if not under_way and padding is not None:
                padding.masks = PaddingOfCall(run.model)

        with ExitStack() as contexts:
            contexts.enter_context(onloaded_blocks(run))
            # they see what blocks and layers are given, on the device, in its own precision
            padding = None if hooks is None else contexts.enter_context(hooks)
            contexts.enter_context(forward_context(run))
            for part in parts:
                first = part is run.model
                contexts.enter_context(part.register_forward_pre_hook(on_call, with_kwargs=True, prepend=first))
                contexts.enter_context(part.register_forward_hook(after_call, always_call=True))
            if run.config.forward_loop is not None:
                run.config.forward_loop(run.model)
                return
            assert calls is not None
            for number in range(len(calls)) if numbers is None else numbers:
                call_model(run, calls[number], number)

    def output_of(self, number: int) -> tuple[Any, Tensor | None]:
        """Run the call of this number -> (the model's output, the mask of its real tokens)."""
        outputs: list[Any] = []
        seen: list[NumberedCall] = []
        with self.run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
            self.run_model(seen.append, numbers=[number])
        return outputs[0], seen[0].masks.at(self.sides[self.run.model])

    def counted(self, output: Any, token_mask: Tensor | None = None) -> Output:
        """The part of a model's output that is compared. The report says by what, unless that is KL."""
        problem = getattr(getattr(self.run.model, "config", None), "problem_type", None) or ""
        counts = Output.of(output, self.run.config.output, self.run.config.divergence, token_mask, problem)
        if counts.by != "kl":
            self.run.report.settings["divergence"] = name_of(counts.by)
        return counts


@contextmanager
def onloaded_blocks(run: Run) -> Iterator[None]:
    """While entered, each block moves to the execution device, if the user asked for one, for each of its calls."""
    with ExitStack() as contexts:
        for block in run.plan.blocks:
            if run.config.device is not None and block is not run.model:
                contexts.enter_context(onloaded(block, run.config.device, resident=False))
        yield


def call_model(run: Run, call: Call, number: int, random: Sequence[Any] | None = None) -> None:
    """Call ``number`` of the model in this process. Each time it draws the same random numbers: from the states
    ``random``, or as its number says."""
    device = input_device(run.model)
    seed = (torch.initial_seed() + _step_of(run, call, number) + call.row) % 2**63
    with errors_name_batch(run, call, number), drawing_from(seed if random is None else random):
        args, kwargs = map_batch(lambda x: x.to(device), (call.args, call.kwargs))
        run.model(*args, **kwargs)


def _step_of(run: Run, call: Call, number: int) -> int:
    """The step of the optimizer that a call is a part of, by its number among those of all processes."""
    return number * run.processes.size + run.processes.rank if call.step is None else call.step


NOT_OF_THE_BATCH = (PaddingError, OutputError, Unreadable, OSError, SafetensorError)  # what no batch is to blame for


@contextmanager
def errors_name_batch(run: Run, call: Call, number: int) -> Iterator[None]:
    """An error of the user's model names the batch that it was called with."""
    try:
        yield
    except NOT_OF_THE_BATCH:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            size = f"a batch of {batch_rows(call.args, call.kwargs)}{' windows' * run.config.holds_text}"
            names = {block: name for name, block in run.plan.named_blocks.items() if name}
            selves = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
            block = next((names[obj] for obj in selves if isinstance(obj, nn.Module) and obj in names), None)
            where = f"{type(run.model).__name__} outside of its blocks" if block is None else f"block {block!r}"
            advice = "batch_size=1, or spill=True where the checkpoint is streamed"
            raise MemoryError(f"no memory for {size} in {where}: {advice}") from error
        shapes = map_leaves(_described, {**dict(enumerate(call.args)), **call.kwargs})
        batch = f"calibration batch {_step_of(run, call, number) if call.batch is None else call.batch}, {shapes}"
        problem = f"{type(run.model).__name__} cannot take {batch}: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}. Give batches that model(**batch) takes, or a collect_func") from error


def _described(value: Any) -> Any:
    """Dtype and shape of a tensor, or of an array of numpy, as messages show them."""
    numpy = isinstance(value, np.ndarray)
    return f"{'numpy ' * numpy}{value.dtype} {list(value.shape)}" if numpy or isinstance(value, Tensor) else value


def _settled(run: Run, *, own_text: bool) -> Run:
    """The run with the options of `Reconstruct` for its data, which the report names."""
    config = run.config
    if config.reconstruct is None:
        return run
    options = config.reconstruct.settled(own_text=own_text)
    run = replace(run, config=replace(config, reconstruct=options))
    run.report.settings["reconstruct"] = run.config.settings()["reconstruct"]
    return run


def _self_written(calls: list[Call] | None, run: Run) -> list[Call]:
    """Batches of text that the dense model writes, or of joined rows, with a note of it, or of why there is none, in
    the report.

    calls: those of the user's data; None for a forward_loop.
    """
    if not run.config.self_data:
        return []
    if run.config.self_data in OWN_WINDOWS and (why := why_no_text(calls, run)) is not None:
        if run.config.self_data == "auto" and calls is not None and run.config.split_data and run.storage.resident:
            made = joined(calls, held_back(calls), OWN_WINDOWS["auto"], run.config.seed)
            if rows := sum(batch_rows(call.args, call.kwargs) for call in made):
                run.report.notes.append(f"{rows} further rows are joined from two of the data's each: {why}")
                return made
        run.report.notes += [f"{NONE_WRITTEN}: {why}"] if why else []
        return []
    assert calls is not None
    return _written(run, lambda: own_calls(run.model, calls, held_back(calls), run.config, run.processes))


def _written(run: Run, write: Callable[[], list[Call]]) -> list[Call]:
    """Run ``write``, which lets the model write text, and note in the report how much it wrote."""
    began = time.perf_counter()
    with forward_context(run):
        calls = write()
    seconds, rows = time.perf_counter() - began, token_rows(run.model, calls)
    run.report.notes.append(f"the dense model wrote {len(rows)} windows of text itself, in {seconds:.0f} s")
    if problem := monotonous(rows):
        warnings.warn(problem, stacklevel=2)
        run.report.notes.append(problem)
    return calls


def _check_share(calls: list[Call], sha256: str | None, run: Run) -> None:
    """Raise ValueError unless all processes have the same data, and enough of it to share."""
    facts = {"the number of calibration batches": len(calls), "the SHA-256 of the calibration data": sha256}
    advice = "give all of them the same batches in the same order (a shuffling DataLoader needs one seed)"
    run.processes.check_same(facts, f"{advice}; or split_data=False, if what each of them gives is its share")
    if len(calls) < run.processes.size:
        problem = f"{run.processes.size} processes share out the calibration batches, and there are only {len(calls)}"
        raise ValueError(f"{problem}: give smaller batches")


# what forwards run in -------------------------------------------------------------------------------------------------


@contextmanager
def forward_context(run: Run) -> Iterator[None]:
    """Context for forwards: every module is called, in the precision that the user asked for, on every device that the
    model or a part of it runs on. No solver runs in it."""
    config, mha = run.config, torch.backends.mha
    with ExitStack() as contexts:
        contexts.enter_context(in_float32(run.widened))
        # nn.TransformerEncoder and nn.MultiheadAttention have a fused path that reads the weights of modules inside
        # them without calling these, and packs padded batches into nested tensors
        contexts.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if config.autocast is not None:
            types = {p.device.type for p in run.model.parameters() if not p.is_meta} | {"cpu"}
            types |= {config.device.type} if config.device is not None else set()
            for device_type in sorted(types):
                # reconstruction changes weights in this context: no copy of them may be held
                dtype = getattr(torch, config.autocast)
                contexts.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        yield
