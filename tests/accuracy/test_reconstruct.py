"""Reconstruction: what it is judged by, what it changes and what not, and what it refuses."""

import copy
import math
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts
from modelopt_sparse.accuracy import tuning
from modelopt_sparse.accuracy.tuning import TunedWeights, learning_rates
from modelopt_sparse.model.masking import SparseModule
from modelopt_sparse.plan.options import Distill, Reconstruct
from tests.accuracy.tuned import BATCHES, relative, seen_by, tuned_model
from tests.helpers import assert_bits, assert_same_state, in_steps, refused, state_of, tiny_llama, token_batches
from tests.interruptions import interrupted
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import Block, Stacked, vectors
from tests.oracles.layer_problem import exact_refit, objective

BLOCKS = ["model.layers.0", "model.layers.1"]


sparsified = partial(tuned_model, reconstruct=3)


@cache
def expected() -> dict[str, tuple[type, Tensor]]:
    """The state of the model that the plain call makes."""
    return state_of(sparsified())


def changed_by_it(model: nn.Module, **options) -> set[str]:
    """The names of the parameters that a run changes."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sparsified(model, **options)
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize(("name", "exclude"), [("t5", "encoder.*"), ("resnet_basic", "*stages.0*")])
def test_behind_a_stack_that_stays_dense_goals_and_inputs_are_those_of_the_dense_model(name, exclude):
    """All rows are one row, so that every one of them judges."""
    dense = ARCHITECTURES[name].build()
    row = {key: x[:1] for key, x in ARCHITECTURES[name].batches("right")[0].items() if "mask" not in key}
    batches = [{key: x.repeat(4, *[1] * (x.dim() - 1)) for key, x in row.items()}] * 6
    options = {"exclude": exclude, "data_loader": batches, "progress": False}
    model = mts.sparsify(copy.deepcopy(dense), "sparsegpt", reconstruct=1, **options)
    last = mts.report(model).blocks[-1]
    (_, goal), (_, output) = (seen_by(each, last.name, row) for each in (dense, model))
    assert last.error_after == pytest.approx(relative(output, goal), rel=1e-3)
    model = mts.sparsify(copy.deepcopy(dense), "sparsegpt", sequential="none", **options)
    layers = [layer for layer in mts.report(model).layers if layer.type == "Linear"]
    for layer in layers:
        x, _ = seen_by(dense, layer.name, row)
        before, after = (x @ each.get_submodule(layer.name).weight.detach().double().T for each in (dense, model))
        assert layer.error == pytest.approx(relative(after, before), rel=1e-3)
    assert layers or name != "t5"


# what it does -------------------------------------------------------------------------------------------------------


def test_a_norm_of_groups_is_tuned_whatever_the_memory_format_of_its_input():
    """torch 2.13 ends the process where a channels-last input has no gradient; so does this test without the hook."""
    tuned = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.GroupNorm(4, 32), nn.Conv2d(32, 8, 1))
        rows = torch.randn(4, 4, 8, 8, 32) @ torch.randn(32, 32)
        batches = [batch.permute(0, 3, 1, 2).contiguous(memory_format=form) for batch in rows]
        mts.sparsify(model, "wanda", include="*", data_loader=batches, reconstruct=2, progress=False)
        tuned.append(dict(model.named_parameters()))
        assert not torch.equal(model[0].weight, torch.ones(32))
    torch.testing.assert_close(*tuned)


def test_a_linear_block_comes_close_to_the_optimum_on_its_mask():
    """One layer with plenty of epochs against the exact solution of its normal equations on the kept weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False)).double()
    inputs = [torch.randn(64, 16, dtype=torch.float64) @ torch.randn(16, 16, dtype=torch.float64) for _ in range(1)] * 9
    dense = model[0].weight.detach().clone()
    mts.sparsify(model, "wanda", data_loader=inputs, include="*", reconstruct={"epochs": 300, "learning_rate": 0.2})
    (mask,) = dict(mts.named_masks(model)).values()
    gram = inputs[0].T @ inputs[0]
    best = objective(dense, exact_refit(dense, mask, gram), gram).sum()
    start = objective(dense, dense * mask, gram).sum()
    found = objective(dense, model[0].weight.detach(), gram).sum()
    assert found <= best + 0.01 * (start - best)
    (block,) = mts.report(model).blocks
    assert block.error_after == pytest.approx(float(found / objective(dense, 0 * dense, gram).sum()), rel=1e-4)


def test_errors_are_those_of_the_whole_model_on_the_batch_held_back():
    """Of the first block before any tuning, and of both afterwards, by plain hooks on the finished model."""
    model, dense, plain = sparsified(reconstruct=2), tiny_llama(), sparsified(reconstruct=False)
    held_back = in_steps(token_batches(BATCHES))[-1]
    first, second = mts.report(model).blocks
    assert [first.name, second.name] == BLOCKS

    def error(of: nn.Module, block: str) -> object:
        (_, goal), (_, output) = (seen_by(each, block, held_back) for each in (dense, of))
        return pytest.approx(relative(output, goal), rel=1e-4)

    assert (first.error_before, first.error_after) == (error(plain, BLOCKS[0]), error(model, BLOCKS[0]))
    assert second.error_after == error(model, BLOCKS[1])


class OfPairs(Block):
    """Its state holds complex numbers, or two real ones for each."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_real(x) if x.is_complex() else x.unflatten(-1, (-1, 2))
        y = super().forward(pairs.sum(-1))
        pairs = pairs + torch.stack((y, y / 2), -1)
        return torch.view_as_complex(pairs) if x.is_complex() else pairs.flatten(-2)


class Pairs(Stacked):
    kind = OfPairs

    def __init__(self, *, by_complex: bool) -> None:
        super().__init__()
        self.by_complex = by_complex

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.stem(x)] * 2, -1)
        x = torch.view_as_complex(x) if self.by_complex else x.flatten(-2)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.view_as_real(x).sum(-1) if self.by_complex else x.unflatten(-1, (-1, 2)).sum(-1))


@pytest.mark.parametrize("metric", ["plain", "fisher"])
def test_complex_outputs_are_compared_as_two_real_ones(metric):
    """Both parts count."""
    options = {"data_loader": vectors(8), "reconstruct": {"epochs": 2, "metric": metric}, "progress": False}
    models = [mts.sparsify(Pairs(by_complex=by_complex), "wanda", **options) for by_complex in (True, False)]
    found, wanted = ([block.error_after for block in mts.report(model).blocks] for model in models)
    assert found == pytest.approx(wanted, rel=1e-4)
    for one, other in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "alps"])
def test_no_block_gets_worse_and_most_get_better(method):
    report = mts.report(sparsified(None, method, data_loader=token_batches(16), reconstruct=4))
    assert all(block.error_after <= block.error_before for block in report.blocks)
    assert all((block.error_after < block.error_before) == (block.epoch > 0) for block in report.blocks)
    assert sum(block.epoch > 0 for block in report.blocks) >= len(report.blocks) / 2
    assert {layer.recipe for layer in report.layers} == {f"{method}+reconstruct"}


class Frozen(Block):
    """A block that runs without gradients, as feature extractors that are not trained do."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("options", [{"reconstruct": 1}, {"distill": 1}])
def test_weights_that_no_gradient_reaches_stay_as_they_were_solved(options):
    solved, model = (mts.sparsify(Stacked(block=Frozen), data_loader=vectors(9), **more) for more in ({}, options))
    torch.testing.assert_close(model.state_dict(), solved.state_dict())  # Hessians are summed in other steps
    report = mts.report(model)
    for tuned in report.blocks or [report.distillation]:
        assert tuned.epoch == 0
        assert tuned.notes == ["no gradient reaches its weights"]


def test_masks_hold_and_pruned_weights_are_plus_zero():
    before, model = sparsified(reconstruct=False), sparsified()
    masks = dict(mts.named_masks(model))
    for name, mask in mts.named_masks(before):
        assert BLOCKS[1] in name or torch.equal(masks[name], mask)  # which is solved behind another first one
    for name, mask in masks.items():
        assert_bits(model.get_parameter(name)[~mask], torch.zeros(int((~mask).sum())))
    mts.verify(model, "2:4")
    plain = sparsified(enforce=False)
    assert not list(mts.named_masks(plain))
    assert_same_state(plain, state_of(mts.export(model)))


def test_the_same_call_gives_the_same_bits_and_another_seed_another_order():
    first, other = sparsified(), sparsified(seed=1)
    assert_same_state(first, expected())
    assert mts.report(other).blocks[0].error_after != mts.report(first).blocks[0].error_after


@torch.inference_mode()
def looped(model: nn.Module) -> None:
    for batch in in_steps(token_batches(BATCHES)):
        model(batch)


# "cpu:0" is another device to torch, so everything goes there and comes back
@pytest.mark.parametrize("options", [{"data_loader": None, "forward_loop": looped}, {"device": "cpu:0"}])
def test_a_loop_in_inference_mode_and_another_device_give_the_same_bits(options):
    model = sparsified(**options)
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    assert_same_state(model, expected())


SMALL_STEPS = {"learning_rate": 1e-2, "epochs": 8}
BETTER = [(torch.bfloat16, 4, "block"), (torch.float16, 4, "block"), (torch.bfloat16, SMALL_STEPS, "block")]
BETTER += [(torch.float32, 3, "stage")]


@pytest.mark.parametrize(("dtype", "tuning", "sequential"), BETTER, ids=str)
def test_half_precision_keeps_its_dtype_and_stages_get_better_as_well(dtype, tuning, sequential):
    """At 1/400 of a weight's size one step is lost in bfloat16's 8 bits; the optimizer's own values keep it."""
    model = sparsified(tiny_llama().to(dtype), reconstruct=tuning, sequential=sequential)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert [block.name for block in mts.report(model).blocks] == BLOCKS
    assert all(block.error_after < block.error_before for block in mts.report(model).blocks)


def test_under_autocast_blocks_get_better_as_well():
    """Each run of a block takes the weights as the last step left them, not a copy in half precision from before."""
    model = sparsified(autocast="bfloat16", reconstruct=4, enforce=False)  # plain weights are what torch would copy
    plain = mts.report(sparsified(reconstruct=4)).blocks
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for block, other in zip(mts.report(model).blocks, plain):
        assert block.error_after < block.error_before
        assert block.error_after / block.error_before == pytest.approx(other.error_after / other.error_before, rel=0.05)


def test_padding_does_not_count():
    """Batches padded on the left give the same errors as the same sentences without padding."""
    ids = token_batches(8, batch=2, length=12)
    positions = torch.arange(12).expand(2, -1)
    of_names = [{"input_ids": x, "attention_mask": torch.ones_like(x), "position_ids": positions} for x in ids]
    padded = [{name: nn.functional.pad(x, (4, 0)) for name, x in batch.items()} for batch in of_names]
    with_padding, without = sparsified(data_loader=padded), sparsified(data_loader=ids)
    for a, b in zip(mts.report(with_padding).blocks, mts.report(without).blocks):
        assert a.error_before == pytest.approx(b.error_before, rel=1e-3)
        assert a.error_after == pytest.approx(b.error_after, rel=2e-2)
    first, counted = (mts.report(x).blocks[0] for x in (without, sparsified(data_loader=padded, count_padding=True)))
    assert counted.error_before != pytest.approx(first.error_before, rel=1e-2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name):
    """Every block that a call comes to once is tuned; where one comes more often, the report says so."""
    architecture = ARCHITECTURES[name]
    model, says = architecture.build(), "its blocks are not reconstructed"
    with pytest.warns(UserWarning, match=says) if architecture.repeats else nullcontext():
        sparsified(model, data_loader=architecture.batches("left"), reconstruct=1)
    report = mts.report(model)
    names = [] if architecture.repeats else [name or type(model).__name__ for name in architecture.block_names(model)]
    assert sorted(block.name for block in report.blocks) == sorted(names)
    assert any(says in note for note in report.notes) == architecture.repeats
    assert {layer.recipe for layer in report.layers} == {"wanda" if architecture.repeats else "wanda+reconstruct"}
    assert all(math.isfinite(block.error_after) for block in report.blocks)
    mts.verify(model, "2:4")


def test_rates_go_by_the_size_of_kept_values_and_by_how_many_meet_in_one_output():
    """So that the widths of models and the sparsities of masks do not change how far one step moves an output."""
    weight, mask = torch.full((6, 32), 0.5), torch.zeros(6, 32, dtype=torch.bool)
    mask[:, ::2] = True
    norm, bias, all_kept = torch.full((9,), 3.0), torch.zeros(6), torch.full((4, 64), 0.25)
    values = [weight.masked_fill(~mask, 0), norm, bias, all_kept]
    rates = learning_rates(values, [mask, None, None, None], [6, 0, 0, 4], 0.4)
    assert rates[0] == pytest.approx(0.4 * 0.5 / 16**0.5)
    assert rates[3] == pytest.approx(0.4 * 0.25 / 64**0.5)
    assert rates[1] == pytest.approx(0.4 * 3 / ((4 + 8) / 2))
    assert rates[2] == min(rates[0], rates[1], rates[3])


def test_weights_stored_the_other_way_round_are_tuned_the_same():
    """GPT-2's Conv1D holds [in, out]: a step must be as long as for a Linear of the same values."""
    convolutions, linears = [Conv1D(24, 8), Conv1D(8, 24)], [nn.Linear(8, 24), nn.Linear(24, 8)]
    for ours, theirs in zip(linears, convolutions):
        ours.load_state_dict({"weight": theirs.weight.mT.contiguous(), "bias": theirs.bias})
    batches = list(torch.randn(4, 16, 8))
    for up, down in (convolutions, linears):
        block = nn.Sequential(up, nn.GELU(), down)
        sparsified(nn.Sequential(nn.Sequential(block)), "magnitude", reconstruct=2, data_loader=batches)
    for ours, theirs in zip(linears, convolutions):
        torch.testing.assert_close(ours.weight, theirs.weight.mT, rtol=1e-4, atol=1e-6)


# what it leaves alone -----------------------------------------------------------------------------------------------


def test_parameters_gradients_and_flags_are_as_before():
    model = tiny_llama()
    frozen = model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    model(token_batches()[0]).logits.sum().backward()
    before = {name: (p, p.requires_grad, p.grad) for name, p in model.named_parameters()}
    sparsified(model)
    assert not frozen.requires_grad
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert parameter.requires_grad == before[name][1]
        assert parameter.grad is before[name][2]


def test_matrices_that_stay_dense_and_their_biases_are_untouched():
    model = tiny_llama(attention_bias=True)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias")), "which move from zero"
    changed = changed_by_it(model, exclude="*q_proj")
    assert not any(part in name for name in changed for part in ("q_proj", "embed_tokens", "model.norm"))
    for kind in ("k_proj.weight", "k_proj.bias", "input_layernorm", "post_attention_layernorm", "down_proj"):
        assert any(kind in name for name in changed), kind


def test_norms_and_biases_can_be_left_out():
    model = tiny_llama(attention_bias=True)
    assert changed_by_it(model, reconstruct={"norms_and_biases": False}) == dict(mts.named_masks(model)).keys()


def test_routers_and_what_other_blocks_hold_as_well_are_untouched():
    model = tiny_llama()
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    assert not any("input_layernorm" in name for name in changed_by_it(model))
    mixtral = ARCHITECTURES["mixtral"]
    changed = changed_by_it(mixtral.build(), data_loader=mixtral.batches("left"))
    assert not any("gate.weight" in name for name in changed)


@pytest.mark.parametrize("masks", ["frozen", "move"])
def test_an_interruption_leaves_a_whole_model_and_says_where(masks):
    """In the second block, of which each has 51 steps."""
    model = tiny_llama()
    with interrupted(tuning, "_take_step", 60):
        sparsified(model, reconstruct={"masks": masks, "epochs": 3})
    report = mts.report(model)
    assert [block.name for block in report.blocks] == BLOCKS[:1]
    assert any("'model.layers.1': its reconstruction was broken off" in note for note in report.notes)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(module.masked_names for module in model.modules() if isinstance(module, SparseModule)), "masks are on"
    for name, mask in mts.named_masks(model):
        assert not model.get_parameter(name)[~mask].any()
    mts.verify(model, "2:4")


# reports and settings -----------------------------------------------------------------------------------------------


def test_the_report_survives_a_folder(tmp_path):
    model = sparsified(None, "sparsegpt", polish=True)
    mts.save(model, tmp_path / "sparse")
    report = mts.report(tmp_path / "sparse")
    assert report == mts.report(model)
    assert {layer.recipe for layer in report.layers} == {"sparsegpt+polish+reconstruct"}
    assert report.settings["reconstruct"]["epochs"] == 3
    text = report.text(all_rows=True)
    for block in report.blocks:
        assert f"{block.error_before:.4f} -> {block.error_after:.4f}" in text


def test_a_second_run_keeps_what_the_first_one_reported():
    model = sparsified(include="model.layers.0.*")
    (first,) = mts.report(model).blocks
    blocks = mts.report(sparsified(model, include="model.layers.1.*")).blocks
    assert [block.name for block in blocks] == BLOCKS
    assert blocks[0] == first


def test_the_plan_says_it_and_what_it_costs():
    plan = mts.make_plan(tiny_llama(), "wanda", reconstruct=True)
    assert {layer.recipe for layer in plan.layers} == {"wanda+reconstruct"}
    weights = sum(layer.size for layer in plan.layers if layer.block == BLOCKS[0])
    assert plan.memory["reconstruction_of_one_block"] == 6 * 4 * weights
    for samples, copies in ((16384, 7), (16383, 6)):  # 512 tokens for each of 32 input channels, or one less
        tokens = {"data": ["text"], "tokenizer": str, "num_samples": samples, "seq_len": 1}
        plan = mts.make_plan(tiny_llama(), "wanda", reconstruct={"masks": "auto"}, **tokens)
        assert plan.memory["reconstruction_of_one_block"] == copies * 4 * weights
    assert "reconstruction_of_one_block" not in mts.make_plan(tiny_llama(), "wanda").memory


def test_ways_to_ask_for_it():
    def asked(value: object) -> Reconstruct | None:
        return mts.SparsifyConfig(reconstruct=value).reconstruct

    assert asked(False) is asked(None) is None
    assert asked(True) == asked({}) == Reconstruct()
    assert asked(7) == asked({"epochs": 7}) == asked(Reconstruct(epochs=7))


REFUSED = [
    ({"reconstruct": 0.5}, "give True, False, a number of epochs, or a mapping"),
    ({"reconstruct": Distill()}, "give True, False, a number of epochs, or a mapping"),
    ({"reconstruct": {"epoch": 3}}, "option 'epoch' is not known, did you mean 'epochs'"),
    ({"reconstruct": {"epochs": 0}}, "epochs=0: must be a positive whole number"),
    ({"reconstruct": {"epochs": [4, 0]}}, "epochs=0: must be a positive whole number"),
    ({"reconstruct": {"epochs": [4]}}, r"epochs=\[4\]: must be a positive whole number"),
    ({"reconstruct": {"learning_rate": 20}}, r"learning_rate=20: must be a number in \(0, 10\]"),
    ({"reconstruct": {"learning_rate": "fast"}}, r"learning_rate='fast': must be a number in \(0, 10\]"),
    ({"reconstruct": {"masks": "both"}}, "masks='both': allowed are 'frozen', 'move', 'auto'"),
    ({"reconstruct": {"norms_and_biases": 1}}, "norms_and_biases=1: must be True or False"),
    ({"sequential": "none"}, "on what the sparse blocks before it put out"),
    ({"update": False}, "update=False keeps the dense values, which reconstruct would change"),
    ({"data_loader": token_batches(1, batch=1)}, "needs two calibration batches"),
    ({"data_loader": None}, r"'magnitude\+reconstruct' needs calibration data"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_makes_no_sense_or_cannot_work_is_refused_before_any_work(options, message):
    options = {"data_loader": token_batches(BATCHES), "reconstruct": True, **options}
    refused(mts.sparsify, tiny_llama(), "magnitude", match=message, error=(TypeError, ValueError), **options)


@pytest.mark.parametrize("full", [0.01, 1.0])
@pytest.mark.parametrize(("error", "share"), [(400, 1.0), (0.25, 0.5), (1e-4, 0.01), (0.0, 0.0), (-1e-12, 0.0)])
def test_small_errors_are_mended_in_small_steps(error, share, full):
    """By the root of the error over the full one, for matrices and vectors alike."""
    weights = {nn.Parameter(torch.randn(6, 4)): None, nn.Parameter(torch.randn(6)): None}
    tuned, plain = (TunedWeights(weights, dict(zip(weights, [6, 0])), 0.4) for _ in range(2))
    tuned.scale_rate(error * full, full)
    assert [each.rate for each in tuned.members] == pytest.approx([each.rate * share for each in plain.members])


def test_the_error_of_the_block_decides(monkeypatch):
    seen = []
    monkeypatch.setattr(TunedWeights, "scale_rate", lambda self, error: seen.append(error))
    model = sparsified(reconstruct=1)
    assert seen == [block.error_before for block in mts.report(model).blocks]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_inside", [False, True])
def test_modes_of_the_caller_change_no_bit(mode, made_inside):
    """Data that is made in inference mode is as good as any other."""
    model, data = tiny_llama(), token_batches(BATCHES)
    with mode():
        sparsified(model, data_loader=[x.clone() for x in data] if made_inside else data)
    assert_same_state(model, expected())


def test_a_model_made_in_inference_mode_is_pruned_and_not_tuned():
    with torch.inference_mode():
        model = tiny_llama()
        refused(sparsified, model, match=r"need gradients: .* make the model outside of torch.inference_mode")
        mts.sparsify(model, "wanda", data_loader=token_batches(2), progress=False)
    mts.verify(model)
