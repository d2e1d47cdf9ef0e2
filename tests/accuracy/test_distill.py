"""Distillation of the whole model: its steps against a plain training loop, what it judges by, changes and refuses."""

import copy
import itertools
import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForSequenceClassification
from transformers.modeling_outputs import CausalLMOutput

import modelopt_sparse as mts
from modelopt_sparse.accuracy import tuning
from modelopt_sparse.accuracy.distill import Teacher, distill_from
from modelopt_sparse.accuracy.tuning import TunedWeights, learning_rates, schedule
from modelopt_sparse.calibration.data import Call, split_steps
from modelopt_sparse.distributed import Processes
from modelopt_sparse.run import InMemory, calibrating
from tests import helpers
from tests.accuracy.tuned import BATCHES, Adam, tuned_model
from tests.helpers import assert_same_state, in_steps, refused, state_of, tiny_llama, token_batches
from tests.interruptions import interrupted
from tests.models.architectures import ARCHITECTURES
from tests.models.expert_models import build as built
from tests.models.tiny import TwoOutputs, masked_bert, tiny_gpt2, tiny_mixtral, tiny_t5

pytestmark = pytest.mark.core
sparsified = partial(tuned_model, distill=2)


def mean_kl(dense, sparse):
    """Of rows of logits [T, V], by its definition."""
    p, q = dense.double().log_softmax(-1), sparse.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


@torch.no_grad()
def logits_of(model, **inputs):
    return model(**inputs).logits.flatten(0, -2)


# what it does -------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_loop():
    """In float64: a copy of the dense model teaches, Adam is written out, pruned places are multiplied away."""
    model, dense = tiny_llama().double(), tiny_llama().double()
    student, batches = sparsified(tiny_llama().double(), distill=None), in_steps(token_batches(BATCHES))
    masks = {name: mask.clone() for name, mask in mts.named_masks(student)}
    student = mts.export(student)
    tuned = {name: p for name, p in student.named_parameters() if name in masks or p.dim() == 1}
    outputs = [p.shape[0] if name in masks else 0 for name, p in tuned.items()]
    rates = learning_rates([*tuned.values()], [masks.get(name) for name in tuned], outputs, 0.12)
    adams = {name: Adam(p) for name, p in tuned.items()}
    held_back = torch.cat(helpers.judging_outputs(batches))
    tuned_on = len(batches) - len(held_back)
    order, step, steps = torch.Generator().manual_seed(0), 0, 2 * tuned_on

    def judge():
        return float(mean_kl(logits_of(dense, input_ids=held_back), logits_of(student, input_ids=held_back)))

    before = best = judge()
    assert before < 1
    rates = [rate * math.sqrt(before) for rate in rates]
    result = copy.deepcopy(student.state_dict())
    for _ in range(2):
        for number in torch.randperm(tuned_on, generator=order).tolist():
            student.zero_grad()
            sparse = student(input_ids=batches[number]).logits.flatten(0, -2)
            taught = logits_of(dense, input_ids=batches[number])
            (mean_kl(taught, sparse) * len(taught)).backward()
            with torch.no_grad():
                for (name, parameter), rate in zip(tuned.items(), rates):
                    direction = adams[name].direction(parameter.grad * masks.get(name, 1))
                    parameter -= rate * schedule(step, steps) * direction
            step += 1
        if judge() < best:
            best, result = judge(), copy.deepcopy(student.state_dict())
    sparsified(model, distill={"moments": "float32"})
    assert best < before
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), result[name], rtol=1e-6, atol=1e-9)
    report = mts.report(model).distillation
    assert (report.kl_before, report.kl_after) == pytest.approx((before, best), rel=1e-6)


def test_moments_in_bfloat16_are_rounded_between_steps_alone():
    """Adam written out in float32, its moments rounded after each step; a mask holds values of kept weights alone."""
    weight, mask = nn.Parameter(torch.randn(6, 8)), torch.rand(6, 8) > 0.5
    (tuned,) = TunedWeights({weight: mask}, {weight: 6}, 0.4, moments=torch.bfloat16).members
    values = weight.detach()[mask]
    adam = Adam(values)
    for step in range(1, 6):
        gradient = torch.randn(int(mask.sum())) * 10.0**-step
        values = values - tuned.rate * adam.direction(gradient)
        adam.moments = [moment.bfloat16().float() for moment in adam.moments]
        tuned.step(gradient, 1.0)
        torch.testing.assert_close(tuned.values, values)
        assert {tuned.adam.state[tuned.values][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    torch.testing.assert_close(weight.detach(), torch.zeros(6, 8).masked_scatter(mask, values))


def test_only_kept_weights_norms_and_biases_change():
    model = sparsified(tiny_gpt2(), include="*.mlp.*")
    without = dict(sparsified(tiny_gpt2(), include="*.mlp.*", distill=None).named_parameters())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, without[name])}
    for name in without:
        assert (name in changed) == (".ln_" in name or ".mlp." in name), name
    for name, mask in mts.named_masks(model):
        assert torch.equal(model.get_parameter(name) != 0, mask)


NEVER_WORSE = [
    {"distill": {"learning_rate": 10}},
    {"distill": {"epochs": 1}, "reconstruct": {"epochs": 1, "masks": "move"}},
]


@pytest.mark.parametrize("options", NEVER_WORSE)
@pytest.mark.parametrize("data", ["few", "constant"])
def test_never_worse_on_what_is_held_back(options, data):
    batches = token_batches(3) if data == "few" else [torch.full((2, 16), 5)] * 4
    model = sparsified(data_loader=batches, **options)
    report = mts.report(model).distillation
    held_back = in_steps(batches)[-1]
    dense, without = tiny_llama(), sparsified(data_loader=batches, **{**options, "distill": None})
    goal = logits_of(dense, input_ids=held_back)
    after, before = (float(mean_kl(goal, logits_of(each, input_ids=held_back))) for each in (model, without))
    assert after <= before
    assert (report.kl_before, report.kl_after) == pytest.approx((before, after), rel=1e-4, abs=1e-6)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if report.epoch == 0:
        assert_same_state(model, state_of(without))


@pytest.mark.parametrize(
    ("judged", "best"), [([0.5, 0.2, 0.4], 2), ([0.5, 0.4, 0.2], 3), ([0.5, 0.6, 0.7], 1), ([2.0, 3.0, 4.0], 0)]
)
def test_the_values_of_the_best_epoch_are_kept(judged, best):
    """Not those of the last; and of no epoch if none is better than before."""
    parameter = nn.Parameter(torch.ones(2, 3))
    weights = TunedWeights({parameter: None}, {parameter: 2}, 0.01)
    at_the_end = [parameter.detach().clone()]

    def judge() -> float:
        at_the_end.append(parameter.detach().clone())
        return judged[len(at_the_end) - 2]

    batches = tuning.BatchNumbers.of(Processes(), [None] * 4, 0)
    found = tuning.tune(weights, batches, 3, 0, lambda _: parameter.square().sum(), judge, 1.0)
    assert found[:2] == ([1.0, *judged][best], best)
    assert torch.equal(parameter, at_the_end[best])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(at_the_end))


def test_labels_are_the_models_own_affair_and_a_rerun_has_the_same_bits():
    """A loss of the model's would have the dense predictions in its batch."""
    batches = [{"input_ids": ids, "labels": ids} for ids in token_batches(BATCHES)]
    assert_same_state(sparsified(data_loader=batches), state_of(sparsified()))


@pytest.mark.parametrize("build", [tiny_llama, masked_bert])
def test_batches_that_ask_for_tuples(build):
    batches = [{"input_ids": ids, "return_dict": False} for ids in token_batches(4)]
    model = mts.sparsify(build(), "wanda", data_loader=batches, self_data="auto", distill=1, progress=False)
    assert mts.report(model).distillation.kl_after > 0


def test_labels_that_no_decoder_inputs_are_made_of():
    build = ARCHITECTURES["whisper"].build
    batches = ARCHITECTURES["whisper"].batches("right")
    for batch in batches:
        batch["labels"] = batch.pop("decoder_input_ids")
    options = {"data_loader": batches, "progress": False}
    words = "a WhisperForConditionalGeneration tells no decoder_input_ids from labels: give both"
    refused(mts.sparsify, build(), "wanda", distill=1, match=words, **options)
    assert f"no distillation: {words}" in mts.report(mts.sparsify(build(), "wanda", distill="auto", **options)).notes


def test_class_labels_are_no_tokens_of_a_decoder():
    """A classifier on an encoder-decoder makes its decoder's inputs of its own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    sizes |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in HEADS.items()}
    batches = [
        {"input_ids": ids, "labels": torch.zeros(len(ids), dtype=torch.long)} for ids in token_batches(4, vocab=53)
    ]
    for batch in batches:
        batch["input_ids"][:, -1] = 2  # the end, where the classifier looks
    model = BartForSequenceClassification(BartConfig(num_labels=3, eos_token_id=2, pad_token_id=52, **sizes))
    mts.sparsify(model, "wanda", data_loader=batches, distill=1, progress=False)
    assert mts.report(model).distillation.kl_before > 0


HEADS = {"ffn_dim": 32, "attention_heads": 2}


def test_one_row_alone_makes_no_step():
    model = sparsified(tiny_llama(), data_loader=[token_batches(1)[0][:1]])
    assert mts.report(model).distillation.notes == []


def test_tokens_that_labels_call_padding_do_not_count():
    """Labels are left out of the calls, and still tell the padding of a decoder."""
    batches = pairs()
    for batch in batches:
        batch["labels"][1, 5:] = -100
    run, calibration = helpers.calibrated_run(encoder_decoder(), "wanda", data_loader=batches, distill=True)
    with calibrating(run.model):
        teacher = Teacher.of(calibration)
        rows = sum(teacher.divergence(index)[1] for index in range(len(teacher.answers)))
    assert rows == sum(int((batch["labels"] != -100).sum()) for batch in batches)


def test_hooks_of_the_users_get_no_gradients():
    """They may scale them, or take a step of an optimizer; afterwards they are there again."""
    model, seen = tiny_llama(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(1) or gradient * 0)
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))
    options = {"reconstruct": {"epochs": 1, "metric": "fisher"}}
    assert_same_state(sparsified(model, **options), state_of(sparsified(**options)))
    assert not seen
    model(token_batches(1)[0]).logits.sum().backward()
    assert seen.count(1) == seen.count(2) == len([*model.parameters()])


def test_a_head_that_is_pruned_is_no_teacher():
    """The divergence that the report states is that from the dense model, with its dense head."""
    batches = [token_batches(1)[0][:1].repeat(2, 1)] * BATCHES
    dense, model = (tiny_llama(tie_word_embeddings=False) for _ in range(2))
    sparsified(model, data_loader=batches, include=["model.layers.*", "lm_head"])
    assert "lm_head.weight" in dict(mts.named_masks(model))
    kl = mean_kl(*(logits_of(x, input_ids=batches[0]) for x in (dense, model)))
    assert mts.report(model).distillation.kl_after == pytest.approx(float(kl), rel=1e-4)


# models -------------------------------------------------------------------------------------------------------------

CAPPED = {"vocab_size": 97, "head_dim": 8, "final_logit_softcapping": 2.0}
VISION = {"image_size": 16, "patch_size": 8, "num_labels": 5}


def encoder_decoder():
    model = tiny_t5()
    model.config.decoder_start_token_id = 0
    return model


def pairs():
    return [{"input_ids": ids, "labels": ids.flip(-1)} for ids in token_batches(4)]


TEXTS = [{"input_ids": ids} for ids in token_batches(4)]
IMAGES = [{"pixel_values": x} for x in torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0)).split(4)]
MODELS = {
    "logits that are capped": (built("Gemma2ForCausalLM", "Gemma2Config", **CAPPED), TEXTS),
    "encoder and decoder": (encoder_decoder, pairs()),
    "a classifier of images": (built("ViTForImageClassification", "ViTConfig", **VISION), IMAGES),
    "experts": (tiny_mixtral, TEXTS),
}
CLOSER = {
    **MODELS,
    "bfloat16": (lambda: tiny_llama().bfloat16(), TEXTS * 2),
    "float16": (lambda: tiny_llama().half(), TEXTS * 2),
    "magnitude, which needs no data": (tiny_llama, TEXTS),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_teacher_predicts_what_the_dense_model_did(name):
    build, batches = MODELS[name]
    model, dense = build(), build()
    run, calibration = helpers.calibrated_run(model, "wanda", data_loader=batches, distill=True)
    with calibrating(model):
        teacher = Teacher.of(calibration)
        for layer_plan in run.plan.layers:
            layer_plan.layer.parameter.mul_(0.7)
        changed = copy.deepcopy(model)
        for index, call in enumerate(calibration.calls):
            batch = call.kwargs
            taught, sparse = (each.values.flatten(0, -2) for each in teacher.outputs(index))
            torch.testing.assert_close(taught, logits_of(dense, **batch))
            torch.testing.assert_close(sparse, logits_of(changed, **batch))


@pytest.mark.parametrize("kind", ["Bert", "Esm"])  # their heads' bias is another module's as well, or its alone
def test_what_makes_the_dense_models_predictions_as_well_stays(kind):
    model = built(f"{kind}ForMaskedLM", f"{kind}Config", vocab_size=97, num_hidden_layers=1)()
    bias = model.cls.predictions.bias if kind == "Bert" else model.lm_head.bias
    bias.data.normal_()
    dense, before, batches = copy.deepcopy(model), bias.clone(), token_batches(16)
    mts.sparsify(model, "wanda", data_loader=batches, distill={"epochs": 3, "learning_rate": 0.5}, progress=False)
    assert torch.equal(bias, before)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters()) if a.dim() == 1)
    judges = torch.cat(helpers.judging_outputs(in_steps(batches)))
    kl = mean_kl(logits_of(dense, input_ids=judges), logits_of(model, input_ids=judges))
    assert mts.report(model).distillation.kl_after == pytest.approx(float(kl), rel=1e-4)


@pytest.mark.parametrize("name", CLOSER)
def test_models_come_closer(name):
    build, batches = CLOSER[name]
    method, (dtype,) = "magnitude" if "magnitude" in name else "wanda", {p.dtype for p in build().parameters()}
    model = sparsified(build(), method, data_loader=batches * 3)
    report = mts.report(model).distillation
    assert report.kl_after < report.kl_before
    assert not math.isnan(report.seconds)
    assert {p.dtype for p in model.parameters()} == {dtype}
    mts.verify(model, "2:4")
    assert {layer.recipe for layer in mts.report(model).layers} == {f"{method}+distill"}


# how it leaves things -----------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_came():
    model = tiny_llama()
    model.model.norm.weight.requires_grad_(False)
    model.train()
    look = [(type(m), m.training) for m in model.modules() if not isinstance(m, nn.Linear)]
    sparsified(model)
    assert [(type(m), m.training) for m in model.modules() if not isinstance(m, nn.Linear)] == look
    assert not model.model.norm.weight.requires_grad
    assert model.model.layers[0].mlp.up_proj.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if type(m) is nn.Embedding)


@pytest.mark.parametrize("stopped_in", [3, 25])
def test_an_interruption_leaves_the_best_values_so_far(monkeypatch, stopped_in):
    """In the first epoch those from before, later those of the best epoch."""
    judged = []
    judge = tuning.BatchNumbers.validation_error
    monkeypatch.setattr(tuning.BatchNumbers, "validation_error", lambda *a: judged.append(judge(*a)) or judged[-1])
    model, dense = tiny_llama(), tiny_llama()
    held_back = torch.cat(helpers.judging_outputs(in_steps(token_batches(BATCHES))))
    before = [type(layer) for layer in model.model.layers]
    with interrupted(tuning, "_take_step", stopped_in):
        sparsified(model)
    assert [type(layer) for layer in model.model.layers] == before
    kl = mean_kl(*(logits_of(each, input_ids=held_back) for each in (dense, model)))
    assert float(kl) == pytest.approx(min(judged), rel=1e-4)
    assert (len(judged), judged[-1] < judged[0]) == ((1, False) if stopped_in == 3 else (2, True))
    mts.verify(model, "2:4")
    assert "distillation was broken off; the model has the best values up to then" in mts.report(model).notes


def test_blocks_keep_no_activations(monkeypatch):
    """Each runs twice for each batch, and once more in the backward pass, in the opposite order."""
    calls = []
    monkeypatch.setattr(InMemory, "load", lambda self, block: calls.append(block))
    model = sparsified(distill=1)
    blocks = list(model.model.layers)
    expected = [*blocks, *reversed(blocks)] * (2 * BATCHES - 4)
    assert calls[-len(expected) :] == expected
    assert not any("forward" in block.__dict__ for block in blocks)


# report, plan, refusals ---------------------------------------------------------------------------------------------


def test_report_and_plan_say_it():
    report = mts.report(sparsified())
    text = " ".join(report.text().split())
    kls = f"KL from the dense model {report.distillation.kl_before:.4f} -> {report.distillation.kl_after:.4f} nats"
    assert kls in text
    assert " s of distillation" in text
    assert report.settings["distill"] == {"epochs": 2, "learning_rate": 0.12, "moments": "bfloat16", "optional": False}
    older = {key: value for key, value in report.as_dict().items() if key != "distillation"}
    assert mts.Report.from_dict(older).distillation is None
    plan = mts.make_plan(tiny_llama(), "wanda", distill=True)
    assert {layer.recipe for layer in plan.layers} == {"wanda+distill"}


class Centred(type(tiny_llama())):
    """What its head puts out is centred over the whole batch."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["logits"] = output.logits - output.logits.mean((0, 1))
        return output


class ReadingItsHead(type(tiny_llama())):
    """It multiplies with its head's weight itself, as MobileBERT does."""

    def forward(self, *args, **kwargs):
        hidden = self.model(*args, **kwargs).last_hidden_state
        return CausalLMOutput(logits=hidden @ self.lm_head.weight.mT)


def test_a_head_that_is_never_called():
    """Whose weight the model reads: the outputs themselves are kept, and the result is that of the head's calls."""
    reading, calling = tiny_llama(), tiny_llama()
    reading.__class__ = ReadingItsHead
    sparsified(reading)
    sparsified(calling)
    torch.testing.assert_close([*reading.parameters()], [*calling.parameters()], rtol=1e-3, atol=1e-4)


REFUSED = [
    ({"enforce": False}, ["enforce=False leaves none", "export(model)"]),
    ({"update": False}, ["update=False keeps the dense values, which distill would"]),
    ({"distill": {"rate": 1}}, ["distill: option 'rate' is not known"]),
    ({"distill": {"epochs": 0}}, ["distill: epochs=0: must be a positive"]),
    ({"distill": {"learning_rate": 0}}, ["distill: learning_rate=0: must be"]),
    ({"distill": {"moments": "float16"}}, ["distill: moments='float16': allowed are 'bfloat16', 'float32'"]),
    ({"device": "meta"}, ["distill runs the whole model, which is on cpu"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_are_refused(options, words):
    refused(sparsified, tiny_llama(), **options, parts=words)


def test_what_is_refused(tmp_path):
    model, calls = TwoOutputs(tiny_llama().config).eval(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    parts = ["no logits but 'last_hidden_state'", "'pooled'", "give output=, a name"]
    assert "batch 0" not in refused(sparsified, model, parts=parts)
    assert len(calls) == 1
    centred = tiny_llama()
    centred.__class__ = Centred
    refused(sparsified, centred, parts=["distill: the output head puts out something else beside other samples"])
    refused(sparsified, encoder_decoder(), data_loader=pairs(), output=1, match="output=1 counts the loss.*a name")
    shrinking = {"blocks": 1, "data_loader": token_batches(), "progress": False}
    refused(mts.shrink, centred, **shrinking, match="the output head .*: give output=")
    refused(mts.SparsifyConfig, forward_loop=print, distill=True, match="distill calls the model itself")
    refused(mts.sparsify, tiny_llama(), "magnitude", match="distill needs calibration data", distill=True)
    tiny_llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="distill runs the whole model, which"):
        mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "out", distill=True, data_loader=token_batches(2))
    assert not (tmp_path / "out").exists()


def test_a_head_may_round_otherwise_for_more_rows():
    """As a GPU does: its kernels differ by the number of rows, by up to the ten bits of TF32."""
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda head, args, out: out * (1 + 2**-10 * (len(args[0]) > 1)))
    assert mts.report(sparsified(model, data_loader=token_batches(4))).distillation is not None


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_bounds_what_it_takes(dtype, moments):
    """Measured over the step alone, at a width where matrices outweigh a step's activations."""
    model = tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=97).to(dtype)
    data = [torch.randint(3, 97, (1, 8)) for _ in range(4)]
    options = {"data_loader": data, "distill": {"epochs": 1, "moments": moments}}
    plan = mts.make_plan(model, "magnitude", **options)
    mts.sparsify(model, "magnitude", progress=False)
    run, calibration = helpers.calibrated_run(model, "magnitude", replace=True, **options)
    with calibrating(model):
        teacher = Teacher.of(calibration)
        with helpers.LiveBytes(*model.parameters(), *model.buffers()) as live:
            distill_from(teacher, run)
    stated = plan.memory["distillation"] + plan.memory["distillation_on_the_host"]
    assert stated / 2 < live.peak < 1.1 * stated
    whole = sum(layer.size for layer in plan.layers) * (12 if moments == "float32" else 8)
    assert live.peak < whole, "no state of pruned weights is held"


# units of a batch -----------------------------------------------------------------------------------------------------


def test_units_are_rows_of_a_batch_and_know_their_step():
    first, second = (Call((torch.arange(rows * 3).view(rows, 3),), {}) for rows in (10, 2))
    mixed = Call((torch.zeros(4, 3), torch.zeros(4, 2, 3)), {})
    found = split_steps([first, second, mixed], 3, first=5)
    assert [(len(each.args[0]), each.step) for each in found] == [(4, 5)] * 2 + [(2, 5)] + [(1, 6)] * 2 + [(4, 7)]
    assert [each.row for each in found] == [0, 4, 8, 0, 1, 0]
    assert torch.equal(torch.cat([each.args[0] for each in found[:3]]), first.args[0])


LEFT_OUT = [
    ("no logits but", {"data_loader": token_batches(4)}),
    ("enforce=False", {"data_loader": token_batches(4), "enforce": False}),
    ("a forward_loop", {"forward_loop": lambda model: [model(batch) for batch in token_batches(4)]}),
]


@pytest.mark.parametrize(("why", "more"), LEFT_OUT)
def test_quality_max_leaves_out_what_the_model_cannot_have(why, more):
    """The report says so; asked for by name, it is an error."""
    model = TwoOutputs(tiny_llama().config)
    report = mts.report(mts.sparsify(model, None, quality="max", pattern="2:4", reconstruct=1, progress=False, **more))
    assert [note for note in report.notes if note.startswith("no distillation: ") and why in note]
    assert report.distillation is None
    assert report.settings["distill"] is None
    assert not any("distill" in layer.recipe for layer in report.layers)


def test_where_no_epoch_is_better_all_are_made_again_at_a_quarter_of_the_rate():
    """At 4 the steps lose more than they gain; then it is a run at 1."""
    quarter, whole = (sparsified(distill={"epochs": 1, "learning_rate": rate}) for rate in (1.0, 4.0))
    assert_same_state(whole, state_of(quarter))
    assert mts.report(whole).distillation.epoch == 1


def test_quality_leaves_distillation_out_where_memory_is_short(monkeypatch):
    """Hours of calibration would end in an error; asked for by name, it is tried."""
    monkeypatch.setattr("modelopt_sparse.accuracy.distill.bytes_of", lambda device: (math.inf, 1000))
    options = {"pattern": "2:4", "data_loader": token_batches(4), "progress": False, "reconstruct": 1}
    report = mts.report(mts.sparsify(tiny_llama(), quality="best", **options))
    assert report.distillation is None
    assert [note for note in report.notes if re.fullmatch(r"no distillation: it takes [\d,]+ bytes on cpu, .*", note)]
    assert mts.report(mts.sparsify(tiny_llama(), **options, distill=1)).distillation is not None


def test_a_distillation_stands_as_long_as_layers_of_it_do():
    model = mts.sparsify(tiny_llama(), "sparsegpt", distill=1, data_loader=token_batches(), progress=False)
    before = mts.report(model).distillation
    mts.sparsify(model, "magnitude", pattern="1:4", include="*.up_proj", progress=False)
    assert "sparsegpt+distill" in {row.recipe for row in mts.report(model).layers}
    assert mts.report(model).distillation == before
    mts.sparsify(model, "magnitude", pattern="1:4", progress=False)
    assert mts.report(model).distillation is None
