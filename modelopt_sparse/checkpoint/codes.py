"""Weights of quantized folders, as codes whose zeros are the zeros of the weights.

A symmetric format writes the number 0 as the code 0. One with zero points writes it as the zero point of its row or
group, which is subtracted here. So pruned weights can be counted without the scales.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.model.layers import Layer

READ = (
    "weights in 8 bits (compressed-tensors, torchao, and fp8 of transformers), and compressed-tensors' packed integers"
)

Read = Callable[[str], Tensor | None]


def codes_reader(names: Collection[str], read: Read, quantization: Mapping[str, Any]) -> Callable[[Layer], Tensor]:
    """A function that reads a layer's codes, in float32, from a folder with the tensors ``names``.

    ``quantization``: the folder's settings. The function raises ValueError for a format that is not read, and where
    compressed-tensors, which unpacks its own format, is not installed.
    """

    def codes(layer: Layer, /) -> Tensor:
        name = layer.parameter_name
        module, _, parameter = name.rpartition(".")
        for place in (name, f"{module}._{parameter}_qdata", f"{name}_qdata"):
            stored = read(place) if place in names else None
            if stored is not None and stored.shape == layer.parameter.shape:
                return _without_offset(stored.float(), read(f"{name}_zero_point"))
        packed, shape = read(f"{name}_packed"), read(f"{name}_shape")
        bits = _bits(quantization)
        if packed is None or shape is None or packed.dtype != torch.int32 or bits is None:
            method = quantization.get("quant_method")
            raise ValueError(f"layer {layer.name!r}: its codes ({method}) are in a form that is not read; {READ} are")
        try:
            from compressed_tensors.compressors import unpack_from_int32  # only where a folder is packed
        except ImportError:
            raise ValueError(f"layer {layer.name!r} is packed: pip install compressed-tensors, to unpack it") from None
        whole = torch.Size(shape.tolist())
        unpacked = unpack_from_int32(packed, bits, whole).float()
        offset = read(f"{name}_zero_point")
        if offset is not None and offset.dtype == torch.int32:
            rows = torch.Size((whole[0], offset.shape[-1]))
            offset = unpack_from_int32(offset, bits, rows, packed_dim=0)
        return _without_offset(unpacked, offset)

    return codes


def _without_offset(codes: Tensor, offset: Tensor | None) -> Tensor:
    """Codes [R, C] minus their zero points: [R, G] for G groups of columns, [R] for rows, or one for all."""
    if offset is None:
        return codes
    offset = offset.float()
    if offset.dim() < 2 or offset.shape[-1] == 1:
        return codes - (offset[:, None] if offset.dim() == 1 and len(offset) > 1 else offset)
    return codes - offset.repeat_interleave(-(-codes.shape[-1] // offset.shape[-1]), -1)[:, : codes.shape[-1]]


def _bits(quantization: Mapping[str, Any]) -> int | None:
    """How many bits compressed-tensors' groups give a weight; None if they do not agree."""
    groups = quantization.get("config_groups") or {}
    bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, Mapping)}
    return bits.pop() if len(bits) == 1 else None
