"""Running a model over the calibration data: the data itself, the context that forwards run in, and hooks that see
the inputs of layers."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from modelopt_sparse.calibration.data import Call, digest_of, judging, load_calls, samples, source_of, units
from modelopt_sparse.calibration.own_text import calls_from_nothing, monotonous, own_calls, rows_of, why_none_is_written
from modelopt_sparse.calibration.padding import INSTEAD, PaddingError, Side, TokenMasks, sides_of, token_masks
from modelopt_sparse.calibration.run import Run, Unreadable
from modelopt_sparse.model.adapters import CONV
from modelopt_sparse.model.devices import (
    flat_tensors,
    free_bytes,
    in_float32,
    input_device,
    is_out_of_memory,
    map_tensors,
    onloaded,
    version,
)
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan

# hooks that see the inputs of layers ----------------------------------------------------------------------------------


See = Callable[[Layer, tuple[Tensor, ...], Tensor | None], None]


class InputHooks:
    """Entered, it calls ``see(layer, inputs, token_mask)`` for every input of the layers.

    ``token_mask`` (bool, True = a real token) has the leading shape of the inputs; None says that all are real. `begin`
    announces each call of the model, `on_block` what one of the ``blocks`` is called with.
    """

    def __init__(
        self, layer_plans: Iterable[LayerPlan], blocks: Sequence[nn.Module], sides: Mapping[nn.Module, Side], see: See
    ) -> None:
        self._layers: dict[nn.Module, list[Layer]] = {}
        for layer_plan in layer_plans:
            for module in layer_plan.layer.hooked_modules:
                self._layers.setdefault(module, []).append(layer_plan.layer)
        self._blocks = blocks
        self._padding = _PaddingOfInputs(sides)
        self._see = see
        self._inside = False
        self._hooks = ExitStack()

    def begin(self, masks: TokenMasks) -> None:
        self._padding.masks = masks

    def on_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self._padding.on_block(args, kwargs)

    def __enter__(self) -> "InputHooks":
        padding = self._padding
        routers = {layer.router for layers in self._layers.values() for layer in layers if layer.router is not None}
        for block in self._blocks:
            self._hooks.enter_context(block.register_forward_pre_hook(self.on_block, with_kwargs=True))
        for module in self._layers:
            self._hooks.enter_context(module.register_forward_pre_hook(self._on_layer, with_kwargs=True))
        for router in routers:
            self._hooks.enter_context(router.register_forward_hook(padding.on_router))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._padding.forget()

    def _on_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._inside:  # an adapter is running the module to see behind it
            return
        self._inside = True
        try:
            # a user's loop may run the model in inference mode, whose tensors could not be added to later
            with torch.inference_mode(False), torch.no_grad():
                for layer in self._layers[module]:
                    inputs = layer.adapter.inputs(module, args, kwargs)
                    self._see(layer, inputs, self._padding.token_mask(module, layer, inputs))
        finally:
            self._inside = False


class _PaddingOfInputs:
    """Which token mask goes with the input of a layer, in the call of the model that runs now."""

    def __init__(self, sides: Mapping[nn.Module, Side]) -> None:
        self._sides = sides
        self.masks = TokenMasks()
        self._from_encoder: list[Tensor] = []  # what a decoder block is given beside its hidden states
        self._token_of_row: dict[nn.Module, Tensor] = {}  # router -> the token of each row that it has sorted

    def on_block(self, args: tuple, kwargs: dict) -> None:
        _, *others = (*args, *kwargs.values()) or (None,)
        self._from_encoder = [x for x in others if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]

    def on_router(self, router: nn.Module, args: tuple, output: Any) -> None:
        del args
        self._token_of_row[router] = output[1]

    def forget(self) -> None:
        self._from_encoder = []
        self._token_of_row.clear()

    def token_mask(self, module: nn.Module, layer: Layer, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The token mask of a layer's inputs, shaped like their leading dimensions; None if every token is real."""
        first, *others = [self._of_one(module, layer, x) for x in inputs]
        for x, mask in zip(inputs[1:], others):
            same = mask is first if mask is None or first is None else torch.equal(mask, first)
            if not same:
                raise _unmatched(layer, x, "the token mask of its queries is another one")
        return first

    def _of_one(self, module: nn.Module, layer: Layer, x: Tensor) -> Tensor | None:
        side = self._sides[module]
        if any(x.data_ptr() == other.data_ptr() and x.shape == other.shape for other in self._from_encoder):
            side = "encoder"
        mask = getattr(self.masks, side)
        if mask is None:
            return None
        mask = mask.to(x.device)
        if layer.router is not None:
            return mask.flatten()[self._token_of_row[layer.router]]
        if layer.adapter is not CONV:  # a convolution's rows are patches
            if _without_ones(x.shape[:-1]) == _without_ones(mask.shape):  # DeepSeek's latents are [B, 1, S, C]
                return mask.view(x.shape[:-1])
            if x.dim() == 2 and x.shape[0] == mask.numel():
                return mask.flatten()
        raise _unmatched(layer, x, f"the token mask has shape {list(mask.shape)}")


def _unmatched(layer: Layer, x: Tensor, why: str) -> PaddingError:
    problem = f"layer {layer.name!r} gets an input of shape {list(x.shape)}, and {why}"
    return PaddingError(f"{problem}: which of its rows are padding cannot be told; {INSTEAD}")


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def input_key(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple:
    """What makes two layers' inputs the same while both are alive: the same objects, with nothing written to them in
    between, that meet the weights in the same way."""
    return (*((id(x), version(x)) for x in inputs), layer.adapter.signature(layer.owner))


def watched_outputs(
    run: Callable[[], Any], modules: Sequence[nn.Module], hold: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Tensor]:
    """The first output tensor of each of the ``modules`` in what ``run`` runs, each held as soon as it is there."""
    outputs: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = hold(flat_tensors(output)[0])

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(see))
        run()
    return [outputs[module] for module in modules]


# the model and its data -----------------------------------------------------------------------------------------------


NONE_WRITTEN = "the model writes no text itself"


@dataclass
class CalibrationData:
    """The model of a run, and the calls of it that are this process's share of the calibration data.

    calls: None for a forward_loop, whose calls are not known before it runs.
    own: how many calls of all processes, the first ones, hold text that the model has written itself.
    metrics: block -> R, which errors of its output are measured with (accuracy/fisher.py); the plain ones without.
    sha256: of the data of all processes, if it is known before the model runs.
    dense: what running the dense model has shown, if that was asked for before (calibration/blocks.py).
    """

    run: Run
    calls: list[Call] | None
    sha256: str | None = None
    own: int = 0
    metrics: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    dense: Any = None

    @classmethod
    def load(cls, run: Run, calls: list[Call] | None = None) -> "CalibrationData":
        """Read the data, unless ``calls`` has all of it, and take this process's share."""
        run.report.calibration["source"] = source_of(run.config)
        if run.config.forward_loop is not None:
            if run.config.self_data == "auto":
                run.report.notes.append(f"{NONE_WRITTEN}: a forward_loop calls it, and no prompts are known")
            return cls(run, None)
        if run.config.writes_its_data:
            calls = _written(run, lambda: calls_from_nothing(run.model, run.config, run.processes))
        elif calls is None:
            calls = load_calls(run.config, run.model)
        own, processes = _own(calls, run), run.processes
        shared, sha256 = run.config.split_data and processes.size > 1, None
        if run.config.split_data and run.config.tunes and (shared or run.config.deterministic):
            sha256 = digest_of([*own, *calls])
            calls, own = units(calls), units(own, -len(own))
        calls = [*own, *calls]
        if shared:
            sha256 = sha256 or digest_of(calls)
            _check_share(calls, sha256, run)
            calls = calls[processes.rank :: processes.size]
        return cls(run, calls, sha256, len(own))

    def only(self, numbers: Sequence[int]) -> "CalibrationData":
        """The user's calls with these numbers alone."""
        assert self.calls is not None
        dense = self.dense and replace(self.dense, calls=[self.dense.calls[number] for number in numbers])
        return replace(self, calls=[self.calls[number] for number in numbers], own=0, dense=dense)

    @cached_property
    def sides(self) -> dict[nn.Module, Side]:
        return sides_of(self.run.model)

    def steps(self, numbers: Iterable[int]) -> list[int | None]:
        """The steps of this process's calls with these ``numbers``."""
        return [None if self.calls is None else self.calls[number].step for number in numbers]

    def own_among(self, numbers: Iterable[int]) -> int:
        """How many of this process's calls with these ``numbers`` hold text that the model has written itself."""
        processes = self.run.processes
        return sum(number * processes.size + processes.rank < self.own for number in numbers)

    def masks_of(self, call: Call) -> TokenMasks:
        """Which tokens of a call are padding."""
        count_padding = self.run.config.count_padding
        return TokenMasks() if count_padding else token_masks(self.run.model, call.args, call.kwargs)

    def input_hooks(self, layer_plans: Iterable[LayerPlan], blocks: Sequence[nn.Module], see: See) -> InputHooks:
        """Hooks that see the inputs of layers, in the model or in ``blocks`` by themselves."""
        return InputHooks(layer_plans, blocks, self.sides, see)

    def run_model(
        self,
        begin: Callable[[TokenMasks], None],
        hooks: InputHooks | None = None,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """Run the whole model over all calls, or over those with these ``numbers``. ``begin`` is called with the
        padding of each; ``hooks`` are entered meanwhile."""
        run = self.run

        def on_call(module: nn.Module, args: tuple, kwargs: dict) -> None:
            begin(self.masks_of(Call(args, kwargs)))

        with ExitStack() as contexts:
            for block in run.plan.blocks:
                if run.config.device is not None and block is not run.model:
                    contexts.enter_context(onloaded(block, run.config.device, resident=False))
            if hooks is not None:  # they see what blocks and layers are given, on the device, in its own precision
                contexts.enter_context(hooks)
            contexts.enter_context(forward_context(run))
            contexts.enter_context(run.model.register_forward_pre_hook(on_call, with_kwargs=True, prepend=True))
            if run.config.forward_loop is not None:
                run.config.forward_loop(run.model)
                return
            assert self.calls is not None
            for number in range(len(self.calls)) if numbers is None else numbers:
                call_model(run, self.calls[number], number)

    def output_of(self, number: int) -> tuple[Any, TokenMasks]:
        """What the model puts out in the call of this number, and which of the call's tokens are padding."""
        outputs: list[Any] = []
        masks: list[TokenMasks] = []
        with self.run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
            self.run_model(masks.append, numbers=[number])
        return outputs[0], masks[0]


def call_model(run: Run, call: Call, number: int) -> None:
    """Call ``number`` of the model in this process."""
    device = input_device(run.model)
    with errors_name_batch(run, call, number):
        run.model(*map_tensors(lambda x: x.to(device), call.args), **map_tensors(lambda x: x.to(device), call.kwargs))


@contextmanager
def errors_name_batch(run: Run, call: Call, number: int) -> Iterator[None]:
    """An error of the user's model names the batch that it was called with."""
    try:
        yield
    except (PaddingError, Unreadable, OSError, SafetensorError):  # the batch is not to blame
        raise
    except Exception as error:
        if is_out_of_memory(error):
            what = f"a batch of {samples(call.args, call.kwargs)}{' windows' * run.config.holds_text}"
            names = {block: name for name, block in run.plan.named_blocks.items() if name}
            selves = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
            block = next((names[each] for each in selves if isinstance(each, nn.Module) and each in names), None)
            where = f"{type(run.model).__name__} outside of its blocks" if block is None else f"block {block!r}"
            advice = "batch_size=1, or spill=True where the checkpoint is streamed"
            raise MemoryError(f"no memory for {what} in {where}: {advice}") from error
        shapes = map_tensors(lambda x: f"{x.dtype} {list(x.shape)}", {**dict(enumerate(call.args)), **call.kwargs})
        batch = number * run.processes.size + run.processes.rank if call.step is None else call.step
        batch = f"calibration batch {batch}, {shapes}"
        problem = f"{type(run.model).__name__} cannot take {batch}: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}. Give batches that model(**batch) takes, or a collect_func") from error


def _own(calls: list[Call], run: Run) -> list[Call]:
    """Text that the dense model writes, in batches, and a note of it, or of why there is none, in the report."""
    if not run.config.self_data:
        return []
    if run.config.self_data == "auto" and (why := why_none_is_written(calls, run)):
        run.report.notes.append(f"{NONE_WRITTEN}: {why}")
        return []
    return _written(run, lambda: own_calls(run.model, calls, judging(len(calls)), run.config, run.processes))


def _written(run: Run, write: Callable[[], list[Call]]) -> list[Call]:
    """Text that ``write`` lets the model write, with a note of it in the report."""
    began = time.perf_counter()
    with forward_context(run):
        own = write()
    seconds = time.perf_counter() - began
    windows = sum(len(batch.kwargs["input_ids"]) for batch in own)
    run.report.notes.append(f"the dense model wrote {windows} windows of text itself, in {seconds:.0f} s")
    if problem := monotonous(rows_of(own)):
        warnings.warn(problem, stacklevel=2)
        run.report.notes.append(problem)
    return own


def _check_share(calls: list[Call], sha256: str, run: Run) -> None:
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
    """What forwards run in: every module called, and the precision that the user asked for, on every device that the
    model or a part of it runs on. No solver runs in it."""
    config, mha = run.config, torch.backends.mha
    with ExitStack() as contexts:
        if config.widens(run.model):
            called = {module for layer_plan in run.plan.layers for module in layer_plan.layer.hooked_modules}
            inside = (module for block in run.plan.blocks for module in block.modules())
            contexts.enter_context(in_float32(called.union(x for x in inside if isinstance(x, nn.Linear))))
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


@contextmanager
def on_execution_device(run: Run, blocks: Sequence[nn.Module], *, outputs_stay: bool = False) -> Iterator[None]:
    """Blocks run on the execution device, if the user asked for one. A single block is there until the context ends;
    several move for each call. ``outputs_stay``: so do their outputs, which otherwise go back to where the block came
    from."""
    device = run.config.device
    with ExitStack() as contexts:
        if device is not None:
            for block in blocks:
                contexts.enter_context(onloaded(block, device, resident=len(blocks) == 1, stays=outputs_stay))
        yield


def has_room(run: Run, nbytes: int) -> bool:
    """Whether activations of so many bytes can be held on the execution device: where they take no more than half of
    what is free there, and leave what the plan says that a block, its statistics and a solver take."""
    device = run.config.device
    if device is None:
        return False
    planned = run.plan.streamed.get(str(device), {})
    beside = sum(size for what, size in planned.items() if what != "activations")
    free = free_bytes(device)
    return nbytes <= min(free // 2, free - beside)
