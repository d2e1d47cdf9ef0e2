"""What is packed bit for bit, and how torch's kernels are called."""

import itertools
import math

import pytest
import torch

from modelopt_sparse.plan.plan import HARDWARE
from modelopt_sparse.runtime import kernels as backends
from modelopt_sparse.runtime.kernels import Algorithm, CuSparseLt, Cutlass, misfit, pack, shape_misfit
from tests.helpers import assert_bits
from tests.runtime.stopwatch import FAST
from tests.runtime.unpacking import DTYPES, pruned


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_four_is_packed_bit_for_bit_or_refused(dtype):
    """All 16 patterns of zeros, in every place of a row: up to two nonzeros come back, three and four are refused."""
    for kept in itertools.product([False, True], repeat=4):
        values = torch.tensor([1.5, -2.25, 3.0, -0.125], dtype=dtype)
        group = values.masked_fill(~torch.tensor(kept), 0)
        everywhere = torch.zeros(32, 64, dtype=dtype)
        for position in range(0, 64, 4):
            weight = torch.zeros(32, 64, dtype=dtype)
            weight[5, position : position + 4] = everywhere[position // 2, position : position + 4] = group
            wrong = f"not 2:4: row 5 has {sum(kept)} nonzeros in columns {position} to {position + 3}; 1 of 32 rows"
            assert misfit(weight).startswith(wrong if sum(kept) > 2 else "")
            assert bool(misfit(weight)) == (sum(kept) > 2)
        if sum(kept) <= 2:
            assert_bits(Cutlass().unpack(*pack(everywhere, Cutlass()), 64), everywhere)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weight = pruned(32, 64).weight.detach()
    weight[3, int(weight[3].abs().argmax())] = value
    assert misfit(weight) == "its weight holds NaN or inf"


def test_shapes_are_those_of_the_plan_and_of_torch():
    """plan.py's columns, torch's constraints and the refusal are one fact."""
    for backend in (CuSparseLt(), Cutlass()):
        rows, columns = HARDWARE[backend.name]
        for dtype in DTYPES:
            assert backend.multiples(dtype)[:2] == (rows, columns)
        wrong = shape_misfit(torch.Size((rows, columns // 2)), torch.bfloat16, backend)
        assert wrong.startswith(f"shape: {rows} x {columns // 2} is no multiple of the {rows} x {columns} that")


# torch's libraries --------------------------------------------------------------------------------------------------

# capability, whether torch has cuSPARSELt, the backend that is asked for -> the one that is taken, or why none is
CAPABILITIES = [
    ((7, 5), True, None, "cusparselt: compute capability 7.5 has no Sparse.*cutlass: its .* run on .* 8.x.*has 7.5"),
    ((8, 0), True, None, CuSparseLt),
    ((8, 0), False, None, Cutlass),
    ((8, 0), True, "cutlass", Cutlass),
    ((9, 0), True, None, CuSparseLt),
    ((9, 0), False, None, "cusparselt: this build of torch has no cuSPARSELt; cutlass: its .* run on .* 8.x.*has 9.0"),
    ((9, 0), True, "cutlass", "cutlass: its kernels run on .*"),
    ((10, 0), True, None, CuSparseLt),
]


@pytest.mark.parametrize(("capability", "has_cusparselt", "asked", "chosen"), CAPABILITIES)
def test_the_backend_that_is_taken(monkeypatch, capability, has_cusparselt, asked, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: has_cusparselt)
    device = torch.device("cuda:0")
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=f"no 2:4 kernels for cuda:0: {chosen}; leave the model dense"):
            backends.choose_backend(device, asked)
    else:
        assert type(backends.choose_backend(device, asked)) is chosen


def test_cusparselt_is_asked_for_its_search_and_what_it_found_is_passed_on(monkeypatch):
    """Against stand-ins for torch's functions: which arguments go where. The functions themselves need a GPU."""
    seen = []

    class Bindings:
        @staticmethod
        def mm_search(packed, x_t, bias, alpha, out_dtype, transpose_result):
            seen.append((tuple(x_t.shape), x_t.is_contiguous(), bias, alpha, out_dtype, transpose_result))
            return 5, split_k, 2, 40

    def sparse_mm(packed, x_t, **given):
        seen.append((tuple(x_t.shape), given))
        return torch.zeros(x_t.shape[1], packed.shape[0])

    monkeypatch.setattr(torch._C, "_cusparselt", Bindings, raising=False)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", sparse_mm)
    x, packed = torch.zeros(8, 64), torch.zeros(32, 36)
    for found in (Algorithm(5, 1, -1), Algorithm(5, 4, 2)):
        split_k = found.split_k
        assert CuSparseLt().search(packed, None, x, None) == [backends.DEFAULT, found]
        assert seen.pop() == ((64, 8), False, None, None, None, True)
    CuSparseLt().multiply(packed, None, x, None, Algorithm(5, 4, 2))
    how = {"transpose_result": True, "alg_id": 5, "split_k": 4, "split_k_mode": 2}
    assert seen.pop() == ((64, 8), {"bias": None, **how})


EVERY_KERNEL = [(kernels, dtype) for kernels in (CuSparseLt(), Cutlass()) for dtype in DTYPES]


@pytest.mark.parametrize(("kernels", "dtype"), EVERY_KERNEL, ids=lambda value: getattr(value, "name", str(value)))
def test_torch_takes_the_arguments(kernels, dtype):
    """On meta tensors: torch's own checks of dtypes and shapes, and the shape and dtype that it gives back."""
    rows, columns = 64, 256
    with torch.device("meta"):
        x, bias = torch.empty(16, columns, dtype=dtype), torch.empty(rows, dtype=dtype)
        packed, metadata = torch.empty(rows, columns * 9 // 16, dtype=dtype), None
        if kernels.name == "cutlass":
            packed, metadata = packed[:, : columns // 2].clone(), torch.empty(rows, columns // 16, dtype=torch.int16)
        for given in (None, bias):
            out = kernels.multiply(packed, metadata, x, given, FAST)
            assert (tuple(out.shape), out.dtype, out.is_contiguous()) == ((16, rows), dtype, True)


def test_cusparselt_weights_are_read_through_an_identity(monkeypatch):
    """For 2,600 columns, in three parts; the product stands in for the library's."""
    weight = pruned(16, 2608, torch.float16).weight.detach()

    def multiply(self, packed, metadata, x, bias=None, algorithm=backends.DEFAULT):
        assert x.shape[0] <= backends.UNPACKED_AT_ONCE
        return (x.double() @ weight.double().t()).to(x.dtype)

    monkeypatch.setattr(CuSparseLt, "multiply", multiply)
    assert_bits(CuSparseLt().unpack(torch.empty(0, dtype=torch.float16), None, 2608), weight)
