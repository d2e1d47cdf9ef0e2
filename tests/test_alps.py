"""ALPS: the refit against an exact solution, the order of the methods' errors, and what its loop promises."""

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.alps import _refit
from modelopt_sparse.methods.base import Solution, Stats, relative_error
from modelopt_sparse.patterns import parse_pattern
from tests.helpers import correlated_inputs

PATTERNS = ["2:4", "4:8", "50%", "70%"]
DAMPING = 0.01

pytestmark = pytest.mark.core


def problem(seed: int, rows: int = 48, columns: int = 64) -> tuple[Tensor, Stats]:
    """A random weight and the statistics of correlated inputs, in float64."""
    x = correlated_inputs(4 * columns, columns, seed)
    gram = x.T @ x
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weight, Stats(len(x), gram.diagonal().clone(), gram)


def solved(name: str, weight: Tensor, stats: Stats, pattern: str) -> Solution:
    method = METHODS[name]
    state = method.prepare(stats, method.options)
    return method.solve(weight, state, parse_pattern(pattern).with_scope(method.scope), method.options)


def exact_refit(weight: Tensor, mask: Tensor, gram: Tensor) -> Tensor:
    """The optimum on a support, row by row: q_S = H_SS^-1 (H w)_S."""
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(gram[kept][:, kept], (gram @ weight[row])[kept])
    return best


def damped(stats: Stats) -> Tensor:
    assert stats.gram is not None
    return stats.gram + DAMPING * stats.gram.diagonal().mean() * torch.eye(len(stats.gram), dtype=torch.float64)


def objective(weight: Tensor, pruned: Tensor, gram: Tensor) -> Tensor:
    """The error of each row."""
    delta = weight - pruned
    return torch.einsum("rc,cd,rd->r", delta, gram, delta)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_within_two_percent_of_the_optimum_on_their_support(pattern, seed):
    weight, stats = problem(seed)
    solution = solved("alps", weight, stats, pattern)
    gram = damped(stats)
    best = objective(weight, exact_refit(weight, solution.mask, gram), gram).sum()
    assert objective(weight, solution.weight, gram).sum() <= 1.02 * best


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_error_is_below_that_of_sparsegpt_even_when_its_values_are_refitted_exactly(pattern, seed):
    """ALPS chooses the better support, not only the better values: the order of the paper's table 1."""
    weight, stats = problem(seed)
    alps, sparsegpt = solved("alps", weight, stats, pattern), solved("sparsegpt", weight, stats, pattern)
    refitted = exact_refit(weight, sparsegpt.mask, damped(stats))
    assert alps.error < relative_error(weight, refitted, stats) < sparsegpt.error


def test_refit_reaches_the_optimum_for_any_mask_and_worsens_no_row():
    """From a random mask and random start; rows are systems of their own, one of them fully kept, one fully pruned."""
    weight, stats = problem(0, rows=12, columns=32)
    scale = stats.square_sums.sqrt()
    assert stats.gram is not None
    gram = stats.gram / scale / scale[:, None] + 0.05 * torch.eye(32, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(12, 32, generator=generator) < 0.5
    mask[0], mask[1] = True, False
    start = torch.randn(12, 32, generator=generator, dtype=torch.float64).masked_fill(~mask, 0)
    best = exact_refit(weight, mask, gram)
    torch.testing.assert_close(_refit(weight, start, mask, gram, 200), best, rtol=1e-6, atol=1e-6)
    for iterations in (1, 2, 5):
        refitted = _refit(weight, start, mask, gram, iterations)
        assert not refitted[~mask].any()
        assert (objective(weight, refitted, gram) <= objective(weight, start, gram) * (1 + 1e-12)).all()
    torch.testing.assert_close(_refit(weight, best, mask, gram, 3), best)


def test_a_row_that_gets_worse_goes_back_to_its_start():
    """With a matrix that is not symmetric the first step lands at nine times the error: every row keeps its start."""
    weight = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, mask = torch.zeros_like(weight), torch.ones(3, 2, dtype=torch.bool)
    crooked = torch.tensor([[1.0, 3.0], [-3.0, 1.0]], dtype=torch.float64)
    assert torch.equal(_refit(weight, start, mask, crooked, 1), start)


def test_a_loop_that_is_cut_short_is_still_refitted_to_the_optimum_on_its_support():
    weight, stats = problem(3)
    method = METHODS["alps"]
    options = {**method.options, "iterations": 3, "refit_iterations": 500}
    solution = method.solve(weight, method.prepare(stats, options), parse_pattern("2:4"), options)
    best = exact_refit(weight, solution.mask, damped(stats))
    torch.testing.assert_close(solution.weight, best, rtol=1e-5, atol=1e-5)


def test_more_iterations_than_it_takes_to_settle_change_nothing():
    weight, stats = problem(2)
    method = METHODS["alps"]
    found = [
        method.solve(weight, method.prepare(stats, method.options), parse_pattern("2:4"), {**method.options, **more})
        for more in ({"iterations": 300}, {"iterations": 1000})
    ]
    assert torch.equal(found[0].weight, found[1].weight)
    short = method.solve(
        weight, method.prepare(stats, method.options), parse_pattern("2:4"), {**method.options, "iterations": 3}
    )
    assert not torch.equal(short.mask, found[0].mask)
    assert found[0].error < short.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0}, r"damping=0 of alps: must be a number in \(0, 1\]"),
        ({"damping": "1e-2"}, "damping='1e-2' of alps: must be a number"),
        ({"iterations": 0}, "iterations=0 of alps: a positive whole number"),
        ({"refit_iterations": True}, "refit_iterations=True of alps: a positive whole number"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        METHODS["alps"].check({**METHODS["alps"].options, **options})
