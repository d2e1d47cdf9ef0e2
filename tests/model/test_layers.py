"""Weights as matrices and inputs as rows: ``rows @ matrix(weight).T`` must be what the module itself computes; which
layers a model has, and where its stacks are, beside the architectures of test_architectures.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.model.find import find_layers, find_stacks
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import set_mask
from tests.helpers import tiny_llama


def only_layer(module: nn.Module) -> Layer:
    layers, others = find_layers(module)
    assert (len(layers), len(others)) == (1, 0)
    return layers[0]


def layer_named(model: nn.Module, name: str) -> Layer:
    return next(layer for layer in find_layers(model)[0] if layer.name == name)


def rows_of(layer: Layer, *args: Tensor, keep: Tensor | None = None, **kwargs: Tensor) -> Tensor:
    """All rows of one call of the hooked module, [..., T, C]."""
    observed = layer.hooked_modules[0]
    with torch.no_grad():
        inputs = layer.adapter.inputs(observed, args, kwargs)
        chunks = list(layer.adapter.rows(layer.owner, inputs, [keep] * len(inputs)))
    return torch.cat(chunks, dim=-2)


def product(layer: Layer, rows: Tensor) -> Tensor:
    """rows @ matrix^T: [..., T, R]."""
    return rows @ layer.matrix(layer.parameter.detach()).mT


# linear layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 4), lambda: Conv1D(4, 6)], ids=["Linear", "HF Conv1D"])
def test_rows_times_the_matrix_is_the_output_of_a_linear_layer(build, as_keyword):
    module, x = build(), torch.randn(2, 3, 6)
    layer = only_layer(module)
    assert layer.matrix(layer.parameter).shape == (4, 6)
    name = "x" if isinstance(module, Conv1D) else "input"
    rows = rows_of(layer, **{name: x}) if as_keyword else rows_of(layer, x)
    torch.testing.assert_close(product(layer, rows) + module.bias, module(x).flatten(0, -2))


# convolutions --------------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (9,)),
    "1d padded": (nn.Conv1d(4, 6, 3, padding=2), (9,)),
    "1d strided": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (9,)),
    "1d dilated": (nn.Conv1d(4, 6, 3, dilation=3), (9,)),
    "1d same, even kernel": (nn.Conv1d(4, 6, 4, padding="same"), (9,)),
    "1d grouped": (nn.Conv1d(4, 6, 3, groups=2), (9,)),
    "1d replicate": (nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate"), (9,)),
    "2d": (nn.Conv2d(4, 6, (3, 2)), (7, 6)),
    "2d pointwise": (nn.Conv2d(4, 6, 1), (7, 6)),
    "2d padded on two sides": (nn.Conv2d(4, 6, (3, 2), padding=(1, 2)), (7, 6)),
    "2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (7, 6)),
    "2d same": (nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(2, 1)), (7, 6)),
    "2d same, reflected": (nn.Conv2d(4, 6, (3, 4), padding="same", padding_mode="reflect"), (7, 6)),
    "2d reflected": (nn.Conv2d(4, 6, (3, 2), padding=(1, 2), padding_mode="reflect"), (7, 6)),
    "2d circular": (nn.Conv2d(4, 6, (3, 2), padding=(2, 1), padding_mode="circular"), (7, 6)),
    "2d strided and dilated": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), dilation=(2, 1), padding=1), (9, 8)),
    "2d grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2), (7, 6)),
    "2d depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (7, 6)),
    "2d without bias": (nn.Conv2d(4, 6, 3, bias=False), (7, 6)),
    "3d": (nn.Conv3d(4, 6, (2, 3, 2)), (4, 5, 6)),
    "3d of everything": (nn.Conv3d(4, 6, (2, 3, 2), (1, 2, 1), (1, 0, 2), dilation=(1, 2, 1), groups=2), (4, 7, 6)),
}
every_convolution = pytest.mark.parametrize("name", CONVOLUTIONS)


@every_convolution
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch, of its own forward
def test_rows_times_the_matrix_is_the_output_of_a_convolution(name, batched):
    conv, positions = CONVOLUTIONS[name]
    x = torch.randn(2, 4, *positions) if batched else torch.randn(4, *positions)
    layer = only_layer(conv)
    found = product(layer, rows_of(layer, x))  # [groups, T, R / groups] or [T, R]
    found = found.movedim(0, -2).flatten(-2) if conv.groups > 1 else found
    bias = torch.zeros(conv.out_channels) if conv.bias is None else conv.bias
    output = conv(x if batched else x.unsqueeze(0)).detach()
    torch.testing.assert_close(found + bias, output.movedim(1, -1).flatten(0, -2), rtol=1e-5, atol=1e-5)


@every_convolution
def test_a_group_of_m_lies_along_input_channels_at_one_kernel_position(name):
    conv, _ = CONVOLUTIONS[name]
    layer = only_layer(conv)
    per_group = conv.in_channels // conv.groups
    assert layer.columns(layer.parameter) == per_group
    if per_group % 2:
        return
    mask = layer.unmatrix(NM(1, 2).mask(layer.matrix(layer.parameter.detach()).abs()))
    assert mask.shape == conv.weight.shape
    assert (mask.unflatten(1, (-1, 2)).sum(2) == 1).all()


def test_long_inputs_come_in_chunks_that_are_the_same_rows():
    conv = nn.Conv1d(2, 2, 3)
    x = torch.randn(3, 2, 2_000_000)  # 12 million unfolded values per sample, 16 million per chunk
    chunks = list(only_layer(conv).adapter.rows(conv, (x,), [None]))
    assert [len(chunk) for chunk in chunks] == [1_999_998] * 3
    assert torch.equal(chunks[1][5], x[1, :, 5:8].T.flatten())


def test_convolutions_that_read_their_input_differently_share_no_statistics():
    plain = nn.Conv2d(4, 6, 3)
    ways: list[dict[str, Any]] = [{"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": 1}, {"padding": "same"}]
    ways.append({"padding": 1, "padding_mode": "reflect"})
    different = [nn.Conv2d(4, 6, 5), *(nn.Conv2d(4, 6, 3, **way) for way in ways)]
    signatures = [only_layer(conv).adapter.signature(conv) for conv in [plain, *different]]
    assert len(set(signatures)) == len(signatures)
    assert only_layer(nn.Conv2d(4, 9, 3)).adapter.signature(nn.Conv2d(4, 9, 3)) == signatures[0]


# round trips ---------------------------------------------------------------------------------------------------------

ATTENTION = {
    "packed": nn.MultiheadAttention(8, 2),
    "packed, no bias": nn.MultiheadAttention(8, 2, bias=False),
    "separate": nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
}
MODULES = [nn.Linear(6, 4), Conv1D(4, 6), *(conv for conv, _ in CONVOLUTIONS.values()), *ATTENTION.values()]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_a_matrix_goes_back_to_exactly_the_weight_it_came_from(module):
    for layer in find_layers(module)[0]:
        weight = torch.randn_like(layer.parameter)
        back = layer.unmatrix(layer.matrix(weight).contiguous())  # as a solver gives it
        assert torch.equal(back, weight)
        assert back.is_contiguous()


# attention -----------------------------------------------------------------------------------------------------------


ATTENTION_CALLS = [({}, "self"), ({"bias": False}, "self"), ({}, "cross"), ({}, "three")]
ATTENTION_CALLS += [({"kdim": 6, "vdim": 6}, "cross"), ({"kdim": 6, "vdim": 4}, "three")]
ATTENTION_CALLS += [({"kdim": 6, "vdim": 4, "bias": False}, "three")]


@pytest.mark.parametrize(("settings", "kind"), ATTENTION_CALLS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("as_keywords", [False, True])
def test_rows_of_attention_are_its_arguments_and_give_its_output(settings, kind, batch_first, as_keywords):
    """In the order of the tensors as they were given; out_proj's give the output."""
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first, **settings).eval()
    if module.out_proj.bias is not None:
        nn.init.normal_(module.out_proj.bias)
    q, k, v = (torch.randn(*lead, width) for lead, width in (((2, 5), 8), ((2, 3), module.kdim), ((2, 3), module.vdim)))
    given = {"self": (q, q, q), "cross": (q, k, k), "three": (q, k, v)}[kind]
    if not module.batch_first:  # one tensor stays one tensor
        turned = {id(x): x.transpose(0, 1) for x in given}
        given = tuple(turned[id(x)] for x in given)
    args, kwargs = ((), dict(zip(("query", "key", "value"), given))) if as_keywords else (given, {})
    rows = {layer.name: rows_of(layer, *args, **kwargs) for layer in find_layers(module)[0]}
    flat = [x.flatten(0, 1) for x in given]
    if kind == "self":
        assert torch.equal(rows["in_proj_weight"], flat[0])
    elif "kdim" not in settings:  # [3, T, E], shorter ones padded by zeros
        padded = [nn.functional.pad(x, (0, 0, 0, len(flat[0]) - len(x))) for x in flat]
        assert torch.equal(rows["in_proj_weight"], torch.stack(padded))
    else:
        assert all(torch.equal(rows[f"{letter}_proj_weight"], x) for letter, x in zip("qkv", flat))
    if module.in_proj_weight is not None:
        matrix = layer_named(module, "in_proj_weight").matrix(module.in_proj_weight)
        assert torch.equal(matrix, torch.stack(module.in_proj_weight.chunk(3)))
    output = nn.functional.linear(rows["out_proj"], module.out_proj.weight, module.out_proj.bias)
    torch.testing.assert_close(output, module(*args, **kwargs)[0].flatten(0, 1))


def test_self_attention_shares_one_set_of_rows_among_q_k_and_v():
    """Padding tokens are left out."""
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    layer, keep = layer_named(module, "in_proj_weight"), torch.tensor([[True, True, False], [True, False, False]])
    assert rows_of(layer, x, x, x).shape == (6, 8)
    assert rows_of(layer, x, x.clone(), x).shape == (3, 6, 8)
    assert layer.matrix(layer.parameter).shape == (3, 8, 8)
    assert torch.equal(rows_of(layer, x, x, x, keep=keep), x[keep])
    assert rows_of(layer_named(module, "out_proj"), x, x, x, keep=keep).shape == (3, 8)


def test_the_rows_of_out_proj_are_seen_whatever_its_own_mask_is_and_hooks_of_the_users_are():
    """And ``need_weights``, by position. An attention that is sparse already is calibrated again on what really reaches
    out_proj."""
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    layer = layer_named(module, "out_proj")
    seen = [rows_of(layer, x, x, x, None, need_weights) for need_weights in (True, False)]
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(product(layer, seen[0]) + module.out_proj.bias, module(x, x, x)[0].flatten(0, 1))
    set_mask(module, "out_proj.weight", torch.eye(8) == 0)
    torch.testing.assert_close(rows_of(layer_named(module, "out_proj"), x, x, x), seen[0])
    module.register_forward_pre_hook(lambda module, args: tuple(2 * x for x in args))
    module.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))
    torch.testing.assert_close(rows_of(layer_named(module, "out_proj"), x, x, x), seen[0])


def test_an_attention_whose_forward_is_its_own_stays_dense():
    own = {"forward": lambda self, x: x + nn.MultiheadAttention.forward(self, x, x, x)[0]}
    residual, alike = (type("Attention", (nn.MultiheadAttention,), members)(8, 2) for members in (own, {}))
    names = {"0.in_proj_weight", "0.out_proj"}
    assert {layer.name for layer in find_layers(nn.Sequential(alike))[0]} == names
    layers, others = find_layers(nn.Sequential(residual))
    assert (layers, {dense.name for dense in others}) == ([], names)
    assert all("Attention has a forward of its own" in dense.reason for dense in others)


# finding -------------------------------------------------------------------------------------------------------------


def holding(kind: str, **shapes: tuple[int, ...]) -> nn.Module:
    """A module of a class of this name that holds parameters."""
    module = type(kind, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


def test_every_weight_matrix_is_listed_once_with_its_name_or_with_a_reason():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 8),
            "linear": nn.Linear(8, 8),
            "conv": nn.Conv1d(8, 8, 3),
            "up": nn.ConvTranspose1d(8, 8, 3),
            "norm": nn.LayerNorm(8),
            "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "router": holding("Router", weight=(4, 8)),
            "experts": holding("Grouped", gate_up_proj=(4, 8, 8), down_proj=(4, 8, 4)),
            "more": holding("ParallelExperts", weight=(4, 8, 8)),
        }
    )
    layers, others = find_layers(model)
    assert [(layer.name, layer.parameter_name) for layer in layers] == [
        ("linear", "linear.weight"),
        ("conv", "conv.weight"),
        ("attention.in_proj_weight", "attention.in_proj_weight"),
        ("attention.out_proj", "attention.out_proj.weight"),
    ]
    outside = "fused experts outside of transformers' experts interface"
    assert {item.name: item.reason for item in others} == {
        "embed": "embedding",
        "up": "no adapter for ConvTranspose1d.weight",
        "attention.bias_k": "no adapter for MultiheadAttention.bias_k",
        "attention.bias_v": "no adapter for MultiheadAttention.bias_v",
        "router": "MoE router",
        "experts.gate_up_proj": f"no adapter for Grouped.gate_up_proj: {outside}",
        "experts.down_proj": f"no adapter for Grouped.down_proj: {outside}",
        "more": f"no adapter for ParallelExperts.weight: {outside}",
    }


BASES = [(nn.Linear, (6, 4), (4, 6)), (nn.Conv2d, (2, 4, 3), (4, 18)), (Conv1D, (4, 6), (4, 6))]


@pytest.mark.parametrize(("base", "sizes", "shape"), BASES)
def test_subclasses_are_layers_of_their_base_type(base, sizes, shape):
    """Whatever their forward is."""
    kind = type("Another", (base,), {"forward": lambda self, x: 2 * base.forward(self, x)})
    layers = find_layers(kind(*sizes))[0]
    assert {layer.name: layer.matrix(layer.parameter).shape for layer in layers} == {"weight": shape}


def test_linears_that_share_a_weight_are_one_layer_with_twins_and_a_module_under_two_names_has_none():
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    third.weight = first.weight
    layers, others = find_layers(nn.ModuleList([first, second, third, second]))
    assert not others
    found = [(layer.name, layer.owner, layer.tied_modules, layer.hooked_modules) for layer in layers]
    assert found == [("0", first, (third,), (first, third)), ("1", second, (), (second,))]


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_linear_tied_to_an_embedding_is_no_layer(embedding_first):
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embed": embedding, "head": head} if embedding_first else {"head": head, "embed": embedding})
    layers, others = find_layers(model)
    assert not layers
    first, second = ("embed", "head") if embedding_first else ("head", "embed")
    (item,) = others
    assert (item.name, item.shape, item.reason) == (first, (10, 4), f"tied: also held by {second}")
    assert item.names == (first, second)


UNLIKE = [(nn.Linear(4, 4), Conv1D(4, 4)), (nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, dilation=2))]


@pytest.mark.parametrize(("first", "second"), UNLIKE, ids=["transposed", "dilated"])
def test_weights_that_layers_do_not_read_alike_are_no_layer(first, second):
    """A matrix for one is the transposed matrix for the other, or meets other inputs."""
    second.weight = first.weight
    layers, others = find_layers(nn.ModuleDict({"first": first, "second": second}))
    assert (layers, [item.reason for item in others]) == ([], ["tied: also held by second"])


def test_experts_in_a_list_or_dict_know_their_fellows():
    def mlp() -> nn.Module:
        return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    lists: dict[str, nn.Module] = {name: nn.ModuleList([mlp(), mlp()]) for name in ("experts", "layers")}
    named = nn.ModuleDict({"first": mlp(), "second": mlp()})
    model = nn.ModuleDict({**lists, "more_experts": named, "shared_experts": nn.Linear(4, 8)})
    found = {layer.name: layer.mixture for layer in find_layers(model)[0]}
    assert found.pop("shared_experts") is None
    assert len(found) == 12
    for name, mixture in found.items():
        parent, _, layer = name.split(".")
        assert mixture == (None if parent == "layers" else f"{parent}.*.{layer}")


# stacks --------------------------------------------------------------------------------------------------------------


def stacks_of(model: nn.Module) -> dict[str, list[str]]:
    """Stack name -> names of its blocks, which must be the modules of these names."""
    layers, _ = find_layers(model)
    stacks = find_stacks(model, {module for layer in layers for module in (layer.owner, *layer.hooked_modules)})
    for stack in stacks:
        assert [model.get_submodule(name) for name in stack.names] == list(stack.blocks)
    return {stack.name: list(stack.names) for stack in stacks}


class Block(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class OtherBlock(Block):
    pass


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{i}" for i in range(count)]


def blocks(*kinds: type) -> nn.ModuleList:
    return nn.ModuleList(kind() for kind in kinds)


def beside_lists_of_single_layers() -> nn.Module:
    stem = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))
    heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return nn.ModuleDict({"stem": stem, "layers": blocks(Block, Block), "heads": heads})


def with_experts() -> nn.Module:
    """A list of experts inside of a block is no stack of its own."""
    return nn.ModuleDict({"layers": nn.ModuleList(Block(Block(), Block(), Block()) for _ in range(2))})


def with_a_norm() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.LayerNorm(8), Block()])})


def nested() -> nn.Module:
    return nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))})


def of_lists() -> nn.Module:
    """Lists cannot be called."""
    members = ([Block(), nn.LayerNorm(8), nn.Linear(8, 8)] for _ in range(2))
    return nn.ModuleDict({"layers": nn.ModuleList(map(nn.ModuleList, members))})


def of_masked_lists() -> nn.Module:
    """A mask makes a module sparse, which has a forward, and still cannot be called."""
    model = of_lists()
    model.get_submodule("layers.0").register_parameter("gain", nn.Parameter(torch.ones(8)))
    set_mask(model, "layers.0.gain", torch.arange(8) > 3)
    return model


def behind_a_norm() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.ModuleDict({"layers": blocks(Block, OtherBlock), "head": nn.Linear(8, 8)}))


def with_one_mixture() -> nn.Module:
    return nn.Sequential(Block(Block(), Block()))


OF_LISTS = {"layers": ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]}
# case -> (model, stack -> how many blocks it has, or their names)
STACKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int | list[str]]]] = {
    "a single layer": (lambda: tiny_llama(num_hidden_layers=1), {"model.layers": 1}),
    "a list of experts": (with_experts, {"layers": 2}),
    "one block of experts": (with_one_mixture, {"": ["0"]}),
    "a model behind a norm": (behind_a_norm, {"1.layers": 2}),
    "nested lists that hold everything": (nested, {"stages.0": 2, "stages.1": 2}),
    "lists in a list": (of_lists, OF_LISTS),
    "masked lists in a list": (of_masked_lists, OF_LISTS),
    "a sequence of blocks": (lambda: nn.Sequential(Block(), Block()), {"": ["0", "1"]}),
    "lists of single layers": (beside_lists_of_single_layers, {"layers": 2}),
    "blocks of two kinds": (lambda: nn.ModuleDict({"layers": blocks(Block, OtherBlock, Block)}), {"layers": 3}),
    "a block and a layer": (lambda: nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.Linear(8, 8)])}), {"": [""]}),
    "what is no block between": (with_a_norm, {"layers": ["layers.0", "layers.2"]}),
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), {}),
}


@pytest.mark.core
@pytest.mark.parametrize("case", STACKS)
def test_stacks_are_found(case):
    build, expected = STACKS[case]
    names = {stack: numbered(stack, size) if isinstance(size, int) else size for stack, size in expected.items()}
    assert stacks_of(build()) == names
