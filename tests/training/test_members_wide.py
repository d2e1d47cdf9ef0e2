"""Sparse Wide for plain modules: golden FLOPs of a ResNet-18, sizes, groups, ties, and what is refused."""

import pytest
import torch
from torch import nn

from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.training.iso_flop.members import rebuilt
from tests.helpers import refused
from tests.training.cases import live_flops


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """As for CIFAR-100: a stem of 3 x 3, four stages of two blocks, pixels averaged."""

    def __init__(self, width):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Block(*each) for each in zip(widths, widths[1:], [1, 1, 2, 1, 2, 1, 2, 1])))
        self.head = nn.Linear(8 * width, 100)

    def forward(self, x):
        return self.head(self.blocks(self.bn(self.stem(x)).relu()).mean((2, 3)))


IMAGE = torch.zeros(1, 3, 32, 32)


def test_golden_flops_of_resnet18():
    """Multiplications 555,468,800; twice as wide 1.0033 times as many, solved again 0.7508 (Sparse-IFT's own code)."""
    resnet = ResNet18(64)
    ift = training.sparse_ift(resnet, 0.75, example=IMAGE)
    assert (ift.plan.flops[0], ift.plan.ratio) == (2 * 555_468_800, 1.0)
    assert ift.plan.model_ratio == pytest.approx(1.0033, abs=5e-5)
    whole = training.sparse_ift(resnet, 0.75, example=IMAGE, iso="model")
    assert {round(layer.level, 4) for layer in whole.plan.layers} == {0.7508}
    assert whole.plan.model_ratio == pytest.approx(1.0, abs=1e-5)
    assert {row.name for row in ift.plan.skipped if row.reason == "reads what the model reads"} == {"stem.weight"}
    heads = {row.name for row in ift.plan.skipped if row.reason == "makes what the model gives"}
    assert heads == {"head.weight", "head.bias"}


@pytest.mark.parametrize("level", [0.3, 0.5, 0.75, 0.9])
def test_the_wide_model_is_the_one_that_one_would_write_down(level):
    """The same class, written for its width, has the same parameters and FLOPs by torch's counter."""
    ift = training.sparse_ift(ResNet18(4), level, example=IMAGE)
    width = ift.model.stem.out_channels
    assert 4 * (1 / (1 - level)) ** 0.5 <= width < 4 * (1 / (1 - level)) ** 0.5 + 1
    theirs = ResNet18(width)
    assert {n: p.shape for n, p in ift.model.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert {n: b.shape for n, b in ift.model.named_buffers()} == {n: b.shape for n, b in theirs.named_buffers()}
    ift.sparsity.apply(ift.model)
    masks = dict(named_masks(ift.model))
    assert set(masks) == {layer.name for layer in ift.plan.layers}
    assert live_flops(ift.model, masks, IMAGE) == pytest.approx(live_flops(ResNet18(4), masks, IMAGE), rel=5e-3)


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, group norm, a flattened image, and two heads."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm = nn.GroupNorm(3, 12)
        self.grouped = nn.Conv2d(12, 24, 1, groups=2)
        self.slope = nn.PReLU()
        self.dense = nn.Linear(24 * 16, 36)
        self.normed = nn.LayerNorm(36)
        self.left, self.right = nn.Linear(36, 5), nn.Linear(36, 2)

    def forward(self, x, scale=1.0):
        x = self.grouped(self.norm(self.depthwise(self.stem(x * 1.0))))
        x = self.normed(self.dense(self.slope(x).flatten(1))) * scale
        return {"left": self.left(x), "right": self.right(x)}


def test_groups_grow_where_they_are_channels_and_stay_where_they_are_not():
    x = torch.randn(2, 3, 4, 4)
    ift = training.sparse_ift(Mobile(), 0.5, example={"x": x, "scale": 2.0})
    wide = ift.model
    assert wide.stem.out_channels == 18, "17 / 12 would keep 12, 24, 36 whole, and 3 and 2 groups need a multiple of 6"
    assert wide.depthwise.groups == wide.depthwise.in_channels == 18
    assert (wide.norm.num_groups, wide.grouped.groups) == (3, 2)
    assert (wide.dense.in_features, wide.dense.out_features) == (24 * 16 * 1.5, 54)
    assert wide.normed.normalized_shape == (54,)
    assert (wide.left.out_features, wide.right.out_features, wide.left.in_features) == (5, 2, 54)
    assert wide(x)["right"].shape == (2, 2)
    levels = {layer.name: layer.level for layer in ift.plan.layers}
    assert levels["dense.weight"] == pytest.approx(1 - 1 / 1.5**2)


class Tied(nn.Module):
    def __init__(self, reads=True):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.again = self.up
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.down(self.up(x).relu()))
        x = self.norm(x + self.down(self.again(x).relu()))
        return self.head(x)


def test_shared_modules_and_tied_weights_stay_shared():
    model = Tied()
    ift = training.sparse_ift(model, 0.75, multiple=4, example=torch.arange(6)[None])
    wide = ift.model
    assert wide.again is wide.up
    assert wide.head.weight is wide.embed.weight
    assert wide.embed.weight.shape == (50, 16)
    assert {layer.name for layer in ift.plan.layers} == {"up.weight", "down.weight"}
    assert ift.plan.layers[0].uses == 12, "two calls of six tokens"
    assert model.embed.weight.shape == (50, 8), "the model is left as it was"


MODULES = [
    nn.Linear(3, 4, bias=False),
    nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=2, padding_mode="reflect"),
    nn.ConvTranspose1d(4, 6, 3, output_padding=1, stride=2, bias=False),
    nn.BatchNorm2d(4, eps=1e-3, momentum=None, affine=False),
    nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    nn.LayerNorm(4, eps=1e-3, bias=False),
    nn.RMSNorm(4, eps=1e-3),
    nn.GroupNorm(2, 4, affine=False),
    nn.Embedding(5, 4, padding_idx=1, max_norm=2.0),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_a_module_is_rebuilt_with_all_of_its_settings(module):
    again = rebuilt(module.double().eval())
    assert repr(again) == repr(module)
    state, now = ({name: (x.shape, x.dtype) for name, x in each.state_dict().items()} for each in (module, again))
    assert state == now
    for name in ("eps", "momentum", "padding_idx", "output_padding", "affine", "training"):
        assert getattr(again, name, None) == getattr(module, name, None)


# what is refused ----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model of which one part is what Sparse Wide cannot know."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        parts = {"token": nn.Parameter(torch.zeros(6)), "attention": nn.MultiheadAttention(6, 2)}
        parts |= {"unused": nn.Linear(6, 2), "norm": nn.LayerNorm((3, 6))}
        if kind in parts:
            setattr(self, kind, parts[kind])

    def forward(self, x):
        x = self.middle(self.first(x).relu())
        if self.kind == "view":
            x = x.view(-1, 3, 6).flatten(0, 1)
        return (self.last(x), x.relu()) if self.kind == "features" else self.last(x)


REFUSED = [
    (Odd("token"), r"'Odd' \(Odd with 'token'\)"),
    (Odd("attention"), r"'attention' \(MultiheadAttention with 'in_proj_weight'\)"),
    (Odd("unused"), "the example does not reach unused"),
    (Odd("norm"), r"'norm' is normalized over \[3, 6\]"),
    (Odd("view"), "does not run when its layers are wider"),
    (Odd("features"), r"gives \[\(3, 4\), \(3, 12\)\] instead of \[\(3, 4\), \(3, 6\)\]"),
    (nn.Sequential(nn.Linear(4, 4)), "its first layer is its last"),
]


@pytest.mark.parametrize(("model", "match"), REFUSED)
def test_what_is_refused(model, match):
    refused(training.sparse_ift, model, 0.75, example=torch.zeros(3, 4), match=match)


def test_a_model_without_values_is_refused():
    with pytest.raises(ValueError, match="on the meta device"):
        training.sparse_ift(Odd("").to("meta"), 0.75, example=torch.zeros(3, 4))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.merge, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head(self.merge(torch.cat([self.up(self.down(x).relu()), x], 1)).relu())


def test_transposed_convolutions_count_among_the_flops():
    example = torch.randn(2, 3, 8, 8)
    ift = training.sparse_ift(model := UNet(), 0.5, iso="model", example=example)
    ift.sparsity.apply(ift.model)
    flops = training.cost(model, example).dense.inference, training.cost(ift.model, example).sparse.inference
    assert ift.plan.flops == pytest.approx(flops)
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
