"""ALPS: its values against the optimum on their support, the order of the methods' errors, what its loop promises."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS, alps
from modelopt_sparse.methods.base import relative_error
from modelopt_sparse.methods.patterns import Pattern, parse_pattern
from tests.oracles.layer_problem import damped, exact_refit, problem, solved

ALPS, PATTERNS = METHODS["alps"], ["2:4", "4:8", "50%", "70%"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_error_is_below_that_of_sparsegpt_even_when_its_values_are_refitted_exactly(pattern, seed):
    """ALPS chooses the better support, not only the better values: the order of the paper's table 1."""
    weight, stats = problem(seed)
    alps, sparsegpt = solved("alps", weight, stats, pattern), solved("sparsegpt", weight, stats, pattern)
    refitted = exact_refit(weight, sparsegpt.mask, damped(stats))
    assert alps.error < relative_error(weight, refitted, stats) < sparsegpt.error


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
