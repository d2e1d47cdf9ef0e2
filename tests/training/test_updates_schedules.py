"""Schedules against tables worked out by hand, and the steps at which masks are updated."""

import math
from functools import partial

import pytest

from modelopt_sparse import training
from modelopt_sparse.training.updates import parse_schedule, parse_update

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
    assert parse_schedule({"type": kind.__name__.lower(), **options}, "sparsity") == schedule


def test_a_list_goes_by_the_number_of_updates_and_wraps_and_a_function_by_the_step():
    schedule = parse_schedule([0.9, 0.5, 0.0], "sparsity")
    assert schedule == training.Cycling((0.9, 0.5, 0.0))
    assert [schedule(step=7, updates=count) for count in range(5)] == [0.9, 0.5, 0.0, 0.9, 0.5]
    assert parse_schedule(lambda step: step / 10, "sparsity")(3) == 0.3
    for wrong in (math.nan, None):
        with pytest.raises(ValueError, match=f"a schedule gives {wrong} at step 3: give a number"):
            parse_schedule(lambda _, value=wrong: value, "sparsity")(3)


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
    *((partial(parse_schedule, option="sparsity"), *row) for row in NO_SCHEDULE),
    *((parse_update, *row) for row in NO_UPDATE),
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
    schedule = parse_update(update)
    assert [step for step in range(21) if schedule.fires(step)] == fires
    assert [schedule.before(step) for step in range(22)] == [sum(each < step for each in fires) for step in range(22)]
