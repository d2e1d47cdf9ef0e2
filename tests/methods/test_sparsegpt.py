"""SparseGPT against one weight at a time with fresh inverses; better than the mask-only methods; robust."""

import functools
import re

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from tests.helpers import correlated_inputs, refused
from tests.oracles.layer_problem import of_gram, one_at_a_time, solved, sparsegpt, stats_of

SPARSEGPT = METHODS["sparsegpt"]


def problem(rows: int, columns: int, seed: int = 0, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, correlated_inputs(tokens or 4 * columns, columns, seed)


def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """A symmetric matrix of float64 with these eigenvalues and a constant diagonal-free basis."""
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64)).Q
    return (basis * eigenvalues) @ basis.mT


# the oracle ----------------------------------------------------------------------------------------------------------

BLOCK_SIZES = [8, 16, 128, 6]  # 6 is no multiple of M, and 48 columns are no multiple of it


@functools.cache
def expected(pattern: Pattern, block_size: int, damping: float) -> tuple[Tensor, Tensor]:
    weight, inputs = problem(5, 48)
    return one_at_a_time(weight, inputs.mT @ inputs, pattern, block_size, damping)


PATTERNS = [
    *("2:4", "1:4", "3:4", "4:8", "2:8", "4:16", "1:3"),
    *(f"{level} per {scope}" for level in ("50%", "70%", "29%") for scope in ("row", "matrix")),
]


@pytest.mark.parametrize(("damping", "block_size"), [*((0.01, size) for size in [*BLOCK_SIZES, 40]), (0.3, 16)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_solutions_agree_with_one_weight_at_a_time_whatever_the_block_size(pattern, block_size, damping):
    """In float64, and in float32 with the same mask."""
    (weight, inputs), spelled = problem(5, 48), parse_pattern(pattern)
    pruned, mask = expected(spelled, 0 if isinstance(spelled, NM) else block_size, damping)
    options = {"block_size": block_size, "damping": damping}
    found = sparsegpt(weight, stats_of(inputs), spelled, **options)
    assert torch.equal(found.mask, mask)
    torch.testing.assert_close(found.weight, pruned, rtol=1e-8, atol=1e-10)
    in_float32 = sparsegpt(weight.float(), stats_of(inputs.float()), spelled, **options)
    assert torch.equal(in_float32.mask, mask)
    torch.testing.assert_close(in_float32.weight, pruned.float(), rtol=1e-3, atol=1e-4)


DEAD = [0, 5, 8, 9, 10, 11, 31]
WIDE = [(130, 100, "29%"), (132, 100, "1:3"), (300, 256, "2:4"), (300, 256, "50% per row"), (412, 200, "2:4")]


@pytest.mark.parametrize(
    ("columns", "block_size", "pattern", "dead"),
    [*((32, 16, pattern, DEAD) for pattern in ("2:4", "50% per row", "50% per matrix")), *((*of, []) for of in WIDE)],
)
def test_dead_channels_wide_blocks_and_a_short_last_one_do(columns, block_size, pattern, dead):
    """The errors of a column reach all later ones, further than 64 columns and from block to block."""
    weight, inputs = problem(4, columns)
    inputs[:, dead] = 0
    pruned, mask = one_at_a_time(weight, inputs.mT @ inputs, parse_pattern(pattern), block_size)
    found = sparsegpt(weight, stats_of(inputs), parse_pattern(pattern), block_size=block_size)
    assert torch.equal(found.mask, mask)
    torch.testing.assert_close(found.weight, pruned, rtol=1e-7, atol=1e-9)


def test_without_a_scope_the_matrix_is_the_scope():
    weight, inputs = problem(6, 32)
    state, options = SPARSEGPT.prepare(stats_of(inputs), SPARSEGPT.options), SPARSEGPT.options
    assert torch.equal(*(SPARSEGPT.solve(weight, state, Unstructured(0.5, x), options).mask for x in (None, "matrix")))


def test_a_twin_channel_takes_over_the_weight_of_its_pruned_copy():
    """Two equal inputs: 3 x + 1 x is 4 x, whichever of them is kept."""
    weight, x = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
    found = sparsegpt(weight, stats_of(x.expand(50, 2)), NM(1, 2), damping=1e-9)
    torch.testing.assert_close(found.weight, torch.tensor([[0.0, 4.0]], dtype=torch.float64), rtol=1e-6, atol=0)
    assert found.error < 1e-12


# better than the mask-only methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "50% per row", "50% per matrix", "70%"])
@pytest.mark.parametrize("seed", range(4))
def test_the_output_error_is_below_that_of_wanda_and_magnitude(pattern, seed):
    """Reported errors are those of the outputs: test_methods.py."""
    weight, inputs = problem(24, 64, seed, tokens=512)
    stats = stats_of(inputs.float())
    best, better, worst = (
        solved(name, weight.float(), stats, pattern).error for name in ("sparsegpt", "wanda", "magnitude")
    )
    assert best < 0.8 * better < 0.8 * worst


# unusual inputs ------------------------------------------------------------------------------------------------------


def test_the_scale_of_the_inputs_does_not_matter():
    weight, inputs = problem(6, 32)
    scales = (1, 2.0**-20, 2.0**20)
    plain, *scaled = (sparsegpt(weight.float(), stats_of(scale * inputs.float()), NM(2, 4)) for scale in scales)
    for each in scaled:
        assert all(map(torch.equal, (each.mask, each.weight), (plain.mask, plain.weight)))


def test_a_kept_weight_that_underflows_is_written_as_plus_zero():
    """-1e-9 is -0.0 in float16, which kernels that look at the bits take for a nonzero."""
    weight, inputs = problem(6, 32)
    found = sparsegpt((-1e-8 * weight.abs()).half(), stats_of(inputs.float()), NM(2, 4))
    assert (found.weight[found.mask] == 0).any()
    assert not torch.signbit(found.weight[found.weight == 0]).any()


# the ladder ----------------------------------------------------------------------------------------------------------


def test_fewer_tokens_than_channels_need_no_more_damping():
    weight, inputs = problem(6, 32, tokens=5)
    found = sparsegpt(weight.float(), stats_of(inputs.float()), NM(2, 4))
    assert found.notes == ()
    assert torch.isfinite(found.weight).all()


@pytest.mark.parametrize(("lowest", "asked", "needed"), [(-0.05, 0.01, 0.1), (-0.5, 0.01, 1.0), (-0.7, 0.05, 1.0)])
def test_a_gram_matrix_that_is_not_positive_takes_more_damping_and_says_so(lowest, asked, needed):
    """Damping climbs by tens up to 1; the result is what that damping gives when it is asked for."""
    gram = with_eigenvalues(torch.tensor([lowest, 1, 1, 1, 1, 1, 1, 2 - lowest - 1], dtype=torch.float64))
    gram /= gram.diagonal().mean()
    weight = torch.randn(5, 8)
    stats = of_gram(gram.float())
    found = sparsegpt(weight, stats, NM(2, 4), damping=asked)
    assert found.notes == (f"factorized with damping {needed:g} in float32, {asked:g} in float32 was not enough",)
    assert torch.equal(found.weight, sparsegpt(weight, stats, NM(2, 4), damping=needed).weight)
    assert sparsegpt(weight, stats, NM(2, 4), damping=needed).notes == ()


def test_what_float32_cannot_factorize_is_factorized_in_float64():
    """Two channels that are each other's negative. With damping 1 their diagonal is 1 + 2^-24, which float32 rounds
    to 1. Then the matrix is singular, in whatever order a CPU computes."""
    step = 2.0**-24
    gram = torch.diag(torch.tensor([0.5 + step, 0.5 + 3 * step, 0.5, 0.5]))
    gram[2, 3] = gram[3, 2] = -1.0
    assert float(gram.diagonal().mean()) == 0.5 + step
    found = sparsegpt(torch.randn(3, 4), of_gram(gram), NM(2, 4), damping=1.0)
    assert found.notes == ("factorized with damping 1 in float64, 1 in float32 was not enough",)
    assert found.weight.dtype == torch.float32
    assert torch.isfinite(found.weight).all()


@pytest.mark.parametrize("gram", [-torch.eye(8), torch.stack([torch.eye(8), -torch.eye(8)])], ids=["one", "of a stack"])
def test_a_gram_matrix_that_no_damping_helps_is_an_error_that_says_what_to_do(gram):
    message = re.escape(f"the Gram matrix {[*gram.shape]} cannot be factorized: give more data, or use 'wanda'")
    refused(sparsegpt, torch.randn(*gram.shape[:-2], 3, 8), of_gram(gram), NM(2, 4), match=message)
