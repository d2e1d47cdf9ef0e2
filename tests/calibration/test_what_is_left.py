"""Calibration that fails or is stopped, and what is left of the model; and what a run leaves alone."""

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.plan.options import QUALITIES
from tests.calibration.collecting import assert_same, collected
from tests.helpers import assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models.stacked import STACKED, NanAtPadding, Stacked, vectors
from tests.models.tiny import tiny_gpt2, tiny_mixtral
from tests.oracles.brute_force import Recording, assert_stats, brute_force


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite(value):
    """The first layer that gets them is named; only batches that run into them are at fault."""
    model = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out + value if out.shape[1] == 9 else out)
    batches = [*token_batches(1), *token_batches(1, length=9)]
    match = "layer 'model.layers.1.self_attn.q_proj': its input holds NaN or inf: check the data.*bfloat16 or float32"
    refused(mts.sparsify, model, match=match, data_loader=batches)
    mts.sparsify(model, data_loader=batches[:1], progress=False)


def test_padding_may_hold_nan():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    batch = {"x": torch.randn(2, 4, 16), "attention_mask": mask}
    found = collected(NanAtPadding(), STACKED, data_loader=[batch], sequential="none")
    assert_stats(found, brute_force(NanAtPadding(), [batch], STACKED, lambda batch, name: mask.bool()))


def test_activations_that_overflow_once_the_layers_before_are_sparse():
    """A huge weight that a larger one kept in check: the layer behind is named, what is done stays sparse."""
    model = Stacked(blocks=2)
    with torch.no_grad():
        model.blocks[0].down.weight.zero_()
        model.blocks[0].down.weight[0, :4] = torch.tensor([-3e38, -3e38, 1e38, 0.0]) / 2.0**90
        model.blocks[0].up.weight.zero_()
        model.blocks[0].up.bias[:4] = torch.tensor([0.5, 0.5, 3.0, 0.0]) * 2.0**90
        model.blocks[0].down.bias.zero_()
    match = r"layer 'blocks.1.up': its input holds NaN or inf, now that the layers before it"
    mask_first = {"blocks.0.down": {"method": KeepLast(), "pattern": "1:4"}, "blocks.0.up": None}
    with pytest.raises(ValueError, match=match):
        mts.sparsify(model, Recording(), rules=mask_first, data_loader=vectors(), progress=False)
    assert [name for name, _ in mts.named_masks(model)] == ["blocks.0.down.weight"]


class KeepLast(mts.Method):
    """Keeps the third of every four weights, larger than life."""

    name = "keep last"

    def solve(self, weight, state, pattern, options) -> mts.Solution:
        mask = (torch.arange(weight.shape[-1]) % 4 == 2).expand(weight.shape).clone()
        return mts.Solution((weight * 3).masked_fill(~mask, 0), mask, 0.0)


def test_a_model_in_training_mode_is_calibrated_in_evaluation_mode():
    """Dropout is off, and each module has its own flag afterwards."""
    model = tiny_gpt2()
    assert model.config.resid_pdrop > 0
    blocks = ["transformer.h.0", "transformer.h.1"]
    expected = collected(tiny_gpt2(), blocks, data_loader=token_batches())
    model.train()
    model.transformer.h[0].attn.eval()
    flags = [module.training for module in model.modules()]
    assert_same(collected(model, blocks, data_loader=token_batches()), expected)
    assert [module.training for module in model.modules()] == flags


class Merging(nn.Linear):
    """Does more in ``train`` than to set a flag, as LoRA's own layers do."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_a_module_with_a_train_of_its_own_is_told_of_the_mode_again(training):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(Merging(16, 16))).train(training)
    model[1].train(not training)
    model[1][0].train(training)
    mts.sparsify(model, "wanda", include="0", data_loader=vectors(), progress=False)
    assert [x.training for x in model.modules()] == [training, training, not training, training]
    assert model[1][0].merged is not training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_whatever_gradient_mode_the_caller_is_in(mode, from_tensors):
    model = tiny_llama()
    with mode():
        assert_same(collected(model, data_loader=token_batches()), from_tensors)
    assert len(mts.verify(model, "2:4").layers) == 14
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


OF_MAX = QUALITIES["max"].options
RUNS = [
    (tiny_llama, mts.sparsify, {"quality": "max", "reconstruct": {**OF_MAX["reconstruct"], "epochs": 1}, "distill": 1}),
    (tiny_llama, mts.sparsify, {"method": "sparsegpt", "budget": "40% zeros"}),
    (tiny_llama, mts.shrink, {"budget": "80% params"}),
    (tiny_mixtral, mts.sparsify, {"method": "alps", "permute": True}),
    (tiny_mixtral, mts.shrink, {"experts": "25%"}),
]


@pytest.mark.parametrize(("make", "run", "options"), RUNS, ids=["max", "budget", "shrink", "experts", "fewer experts"])
def test_whatever_the_default_device_is(make, run, options):
    """What is drawn and counted on the host is so, where `torch.set_default_device` says something else."""
    (model, expected), batches = (make(), make()), token_batches(6)
    run(expected, **options, data_loader=batches, progress=False)
    with torch.device("meta"):
        run(model, **options, data_loader=batches, progress=False)
    assert_same_state(model, state_of(expected))
