"""Early exit: stop a block's forward once its last layer has seen its input.

What it brings, as CPU seconds of SparseGPT at 2:4 on one thread (the jobs of examples/benchmarks/cpu_speed.py, Intel
Xeon at 2.5 GHz, torch 2.13.0): the testbed takes 12.4 with it and 13.8 without, the wide model 115 and 121.

What comes after the last input, mostly the last and widest product, is up to a fourth of the work in a block. Which
layer is the last one is seen in a first forward that runs to the end. A block whose layers are called a number of times
that depends on the data would be stopped too early: the forward that sends the sparse output on, which runs to the end,
shows that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.plan.plan import LayerPlan


class EarlyExit:
    """The forwards of one block in which its layers' inputs are collected.

    They run to the end if

    - they are not ``allowed`` to be stopped,
    - accelerate has hooks in the block, which clean up after their module's forward,
    - experts are modules of their own, of which the data decides which are called,
    - or the first forward did not call each layer exactly once.
    """

    def __init__(self, block: nn.Module, layer_plans: Sequence[LayerPlan], *, allowed: bool) -> None:
        self._block = block
        listed_experts = any(layer_plan.layer.mixture is not None for layer_plan in layer_plans)
        self._allowed = allowed and not has_hook(block) and not listed_experts
        self._modules = {module for layer_plan in layer_plans for module in layer_plan.layer.hooked_modules}
        self._first: list[nn.Module] | None = None  # the modules in the order in which the first forward called them
        self._called: list[nn.Module] = []
        self._stopped: list[bool] = []  # which of the forwards

    def run(self, forward: Callable[[], list[Tensor]]) -> list[Tensor]:
        """One forward of the block, as far as it is needed -> its output, or nothing if it was stopped."""
        self._called, output, stopped = [], [], False
        try:
            output = forward()
        except _Stopped:
            stopped = True
        self._stopped.append(stopped)
        if self._first is None:
            self._first = self._called
            once = len(self._called) == len(self._modules) and set(self._called) == self._modules
            self._allowed = self._allowed and once
        return output

    @property
    def happened(self) -> bool:
        """Whether any forward was stopped."""
        return any(self._stopped)

    def after(self, module: nn.Module) -> None:
        """The inputs of this module's layers have been seen; stops the forward if they were the last ones."""
        self._called.append(module)
        if self._first is not None and self._allowed and self._called == self._first:
            raise _Stopped

    @contextmanager
    def checked(self) -> Iterator[Callable[[], bool]]:
        """To be entered while the block runs to the end on the same calls -> whether in those that were stopped each
        layer had been called as often as it is called to the end."""
        counts: Counter[nn.Module] = Counter()
        stopped = iter(self._stopped)  # fewer than there are calls, if collecting was broken off and begun anew
        right = True

        def ended(*_: Any) -> None:
            nonlocal right
            right = right and (not next(stopped, False) or counts == Counter(self._first))
            counts.clear()

        with ExitStack() as hooks:
            for module in self._modules:
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: counts.update([module])))
            hooks.enter_context(self._block.register_forward_hook(ended))
            yield lambda: right


class EarlyExits:
    """Those of the blocks of one stack: whether forwards may be stopped is learned from the blocks before."""

    def __init__(self) -> None:
        self._of_block: list[EarlyExit] = []
        self._right: set[type[nn.Module]] = set()  # types of blocks for which the check has succeeded
        self._allowed = True

    def of(
        self, block: nn.Module, layer_plans: Sequence[LayerPlan], *, allowed: bool, will_be_checked: bool
    ) -> EarlyExit:
        """For one more pass over a block. ``will_be_checked``: the block will run to the end on the same calls."""
        known = will_be_checked or type(block) in self._right
        early_exit = EarlyExit(block, layer_plans, allowed=self._allowed and allowed and known)
        self._of_block.append(early_exit)
        return early_exit

    def check(self, name: str, block: nn.Module, run_to_end: Callable[[], None]) -> str | None:
        """Run the block to the end on the same calls -> what to tell the user if forwards were stopped too early, or
        None. Those of the blocks after it are not stopped then."""
        with ExitStack() as hooks:
            checks = [hooks.enter_context(early_exit.checked()) for early_exit in self._of_block if early_exit.happened]
            run_to_end()
        if all(right() for right in checks):
            self._right.update([type(block)] if checks else [])
            return None
        self._allowed = False
        return (
            f"block {name!r} calls its layers a number of times that depends on its input, and was left when each "
            "had been called once: their statistics lack what came later. The blocks after it are run to the end"
        )

    def next_block(self) -> None:
        self._of_block.clear()


class _Stopped(Exception):
    """All inputs of the block's layers have been seen."""
