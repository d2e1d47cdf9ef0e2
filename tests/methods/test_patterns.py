"""Patterns: literals that can be checked by eye, counts, and agreement with brute force."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_sparse.methods.patterns import NM, Unstructured, count_zeros, keep_largest, parse_pattern
from tests.helpers import refused
from tests.oracles import reference

ANY_SPARSITY = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
ANY_PATTERN = st.one_of(
    st.integers(1, 32).flatmap(lambda m: st.builds(NM, st.integers(1, m), st.just(m))),
    st.builds(Unstructured, ANY_SPARSITY, st.sampled_from([None, "row", "matrix"])),
)


def scores(rows: int, columns: int) -> st.SearchStrategy[torch.Tensor]:
    """Small whole numbers, so that ties are common."""
    row = st.lists(st.integers(0, 3), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda values: torch.tensor(values, dtype=torch.float32))


# literals ------------------------------------------------------------------------------------------------------------


LARGEST = [
    ("2:4", [[4, 3, 2, 1, 1, 2, 3, 4]], [[1, 1, 0, 0, 0, 0, 1, 1]]),
    ("2:4", [[0, 5, 0, 6], [7, 0, 0, 8]], [[0, 1, 0, 1], [1, 0, 0, 1]]),
    ("2:4", [[1, 1, 1, 1]], [[1, 1, 0, 0]]),  # ties: the lower index is kept
    ("2:4", [[1, 2, 1, 1]], [[1, 1, 0, 0]]),
    ("2:4", [[1, 1, 2, 1]], [[1, 0, 1, 0]]),
    ("2:4", [[0, 0, 0, 0], [0, 0, 0, 9]], [[1, 1, 0, 0], [1, 0, 0, 1]]),  # a row of zeros
    ("1:4", [[1, 3, 2, 0, 5, 5, 5, 5]], [[0, 1, 0, 0, 1, 0, 0, 0]]),
    ("3:4", [[1, 3, 2, 1]], [[1, 1, 1, 0]]),
    ("4:4", [[0, 1, 0, 0]], [[1, 1, 1, 1]]),
    ("1:1", [[0, 1, 0]], [[1, 1, 1]]),
    ("4:8", [[8, 7, 6, 5, 4, 3, 2, 1]], [[1, 1, 1, 1, 0, 0, 0, 0]]),
    ("4:8", [[1, 8, 2, 7, 3, 6, 4, 5]], [[0, 1, 0, 1, 0, 1, 0, 1]]),
    ("2:8", [[1, 2, 9, 4, 5, 6, 8, 7]], [[0, 0, 1, 0, 0, 0, 1, 0]]),
    ("8:16", [[1, 9] * 8], [[0, 1] * 8]),
    ("50% per row", [[4, 3, 2, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 0, 0]]),
    ("50% per matrix", [[4, 3, 2, 1], [1, 1, 1, 1]], [[1, 1, 1, 1], [0, 0, 0, 0]]),
    ("50% per matrix", [[4, 3, 2, 1], [9, 9, 9, 9]], [[0, 0, 0, 0], [1, 1, 1, 1]]),
    ("75% per row", [[3, 1, 4, 1]], [[0, 0, 1, 0]]),
    ("0%", [[1, 0], [0, 0]], [[1, 1], [1, 1]]),
    ("0.25", [[5, 5], [5, 5]], [[1, 1], [1, 0]]),  # without a scope: the whole matrix
]


@pytest.mark.parametrize(("pattern", "score", "kept"), LARGEST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_scores_are_kept(pattern, score, kept, dtype):
    found = parse_pattern(pattern).mask(torch.tensor(score, dtype=dtype))
    assert (found.dtype, found.int().tolist()) == (torch.bool, kept)


WITHIN = [
    ("2:4", [[0, 1, 1, 1]], [[9, 3, 2, 1]], [[0, 1, 1, 0]]),
    ("2:4", [[0, 1, 1, 1]], [[9, 0, 0, 0]], [[0, 1, 1, 0]]),  # what scores nothing stays before what is pruned
    ("2:4", [[0, 0, 0, 1, 0, 0, 0, 0]], [[9, 9, 9, 1, 9, 9, 9, 9]], [[0, 0, 0, 1, 0, 0, 0, 0]]),  # fewer than 2
    ("50% per row", [[0, 1, 1, 1], [0, 0, 0, 1]], [[9, 1, 3, 2], [9, 9, 9, 1]], [[0, 0, 1, 1], [0, 0, 0, 1]]),
    ("50% per matrix", [[0, 1, 1, 1], [0, 0, 0, 1]], [[9, 1, 3, 2], [9, 9, 9, 4]], [[0, 1, 1, 1], [0, 0, 0, 1]]),
    ("75% per matrix", [[0, 1, 1, 1], [0, 0, 0, 1]], [[9, 1, 3, 2], [9, 9, 9, 4]], [[0, 0, 1, 0], [0, 0, 0, 1]]),
]


@pytest.mark.parametrize(("pattern", "within", "score", "kept"), WITHIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_nothing_that_is_pruned_already_is_kept(pattern, within, score, kept, dtype):
    inside = replace(parse_pattern(pattern), within=torch.tensor(within, dtype=torch.bool))
    mask = inside.mask(torch.tensor(score, dtype=dtype))
    assert mask.int().tolist() == kept
    assert inside.count_kept_wrong(mask) == inside.count_regrown(mask) == 0
    assert inside.count_kept_wrong(torch.zeros_like(mask)) > 0
    assert inside.count_regrown(torch.ones_like(mask)) == within[0].count(0) + sum(row.count(0) for row in within[1:])


def test_leading_dimensions_are_independent_matrices():
    score = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[40.0, 30.0], [20.0, 10.0]]])
    assert Unstructured(0.5, "matrix").mask(score).int().tolist() == [[[0, 0], [1, 1]], [[1, 1], [0, 0]]]
    assert NM(1, 2).mask(score).int().tolist() == [[[0, 1], [0, 1]], [[1, 0], [1, 0]]]


@pytest.mark.parametrize("kept", [1, 150, 299])
@pytest.mark.parametrize("rising", [True, False])
def test_groups_wider_than_a_byte_counts(kept, rising):
    """An entry that all others beat, and one that beats all others."""
    score = torch.arange(300.0) if rising else 299 - torch.arange(300.0)
    assert torch.equal(NM(kept, 300).mask(score[None]), (score >= 300 - kept)[None])


# counting ------------------------------------------------------------------------------------------------------------


COUNTS = [(0.29, 100, 29), (0.57, 100, 57)]  # 0.29 * 100 is 28.999999999999996 in floating point
COUNTS += [(0.5, 1, 0), (0.5, 3, 2), (0.5, 5, 2), (0.5, 7, 4), (0.25, 10, 2), (0.35, 10, 4)]  # halves go to even ones
COUNTS += [(0.0, 10, 0), (0.999, 10, 10), (0.1, 4_000_000_000, 400_000_000)]


@pytest.mark.parametrize(("sparsity", "size", "zeros"), COUNTS)
def test_zeros_are_counted_in_decimal_and_rounded_half_to_even(sparsity, size, zeros):
    assert count_zeros(sparsity, size) == reference.zeros_of(sparsity, size) == zeros


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=st.sampled_from([(1, 4), (2, 4), (3, 4), (4, 8), (2, 8), (2, 3)]))
def test_nm_masks_agree_with_brute_force(data, shape):
    n, m = shape
    score = data.draw(scores(2, 2 * m))
    assert torch.equal(NM(n, m).mask(score), reference.nm_mask(score, n, m))


@settings(deadline=None, max_examples=60)
@given(score=scores(3, 7), sparsity=ANY_SPARSITY, scope=st.sampled_from(["row", "matrix"]))
def test_unstructured_masks_agree_with_a_full_sort(score, sparsity, scope):
    mask = Unstructured(sparsity, scope).mask(score)
    assert torch.equal(mask, reference.unstructured_mask(score, sparsity, scope))
    assert Unstructured(sparsity, scope).count_kept_wrong(mask) == 0


def test_keep_largest_takes_counts_beyond_both_ends():
    for count in (-1, 0, 3, 7):
        assert keep_largest(torch.tensor([3.0, 1.0, 2.0]), count).tolist() == [count > 0] * 3


# checking ------------------------------------------------------------------------------------------------------------


def test_groups_and_scopes_that_break_a_pattern_are_counted():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0]], dtype=torch.bool)
    for pattern in (NM(2, 4), Unstructured(0.5, "row")):
        assert pattern.count_kept_wrong(mask) == 2
        assert pattern.count_nonzero_wrong(mask.float()) == 1  # fewer nonzeros than allowed are right
    assert Unstructured(0.5, "matrix").count_kept_wrong(mask) == 0
    assert [Unstructured(level).count_nonzero_wrong(mask.float()) for level in (0.5, 0.6)] == [0, 1]


def test_nm_does_not_fit_columns_that_are_no_multiple_of_m():
    assert (NM(2, 4).misfit(8), Unstructured(0.5).misfit(7)) == (None, None)
    assert NM(2, 4).misfit(10) == "10 input channels are not a multiple of 4, so 2:4 does not fit"
    refused(NM(2, 4).mask, torch.ones(3, 10), match=r"shape \[3, 10\]: 10 input channels are not a multiple of 4")


def test_a_scope_is_filled_in_only_where_it_was_left_open_and_sparsity_is_the_pruned_fraction():
    for pattern in (NM(2, 4), Unstructured(0.5, "matrix")):
        assert pattern.with_scope("row") == pattern
    assert Unstructured(0.5).with_scope("row") == Unstructured(0.5, "row")
    assert (NM(1, 4).sparsity, NM(2, 4).sparsity) == (0.75, 0.5)


# parsing -------------------------------------------------------------------------------------------------------------


WRITTEN = [
    *((text, NM(2, 4)) for text in ("2:4", "2:4 sparsity", " 2 : 4 ")),
    *((text, Unstructured(0.5)) for text in (0.5, "0.5", "50%")),
    (0, Unstructured(0.0)),
    (".7", Unstructured(0.7)),
    ("29 %", Unstructured(0.29)),
    ("12.5%", Unstructured(0.125)),
    ("50% per row", Unstructured(0.5, "row")),
    ("60% per matrix", Unstructured(0.6, "matrix")),
    (NM(1, 2), NM(1, 2)),
    (Unstructured(0.1, "row"), Unstructured(0.1, "row")),
]


@pytest.mark.parametrize(("text", "pattern"), WRITTEN)
def test_patterns_are_parsed_from_what_users_write(text, pattern):
    assert parse_pattern(text) == pattern


@settings(max_examples=300)
@given(pattern=ANY_PATTERN)
def test_a_printed_pattern_parses_back_to_itself(pattern):
    assert parse_pattern(str(pattern)) == pattern


UNKNOWN = r"pattern .* is not known: write '2:4' \(any N:M, N kept of M\), a pruned fraction such as 0.5 or '50%'"


BAD = [
    ("0:4", "pattern '0:4': N .kept. must be from 1 to M; write for example '2:4'"),
    ("5:4", "pattern '5:4': N .kept. must be from 1 to M"),
    ("2:0", "pattern '2:0': N .kept. must be from 1 to M"),
    *((text, UNKNOWN) for text in ("2:-4", "2:4:8", "two of four", "", None, True, (2, 4))),
    (1, r"sparsity 1.0: the pruned fraction must be in \[0, 1\), such as 0.5 or '50%'"),
    (50, r"sparsity 50.0: the pruned fraction must be in \[0, 1\)"),
    (-0.5, r"sparsity -0.5: the pruned fraction must be in \[0, 1\)"),
    (float("nan"), "sparsity nan: the pruned fraction"),
    ("100%", "sparsity 1.0: the pruned fraction"),
    ("50% per tensor", "scope 'tensor' of an unstructured pattern: allowed are row, matrix"),
]


REFUSED = [
    *((parse_pattern, (value,), message) for value, message in BAD),
    (NM, ("2", "4"), r"NM\(n='2', m='4'\): N .kept. and M must be whole numbers, as in NM\(2, 4\)"),
    (NM, (2, 4.0), r"NM\(n=2, m=4.0\): N .kept. and M must be whole"),
    (NM, (True, 4), r"NM\(n=True, m=4\): N .kept. and M must be whole"),
    (NM, (None, 4), r"NM\(n=None, m=4\): N .kept. and M must be whole"),
    (Unstructured, ("0.5",), "sparsity '0.5': the pruned fraction must be"),
    (Unstructured, (False,), "sparsity False: the pruned fraction must be"),
    (Unstructured, (Fraction(1, 3),), r"sparsity Fraction\(1, 3\): the pruned fraction must be"),
    (Unstructured, (None,), "sparsity None: the pruned fraction must be"),
    (Unstructured, (torch.tensor(0.5),), r"sparsity tensor\(0.5000\): the pruned fraction must be"),
]


@pytest.mark.parametrize(("make", "values", "message"), REFUSED)
def test_a_bad_pattern_is_refused_with_what_is_allowed(make, values, message):
    refused(make, *values, match=message, error=ValueError if make is parse_pattern else (TypeError, ValueError))


def test_numbers_of_numpy_are_numbers():
    assert str(NM(np.int64(2), np.int64(4))) == "2:4"
    assert Unstructured(np.float32(0.3)).zeros_in((4, 10)) == 12
