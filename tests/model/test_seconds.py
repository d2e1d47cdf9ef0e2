"""Seconds of calls, by a clock that only the products of linear layers move."""

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.shrinking import shrink as smaller
from modelopt_sparse.shrinking.shrink import seconds_of_call
from tests.models.shrinkable import BLOCKS, WIDTH, calls, shrinkable

HIDDEN, VOCAB = 32, 97
LLAMA = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2  # weights of attention


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


def shrunk(**options: Any) -> Any:
    model = shrinkable("Llama")
    mts.shrink(model, data_loader=list(calls(model)), progress=False, **options)
    return mts.report(model)


@pytest.mark.parametrize(
    ("options", "width", "blocks"),
    [({"mlp": 12}, WIDTH - 12, BLOCKS), ({"blocks": [1]}, WIDTH, BLOCKS - 1), ({"mlp": 24, "blocks": 2}, 24, 2)],
)
def test_seconds_are_those_of_both_models(monkeypatch, options, width, blocks):
    Work(monkeypatch)
    costs = shrunk(**options).shrunk.costs
    old, new = (48 * (n * (LLAMA + 3 * HIDDEN * w) + VOCAB * HIDDEN) for n, w in ((BLOCKS, WIDTH), (blocks, width)))
    assert costs["seconds"] == [old, new]


def test_nothing_is_said_where_calls_do_not_agree(monkeypatch):
    products = count(1)
    Work(monkeypatch, lambda: 10**5 * next(products))
    report = shrunk(blocks=[1])
    assert not any("seconds" in what for what in report.shrunk.costs)
    assert "seconds are not known: the machine was too busy to measure them" in report.notes


@pytest.mark.parametrize(
    ("durations", "wanted"), [([[5, 2, 2, 2, 9], [7, 3, 3, 1, 1, 1]], [2, 1]), ([[*range(1, 40)], [1] * 40], [])]
)
def test_seconds_are_the_least_of_calls_in_turns_or_none(durations, wanted):
    clock, turns = [0.0], []
    left = [[*of_model, *[9] * 9] for of_model in durations]

    def model(place: int) -> Any:
        def call(input_ids: torch.Tensor) -> torch.Tensor:
            turns.append(place)
            clock[0] += left[place].pop(0) / 100
            return input_ids

        return call

    seconds = seconds_of_call((model(0), model(1)), torch.zeros(1, 1), lambda: clock[0])
    assert [round(100 * each) for each in seconds] == wanted
    assert turns == [0, 1] * (len(turns) // 2)
