"""What a model puts out, in every form and for every user of it, against float64 written out; padding; refusals."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutput

import modelopt_sparse as mts
from modelopt_sparse.accuracy.fisher import gradients_of
from modelopt_sparse.model.output import Output, OutputError
from modelopt_sparse.run import calibrating
from tests.helpers import calibrated_run, in_steps, judging_outputs, refused, tiny_llama, token_batches
from tests.models.expert_models import build

pytestmark = pytest.mark.core
WIDTH = 32  # of hidden states, and tokens of a window: a pooled output has the shape of a token mask
PADDING = 5


def mean_of_real(hidden, mask):
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def distance(dense, sparse):
    """A divergence of the user's own."""
    return (dense - sparse).abs()


def second(out):
    return out["b"]


# what it puts out of hidden states and mask; options; which tensor counts; whether there is one for each token
CASES = {
    "a tensor": (mean_of_real, {}, lambda out: out, False),
    "a tensor of logits": (mean_of_real, {"divergence": "kl"}, lambda out: out, False),
    "a sigmoid": (lambda h, m: mean_of_real(h, m).sigmoid(), {"divergence": "bernoulli"}, lambda out: out, False),
    "sigmoids of tokens": (lambda h, _: (h.sigmoid(),), {"divergence": "bernoulli"}, lambda out: out[0], True),
    "a tuple": (lambda h, m: (m, h), {}, lambda out: out[1], True),
    "the second of two": (lambda h, _: (h.mean(), h.exp(), h.tanh()), {"output": 2}, lambda out: out[2], True),
    "images": (lambda h, _: {"sample": h.unflatten(-1, (4, 8)), "step": 3}, {}, lambda out: out["sample"], True),
    "an encoder": (lambda h, _: BaseModelOutput(last_hidden_state=h), {}, lambda out: out.last_hidden_state, True),
    "a name and KL": (lambda h, _: {"a": h[:, 0], "b": h}, {"output": "b", "divergence": "kl"}, second, True),
    "functions": (lambda h, _: {"a": h, "b": h}, {"output": second, "divergence": distance}, second, True),
}


class PutsOut(LlamaModel):
    case = "an encoder"

    def forward(self, input_ids, attention_mask=None, **more):
        hidden = super().forward(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return CASES[self.case][0](hidden, mask)


def model_of(case, layers=2):
    torch.manual_seed(0)
    return type("PutsOut", (PutsOut,), {"case": case})(tiny_llama(num_hidden_layers=layers).config).eval()


def batches_of(other=0, count=4):
    """With ``other`` tokens where they are padding."""
    random, batches = torch.Generator().manual_seed(1), []
    for _ in range(count):
        ids = torch.randint(3, 90, (2, WIDTH), generator=random)
        mask = torch.ones_like(ids)
        mask[1, -PADDING:] = 0
        batches.append({"input_ids": torch.where(mask.bool(), ids, ids + other), "attention_mask": mask})
    return batches


def divergence_of(case):
    return CASES[case][1].get("divergence", "squared")


def gradients_in(case, model, batches):
    """(the plan of a run with the Fisher metric, the gradients that it takes)."""
    options = {"data_loader": batches, "reconstruct": {"metric": "fisher"}, **CASES[case][1]}
    run, data = calibrated_run(model, "wanda", **options)
    with calibrating(model):
        return gradients_of(data, run.plan.blocks, [plan.layer for plan in run.plan.layers])


def counting(case, model, batch):
    """The tensor that counts, in float64."""
    return CASES[case][2](copy.deepcopy(model).double()(**batch))


def without_padding(case, values, batch):
    return values[batch["attention_mask"].bool()] if CASES[case][3] else values


@torch.no_grad()
def apart(case, dense, sparse, batches):
    """The divergence by its definition, over all batches together."""
    p, q = (
        torch.cat([without_padding(case, counting(case, model, batch), batch) for batch in batches])
        for model in (dense, sparse)
    )
    by = divergence_of(case)
    if by == "kl":
        return float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean())
    if by == "bernoulli":
        return float((p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean())
    if by == "squared":
        return float((p - q).square().sum() / (p - p.mean()).square().sum())
    return float((p - q).abs().mean())


@pytest.fixture(params=CASES)
def case(request):
    return request.param


# the five users -----------------------------------------------------------------------------------------------------


def test_fisher_by_gradients_of_each_number(case):
    """Of blocks' outputs and rows of weights: drawn once more as the code draws them, summed up row by row."""
    model, batches, by = model_of(case), batches_of(count=2), divergence_of(case)
    ours = gradients_in(case, model, batches)
    exact = copy.deepcopy(model).double()
    informations = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in exact.layers]
    rows, of_all = {name: torch.zeros(ours.rows[name].shape, dtype=torch.float64) for name in ours.rows}, []
    outputs = []
    for block in exact.layers:
        block.register_forward_hook(lambda *call: outputs.append(call[-1]))
    for number, batch in enumerate(in_steps(batches)):
        outputs.clear()
        values = CASES[case][2](exact(**batch))
        predictions = values.shape[:-1] if by == "kl" else values.shape
        random = torch.Generator().manual_seed(number)
        drawn = torch.rand(predictions.numel(), generator=random, dtype=torch.float64).view(predictions)
        if by == "kl":
            chosen = (values.detach().softmax(-1).cumsum(-1) <= drawn.unsqueeze(-1)).sum(-1, keepdim=True)
            each = -values.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        elif by == "bernoulli":
            each = -torch.where(drawn >= 1 - values.detach(), values, 1 - values).log()
        else:
            each = values * torch.where(drawn < 0.5, -1, 1) * math.sqrt(2)
        real = without_padding(case, each, batch)
        of_all.append(without_padding(case, values.detach(), batch))
        weights = [exact.get_parameter(f"{name}.weight") for name in rows]
        gradients = torch.autograd.grad(real.sum(), [*outputs, *weights])
        for information, gradient in zip(informations, gradients):
            for row in gradient.flatten(0, -2):
                information += torch.outer(row, row)
        for total, gradient in zip(rows.values(), gradients[len(outputs) :]):
            total += gradient.square().sum(-1)
    values = torch.cat(of_all)
    sizes = {"kl": len(values.flatten(0, -2)), "squared": float((values - values.mean()).square().sum())}
    assert ours.tokens == pytest.approx(sizes.get(by, values.numel()), rel=1e-4)
    for block, information in zip(model.layers, informations):
        scale = float(information.abs().max())
        torch.testing.assert_close(ours.informations[block].double(), information, rtol=1e-3, atol=1e-4 * scale)
    for name, total in rows.items():
        torch.testing.assert_close(ours.rows[name], total, rtol=1e-3, atol=1e-4 * float(total.max()))


def test_a_budget_measures_plans(case):
    """As the finished model is, whose layers were solved on inputs of the dense one."""
    model, dense, batches = model_of(case), model_of(case), batches_of()
    how = {"sequential": "none", "progress": False, **CASES[case][1]}
    report = mts.report(mts.sparsify(model, "sparsegpt", budget="40% zeros", data_loader=batches, **how))
    said = report.settings["budget"]
    judging = in_steps(batches)[-1:]
    assert said["tried"][said["taken"]][1] == pytest.approx(apart(case, dense, model, judging), rel=1e-3)
    by = divergence_of(case)
    assert report.settings.get("divergence", "kl") == getattr(by, "__name__", by)


def test_distillation_comes_closer(case):
    model, dense, batches = model_of(case), model_of(case), batches_of(count=9)
    mts.sparsify(model, "wanda", data_loader=batches, distill=2, progress=False, **CASES[case][1])
    report = mts.report(model).distillation
    assert report.kl_after == pytest.approx(apart(case, dense, model, judging_outputs(in_steps(batches))), rel=1e-3)
    assert report.kl_after < report.kl_before


def test_blocks_go_by_what_the_model_puts_out(case):
    model, dense, batches = model_of(case, 3), model_of(case, 3), batches_of()
    shrunk = mts.report(mts.shrink(model, blocks=1, data_loader=batches, progress=False, **CASES[case][1])).shrunk
    assert shrunk.kl["as is"] == pytest.approx(apart(case, dense, model, batches[-1:]), rel=1e-3)
    divergences = [*shrunk.tried[0].values()]
    stays = [place for place in range(3) if place != divergences.index(min(divergences))]
    for block, place in zip(model.layers, stays, strict=True):
        assert torch.equal(block.mlp.up_proj.weight, dense.layers[place].mlp.up_proj.weight)
    tried = batches[1:-1] if len(batches[0]["input_ids"]) * 3 > 8 else batches[:-1]  # eight rows that do not judge
    assert min(divergences) == pytest.approx(apart(case, dense, model, tried), rel=1e-3)


def test_the_judge(case):
    dense, batches = model_of(case), batches_of()
    model = mts.sparsify(model_of(case), "magnitude")
    evaluation = mts.evaluate(model, batches, reference=dense, progress=False, **CASES[case][1])
    assert evaluation.kl == pytest.approx(apart(case, dense, model, batches), rel=1e-3)
    assert (evaluation.perplexity, evaluation.windows, evaluation.seq_len) == (None, 8, None)
    by = divergence_of(case)
    assert evaluation.divergence == getattr(by, "__name__", by)
    assert mts.Evaluation.from_dict(evaluation.as_dict()) == evaluation
    mts.report(model).evaluation = evaluation
    assert f"{evaluation.kl:.4f}" in str(evaluation)
    assert f"held-out batches: {evaluation}" in mts.report(model).text().replace("\n  ", " ")


classifier = partial(build, "BertForSequenceClassification", "BertConfig", vocab_size=97, num_labels=3)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_logits_that_are_no_classes(problem):
    """KL divergence of their softmax would say nothing of them."""
    dense = classifier(problem_type=problem)()
    model, batches = mts.sparsify(copy.deepcopy(dense), "magnitude"), batches_of()
    evaluation = mts.evaluate(model, batches, reference=dense, progress=False)
    with torch.no_grad():
        p, q = (torch.cat([each(**batch).logits for batch in batches]).double() for each in (dense, model))
    if problem == "regression":
        assert evaluation.kl == pytest.approx(float((p - q).square().sum() / (p - p.mean()).square().sum()), rel=1e-4)
        return
    terms = p.sigmoid() * (p.sigmoid() / q.sigmoid()).log() + (-p).sigmoid() * ((-p).sigmoid() / (-q).sigmoid()).log()
    assert evaluation.kl == pytest.approx(float(terms.mean()), rel=1e-4)
    assert evaluation.divergence == "bernoulli"


def test_calls_with_labels_leave_the_config_as_it_was():
    """transformers' loss writes there what kind of problem the labels are."""
    model = classifier()()
    before, labels = model.config.to_dict(), torch.eye(3)[[0, 1]]
    batches = [{"input_ids": ids, "labels": labels} for ids in token_batches(2)]
    mts.sparsify(model, "wanda", data_loader=batches, progress=False)
    assert model.config.to_dict() == before
    model(**batches[0])
    assert model.config.to_dict() != before


# the meaning of gradients -------------------------------------------------------------------------------------------


def test_losses_of_a_linear_model_are_its_squared_error():
    """Which is of second order in the weights, so that sum of losses and measured error are one number."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    mts.sparsify(model, "sparsegpt", budget="50% zeros", include="*", data_loader=[torch.randn(512, 64)] * 2)
    said = mts.report(model).settings["budget"]
    total, measured = said["tried"][said["taken"]]
    assert total == pytest.approx(measured, rel=0.05)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return {"sample": self.last(x)}


def test_a_net_that_puts_out_images():
    """Its weights have gradients; its output has no metric, for which of its axes is of channels is not known."""
    torch.manual_seed(0)
    model = Convolutions()
    images = [torch.randn(4, 3, 8, 8) for _ in range(5)]
    how = {"reconstruct": {"epochs": 1, "metric": "auto"}, "distill": 1, "include": "*", "progress": False}
    report = mts.report(mts.sparsify(model, "sparsegpt", budget="30% zeros", data_loader=images, **how))
    assert report.distillation.kl_after <= report.distillation.kl_before < 1
    assert any("no gradient of the output reaches a block" in note for note in report.notes)
    printed = report.text().replace("\n  ", " ")
    assert "distilled: squared error from the dense model" in printed
    assert "squared error from dense on the batches held back" in printed


# padding ------------------------------------------------------------------------------------------------------------


def test_which_outputs_have_a_value_for_each_token():
    """``[batch, hidden]`` has none, whatever its size; what is flattened to rows of tokens has."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = torch.arange(18.0).view(2, 3, 3)
    rows = {
        "tokens": (values, None, 9),
        "tokens by KL": (values, "kl", 3),
        "images of tokens": (values.unsqueeze(-1), None, 9),
        "rows of tokens": (values.flatten(0, 1), "kl", 3),
        "pooled": (torch.arange(6.0).view(2, 3), None, 6),
        "pooled by KL": (torch.arange(6.0).view(2, 3), "kl", 2),
        "others": (torch.arange(24.0).view(2, 4, 3), None, 24),
    }
    for name, (output, by, wanted) in rows.items():
        counts = Output.of(output, None, by, mask)
        assert len(counts.apart(counts)) == len(counts.drawn_loss(0)) == wanted, name


@pytest.mark.parametrize("by", ["kl", "squared"])
def test_padding_may_hold_nan_and_draws_no_other_labels(by):
    mask, values = torch.tensor([[1, 1, 0], [1, 0, 1]]), torch.randn(2, 3, 5)
    torn = values.masked_fill(mask[..., None] == 0, torch.nan)
    losses = [Output.of(x, None, by, token_mask).drawn_loss(7) for x, token_mask in ((values, None), (torn, mask))]
    assert torch.equal(losses[0].view(2, 3, -1)[mask.bool()].flatten(), losses[1])


# by hand ------------------------------------------------------------------------------------------------------------


def test_logits_are_taken_where_there_are_some():
    logits, other = torch.randn(2, 3), torch.randn(2, 5)
    for output in (SimpleNamespace(logits=logits, other=other), {"other": other, "logits": logits}):
        counts = Output.of(output, None, None, None)
        assert (counts.values is logits, counts.by, counts.is_logits) == (True, "kl", True)
        assert Output.of(output, "other", None, None).by == "squared"
    for shape in ((2, 1), (2, 3, 4, 4), (5,)):  # of regressions, and of images
        assert Output.of({"logits": torch.randn(shape), "other": other}, None, None, None).by == "squared"
    several = Output.of({"logits": logits, "other": other}, None, "bernoulli", None)
    assert torch.equal(several.values[..., 1], logits)


def test_a_head_goes_beside_its_logits_alone():
    """Of another output the teacher keeps the output itself."""
    batches = [{"input_ids": batch["input_ids"]} for batch in batches_of()]
    how = {"data_loader": batches, "distill": 1, "progress": False, "output": lambda output: output.logits.tanh()}
    model = mts.sparsify(tiny_llama(), "wanda", **how)
    report = mts.report(model).distillation
    with torch.no_grad():
        held_back = judging_outputs(in_steps(batches))
        outputs = [[each(**step).logits.tanh() for step in held_back] for each in (tiny_llama(), model)]
        dense, sparse = (torch.cat(of_model).double() for of_model in outputs)
    wanted = (dense - sparse).square().sum() / (dense - dense.mean()).square().sum()
    assert report.kl_after == pytest.approx(float(wanted), rel=1e-3)


# what is refused ----------------------------------------------------------------------------------------------------

TWO = {"left": torch.randn(2, 3), "right": torch.randn(2, 4), "ids": torch.arange(3)}
REFUSED = {
    r"a dict with no logits but 'left' \[2, 3\], 'right' \[2, 4\]: give output=": (TWO, None, None),
    r"a dict with no 'middle' but 'left'": (TWO, "middle", None),
    r"a dict with no 'ids' but 'left'": (TWO, "ids", None),
    r"a dict with no 7 but 'left'": (TWO, 7, None),
    r"a dict with no '<lambda>' but 'left'": (TWO, lambda output: 3, None),
    r"a list with no logits but no tensor of numbers": ([3, "x"], None, None),
    r"divergence='kl' is of logits \[..., classes\], not of \[3\]": (torch.randn(3), None, "kl"),
    r"divergence='kl' is of logits \[..., classes\], not of \[3, 1\]": (torch.randn(3, 1), None, "kl"),
    r"divergence='bernoulli' is of numbers in \[0, 1\]": (torch.tensor([0.5, 1.5]), None, "bernoulli"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_outputs_that_are_refused(message):
    output, which, by = REFUSED[message]
    refused(Output.of, output, which, by, None, match=message, error=OutputError)


OPTIONS = {
    "output=-1: give a name, an index, or a function": {"output": -1},
    "output=True: give a name": {"output": True},
    "divergence='hinge': give kl, squared, bernoulli, or a function of (dense, sparse)": {"divergence": "hinge"},
    "output go with budget=, distill= or reconstruct's metric: give one": {"output": "x", "distill": None},
    "output and divergence go with budget=": {"output": 0, "divergence": "kl", "distill": None},
    "divergence go with budget=": {"divergence": "squared", "reconstruct": 1, "distill": None},
}


@pytest.mark.parametrize("message", OPTIONS)
def test_options_that_are_refused(message):
    options = {"data_loader": batches_of(), "distill": 1, **OPTIONS[message]}
    refused(mts.sparsify, model_of("a tensor"), "wanda", **options, parts=[message])


def test_what_the_judge_refuses():
    model, batches = model_of("an encoder"), batches_of()
    refused(mts.evaluate, model, batches, match=r"batches have no perplexity.*give reference=")
    match = r"the output of the reference is .*, and the other's is .*: give the dense"
    refused(mts.evaluate, model, batches, match=match, reference=model_of("images"))
    broken = model_of("an encoder")
    broken.norm.weight.data[0] = torch.nan
    refused(mts.evaluate, broken, batches, match="a model's output holds NaN or inf", reference=model)


def test_text_is_batches_where_a_divergence_is_named():
    tokens = torch.arange(3, 3 + 2 * WIDTH + 5) % 90
    model, dense = mts.sparsify(tiny_llama(), "magnitude"), tiny_llama()
    how = {"reference": dense, "divergence": "squared", "progress": False}
    evaluation = mts.evaluate(model, tokens, seq_len=WIDTH, batch_size=1, **how)
    batches = [{"input_ids": ids[None]} for ids in tokens[: 2 * WIDTH].split(WIDTH)]
    assert evaluation == mts.evaluate(model, batches, **how)
    assert (evaluation.perplexity, evaluation.windows) == (None, 2)
