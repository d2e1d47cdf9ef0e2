"""Budgets: losses against gradients taken one by one, and what a run makes of them."""

import json
import math
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

import modelopt_sparse as mts
from modelopt_sparse import oneshot
from modelopt_sparse.accuracy import fisher
from modelopt_sparse.budget import losses as solving
from modelopt_sparse.budget.costs import lowered
from modelopt_sparse.calibration import dense as calibrated
from modelopt_sparse.methods.patterns import parse_pattern
from modelopt_sparse.run import calibrating
from tests import helpers
from tests.helpers import assert_same_masks, assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models import expert_models as experts
from tests.models.stacked import OfObjects, Stacked, vectors
from tests.models.tiny import TwoOutputs
from tests.oracles import reference
from tests.oracles.brute_force import inputs_of
from tests.reports.pages import figures
from tests.runtime.unpacking import installed, packed_by

DATA = {"data_loader": token_batches(4), "progress": False}


def zeros_of(model: nn.Module) -> int:
    return sum(int((layer.weight == 0).sum()) for layer in model.modules() if hasattr(layer, "weight_mask"))


def size_of(plan: mts.Plan) -> int:
    return sum(layer.size for layer in plan.layers)


def budgeted(model: nn.Module, method: str = "sparsegpt", **options) -> tuple[mts.Report, dict]:
    """Sparsify the model -> (its report, what that says of the budget)."""
    report = mts.report(mts.sparsify(model, method, **{**DATA, **options}))
    return report, report.settings["budget"]


def table_of(model: nn.Module, method: str, **options) -> tuple:
    """(the table of losses, the run's data), by a run that ends there."""
    _, data = helpers.calibrated_run(model, method, **options)
    with calibrating(model):
        _, table = solving.tabled(data)
    return table, data


def test_losses_by_gradients_one_by_one():
    """Solutions are those of a run on dense inputs."""
    model, batches = tiny_llama().eval(), token_batches(2)
    before = state_of(model)
    options = {"data_loader": batches, "budget": "50% zeros", "choices": ["dense", "2:4", "30%"]}
    table, _ = table_of(model, "wanda", **options)
    assert_same_state(model, before)
    layers = {layer.name: model.get_submodule(layer.name) for layer in table.plan.layers}
    squares = {name: torch.zeros(len(layer.weight), dtype=torch.float64) for name, layer in layers.items()}
    inputs = inputs_of(model, [*layers], batches)
    for number, ids in enumerate(helpers.in_steps(batches)):
        loss = reference.drawn_loss(model(ids).logits, number)
        for name, gradient in zip(layers, torch.autograd.grad(loss, [layer.weight for layer in layers.values()])):
            squares[name] += gradient.double().square().sum(1)
    tokens = sum(ids.numel() for ids in batches)
    for pattern in ("2:4", "30% per row"):
        solved = mts.sparsify(tiny_llama(), "sparsegpt", pattern=pattern, sequential="none", data_loader=batches)
        for name, layer in layers.items():
            x = inputs[name]
            error = (layer.weight - solved.get_submodule(name).weight).detach().double()
            relative = (x @ error.T).square().sum(0) / x.square().sum()
            expected = float((squares[name] * relative).sum()) / 2 / tokens
            assert table.losses[name][parse_pattern(pattern)] == pytest.approx(expected, rel=1e-3)
            assert table.losses[name][None] == 0


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_zeros_are_met_to_a_weight(method):
    model = tiny_llama()
    size = size_of(mts.make_plan(model, "wanda"))
    report, said = budgeted(model, method, budget="43.21% zeros")
    assert sum(layer.zeros for layer in report.layers) == zeros_of(model) == -(-size * 4321 // 10_000)
    assert len({layer.pattern for layer in report.layers}) > 1
    assert said["asked"] == "43.21% zeros"
    assert said["tried"][said["taken"]][1] == min(kl for _, kl in said["tried"].values())
    assert {layer.name: layer.pattern for layer in report.layers}.items() <= said["layers"].items()
    dense = [weight for weight in report.skipped if weight.reason == "dense, by the budget"]
    assert [weight.name for weight in dense] == [name for name, choice in said["layers"].items() if choice == "dense"]
    mts.verify(model)


# levels lowered alike


def levels_of(pattern, **sizes: int) -> list[tuple]:
    """Layers of a small Llama, each with the next level."""
    plan = mts.make_plan(tiny_llama(**sizes), "magnitude", pattern=pattern)
    return [(each, replace(each.pattern, sparsity=round(0.4 + 0.03 * i, 2))) for i, each in enumerate(plan.layers)]


def zeros_in(levels: list[tuple]) -> int:
    """What the patterns' masks really have."""
    return sum(int((~level.mask(torch.randn(each.shape))).sum()) for each, level in levels)


@pytest.mark.parametrize("scope", ["row", "matrix"])
@pytest.mark.parametrize("surplus", [0, 1, 777, 5000])
def test_levels_are_lowered_alike_until_the_zeros_are_met(scope, surplus):
    levels = levels_of(f"50% per {scope}", intermediate_size=60)
    found = lowered(levels, surplus)
    after = [(each, found[each.name]) for each, _ in levels]
    finest = min(each.shape[0] if scope == "row" else 1 for each, _ in levels)
    assert 0 <= zeros_in(after) - (zeros_in(levels) - surplus) < finest
    lower = [before.sparsity - found[each.name].sparsity for each, before in levels]
    assert max(lower) - min(lower) < (2 / 32 if scope == "row" else 2 / 32**2)
    assert all(level.scope == scope and round(level.sparsity, 4) == level.sparsity for _, level in after)


def test_a_level_goes_no_lower_than_zero():
    (first, level), *others = levels_of("50% per matrix")
    levels = [(first, replace(level, sparsity=0.001)), *others]
    found = lowered(levels, 2000)
    assert found[first.name].sparsity == 0
    assert zeros_in([(each, found[each.name]) for each, _ in levels]) == zeros_in(levels) - 2000
    assert {level.sparsity for level in lowered(levels, 10**9).values()} == {0.0}


def test_a_matrix_of_many_weights_steps_by_a_ten_thousandth():
    plan = mts.make_plan(nn.Sequential(nn.Sequential(nn.Linear(300, 200))), "magnitude", pattern=0.5, include=["*"])
    ((name, level),) = lowered([(each, each.pattern) for each in plan.layers], 4001).items()
    assert (name, level.sparsity) == ("0.0", 0.4334)


def test_ceilings_are_kept():
    """The plain plan is that of the last layers dense."""
    model = tiny_llama(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    size = size_of(mts.make_plan(model, "sparsegpt"))
    report, said = budgeted(model, budget="70% flops", choices=["dense", "2:4"])
    assert 0 < len(report.layers) < 14
    assert set(said["tried"]) == {"the choice by losses", "the last layers dense"}
    cost, ceiling = said["costs"]["flops"]
    assert cost == 2 * (size - zeros_of(model)) <= ceiling == 2 * size * 7 // 10


def test_bytes_are_those_that_the_runtime_packs(monkeypatch):
    """Of a mixture whose experts are in one tensor, which it does not take."""
    model = experts.causal("Mixtral", hidden_size=64, intermediate_size=64, **experts.LOCAL)().bfloat16()
    options = {"choices": ["dense", "2:4"], "runtime": "cutlass", "data_loader": token_batches(4, vocab=experts.VOCAB)}
    refused(budgeted, model, match=r"the choices leave at least 91.\d% of bytes", budget="60% bytes", **options)
    _, said = budgeted(model, budget="96% bytes", **options)
    packed_by(installed(monkeypatch), mts.export(model))
    layers = [layer for layer in mts.semi_structured_report(model).layers if layer.name in said["layers"]]
    packed, dense = (sum(getattr(layer, what) for layer in layers) for what in ("bytes", "dense_bytes"))
    assert said["costs"]["bytes"][0] == packed < dense


def test_a_plan_that_turns_out_worse_is_not_taken(tmp_path):
    """Losses that say the opposite of what is so; the file is read and not written to."""
    model, file = tiny_llama(), tmp_path / "losses.json"
    options = {**DATA, "budget": "50% zeros", "choices": ["10%", "50%", "90%"], "losses": file}
    curve = mts.budget_curve(model, "sparsegpt", **options)
    assert curve.budget["taken"] == "the choice by losses"
    value = json.loads(file.read_text())
    for place, losses in enumerate(value["losses"].values()):
        losses.update({choice: 1e-3 * (place % 2) * float(choice.split("%")[0]) for choice in losses if "%" in choice})
    file.write_text(json.dumps(value))
    report, said = budgeted(model, **options)
    assert said["taken"] == "50% in every layer"
    assert {layer.pattern for layer in report.layers} == {"50% per matrix"}
    assert json.loads(file.read_text()) == value
    match = r"has no losses of layer 'model.layers.0.self_attn.q_proj' \[32, 32\] at 2:4"
    refused(budgeted, tiny_llama(), match=match, **{**options, "choices": ["dense", "2:4"]})
    match = r"this run is with {'divergence': 'squared'}: give a new path"
    refused(budgeted, tiny_llama(), match=match, **options, divergence="squared")
    (name, row) = next(iter(value["losses"].items()))
    for wrong in ("{}", '{"weights": 3}', json.dumps({**value, "losses": {name: {**row, "10%": math.nan}}})):
        file.write_text(wrong)
        refused(budgeted, tiny_llama(), match="is no file of losses", **options)
    options["losses"] = tmp_path / "nowhere" / "losses.json"
    refused(mts.make_plan, tiny_llama(), "sparsegpt", match="there is no folder '.*nowhere'", **options)


def test_losses_that_are_there_are_not_measured_again(tmp_path, monkeypatch):
    first, second, file = tiny_llama(), tiny_llama(), tmp_path / "losses.json"
    budgeted(first, budget="35% zeros", losses=file)
    monkeypatch.setattr(solving, "losses_of", None)
    budgeted(second, budget="35% zeros", losses=file)
    assert_same_state(first, state_of(second))
    budgeted(tiny_llama(), budget="60% flops", losses=file)


def test_losses_of_other_weights_are_refused_in_streaming_as_well(tmp_path):
    """A streamed model and one in memory take each other's."""
    first, other, file = tiny_llama(), tiny_llama(), tmp_path / "losses.json"
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    for name, model in {"first": first, "other": other}.items():
        model.save_pretrained(tmp_path / name)
    options = {**DATA, "budget": "35% zeros", "losses": file}
    mts.sparsify_checkpoint(tmp_path / "first", tmp_path / "out", "wanda", **options)
    match = r"has no losses of layer 'model.layers.1.mlp.up_proj' \[64, 32\] at these weights: give that of this model"
    refused(mts.sparsify_checkpoint, tmp_path / "other", tmp_path / "none", "wanda", **options, match=match)
    refused(mts.sparsify, other, "wanda", match=match, **options)
    mts.sparsify(first, "wanda", **options)
    assert_same_state(mts.load(tmp_path / "out"), state_of(first))


class Classifier(Stacked):
    """Its logits have no finite gradient."""

    def forward(self, x):
        x = super().forward(x)
        return SequenceClassifierOutput(logits=x + (x * 0).sqrt())


class Mixture(nn.Module):
    """One of three experts, in a list, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(num_experts_per_tok=1)
        self.gate, self.up = nn.Linear(8, 3), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.up(x))
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
        return SequenceClassifierOutput(logits=x + y)


def test_experts_in_a_list_choose_together():
    """And cost the FLOPs of the one that a token goes through, rounded up. Only together they fit: 128 for ``up``, and
    32 are left for a third of three experts."""
    model = Mixture()
    rows = {"data_loader": [torch.randn(64, 8)], "include": ["*"], "min_tokens": 1}
    _, said = budgeted(model, budget="160 flops", choices=["dense", "25%", "75%"], **rows)
    chosen = [choice for name, choice in said["layers"].items() if "experts" in name]
    assert (len(chosen), len(set(chosen))) == (3, 1)
    stay = [int((layer.weight != 0).sum()) for layer in (model.up, *model.experts)]
    assert said["costs"]["flops"][0] == 2 * stay[0] + -(-2 * sum(stay[1:]) // 3) <= 160


WHY = {
    "a forward_loop calls": (tiny_llama, {"forward_loop": lambda model: [model(b) for b in DATA["data_loader"]]}),
    "the output is a BaseModelOutputWithPast with no logits but": (lambda: TwoOutputs(tiny_llama().config), {}),
    "layers carry masks, whose zeros stay": (lambda: mts.sparsify(tiny_llama(), "magnitude", pattern=0.1), {}),
    "accelerate offloads weights": (lambda: cpu_offload(tiny_llama(), torch.device("cpu")), {}),
}


@pytest.mark.parametrize("why", WHY)
def test_where_losses_cannot_be_measured_an_optional_budget_is_the_pattern(why):
    make, more = WHY[why]
    options = {**more, "pattern": 0.5, **({"data_loader": None} if more else {})}
    model, plain = make(), make()
    report, said = budgeted(model, budget="auto", **options)
    assert said is None
    budgeted(plain, **options)
    assert_same_masks(model, plain)
    start = f"50% per matrix in every layer, not shared out by losses: {why}"
    assert any(note.startswith(start) for note in report.notes)


@pytest.mark.parametrize("more", [{}, {"reconstruct": {"epochs": 1, "metric": "auto"}}])
def test_blocks_that_put_out_objects_are_weighed_through_the_whole_model(more):
    """No output of theirs can be kept, and of what a block puts out no metric can be had."""
    of_objects, plain = OfObjects(), Stacked()
    options = {"budget": "40% zeros", "data_loader": vectors(8)}
    with pytest.warns(UserWarning, match="the output of a PuttingOutObjects cannot be kept"):
        report, said = budgeted(of_objects, **options, **more)
    assert any("plain squared error: no gradient of" in note for note in report.notes) == bool(more)
    if not more:
        assert said["layers"] == budgeted(plain, **options)[1]["layers"]
        assert_same_masks(of_objects, plain)


REFUSED = [
    ("95% zeros", None, "'95% zeros': the choices leave at least 20.0% of the weights: add sparser"),
    ("10% flops", ["dense", "2:4"], "'10% flops': the choices leave at least 50.0% of flops: add sparser"),
    ("100% flops", ["dense", "2:4"], "every layer may stay dense, and nothing is pruned: ask for less"),
]


@pytest.mark.parametrize(("budget", "choices", "match"), REFUSED)
def test_budgets_that_cannot_be_met_say_what_to_give(budget, choices, match):
    refused(mts.sparsify, tiny_llama(), "sparsegpt", match=match, budget=budget, choices=choices, **DATA)


def test_models_whose_losses_cannot_be_measured():
    """Offloaded weights leave no gradients behind, and without them all choices would lose nothing."""
    match = r"'blocks.0.up': its gradients hold NaN or inf.*or exclude it"
    refused(mts.sparsify, Classifier(), "sparsegpt", match=match, budget="35% zeros", data_loader=vectors(1))
    model, match = TwoOutputs(tiny_llama().config), "with no logits but 'last_hidden_state' .* 'pooled' .*give output="
    refused(mts.sparsify, model, "sparsegpt", match=match, budget="35% zeros", **DATA)
    model = cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    refused(budgeted, model, budget="40% zeros", match=r"budget needs gradients, and accelerate offloads.*give device=")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model.model.layers[0].mlp.up_proj, "weight_mask")


def test_a_curve_is_of_a_model_that_stays(tmp_path):
    model = tiny_llama()
    before = state_of(model)
    curve = mts.budget_curve(model, "sparsegpt", budget="50% zeros", **DATA)
    assert_same_state(model, before)
    shares, kl, plain, more = zip(*curve.points)
    assert shares == (20, 35, 50, 60, 70)
    assert list(kl) == sorted(kl)
    assert all(own <= other * 1.0001 for own, other in zip(kl, plain))
    assert min(more) > 0
    text = str(curve)
    assert "one more point of zeros costs" in text
    assert "At 50% zeros, KL as measured: the choice by losses" in text
    assert "down_proj" in text
    pytest.importorskip("plotly", reason="the extra report (plotly) is not installed")
    drawn = figures(curve.to_html(tmp_path / "curve.html"))
    assert set(drawn) == {"levels", "tried", "curve"}
    assert drawn["curve"]["traces"][1]["y"] == list(plain)


def test_the_dense_model_is_looked_at_once_and_gradients_are_taken_once(monkeypatch):
    """By the passes for losses, for the check and for metrics, and by the run itself."""
    calls = []

    def counted(name, real):
        return lambda *args: calls.append(name) or real(*args)

    gradients, dense = counted("gradients", fisher.gradients_of), counted("dense", calibrated.run_dense)
    for module in (fisher, solving):
        monkeypatch.setattr(module, "gradients_of", gradients)
    for module in (calibrated, oneshot):
        monkeypatch.setattr(module, "run_dense", dense)
    budgeted(tiny_llama(), "wanda", budget="50% zeros", reconstruct={"epochs": 1, "metric": "fisher"})
    assert sorted(calls) == ["dense", "gradients"]


FIXED = {"*.v_proj": {"pattern": 0.5}, "*.o_proj": {"choices": ["dense", "20%"]}}


BUDGETS = [
    ("10% zeros", None),
    ("30% zeros", ["dense", "2:4", "20%"]),
    ("60% zeros", ["dense", "80%"]),
    ("90% flops", None),
]


@pytest.mark.parametrize(("budget", "choices"), BUDGETS)
def test_levels_and_choices_of_rules_stay(budget, choices):
    """In the choice by losses and in the plain plan, whichever is taken."""
    table, data = table_of(tiny_llama(), "sparsegpt", rules=FIXED, budget=budget, choices=choices, **DATA)
    budget = data.run.config.budget
    for plan in (table.best(budget), *table.plain(budget).values()):
        filled = table.filled(plan, budget)
        assert table.cost(budget.unit, filled) <= table.ceiling(budget)
        for name, choice in filled.items():
            if name.endswith("v_proj"):
                assert choice.sparsity == 0.5
            if name.endswith("o_proj"):
                assert choice is None or choice.sparsity == 0.2


class Images(nn.Module):
    """Convolutions of large and of small images, one in groups, and a linear layer of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, groups=2)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return SequenceClassifierOutput(logits=self.last(self.second(self.first(x).relu()).mean((-2, -1))))


def places(layer: nn.Module, args: tuple, output: torch.Tensor) -> int:
    return output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1


def test_flops_of_images_are_counted_by_places_and_samples():
    model, batch = Images(), torch.randn(6, 4, 12, 12)
    _, said = budgeted(model, budget="60% flops", data_loader=[batch] * 2, include=["*"])
    seen = dict[str, int]()
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *call, name=name: seen.update({name: places(*call)}))
    model(batch)
    dense, live = (
        sum(2 * seen[name] * count(model.get_submodule(name).weight) for name in seen)
        for count in (torch.numel, torch.count_nonzero)
    )
    assert said["costs"]["flops"] == [int(live), dense * 6 // 10]


MIXTURES = [
    experts.causal("AriaText", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    experts.MODELS["mixtral"],
    experts.causal("Qwen2Moe", **experts.MOE, num_experts=4),
]


@pytest.mark.parametrize("build", MIXTURES, ids=["aria", "mixtral", "qwen2_moe"])
def test_experts_cost_what_the_router_chooses(build):
    """Whatever the config calls it; a shared expert is run for every token."""
    data = {"data_loader": token_batches(4, vocab=experts.VOCAB)}
    table, _ = table_of(build(), "sparsegpt", budget="60% flops", choices=["dense", "2:4"], **data)
    routed = [each.size for each in table.plan.layers if ".experts." in each.name]
    others = [each.size for each in table.plan.layers if ".experts." not in each.name]
    assert routed
    assert table.dense("flops") == sum(routed) + 2 * sum(others)
