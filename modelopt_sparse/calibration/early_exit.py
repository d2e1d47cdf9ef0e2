"""Leaving a block as soon as the last of its layers has its input, when nothing but these inputs is asked for.

What comes after, mostly the last and widest product, is up to a fourth of the work in it. Which layer is the last
one is seen in a first run that goes to the end. A block whose layers are called a number of times that depends on the
data would be left too early: the run that sends the sparse output on, which goes to the end, shows that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.plan.plan import LayerPlan


class Leaving:
    """The runs of one block in which its layers' inputs are collected. ``allowed``: they may be left.

    None is if the first one did not call each layer once, or among experts that are modules of their own: which of them
    are called depends on the data.
    """

    def __init__(self, block: nn.Module, targets: Sequence[LayerPlan], *, allowed: bool) -> None:
        self._block = block
        hooked = any(hasattr(module, "_hf_hook") for module in block.modules())  # accelerate cleans up after forward
        self._may_leave = allowed and not hooked and all(target.layer.mixture is None for target in targets)
        self._modules = {module for target in targets for module in target.layer.hooked_modules}
        self._first: list[nn.Module] | None = None
        self._called: list[nn.Module] = []
        self._left: list[bool] = []  # which of the runs

    def run(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """One run of the block, as far as it is needed -> its output, or nothing if it was left."""
        self._called, output, left = [], [], False
        try:
            output = run()
        except _Left:
            left = True
        self._left.append(left)
        if self._first is None:
            self._first = self._called
            once = len(self._called) == len(self._modules) and set(self._called) == self._modules
            self._may_leave = self._may_leave and once
        return output

    @property
    def left(self) -> bool:
        """Whether any run was."""
        return any(self._left)

    def has_input(self, module: nn.Module) -> None:
        """The inputs of this module's layers have been seen; leaves the block if they were the last ones."""
        self._called.append(module)
        if self._first is not None and self._may_leave and self._called == self._first:
            raise _Left

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """To be entered while the block runs to the end on the same calls -> whether those that were left had called
        each layer as often as it is called to the end."""
        counts: Counter[nn.Module] = Counter()
        left = iter(self._left)  # fewer than there are calls, if collecting was broken off and begun anew
        regular = True

        def ended(*_: Any) -> None:
            nonlocal regular
            regular = regular and (not next(left, False) or counts == Counter(self._first))
            counts.clear()

        with ExitStack() as hooks:
            for module in self._modules:
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: counts.update([module])))
            hooks.enter_context(self._block.register_forward_hook(ended))
            yield lambda: regular


class _Left(Exception):
    """All inputs of the block's layers have been seen."""
