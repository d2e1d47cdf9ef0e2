"""The contract of a method: two pure functions of tensors, ``prepare`` and ``solve``. No method ever sees a module.

Shape letters: R rows (out features), C columns (in features), T tokens. Leading dimensions (``...``) are independent
matrices that are solved together.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelopt_sparse.methods.patterns import Pattern

NEEDS = ("nothing", "square_sums", "gram")
STRIP = 256  # columns of a Gram matrix that `output_energy` multiplies with at a time


@dataclass
class Stats:
    """What calibration sums up for one distinct layer input: sums, never averages, so that they merge by ``+``.

    tokens: how many input rows there were.
    square_sums: ``[..., C]``, the sum of x**2 over the rows, for each input channel; float32 or float64.
    gram: ``[..., C, C]``, X^T X; float32 or float64. None if no method asks for it with ``needs = "gram"``.
    counts: ``[E]``, how many of the rows each expert of a mixture got. None for all other layers.
    dead: ``[..., C]``, bool: the channels that `with_dead_channels` has filled in. They count for nothing in errors.

    The leading dimensions are those of the weight's matrices, or none if all of its matrices share one input. Adding
    two Stats gives the Stats of both sets of rows; ``gram`` and ``counts`` are None in it if either has none.
    """

    tokens: int
    square_sums: Tensor
    gram: Tensor | None = None
    counts: Tensor | None = None
    dead: Tensor | None = None

    def __add__(self, stats: "Stats") -> "Stats":
        assert self.dead is None
        assert stats.dead is None
        gram = None if self.gram is None or stats.gram is None else self.gram + stats.gram
        counts = None if self.counts is None or stats.counts is None else self.counts + stats.counts
        return Stats(self.tokens + stats.tokens, self.square_sums + stats.square_sums, gram, counts)

    def part(self, experts: range) -> "Stats":
        """The statistics of consecutive ``experts`` of a mixture: views of the sums."""
        assert self.counts is not None
        at = slice(experts.start, experts.stop)
        gram = None if self.gram is None else self.gram[at]
        return Stats(int(self.counts[at].sum()), self.square_sums[at], gram, self.counts[at])

    def with_dead_channels(self) -> "Stats":
        """The sums that weights are chosen by: dead channels, those that were zero in all rows, are filled in.

        No data says what the weights of such a channel are worth. It counts as large as the smallest live channel of
        its matrix, and as uncorrelated with all others. Where all channels of a matrix are dead, each counts as 1, so
        that the weights alone decide. Without dead channels it is ``self``; otherwise a new object, with a copy of the
        Gram matrix. (The published methods give weights of dead channels a score of 0, or set them to zero.)
        """
        dead = self.square_sums == 0
        if self.dead is not None or not dead.any():
            return self
        smallest = self.square_sums.masked_fill(dead, torch.inf).amin(-1, keepdim=True)
        filler = dead * smallest.masked_fill(smallest.isinf(), 1)
        gram = None
        if self.gram is not None:
            gram = self.gram.clone()
            gram.diagonal(dim1=-2, dim2=-1).add_(filler)
        return Stats(self.tokens, self.square_sums + filler, gram, self.counts, dead)


@dataclass(frozen=True)
class Solution:
    """A solved layer.

    weight: ``[..., R, C]``, in the dtype of the dense weight, exactly +0.0 wherever ``mask`` is False.
    mask: ``[..., R, C]``, bool, True = kept.
    error: the relative squared error left in the layer's output, without a unit (see `relative_error`); None: the
      method measures none.
    notes: sentences for the report on what did not go the usual way, such as raised damping.
    """

    weight: Tensor
    mask: Tensor
    error: float | None
    notes: tuple[str, ...] = field(default=())


class Method(ABC):
    """A way to make one layer sparse. Subclass it, write ``solve``, and hand an instance to `sparsify`.

    The class attributes say what the method is like. Each has a default:

    - ``name``: what plans and reports call the method, a string. Default: the name of the class.
    - ``needs``: the statistics of a layer's input that calibration collects for ``prepare``. "nothing" (the default):
      no calibration data is needed, and ``prepare`` may get None. "square_sums": ``Stats.square_sums``. "gram":
      ``Stats.gram`` as well.
    - ``options``: the options that users may set, each with its default. ``prepare`` and ``solve`` get all of them,
      with the user's values filled in; other names are refused. Default: no options.
    - ``scope``: the scope of an unstructured pattern if the user names none. "matrix" (the default): the zeros are
      counted over the whole matrix. "row": each row has the same number.
    - ``updates``: whether ``solve`` changes the weights that it keeps. If True, ``update=False`` puts their dense
      values back. Default: False.
    - ``rows_independent``: whether ``solve`` can be called with some rows ``[..., r, C]`` of a weight, and the same
      state, and then returns for them exactly what it returns when it gets all rows. It is asked of N:M patterns and of
      those with scope "row". If True, a layer that is too large for memory is solved some rows at a time. Default:
      False.
    """

    name: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    options: ClassVar[Mapping[str, Any]] = {}
    scope: ClassVar[str] = "matrix"
    updates: ClassVar[bool] = False
    rows_independent: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def prepare(self, stats: Stats | None, options: Mapping[str, Any]) -> Any:
        """Statistics of an input -> the ``state`` of ``solve``. Default: `Stats.with_dead_channels`.

        It is called once for all layers that share the input: here belongs work such as a factorization. ``stats`` is
        None if nothing was collected.
        """
        return None if stats is None else stats.with_dead_channels()

    @abstractmethod
    def solve(self, weight: Tensor, state: Any, pattern: Pattern, options: Mapping[str, Any]) -> Solution:
        """Dense weight ``[..., R, C]`` and what ``prepare`` returned -> Solution. It must not change its inputs.

        An unstructured pattern has its scope filled in. ``options`` are those of ``prepare``.
        """

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for option values that make no sense. It is called with all options, before any work."""
        del options


def relative_error(weight: Tensor, pruned: Tensor, stats: Stats | None) -> float:
    """Relative squared error of the layer's output, ||(W - Q) X||^2 / ||W X||^2, summed over all matrices.

    W is the dense weight, Q the pruned one, both ``[..., R, C]``; E = W - Q. With a Gram matrix H the error is exact:
    tr(E H E^T) / tr(W H W^T). With square sums alone H is taken as diagonal, and without ``stats`` as the identity. A
    layer whose output is zero everywhere has error 0.
    """
    work = _working(weight)
    total = output_energy(weight, stats)
    return max(output_energy(weight.to(work) - pruned.to(work), stats), 0.0) / total if total > 0 else 0.0


def output_energy(weight: Tensor, stats: Stats | None) -> float:
    """||W X||^2 = tr(W H W^T), summed over all matrices, with the same H as in `relative_error`."""
    work = _working(weight)
    matrix = weight.to(work)
    if stats is None:
        return float(matrix.square().sum(dtype=torch.float64))
    if stats.dead is not None:
        matrix = matrix.masked_fill(stats.dead.unsqueeze(-2), 0)
    if stats.gram is None:
        return float((matrix.square() * stats.square_sums.to(work).unsqueeze(-2)).sum(dtype=torch.float64))
    energy = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for first in range(0, matrix.shape[-1], STRIP):
        last = first + STRIP
        # H is symmetric: entries above its diagonal count twice, and those below are left out
        strip = stats.gram[..., :last, first:last].to(work, copy=True)
        strip[..., :first, :] *= 2
        energy += ((matrix[..., :last] @ strip) * matrix[..., first:last]).sum(dtype=torch.float64)
    return float(energy)


def _working(weight: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for a float64 weight."""
    return torch.promote_types(weight.dtype, torch.float32)


def written(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Solved values as they are written into the model: in its ``dtype``, +0.0 where pruned, and no weight is -0.0.

    A tiny negative weight rounds to -0.0 in half precision, which kernels that look at the bits take for a nonzero.
    Adding +0.0 makes it +0.0 and changes nothing else.
    """
    return (values.to(dtype) + 0.0).masked_fill(~mask, 0)


def masked_solution(weight: Tensor, mask: Tensor, stats: Stats | None) -> Solution:
    """The Solution of a method that only chooses a mask: the kept weights stay bit for bit what they were.

    ``weight`` ``[..., R, C]`` is dense, ``mask`` bool of the same shape (True = kept), ``stats`` are for the error.
    """
    pruned = weight.masked_fill(~mask, 0)
    return Solution(pruned, mask, relative_error(weight, pruned, stats))
