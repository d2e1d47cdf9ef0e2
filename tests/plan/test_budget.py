"""Budgets as users write them, and the choice within them: against all choices gone through, and an exact solver."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

import modelopt_sparse as mts
from modelopt_sparse.budget.knapsack import choose
from modelopt_sparse.plan.budget import parse_budget, parse_choices
from modelopt_sparse.plan.planner import resolve
from tests.helpers import refused, tiny_llama

PARSED = {
    "35% zeros": ("zeros", Fraction(35, 100), True),
    " 70 % flops ": ("flops", Fraction(7, 10), True),
    "4.2e9bytes": ("bytes", Fraction(4_200_000_000), False),
}


@pytest.mark.parametrize(("text", "parts"), PARSED.items(), ids=PARSED)
def test_one_string(text, parts):
    found = parse_budget(text)
    assert (found.unit, found.amount, found.of_dense) == parts
    assert parse_budget(str(found)) == found == parse_budget(found)


WRONG = {
    "35%": r"'35%': say how much, and of what \(zeros, bytes, flops\)",
    "zeros": "say how much",
    "35% zero": r"unit 'zero' is not known, did you mean 'zeros'",
    "0.35 zeros": "write a share with %, such as '35% zeros'",
    "135% zeros": "at most 100 %",
    "0% zeros": "more than 0",
    "0.05 kl": "unit 'kl' is not known; allowed are zeros, bytes, flops",
    "12 ms": "unit 'ms' is not known; allowed are zeros, bytes, flops",
    0.35: "give text, such as '35% bytes'",
    ("35% zeros", "70% flops"): "give text, such as '35% bytes'",
}


@pytest.mark.parametrize("budget", WRONG, ids=str)
def test_what_is_wrong_is_said(budget):
    refused(parse_budget, budget, match=WRONG[budget], error=ValueError if isinstance(budget, str) else TypeError)


def test_choices_of_layers():
    """Those of the option, where they fit; a rule's own; a rule's pattern is fixed. Scopes are the method's."""
    rules = {"*0*q_proj": {"choices": "dense, 1:4"}, "*0*k_proj": {"pattern": "30%"}, "*0*v_proj": None}
    plan = mts.make_plan(tiny_llama(intermediate_size=42), "wanda", budget="9% zeros", choices="dense,2:4", rules=rules)
    found = {each.name.removeprefix("model.layers."): [str(c) for c in each.choices] for each in plan.layers}
    assert found["0.self_attn.q_proj"] == ["None", "1:4"]
    assert found["0.self_attn.k_proj"] == ["30% per row"]
    assert "0.self_attn.v_proj" not in found
    assert found["0.mlp.up_proj"] == ["None", "2:4"]
    assert "0.mlp.down_proj" not in found  # 42 columns
    levels = mts.make_plan(tiny_llama(), "wanda", budget="9% zeros").layers[0].choices
    assert [str(each) for each in levels] == ["None", *(f"{level}% per row" for level in range(20, 85, 5))]
    by_pattern = mts.make_plan(tiny_llama(), "wanda", budget="9% zeros", pattern="4:8").layers[0].choices
    assert [str(each) for each in by_pattern] == ["None", "4:8"]
    assert parse_choices(["2:4", None, "2:4"]) == parse_choices("2:4,dense")
    in_float32 = mts.make_plan(tiny_llama(), "wanda", budget="60% bytes", runtime="cusparselt")
    assert any("weights in 16 bits, which cusparselt takes" in note for note in in_float32.notes)


PERMUTES = [
    *[({}, False), ({"choices": "dense,2:4,50%"}, True), ({"pattern": "2:4"}, True), ({"pattern": 0.5}, False)],
    ({"budget": "90% bytes", "runtime": "cusparselt"}, True),  # levels save none
]


@pytest.mark.parametrize(("options", "permutes"), PERMUTES, ids=str)
def test_quality_permutes_where_a_choice_is_n_m(options, permutes):
    options = {"quality": "balanced", "budget": "9% zeros", **options}
    plan = mts.make_plan(tiny_llama(), **options)
    assert plan.layers[0].recipe == "alps+reconstruct"
    assert any(isinstance(choice, mts.NM) for choice in plan.layers[0].choices) == permutes
    assert mts.SparsifyConfig.make(plan.layers[0].method, **options).permute == permutes


AUTO = {
    "level": ({"pattern": 0.55}, "55% zeros"),
    "of rows": ({"pattern": "55% per row"}, "55% zeros"),
    "some layers stay dense": ({"pattern": 0.55, "rules": {"*.down_proj": None}}, "55% zeros"),
    "N:M": ({"pattern": "2:4"}, "None"),
    "no pattern": ({}, "None"),
    "as many zeros as layers may have": ({"pattern": 0.8}, "None"),
    "no zeros": ({"pattern": 0.0}, "None"),
    "levels of rules": ({"pattern": 0.55, "rules": {"*.down_proj": {"pattern": 0.2}}}, "None"),
    "switched off": ({"pattern": 0.55, "budget": None}, "None"),
    "another": ({"pattern": 0.55, "budget": "60% flops"}, "60% flops"),
    "fast": ({"pattern": 0.55, "quality": "fast"}, "None"),
}


@pytest.mark.parametrize("case", AUTO)
def test_quality_shares_out_the_zeros_of_a_level(case):
    """Where nothing else says where zeros go; the layers' own pattern is the first choice."""
    options, budget = AUTO[case]
    method, config = resolve(None, None, {"quality": "balanced", **options})
    assert str(config.budget) == budget
    if budget == "55% zeros":
        of_rows = " per row" if case == "of rows" else ""
        levels = [f"{level}%{of_rows}" for level in (55, *(each for each in range(20, 85, 5) if each != 55))]
        assert [str(each) for each in config.choices] == [levels[0], "None", *levels[1:]]
        plan = mts.make_plan(tiny_llama(), "sparsegpt", config)
        assert plan.layers[0].pattern.sparsity == 0.55
        assert any("budget of 55% zeros decides" in note and "budget=None keeps" in note for note in plan.notes)
        assert mts.SparsifyConfig.make(method, config).budget.optional
        assert str(mts.SparsifyConfig.make(method, config, pattern=0.3).budget) == "30% zeros"


# the choice -----------------------------------------------------------------------------------------------------------


def instance(seed: int, layers: int, choices: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses [N, K] that grow with the level, not always, and costs [N, K] in whole numbers."""
    pick = np.random.default_rng(seed)
    levels = np.linspace(0, 0.9, choices)
    sizes = pick.choice([4096, 16384, 45056, 65536], (layers, 1))
    costs = (sizes * (1 - levels)).round().astype(np.int64)
    steep = pick.uniform(2, 4, (layers, 1))
    losses = pick.lognormal(0, 1.5, (layers, 1)) * levels**steep * pick.lognormal(0, 0.2, (layers, choices))
    if choices > 2:
        losses[0, -1], costs[0, -1] = losses[0, 0], costs[0, 0]  # a layer with fewer choices has one twice
    return losses, costs


def total(values: np.ndarray, choice: np.ndarray) -> float:
    return values[np.arange(len(choice)), choice].sum()


def assert_no_exchange_helps(choice, losses, costs, ceiling) -> None:
    for n, k in product(range(losses.shape[0]), range(losses.shape[1])):
        other = choice.copy()
        other[n] = k
        if total(costs, other) <= ceiling:
            assert total(losses, other) >= total(losses, choice) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_against_all_choices(seed):
    losses, costs = instance(seed, 5, 3)
    ceiling = int(costs[:, 0].sum() * 0.55)
    found = choose(losses, costs, ceiling)
    every = [np.array(choice) for choice in product(range(3), repeat=5)]
    best = min(total(losses, choice) for choice in every if total(costs, choice) <= ceiling)
    assert total(costs, found) <= ceiling
    assert total(losses, found) <= best * 1.000001


@pytest.mark.parametrize(("layers", "choices"), [(42, 14), (224, 9)])
def test_the_choice_against_an_exact_solver(layers, choices):
    optimize = pytest.importorskip("scipy.optimize")
    losses, costs = instance(0, layers, choices)
    ceiling = int(costs[:, 0].sum() * 0.6)
    one_each = np.kron(np.eye(layers), np.ones(choices))
    limits = [optimize.LinearConstraint(one_each, 1, 1)]
    limits += [optimize.LinearConstraint(costs.reshape(1, -1), ub=ceiling)]
    integers = {"integrality": np.ones(losses.size), "bounds": optimize.Bounds(0, 1)}
    exact = optimize.milp(losses.ravel(), constraints=limits, **integers)
    found = choose(losses, costs, ceiling)
    assert total(losses, found) <= exact.fun * 1.001
    assert_no_exchange_helps(found, losses, costs, ceiling)


@pytest.mark.parametrize("seed", range(4))
def test_more_budget_never_loses_more(seed):
    """And no exchange helps, the choice is the same each time, and the ceiling is kept to the last weight."""
    losses, costs = instance(seed, 30, 6)
    before = np.inf
    for ceiling in np.linspace(costs.min(1).sum() * 1.5, costs[:, 0].sum(), 25).astype(int):
        found = choose(losses, costs, ceiling)
        assert total(costs, found) <= ceiling
        assert total(losses, found) <= before
        assert_no_exchange_helps(found, losses, costs, ceiling)
        assert (found == choose(losses, costs, ceiling)).all()
        before = total(losses, found)
    assert before == 0


def test_what_no_choice_keeps():
    losses, costs = instance(0, 5, 3)
    least = int(costs.min(1).sum())
    assert choose(losses, costs, least - 1) is None
    assert (choose(losses, costs, least) == costs.argmin(1)).all()


def test_a_budget_needs_data():
    data = {"budget='35% zeros' needs calibration data": None, "data_loader= instead of forward_loop": print}
    for match, loop in data.items():
        refused(mts.sparsify, tiny_llama(), "magnitude", match=match, budget="35% zeros", forward_loop=loop)
