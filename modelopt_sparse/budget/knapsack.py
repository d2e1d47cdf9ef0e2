"""A multiple-choice knapsack: which choice for each layer loses least with costs within a ceiling.

Shape letters: N layers, K choices of each, S partial plans.
"""

from bisect import bisect_left
from typing import Any

import numpy as np

STATES = 20_000  # partial plans that are held: far more than an exact choice takes but for adversarial losses
LOWEST_PRICE, DOUBLINGS = -140, 210  # multipliers are searched from 2**-140 to 2**70 on a logarithmic grid
STEPS = 2**60  # of that grid


def choose(losses_NK: np.ndarray, costs_NK: np.ndarray, ceiling: int) -> np.ndarray | None:
    """The choice [N] of the smallest sum of losses with costs within a ceiling; None if there is none.

    A multiple-choice knapsack. The lowest Lagrange multiplier at which the cheapest choices meet the ceiling gives a
    bound and a feasible choice. All plans whose losses lie within the gap between the two are then gone through, layer
    by layer, by dynamic programming: a partial plan stays unless another one beats it in both cost and loss (Pisinger
    1995).
    """
    least_N = costs_NK.min(1)
    if least_N.sum() > ceiling:
        return None

    def priced(step: int) -> tuple[float, np.ndarray, np.ndarray]:
        """(a price, losses and priced costs, the choice [N] of the least of them; of equal ones the cheapest)."""
        price = 2 ** (LOWEST_PRICE + DOUBLINGS * step / STEPS)
        priced_NK = losses_NK + price * costs_NK
        return price, priced_NK, np.lexsort((costs_NK, priced_NK))[:, 0]

    step = bisect_left(range(STEPS), True, key=lambda step: _sum(costs_NK, priced(step)[-1]) <= ceiling)
    price, priced_NK, start = priced(step)
    more_NK = priced_NK - priced_NK.min(1, keepdims=True)  # than the bound: what a choice adds to it
    loss, bound = _sum(losses_NK, start), priced_NK.min(1).sum() - price * ceiling
    gap = (loss - bound) * (1 + 1e-9)
    room_N = ceiling - least_N.sum() + least_N.cumsum()  # others cheapest
    plans, costs_S, sums = np.empty((1, 0), np.int16), np.zeros(1, np.int64), np.zeros((2, 1))
    for n in range(len(losses_NK)):
        costs_S = (costs_S[:, None] + costs_NK[n]).ravel()
        sums = (sums[..., None] + np.stack((losses_NK[n], more_NK[n]))[:, None]).reshape(2, -1)
        inside = np.flatnonzero((sums[1] <= gap) & (costs_S <= room_N[n]))
        inside = inside[np.lexsort((sums[0, inside], costs_S[inside]))]
        best = np.minimum.accumulate(np.append(np.inf, sums[0, inside]))[:-1]  # of the cheaper ones
        inside = inside[sums[0, inside] < best]
        inside = inside[np.argsort(sums[1, inside], kind="stable")[:STATES]]
        plans = np.column_stack((plans[inside // losses_NK.shape[1]], inside % losses_NK.shape[1]))
        costs_S, sums = costs_S[inside], sums[:, inside]
    return plans[sums[0].argmin()] if len(plans) and sums[0].min() < loss else start


def _sum(values_NK: np.ndarray, choice_N: np.ndarray) -> Any:
    return values_NK[np.arange(len(choice_N)), choice_N].sum()
