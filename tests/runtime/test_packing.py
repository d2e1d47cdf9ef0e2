"""What is packed bit for bit, and what is refused."""

import itertools
import math

import pytest
import torch

from modelopt_sparse.plan.plan import HARDWARE
from modelopt_sparse.runtime.kernels import (
    CuSparseLt,
    Cutlass,
    NotPackable,
    misfit,
    pack,
    quantize_rows,
    without_negative_zeros,
)
from tests.helpers import assert_bits
from tests.runtime.unpacking import DTYPES, pruned


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_four_is_packed_bit_for_bit_or_refused(dtype):
    """All 16 patterns of zeros, in every place of a row: up to two nonzeros come back, three and four are refused."""
    for kept in itertools.product([False, True], repeat=4):
        values = torch.tensor([1.5, -2.25, 3.0, -0.125], dtype=dtype)
        group = values.masked_fill(~torch.tensor(kept), 0)
        for position in range(0, 64, 4):
            weight = torch.zeros(32, 64, dtype=dtype)
            weight[5, position : position + 4] = group
            if sum(kept) <= 2:
                assert_bits(Cutlass().unpack(*pack(weight, Cutlass()), 64), weight)
            else:
                wrong = f"not 2:4: row 5 has {sum(kept)} nonzeros in columns {position} to {position + 3}; 1 of 32 rows"
                with pytest.raises(NotPackable, match=wrong):
                    pack(weight, Cutlass())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 64), (96, 64), (64, 320)])
def test_packed_weights_come_back_bit_for_bit_and_take_nine_sixteenths(dtype, shape):
    weight = pruned(*shape, dtype=dtype).weight.detach()
    packed, metadata = pack(weight, Cutlass())
    assert_bits(Cutlass().unpack(packed, metadata, shape[1]), weight)
    assert metadata is not None
    assert 16 * (packed.nbytes + metadata.nbytes) == 9 * weight.nbytes


def test_misfit_agrees_with_counting_by_hand():
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        weight = (torch.rand(6, 16, generator=generator) < 0.35).float()
        breaking = [
            (row, start)
            for row, values in enumerate(weight.tolist())
            for start in range(0, 16, 4)
            if sum(value != 0 for value in values[start : start + 4]) > 2
        ]
        if not breaking:
            assert misfit(weight) == ""
        else:
            row, start = breaking[0]
            rows = len({row for row, _ in breaking})
            assert f"row {row} has " in misfit(weight)
            assert f" in columns {start} to {start + 3}; {rows} of 6 rows" in misfit(weight)


def test_negative_zeros_are_never_packed():
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    weight[0, :4] = torch.tensor([-0.0, 1.0, -0.0, -2.0])  # with its signs counted, four of four
    packed, metadata = pack(weight, Cutlass())
    assert not (torch.signbit(packed) & (packed == 0)).any()
    back = Cutlass().unpack(packed, metadata, 64)
    assert back[0, :4].tolist() == [0.0, 1.0, 0.0, -2.0]
    assert not torch.signbit(back[0, 0])


def test_fp8_codes_have_no_negative_zero():
    """A small negative weight rounds to -0.0, whose bits are 0x80."""
    row = torch.tensor([[448.0, -1e-6, 0.0, -448.0]], dtype=torch.bfloat16)
    codes, _ = quantize_rows(row, torch.float8_e4m3fn)
    assert 0x80 in codes.view(torch.uint8)
    assert without_negative_zeros(codes).view(torch.uint8).tolist() == [[0x7E, 0, 0, 0xFE]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weight = pruned(32, 64).weight.detach().clone()
    weight[3, int(weight[3].abs().argmax())] = value
    with pytest.raises(NotPackable, match="holds NaN or inf"):
        pack(weight, Cutlass())


def test_a_backend_that_gives_back_another_weight_is_refused():
    class Forgetful(Cutlass):
        def unpack(self, packed, metadata, columns):
            back = super().unpack(packed, metadata, columns)
            back[-1, -4:] = 0
            return back

    weight = pruned(32, 64).weight.detach()
    assert weight[-1, -4:].any()
    with pytest.raises(NotPackable, match="does not give its weight back bit for bit"):
        pack(weight, Forgetful())


def test_shapes_are_those_of_the_plan_and_of_torch():
    """plan.py's columns, torch's constraints and the refusal are one fact."""
    for backend in (CuSparseLt(), Cutlass()):
        rows, columns = HARDWARE[backend.name]
        for dtype in DTYPES:
            assert backend.multiples(dtype)[:2] == (rows, columns)
        with pytest.raises(
            NotPackable, match=f"shape: {rows} x {columns // 2} is no multiple of the {rows} x {columns}"
        ):
            pack(pruned(rows, columns // 2).weight.detach(), backend)
    for dtype, multiples in {torch.int8: (32, 32, 16), torch.float8_e4m3fn: (32, 32, 16)}.items():
        assert CuSparseLt().multiples(dtype) == multiples
