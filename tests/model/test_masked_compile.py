"""Sparse modules under torch.compile and torch.export."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches
from tests.model.sparse_modules import (
    CASES,
    drift,
    output,
    own_deprecations,
    random_mask,
    sparse_and_dense,
    sparse_linear,
    written_on_purpose,
)
from tests.model.test_training import train

pytestmark = [written_on_purpose, own_deprecations]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module, backend: str = "aot_eager_decomp_partition") -> Callable[..., Any]:
    """Dynamo, AOTAutograd and the partitioner of the default backend, without its code generation."""
    return torch.compile(module, fullgraph=True, backend=backend)


COMPILED = ("linear", "conv2d", "hf_conv1d", "attention", "attention_separate", "own_parameter")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_modules_ignore_what_lies_under_the_mask_and_give_the_same_gradients(name: str):
    case = CASES[name]
    sparse, dense, masks = sparse_and_dense(case)
    drift(sparse)
    fast: Any = compiled(sparse)
    inputs, inputs_dense = case.inputs(), case.inputs()
    found, expected = output(fast, *inputs), output(dense, *inputs_dense)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), reference in zip(sparse.named_parameters(), dense.parameters()):
        reference = reference.grad if name not in masks else reference.grad.masked_fill(~masks[name], 0)
        torch.testing.assert_close(parameter.grad, reference)
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in inputs_dense])
    with torch._dynamo.config.patch(error_on_recompile=True):
        fast(*inputs)
    with torch.no_grad():
        drift(sparse)
        torch.testing.assert_close(output(fast, *inputs), expected)


def test_compiled_graphs_keep_no_masked_copy_for_the_backward_pass():
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))
    for index in (0, 2, 4):
        mts.set_mask(model, f"{index}.weight", random_mask(model[index].weight))
    theirs = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    shapes = {shape for _, mask in mts.named_masks(model) for shape in (mask.shape, mask.shape[::-1])}
    fast, x = compiled(model), torch.randn(5, 16)
    fast(x)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = fast(x).sum()
    like_weights = [t for t in saved if t.shape in shapes]
    assert like_weights
    assert all(t.untyped_storage().data_ptr() in theirs for t in like_weights)
    loss.backward()
    assert model[2].weight.grad.any()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its new name is newer than 5.0
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_llama_trains_and_keeps_its_zeros(checkpointed: bool):
    model = tiny_llama(num_hidden_layers=1)
    mts.sparsify(model, "magnitude", progress=False)
    eager = copy.deepcopy(model)
    if checkpointed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for each, run in ((model, compiled(model)), (eager, eager)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)

        def loss(_, ids, run=run):
            return run(input_ids=ids, labels=ids, use_cache=False).loss

        losses.append(train(each, optimizer, 3, loss, tuple(token_batches(1))))
    assert losses[0][2] < 0.9 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_default_compiler_backend_trains_and_keeps_zeros():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    for index in (0, 2):
        mts.set_mask(model, f"{index}.weight", random_mask(model[index].weight))
    fast, data = torch.compile(model, fullgraph=True), (torch.randn(16, 8), torch.randn(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, 10, lambda _, x, target: F.mse_loss(fast(x), target), data)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_masks_its_weights(strict: bool):
    module, _ = sparse_linear()
    program = torch.export.export(module, (torch.ones(1, 8),), strict=strict)
    expected = module(torch.ones(1, 8))
    drift(module)
    torch.testing.assert_close(program.module()(torch.ones(1, 8)), expected)


def test_export_to_onnx_with_masks_warns_that_weights_are_no_constants(tmp_path):
    """Plain weights are, and come without a word."""
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    mts.sparsify(model, "magnitude", pattern="2:4")
    options = {"dynamo": True, "external_data": False, "verbose": False}
    for exported in (False, True):
        if exported:
            mts.export(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.onnx.export(model, (torch.randn(2, 16),), tmp_path / "model.onnx", **options)
        said = [str(each.message) for each in caught if "sparse SparseLinear" in str(each.message)]
        assert bool(said) is not exported
        assert all("not constants: give mts.export(model)" in each for each in said)
