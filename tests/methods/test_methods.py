"""One contract for every method, pattern, dtype and shape; and the formulas against loops."""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import STRIP, Method, Solution, Stats, relative_error
from modelopt_sparse.methods.patterns import NM, parse_pattern
from tests.helpers import correlated_inputs, refused
from tests.oracles import reference
from tests.oracles.layer_problem import solved, stats_of

MASK_ONLY = [name for name, method in METHODS.items() if not method.updates]
PATTERNS = ["2:4", "1:4", "4:8", "8:16", "50% per row", "50% per matrix", "70%"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Shape:
    """Leading dimensions, rows and columns of a weight; ``shared``: one Gram matrix for all leading indices."""

    lead: tuple[int, ...]
    rows: int
    columns: int
    shared: bool = False
    dead: tuple[int, ...] = ()


SHAPES = {
    "matrix": Shape((), 12, 32),
    "one row": Shape((), 1, 32),
    "odd rows": Shape((), 7, 48),
    "more than one block": Shape((), 4, 144),
    "stack": Shape((3,), 5, 16),
    "stack with one input": Shape((3,), 5, 16, shared=True),
    "dead channels": Shape((), 6, 32, dead=(0, 5, 16, 17, 18, 19, 31)),
}
every_method = pytest.mark.parametrize("name", METHODS)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


@functools.cache
def weight_and_inputs(shape: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [..., R, C] and inputs [..., T, C] in float64."""
    size = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*size.lead, size.rows, size.columns, generator=generator, dtype=torch.float64)
    count = 1 if size.shared or not size.lead else math.prod(size.lead)
    inputs = torch.stack([correlated_inputs(3 * size.columns, size.columns, seed + i) for i in range(count)])
    inputs[..., list(size.dead)] = 0
    return weight, inputs if size.lead and not size.shared else inputs[0]


def sums(inputs: Tensor) -> Stats:
    """In float32, of products in float64."""
    exact = stats_of(inputs)
    assert exact.gram is not None
    return Stats(exact.tokens, exact.square_sums.float(), exact.gram.float())


# every shape with every pattern; in half precision every pattern for one shape, and one pattern for every shape
CONTRACT = [
    (pattern, dtype, shape)
    for pattern in PATTERNS
    for dtype in DTYPES
    for shape in SHAPES
    if dtype == torch.float32 or pattern == "2:4" or shape == "matrix"
]


@every_method
@pytest.mark.parametrize(("pattern", "dtype", "shape"), CONTRACT)
def test_contract(name, pattern, dtype, shape):
    """Exact counts, +0.0 where the mask is False, same shape, dtype and device, the error of the output on the inputs
    themselves, inputs untouched, the same again."""
    method, options = METHODS[name], METHODS[name].options
    exact, inputs = weight_and_inputs(shape)
    weight, stats = exact.to(dtype), sums(inputs)
    state = method.prepare(stats, options)
    spelled = parse_pattern(pattern).with_scope(method.scope)
    before = [x.clone() for x in (weight, stats.gram, stats.square_sums)]
    inner = {key: x.clone() for key, x in vars(state).items() if isinstance(x, Tensor)}

    solution = method.solve(weight, state, spelled, options)

    pruned, mask = solution.weight, solution.mask
    assert (mask.dtype, pruned.dtype) == (torch.bool, dtype)
    assert mask.shape == pruned.shape == weight.shape
    assert pruned.device == mask.device == weight.device
    assert torch.isfinite(pruned).all()
    assert 0 <= solution.error < 1
    if dtype == torch.float32:
        assert solution.error == pytest.approx(reference.output_error(weight, pruned, inputs), rel=1e-4)

    if isinstance(spelled, NM):
        assert (mask.unflatten(-1, (-1, spelled.m)).sum(-1) == spelled.n).all()
    else:
        scopes = mask if spelled.scope == "row" else mask.flatten(-2)
        assert ((~scopes).sum(-1) == reference.zeros_of(spelled.sparsity, scopes.shape[-1])).all()

    assert (pruned[~mask] == 0).all()
    assert not torch.signbit(pruned[~mask]).any()
    if not method.updates:
        assert torch.equal(pruned[mask], weight[mask])

    assert all(map(torch.equal, (weight, stats.gram, stats.square_sums), before))
    assert all(torch.equal(getattr(state, key), old) for key, old in inner.items())
    torch.set_default_dtype(torch.bfloat16)  # the caller's changes nothing
    try:
        again = method.solve(weight, method.prepare(stats, options), spelled, options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, (again.mask, again.weight), (mask, pruned)))
    assert again.error == solution.error


@every_method
@every_pattern
@pytest.mark.parametrize("shape", ["matrix", "stack", "dead channels"])
def test_scaling_the_weight_by_two_scales_the_solution(name, pattern, shape):
    exact, inputs = weight_and_inputs(shape)
    weight, stats = exact.float(), sums(inputs)
    one, two = solved(name, weight, stats, pattern), solved(name, 2 * weight, stats, pattern)
    assert torch.equal(one.mask, two.mask)
    assert torch.equal(2 * one.weight, two.weight)
    assert two.error == pytest.approx(one.error, rel=1e-6)


@every_method
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "8:16", "50% per row", "50% per matrix"])
def test_permuting_the_rows_permutes_the_solution(name, pattern):
    exact, inputs = weight_and_inputs("matrix")
    order = torch.randperm(len(exact), generator=torch.Generator().manual_seed(1))
    plain, permuted = (solved(name, w.float(), sums(inputs), pattern) for w in (exact, exact[order]))
    assert torch.equal(plain.mask[order], permuted.mask)
    torch.testing.assert_close(plain.weight[order], permuted.weight)


@every_method
@every_pattern
@pytest.mark.parametrize("shape", ["stack", "stack with one input"])
def test_stacked_matrices_are_solved_as_if_each_were_alone(name, pattern, shape):
    exact, inputs = weight_and_inputs(shape)
    weight = exact.float()
    together = solved(name, weight, sums(inputs), pattern)
    for i, matrix in enumerate(weight):
        alone = solved(name, matrix, sums(inputs if inputs.dim() == 2 else inputs[i]), pattern)
        assert torch.equal(together.mask[i], alone.mask)
        torch.testing.assert_close(together.weight[i], alone.weight)


# formulas ------------------------------------------------------------------------------------------------------------


def naive_scores(name: str, weight: list[list[float]], norms: list[float], alpha: float) -> Tensor:
    rows, columns = len(weight), len(weight[0])
    score = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            size = abs(weight[i][j])
            in_column = sum(abs(weight[k][j]) for k in range(rows))
            in_row = sum(abs(weight[i][k]) for k in range(columns))
            ria = (size / in_column + size / in_row) * norms[j] ** alpha
            score[i, j] = {"magnitude": size, "wanda": size * norms[j], "ria": ria}[name]
    return score


@pytest.mark.parametrize("name", MASK_ONLY)
@pytest.mark.parametrize("pattern", ["2:4", "4:8", "50% per row", "50% per matrix", "30%"])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 0.0])
def test_the_score_is_the_published_formula(name, pattern, alpha):
    exact, inputs = weight_and_inputs("matrix")
    weight, stats = exact.float(), sums(inputs)
    norms = [math.sqrt(sum(x * x for x in channel)) for channel in inputs.T.tolist()]
    score = naive_scores(name, weight.tolist(), norms, alpha)
    spelled = parse_pattern(pattern)
    if isinstance(spelled, NM):
        expected = reference.nm_mask(score, spelled.n, spelled.m)
    else:
        default = {"magnitude": "matrix", "wanda": "row", "ria": "matrix"}[name]
        expected = reference.unstructured_mask(score, spelled.sparsity, spelled.scope or default)
    method, state = METHODS[name], Stats(stats.tokens, stats.square_sums)
    solution = method.solve(weight, state, spelled.with_scope(method.scope), {"alpha": alpha})
    assert torch.equal(solution.mask, expected)


def test_ria_scores_rows_and_columns_of_zeros_as_zero():
    weight = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 5.0]])
    solution = METHODS["ria"].solve(weight, Stats(1, torch.ones(4)), NM(1, 4), {"alpha": 0.5})
    assert solution.mask.int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert solution.weight.tolist() == [[0, 0, 0, 0], [0, 0, 0, 5]]


NAN = float("nan")
SENSELESS = [
    ("ria", "alpha", [-0.1, 1.5, "0.5", None, True, NAN], r"must be a number in \[0, 1\]"),
    ("sparsegpt", "damping", [0, -0.1, 1.5, "1e-2", None, True, NAN], r"must be a number in \(0, 1\]"),
    ("sparsegpt", "block_size", [0, -8, 12.5, "128", None, True], "must be a positive whole number"),
    ("alps", "damping", [0, "1e-2"], r"must be a number in \(0, 1\]"),
    ("alps", "iterations", [0], "must be a positive whole number"),
    ("alps", "refit_iterations", [True], "must be a positive whole number"),
]


@pytest.mark.parametrize(("name", "option", "values", "words"), SENSELESS)
def test_options_that_make_no_sense(name, option, values, words):
    for value in values:
        refused(METHODS[name].check, {**METHODS[name].options, option: value}, match=f"{name}: {option}=.*: {words}")


# error and statistics ------------------------------------------------------------------------------------------------


ERRORS = [
    ([[3, 4]], [[0, 4]], None, 9 / 25),  # without data that of the weights
    ([[3, 4]], [[0, 4]], Stats(5, torch.tensor([2.0, 1.0])), 18 / 34),  # channels are taken as uncorrelated
    ([[[3, 4]], [[1, 0]]], [[[0, 4]], [[1, 0]]], None, 9 / 26),  # summed over the matrices of a stack
    ([[0, 0]], [[0, 0]], None, 0),  # of an output that is zero there is none
    ([[1, 1]], [[0, 0]], Stats(1, torch.zeros(2), torch.zeros(2, 2)), 0),
]


@pytest.mark.parametrize(("weight", "pruned", "stats", "error"), ERRORS)
def test_errors_by_hand(weight, pruned, stats, error):
    assert relative_error(torch.tensor(weight).float(), torch.tensor(pruned).float(), stats) == pytest.approx(error)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("columns", [STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 40])
def test_the_error_of_a_wide_layer_is_that_of_its_outputs(columns, lead):
    """Against the outputs themselves: the Gram matrix is multiplied strip by strip, above its diagonal alone."""
    x = torch.randn(*lead, 50, columns, dtype=torch.float64)
    weight = torch.randn(*lead, 6, columns, dtype=torch.float64)
    pruned = weight * (torch.rand_like(weight) < 0.5)
    stats = Stats(50, x.square().sum(-2), x.mT @ x)
    expected = ((weight - pruned) @ x.mT).square().sum() / (weight @ x.mT).square().sum()
    assert relative_error(weight, pruned, stats) == pytest.approx(float(expected), rel=1e-10)


def test_statistics_of_two_halves_add_up_to_those_of_the_whole():
    inputs = correlated_inputs(40, 8)
    whole, first, second = sums(inputs), sums(inputs[:13]), sums(inputs[13:])
    added = first + second
    assert added.tokens == 40
    torch.testing.assert_close((added.gram, added.square_sums), (whole.gram, whole.square_sums))
    assert (first + Stats(27, second.square_sums)).gram is None


def test_a_method_of_the_user_writes_only_solve():
    """`prepare` hands on the statistics, `check` accepts, the defaults ask for no data."""

    class FirstOfGroup(Method):
        name = "first"

        def solve(self, weight, state, pattern, options):
            mask = pattern.mask(-torch.arange(weight.shape[-1]).expand(weight.shape))
            return Solution(weight.masked_fill(~mask, 0), mask, relative_error(weight, weight, state))

    method = FirstOfGroup()
    assert (method.needs, method.options, method.scope) == ("nothing", {}, "matrix")
    method.check({})
    stats = Stats(1, torch.ones(4))
    assert method.prepare(stats, {}) is stats
    assert method.solve(torch.ones(1, 4), stats, NM(2, 4), {}).mask.int().tolist() == [[1, 1, 0, 0]]
