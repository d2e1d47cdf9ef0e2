"""One run of `sparsify`: what each of its parts needs, where weights and activations are held, the modes that the model
is in, and how far the run is."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import buffers_kept, bytes_in_use, in_eval_mode, input_device, reoffload
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.report import Report

# storage --------------------------------------------------------------------------------------------------------------


class Unreadable(ValueError):
    """The weights of a block cannot be read, now that they are needed."""


# of the largest weight of a layer: far beyond those of any model, and sums of squares far from overflow and underflow
LARGEST, SMALLEST = 2.0**40, 2.0**-60


def refuse_unusable(layer: Layer) -> None:
    """Raise `Unreadable` for a weight that holds NaN, inf, or values whose squares may overflow or all underflow, or is
    expanded."""
    if any(step == 0 and size > 1 for step, size in zip(layer.values.stride(), layer.values.shape)):
        raise Unreadable(f"layer {layer.name!r} is expanded, so that its weights share memory: clone it, or exclude it")
    low, high = map(float, layer.values.aminmax())
    if not math.isfinite(largest := max(-low, high)):
        advice = "repair the checkpoint or exclude it (modelopt-sparse finalize, if NaN stands for pruned weights)"
        raise Unreadable(f"layer {layer.name!r}: its weight holds NaN or inf: {advice}")
    if largest and not SMALLEST <= largest <= LARGEST:
        why = f"its weight holds {largest:.3g}, and more than 2^40, or nothing but less than 2^-60, is not squared"
        raise Unreadable(f"layer {layer.name!r}: {why}: repair the checkpoint or exclude it")


class Storage(ABC):
    """Holds the blocks of a model.

    resident: all at once, so that the whole model can be called at any time.
    reused: how many blocks so far are those of a run that was stopped.
    choice: what the run that this one goes on from has saved as its choice; None if there is none.
    block_names: the names that blocks are written under, by their own; a block without one is not written.
    """

    resident = True
    reused = 0
    choice: dict[str, Any] | None = None
    block_names: Mapping[str, str]

    @abstractmethod
    def open(self, block: nn.Module | None, report: Report) -> AbstractContextManager[Callable[[], None] | None]:
        """Context for all work on one block (None: on what is in no block), one block after the other. If an earlier
        run has made the block sparse, it yields a function that writes that run's weights over the dense ones; else
        None."""

    @abstractmethod
    def load(self, module: nn.Module) -> None:
        """Make the weights of a block's ``module`` readable until another block is asked for."""

    @abstractmethod
    def on_request(self) -> AbstractContextManager[None]:
        """While entered, `load` alone makes weights readable, and not every call of a block."""

    @abstractmethod
    def hold(self, x: Tensor, *, weights: bool = False) -> Tensor:
        """Move activations to where they are held from one block to the next, or ``weights`` that are only tried to
        where such are held; the values are the same."""

    @abstractmethod
    def save_choice(self, choice: dict[str, Any]) -> None:
        """Keep what layers become under a budget, or what stays of a model that shrinks, for a run that goes on from
        this one."""


class InMemory(Storage):
    """A model in memory: every block can be read and written at any time."""

    @contextmanager
    def open(self, block: nn.Module | None, report: Report) -> Iterator[None]:
        yield

    def load(self, module: nn.Module) -> None:
        del module

    def on_request(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self, x: Tensor, *, weights: bool = False) -> Tensor:
        del weights
        return x

    def save_choice(self, choice: dict[str, Any]) -> None:
        del choice


# modes ----------------------------------------------------------------------------------------------------------------


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no caches; everything as it was afterwards, whatever happens. The caller's
    inference mode, whose tensors no gradient reaches, is left, unless the model was made in one: it cannot be written
    to elsewhere."""
    inference = torch.inference_mode(any(parameter.is_inference() for parameter in model.parameters()))
    with in_eval_mode(model), buffers_kept(model), _caches_off(model), inference, torch.no_grad():
        try:
            yield
        except BaseException:
            reoffload(model)  # what accelerate had loaded for a forward
            raise


@contextmanager
def _caches_off(model: nn.Module) -> Iterator[None]:
    """While entered, no config of the model asks for a cache. What calls with labels write there is taken
    back."""
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    names = ("use_cache", "problem_type")
    before = [(c, name, getattr(c, name)) for c in configs.values() for name in names if hasattr(c, name)]
    try:
        for config, name, value in before:
            if value is True:
                setattr(config, name, False)
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


# how far a run is -----------------------------------------------------------------------------------------------------


EVERY = 60.0  # seconds between two lines
LINE = "{desc}: {unit} {n_fmt} of {total_fmt}, {elapsed} gone, {remaining} left{postfix}"


class Progress(AbstractContextManager["Progress"]):
    """A bar that stays while one part of a run goes on.

    title, unit: what runs, and what is counted. total: how many there are.
    show: True shows the bar, False shows nothing; None shows it on a terminal and in a notebook, and elsewhere writes a
      line to standard error every minute.
    """

    def __init__(self, title: str, unit: str, total: int, *, show: bool | None = None) -> None:
        in_notebook = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)  # where tqdm draws widgets
        shown = show if show is not None else in_notebook or sys.stderr.isatty()
        self._bar = tqdm(desc=title, unit=unit, total=total, disable=not shown)
        self._writes_lines = show is None and not shown
        self._line = partial(tqdm.format_meter, total=total, prefix=title, unit=unit, bar_format=LINE)
        self._began = self._last_line = time.monotonic()
        self._count, self._said = 0, ""

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, *words: str) -> None:
        """The words behind the bar from now on."""
        self._said = ", ".join(filter(None, words))
        self._bar.set_postfix_str(self._said)

    def update(self, count: int = 1) -> None:
        """Count further ones as done."""
        self._count += count
        self._bar.update(count)
        now = time.monotonic()
        if self._writes_lines and now - self._last_line >= EVERY:
            self._last_line = now
            sys.stderr.write(self._line(self._count, elapsed=now - self._began, postfix=self._said) + "\n")
            sys.stderr.flush()


# the run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What every part of a run is given; and what holds for the next layer or block of a kind that was met.

    piece_sizes: kind of layer -> (experts, rows) that are solved at once, since memory ran out.
    fixed_orders: kinds of channels whose reordering changes what the block computes.
    """

    model: nn.Module
    plan: Plan
    config: SparsifyConfig
    storage: Storage
    processes: Processes
    report: Report
    piece_sizes: dict[tuple, tuple[int, int]] = field(default_factory=dict)
    fixed_orders: set[tuple] = field(default_factory=set)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within as time of this part of the run."""
        began, seconds = time.perf_counter(), self.report.seconds
        try:
            yield
        finally:
            if spent := round(time.perf_counter() - began, 3):
                seconds[name] = round(seconds.get(name, 0.0) + spent, 3)

    def bar(self, title: str, unit: str, total: int) -> Progress:
        """A bar for one part of the run, in the first of several processes."""
        return Progress(title, unit, total, show=self.config.progress if self.processes.rank == 0 else False)

    @cached_property
    def widened(self) -> set[nn.Module]:
        """The modules whose bfloat16 weights are multiplied in float32 in calibration."""
        if not self.config.widens(self.model):
            return set()
        linears = (x for block in self.plan.blocks for x in block.modules() if isinstance(x, nn.Linear))
        return {module for layer_plan in self.plan.layers for module in layer_plan.layer.hooked_modules}.union(linears)

    def so_far(self) -> list[str]:
        """Texts behind the bar: the last error, the memory in use, and blocks of a stopped run."""
        error, reused = "", self.storage.reused
        if self.report.blocks:
            error = f"error {self.report.blocks[-1].error_after:.4f} of the block before"
        elif self.report.layers and self.report.layers[-1].errors:
            error = f"error {self.report.layers[-1].errors[-1]:.4f} of the layer before"
        return [error, self.memory_in_use(), f"{reused} blocks reused" if reused else ""]

    def memory_in_use(self) -> str:
        """The bytes in use where the model's blocks run, as text."""
        device = self.config.device or input_device(self.model)
        return f"{bytes_in_use(device) / 1e9:.1f} GB"
