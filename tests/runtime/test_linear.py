"""The packed layer, as far as a CPU can show it, and how it is saved.

The kernels need a GPU (test_runtime_gpu.py); unpacking.py stands in for them here."""

import copy
import itertools
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.runtime.kernels import SemiStructuredLinear
from tests.helpers import assert_bits, plain_from_pretrained, refused, tiny_llama
from tests.runtime.unpacking import CPU, DTYPES, chain, llama, packed_by, pruned

INPUTS = {
    "one row": lambda x: x[0, 0],
    "rows": lambda x: x[0],
    "batches": lambda x: x,
    "permuted": lambda x: x.transpose(0, 1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "strided, whole eights": lambda x: x.flatten(0, 1).repeat(4, 2)[:, ::2],
    "unaligned, whole eights": lambda x: torch.cat([x.flatten()] * 2)[1 : 1 + 8 * 64].view(8, 64),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "nothing": lambda x: x[:0],
    "four dimensions": lambda x: x.unflatten(1, (1, -1)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INPUTS)
def test_a_packed_layer_takes_what_a_linear_takes(backend, shape, dtype, bias):
    layer = pruned(32, 64, dtype, bias)
    x = INPUTS[shape](torch.randn(2, 3, 64, dtype=dtype))
    with torch.no_grad():
        wanted = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        found = packed_by(backend, layer)(x)
    assert (type(layer), found.is_contiguous()) == (SemiStructuredLinear, True)
    assert_bits(found, wanted.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_dense_gives_the_model_back_bit_for_bit(backend, dtype):
    model = chain(pruned(32, 64, dtype), nn.ReLU(), pruned(64, 32, dtype, bias=False), pruned(64, 128, dtype))
    model[0].weight.requires_grad_(False)
    before, biases = copy.deepcopy(model), [model[0].bias, model[3].bias]
    packed_by(backend, model)
    assert [type(layer) for layer in model] == [SemiStructuredLinear, nn.ReLU, nn.Linear, SemiStructuredLinear]
    assert mts.to_dense(model) is model
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert list(model.state_dict()) == list(before.state_dict())
    for name, parameter in model.named_parameters():
        assert_bits(parameter, before.get_parameter(name))
        assert parameter.requires_grad == before.get_parameter(name).requires_grad
    assert all(layer.bias is bias for layer, bias in zip(model[::3], biases, strict=True))
    assert model[0].__dict__.keys() == before[0].__dict__.keys()
    refused(mts.semi_structured_report, model, match="carries no report of 2:4")


def test_modes_of_execution_agree(backend):
    """inference_mode, no_grad, grad, autocast, and torch.compile without graph breaks for any number of tokens."""
    layer = packed_by(backend, pruned(32, 128))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 9, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
    modes = [torch.inference_mode, torch.no_grad, nullcontext, partial(torch.autocast, "cpu", torch.bfloat16)]
    for run, tokens, mode in itertools.product((layer, compiled), (9, 5), modes):
        part = x[:, :tokens].float() if mode is modes[-1] else x[:, :tokens]
        with mode():
            assert_bits(run(part), wanted[:, :tokens])


def test_a_backward_pass_is_refused(backend):
    layer, x = packed_by(backend, pruned(32, 64)), torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run, given in ((layer, x), (compiled, x), (layer, x.detach())):  # the last is of the bias alone
        with pytest.raises(RuntimeError, match=r"have no backward pass.*to_dense"):
            run(given).sum().backward()


@pytest.mark.parametrize(("x", "got"), [((2, 64, torch.float32), "torch.float32 of 64"), ((2, 32, None), "of 32")])
def test_inputs_of_another_dtype_or_width_are_refused(backend, x, got):
    layer = packed_by(backend, pruned(32, 64))
    wrong = f"packed for torch.bfloat16 inputs of 64 channels, and got .*{got}"
    refused(layer, torch.zeros(x[:2], dtype=x[2] or torch.bfloat16), match=wrong)


def test_packed_layers_stay_where_and_what_they_are(backend):
    model = packed_by(backend, chain(pruned(32, 64), nn.LayerNorm(32, dtype=torch.bfloat16)))
    packed = model[0].packed
    model.to(torch.bfloat16).to("cpu").eval().requires_grad_(False)  # none of these changes anything
    assert model[0].packed is packed
    for change in (lambda: model.to(torch.float16), model.float, lambda: model.to("meta")):
        refused(change, match=r"packed 2:4 in torch.bfloat16 on cpu cannot become .*to_dense")
        assert model[0].packed is packed
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    assert_bits(model[0](x), copy.deepcopy(model[0])(x))


def test_copies_and_pickles_work_alone(backend):
    layer, x = packed_by(backend, pruned(32, 64)), torch.randn(3, 64, dtype=torch.bfloat16)
    wanted, weight = layer(x), layer.unpacked()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.packed.data_ptr() != layer.packed.data_ptr()
        assert_bits(copied(x), wanted)
        back: Any = mts.to_dense(copied)
        assert_bits(back.weight, weight)
    assert type(layer) is SemiStructuredLinear


def test_the_weight_is_shown_as_torchs_tensor_subclass(backend):
    layer = packed_by(backend, pruned(64, 128))
    assert layer.weight.nbytes == 64 * 128 * 2  # torch's subclass reports the dense size
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((64, 128), torch.bfloat16, CPU)
    with pytest.raises(NotImplementedError, match="only supports a specific set"):
        _ = layer.weight * 2
    assert "in_features=128, out_features=64, bias=True, 2:4 bfloat16 packed by unpacking" in repr(layer)


def test_hooks_and_attributes_survive_both_ways(backend):
    layer, x, seen = pruned(32, 64), torch.randn(2, 64, dtype=torch.bfloat16), []
    layer.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    layer.mark = "kept"
    add_hook_to_module(layer, AlignDevicesHook(io_same_device=True))
    for run in (lambda: None, lambda: packed_by(backend, layer), lambda: mts.to_dense(layer)):
        run()
        with torch.no_grad():
            layer(x)
        assert layer.mark == "kept"
        assert isinstance(layer._hf_hook, AlignDevicesHook)
    assert seen == [nn.Linear, SemiStructuredLinear, nn.Linear]


def assert_all_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert_bits(tensor, expected[name])


def test_state_dicts_and_folders_hold_the_dense_weights(backend, tmp_path):
    model = llama()
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed_by(backend, model)
    assert len(mts.semi_structured_report(model).packed) == 14
    found = model.state_dict()
    assert [(name, type(tensor)) for name, tensor in found.items()] == [(name, Tensor) for name in dense]
    assert_all_bits(found, dense)
    model.save_pretrained(tmp_path / "plain")
    mts.save(model, tmp_path / "ours")
    for folder in ("plain", "ours"):
        assert_all_bits(load_file(tmp_path / folder / "model.safetensors"), dense)
        assert_all_bits(plain_from_pretrained(tmp_path / folder).state_dict(), dense)
    mts.verify(tmp_path / "ours", "2:4")


def test_what_needs_dense_weights_says_so(backend, tmp_path):
    model = packed_by(backend, llama())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = r"q_proj.weight is packed 2:4: call modelopt_sparse.to_dense before"
    refused(model.load_state_dict, state, match=before, error=RuntimeError)
    mts.save(mts.sparsify(tiny_llama(), "magnitude"), tmp_path / "folder")
    name = "layer 'model.layers.0.self_attn.q_proj' is packed 2:4 and cannot be"
    calls = (mts.restore, tmp_path / "folder", "restored into"), (mts.verify, "2:4", "verified")
    for call, argument, what in (*calls, (mts.sparsify, "magnitude", "pruned")):
        refused(call, model, str(argument), match=f"{name} {what}: .*to_dense")
    mts.to_dense(model).load_state_dict(state)
    mts.verify(model, "2:4")
