"""Mask refinement: every swap against the objective computed anew, local optima by trying all pairs, exact counts."""

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.methods.scores import SHORTLIST, _shortlist, refine
from tests.helpers import assert_bits, correlated_inputs

PATTERNS = ["2:4", "4:8", "50% per row", "70% per matrix"]
STARTS = ["random", "magnitude", "wanda", "sparsegpt"]
UNTIL_NONE_IMPROVES = 10**9  # sweeps; a test that does not end says that refine does not stop


def problem(seed: int, rows: int = 16, columns: int = 64) -> tuple[Tensor, Stats]:
    """A random weight and the statistics of correlated inputs, in float64."""
    x = correlated_inputs(4 * columns, columns, seed)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weight, stats_of(x.T @ x)


def stats_of(gram: Tensor) -> Stats:
    return Stats(1, gram.diagonal(dim1=-2, dim2=-1).clone(), gram)


def start_mask(name: str, weight: Tensor, stats: Stats, pattern: Pattern, seed: int = 0) -> Tensor:
    if name == "random":
        return pattern.mask(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)))
    method = METHODS[name]
    return method.solve(weight, method.prepare(stats, method.options), pattern, method.options).mask


def objective(weight: Tensor, mask: Tensor, gram: Tensor) -> Tensor:
    """The error of each row, in float64."""
    pruned = weight.double().masked_fill(mask, 0)
    return ((pruned @ gram.double()) * pruned).sum(-1)


def swapped(mask: Tensor, *columns: int) -> Tensor:
    mask = mask.clone()
    mask[list(columns)] ^= True
    return mask


def best_swap(weight: Tensor, mask: Tensor, gram: Tensor, columns: Iterable[int]) -> Tensor:
    """One row: all pairs of ``columns`` are tried on the objective itself; the first best one, if it gains."""
    pairs = [(u, p) for u, p in itertools.permutations(columns, 2) if mask[u] and not mask[p]]
    if not pairs:
        return mask
    tried = torch.stack([mask, *(swapped(mask, u, p) for u, p in pairs)])
    now, *errors = objective(weight.expand(tried.shape), tried, gram).tolist()
    least = min(errors)
    return tried[1 + errors.index(least)] if least < now * (1 - 1e-12) else mask


def shortlist(change: list[float], mask: Tensor) -> list[int]:
    """One row: the 16 smallest changes of kept and of pruned columns, by a sort; then the lowest indices up to 32."""
    kinds = [[j for j in range(len(mask)) if mask[j] == kept] for kept in (True, False)]
    best = [j for kind in kinds for j in sorted(kind, key=lambda j: (change[j], j))[:SHORTLIST]]
    rest = [j for j in range(len(mask)) if j not in best]
    return sorted(best + rest[: 2 * SHORTLIST - len(best)])


def gram_of(stats: Stats) -> Tensor:
    assert stats.gram is not None
    return stats.gram


# against the slow version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "columns"), [("2:4", 136), ("1:4", 8), ("4:8", 24), ("3:5", 135)])
@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_takes_the_best_swap_of_each_group_from_left_to_right(pattern, columns, seed):
    """136 and 135 columns take two blocks."""
    weight, stats = problem(seed, 3, columns)
    nm = parse_pattern(pattern)
    assert isinstance(nm, NM)
    expected = start = start_mask("random", weight, stats, nm, seed)
    for first in range(0, columns, nm.m):
        group = range(first, first + nm.m)
        expected = torch.stack([best_swap(w, m, gram_of(stats), group) for w, m in zip(weight, expected)])
    assert torch.equal(refine(weight, start, stats, nm, 1), expected)
    assert not torch.equal(start, expected)


@pytest.mark.parametrize("pattern", ["50% per row", "70% per matrix"])
@pytest.mark.parametrize("columns", [24, 48])
@pytest.mark.parametrize("seed", range(2))
def test_a_round_takes_the_best_swaps_of_each_rows_shortlist_one_after_the_other(pattern, columns, seed):
    weight, stats = problem(seed, 3, columns)
    gram, start = gram_of(stats), start_mask("random", weight, stats, parse_pattern(pattern), seed)
    expected = []
    for w, m in zip(weight, start):
        alone = [float(objective(w[None], swapped(m, j)[None], gram)) for j in range(columns)]
        listed = shortlist(alone, m)
        for _ in range(SHORTLIST):
            m = best_swap(w, m, gram, listed)
        expected.append(m)
    assert torch.equal(refine(weight, start, stats, parse_pattern(pattern), 1), torch.stack(expected))
    assert not torch.equal(start, torch.stack(expected))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("start", STARTS)
def test_ends_where_no_swap_gains(pattern, start):
    """All swaps of every row, of N:M within groups, are tried."""
    weight, stats = problem(5, 4, 32)
    chosen = parse_pattern(pattern)
    refined = refine(weight, start_mask(start, weight, stats, chosen), stats, chosen, UNTIL_NONE_IMPROVES)
    size = chosen.m if isinstance(chosen, NM) else 32
    for w, m in zip(weight, refined):
        for first in range(0, 32, size):
            assert torch.equal(best_swap(w, m, gram_of(stats), range(first, first + size)), m)


def test_swaps_that_can_be_checked_by_eye():
    """Channels 0 and 1 are equal, so that 2 and -2 cancel: pruned together they cost nothing."""
    gram = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    weight = torch.tensor([[2.0, -2, 1, 1], [2.0, 2, 1, 1]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, False]])
    expected = torch.tensor([[False, False, True, True], [True, True, False, False]])
    for pattern in (NM(2, 4), Unstructured(0.5, "row")):
        assert torch.equal(refine(weight, mask, stats_of(gram), pattern, 1), expected)


# what refine promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("start", "dtype"),
    [*((start, torch.float64) for start in STARTS), ("wanda", torch.float32), ("random", torch.bfloat16)],
)
def test_no_row_is_worse_and_all_counts_stay(pattern, start, dtype):
    weight, stats = problem(1, 16, 160)
    weight, gram = weight.to(dtype), gram_of(stats).float()
    stats = stats_of(gram)
    chosen = parse_pattern(pattern)
    before = start_mask(start, weight, stats, chosen)
    after = refine(weight, before, stats, chosen, 3)
    assert after.dtype == torch.bool
    assert chosen.count_kept_wrong(after) == 0
    assert torch.equal(after.sum(-1), before.sum(-1))
    errors = [objective(weight, mask, gram) for mask in (before, after)]
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize(
    ("pattern", "left"), [("2:4", 0.65), ("4:8", 0.6), ("50% per row", 0.5), ("70% per matrix", 0.65)]
)
@pytest.mark.parametrize("seed", range(3))
def test_error_left_of_wanda(pattern, left, seed):
    """At most this share of Wanda's error is left after three sweeps."""
    weight, stats = problem(seed, 48, 160)
    chosen = parse_pattern(pattern)
    before = start_mask("wanda", weight, stats, chosen)
    after = refine(weight, before, stats, chosen, 3)
    errors = [objective(weight, mask, gram_of(stats)).sum() for mask in (before, after)]
    assert errors[1] < left * errors[0]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_more_sweeps_leave_less_error(pattern):
    weight, stats = problem(2, 16, 160)
    chosen = parse_pattern(pattern)
    start = start_mask("random", weight, stats, chosen)
    errors = [objective(weight, refine(weight, start, stats, chosen, n), gram_of(stats)).sum() for n in range(3)]
    assert errors[0] == objective(weight, start, gram_of(stats)).sum()
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("pattern", [NM(1, 2), Unstructured(0.5, "row")])
@pytest.mark.parametrize("sweeps", [1, 2, 3])  # a swap back in the next sweep would hide the first
def test_a_row_whose_error_did_not_fall_goes_back(pattern, sweeps):
    """With a matrix that is not symmetric the first row's swap looks like a gain of 11 and costs 1."""
    weight, mask = torch.tensor([[1.0, 1.0], [1.0, 2.0]]), torch.tensor([[True, False], [True, False]])
    crooked = torch.tensor([[2.0, 3.0], [-3.0, 1.0]])
    expected = torch.tensor([[True, False], [False, True]])
    assert torch.equal(refine(weight, mask, stats_of(crooked), pattern, sweeps), expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_masks_from_the_same_inputs_which_stay_as_they_were(pattern):
    weight, stats = problem(3, 16, 160)
    chosen = parse_pattern(pattern)
    mask = start_mask("wanda", weight, stats, chosen)
    copies = weight.clone(), mask.clone(), gram_of(stats).clone()
    found = [refine(weight, mask, stats, chosen, 3) for _ in range(2)]
    assert torch.equal(*found)
    for tensor, copy in zip((weight, mask, gram_of(stats)), copies):
        assert_bits(tensor, copy)


# stacks of matrices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_leading_dimensions_are_matrices_of_their_own(pattern):
    chosen = parse_pattern(pattern)
    problems = [problem(seed, 8, 40) for seed in range(6)]
    masks = [start_mask("wanda", *each, chosen) for each in problems]
    one_by_one = [refine(weight, mask, stats, chosen, 3) for (weight, stats), mask in zip(problems, masks)]
    weight, gram, mask, expected = (
        torch.stack(each).unflatten(0, (2, 3))
        for each in ([w for w, _ in problems], [gram_of(s) for _, s in problems], masks, one_by_one)
    )
    assert torch.equal(refine(weight, mask, stats_of(gram), chosen, 3), expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
def test_a_gram_matrix_that_several_matrices_share(pattern, lead):
    chosen = parse_pattern(pattern)
    seeds = range(max(lead, default=1))
    gram = torch.stack([gram_of(problem(seed, 8, 40)[1]) for seed in seeds]).view(*lead, 40, 40)
    weight = torch.randn(2, 3, 8, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = chosen.mask(weight.abs())
    own = stats_of(gram.expand(2, 3, 40, 40).contiguous())
    assert torch.equal(refine(weight, mask, stats_of(gram), chosen, 3), refine(weight, mask, own, chosen, 3))


# special values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_half_precision_is_worked_on_in_float32(pattern):
    weight, stats = problem(4, 16, 160)
    half, chosen = weight.bfloat16(), parse_pattern(pattern)
    mask = start_mask("wanda", half, stats, chosen)
    assert torch.equal(refine(half, mask, stats, chosen, 3), refine(half.float(), mask, stats, chosen, 3))


def test_float64_stays_float64():
    weight, mask = torch.tensor([[1.0, 1 + 1e-10]], dtype=torch.float64), torch.tensor([[True, False]])
    assert refine(weight, mask, stats_of(torch.eye(2).double()), NM(1, 2), 1).tolist() == [[False, True]]


def test_ties_go_to_the_lower_index():
    """All four swaps of the first sweep gain 8."""
    weight, mask = torch.tensor([[1.0, 1, 3, 3]]), torch.tensor([[True, True, False, False]])
    stats = stats_of(torch.eye(4))
    assert refine(weight, mask, stats, NM(2, 4), 1).tolist() == [[False, True, True, False]]
    assert refine(weight, mask, stats, NM(2, 4), 2).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(("columns", "swaps"), [(100, 16), (200, 32)])
def test_a_sweep_is_as_many_rounds_of_16_swaps_as_it_has_128_columns(columns, swaps):
    """All swaps gain the same: the lowest indices are pruned first, and restored first."""
    weight, mask = torch.ones(1, columns), torch.ones(1, columns, dtype=torch.bool)
    weight[:, 40:], mask[:, 40:] = 3, False
    expected = mask.clone()
    expected[:, :swaps], expected[:, 40 : 40 + swaps] = False, True
    refined = refine(weight, mask, stats_of(torch.eye(columns)), Unstructured((columns - 40) / columns, "row"), 1)
    assert torch.equal(refined, expected)


def test_a_small_gain_counts_beside_a_large_error():
    """2^24 + 1 becomes 2^24 + 1/4; float32 cannot tell the two apart."""
    weight, mask = torch.tensor([[4096.0, 9999, 1, 0.5]]), torch.tensor([[False, True, False, True]])
    assert refine(weight, mask, stats_of(torch.eye(4)), NM(1, 2), 9).tolist() == [[False, True, True, False]]


def test_a_swap_that_changes_nothing_is_not_made():
    """The first group has only such swaps; that the second one gains does not carry them along."""
    weight = torch.tensor([[1.0, 1, 1, 1, 1, 1, 3, 3]])
    mask = torch.tensor([[True, True, False, False, True, True, False, False]])
    refined = refine(weight, mask, stats_of(torch.eye(8)), NM(2, 4), 9)
    assert refined.tolist() == [[True, True, False, False, False, False, True, True]]


def test_zero_weights_give_way():
    weight = torch.tensor([[9.0, 0, 1e-3, -1e-4], [0, 0, 0, 0]])
    mask = torch.tensor([[False, True, False, True]]).expand(2, 4)
    expected = torch.tensor([[True, False, True, False], [False, True, False, True]])
    for pattern in (NM(2, 4), Unstructured(0.5, "row")):
        assert torch.equal(refine(weight, mask, stats_of(torch.eye(4)), pattern, 9), expected)


def test_dead_channels_are_swapped_by_the_size_of_the_smallest_live_one():
    """Channels 0 and 1 are dead, and count as channel 3 does: 4 * 9 > 16 * 1 > 4 * 3 > 4 * 1, of squared weights."""
    gram = torch.diag(torch.tensor([0.0, 0, 16, 4]))
    weight = torch.tensor([[3.0, 1, 1, 3**0.5]])
    mask = torch.tensor([[False, True, False, True]])
    for pattern in (NM(2, 4), Unstructured(0.5, "row")):
        assert refine(weight, mask, stats_of(gram), pattern, 9).tolist() == [[True, False, True, False]]
        by_size = refine(weight, mask, stats_of(torch.zeros(4, 4)), pattern, 9)
        assert by_size.tolist() == [[True, False, False, True]]


def test_rows_with_few_or_no_columns_of_one_kind():
    """Scope "matrix" may leave a row fully kept, fully pruned, or with fewer than the shortlist asks for."""
    weight, stats = problem(6, 4, 64)
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[0], mask[2, :3], mask[3, :61] = True, True, True
    refined = refine(weight, mask, stats, Unstructured(0.5, "matrix"), UNTIL_NONE_IMPROVES)
    assert torch.equal(refined[:2], mask[:2])
    assert torch.equal(refined.sum(-1), mask.sum(-1))
    errors = [objective(weight, each, gram_of(stats)) for each in (mask, refined)]
    assert (errors[1][2:] < errors[0][2:]).all()


def test_shortlist_has_the_least_changes_of_both_kinds():
    """Against a sort; of equal changes the lowest indices are taken, and fill up a row that lacks one kind."""
    generator = torch.Generator().manual_seed(0)
    change = torch.randint(-9, 9, (5, 100), generator=generator).double()
    mask = torch.rand(5, 100, generator=generator) < 0.5
    mask[3], mask[4] = True, torch.arange(100) == 70
    found = _shortlist(change, mask)
    assert found.shape == (5, 32)
    assert found.tolist() == [shortlist(c.tolist(), m) for c, m in zip(change, mask)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_damping_is_that_of_the_gram_matrix(pattern):
    """As if every diagonal entry had been larger; with very much of it only the scores of single weights count."""
    weight, stats = problem(0)
    spelled = parse_pattern(pattern).with_scope("matrix")
    start = start_mask("random", weight, stats, spelled)
    larger = stats_of(gram_of(stats) + 0.3 * gram_of(stats).diagonal().diag())
    assert torch.equal(refine(weight, start, stats, spelled, 3, damping=0.3), refine(weight, start, larger, spelled, 3))
    assert not torch.equal(
        refine(weight, start, stats, spelled, 3, damping=0.3), refine(weight, start, stats, spelled, 3)
    )


def test_very_much_damping_gives_wandas_mask():
    weight, stats = problem(0)
    pattern = parse_pattern("2:4")
    start = start_mask("random", weight, stats, pattern)
    found = refine(weight, start, stats, pattern, UNTIL_NONE_IMPROVES, damping=1e6)
    assert torch.equal(found, start_mask("wanda", weight, stats, pattern))
