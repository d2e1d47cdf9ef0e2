"""Layers that carry a mask already: its zeros stay and count, unless ``replace=True`` drops it."""

import copy

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.patterns import NM, Unstructured, parse_pattern
from tests.helpers import assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models.expert_models import MODELS, VOCAB
from tests.oracles import reference
from tests.oracles.layer_problem import problem
from tests.solving.test_failures import Grown
from tests.solving.test_out_of_memory import Scarce, compared

DATA = {"data_loader": token_batches(), "progress": False}
LAYER = "model.layers.0.mlp.up_proj"


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: mask.clone() for name, mask in mts.named_masks(model)}


def assert_within(model: nn.Module, before: dict[str, Tensor]) -> None:
    """No weight has come back, and the report counts the zeros."""
    masks = masks_of(model)
    assert masks.keys() == before.keys()
    for layer in mts.report(model).layers:
        old, new = before[layer.parameter], masks[layer.parameter]
        assert not (new & ~old).any()
        assert not model.get_parameter(layer.parameter)[~new].any()
        assert layer.zeros == int((~new).sum())


def zeros_of_groups(pattern: NM | Unstructured, within: Tensor) -> Tensor:
    """How many zeros each group, row or matrix has: what the pattern asks for, or what it has if that is more."""
    if isinstance(pattern, NM):
        groups = within.reshape(-1, pattern.m)
        wanted = pattern.m - pattern.n
    else:
        groups = within if pattern.scope == "row" else within.reshape(1, -1)
        wanted = reference.zeros_of(pattern.sparsity, groups.shape[-1])
    return torch.tensor([max(wanted, int((~group).sum())) for group in groups])


def test_fewer_zeros_than_the_mask_has_are_refused():
    """The defect: 2:4 first, 25% then; the report said 25% and the weight had 50%."""
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")
    parts = ["model.layers.0.self_attn.q_proj", "50.00%", "25% per matrix", "replace=True"]
    refused(mts.sparsify, model, "magnitude", pattern="25%", parts=parts)
    refused(mts.make_plan, model, "magnitude", pattern="25%", parts=parts)
    refused(mts.sparsify, model, "sparsegpt", **DATA, pattern="3:4", parts=["50.00%", "3:4"])
    parts = ["carries a mask whose zeros stay", "give replace=True"]
    refused(mts.sparsify, model, "magnitude", budget="60% zeros", **DATA, parts=parts)
    # a layer that stays as it is has no level to be below of
    mts.sparsify(model, "magnitude", pattern="2:4", rules={"*.up_proj": {"pattern": "1:4"}, "*.q_proj": None})
    refused(mts.sparsify, model, "magnitude", pattern="2:4", parts=["up_proj", "75.00%", "2:4"])


def test_replace_drops_the_masks_of_layers_that_a_budget_leaves_dense():
    """Their zeros are values like others, and the report says so."""
    model = mts.sparsify(tiny_llama(), "wanda", pattern="2:4", **DATA)
    values = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given = {"budget": "15% zeros", "choices": ["dense", "1:4"], "replace": True}
    report = mts.report(mts.sparsify(model, "wanda", **given, **DATA))
    choices = {f"{name}.weight": choice for name, choice in report.settings["budget"]["layers"].items()}
    dense = {name for name, choice in choices.items() if choice == "dense"}
    assert masks_of(model).keys() == choices.keys() - dense
    for row in mts.report(model).layers:
        assert ("it carries no mask any more" in row.notes) == (row.parameter in dense)
        if row.parameter in dense:
            weight = model.get_parameter(row.parameter).detach()
            assert torch.equal(weight, values[row.parameter])
            assert row.zeros == weight.numel() // 2
    assert len(dense) > 1


STEPS = {
    **{method: {"method": method} for method in METHODS},
    "dense values": {"method": "sparsegpt", "update": False},
    "polished": {"method": "magnitude", "polish": True},
    "reconstructed": {"method": "wanda", "reconstruct": 1},
    "small blocks": {"method": "sparsegpt", "block_size": 5},
    "stages": {"method": "wanda", "sequential": "stage"},
    "dense inputs": {"method": "sparsegpt", "sequential": "none"},
}


@pytest.mark.parametrize("pattern", ["45%", "60%", "60% per row", "2:4"])
@pytest.mark.parametrize("steps", STEPS)
def test_zeros_stay_and_count(steps, pattern):
    """Within masks at any place: no weight comes back, and each group, row or matrix has the zeros that it should."""
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="45%")
    before = masks_of(model)
    mts.sparsify(model, **STEPS[steps], pattern=pattern, **DATA)
    assert_within(model, before)
    report = mts.report(model)
    assert len(report.layers) == 14
    for layer in report.layers:
        assert layer.zeros == zeros_of_groups(parse_pattern(layer.pattern), before[layer.parameter]).sum()
    assert report.notes[0] == "14 of the layers carry masks, whose zeros stay and count (replace=True drops the masks)"
    mts.verify(model)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "60% per row", "60% per matrix"])
def test_what_is_pruned_further_is_what_scores_least(pattern):
    """A weight that is 0 without being pruned scores no more than pruned ones, and stays before them."""
    model = tiny_llama()
    weight = model.get_parameter(f"{LAYER}.weight")
    weight.data[:8] = 0.0
    present = torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) > 0.3
    mts.set_mask(model, f"{LAYER}.weight", present)
    scores = weight.detach().abs().masked_fill(~present, -1)
    parsed = parse_pattern(pattern)
    if isinstance(parsed, NM):
        expected = reference.nm_mask(scores, parsed.n, parsed.m) & present
    else:
        expected = reference.unstructured_mask(scores, parsed.sparsity, parsed.scope) & present
    mts.sparsify(model, "magnitude", pattern=pattern, include=LAYER)
    assert torch.equal(masks_of(model)[f"{LAYER}.weight"], expected)


@pytest.mark.parametrize("n", [1, 2])
def test_sparsegpt_within_a_mask_against_one_weight_at_a_time(n):
    weight, stats = problem(0, rows=12, columns=24)
    present = torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) > 0.3
    weight = weight.masked_fill(~present, 0)
    method = METHODS["sparsegpt"]
    pattern = NM(n, 4, within=present)
    solution = method.solve(weight, method.prepare(stats, method.options), pattern, method.options)
    expected, mask = reference.sparsegpt(weight, stats.gram, nm=(n, 4), within=present)
    assert torch.equal(solution.mask, mask)
    torch.testing.assert_close(solution.weight.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "sparsegpt"])
def test_the_same_level_again_changes_nothing(method):
    model = mts.sparsify(tiny_llama(), "wanda", pattern="2:4", **DATA)
    before = state_of(model)
    mts.sparsify(model, method, pattern="2:4", **DATA)
    assert_same_state(model, before)


# what the rule does not reach ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["magnitude", "sparsegpt", "alps", "dense values"])
def test_replace_solves_the_layer_as_a_dense_one(steps):
    """To the bit what is made of the same weights without masks."""
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")
    dense = mts.export(copy.deepcopy(model))
    refused(mts.sparsify, model, **STEPS[steps], pattern="25%", **DATA, parts=["replace=True"])
    mts.sparsify(model, **STEPS[steps], pattern="25%", replace=True, **DATA)
    mts.sparsify(dense, **STEPS[steps], pattern="25%", **DATA)
    assert_same_state(model, state_of(dense))
    assert mts.report(model).sparsity == 0.25
    assert mts.report(model).settings["replace"] is True


# everything else that may carry a mask --------------------------------------------------------------------------------


class Many(nn.Module):
    """Convolutions, attention that reads its own weights, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.mT).mT
        x = x + self.attention(x, x, x)[0]
        return self.other(self.one(x).relu())


EXPERTS = {"data_loader": token_batches(vocab=VOCAB), "min_tokens": 8}
KINDS = {
    "many": (Many, {"data_loader": [torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))]}),
    "experts": (MODELS["mixtral"], EXPERTS),
    "an expert at a time": (MODELS["mixtral"], {**EXPERTS, "memory_limit": 100_000}),
}


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt", "alps"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind, method):
    make, data = KINDS[kind]
    model = mts.sparsify(make(), "magnitude", pattern="40%", progress=False)
    before = masks_of(model)
    mts.sparsify(model, method, pattern="2:4", progress=False, **data)
    assert_within(model, before)
    assert all(layer.zeros > layer.size / 2 for layer in mts.report(model).layers)
    mts.verify(model, "2:4")
    refused(mts.sparsify, model, "magnitude", pattern="50%", parts=["replace=True"])


def test_a_tied_layer_of_which_one_holder_carries_the_mask():
    model = Many()
    present = torch.rand(16, 16, generator=torch.Generator().manual_seed(4)) > 0.5
    mts.set_mask(model, "other.weight", present)
    # what it prunes of a group gives values to the groups behind it, also where they were zero
    mts.sparsify(model, "sparsegpt", pattern="2:4", include="one", progress=False, **KINDS["many"][1])
    masks = masks_of(model)
    assert torch.equal(masks["one.weight"], masks["other.weight"])
    assert not (masks["one.weight"] & ~present).any()
    assert masks["one.weight"].any()


def test_rows_at_a_time():
    """A piece of a layer has a piece of its mask."""

    def build() -> nn.Module:
        return mts.sparsify(tiny_llama(), "magnitude", pattern="40%")

    _, report = compared(build, Scarce(METHODS["wanda"], 600), pattern="2:4", **DATA)
    assert "rows at a time" in report.layers[0].notes[0]


def test_masks_of_the_users_own_lie_within():
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4", include=LAYER)
    name = f"{LAYER}.weight"
    present = masks_of(model)[name]
    grown = {name: present.roll(1, -1)}
    refused(mts.sparsify, model, masks=grown, pattern=0.5, parts=[name, "keeps", "replace=True"])
    smaller = present & (torch.rand(present.shape, generator=torch.Generator().manual_seed(4)) > 0.2)
    refused(mts.sparsify, model, masks={name: smaller}, pattern="2:4", parts=[name, "breaks pattern 2:4"])
    mts.sparsify(model, masks={name: smaller}, pattern=0.5)
    assert torch.equal(masks_of(model)[name], smaller)
    assert mts.report(model).layers[0].zeros == int((~smaller).sum())
    mts.sparsify(model, masks=grown, pattern=0.5, replace=True)
    assert torch.equal(masks_of(model)[name], grown[name])


def test_a_method_that_lets_weights_come_back_is_refused():
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4", include=LAYER)
    refused(mts.sparsify, model, Grown(), include=LAYER, parts=[LAYER, "keeps 1024 weights", "replace=True"])
    mts.sparsify(model, Grown(), include=LAYER, replace=True)


def test_a_plan_on_meta_does_not_look_at_masks():
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4").to("meta")
    assert len(mts.make_plan(model, "magnitude", pattern="25%").layers) == 14


def test_a_mask_of_another_holder_is_replaced_without_enforce_as_well():
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [torch.randn(64, 8)]
    model[1].weight = model[0].weight
    mts.set_mask(model, "1.weight", (torch.arange(8) < 4).expand(8, 8))
    mts.sparsify(model, "sparsegpt", pattern="2:4", include="*", replace=True, enforce=False, data_loader=data)
    model(torch.ones(1, 8))
    assert int((model[0].weight == 0).sum()) == mts.report(model).layers[0].zeros == 32
