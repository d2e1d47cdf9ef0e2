"""Updates of masks against masks worked out by hand, and against loops that are too slow and too plain to be wrong;
schedules against tables, and the steps at which masks are updated."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_sparse import training
from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.training import updates
from modelopt_sparse.training.updates import Scope, drop_and_grow, generator_for, initial_mask, largest_magnitudes

W = torch.tensor([[0.0, 1, 0, -1.5, 0, 8, -2, 0]])
G = torch.tensor([[9.0, 1, 4, 1, 5, 8, 2, 3]])


def row(*live: int, size: int = 8) -> torch.Tensor:
    return torch.tensor([[i in live for i in range(size)]])


def generator(event: object = 0) -> torch.Generator:
    return generator_for(0, "weight", event)


# drop and grow ------------------------------------------------------------------------------------------------------


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


BY_HAND = {  # weights, what is live, scores, options, what is live then
    # half of four live weights drop: 1 and -1.5; the largest gradients elsewhere are at 0 (9) and 4 (5)
    "rigl": (W, W != 0, G, {}, row(0, 4, 5, 6)),
    "scores of one's own": (W, W != 0, values(0.1, 0.2, 0.9, 0.3, 0.4, 0, 0, 0.8), {}, row(2, 5, 6, 7)),
    # each group of four fills up to two by its own gradients
    "2:4": (W, W != 0, G, {"pattern": NM(2, 4)}, row(0, 2, 5, 6)),
    "ties go to the lower index": (values(*[1] * 8), row(0, 1, 2, 3), values(*[1] * 8), {}, row(0, 1, 2, 3)),
    "ties of scores": (values(*[1] * 8), row(0, 1, 2, 3), values(0, 0, 0, 0, 1, 1, 1, 1), {}, row(0, 1, 4, 5)),
    "what is dropped may grow again": (
        values(5, 1, 2), row(0, 1, 2, size=3), values(0, 9, 1), {"drop_fraction": 1 / 3, "level": 0.0},
        row(0, 1, 2, size=3),
    ),
    "beside a pruned place with a smaller gradient": (
        values(5, 1, 2, 0), row(0, 1, 2, size=4), values(0, 9, 1, 8), {"drop_fraction": 1 / 3, "level": 0.25},
        row(0, 1, 2, size=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_drop_and_grow_by_hand(case):
    weight, live, score, options, expected = BY_HAND[case]
    new = drop_and_grow(weight, live, score, **{"drop_fraction": 0.5, "level": 0.5, **options})
    assert torch.equal(new, expected)


def slow_update(weight, mask, score, fraction, level):
    """Drop and grow in one scope, place by place, on lists."""
    live = [i for i in range(len(mask)) if mask[i]]
    keep = len(mask) - round(level * len(mask))
    left = min(len(live) - round(fraction * len(live)), keep)
    kept = sorted(live, key=lambda i: (-abs(weight[i]), i))[:left]
    rest = sorted((i for i in range(len(mask)) if i not in kept), key=lambda i: (-score[i], i))
    if not any(score[i] for i in rest) and len(live) == keep:
        return list(mask)
    new = {*kept, *rest[: keep - len(kept)]}
    return [i in new for i in range(len(mask))]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_drop_and_grow_is_what_a_plain_loop_does(data):
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)) * 2
    scope = data.draw(st.sampled_from([Scope(), Scope("row"), Scope("in_groups", 2), Scope("out_groups", rows)]))

    def matrix(entries):
        drawn = data.draw(st.lists(entries, min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(drawn).view(rows, columns)

    numbers = st.integers(-3, 3)  # many ties
    weight, score, mask = matrix(numbers).float(), matrix(numbers).float().abs(), matrix(st.booleans())
    fraction, level = (data.draw(st.sampled_from([0.0, x, 0.5, y])) for x, y in ((0.3, 1.0), (0.25, 0.7)))
    new = drop_and_grow(weight, mask, score, drop_fraction=fraction, level=level, scope=scope)
    parts = [scope.within(tensor).reshape(-1, scope.within(tensor).shape[-1]) for tensor in (weight, mask, score, new)]
    for w, m, s, n in zip(*parts):
        assert n.tolist() == slow_update(w.tolist(), m.tolist(), s.tolist(), fraction, level)


@pytest.mark.parametrize("scope", [Scope(), Scope("row"), Scope("in_groups", 2), Scope("out_groups", 3)], ids=str)
def test_a_scope_goes_there_and_back(scope):
    matrix = torch.arange(2 * 6 * 8).view(2, 6, 8)
    scopes = scope.within(matrix)
    assert torch.equal(scope.back(scopes, matrix), matrix)
    of = {tuple(sorted(part.tolist())) for part in scopes[0]}
    entries = {
        "matrix": [[(r, c) for r in range(6) for c in range(8)]],
        "row": [[(r, c) for c in range(8)] for r in range(6)],
        "in_groups": [[(r, c) for r in range(6) for c in range(4 * g, 4 * g + 4)] for g in range(2)],
        "out_groups": [[(r, c) for r in range(2 * g, 2 * g + 2) for c in range(8)] for g in range(3)],
    }[scope.kind]
    assert of == {tuple(sorted(int(matrix[0, r, c]) for r, c in group)) for group in entries}


# magnitude ----------------------------------------------------------------------------------------------------------


V = values(3, -1, 4, 1, -5, 9, 2, -6)


def test_gmp_by_hand():
    """0, a quarter, a half, three quarters: each mask lies within the one before."""
    mask = torch.ones(1, 8, dtype=torch.bool)
    expected = [row(*range(8)), row(0, 2, 4, 5, 6, 7), row(2, 4, 5, 7), row(5, 7)]
    for level, wanted in zip((0.0, 0.25, 0.5, 0.75), expected):
        mask = largest_magnitudes(V * mask, mask, level, generator())
        assert torch.equal(mask, wanted)


def test_pruned_places_stay_behind_live_zeros():
    """A live weight of 0.0 is kept before any pruned place."""
    weight, mask = values(0, 0, 5, 0), row(1, 2, size=4)
    assert torch.equal(largest_magnitudes(weight, mask, 0.5, generator()), mask)


FALLING = {
    "gmp": largest_magnitudes,
    "initial": lambda weight, mask, level, generator: initial_mask(weight, level, "topk", generator, present=mask),
}


@pytest.mark.parametrize("mask_at", FALLING.values(), ids=list(FALLING))
def test_where_the_level_falls_random_places_come_back(mask_at):
    weight, mask, back = values(0, 0, 5, 4, 0, 0), row(2, 3, size=6), set()
    for event in range(40):
        new = mask_at(weight, mask, 1 / 3, generator(event))[0].nonzero().flatten().tolist()
        assert len(new) == 4
        assert {2, 3} <= {*new}
        back |= {*new}
    assert back == {*range(6)}


def test_gmp_towards_two_of_four_nests_and_ends_there():
    torch.manual_seed(3)
    weight, mask = torch.randn(6, 16), torch.ones(6, 16, dtype=torch.bool)
    for level, zeros in [(0.0, 0), (0.125, 12), (0.25, 24), (0.4, 38), (0.5, 48)]:
        new = largest_magnitudes(weight * mask, mask, level, generator(), pattern=NM(2, 4))
        assert int((~new).sum()) == zeros
        assert not (new & ~mask).any()
        mask = new
    assert torch.equal(mask, NM(2, 4).mask(weight.abs()))


# initial masks ------------------------------------------------------------------------------------------------------


INITIAL = {  # weights, method, the mask that is there, what is live at level 0.5
    "topk": (V, "topk", None, row(2, 4, 5, 7)),
    "a higher level prunes the smallest that are live": (V, "topk", row(0, 1, 2, 3, 4, 5), row(0, 2, 4, 5)),
    "from zeros": (values(0, 1, 0, 2), "from_zeros", None, row(1, 3, size=4)),
    "from zeros of the weight and of the mask": (values(0, 1, 0, 2), "from_zeros", row(0, 1, size=4), row(1, size=4)),
    "a function": (values(0, 1, 0.5, 2), lambda weight, level: weight > level, None, row(1, 3, size=4)),
}


@pytest.mark.parametrize(("weight", "method", "present", "expected"), INITIAL.values(), ids=list(INITIAL))
def test_initial_masks_by_hand(weight, method, present, expected):
    assert torch.equal(initial_mask(weight, 0.5, method, generator(), present=present), expected)


def test_a_function_that_returns_no_mask():
    for function, form in ((lambda w, level: w, r"torch\.float32"), (lambda w, level: None, "NoneType")):
        with pytest.raises(ValueError, match=f"init_method returned {form}"):
            initial_mask(W, 0.9, function, generator())


@pytest.mark.parametrize("method", ["random", "topk"])
def test_the_same_level_changes_nothing(method):
    weight, present = torch.randn(4, 8), initial_mask(torch.randn(4, 8), 0.5, "random", generator("before"))
    assert torch.equal(initial_mask(weight * present, 0.5, method, generator(), present=present), present)


@pytest.mark.parametrize("scope", [Scope(), Scope("row"), Scope("in_groups", 4), Scope("out_groups", 2)], ids=str)
@pytest.mark.parametrize("method", ["random", "topk", "checkerboard"])
@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 0.9])
def test_counts_are_exact_in_each_scope(scope, method, level):
    scopes = scope.within(initial_mask(torch.randn(3, 6, 8), level, method, generator(), scope=scope))
    assert ((~scopes).sum(-1) == round(level * scopes.shape[-1])).all()


def test_random_masks_do_not_look_at_the_weight():
    masks = [initial_mask(weight, 0.5, "random", generator()) for weight in (torch.randn(4, 8), torch.zeros(4, 8))]
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], initial_mask(torch.zeros(4, 8), 0.5, "random", generator("another event")))


def test_a_checkerboard_is_spread_evenly():
    mask = initial_mask(torch.zeros(4, 8), 0.75, "checkerboard", generator(), scope=Scope("row"))
    rows = [each.nonzero().flatten().tolist() for each in mask]
    assert sorted(rows) == [[first, first + 4] for first in range(4)]


# ERK, digests -------------------------------------------------------------------------------------------------------


def test_erk_densities_have_the_ratio_of_the_rule_and_the_total():
    shapes = {"conv": (64, 32, 3, 3), "wide": (256, 512), "square": (128, 128)}
    density = {name: 1 - level for name, level in updates.erk_levels(shapes, 0.9).items()}
    eps = [density[name] * math.prod(shape) / sum(shape) for name, shape in shapes.items()]
    assert eps == pytest.approx([eps[0]] * 3)
    total = sum(math.prod(shape) for shape in shapes.values())
    assert sum(density[name] * math.prod(shapes[name]) for name in shapes) == pytest.approx(0.1 * total)


def test_digests_differ_for_each_flipped_place():
    mask, flips = torch.rand(5, 7) > 0.5, torch.eye(35, dtype=torch.bool).view(35, 5, 7)
    assert len({updates.digest(each) for each in (mask, mask.clone(), *(mask ^ flips))}) == 36


# schedules ----------------------------------------------------------------------------------------------------------


TABLE = [  # schedule, its values at t = 0, 1, 4
    (training.Constant, {"value": 0.9}, (0.9, 0.9, 0.9)),
    (training.Linear, {"init": 0.1, "slope": 0.2}, (0.1, 0.3, 0.9)),
    (training.Power, {"init": 0.8, "beta": 0.5}, (0.8, 0.4, 0.05)),
    (training.Exp, {"init": 0.2, "gamma": -math.log(2)}, (0.2, 0.6, 0.95)),
    (training.Cosine, {"init": 0.3, "half_period": 4}, (0.3, 0.25606601717798213, 0.0)),
    (training.Cosine, {"init": 0.5, "half_period": 2, "minimum": 0.1}, (0.5, 0.3, 0.5)),
    (training.Cubic, {"init": 0.0, "final": 0.8, "start": 0, "stop": 2}, (0.0, 0.7, 0.8)),
    (training.Cubic, {"init": 0.2, "final": 0.6, "start": 1, "stop": 3}, (0.2, 0.2, 0.6)),
]


@pytest.mark.parametrize(("kind", "options", "values"), TABLE)
def test_values(kind, options, values):
    schedule = kind(*options.values())
    assert [schedule(step) for step in (0, 1, 4)] == pytest.approx(values)
    assert updates.parse_schedule({"type": kind.__name__.lower(), **options}, "sparsity") == schedule


def test_a_list_goes_by_the_number_of_updates_and_wraps_and_a_function_by_the_step():
    schedule = updates.parse_schedule([0.9, 0.5, 0.0], "sparsity")
    assert schedule == training.Cycling((0.9, 0.5, 0.0))
    assert [schedule(step=7, updates=count) for count in range(5)] == [0.9, 0.5, 0.0, 0.9, 0.5]
    assert updates.parse_schedule(lambda step: step / 10, "sparsity")(3) == 0.3
    for wrong in (math.nan, None):
        with pytest.raises(ValueError, match=f"a schedule gives {wrong} at step 3: give a number"):
            updates.parse_schedule(lambda _, value=wrong: value, "sparsity")(3)


NO_SCHEDULE = [
    ("0.5", "is no schedule; give a number"),
    ([0.5, "x"], "is no schedule; give a number, numbers"),
    ({"type": "cosin", "init": 1}, "is no schedule, did you mean 'cosine'.; give a number"),
    ({"init": 1, "half_period": 4}, "is no schedule; give .* one of constant, linear"),
    ({"type": "cosine", "init": 0.3, "half_period": 4, "min": 0}, "takes init, half_period, minimum: .*'min'"),
    ({"type": "cosine", "init": 0.3}, "cosine takes init, half_period, minimum: .*missing .*'half_period'"),
    ({"type": "linear", "init": "a", "slope": 1}, "init of linear is 'a', and must be a number"),
    ({"type": "cubic", "init": 0, "final": 1, "start": 5, "stop": 5}, "start 5 must be before stop 5"),
]
NO_UPDATE = [
    (0, "freq=0: must be a positive whole number"),
    ("100", "give a number of steps"),
    ({"freq": 10, "begin": 5}, "begin.*give a number of steps, {'freq': 100, .*}"),
    ({"freq": 1.5}, "freq=1.5: must be a positive whole number"),
    ({"steps": []}, r"give .* {'steps': .*}"),
    ({"steps": [1], "freq": 2}, r"update={'freq': 2, 'steps': .1.}: give a number"),
]


WRONG = [
    *((partial(updates.parse_schedule, option="sparsity"), *row) for row in NO_SCHEDULE),
    *((updates.parse_update, *row) for row in NO_UPDATE),
]


@pytest.mark.parametrize(("parse", "value", "match"), WRONG)
def test_what_is_no_schedule_and_no_update(parse, value, match):
    with pytest.raises(ValueError, match=match):
        parse(value)


UPDATES = [
    (None, list(range(21))),
    (1, list(range(21))),
    (7, [0, 7, 14]),
    ({"freq": 5}, [0, 5, 10, 15, 20]),
    ({"freq": 5, "start": 3}, [3, 8, 13, 18]),
    ({"freq": 5, "start": 5, "stop": 15}, [5, 10]),  # start is among them, stop is not
    ({"freq": 5, "stop": None}, [0, 5, 10, 15, 20]),
    ({"steps": [4, 2, 17]}, [2, 4, 17]),
    (lambda step: step % 6 == 1, [1, 7, 13, 19]),
]


@pytest.mark.parametrize(("update", "fires"), UPDATES)
def test_the_steps_of_updates(update, fires):
    schedule = updates.parse_update(update)
    assert [step for step in range(21) if schedule.fires(step)] == fires
    assert [schedule.before(step) for step in range(22)] == [sum(each < step for each in fires) for step in range(22)]
