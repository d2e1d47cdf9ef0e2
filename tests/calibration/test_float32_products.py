"""Layers of bfloat16 that are multiplied in float32, where the CPU has no products of bfloat16."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.methods.sparsegpt import SparseGPT
from modelopt_sparse.model import devices
from modelopt_sparse.model.devices import in_float32, multiplies_bfloat16
from modelopt_sparse.model.forwards import has_own_forward
from tests.helpers import assert_same_state, refused, state_of, tiny_llama, token_batches

TEXT = {"data_loader": token_batches(), "progress": False}


@pytest.fixture
def without_products(monkeypatch):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: False)


class Products(torch.overrides.TorchFunctionMode):
    """The dtypes of the weights that F.linear is called with. ``wide``: it multiplies bfloat16 in float32 itself."""

    def __init__(self, *, wide: bool = False):
        super().__init__()
        self.wide, self.dtypes = wide, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.dtypes.add(args[1].dtype)
            if self.wide and args[1].dtype == torch.bfloat16:
                return func(*(x if x is None else x.float() for x in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


CAPABILITIES = [
    ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
    ({"avx2": True, "avx512_bf16": True}, True),
    ({"amx_bf16": True}, True),
    ({"sve": True, "sve_bf16": True}, True),
    ({"neon": True, "bf16": False}, False),
]


@pytest.mark.parametrize(("capabilities", "expected"), CAPABILITIES)
def test_the_cpu_is_asked(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_bfloat16() is expected


def test_a_module_runs_in_float32_and_ends_as_it_was():
    torch.manual_seed(0)
    layer = nn.Linear(64, 16).bfloat16()
    weight, values, x = layer.weight, layer.weight.data_ptr(), torch.randn(3, 64).bfloat16()
    with in_float32([layer]), in_float32([layer]), torch.no_grad(), Products() as seen:
        output = layer(x)
        assert seen.dtypes == {torch.float32}
        assert layer.weight is weight
        assert layer.weight.dtype == torch.bfloat16
        assert not has_own_forward(layer, nn.Linear)
        with torch.enable_grad():
            layer(x).sum().backward()
        assert seen.dtypes == {torch.float32, torch.bfloat16}
    assert torch.equal(output, (x.double() @ layer.weight.double().T + layer.bias.double()).float().bfloat16())
    assert weight.data_ptr() == values
    assert weight.grad.dtype == torch.bfloat16
    assert "forward" not in vars(layer)


def test_other_hooks_see_bfloat16():
    layer, seen = nn.Linear(8, 8).bfloat16(), []
    layer.register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
    with in_float32([layer]), torch.no_grad():
        layer(torch.ones(1, 8).bfloat16())
    assert seen == [(torch.bfloat16, torch.bfloat16)]


def test_layers_still_share_their_input(without_products, monkeypatch):
    """q, k and v, then o, gate and up, down: four inputs in each of the two blocks."""
    prepared, prepare = [], SparseGPT.prepare
    monkeypatch.setattr(SparseGPT, "prepare", lambda *args, **more: prepared.append(1) or prepare(*args, **more))
    mts.sparsify(tiny_llama().bfloat16(), "sparsegpt", TEXT)
    assert len(prepared) == 8


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_happens_in_a_call(error):
    class Broken(nn.Linear):
        def forward(self, input):
            raise error("in the forward")

    layer = Broken(8, 8).bfloat16()
    weight, values = layer.weight, layer.weight.data_ptr()
    with in_float32([layer]), torch.no_grad():
        refused(layer, torch.ones(1, 8).bfloat16(), match="in the forward", error=error)
        assert layer.weight.dtype == torch.bfloat16
    assert layer.weight is weight
    assert (weight.dtype, weight.data_ptr()) == (torch.bfloat16, values)


@pytest.mark.parametrize("options", [{}, {"sequential": "stage"}, {"sequential": "none"}, {"reconstruct": 1}], ids=str)
def test_a_run_in_float32(options, without_products):
    """Masks and weights are those of a run whose products someone else makes in float32."""
    model, expected = tiny_llama().bfloat16(), tiny_llama().bfloat16()
    parameters = dict(model.named_parameters())
    with Products() as seen:
        mts.sparsify(model, "sparsegpt", TEXT, **options)
    assert torch.float32 in seen.dtypes
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    if "reconstruct" not in options:  # it tunes in the model's precision
        with Products(wide=True):
            mts.sparsify(expected, "sparsegpt", TEXT, float32_products=False, **options)
        assert_same_state(model, state_of(expected))
        assert not mts.report(expected).notes
    note = "layers of bfloat16 are multiplied in float32 on the CPU (float32_products=False: in bfloat16)"
    assert note in mts.report(model).notes


def test_a_streamed_run_is_the_same(tmp_path, without_products):
    tiny_llama().bfloat16().save_pretrained(tmp_path / "dense")
    model = mts.sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), "sparsegpt", TEXT)
    report = mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "sparse", "sparsegpt", **TEXT)
    assert_same_state(mts.load(tmp_path / "sparse"), state_of(model))
    assert "multiplied in float32" in report.notes[0]


def test_a_run_that_fails_leaves_the_dense_model(without_products):
    model, calls = tiny_llama().bfloat16(), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with model.model.layers[1].mlp.down_proj.register_forward_hook(fail):
        refused(mts.sparsify, model, "sparsegpt", TEXT, sequential="none", error=KeyboardInterrupt)


PLANNED = [
    (False, torch.bfloat16, "wanda", {}, True),
    (False, torch.bfloat16, "magnitude", {}, False),  # nothing is multiplied
    (False, torch.bfloat16, "wanda", {"float32_products": False}, False),
    (False, torch.bfloat16, "wanda", {"autocast": "bfloat16"}, False),
    (False, torch.bfloat16, "wanda", {"device": "cuda"}, False),
    (False, torch.float32, "wanda", {}, False),
    (False, torch.float16, "wanda", {"float32_products": True}, False),
    (True, torch.bfloat16, "wanda", {}, False),
    (True, torch.bfloat16, "wanda", {"float32_products": True}, True),
]


@pytest.mark.parametrize(("cpu_has_them", "dtype", "method", "options", "expected"), PLANNED)
def test_when_the_plan_says_it(cpu_has_them, dtype, method, options, expected, monkeypatch):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: cpu_has_them)
    plan = mts.make_plan(tiny_llama().to(dtype), method, data_loader=token_batches(), **options)
    assert any("multiplied in float32" in note for note in plan.notes) is expected
    assert ("layer_in_float32" in plan.memory) is expected
    refused(mts.make_plan, tiny_llama(), "wanda", autocast="bfloat16", float32_products=True, match="keep one")


def test_memory_by_hand(without_products):
    """The largest layer in float32, and for each token the inputs and outputs of a block's layers once more."""
    model, data = tiny_llama().bfloat16(), {"num_samples": 64, "batch_size": 16, "seq_len": 64}
    plan, narrow = (mts.make_plan(model, "wanda", data, float32_products=choice) for choice in (None, False))
    layers = [layer for layer in plan.layers if layer.block == plan.layers[0].block]
    assert plan.memory["layer_in_float32"] == max(4 * layer.shape[0] * layer.shape[1] for layer in layers)
    assert plan.streamed["host"]["layer_in_float32"] == plan.memory["layer_in_float32"]
    more = 16 * 64 * 4 * sum(layer.shape[0] + layer.shape[1] for layer in layers)
    assert plan.streamed["host"]["workspace"] == narrow.streamed["host"]["workspace"] + more
