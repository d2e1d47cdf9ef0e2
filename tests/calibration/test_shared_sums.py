"""Sums over the calls of all processes, whose bits do not depend on how many processes there are."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_sparse.calibration.sums import ROWS_AT_ONCE, SharedSums

GRAM, SQUARES = "a Gram matrix", "square sums"


class Group:
    """Processes that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def gathered(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Rank:
    def __init__(self, rank: int, group: Group) -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def all_gather(self, what: str, value: Any = None) -> list[Any]:
        del what
        return self._group.gathered(self.rank, value)

    def all_reduce(self, what: str, tensors: list[Tensor]) -> None:
        of_ranks = self.all_gather(what, [tensor.clone() for tensor in tensors])
        for place, tensor in enumerate(tensors):
            # some order that is not that of the ranks
            tensor.copy_(sum(of_rank[place] for of_rank in (*of_ranks[1::2], *of_ranks[::2])))


def summed(calls: list[dict[str, Tensor]], size: int) -> tuple[dict[str, Tensor], int]:
    """What processes that share out the calls sum up, and in how many passes; the same in all of them."""
    group = Group(size)

    def work(rank: int) -> tuple[dict[str, Tensor], int]:
        sums = SharedSums(Rank(rank, group), torch.device("cpu"), exact=True)
        try:
            for passes in (1, 2):
                for call in calls[rank::size]:
                    sums.add(call, grams={GRAM})
                if (totals := sums.totals()) is not None:
                    return totals, passes
        except BaseException:
            group.barrier.abort()  # nobody waits for this one
            raise
        raise AssertionError("a third pass is wanted")

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, range(size)))
    for totals, passes in results[1:]:
        assert passes == results[0][1]
        assert all(torch.equal(totals[key].nan_to_num(), results[0][0][key].nan_to_num()) for key in totals)
    return results[0]


def calls_of(seed: int, count: int, exponents: int, late: int) -> list[dict[str, Tensor]]:
    """Sums of calls whose channels are of very different size; the first is 2^-``late`` as large in every second of
    them, and another is zero there."""
    random = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-exponents, exponents + 1, (6,), generator=random).float())
    calls = []
    for number in range(count):
        rows = torch.randn(9, 6, generator=random) * size
        rows[:, 0] *= 2.0**-late if number % 2 == 0 else 1
        rows[:, 1] *= number % 3 > 0
        rows = rows.to(torch.float64 if seed % 2 else torch.float32)  # plain sums of float64 numbers are always rounded
        calls.append({GRAM: rows.T @ rows, SQUARES: rows.square().sum(0)})
        if number == 1:
            del calls[-1][SQUARES]  # a call that does not reach the layer
    return calls


def assert_right(totals: dict[str, Tensor], calls: list[dict[str, Tensor]]) -> None:
    """Equal to sums in float64, but for 2^-28 of what an entry may be."""
    for key in totals:
        right = sum(call[key].double() for call in calls if key in call)
        largest = right.diagonal().outer(right.diagonal()).sqrt() if key == GRAM else right
        assert ((totals[key] - right).abs() <= 2.0**-28 * largest).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 13), st.integers(0, 50), st.integers(0, 8))
def test_any_number_of_processes_gives_the_same_bits(seed, count, exponents, late):
    calls = calls_of(seed, count, exponents, late)
    alone, _ = summed(calls, 1)
    assert_right(alone, calls)
    for size in (2, 3, 4):
        together, _ = summed(calls, size)
        assert all(torch.equal(alone[key], together[key]) for key in alone)


def test_gram_matrices_of_several_strips_are_whole():
    """Each strip of rows adds what begins at its diagonal; the rest is mirrored at the end."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(9, 2 * ROWS_AT_ONCE + 7, generator=random) for _ in range(5)]
    calls = [{GRAM: x.T @ x} for x in rows]
    for size in (1, 2):
        totals, _ = summed(calls, size)
        assert_right(totals, calls)
        assert torch.equal(totals[GRAM], totals[GRAM].T)


@pytest.mark.parametrize(("late", "passes"), [(0, 1), (6, 1), (30, 2)])
def test_calls_are_added_once_more_if_a_channel_outgrows_what_was_expected_of_it(late, passes):
    calls = calls_of(0, 8, 4, late)
    for size in (1, 2, 3):
        totals, number = summed(calls, size)
        assert number == passes
        assert_right(totals, calls)


def test_plain_sums_of_float32_have_other_bits():
    """The first test is worth something."""
    calls = calls_of(3, 13, 0, 0)
    in_order = sum(call[GRAM] for call in calls)
    in_two = sum(call[GRAM] for call in calls[::2]) + sum(call[GRAM] for call in calls[1::2])
    assert not torch.equal(in_order, in_two)


def test_what_is_not_finite_stays_so():
    calls = calls_of(0, 4, 0, 0)
    calls[2][SQUARES][3] = torch.inf
    calls[3][SQUARES][4] = torch.nan
    totals, _ = summed(calls, 2)
    assert totals[SQUARES].isfinite().tolist() == [True] * 3 + [False] * 2 + [True]
