"""Packed layers of 8 bits."""

import copy
import itertools

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.runtime.kernels import LARGEST, misfit, quantize_rows, relative_squared_error, rescaled
from tests.helpers import assert_bits
from tests.runtime.unpacking import EIGHT_BITS, chain, packed_by, pruned


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
