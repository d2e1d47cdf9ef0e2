"""Masks as bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_sparse.checkpoint.folder import pack_mask, unpack_mask


@pytest.mark.parametrize(
    ("mask", "packed"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], [1]),
        ([0, 0, 0, 0, 0, 0, 0, 1], [128]),
        ([1, 1, 0, 0, 1, 0, 1, 0, 0, 1], [0b01010011, 0b00000010]),
        ([], []),
        ([[1, 0], [0, 1], [1, 1]], [0b00111001]),
    ],
)
def test_pack_mask_puts_entry_8k_plus_i_into_bit_i_of_byte_k(mask, packed):
    assert pack_mask(torch.tensor(mask, dtype=torch.bool)).tolist() == packed
    assert unpack_mask(torch.tensor(packed, dtype=torch.uint8), torch.tensor(mask).shape).tolist() == [
        [bool(bit) for bit in row] if isinstance(row, list) else bool(row) for row in mask
    ]


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_unpack_is_the_inverse_of_pack(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_mask(mask)
    flat = mask.flatten().tolist()
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-len(flat) // 8)
    for index, bit in enumerate(flat):
        assert (int(packed[index // 8]) >> (index % 8)) & 1 == bit
    restored = unpack_mask(packed, tuple(shape))
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


def test_pack_mask_takes_masks_that_are_not_contiguous():
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    assert pack_mask(mask.T).tolist() == [0b00110001]  # 1 0, 0 0, 1 1
