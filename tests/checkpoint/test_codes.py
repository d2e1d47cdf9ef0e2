"""`verify` on quantized folders: zeros of the weights are counted in the codes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import modelopt_sparse as mts
from tests.helpers import tiny_llama

compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
pack_to_int32 = compressors.pack_to_int32


def int_codes(weight: Tensor, bits: int, group: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scales) by rounding to nearest, symmetric: a scale for each row, or for each group of its columns."""
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-9) / (2 ** (bits - 1) - 1)
    return (groups / scale).round().view_as(weight).to(torch.int8), scale.squeeze(-1)


def fp8(tensors, name, weight):
    tensors[f"{name}_scale"] = (scale := weight.abs().amax(1, keepdim=True) / 448)
    tensors[name] = (weight / scale).to(torch.float8_e4m3fn)


def int8(tensors, name, weight):
    tensors[name], tensors[f"{name}_scale"] = int_codes(weight, 8)


def torchao(tensors, name, weight):
    module, _, parameter = name.rpartition(".")
    tensors[f"{module}._{parameter}_qdata"], tensors[f"{module}._{parameter}_scale"] = int_codes(weight, 8)


def packed(tensors, name, weight):
    codes, tensors[f"{name}_scale"] = int_codes(weight, 4, group=8)
    tensors[f"{name}_packed"], tensors[f"{name}_shape"] = pack_to_int32(codes, 4), torch.tensor(weight.shape)


def with_offset(tensors, name, weight):
    """Asymmetric, for each row: 0 is the zero point, which is not the code 0."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    offset = (-128 - low / scale).round()
    tensors[name] = ((weight / scale).round() + offset).clamp(-128, 127).to(torch.int8)
    tensors[f"{name}_zero_point"] = offset.to(torch.int8)


def packed_with_offsets(tensors, name, weight):
    """The same in 4 bits for groups of 8 columns, with packed zero points."""
    groups = weight.view(len(weight), -1, 8)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-9)
    offset = (-8 - low / scale).round().clamp(-8, 7)
    codes = ((groups / scale).round() + offset).clamp(-8, 7).view_as(weight).to(torch.int8)
    tensors[f"{name}_packed"], tensors[f"{name}_shape"] = pack_to_int32(codes, 4), torch.tensor(weight.shape)
    packed_offset = pack_to_int32(offset.squeeze(-1).to(torch.int8), 4, packed_dim=0)
    tensors[f"{name}_zero_point"] = packed_offset.contiguous()


def quantized_folder(folder, quantize, *, dense=False):
    """A 2:4 model's folder as a quantizing tool would leave it: no masks, no report, codes for weights."""
    model = tiny_llama()
    if not dense:
        mts.export(mts.sparsify(model, "magnitude", pattern="2:4", progress=False))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        quantize(tensors, name, tensors.pop(name))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4 if "packed" in quantize.__name__ else 8}}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


FORMS = [fp8, int8, torchao, packed, with_offset, packed_with_offsets]


@pytest.mark.parametrize("quantize", FORMS)
def test_zeros_survive_and_are_counted(tmp_path, quantize):
    """Half of the weights are zero, and what rounding adds."""
    quantized_folder(tmp_path, quantize)
    layers = mts.verify(tmp_path, "2:4").layers
    assert len(layers) == 14
    assert all(layer.zeros >= layer.size // 2 for layer in layers)
    if quantize in (fp8, int8, torchao):
        assert all(layer.zeros < 0.6 * layer.size for layer in layers)


@pytest.mark.parametrize("quantize", FORMS)
def test_what_is_not_sparse_is_seen(tmp_path, quantize):
    quantized_folder(tmp_path, quantize, dense=True)
    with pytest.raises(mts.PatternError, match="14 of 14 layers do not hold their pattern"):
        mts.verify(tmp_path, "2:4")


@pytest.mark.parametrize("quantize", [int8, packed])
def test_one_code_too_many_is_seen(tmp_path, quantize):
    """A pruned weight of one layer comes back as the code 1, as quantization with error feedback does it."""
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(tensors, name_of, weight):
        if name_of == name:
            row = weight[0].clone()
            place = int((row == 0).nonzero()[0])
            row[place] = row.abs().max()
            weight = torch.cat([row[None], weight[1:]])
        quantize(tensors, name_of, weight)

    broken.__name__ = quantize.__name__
    quantized_folder(tmp_path, broken)
    with pytest.raises(mts.PatternError) as caught:
        mts.verify(tmp_path, "2:4")
    assert [layer.name for layer in caught.value.verification.layers if layer.problem] == [name.removesuffix(".weight")]


def test_a_form_that_is_not_read(tmp_path):
    def nvfp4(tensors, name, weight):
        tensors[f"{name}_packed"] = torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)

    quantized_folder(tmp_path, nvfp4)
    with pytest.raises(ValueError, match=r"q_proj': its codes \(compressed-tensors\) are in a form that is not read"):
        mts.verify(tmp_path, "2:4")
