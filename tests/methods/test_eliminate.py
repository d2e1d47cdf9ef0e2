"""The fused sweep of SparseGPT against the plain one, one weight at a time, and literals.

The kernel runs in Triton's interpreter where there is no GPU, and compiled where there is one.
"""

import sys

import pytest
import torch
from torch import Tensor

from modelopt_sparse.methods import sparsegpt as eliminate
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.methods.sparsegpt import kernel_takes
from tests.helpers import correlated_inputs, run_python
from tests.oracles.layer_problem import of_gram, one_at_a_time, sparsegpt

pytest.importorskip("triton", reason="Triton is not installed: it comes with the extra 'test' on Linux")
from modelopt_sparse.methods import sweep_triton as eliminate_triton

INTERPRETED = not torch.cuda.is_available()
PATTERNS = ["2:4", "4:8", "1:4", "1:3", "5:16", "1:1", "50% per row", "29%"]


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request) -> str:
    return request.param


@pytest.fixture
def through_kernel(monkeypatch, device) -> str:
    """Sends what the kernel is written for through it, on the CPU too; the device to put tensors on."""
    monkeypatch.setattr(eliminate, "has_kernels", lambda where: where.type == device)
    return device


def factor(columns: int, *lead: int, seed: int = 0) -> Tensor:
    """R with H^-1 = R^T R of correlated inputs, float32 ``[*lead, columns, columns]``."""
    found = []
    for i in range(torch.Size(lead).numel()):
        gram = gram_of(columns, seed + i) / (4 * columns)
        gram.diagonal().add_(0.01 * gram.diagonal().mean())
        found.append(torch.linalg.cholesky(torch.linalg.inv(gram), upper=True))
    return torch.stack(found).view(*lead, columns, columns).float()


def plain(current: Tensor, inverse: Tensor, pattern: Pattern, start: int = 0) -> tuple[Tensor, Tensor]:
    """The torch path, on the CPU."""
    return eliminate.eliminate(current.cpu(), inverse.cpu(), pattern, start)


def fused(current: Tensor, inverse: Tensor, pattern: Pattern, device: str) -> tuple[Tensor, Tensor]:
    """The kernel; an unstructured mask is the torch path's."""
    choice = pattern if isinstance(pattern, NM) else plain(current, inverse, pattern)[1].to(device)
    pruned, mask = eliminate_triton.sweep(current.to(device), inverse.to(device), choice)
    return pruned.cpu(), mask.cpu()


# against the torch path ----------------------------------------------------------------------------------------------


SIZES = [(3, 1), (2, 3), (5, 8), (1, 13), (19, 40), (2, 130)]  # blocks of any width


@pytest.mark.parametrize(
    ("pattern", "rows", "columns"),
    [(pattern, 5, 48) for pattern in PATTERNS] + [("2:4", 67, 32)] + [("50% per row", *size) for size in SIZES],
)
def test_the_kernel_is_the_torch_path(pattern, rows, columns, device):
    """A number of rows that fills no tile; of 2:4, more than one tile."""
    current, inverse, spelled = torch.randn(rows, columns), factor(columns), parse_pattern(pattern)
    pruned, mask = found = fused(current, inverse, spelled, device)
    assert not pruned[~mask].any()
    torch.testing.assert_close(found, plain(current, inverse, spelled), rtol=1e-5, atol=1e-5)


LEADS = {"shared": ((3,), ()), "own": ((3,), (3,)), "two": ((2, 2), (2, 2)), "two shared": ((2, 2), ())}


@pytest.mark.parametrize(("lead", "own"), [*LEADS.values(), ((1,), (1,))], ids=[*LEADS, "one"])
@pytest.mark.parametrize("pattern", ["2:4", "1:3", "50% per row", "50% per matrix"])
def test_stacks_are_solved_as_each_of_their_matrices(pattern, lead, own, device):
    """By the torch path, and by the kernel where a pattern is chosen in it or before it; one factor for all or each."""
    current, inverse, spelled = torch.randn(*lead, 5, 12), factor(12, *own), parse_pattern(pattern)
    found = [plain(current, inverse, spelled)]
    if pattern in ("2:4", "50% per matrix"):
        found.append(fused(current, inverse, spelled, device))
    for pruned, mask in found:
        for i, matrix in enumerate(current.view(-1, 5, 12)):
            expected = plain(matrix, inverse.view(-1, 12, 12)[i] if own else inverse, spelled)
            found_here = tuple(x.view(-1, 5, 12)[i] for x in (pruned, mask))
            torch.testing.assert_close(found_here, expected, rtol=1e-5, atol=1e-5)


def test_the_same_input_gives_the_same_bits(device):
    current, inverse = torch.randn(33, 16), factor(16)
    assert all(map(torch.equal, *(fused(current, inverse, NM(2, 4), device) for _ in range(2))))


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:3", "50% per row"])
def test_whole_numbers_are_equal_to_the_bit(pattern, device):
    """Where no operation rounds, no order of them makes a difference."""
    generator = torch.Generator().manual_seed(3)
    current = torch.randint(-8, 9, (19, 24), generator=generator).float()
    beside = torch.randint(-1, 2, (24, 24), generator=generator) * (torch.rand(24, 24, generator=generator) < 0.2)
    inverse = beside.triu(1).float() + torch.diag(2.0 ** torch.randint(-1, 2, (24,), generator=generator))
    spelled = parse_pattern(pattern)
    pruned, mask = fused(current, inverse, spelled, device)
    expected, expected_mask = plain(current, inverse, spelled)
    assert torch.equal(expected.double(), plain(current.double(), inverse.double(), spelled)[0])  # nothing rounded
    assert torch.equal(mask, expected_mask)
    assert torch.equal(pruned, expected)
    assert (pruned != current.masked_fill(~mask, 0)).any()


def test_inputs_are_left_alone_whatever_their_strides(device):
    """Slices of larger tensors, R_bb as torch's triangular solver lays it out, and what stands below its diagonal."""
    current, inverse = torch.randn(9, 40)[:, 8:24], factor(16)
    expected = fused(current.contiguous(), inverse, NM(2, 4), device)
    strided = inverse.mT.contiguous().mT
    before = current.clone(), strided.clone()
    for factor_ in (strided, inverse + torch.full((16, 16), 7.0).tril(-1)):
        assert all(map(torch.equal, fused(current, factor_, NM(2, 4), device), expected))
    assert all(map(torch.equal, (current, strided), before))


def test_no_rows_are_no_work(device):
    pruned, mask = fused(torch.empty(0, 16), factor(16), NM(2, 4), device)
    assert pruned.shape == mask.shape == (0, 16)


# ties ----------------------------------------------------------------------------------------------------------------


# weights of a group, which of them 2:4 keeps
TIES = [([1, 1, 1, 1], [0, 1]), ([0, 0, 0, 0], [0, 1]), ([1, -1, 2, -2], [2, 3]), ([1, 1, 2, 1], [0, 2])]
TIES += [([1, 2, 1, -1], [0, 1]), ([-3, 0, 0, 0], [0, 1]), ([0, 0, 0, -3], [0, 3]), ([2, 1, 2, 2], [0, 2])]


def test_of_equal_scores_the_lower_index_is_kept(device):
    """Literals; each group in every place of a row, and again as what is left after all groups before it."""
    current = torch.tensor([weights for weights, _ in TIES]).float()
    kept = torch.tensor([[place in indices for place in range(4)] for _, indices in TIES])
    turned = [torch.roll(torch.arange(len(TIES)), i) for i in range(5)]
    current, kept = (torch.cat([x[order] for order in turned], 1) for x in (current, kept))
    pruned, mask = fused(current, torch.eye(20), NM(2, 4), device)
    assert torch.equal(mask, kept)
    assert torch.equal(pruned, current.masked_fill(~kept, 0))
    assert torch.equal(mask, plain(current, torch.eye(20), NM(2, 4))[1])


def test_ties_that_compensation_makes(device):
    """Pruning 1 and 1 (columns 2, 3) adds 1 and 2 to the group after it, whose 3 2 1 0 become ties: 3 3 3 0."""
    inverse = torch.eye(8)
    inverse[2, 5], inverse[3, 6] = -1, -2
    pruned, mask = fused(torch.tensor([[5.0, 4, 1, 1, 3, 2, 1, 0]]), inverse, NM(2, 4), device)
    assert mask.tolist() == [[True, True, False, False, True, True, False, False]]
    assert pruned.tolist() == [[5, 4, 0, 0, 3, 3, 0, 0]]


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "4:8", "1:8", "3:5", "9:16"])
def test_ties_go_as_in_the_pattern_itself(pattern, device):
    """Random weights of few different values, and pivots that make equal scores of different weights."""
    nm = NM(*map(int, pattern.split(":")))
    current = torch.randint(-2, 3, (37, 3 * nm.m)).float()
    pivots = 2.0 ** torch.randint(-1, 2, (3 * nm.m,))
    _, mask = fused(current * pivots, torch.diag(pivots), nm, device)
    assert torch.equal(mask, nm.mask(current.square()))


# through the method, against one weight at a time --------------------------------------------------------------------


def solve(weight: Tensor, gram: Tensor, pattern: Pattern, device: str, **options) -> Solution:
    return sparsegpt(weight.to(device), of_gram(gram.to(device)), pattern, **options)


def assert_as_one_at_a_time(
    weight: Tensor, gram: Tensor, spelled: str, device: str, block_size: int = 128, rtol: float = 1e-3
) -> None:
    """``gram``: in float64, of each matrix of a stack or of all of them."""
    pattern = parse_pattern(spelled)
    found = solve(weight, gram.float(), pattern, device, block_size=block_size)
    assert found.weight.dtype == weight.dtype
    solved, masks = (x.cpu().view(-1, *weight.shape[-2:]) for x in (found.weight, found.mask))
    for i, matrix in enumerate(weight.view(-1, *weight.shape[-2:])):
        pruned, mask = one_at_a_time(matrix.double(), gram[i] if gram.dim() == 3 else gram, pattern, block_size)
        assert torch.equal(masks[i], mask)
        torch.testing.assert_close(solved[i].double(), pruned, rtol=rtol, atol=rtol / 10)


def gram_of(columns: int, seed: int = 0) -> Tensor:
    inputs = correlated_inputs(4 * columns, columns, seed)
    return inputs.T @ inputs


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("pattern", ["2:4", "4:8", "50% per row", "70% per matrix"])
def test_solving_through_the_kernel_agrees_with_one_weight_at_a_time(pattern, block_size, through_kernel):
    """40 columns: with blocks of 16 the last one is short."""
    assert_as_one_at_a_time(torch.randn(7, 40), gram_of(40), pattern, through_kernel, block_size)


@pytest.mark.parametrize("pattern", ["2:4", "50% per matrix"])
def test_stacks_half_precision_and_dead_channels_through_the_kernel(pattern, through_kernel):
    """A stack with one factor and with one for each; weights of 16 bits are solved in float32."""
    stack, grams = torch.randn(3, 5, 24), torch.stack([gram_of(24, seed) for seed in range(3)])
    for gram in (grams[0], grams):
        assert_as_one_at_a_time(stack, gram, pattern, through_kernel, 16)
    for dtype in (torch.bfloat16, torch.float16):
        assert_as_one_at_a_time(torch.randn(7, 24).to(dtype), grams[0], pattern, through_kernel, rtol=0.01)
    alive = torch.ones(24).index_fill(0, torch.tensor([0, 5, 8, 9, 10, 11]), 0)
    assert_as_one_at_a_time(torch.randn(5, 24), grams[0] * alive * alive[:, None], pattern, through_kernel)


# which path ----------------------------------------------------------------------------------------------------------


PATHS = [
    (NM(2, 4), torch.float32, 128, True),
    (NM(8, 16), torch.float32, 256, True),
    (Unstructured(0.5, "row"), torch.float32, 250, True),
    (NM(8, 17), torch.float32, 34, False),
    (NM(2, 4), torch.float64, 128, False),
    (Unstructured(0.5, "row"), torch.float64, 128, False),
    (NM(2, 4), torch.float32, 260, False),
    (Unstructured(0.5, "row"), torch.float32, 257, False),
]


@pytest.mark.parametrize(("pattern", "dtype", "columns", "taken"), PATHS)
def test_the_path_goes_by_dtype_pattern_and_width(monkeypatch, pattern, dtype, columns, taken):
    """What the kernel is not written for goes through torch even where kernels run; on a CPU, everything does."""
    current, inverse = torch.randn(2, columns, dtype=dtype), torch.eye(columns, dtype=dtype)
    assert kernel_takes(current, pattern) is taken
    calls, through = [], plain(current, inverse, pattern)
    monkeypatch.setattr(eliminate_triton, "sweep", lambda *given: calls.append(given) or through)
    eliminate.eliminate(current, inverse, pattern, 0)
    assert not calls
    monkeypatch.setattr(eliminate, "has_kernels", lambda device: True)
    eliminate.eliminate(current, inverse, pattern, 0)
    assert len(calls) == taken


def test_the_widest_block_of_the_kernel(device):
    current, inverse = torch.randn(3, eliminate.WIDEST_BLOCK), torch.eye(eliminate.WIDEST_BLOCK)
    inverse[0, -1] = 0.5
    for pattern in (NM(8, eliminate.WIDEST_GROUP), Unstructured(0.5, "row")):
        found, expected = fused(current, inverse, pattern, device), plain(current, inverse, pattern)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_cpu_needs_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # every import of it fails
    monkeypatch.delitem(sys.modules, "modelopt_sparse.methods.sweep_triton")
    solve(torch.randn(4, 8), torch.eye(8), NM(2, 4), "cpu")
    assert "modelopt_sparse.methods.sweep_triton" not in sys.modules


# compiled, without a GPU ---------------------------------------------------------------------------------------------


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from modelopt_sparse.methods.sweep_triton import TILE, _sweep
kinds = dict.fromkeys(("current", "inverse", "pruned"), "*fp32") | {"flags": "*u8"}
kinds |= dict.fromkeys(("rows", "columns", "tiles", "factor_size"), "i32")
kinds |= dict.fromkeys("KEPT M T G S".split(), "constexpr")
for capability, kept, m, slots, groups in ((80, 2, 4, 4, 32), (90, 4, 8, 8, 16), (90, 0, 8, 8, 16)):
    sizes = {"KEPT": kept, "M": m, "T": TILE // (slots * groups), "G": groups, "S": slots}
    found = triton.compile(ASTSource(_sweep, kinds, sizes), target=GPUTarget("cuda", capability, 32))
    code = found.asm["ptx"]
    assert found.asm["cubin"] and "div.rn.f32" in code, (capability, sizes)
    assert "div.full" not in code and ".ftz" not in code and ".f64" not in code, (capability, sizes)
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_the_kernel_compiles_for_ampere_and_hopper(tmp_path):
    """To machine code, with divisions that round as torch's, in float32 alone; needs no GPU."""
    done = run_python("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled\n"
