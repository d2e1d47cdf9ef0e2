"""2:4 execution, as far as a CPU can show it: packing, refusals, reports, the rule that decides, and the way back.

The kernels need a GPU (test_runtime_gpu.py); unpacking.py stands in for them here.
"""

import copy
import gc
import io
import itertools
import json
import math
import pickle
import re
import weakref
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import restore as checkpoint
from modelopt_sparse.plan.plan import HARDWARE
from modelopt_sparse.runtime import backends, convert
from modelopt_sparse.runtime import timing as tune
from modelopt_sparse.runtime.backends import Algorithm, CuSparseLt, Cutlass
from modelopt_sparse.runtime.linear import SemiStructuredLinear
from modelopt_sparse.runtime.matmul import Choice, as_numbers, choice_for
from modelopt_sparse.runtime.packing import NotPackable, misfit, pack, without_negative_zeros
from modelopt_sparse.runtime.quantize import LARGEST, SUMS, quantize_rows, relative_squared_error, rescaled
from modelopt_sparse.runtime.settings import Place, Settings, _no_fp8, loading_place
from modelopt_sparse.runtime.timing import Timing, TimingCache, decide
from tests.helpers import ROOT, assert_bits, tiny_llama, token_batches
from tests.runtime.unpacking import CPU, Unpacking, chain, installed, packed_by, place_for, pruned

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def backend(monkeypatch) -> Unpacking:
    return installed(monkeypatch)


def llama(**changes) -> Any:
    """A 2:4 Llama in bfloat16 whose shapes the CUTLASS format takes, output head apart."""
    model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_key_value_heads=4, **changes)
    model = model.to(torch.bfloat16)
    return mts.export(mts.sparsify(model, "magnitude", pattern="2:4", progress=False))


# packing ------------------------------------------------------------------------------------------------------------


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


# the layer ----------------------------------------------------------------------------------------------------------


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
    assert type(layer) is SemiStructuredLinear
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    assert_bits(found, wanted.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_dense_gives_the_model_back_bit_for_bit(backend, dtype):
    model = chain(pruned(32, 64, dtype), nn.ReLU(), pruned(64, 32, dtype, bias=False), pruned(64, 128, dtype))
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model)
    biases = [model[0].bias, model[3].bias]
    packed_by(backend, model)
    assert [type(layer) for layer in model] == [SemiStructuredLinear, nn.ReLU, nn.Linear, SemiStructuredLinear]
    assert mts.to_dense(model) is model
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert list(model.state_dict()) == list(before.state_dict())
    for name, parameter in model.named_parameters():
        assert_bits(parameter, before.get_parameter(name))
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad == before.get_parameter(name).requires_grad
    assert model[0].bias is biases[0]
    assert model[3].bias is biases[1]
    assert model[0].__dict__.keys() == before[0].__dict__.keys()
    with pytest.raises(ValueError, match="carries no report of 2:4"):
        mts.semi_structured_report(model)


def test_modes_of_execution_agree(backend):
    """inference_mode, no_grad, grad, autocast, and torch.compile without graph breaks for any number of tokens."""
    layer = packed_by(backend, pruned(32, 64))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
    for run in (layer, compiled):
        for tokens in (9, 5, 2):
            with torch.inference_mode():
                assert_bits(run(x[:, :tokens]), wanted[:, :tokens])
            with torch.no_grad():
                assert_bits(run(x[:, :tokens]), wanted[:, :tokens])
            assert_bits(run(x[:, :tokens]), wanted[:, :tokens])
            with torch.autocast("cpu", torch.bfloat16):
                assert_bits(run(x[:, :tokens].float()), wanted[:, :tokens])


def test_a_backward_pass_is_refused(backend):
    layer = packed_by(backend, pruned(32, 64))
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with pytest.raises(RuntimeError, match=r"for inference and have no backward pass.*to_dense"):
            run(x).sum().backward()
    with pytest.raises(RuntimeError, match="no backward pass"):
        layer(x.detach()).sum().backward()  # of the bias alone


@pytest.mark.parametrize(("x", "got"), [((2, 64, torch.float32), "torch.float32 of 64"), ((2, 32, None), "of 32")])
def test_inputs_of_another_dtype_or_width_are_refused(backend, x, got):
    layer = packed_by(backend, pruned(32, 64))
    with pytest.raises(ValueError, match=f"packed for torch.bfloat16 inputs of 64 channels and got .*{got}"):
        layer(torch.zeros(x[:2], dtype=x[2] or torch.bfloat16))


def test_packed_layers_stay_where_and_what_they_are(backend):
    model = packed_by(backend, chain(pruned(32, 64), nn.LayerNorm(32, dtype=torch.bfloat16)))
    packed = model[0].packed
    model.to(torch.bfloat16).to("cpu").eval().requires_grad_(False)  # none of these changes anything
    assert model[0].packed is packed
    for change in (lambda: model.to(torch.float16), model.float, lambda: model.to("meta")):
        with pytest.raises(ValueError, match=r"packed 2:4 in torch.bfloat16 on cpu cannot become .*to_dense"):
            change()
        assert model[0].packed is packed
    assert_bits(
        model[0](torch.ones(1, 64, dtype=torch.bfloat16)), copy.deepcopy(model[0])(torch.ones(1, 64).bfloat16())
    )


def test_copies_and_pickles_work_alone(backend):
    layer = packed_by(backend, pruned(32, 64))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    wanted, weight = layer(x), layer.unpacked()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.packed.data_ptr() != layer.packed.data_ptr()
        assert_bits(copied(x), wanted)
        back: Any = mts.to_dense(copied)
        assert_bits(back.weight, weight)
    assert type(layer) is SemiStructuredLinear


def test_bytes_are_those_of_the_packed_tensors(backend):
    layer = packed_by(backend, pruned(64, 128))
    assert layer.weight_bytes == 64 * 128 * 2 * 9 // 16
    assert layer.weight.nbytes == 64 * 128 * 2  # torch's subclass reports the dense size
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((64, 128), torch.bfloat16, CPU)
    with pytest.raises(NotImplementedError, match="only supports a specific set"):
        _ = layer.weight * 2
    assert "in_features=128, out_features=64, bias=True, 2:4 bfloat16 packed by unpacking" in repr(layer)


def test_hooks_and_attributes_survive_both_ways(backend):
    layer = pruned(32, 64)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    seen = []
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


# saving -------------------------------------------------------------------------------------------------------------


def test_state_dicts_and_folders_hold_the_dense_weights(backend, tmp_path):
    model = llama()
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed_by(backend, model)
    assert len(mts.semi_structured_report(model).packed) == 14
    found = model.state_dict()
    assert list(found) == list(dense)
    for name, tensor in found.items():
        assert type(tensor) is Tensor
        assert_bits(tensor, dense[name])
    model.save_pretrained(tmp_path / "plain")
    mts.save(model, tmp_path / "ours")
    for folder in ("plain", "ours"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        for name, tensor in stored.items():
            assert_bits(tensor, dense[name])
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto", output_loading_info=True)
        again, info = loaded
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in again.state_dict().items():
            assert_bits(tensor, dense[name])
    mts.verify(tmp_path / "ours", "2:4")


def test_torch_save_holds_plain_tensors(backend):
    model = packed_by(backend, chain(pruned(32, 64)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_bits(torch.load(file, weights_only=True)["0.weight"], pruned(32, 64).weight)


def test_what_needs_dense_weights_says_so(backend, tmp_path):
    model = packed_by(backend, llama())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"q_proj.weight is packed 2:4 and cannot be loaded into.*to_dense"):
        model.load_state_dict(state)
    mts.save(mts.sparsify(tiny_llama(), "magnitude"), tmp_path / "folder")
    name = "layer 'model.layers.0.self_attn.q_proj' is packed 2:4 and cannot be"
    with pytest.raises(ValueError, match=f"{name} restored into: .*to_dense"):
        mts.restore(model, tmp_path / "folder")
    with pytest.raises(ValueError, match=f"{name} verified: .*to_dense"):
        mts.verify(model, "2:4")
    with pytest.raises(ValueError, match=f"{name} pruned: .*to_dense"):
        mts.sparsify(model, "magnitude")
    mts.to_dense(model).load_state_dict(state)
    mts.verify(model, "2:4")


# what is converted --------------------------------------------------------------------------------------------------


def reasons(model: nn.Module) -> dict[str, str]:
    report = mts.semi_structured_report(model)
    return {layer.name: layer.reason for layer in report.layers if layer.runs == "dense"}


class Doubling(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_every_layer_left_dense_has_its_reason(backend):
    model = nn.ModuleDict(
        {
            "good": pruned(32, 64),
            "dense": nn.Linear(64, 32, dtype=torch.bfloat16),
            "wide": pruned(32, 64, torch.float32),
            "narrow": pruned(16, 64),
            "bias": pruned(32, 64),
            "own": Doubling(64, 32, dtype=torch.bfloat16),
            "conv": nn.Conv1d(64, 32, 1, dtype=torch.bfloat16),
            "words": nn.Embedding(32, 64, dtype=torch.bfloat16),
            "head": pruned(32, 64, seed=1),
            "twin": pruned(32, 64, seed=2),
            "replaced": pruned(32, 64),
            "left": pruned(32, 64),
            "fast": nn.TransformerEncoderLayer(64, 1, 64, dtype=torch.bfloat16),
        }
    )
    model["bias"].bias = nn.Parameter(torch.zeros(32))
    model["head"].weight = model["words"].weight
    model["tied"] = pruned(32, 64)
    model["tied"].weight = model["twin"].weight
    model["replaced"].forward = lambda x: x
    packed_by(backend, model, exclude="left")
    uncalled = "TransformerEncoderLayer reads the weight without calling the layer"
    assert reasons(model) == {
        "dense": "not 2:4: row 0 has 4 nonzeros in columns 0 to 3; 32 of 32 rows break the pattern",
        "wide": "dtype: float32, the kernels take float16 and bfloat16: cast the model first",
        "narrow": "shape: 16 x 64 is no multiple of the 32 x 64 that unpacking takes",
        "bias": "dtype: its bias is float32, its weight bfloat16",
        "own": "a Doubling, not a plain nn.Linear",
        "conv": "a Conv1d, not a plain nn.Linear",
        "words": "tied: also held by head",
        "twin": "tied: another module holds the same weight",
        "replaced": "its forward was replaced on the instance",
        "left": "excluded by 'left'",
        "fast.self_attn.in_proj_weight": "a MultiheadAttention, not a plain nn.Linear",
        "fast.self_attn.out_proj": "a NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "fast.linear1": uncalled,
        "fast.linear2": uncalled,
    }
    (entry,) = mts.semi_structured_report(model).packed
    assert (entry.name, entry.runs, entry.backend, entry.shape) == ("good", "2:4", "unpacking", (32, 64))
    assert (entry.dense_bytes, entry.bytes) == (4096, 2304)


def test_a_linear_that_is_the_model(backend):
    model = pruned(32, 64)
    assert packed_by(backend, model) is model
    assert type(model) is SemiStructuredLinear
    assert [layer.name for layer in mts.semi_structured_report(model).packed] == ["weight"]


def test_one_module_in_two_places_is_packed_once(backend):
    shared = pruned(64, 64)
    model = packed_by(backend, chain(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert type(model[2]) is SemiStructuredLinear
    assert len(mts.semi_structured_report(model).layers) == 1


@pytest.mark.parametrize("how", [{"include": ["0", "1"]}, {"strict": True}, {"include": "*", "strict": True}])
def test_layers_that_were_to_be_packed_are_an_error_before_anything_changes(backend, how):
    model = chain(pruned(32, 64), nn.Linear(64, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"1 layers that you ask for cannot be packed 2:4: 1: not 2:4: row 0 has 4"):
        packed_by(backend, model, **how)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    packed_by(backend, model, include="0", strict=True)
    assert reasons(model) == {"1": "not in include"}


def test_a_layer_asked_for_that_fails_only_in_packing_is_an_error(monkeypatch, backend):
    monkeypatch.setattr(type(backend), "unpack", lambda self, packed, metadata, columns: torch.zeros(32, 64).bfloat16())
    model = chain(pruned(32, 64))
    packed_by(backend, model)
    assert reasons(model) == {"0": "unpacking does not give its weight back bit for bit"}
    with pytest.raises(ValueError, match="layer '0' cannot be packed 2:4: unpacking does not give"):
        packed_by(backend, model, strict=True)


def test_globs_that_match_nothing_are_refused(backend):
    for key in ("include", "exclude"):
        with pytest.raises(ValueError, match="'lm_haed' matches no layer of this LlamaForCausalLM"):
            packed_by(backend, llama(), **{key: "lm_haed"})


def test_a_second_call_keeps_what_is_packed(backend):
    model = chain(pruned(32, 64), pruned(32, 64))
    packed_by(backend, model, include="0")
    first = model[0].packed
    packed_by(backend, model)
    assert model[0].packed is first
    assert [layer.name for layer in mts.semi_structured_report(model).packed] == ["0", "1"]


def test_the_dense_weight_is_gone_before_the_next_layer_is_packed(backend, monkeypatch):
    model = chain(*(pruned(32, 64, seed=seed) for seed in range(3)))
    dense = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def watching(self, weight):
        gc.collect()
        alive.append(sum(reference() is not None for reference in dense))
        return Cutlass.pack(self, weight)

    monkeypatch.setattr(Unpacking, "pack", watching)
    packed_by(backend, model)
    assert alive == [3, 2, 1]
    gc.collect()
    assert not any(reference() for reference in dense)


def test_nothing_is_recorded_for_autograd(backend):
    layer = packed_by(backend, pruned(32, 64))
    for tensor in (layer.packed, layer.metadata):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
    with torch.inference_mode():
        made_inside = packed_by(backend, pruned(32, 64))
    assert not made_inside.packed.is_inference()
    made_inside(torch.zeros(1, 64, dtype=torch.bfloat16))


def test_a_run_that_breaks_off_leaves_whole_layers(backend, monkeypatch):
    model = chain(pruned(32, 64), pruned(32, 64), pruned(32, 64))
    packs = iter([False, True])

    def failing(self, weight):
        if next(packs):
            raise torch.OutOfMemoryError("no memory left")
        return Cutlass.pack(self, weight)

    monkeypatch.setattr(Unpacking, "pack", failing)
    with pytest.raises(torch.OutOfMemoryError):
        packed_by(backend, model)
    assert [type(layer) for layer in model] == [SemiStructuredLinear, nn.Linear, nn.Linear]
    assert [layer.runs for layer in mts.semi_structured_report(model).layers] == ["2:4", "dense", "dense"]
    model[0](torch.zeros(1, 64, dtype=torch.bfloat16))


def test_outputs_of_a_model_are_those_of_its_dense_form(backend):
    model, (tokens,) = llama(), token_batches(1)
    with torch.no_grad():
        wanted = model(tokens).logits
        found = packed_by(backend, model)(tokens).logits
        back = mts.to_dense(model)(tokens).logits
    # sums in another order and in another precision, through two blocks in bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert_bits(back, wanted)


# refusals of the public functions -----------------------------------------------------------------------------------


def test_a_model_on_the_cpu_is_refused():
    model = llama()
    with pytest.raises(ValueError, match=r'LlamaForCausalLM is on cpu: move it with model.to\("cuda"\) first, or load'):
        mts.to_semi_structured(model)
    assert not any(isinstance(module, SemiStructuredLinear) for module in model.modules())


def test_masks_are_to_be_exported_first():
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    with pytest.raises(ValueError, match=r"14 weights are held by masks .*modelopt_sparse.export\(model\) first"):
        mts.to_semi_structured(model)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (
            {"tunes": 1},
            r"option 'tunes' of to_semi_structured is not known, did you mean 'tune'\?; allowed are",
        ),
        ({"tune": ()}, r"tune \(\): give token counts from 1"),
        ({"tune": (1, 0)}, r"tune \(1, 0\): give token counts from 1"),
        ({"tune": "64"}, "tune '64': give token counts from 1"),
        ({"tune": True}, "tune True: give token counts"),
        ({"timing": "wall"}, "timing 'wall' is not known: allowed are eager, graph"),
        ({"min_speedup": 0}, "min_speedup 0: it must be above 0"),
        ({"quantize": "int4"}, "quantize 'int4' is not known: allowed are fp8, int8"),
        ({"backend": "triton"}, "backend 'triton' is not known: allowed are cusparselt, cutlass"),
        ({"keep_both": True}, "keep_both is for layers that are timed: give tune="),
        ({"cache": "times.json"}, "cache is for layers that are timed: give tune="),
        ({"tune": 8, "keep_both": True, "quantize": "fp8"}, "keep_both with quantize would give"),
    ],
)
def test_wrong_options_are_refused(options, wrong):
    with pytest.raises(ValueError, match=wrong):
        mts.to_semi_structured(llama(), **options)


def test_the_page_lists_every_option_with_its_default():
    page = (ROOT / "docs" / "semi-structured.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE)
    assert {name: value.strip("`").replace('"', "") for name, value in rows} == {
        item.name: str(item.default) for item in fields(Settings)
    }


def test_options_are_put_in_order():
    settings = Settings.of({"tune": [64, 1, 64], "include": "a", "exclude": ["b", "c"]})
    assert (settings.tune, settings.include, settings.exclude) == ((1, 64), ("a",), ("b", "c"))
    assert Settings.of({"tune": 8}).tune == (8,)


CAPABILITIES = [
    ((7, 5), True, "cusparselt: compute capability 7.5 has no Sparse.*cutlass: its kernels run on .* 8.x.*has 7.5"),
    ((8, 0), True, CuSparseLt),
    ((8, 0), False, Cutlass),
    ((9, 0), True, CuSparseLt),
    ((9, 0), False, "cusparselt: this build of torch has no cuSPARSELt; cutlass: its kernels run on .* 8.x.*has 9.0"),
    ((10, 0), True, CuSparseLt),
]


@pytest.mark.parametrize(("capability", "has_cusparselt", "chosen"), CAPABILITIES)
def test_the_backend_is_the_first_that_runs_on_the_device(monkeypatch, capability, has_cusparselt, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: has_cusparselt)
    device = torch.device("cuda:0")
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=f"no 2:4 kernels for cuda:0: {chosen}; leave the model dense"):
            backends.choose_backend(device)
    else:
        assert type(backends.choose_backend(device)) is chosen
    fp8 = {CuSparseLt: capability >= (8, 9), Cutlass: False}
    if chosen in fp8:
        assert (_no_fp8(device, backends.choose_backend(device)) == "") == fp8[chosen]


def test_an_asked_for_backend_is_not_replaced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"no 2:4 kernels for cuda:0: cutlass: .*; leave"):
        backends.choose_backend(torch.device("cuda:0"), "cutlass")
    with pytest.raises(ValueError, match="backend 'cublas' is not known: allowed are cusparselt, cutlass"):
        backends.choose_backend(torch.device("cuda:0"), "cublas")


# load ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    mts.save(mts.sparsify(model.to(torch.bfloat16), "magnitude", pattern="2:4", progress=False), tmp_path / "sparse")
    return tmp_path / "sparse"


def test_load_packs_each_layer_on_its_way(backend, folder, monkeypatch):
    """The layers are packed before the model as a whole is moved, which then moves what stayed dense."""
    moved = []
    original = nn.Module.to

    def to(self, *args, **kwargs):
        moved.append(sum(isinstance(module, SemiStructuredLinear) for module in self.modules()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(), place_for(backend)))
    monkeypatch.setattr(type(tiny_llama()), "to", to)
    model, dense = mts.load(folder, semi_structured=True), mts.export(mts.load(folder))
    assert moved == [14]
    assert dict(mts.named_masks(model)) == {}
    assert mts.report(model).layers
    assert len(mts.semi_structured_report(model).packed) == 14
    for name, weight in mts.to_dense(model).state_dict().items():
        assert_bits(weight, dense.state_dict()[name])


def test_load_refuses_before_it_reads(folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError, match="packs layers for a CUDA device and there is none here"):
        mts.load(folder, semi_structured=True)
    for device_map in ("auto", "cpu", {"model": 0, "lm_head": 1}):
        with pytest.raises(ValueError, match="2:4 layers are packed for one CUDA device, such as 'cuda:0'"):
            mts.load(folder, semi_structured=True, device_map=device_map)
    with pytest.raises(ValueError, match="option 'tun' of to_semi_structured is not known"):
        mts.load(folder, semi_structured={"tun": 1})


@pytest.mark.parametrize("device_map", [None, "cuda", "cuda:0", torch.device("cuda"), {"": "cuda:0"}])
def test_load_takes_the_device_that_is_named(monkeypatch, device_map):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Place, "of", lambda device, settings: (device, settings))
    settings, place = loading_place(device_map, {"quantize": "fp8"})
    assert place == (torch.device("cuda:0"), settings)
    assert settings.quantize == "fp8"


def test_load_still_checks_weights_against_masks(backend, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(), place_for(backend)))
    original = checkpoint.read_masks
    monkeypatch.setattr(checkpoint, "read_masks", lambda *args: {name: ~mask for name, mask in original(*args).items()})
    with pytest.raises(ValueError, match="is not zero in 2048 places where its mask is False"):
        mts.load(folder, semi_structured=True)


# the rule that decides ----------------------------------------------------------------------------------------------


def timing(tokens: int, speedup: float, algorithm: Algorithm = backends.DEFAULT) -> Timing:
    return Timing(tokens, speedup * 1e-5, "cublas", 1e-5, algorithm)


FAST, OTHER = Algorithm(7, 1, -1), Algorithm(3, 4, 2)


@pytest.mark.parametrize(
    ("speedups", "keep_both", "chosen"),
    [
        ([1.05, 1.05], False, [True, True]),
        ([1.6, 1.049], False, None),
        ([0.5, 1.9], False, None),
        ([0.5, 0.9], False, None),
        ([0.5, 1.9], True, [False, True]),
        ([1.9, 0.5], True, [True, False]),
        ([0.5, 0.9], True, None),
        ([1.6, 1.7], True, [True, True]),
    ],
)
def test_the_rule(speedups, keep_both, chosen):
    """2:4 must win at every count; where both forms may be kept, at one of them."""
    timings = [timing(64, speedups[1], OTHER), timing(1, speedups[0], FAST)]
    decided = decide(timings, 1.05, keep_both)
    if chosen is None:
        assert decided is None
    else:
        assert decided == (Choice(1, chosen[0], FAST), Choice(64, chosen[1], OTHER))


def test_other_counts_go_with_the_named_one_below_them():
    choices = (Choice(8, False), Choice(64, True, FAST), Choice(2048, True, OTHER))
    found = {count: choice_for(count, choices).tokens for count in (1, 7, 8, 63, 64, 2047, 2048, 10**6)}
    assert found == {1: 8, 7: 8, 8: 8, 63: 8, 64: 64, 2047: 64, 2048: 2048, 10**6: 2048}


class Stopwatch:
    """A timer that knows what it is given: seconds by (the product's kind, library, tokens, algorithm)."""

    def __init__(self, sparse: dict[tuple[int, Algorithm], float], dense: dict[tuple[int, str], float]) -> None:
        self.sparse, self.dense = sparse, dense
        self.asked: list[tuple] = []
        self.sets: list[int] = []

    def __call__(self, calls) -> float:
        call = calls[0]
        self.sets.append(len(calls))
        assert len({argument.data_ptr() for argument in (each.args[1] for each in calls)}) == len(calls)
        x = call.args[0]
        assert torch.isfinite(call()).all()
        if call.func is F.linear:
            key = (len(x), str(torch.backends.cuda.preferred_blas_library()))
            self.asked.append(("dense", *key))
            return self.dense[key]
        algorithm = call.keywords["choices"][0].algorithm
        self.asked.append(("sparse", len(x), algorithm))
        return self.sparse[len(x), algorithm]


@pytest.fixture
def blas(monkeypatch):
    """What torch's preferred library for dense products was set to; a build without CUDA cannot change the real one."""
    history = ["heuristic"]

    def preferred(name=None):
        if name is not None:
            history.append(name)
        return history[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return history


def searching(backend: Unpacking, monkeypatch, found=(backends.DEFAULT, FAST)):
    monkeypatch.setattr(Unpacking, "search", lambda self, packed, metadata, x, bias, out_dtype: list(found))


TABLE = {
    "sparse": {(1, backends.DEFAULT): 9e-6, (1, FAST): 8e-6, (64, backends.DEFAULT): 5e-6, (64, FAST): 6e-6},
    "dense": {(1, "cublas"): 10e-6, (1, "cublaslt"): 12e-6, (64, "cublas"): 9e-6, (64, "cublaslt"): 8e-6},
}


def timed_place(backend, stopwatch) -> Place:
    return Place(CPU, backend, "a CPU", stopwatch, 0, ("cublas", "cublaslt"))


def test_both_sides_are_searched_and_the_best_of_each_decides(backend, blas, monkeypatch):
    searching(backend, monkeypatch)
    stopwatch = Stopwatch(**TABLE)
    model = chain(pruned(32, 64))
    convert.convert(model, Settings.of({"tune": (64, 1)}), lambda device: timed_place(backend, stopwatch))
    sides = [("dense", "cublas"), ("dense", "cublaslt"), ("sparse", backends.DEFAULT), ("sparse", FAST)]
    assert stopwatch.asked == [(side, tokens, how) for tokens in (1, 64) for side, how in sides]
    assert blas == ["heuristic", *["cublas", "heuristic", "cublaslt", "heuristic"] * 2]
    (layer,) = mts.semi_structured_report(model).layers
    assert layer.timings == (
        Timing(1, 10e-6, "cublas", 8e-6, FAST),
        Timing(64, 8e-6, "cublaslt", 5e-6, backends.DEFAULT),
    )
    assert model[0].choices == (Choice(1, True, FAST), Choice(64, True, backends.DEFAULT))
    backend.calls.clear()
    for tokens in (3, 70):
        model[0](torch.zeros(tokens, 64, dtype=torch.bfloat16))
    assert backend.calls == [((8, 64), FAST), ((72, 64), backends.DEFAULT)]


def test_the_library_for_dense_products_is_restored_after_an_error(backend, blas):
    def failing(calls):
        raise KeyboardInterrupt

    model = chain(pruned(32, 64))
    with pytest.raises(KeyboardInterrupt):
        convert.convert(model, Settings.of({"tune": 1}), lambda device: timed_place(backend, failing))
    assert blas[-1] == "heuristic"
    assert type(model[0]) is nn.Linear


def test_layers_where_dense_wins_stay_dense_and_say_where(backend, blas, monkeypatch):
    searching(backend, monkeypatch)
    slow = {**TABLE["sparse"], (1, FAST): 9.9e-6, (1, backends.DEFAULT): 11e-6}
    model = chain(pruned(32, 64))
    weight = model[0].weight
    place = timed_place(backend, Stopwatch(slow, TABLE["dense"]))
    convert.convert(model, Settings.of({"tune": (1, 64), "strict": True}), lambda device: place)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is weight
    report = mts.semi_structured_report(model)
    assert reasons(model) == {"0": "2:4 is not 1.05 times as fast at 1 tokens"}
    assert [round(found.speedup, 3) for found in report.layers[0].timings] == [1.01, 1.6]
    assert report.bytes == report.dense_bytes == 4096
    convert.convert(model, Settings.of({"tune": (1, 64), "min_speedup": 1.0}), lambda device: place)
    assert type(model[0]) is SemiStructuredLinear


def test_both_forms_are_kept_where_each_wins(backend, blas, monkeypatch):
    slow = {**TABLE["sparse"], (1, backends.DEFAULT): 20e-6}
    model = chain(pruned(32, 64))
    weight, before = model[0].weight, copy.deepcopy(model)
    place = timed_place(backend, Stopwatch(slow, TABLE["dense"]))
    convert.convert(model, Settings.of({"tune": (1, 64), "keep_both": True}), lambda device: place)
    (layer,) = mts.semi_structured_report(model).layers
    assert layer.runs == "2:4 and dense"
    assert layer.bytes == 4096 + 2304
    assert model[0].weight is weight
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for run in (model, compiled):
        for tokens, calls in ((3, 0), (63, 0), (64, 1), (100, 1)):
            x = torch.randn(tokens, 64, dtype=torch.bfloat16)
            backend.calls.clear()
            with torch.no_grad():
                torch.testing.assert_close(run(x), before(x), rtol=0.02, atol=0.02)
            assert len(backend.calls) == calls, tokens
    copied = copy.deepcopy(model)
    assert copied[0].weight.data_ptr() != weight.data_ptr()
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    mts.to_dense(model)
    assert model[0].weight is weight


def test_layers_of_one_shape_are_timed_once(backend, blas, monkeypatch):
    stopwatch = Stopwatch(**TABLE)
    model = chain(pruned(32, 64), pruned(32, 64, seed=1), pruned(32, 64, bias=False))
    convert.convert(model, Settings.of({"tune": (1, 64)}), lambda device: timed_place(backend, stopwatch))
    assert len(stopwatch.asked) == 2 * 2 * 3  # a bias is another shape
    first, second, _ = mts.semi_structured_report(model).layers
    assert first.timings == second.timings


def test_timings_are_kept_in_the_file_that_is_named(backend, blas, tmp_path):
    file = tmp_path / "times.json"
    made = []
    for counts, asked in (((1, 64), 6), ((64,), 0), ((1,), 0)):
        stopwatch = Stopwatch(**TABLE)
        model = chain(pruned(32, 64))
        settings = Settings.of({"tune": counts, "cache": file})
        convert.convert(model, settings, lambda device, used=stopwatch: timed_place(backend, used))
        assert len(stopwatch.asked) == asked
        made.append(mts.semi_structured_report(model).layers[0].timings)
    assert made == [made[0], made[0][1:], made[0][:1]]
    (key,) = json.loads(file.read_text())["timings"]
    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    assert key == f"a CPU; {version}; unpacking; eager; bfloat16; 32 x 64 + bias"
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]
    stopwatch = Stopwatch(**TABLE)
    other = replace(timed_place(backend, stopwatch), title="another CPU")
    convert.convert(chain(pruned(32, 64)), Settings.of({"tune": 1, "cache": file}), lambda device: other)
    assert len(stopwatch.asked) == 3
    assert len(json.loads(file.read_text())["timings"]) == 2


NO_TIMINGS = ["", "[]", "{}", '{"format": "other", "format_version": 1, "timings": {}}']
for version in (tune.CACHE_VERSION, tune.CACHE_VERSION + 1):
    NO_TIMINGS.append(json.dumps({"format": tune.CACHE_FORMAT, "format_version": version, "timings": {"k": [{}]}}))


@pytest.mark.parametrize("text", NO_TIMINGS)
def test_a_file_that_holds_no_timings_is_refused(tmp_path, text):
    (tmp_path / "times.json").write_text(text)
    with pytest.raises(ValueError, match=r"times.json' holds no timings that this version wrote .*give another path"):
        TimingCache(tmp_path / "times.json")
    assert (tmp_path / "times.json").read_text() == text


def test_each_side_goes_through_twice_the_cache(backend, blas):
    """4,096 bytes dense and 2,304 packed: 20,000 bytes of cache take 10 and 18 copies."""
    stopwatch = Stopwatch(**TABLE)
    place = replace(timed_place(backend, stopwatch), cache_bytes=20_000)
    convert.convert(chain(pruned(32, 64)), Settings.of({"tune": 1}), lambda device: place)
    assert stopwatch.sets == [10, 10, 18]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_timing_changes_no_random_state(backend, blas, quantize):
    model = chain(pruned(32, 128))
    before = torch.get_rng_state()
    place = timed_place(backend, Stopwatch(**TABLE))
    convert.convert(model, Settings.of({"tune": (1, 64), "quantize": quantize}), lambda device: place)
    assert type(model[0]) is SemiStructuredLinear
    assert torch.equal(torch.get_rng_state(), before)


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
        assert CuSparseLt().search(packed, None, x, None, torch.int32) == [backends.DEFAULT, found]
        assert seen.pop() == ((64, 8), False, None, None, torch.int32, True)
    CuSparseLt().multiply(packed, None, x, None, torch.int32, Algorithm(5, 4, 2))
    how = {"transpose_result": True, "alg_id": 5, "split_k": 4, "split_k_mode": 2}
    assert seen.pop() == ((64, 8), {"bias": None, "out_dtype": torch.int32, **how})


EVERY_KERNEL = [(kernels, dtype) for kernels in (CuSparseLt(), Cutlass()) for dtype in kernels.dtypes]


@pytest.mark.parametrize(("kernels", "dtype"), EVERY_KERNEL, ids=lambda value: getattr(value, "name", str(value)))
def test_torch_takes_the_arguments(kernels, dtype):
    """On meta tensors: torch's own checks of dtypes and shapes, and the shape and dtype that it gives back."""
    rows, columns = 64, 256
    out_dtype = SUMS.get(dtype)
    with torch.device("meta"):
        x = torch.empty(16, columns, dtype=dtype)
        bias = None if out_dtype else torch.empty(rows, dtype=dtype)
        if kernels.name == "cutlass":
            width = columns // 32 if dtype == torch.int8 else columns // 16
            metadata = torch.empty(rows, width, dtype=torch.int32 if dtype == torch.int8 else torch.int16)
            packed = torch.empty(rows, columns // 2, dtype=dtype)
        else:
            packed, metadata = torch.empty(rows, columns * 5 // 8, dtype=dtype), None
        for given in {None, bias}:
            out = kernels.multiply(packed, metadata, x, given, out_dtype, FAST)
            assert (tuple(out.shape), out.dtype) == ((16, rows), out_dtype or dtype)
            assert out.is_contiguous()


def test_cusparselt_weights_are_read_through_an_identity(monkeypatch):
    """For 2,600 columns, in three parts; the product stands in for the library's."""
    weight = pruned(16, 2608, torch.float16).weight.detach()

    def multiply(self, packed, metadata, x, bias=None, out_dtype=None, algorithm=backends.DEFAULT):
        assert x.shape[0] <= backends.UNPACKED_AT_ONCE
        return (x.double() @ weight.double().t()).to(out_dtype or x.dtype)

    monkeypatch.setattr(CuSparseLt, "multiply", multiply)
    assert_bits(CuSparseLt().unpack(torch.empty(0, dtype=torch.float16), None, 2608), weight)


# 8 bits -------------------------------------------------------------------------------------------------------------

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.mark.parametrize("dtype", EIGHT_BITS.values())
def test_codes_are_the_nearest_ones(dtype):
    """Against every value that the format has: no other code is nearer, scaled so that the largest entry is the top."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[torch.isfinite(every) & (every.abs() <= LARGEST[dtype])]
    matrix = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 5)[:, None]
    codes, scales = quantize_rows(matrix, dtype)
    assert codes.dtype == dtype
    assert scales.dtype == torch.float32
    assert scales.shape == (5, 1)
    wide = matrix.double() / scales.double()
    nearest = (wide.unsqueeze(-1) - every).abs().amin(-1)
    torch.testing.assert_close((wide - codes.double()).abs(), nearest, rtol=1e-5, atol=1e-4)
    assert (codes.double().abs().amax(-1) == LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS.values())
def test_zeros_stay_zeros(dtype):
    matrix = pruned(32, 64).weight.detach().clone()
    matrix[4] = 0
    codes, scales = quantize_rows(matrix, dtype)
    assert (codes.float()[matrix == 0] == 0).all()
    assert scales[4] == 1
    assert not misfit(codes.float())


def test_scales_come_back_by_row_and_token():
    generator = torch.Generator().manual_seed(2)
    sums, tokens, rows = (torch.randn(shape, generator=generator) for shape in ((3, 4), (3, 1), (4, 1)))
    bias = torch.randn(4, generator=generator)
    found = rescaled(sums, tokens, rows, bias, torch.float32)
    for t, r in itertools.product(range(3), range(4)):
        assert found[t, r] == pytest.approx(float(sums[t, r] * tokens[t] * rows[r] + bias[r]), rel=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_layers_multiply_their_codes_exactly(backend, bias):
    """Against integer arithmetic in float64, token by token; and a compiled graph gives the same."""
    layer = pruned(32, 128, bias=bias)
    weight = layer.weight.detach().clone()
    packed_by(backend, layer, quantize="int8")
    x = torch.randn(3, 5, 128, dtype=torch.bfloat16)
    x[1, 2] = 0
    w_codes, w_scales = quantize_rows(weight, torch.int8)
    x_codes, x_scales = quantize_rows(x, torch.int8)
    wanted = (x_codes.double() @ w_codes.double().t()) * x_scales.double() * w_scales.double().t()
    wanted = wanted if layer.bias is None else wanted + layer.bias.double()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for run in (layer, compiled):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                torch.testing.assert_close(run(x).double(), wanted, rtol=2**-8, atol=1e-30)
    assert layer.packed.dtype == torch.int8
    assert backend.calls[-1][0] == (16, 128)


def test_quantized_layers_report_what_rounding_cost(backend):
    model = chain(pruned(32, 128))
    before = copy.deepcopy(model)
    weight = model[0].weight.detach().double()
    packed_by(backend, model, quantize="int8")
    (layer,) = mts.semi_structured_report(model).layers
    back = model[0].unpacked().double()
    rounded = relative_squared_error(back, weight)
    assert layer.weight_error == pytest.approx(rounded, rel=0.1)  # the report's is before rounding to bfloat16
    assert layer.weight_error is not None
    assert layer.output_error is not None
    assert 0 < layer.weight_error < 1e-3
    x = torch.randn(4096, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = before[0].double()(x.double())
        found = relative_squared_error(model(x), wanted)
    assert layer.output_error == pytest.approx(found, rel=0.2)
    assert layer.output_error > layer.weight_error / 2
    assert (layer.packed_dtype, layer.dtype) == ("int8", "bfloat16")
    scales = 32 * 4
    assert layer.bytes == 32 * 128 * 10 // 16 + scales
    assert not misfit(back)


def test_quantized_layers_are_not_saved_and_come_back_rounded(backend):
    model = packed_by(backend, chain(pruned(32, 128)), quantize="int8")
    with pytest.raises(ValueError, match=r"0.weight is quantized for this GPU alone and is not saved: save the model"):
        model.state_dict()
    rounded = model[0].unpacked()
    with pytest.raises(ValueError, match=r"cannot become torch\.float16"):
        model.half()
    model.to(torch.bfloat16)
    assert model[0].scales.dtype == torch.float32
    mts.to_dense(model)
    assert_bits(model[0].weight, rounded)
    codes, scales = quantize_rows(pruned(32, 128).weight, torch.int8)
    assert_bits(rounded, (codes.float() * scales).to(torch.bfloat16))


def test_gradients_do_not_slip_through_a_quantized_layer(backend):
    layer = packed_by(backend, pruned(32, 128), quantize="int8")
    x = torch.randn(2, 128, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward pass"):
        layer(x).sum().backward()


def test_relative_squared_error_by_hand():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_squared_error(torch.tensor([3.0, 3.0]), wanted) == pytest.approx(1 / 25)
    assert relative_squared_error(wanted, wanted) == 0
    assert relative_squared_error(torch.zeros(2), torch.zeros(2)) == 0


# the report ---------------------------------------------------------------------------------------------------------


def test_the_report_says_everything_as_text_and_as_json(backend, blas):
    model = chain(pruned(32, 64), pruned(64, 128, bias=False), nn.Linear(128, 64, dtype=torch.bfloat16))
    convert.convert(model, Settings.of({"tune": (1, 64)}), lambda device: timed_place(backend, Stopwatch(**TABLE)))
    text = str(mts.semi_structured_report(model))
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "shape", "runs", "MiB", "us", "at", "1", "us", "at", "64", "notes"]
    assert " ".join(lines[2].split()) == "0 32 x 64 2:4 0.0 -> 0.0 10.0 -> 9.0 8.0 -> 5.0"
    assert "stays dense: 2 (not 2:4: row 0 has 4 nonzeros in columns 0 to 3; 64 of 64 rows break the pattern)" in text
    assert "2 of 3 layers run 2:4 on a CPU, weights 0.0 -> 0.0 MiB." in text
    assert "us: microseconds of a call, dense -> 2:4, each with its fastest library or algorithm; timed eager." in text
    report = mts.semi_structured_report(model)
    read = json.loads(report.to_json())
    again = mts.SpeedReport.from_dict(read)
    assert again.layers == report.layers
    assert str(again) == text
    assert json.loads(again.to_json()) == read
    assert read["layers"][0]["timings"][0]["algorithm"] == [0, 1, -1]
    assert read["versions"]["torch"] == torch.__version__
    assert read["settings"]["tune"] == [1, 64]


def test_the_report_says_when_nothing_was_timed(backend):
    model = packed_by(backend, chain(pruned(32, 128)), quantize="int8")
    text = str(mts.semi_structured_report(model))
    assert "Not timed: 2:4 may be slower here. Name the token counts that matter with tune=." in text
    assert "2:4 int8" in text
    assert "Errors: ||A - B||^2 / ||B||^2 against the unquantized layer; outputs on normal inputs." in text


def test_negative_zeros_are_told(backend):
    model = chain(pruned(32, 64))
    with torch.no_grad():
        model[0].weight[3, 5] = -0.0
    packed_by(backend, model)
    assert mts.semi_structured_report(model).layers[0].notes == ("1 weights were -0.0 and are +0.0 now",)


def test_operators_take_choices_as_numbers():
    assert as_numbers((Choice(8, True, OTHER), Choice(64, False))) == [8, 1, 3, 4, 2, 64, 0, 0, 1, -1]
