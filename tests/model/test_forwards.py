"""A layer is what it computes: classes with forwards of their own, compared with those that they inherit from."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import BitConfig, BitForImageClassification
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts
from tests.helpers import assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models.tricky import Parts

# classes that do something else with the weight -----------------------------------------------------------------------


class StdConv2d(nn.Conv2d):
    """Weight standardization (arXiv 1903.10520), as BiT and NF-ResNets have it."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        return F.conv2d(x, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias, self.stride, self.padding)


class StdInside(nn.Conv2d):
    """The same in the method that torch's forward calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


class Conv2dSame(nn.Conv2d):
    """TF's SAME: the forward pads, the attribute says 0."""

    def forward(self, x: Tensor) -> Tensor:
        size = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(x.shape[2:], self.kernel_size, self.stride)]
        sides = [side for n in reversed(size) for side in (n // 2, n - n // 2)]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride)


class BitLinear(nn.Linear):
    """BitNet's: weights of three values, and a norm before."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        return F.linear(F.rms_norm(x, x.shape[-1:]), (self.weight / scale).round().clamp(-1, 1) * scale, self.bias)


def own(base: type[nn.Module], forward: Callable[..., Tensor]) -> Any:
    """A class with a forward of its own."""
    return type("Own", (base,), {"forward": forward})


# off by little where inputs are centred, and no zero of the weight stays
Centred = own(nn.Linear, lambda self, x: F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias))
Causal = own(nn.Conv1d, lambda self, x: nn.Conv1d.forward(self, F.pad(x, (self.kernel_size[0] - 1, 0))))
# StyleGAN's: the weight in use is scaled
EqualLinear = own(nn.Linear, lambda self, x: F.linear(x, self.weight * self.in_features**-0.5, self.bias))
Spectral = own(nn.Linear, lambda m, x: F.linear(x, m.weight / torch.linalg.matrix_norm(m.weight, 2), m.bias))
Transposed = own(Conv1D, lambda self, x: Conv1D.forward(self, 3 * x).tanh())


class WithLora(nn.Linear):
    def __init__(self, *sizes: int, scale: float) -> None:
        super().__init__(*sizes)
        self.register_buffer("change", scale * torch.randn(sizes[1], sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.change.T


def replaced(module: nn.Module, forward: Callable) -> nn.Module:
    module.forward = types.MethodType(forward, module)
    return module


# module, shape of an input
OTHERS = {
    "standardized": (StdConv2d(8, 16, 3, padding=1), (8, 6, 6)),
    "standardized in _conv_forward": (StdInside(8, 16, 3), (8, 6, 6)),
    "centred": (Centred(64, 16), (5, 64)),
    "TF's SAME, stride 1": (Conv2dSame(8, 16, 3), (8, 6, 6)),
    "TF's SAME, stride 2": (Conv2dSame(8, 16, 3, stride=2), (8, 6, 6)),
    "causal": (Causal(8, 16, 3), (8, 6)),
    "scaled": (EqualLinear(16, 8), (5, 16)),
    "spectral norm": (Spectral(64, 8), (5, 64)),  # its norm is not near 1
    "ternary": (BitLinear(16, 8), (5, 16)),
    "Conv1D and more": (Transposed(8, 16), (5, 16)),
    "LoRA": (WithLora(16, 8, scale=2.0), (5, 16)),
    "replaced in the instance": (replaced(nn.Linear(16, 8), EqualLinear.forward), (5, 16)),
}

# classes that compute what their bases do -----------------------------------------------------------------------------


class Counting(nn.Linear):
    """The same product, and extra work that must not be seen on the module after it was only planned."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))
        self.shapes: tuple = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes = (*self.shapes, x.shape)
        return x @ self.weight.T + self.bias


# a weight that is dropped in training alone
Dropped = own(nn.Linear, lambda self, x: F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias))
Cast = own(nn.Linear, lambda m, x: F.linear(*(y.bfloat16() for y in (x, m.weight, m.bias))).to(x.dtype))


class Rounded(nn.Linear):
    """Quantization-aware training: weights and inputs of 8 bits."""

    @staticmethod
    def quantized(x: Tensor) -> Tensor:
        step = x.abs().max() / 127
        return (x / step).round() * step

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.quantized(x), self.quantized(self.weight), self.bias)


Super = own(nn.Conv2d, lambda self, input, scale=1.0: nn.Conv2d.forward(self, input) * scale)
Marked: Any = type("Marked", (nn.Linear,), {})


SAME = {
    "extra work": (Counting(16, 8), (5, 16)),
    "dropped weight": (Dropped(16, 8), (5, 16)),
    "8 bits": (Rounded(16, 8), (5, 16)),
    "bfloat16": (Cast(16, 8), (5, 16)),
    "super().forward": (Super(8, 16, 3, padding=1, stride=2), (8, 6, 6)),
    "SAME that pads nothing": (Conv2dSame(8, 16, 2, stride=2), (8, 6, 6)),  # where strides are as long as the kernel
    "a class without a forward": (Marked(16, 8), (5, 16)),
    "LoRA that adds nothing yet": (WithLora(16, 8, scale=0.0), (5, 16)),
    "bias": (nn.utils.parametrize.register_parametrization(Marked(16, 8), "bias", nn.Tanh()), (5, 16)),
    "torch's own": (nn.Conv2d(8, 16, 3, padding="same"), (8, 6, 6)),
    "transformers' own": (Conv1D(8, 16), (5, 16)),
    "bound in the instance": (replaced(nn.Linear(16, 8), nn.Linear.forward), (5, 16)),
}
EVERY = [(name, True) for name in OTHERS] + [(name, False) for name in SAME]


def build(name: str, other: bool) -> tuple[Parts, list[Tensor]]:
    """(a net with this case beside a plain layer, which leaves something to prune; calibration data for it)."""
    torch.manual_seed(0)
    own, shape = (OTHERS if other else SAME)[name]
    with torch.no_grad():
        size = copy.deepcopy(own).eval()(torch.zeros(1, *shape)).numel()
    net = Parts(lambda m, x: m.plain(m.own(x).flatten(1)), own=copy.deepcopy(own), plain=nn.Linear(size, 4))
    return net, [torch.randn(64, *shape) for _ in range(2)]


def skipped(plan_or_report) -> dict[str, str]:
    return {each.name: each.reason for each in plan_or_report.skipped}


def names(plan_or_report) -> list[str]:
    return [each.name for each in plan_or_report.layers]


WHY = "its forward does something else with the weight than "


@pytest.mark.parametrize(("name", "other"), EVERY)
def test_a_plan_without_data_leaves_dense_what_does_something_else(name, other):
    net, _ = build(name, other)
    before = state_of(net)
    plan = mts.make_plan(net, "magnitude", pattern=0.5)
    assert names(plan) == (["plain"] if other else ["own", "plain"])
    assert skipped(plan).get("own", "").startswith(WHY) == other
    assert_same_state(net, before)
    assert getattr(net.own, "shapes", ()) == ()
    assert not plan.notes
    # named in full it is an error
    masks = {f"{each}.weight": net.get_parameter(f"{each}.weight") > 0 for each in ("own", "plain")}
    options: list[dict[str, Any]] = [{"include": ["own"]}, {"rules": {"own": {"pattern": "1:2"}}}]
    for how in (*({"method": "magnitude", **option} for option in options), {"masks": masks}):
        if other:
            refused(mts.make_plan, net, pattern=0.5, **how, match=f"layer 'own', which you name: {WHY}.*; leave it out")
        else:
            assert "own" in names(mts.make_plan(net, pattern=0.5, **how))


def strange(kind: type[nn.Module]) -> Parts:
    """A layer that cannot be run alone: its forward takes a second input, as StyleGAN's modulated convolutions do."""
    layers = {"own": kind(16, 8), "plain": nn.Linear(8, 4)}
    return Parts(lambda m, x: m.plain(m.own(x, x.square().mean(-1, keepdim=True))), **layers)


Modulated = own(nn.Linear, lambda self, x, style: F.linear(x * style, self.weight, self.bias))


class OfPositive(nn.Linear):
    """Only real inputs show that it cuts them."""

    def forward(self, x: Tensor, style: Tensor | None = None) -> Tensor:
        return F.linear(x.relu(), self.weight, self.bias)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", [Modulated, OfPositive])
@pytest.mark.parametrize("option", [{}, {"budget": "50% zeros", "choices": "40%,50%"}, {"reconstruct": {"epochs": 1}}])
def test_the_dense_run_finds_what_made_up_inputs_do_not_show(kind, method, option):
    torch.manual_seed(0)
    net, data = strange(kind), [torch.randn(64, 16) for _ in range(2)]
    assert len(mts.make_plan(net, method, pattern=0.5, **option).layers) == 2
    weight = net.own.weight.detach().clone()
    mts.sparsify(net, method, pattern=0.5, data_loader=data, **option)
    report = mts.report(net)
    assert (names(report), skipped(report)) == (["plain"], {"own": f"{WHY}nn.Linear"})
    assert torch.equal(net.own.weight, weight)
    assert mts.verify(net).notes == (f"own: {WHY}nn.Linear",)
    with pytest.raises(ValueError, match="'own', which you name"):
        mts.sparsify(strange(kind), method, pattern=0.5, data_loader=data, include=["own", "plain"], **option)


@pytest.mark.parametrize(("name", "other"), EVERY)
def test_what_is_pruned_with_data_has_the_error_that_it_has(name, other):
    if name == "replaced in the instance":
        pytest.skip("a mask does not reach it, and set_mask says so")
    net, data = build(name, other)
    dense = copy.deepcopy(net).eval()
    mts.sparsify(net, "sparsegpt", pattern=0.5, data_loader=data, sequential="none")
    assert names(mts.report(net)) == (["plain"] if other else ["own", "plain"])
    if other:
        assert torch.equal(net.own.weight, dense.own.weight)
        return
    bias = dense.own.bias.detach().view(-1, 1, 1) if isinstance(net.own, nn.Conv2d) else dense.own.bias.detach()
    with torch.no_grad():
        before, after = (torch.cat([model.own(x) for x in data]) - bias for model in (dense, net.eval()))
    true = ((after - before).square().sum() / before.square().sum()).item()
    assert mts.report(net).layers[0].error == pytest.approx(true, rel=0.05)


def test_a_plan_says_what_could_not_be_tried():
    note = "own: a forward of its own, which cannot be run alone to see what it computes"
    assert mts.make_plan(strange(Modulated), "magnitude", pattern=0.5).notes == (note,)
    assert mts.make_plan(strange(Modulated), "wanda", pattern=0.5).notes == ()  # the dense run will tell


def test_accelerates_hooks_are_seen_through():
    for name, other in EVERY:
        if name == "replaced in the instance":
            continue
        net, _ = build(name, other)
        cpu_offload(net, execution_device=torch.device("cpu"))
        assert skipped(mts.make_plan(net, "magnitude", pattern=0.5)).get("own", "").startswith(WHY) == other, name


@pytest.mark.parametrize("name", ["standardized", "scaled"])
def test_masks_on_it_hold_in_the_stored_weight_with_a_warning(name):
    net, _ = build(name, True)
    kind = type(net.own).__name__
    with pytest.warns(UserWarning, match=f"{kind}: {WHY}nn.*: masks hold in the stored weights") as caught:
        mts.training.Static(0.5, include="blocks").apply(net)
    assert len(caught) == 1
    assert dict(mts.named_masks(net)).keys() == {"own.weight", "plain.weight"}
    assert (net.own.weight == 0).float().mean() == 0.5
    verified = mts.verify(net)
    assert len(verified.layers) == 2
    assert f"Note: own: {verified.notes[0].partition(': ')[2]}." in str(verified)


def test_bit_of_transformers(tmp_path):
    """All of its convolutions standardize their weights; so does a model without values, and a folder."""
    bit = BitForImageClassification(BitConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_groups=4))
    why = f"{WHY}nn.Conv2d"
    with pytest.raises(ValueError, match=f"nothing to prune in this BitForImageClassification: {why}"):
        mts.sparsify(bit, "wanda", pattern="2:4", data_loader=[{"pixel_values": torch.randn(2, 3, 32, 32)}])
    assert names(mts.make_plan(bit, "magnitude", pattern="2:4", include=["classifier.1"])) == ["classifier.1"]
    with torch.device("meta"):
        empty = BitForImageClassification(bit.config)
    reasons = {name: why for name, module in bit.named_modules() if isinstance(module, nn.Conv2d)}
    reasons["bit.embedder.convolution"] = "3 input channels are not a multiple of 4, so 2:4 does not fit"
    assert skipped(mts.make_plan(empty, "magnitude", pattern="2:4", include=["*"])) == reasons
    mts.sparsify(bit, "magnitude", pattern="2:4", include=["classifier.1"])
    mts.save(bit, tmp_path / "bit")
    (note,) = mts.verify(tmp_path / "bit").notes
    assert note.endswith(f"more: {why}")


@pytest.mark.parametrize("option", [{}, {"budget": "20% zeros", "choices": [None, "2:4"]}])
def test_a_language_model_with_own_linears_is_pruned_block_by_block(option):
    """The dense run alone shows what is wrong with up_proj."""
    model = tiny_llama()
    for layer in model.model.layers:
        for name, kind in (("gate_proj", Counting), ("up_proj", OfPositive), ("down_proj", Rounded)):
            old = layer.mlp.get_submodule(name)
            setattr(layer.mlp, name, kind(old.in_features, old.out_features))
    mts.sparsify(model, "sparsegpt", pattern="2:4", data_loader=token_batches(), **option)
    pruned = {layer.name.rpartition(".")[2] for layer in mts.report(model).layers}
    assert pruned <= (every := {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"})
    assert pruned == every or option
    assert {why for name, why in skipped(mts.report(model)).items() if "up_proj" in name} == {f"{WHY}nn.Linear"}
