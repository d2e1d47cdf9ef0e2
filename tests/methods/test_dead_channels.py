"""Channels that were zero in all of the data: no data says what their weights are worth, and data to come may wake
them up."""

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Method, Solution, masked_solution
from modelopt_sparse.methods.patterns import NM, parse_pattern
from tests.helpers import correlated_inputs
from tests.oracles import reference
from tests.oracles.layer_problem import solved, stats_of

DEAD = [1, 2, 8, 9, 10, 11, 30]  # part of the first and of the last group of 4, and all of the third one
CALIBRATED = [name for name, method in METHODS.items() if method.needs != "nothing"]
PATTERNS = ["2:4", "1:4", "50% per row", "50% per matrix"]
every_calibrated_method = pytest.mark.parametrize("name", CALIBRATED)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def problem(dead: list[int], rows: int = 12, columns: int = 32) -> tuple[Tensor, Tensor]:
    """A weight and inputs, in float32, some of whose channels are dead."""
    inputs = correlated_inputs(4 * columns, columns, dtype=torch.float32)
    inputs[:, dead] = 0
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)), inputs


def size(name: str, weight: Tensor) -> Tensor:
    """What a method calls the size of a weight."""
    if name == "ria":  # relative to the weights of its row and of its column
        return weight.abs() / weight.abs().sum(0) + weight.abs() / weight.abs().sum(1, keepdim=True)
    return weight.abs()


@every_calibrated_method
def test_a_group_whose_channels_are_all_dead_is_pruned_by_size_alone(name):
    weight, inputs = problem(DEAD)
    mask = solved(name, weight, stats_of(inputs), "2:4").mask
    assert torch.equal(mask[:, 8:12], reference.nm_mask(size(name, weight)[:, 8:12], 2, 4))


@every_calibrated_method
@every_pattern
def test_where_nothing_lives_the_whole_matrix_is_pruned_by_size_alone(name, pattern):
    weight, inputs = problem(list(range(32)))
    solution = solved(name, weight, stats_of(inputs), pattern)
    spelled = parse_pattern(pattern).with_scope(METHODS[name].scope)
    if isinstance(spelled, NM):
        expected = reference.nm_mask(size(name, weight), spelled.n, spelled.m)
    else:
        expected = reference.unstructured_mask(size(name, weight), spelled.sparsity, spelled.scope or "")
    assert torch.equal(solution.mask, expected)
    assert torch.equal(solution.weight, weight.masked_fill(~solution.mask, 0))


@every_calibrated_method
@every_pattern
def test_what_stays_of_dead_channels_are_the_dense_weights(name, pattern):
    """To the bit, in the number of places that the pattern promises; and the error knows nothing of them."""
    weight, inputs = problem(DEAD)
    solution = solved(name, weight, stats_of(inputs), pattern)
    stay = solution.mask[:, DEAD]
    assert stay.any()
    assert torch.equal(solution.weight[:, DEAD], weight[:, DEAD].masked_fill(~stay, 0))
    assert int((solution.weight == 0).sum()) == int((~solution.mask).sum()), "there are more zeros than the mask has"
    assert solution.error == pytest.approx(reference.output_error(weight, solution.weight, inputs), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in CALIBRATED if name != "alps"])
@every_pattern
def test_dead_channels_count_as_channels_of_their_own_as_large_as_the_smallest_live_one(name, pattern):
    """The same as if each of them had been seen in one token more, alone, with that size. (ALPS would iterate on what
    such a token says, where the sizes are all that there is to say.)"""
    weight, inputs = problem(DEAD)
    smallest = min(norm for norm in inputs.norm(dim=0).tolist() if norm > 0)
    seen = stats_of(torch.cat([inputs, smallest * torch.eye(32)[DEAD]]))
    method, options, expected_options = METHODS[name], dict(METHODS[name].options), dict(METHODS[name].options)
    if "damping" in options:  # relative to the mean of the diagonal, which is that of the data
        assert seen.gram is not None
        expected_options["damping"] *= float(inputs.square().sum() / seen.gram.diagonal().sum())
    spelled = parse_pattern(pattern).with_scope(method.scope)
    expected = method.solve(weight, method.prepare(seen, expected_options), spelled, expected_options)
    solution = method.solve(weight, method.prepare(stats_of(inputs), options), spelled, options)
    assert torch.equal(solution.mask, expected.mask)
    torch.testing.assert_close(solution.weight, expected.weight, rtol=1e-3, atol=1e-3)


@every_calibrated_method
def test_each_matrix_of_a_stack_has_dead_channels_of_its_own(name):
    """The last one has nothing else."""
    weight = torch.randn(3, 5, 16)
    inputs = torch.stack([correlated_inputs(64, 16, seed, dtype=torch.float32) for seed in range(3)])
    inputs[1][:, [0, 1, 4, 5, 6, 7]] = 0
    inputs[2] = 0
    together = solved(name, weight, stats_of(inputs), "2:4")
    for i in range(3):
        alone = solved(name, weight[i], stats_of(inputs[i]), "2:4")
        assert torch.equal(together.mask[i], alone.mask)
        torch.testing.assert_close(together.weight[i], alone.weight)


@every_calibrated_method
def test_without_dead_channels_the_statistics_are_taken_as_they_are(name):
    stats = stats_of(problem([])[1])
    assert stats.with_dead_channels() is stats
    state = METHODS[name].prepare(stats, METHODS[name].options)
    assert getattr(state, "stats", state) is stats


def test_the_statistics_themselves_stay_as_they_are():
    stats = stats_of(problem(DEAD)[1])
    assert stats.gram is not None
    before = [stats.gram.clone(), stats.square_sums.clone()]
    filled = stats.with_dead_channels()
    assert all(map(torch.equal, (stats.gram, stats.square_sums), before))
    assert stats.dead is None
    assert filled.dead is not None
    assert filled.dead.nonzero().flatten().tolist() == DEAD
    assert filled.with_dead_channels() is filled


def test_a_method_of_ones_own_that_only_solves_gets_them_too():
    class Norms(Method):
        needs = "square_sums"

        def solve(self, weight, state, pattern, options) -> Solution:
            return masked_solution(weight, pattern.mask(weight.abs() * state.square_sums.sqrt()), state)

    weight, inputs = problem(DEAD)
    method = Norms()
    solution = method.solve(weight, method.prepare(stats_of(inputs), {}), NM(2, 4), {})
    assert torch.equal(solution.mask, solved("wanda", weight, stats_of(inputs), "2:4").mask)
