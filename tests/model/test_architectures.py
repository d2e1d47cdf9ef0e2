"""Every architecture of tests/models/architectures.py: what is pruned, what each layer is calibrated on, what stays."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import modelopt_sparse as mts
from tests.helpers import Snapshot, plain_from_pretrained, refused
from tests.models.architectures import ARCHITECTURES
from tests.oracles.brute_force import Recording, assert_stats, brute_force, call_model, matrices_of, stepwise

pytestmark = pytest.mark.core

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def sparsified(name: str, method="sparsegpt", side: str = "right", **options) -> nn.Module:
    """Every expert of a mixture is solved with the tokens that are routed to it, however few."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    options = {"data_loader": architecture.batches(side), "min_tokens": 1, "progress": False, **options}
    whole = architecture.repeats and options.get("sequential") == "none"
    with pytest.warns(UserWarning, match="calibrated through the whole model") if whole else nullcontext():
        mts.sparsify(model, method, **options)
    return model


def built(name: str) -> tuple[Any, nn.Module, list[str]]:
    """An architecture of the table, a dense model of it, and the names of its blocks."""
    architecture = ARCHITECTURES[name]
    dense = architecture.build()
    return architecture, dense, architecture.block_names(dense)


def recorded(name: str, side: str = "right", **options) -> tuple[nn.Module, Any]:
    """A sparse model, and what each layer was solved with."""
    (_, dense, blocks), method = built(name), Recording()
    return sparsified(name, method, side, **options), method.by_layer(matrices_of(dense, blocks))


@every_architecture
def test_the_stacks_are_the_blocks_of_the_table(name):
    """One after the other, in the order of the model, and nothing beside them."""
    _, model, blocks = built(name)
    stacks = mts.make_plan(model, "magnitude").stacks
    assert [block for stack in stacks for block in stack.names] == blocks


# statistics ---------------------------------------------------------------------------------------------------------


@every_architecture
@pytest.mark.parametrize("side", ["left", "right"])
def test_grams_of_the_dense_model(name, side):
    """With sequential="none" each layer's statistics are those of plain hooks on the untouched model."""
    architecture, dense, blocks = built(name)
    _, found = recorded(name, side, sequential="none")
    assert_stats(found, brute_force(dense, architecture.batches(side), blocks, architecture.real))


@every_architecture
def test_grams_of_the_half_sparse_model_and_which_layers_share_them(name):
    """With sequential="block" they are those of the model with the blocks before it sparse and the others dense.

    Layers that get one input share one Stats object, and no others do: one block's statistics end with it, and a
    convolution's input counts with its window."""
    architecture, dense, blocks = built(name)
    sparse, stats = recorded(name, "left", sequential="block")
    batches = architecture.batches("left")
    inputs = brute_force(dense, batches, blocks).inputs
    block_of = {layer: block for block in blocks for layer in matrices_of(dense, [block])}
    for one in stats:
        for other in stats:
            same = inputs[one] == inputs[other] and block_of[one] == block_of[other]
            assert (stats[one] is stats[other]) == same, (one, other)
    assert_stats(stats, stepwise(dense, sparse, batches, [[block] for block in blocks], architecture.real))


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in ARCHITECTURES), ("llama", "float16")])
def test_grams_under_autocast(name, dtype):
    """They are those of the dense model run under it, and float32. What lies behind an attention or a mixture that is
    one module, the oracle computes in another precision."""
    behind_one_module = name in ("mixtral", "transformer_encoder", "multihead_attention")
    architecture, dense, blocks = built(name)
    _, found = recorded(name, sequential="none", autocast=dtype)

    def call(model: nn.Module, batch: Any) -> None:
        with torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False):
            call_model(model, batch)

    batches = architecture.batches("right")
    seen = [brute_force(dense, batches, blocks, architecture.real, each) for each in (call, call_model)]
    assert {stats.gram.dtype for stats in found.values() if stats.gram is not None} == {torch.float32}
    assert_stats(found, seen[0], tolerance=2e-2 if behind_one_module else 1e-5)
    refused(assert_stats, found, seen[1], error=AssertionError)


# what is pruned, and what stays -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # nn.TransformerEncoder's own
@every_architecture
def test_every_eligible_weight_of_the_blocks_is_sparse_and_the_folder_loads_into_the_plain_model(name, tmp_path):
    """Every matrix in a block has two nonzeros in each four; stems, heads, embeddings and routers keep every bit. The
    plain model gives the same output."""
    architecture, dense, blocks = built(name)
    sparse = sparsified(name, "wanda")
    for layer, matrix in matrices_of(sparse, blocks).items():
        assert bool(((matrix != 0).unflatten(-1, (-1, 4)).sum(-1) == 2).all()), layer
    planned = {layer.parameter for layer in mts.report(sparse).layers}
    whole = ("in_proj_weight", "experts.gate_up_proj", "experts.down_proj")  # layers named by their parameter
    assert {layer if layer.endswith(whole) else f"{layer}.weight" for layer in matrices_of(dense, blocks)} == planned
    parameters = dict(sparse.named_parameters())
    for key, weight in dense.named_parameters():
        if key in planned:
            continue
        assert torch.equal(parameters[key], weight), key
        if weight.dim() >= 2 and any(key.startswith(f"{block}.") for block in blocks):
            assert any(key.endswith(end) for end in architecture.dense), key
    mts.save(sparse, tmp_path / "sparse")
    if isinstance(sparse, PreTrainedModel):
        plain = plain_from_pretrained(tmp_path / "sparse", type(architecture.make()))
    else:
        plain = architecture.make()
        plain.load_state_dict(load_file(tmp_path / "sparse" / "model.safetensors"))
    plain = copy.deepcopy(plain).eval()  # a file's tensors lie at odd addresses, where kernels round differently
    for batch in architecture.batches("right"):
        with torch.no_grad():
            expected, found = sparse(**batch), plain(**batch)
        if not isinstance(expected, Tensor):
            expected, found = expected[0], found[0]
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # nn.TransformerEncoder's own
@every_architecture
def test_the_model_comes_back_as_it_was(name):
    """Parameter objects, ties, flags, modes, caches, dtypes and hooks are the same, one by one."""
    architecture, model, _ = built(name)
    model(**architecture.batches("right")[0])  # in the first call transformers installs hooks of its own in some models
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 0)
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = True
    before, modules = Snapshot(model).look, list(model.modules())
    mts.sparsify(model, "sparsegpt", data_loader=architecture.batches("right"), progress=False)
    after = Snapshot(model).look
    for key, value in before.items():
        if key[0] in ("switches", "flags", "parameter"):
            assert after[key] == value, key
        if key[0] == "tensor":  # its values may be others, its holder, dtype, shape and requires_grad are not
            assert after[key][:2] == value[:2], key
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))
    assert all(parameter.is_leaf and parameter.grad is None for parameter in model.parameters())
