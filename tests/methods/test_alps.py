"""ALPS: its values against the optimum on their support, the order of the methods' errors, what its loop promises; and
polish: values against the exact optimum on a mask, and what it leaves alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS, alps
from modelopt_sparse.methods.alps import Scaled, polish, refit, squared_error
from modelopt_sparse.methods.base import Solution, Stats, relative_error
from modelopt_sparse.methods.patterns import Pattern, parse_pattern
from tests.helpers import assert_bits, assert_same_masks, tiny_llama, token_batches
from tests.oracles.layer_problem import DAMPING, damped, exact_refit, objective, of_gram, problem, solved

ALPS, PATTERNS = METHODS["alps"], ["2:4", "4:8", "50%", "70%"]
ITERATIONS = 30


def polished(weight: Tensor, stats: Stats, solution: Solution) -> Solution:
    return polish(weight, solution, Scaled.of(stats, DAMPING), ITERATIONS)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_alps_is_below_sparsegpt_with_better_values_is_below_sparsegpt(pattern, seed):
    """ALPS chooses the better support, not only the better values, be they polished or refitted exactly: the order of
    the paper's table 1."""
    weight, stats = problem(seed)
    alps, sparsegpt = (solved(name, weight, stats, pattern) for name in ("alps", "sparsegpt"))
    refitted = exact_refit(weight, sparsegpt.mask, damped(stats))
    assert alps.error < relative_error(weight, refitted, stats) < sparsegpt.error
    better_values = polished(weight, stats, sparsegpt).error
    assert polished(weight, stats, alps).error < 0.97 * better_values
    assert better_values < 0.97 * sparsegpt.error


def test_a_loop_that_is_cut_short_is_still_refitted_to_the_optimum_on_its_support():
    weight, stats = problem(3)
    options = {**ALPS.options, "iterations": 3, "refit_iterations": 500}
    solution = ALPS.solve(weight, ALPS.prepare(stats, options), parse_pattern("2:4"), options)
    best = exact_refit(weight, solution.mask, damped(stats))
    torch.testing.assert_close(solution.weight, best, rtol=1e-5, atol=1e-5)


def test_no_row_is_worse_than_before_the_refit():
    """Conjugate gradients can lose by rounding, or, as here, because the Gram matrix is not quite symmetric."""
    weight, stats = problem(5)
    state = ALPS.prepare(stats, ALPS.options)
    upper = torch.randn(state.gram.shape, generator=torch.Generator().manual_seed(0)).triu(1)
    state = replace(state, gram=state.gram + 0.2 * upper)
    scaled = weight.to(state.root_C.dtype) * state.root_C
    pattern = parse_pattern("2:4")
    settled, mask = alps._settle(scaled, state, pattern, ALPS.options["iterations"])
    before = alps.squared_error(scaled, settled, state.gram)
    refitted = alps.squared_error(scaled, alps.refit(scaled, settled, mask, state.gram, 10)[0], state.gram)
    assert (refitted > before).any()
    assert (refitted < before).any()
    solution = ALPS.solve(weight, state, pattern, ALPS.options)
    after = alps.squared_error(scaled, solution.weight.to(scaled.dtype) * state.root_C, state.gram)
    torch.testing.assert_close(after, torch.minimum(before, refitted), rtol=1e-4, atol=0)


def admm(dense: Tensor, gram: Tensor, pattern: Pattern, iterations: int) -> Tensor:
    """Algorithm 1 of the paper as it stands there, with its dual V and a new inverse each time -> D."""
    rho, dual, sparse, checked = alps.FIRST_RHO, torch.zeros_like(dense), dense * pattern.mask(dense.abs()), None
    for iteration in range(1, iterations + 1):
        system = gram + rho * torch.eye(len(gram), dtype=gram.dtype)
        ridge = torch.linalg.solve(system, dense @ gram - dual + rho * sparse, left=False)
        mask = pattern.mask((ridge + dual / rho).abs())
        sparse = (ridge + dual / rho) * mask
        dual += rho * (ridge - sparse)
        if iteration % alps.CHECK_EVERY == 0:
            before = pattern.mask(dense.abs()) if checked is None else checked
            changed, checked = float((mask & ~before).sum() / mask.sum()), mask
            rho *= 1.3 if changed >= 0.1 else 1.2 if changed >= 0.005 else 1.1
    return sparse


@pytest.mark.parametrize("pattern", ["2:4", "60%"])
@pytest.mark.parametrize("iterations", [1, 3, 4, 7, 13])
def test_admm_is_that_of_the_paper(pattern, iterations):
    weight, stats = problem(4)
    of_layer, state = parse_pattern(pattern).with_scope(ALPS.scope), ALPS.prepare(stats, ALPS.options)
    scaled = weight * state.root_C
    sparse, mask = alps._settle(scaled, state, of_layer, iterations)
    torch.testing.assert_close(sparse, admm(scaled, state.gram, of_layer, iterations), rtol=1e-6, atol=1e-5)
    assert torch.equal(mask, sparse != 0)


def test_more_iterations_than_it_takes_to_settle_change_nothing():
    (weight, stats), pattern = problem(2), parse_pattern("2:4")
    state, counts = ALPS.prepare(stats, ALPS.options), (3, 300, 1000)
    short, settled, longer = (ALPS.solve(weight, state, pattern, {**ALPS.options, "iterations": n}) for n in counts)
    assert torch.equal(settled.weight, longer.weight)
    assert not torch.equal(short.mask, settled.mask)
    assert settled.error < short.error


# polish -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*METHODS, "alps without polish"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(2))
def test_values_are_within_two_percent_of_the_optimum_on_the_mask(name, pattern, seed):
    weight, stats = problem(seed)
    solution = solved(name.partition(" ")[0], weight, stats, pattern)
    solution = polished(weight, stats, solution) if name in METHODS else solution
    gram = damped(stats)
    best = objective(weight, exact_refit(weight, solution.mask, gram), gram).sum()
    assert objective(weight, solution.weight, gram).sum() <= 1.02 * best


@pytest.mark.parametrize("name", METHODS)
def test_no_row_gets_worse_and_the_mask_and_the_inputs_stay(name):
    weight, stats = problem(0)
    solution, state = solved(name, weight, stats, "2:4"), Scaled.of(stats, DAMPING)
    assert stats.gram is not None
    tensors = [weight, solution.weight, solution.mask, state.gram, state.root_C, stats.gram, stats.square_sums]
    given = [x.clone() for x in tensors]
    found, gram = polish(weight, solution, state, ITERATIONS), damped(stats)
    for x, old in zip(tensors, given):
        assert_bits(x, old)
    assert torch.equal(found.mask, solution.mask)
    assert not found.weight[~found.mask].any()
    after, before = (objective(weight, x.weight, gram) for x in (found, solution))
    assert (after <= before * (1 + 1e-12)).all()
    assert found.error == pytest.approx(relative_error(weight, found.weight, stats))


def test_a_row_that_would_get_worse_keeps_its_values():
    """With a matrix that is not symmetric the first step lands at nine times the error."""
    weight = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    crooked = torch.tensor([[1.0, 3.0], [-3.0, 1.0]], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    state = Scaled(crooked, ones, ones > 1, Stats(1, ones, crooked))
    start = Solution(torch.zeros_like(weight), torch.ones(3, 2, dtype=torch.bool), 1.0)
    assert torch.equal(polish(weight, start, state, 1).weight, start.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounding_to_half_precision_worsens_no_row(dtype):
    """From values that are the optimum but for the rounding, which another rounding could make worse."""
    exact, stats = problem(1)
    weight = exact.to(dtype)
    first = polished(weight, stats, solved("sparsegpt", weight, stats, "2:4"))
    again = polished(weight, stats, first)
    gram = damped(stats)
    before, after = (objective(weight.double(), x.weight.double(), gram) for x in (first, again))
    assert again.weight.dtype == dtype
    assert (after <= before).all()


def test_rows_are_systems_of_their_own_whatever_the_mask_and_the_start():
    """From a random mask and a random start; one row is fully kept, one fully pruned."""
    weight, stats = problem(0, rows=12, columns=32)
    scale = stats.square_sums.sqrt()
    assert stats.gram is not None
    gram = stats.gram / scale / scale[:, None] + 0.05 * torch.eye(32, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(12, 32, generator=generator) < 0.5
    mask[0], mask[1] = True, False
    start = torch.randn(12, 32, generator=generator, dtype=torch.float64).masked_fill(~mask, 0)
    best = exact_refit(weight, mask, gram)
    torch.testing.assert_close(refit(weight, start, mask, gram, 200)[0], best, rtol=1e-5, atol=1e-5)
    alone = torch.cat([refit(weight[[i]], start[[i]], mask[[i]], gram, 4)[0] for i in range(12)])
    torch.testing.assert_close(refit(weight, start, mask, gram, 4)[0], alone)
    _, before = refit(weight, start, mask, gram, 0)
    torch.testing.assert_close(before, squared_error(weight, start, gram))


def test_iterations_stop_when_every_row_is_at_its_optimum():
    weight, stats = problem(0, rows=4, columns=16)
    mask = torch.ones_like(weight, dtype=torch.bool)
    gram = damped(stats)
    assert torch.equal(refit(weight, weight.clone(), mask, gram, 10)[0], weight)
    found = [refit(weight, torch.zeros_like(weight), mask, gram, iterations)[0] for iterations in (1000, 2000)]
    assert torch.equal(*found)
    done = weight.index_fill(0, torch.tensor([3]), 0)  # a row with nothing to gain does not keep the others going
    assert torch.equal(refit(done, torch.zeros_like(weight), mask, gram, 1000)[0][:3], found[0][:3])


def test_a_stack_is_solved_matrix_by_matrix():
    weights, stats = zip(*(problem(seed, rows=6, columns=16) for seed in range(3)))
    grams = torch.stack([x.gram for x in stats if x.gram is not None])
    problems: list[Any] = [(torch.stack(weights), of_gram(grams)), *zip(weights, stats)]
    found, *alone = (polished(*each, solved("magnitude", *each, "2:4")).weight for each in problems)
    torch.testing.assert_close(found, torch.stack(alone))


def test_channels_without_data_take_the_dense_values():
    weight, stats = problem(0)
    assert stats.gram is not None
    gram = stats.gram.clone()
    gram[:4], gram[:, :4] = 0, 0
    mask = parse_pattern("2:4").mask(weight.abs())
    found = polished(weight, of_gram(gram), Solution(torch.zeros_like(weight), mask, 1.0))
    torch.testing.assert_close(found.weight[:, :4], weight[:, :4].masked_fill(~mask[:, :4], 0))


@pytest.mark.parametrize("method", METHODS)
def test_sparsify_polishes_any_method_and_reports_both_errors(method):
    plain, better = (tiny_llama(num_hidden_layers=1) for _ in range(2))
    mts.sparsify(plain, method, data_loader=token_batches(), sequential="none")
    mts.sparsify(better, method, data_loader=token_batches(), sequential="none", polish=True)
    assert_same_masks(better, plain)
    for layer, before in zip(mts.report(better).layers, mts.report(plain).layers):
        assert layer.recipe == f"{method}+polish"
        first, second = layer.steps
        assert (first.step, second.step, second.error) == (method, "polish", layer.error)
        assert before.error_from != "gram" or first.error == before.error
        assert first.error is not None
        assert layer.error is not None
        assert layer.error <= first.error or method == "alps"  # whose own refit has left next to nothing to gain
        assert layer.seconds == pytest.approx(first.seconds + second.seconds, abs=1e-3)


def test_the_damping_is_the_methods_own():
    """With much damping polish stays closer to the dense weights on channels that carry little."""

    def values(**options) -> Tensor:
        model = mts.sparsify(tiny_llama(), "sparsegpt", data_loader=token_batches(), polish=True, **options)
        return model.get_parameter("model.layers.0.mlp.down_proj.weight").detach()

    assert not torch.equal(values(), values(damping=0.5))
