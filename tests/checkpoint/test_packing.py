"""Masks as bits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_sparse.checkpoint.folder import pack_mask, unpack_mask


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_entry_8k_plus_i_goes_into_bit_i_of_byte_k_and_back(shape, seed):
    """What is behind the end is 0."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_mask(mask)
    flat = mask.flatten().tolist()
    assert packed.dtype == torch.uint8
    assert [bool(byte >> i & 1) for byte in packed.tolist() for i in range(8)] == flat + [False] * (-len(flat) % 8)
    restored = unpack_mask(packed, tuple(shape))
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


def test_by_hand_and_of_a_mask_that_is_not_contiguous():
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    assert pack_mask(mask.T).tolist() == [0b00110001]  # 1 0, 0 0, 1 1
    assert pack_mask(torch.tensor([1, 1, 0, 0, 1, 0, 1, 0, 0, 1]).bool()).tolist() == [0b01010011, 0b00000010]
