"""2:4 execution on a GPU: kernels, algorithms, compiled and captured graphs, memory. `pytest -m gpu` runs them.

What a CPU can show is in test_runtime.py.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.runtime.kernels import BACKENDS, Backend, SemiStructuredLinear, choose_backend, pack
from tests.helpers import assert_bits, tiny_llama, token_batches
from tests.runtime.unpacking import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # inductor's advice about float32 products, of which there are a few in the checks
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

# the compiler has advice for many a small graph
QUIET = pytest.mark.filterwarnings("ignore::UserWarning")
DEVICE = torch.device("cuda:0")
SHAPES = [(32, 64), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)]
TOKENS = [0, 1, 3, 8, 17, 64, 1000]


@pytest.fixture(params=list(BACKENDS))
def backend(request) -> Backend:
    if reason := BACKENDS[request.param].unavailable(DEVICE):
        pytest.skip(f"{request.param}: {reason}")
    return BACKENDS[request.param]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def pruned(rows: int, columns: int, dtype=torch.bfloat16, bias: bool = True) -> Any:
    """A Linear [rows, columns] on the GPU whose weight is 2:4."""
    generator = torch.Generator(DEVICE).manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator, device=DEVICE) / columns**0.5
    layer = nn.Linear(columns, rows, bias=bias, device=DEVICE, dtype=dtype).eval().requires_grad_(False)
    layer.weight.copy_(weight.masked_fill(~mts.NM(2, 4).mask(weight.abs()), 0))
    return layer


def llama(**changes) -> Any:
    model: Any = tiny_llama(
        hidden_size=256, intermediate_size=512, num_key_value_heads=4, initializer_range=0.05, **changes
    )
    model = mts.export(mts.sparsify(model.to(torch.bfloat16), "magnitude", pattern="2:4", progress=False))
    return model.to(DEVICE)


def assert_as_good_as_dense(found, x, layer) -> None:
    """No further from the exact product than the dense kernel is, but for a factor of two."""
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.linear(x.double(), layer.weight.double(), bias)
    dense = F.linear(x, layer.weight, layer.bias)
    assert found.shape == exact.shape
    assert found.dtype == dense.dtype
    if exact.numel():
        allowed = 2 * (dense.double() - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (found.double() - exact).abs().max() <= allowed


def relative_squared_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    distance = (actual.double() - wanted.double()).square().sum()
    return float(distance / wanted.double().square().sum())


# packing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights_come_back_bit_for_bit(backend, shape, dtype):
    weight = pruned(*shape, dtype=dtype).weight
    packed, metadata = pack(weight, backend)
    assert_bits(backend.unpack(packed, metadata, shape[1]), weight)
    size = packed.nbytes + (0 if metadata is None else metadata.nbytes)
    assert size >= weight.nbytes * 9 // 16
    if min(shape) >= 1024:  # small weights are rounded up
        assert size == pytest.approx(weight.nbytes * 9 / 16, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_come_back(backend, dtype):
    """The largest and the smallest normal numbers, in every place of a group."""
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, -info.tiny, info.tiny * 2, -info.max * 0.5], dtype=dtype, device=DEVICE)
    weight = torch.zeros(128, 128, dtype=dtype, device=DEVICE)
    for place in range(4):
        weight[place::4, place::4] = values[place]
        weight[place::4, (place + 1) % 4 :: 4] = values[place - 1]
    packed, metadata = pack(weight, backend)
    assert_bits(backend.unpack(packed, metadata, 128), weight)


# products -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_those_of_the_dense_layer(backend, dtype, bias, tokens):
    for shape in SHAPES:
        layer = pruned(*shape, dtype=dtype, bias=bias)
        dense = copy.deepcopy(layer)
        mts.to_semi_structured(layer, backend=backend.name, tune=None, strict=True)
        x = torch.randn(tokens, shape[1], dtype=dtype, device=DEVICE)
        with torch.inference_mode():
            assert_as_good_as_dense(layer(x), x, dense)


def test_any_layout_of_inputs(backend):
    layer = pruned(256, 512)
    dense = copy.deepcopy(layer)
    mts.to_semi_structured(layer, backend=backend.name, tune=None)
    x = torch.randn(4, 6, 512, dtype=torch.bfloat16, device=DEVICE)
    layouts = [x.transpose(0, 1), x[:, ::2], x[1:, 3], x[0, 0], x[:, :1].expand(-1, 5, -1), x.unflatten(1, (2, 3))]
    layouts.append(torch.randn(513 * 8, dtype=torch.bfloat16, device=DEVICE)[1 : 1 + 512 * 8].view(8, 512))  # unaligned
    for given in layouts:
        with torch.no_grad():
            out = layer(given)
        assert out.is_contiguous()
        assert_as_good_as_dense(out, given, dense)


def test_every_algorithm_that_the_search_finds_gives_the_product(backend):
    for shape in SHAPES[1:]:
        dense = pruned(*shape)
        packed, metadata = pack(dense.weight, backend)
        for tokens in (8, 64, 2048):
            x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=DEVICE)
            for algorithm in backend.search(packed, metadata, x, dense.bias):
                out = backend.multiply(packed, metadata, x, dense.bias, algorithm)
                assert_as_good_as_dense(out, x, dense)


def test_a_model_gives_the_logits_of_its_dense_form_and_comes_back(backend):
    model, (tokens,) = llama(), token_batches(1)
    tokens = tokens.to(DEVICE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(tokens).logits
        mts.to_semi_structured(model, backend=backend.name, tune=None)
        found = model(tokens).logits
    assert len(mts.semi_structured_report(model).packed) == 14
    assert relative_squared_error(found, wanted) < 1e-2
    for name, tensor in model.state_dict().items():
        assert_bits(tensor.cpu(), before[name].cpu())
    mts.to_dense(model)
    for name, tensor in model.state_dict().items():
        assert_bits(tensor, before[name])
    with torch.no_grad():
        assert_bits(model(tokens).logits, wanted)


# graphs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@QUIET
def test_compiled_graphs_give_the_same(backend, mode):
    layer = pruned(256, 512)
    mts.to_semi_structured(layer, backend=backend.name, tune=None)
    model = nn.Sequential(layer, nn.GELU())
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for tokens in (8, 3, 3, 64, 8):
        x = torch.randn(2, tokens, 512, dtype=torch.bfloat16, device=DEVICE)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=2**-7, atol=2**-9)


def _captured(layer: nn.Module, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode():
        layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = layer(x)
    return graph, out


@pytest.mark.parametrize("tokens", [1, 64])
def test_captured_graphs_replay_on_new_inputs(backend, tokens):
    layer = pruned(256, 512)
    mts.to_semi_structured(layer, backend=backend.name, tune=None)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device=DEVICE)
    graph, out = _captured(layer, x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        with torch.inference_mode():
            assert_bits(out, layer(x))


def test_autocast_and_gradients(backend):
    layer = pruned(256, 512)
    mts.to_semi_structured(layer, backend=backend.name, tune=None)
    x = torch.randn(8, 512, device=DEVICE)
    with torch.no_grad():
        wanted = layer(x.bfloat16())
        with torch.autocast("cuda", torch.bfloat16):
            assert_bits(layer(x), wanted)
    with pytest.raises(RuntimeError, match="no backward pass"):
        layer(x.bfloat16().requires_grad_()).sum().backward()


# memory, moves and copies -------------------------------------------------------------------------------------------


def test_memory_falls_by_seven_sixteenths(backend):
    model = nn.Sequential(*(pruned(4096, 4096, bias=False) for _ in range(4)))
    torch.cuda.synchronize()
    before, dense = torch.cuda.memory_allocated(), 4 * 4096 * 4096 * 2
    mts.to_semi_structured(model, backend=backend.name, tune=None)
    freed = before - torch.cuda.memory_allocated()
    assert freed == pytest.approx(dense * 7 / 16, rel=0.01)
    report = mts.semi_structured_report(model)
    assert report.dense_bytes - report.bytes == pytest.approx(freed, rel=0.01)


def test_loading_never_holds_the_dense_model_on_the_gpu(tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    model: Any = tiny_llama(num_hidden_layers=24, initializer_range=0.02, **shape)
    mts.save(mts.sparsify(model.to(torch.bfloat16), "magnitude", progress=False), tmp_path / "sparse")
    size = sum(parameter.nbytes for parameter in model.parameters())
    probe = torch.zeros(64, 64, dtype=torch.bfloat16, device=DEVICE)  # whatever libraries allocate once
    pack(probe, choose_backend(DEVICE))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    loaded = mts.load(tmp_path / "sparse", semi_structured={"tune": None}, device_map="cuda:0")
    assert torch.cuda.max_memory_allocated() - start < 0.85 * size
    assert {tensor.device for tensor in [*loaded.parameters(), *loaded.buffers()]} == {DEVICE}
    assert len(mts.semi_structured_report(loaded).packed) == 168
    (tokens,) = token_batches(1)
    with torch.no_grad():
        wanted = mts.export(mts.load(tmp_path / "sparse", device_map="cuda:0"))(tokens.to(DEVICE)).logits
        assert relative_squared_error(loaded(tokens.to(DEVICE)).logits, wanted) < 1e-2


def test_packed_layers_stay_on_their_device(backend):
    layer = pruned(64, 128)
    mts.to_semi_structured(layer, backend=backend.name, tune=None)
    for change in (layer.cpu, layer.half, layer.float):
        with pytest.raises(ValueError, match=r"packed 2:4 in torch.bfloat16 on cuda:0 cannot become .*to_dense"):
            change()
    copied = copy.deepcopy(layer).cuda().bfloat16()
    x = torch.randn(8, 128, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        assert_bits(copied(x), layer(x))
    assert layer.weight.device == DEVICE


def test_layers_on_the_cpu_are_left_there_with_the_reason():
    model = nn.Sequential(pruned(64, 128), pruned(64, 64).cpu())
    mts.to_semi_structured(model, tune=None)
    assert [layer.reason for layer in mts.semi_structured_report(model).layers] == ["", "on cpu, not on a CUDA device"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_layer_is_packed_for_its_device():
    model = nn.Sequential(pruned(64, 128), pruned(64, 64).to("cuda:1"))
    dense = copy.deepcopy(model)
    mts.to_semi_structured(model, tune=None)
    x = torch.randn(8, 128, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        hidden = model[0](x)
        assert_as_good_as_dense(hidden, x, dense[0])
        assert_as_good_as_dense(model[1](hidden.to("cuda:1")), hidden.to("cuda:1"), dense[1])


# tuning -------------------------------------------------------------------------------------------------------------


def test_tuning_follows_its_rule_and_leaves_the_library_alone():
    counts = (1, 64, 2048)
    model = nn.Sequential(pruned(1024, 4096), nn.ReLU(), pruned(14336, 1024))
    dense = copy.deepcopy(model)
    before = torch.backends.cuda.preferred_blas_library()
    mts.to_semi_structured(model, tune=counts)
    assert torch.backends.cuda.preferred_blas_library() == before
    report = mts.semi_structured_report(model)
    print(report)
    for layer in report.layers:
        assert [timed.tokens for timed in layer.timings] == list(counts)
        assert all(1e-7 < seconds < 1 for timed in layer.timings for seconds in (timed.dense, timed.sparse))
        wins = all(timed.speedup >= 1.05 for timed in layer.timings)
        assert layer.runs == ("2:4" if wins else "dense")
        assert type(model.get_submodule(layer.name)) is (SemiStructuredLinear if wins else nn.Linear)
    with torch.no_grad():
        for tokens in (1, 7, 64, 100, 2048, 3000):
            x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device=DEVICE)
            assert_as_good_as_dense(model[0](x), x, dense[0])
