"""Seconds of calls, measured and predicted, by a clock that only the products of linear layers move."""

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import smaller
from modelopt_sparse.smaller import seconds_of_call
from tests.models.shrinkable import BLOCKS, WIDTH, calls, shrinkable

HIDDEN, VOCAB = 32, 97
LLAMA = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2  # weights of attention
CONVOLUTION = 4 * HIDDEN * HIDDEN  # that is in the place of attention in some blocks of Lfm2


class Work:
    """A clock: seconds are the numbers that linear layers have multiplied, and what ``disturbs`` each of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disturbs: Any = lambda: 0) -> None:
        self.seconds, multiply = 0, nn.Linear.forward

        def forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            self.seconds += module.weight.numel() * x.shape[:-1].numel() + disturbs()
            return multiply(module, x)

        monkeypatch.setattr(nn.Linear, "forward", forward)
        monkeypatch.setattr(smaller, "CALLS", {"seconds": 48})
        monkeypatch.setattr(smaller, "seconds_of_call", partial(seconds_of_call, clock=lambda: self.seconds))


def shrunk(name: str, of_class: dict[str, Any] | None = None, **options: Any) -> Any:
    model = shrinkable(name, **(of_class or {}))
    mts.shrink(model, data_loader=list(calls(model)), progress=False, **options)
    assert not any("forward" in vars(module) for module in model.modules())
    return mts.report(model)


@pytest.mark.parametrize(
    ("options", "width", "blocks"),
    [({"mlp": 12}, WIDTH - 12, BLOCKS), ({"blocks": [1]}, WIDTH, BLOCKS - 1), ({"mlp": 24, "blocks": 2}, 24, 2)],
)
def test_seconds_are_those_of_the_parts_that_stay(monkeypatch, options, width, blocks):
    Work(monkeypatch)
    costs = shrunk("Llama", **options).shrunk.costs
    old, new = (48 * (n * (LLAMA + 3 * HIDDEN * w) + VOCAB * HIDDEN) for n, w in ((BLOCKS, WIDTH), (blocks, width)))
    assert costs["seconds"] == [old, new]
    assert costs["seconds, predicted"] == [old, pytest.approx(new, rel=1e-12)]


def test_each_kind_of_block_is_predicted_by_one_of_its_own(monkeypatch):
    Work(monkeypatch)
    kinds = {"layer_types": ["full_attention", "conv", "conv", "full_attention"]}
    costs = shrunk("Lfm2", kinds, mlp=12, blocks=[0]).shrunk.costs
    mlps = 3 * 3 * HIDDEN * (WIDTH - 12)
    assert costs["seconds"][1] == 48 * (LLAMA + 2 * CONVOLUTION + mlps + VOCAB * HIDDEN)
    assert costs["seconds, predicted"][1] == pytest.approx(costs["seconds"][1], rel=1e-12)


def test_the_prediction_comes_from_parts_and_a_disturbed_call_does_not_count(monkeypatch):
    """Of a smaller model that is none; a product now and then takes much longer."""
    products = count(1)
    work = Work(monkeypatch, lambda: 10**7 * (next(products) % 301 == 0))
    model, same = shrinkable("Llama"), shrinkable("Llama")
    blocks = {str(place): block for place, block in enumerate(model.model.layers)}
    gone, ids = [model.model.layers[2]], torch.ones(1, 8, dtype=torch.long)
    with torch.no_grad():
        before, measured, predicted = seconds_of_call(model, same, blocks, gone, {}, ids, lambda: work.seconds)
    assert before == measured == 8 * (4 * (LLAMA + 3 * HIDDEN * WIDTH) + VOCAB * HIDDEN)
    assert predicted == pytest.approx(before - 8 * (LLAMA + 3 * HIDDEN * WIDTH), rel=1e-12)


def test_nothing_is_said_where_calls_do_not_agree(monkeypatch):
    products = count(1)
    Work(monkeypatch, lambda: 10**5 * next(products))
    report = shrunk("Llama", blocks=[1])
    assert not any("seconds" in what for what in report.shrunk.costs)
    assert "seconds are not known: the machine was too busy to measure them" in report.notes


@pytest.mark.parametrize(
    ("durations", "wanted"),
    [([[5, 2, 2, 2, 9], [7, 3, 3, 1, 1, 1]], [2, 1, 2]), ([[*range(1, 40)], [1] * 40], [])],
)
def test_seconds_are_the_least_of_calls_in_turns_or_none(durations, wanted):
    clock, turns = [0.0], []
    left = [[*of_model, *[9] * 9] for of_model in durations]

    def model(place: int) -> Any:
        def call(input_ids: torch.Tensor) -> torch.Tensor:
            turns.append(place)
            clock[0] += left[place].pop(0) / 100 if len(turns) % 4 in (1, 2) else 0.01  # then in parts, twice
            return input_ids

        return call

    seconds = seconds_of_call(model(0), model(1), {}, (), {}, torch.zeros(1, 1), lambda: clock[0])
    assert [round(100 * each) for each in seconds] == wanted
    assert turns == [0, 1, 0, 0] * (len(turns) // 4)
