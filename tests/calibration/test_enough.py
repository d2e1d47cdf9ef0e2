"""Inputs that say little or nothing: dead channels, nothing but zeros or what is as small, few tokens."""

import copy
import warnings
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.scores import Wanda
from tests.helpers import correlated_inputs, tiny_llama, token_batches
from tests.models.expert_models import MODELS
from tests.models.stacked import Routed, Stacked, vectors
from tests.oracles import reference
from tests.solving.test_out_of_memory import Scarce, compared

DEAD = range(8, 16)
CALIBRATED = ["wanda", "ria", "sparsegpt", "alps"]
every_calibrated_method = pytest.mark.parametrize("method", CALIBRATED)


def llama_with_dead_units() -> nn.Module:
    """Units 8 to 15 of each MLP give 0 for every token, so that down_proj has 8 dead channels of 64."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data[list(DEAD)] = 0
    return model


def zeros_in(weight: Tensor) -> int:
    return int((weight == 0).sum())


def warned_by(model: nn.Module, method: str, **options) -> list[str]:
    """What sparsify warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mts.sparsify(model, method, progress=False, **options)
    return [str(each.message) for each in caught]


# dead channels --------------------------------------------------------------------------------------------------------


SHARES = list(product(CALIBRATED, ["2:4", "50% per row", "50% per matrix"], [{}]))
SHARES += product(["wanda", "sparsegpt"], ["2:4"], [{"polish": True}, {"permute": True}, {"reconstruct": 2}])


@pytest.mark.parametrize(("method", "pattern", "more"), SHARES, ids=str)
def test_a_layer_with_dead_channels_has_the_zeros_that_its_report_says(method, pattern, more):
    """Half of its weights, those of the dead channels included, which keep their dense values; and a note."""
    dense = llama_with_dead_units()
    options = {"pattern": pattern, "data_loader": token_batches(), "progress": False, **more}
    model = mts.sparsify(copy.deepcopy(dense), method, **options)
    mts.verify(model, pattern)
    note = "8 of 64 input channels were zero on all calibration data (dead)"
    for layer in mts.report(model).layers:
        down = layer.name.endswith("down_proj")
        assert (note in layer.notes) == down
        if not down:
            continue
        weight, before = (each.get_submodule(layer.name).weight.detach() for each in (model, dense))
        assert layer.zeros == zeros_in(weight) == weight.numel() // 2
        assert layer.recipe.startswith("permute+") == ("permute" in more)
        if "permute" in more or "reconstruct" in more:  # which may tune the units awake
            continue
        assert layer.notes == [note]
        stay = weight[:, DEAD] != 0
        assert torch.equal(weight[:, DEAD], before[:, DEAD].masked_fill(~stay, 0))
        if pattern == "2:4" and method != "ria":
            assert torch.equal(stay, reference.nm_mask(before[:, DEAD].abs(), 2, 4))


@every_calibrated_method
def test_data_that_wakes_dead_channels_up_finds_them_as_magnitude_would_leave_them(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48))
    dense = copy.deepcopy(model)
    asleep = correlated_inputs(256, 32, dtype=torch.float32)
    asleep[:, :16] = 0
    mts.sparsify(model, method, pattern="2:4", data_loader=[asleep], progress=False)
    alone = torch.cat([torch.randn(256, 16), torch.zeros(256, 16)], dim=1)  # the channels that were dead
    by_size = dense[0].weight.detach() * reference.nm_mask(dense[0].weight.detach().abs(), 2, 4)
    weights = model[0].weight.detach(), by_size
    error, of_size = (reference.output_error(dense[0].weight.detach(), weight, alone) for weight in weights)
    assert error == pytest.approx(of_size, rel=0.1)
    assert error < 0.3


@pytest.mark.filterwarnings("ignore:layer 'blocks.0.up' saw nothing but zeros:UserWarning")
@pytest.mark.parametrize("kind", ["dead channels", "nothing but zeros"])
def test_a_budget_takes_such_layers(kind):
    model, data = (llama_with_dead_units(), token_batches()) if kind == "dead channels" else (silent(), vectors())
    options = {"budget": "50% zeros", "choices": "dense,40%,60%", "data_loader": data}
    for layer in mts.report(mts.sparsify(model, "wanda", **options, progress=False)).layers:
        if not layer.name.endswith("up_proj"):  # whose units were zero before
            assert layer.zeros == zeros_in(model.get_submodule(layer.name).weight)
    if kind == "nothing but zeros":
        assert mts.report(model).sparsity == pytest.approx(0.5, abs=0.01)


def test_permutation_counts_the_share_that_wanda_keeps():
    """The report has the share of the squared score that the pattern keeps, dead channels included."""

    class Watched(Wanda):
        def __init__(self) -> None:
            self.shares: list[float] = []

        def solve(self, weight, state, pattern, options) -> mts.Solution:
            solution = super().solve(weight, state, pattern, options)
            score = weight.square() * state.square_sums
            self.shares.append(float((score * solution.mask).sum() / score.sum()))
            return solution

    model, method = llama_with_dead_units(), Watched()
    mts.sparsify(model, method, pattern="1:4", permute=True, data_loader=token_batches(), progress=False)
    moved = [place for place, layer in enumerate(mts.report(model).layers) if layer.name.endswith("down_proj")]
    for place in moved:
        note = mts.report(model).layers[place].notes[0]
        assert f"the pattern keeps {method.shares[place]:.1%} of the score" in note


def test_dead_channels_of_a_layer_that_is_solved_some_rows_at_a_time():
    method = Scarce(METHODS["sparsegpt"], 8 * 64)
    whole, cut = compared(llama_with_dead_units, method, data_loader=token_batches(), include="*.down_proj")
    for one, other in zip(whole.layers, cut.layers):
        assert other.notes == ["solved 8 rows at a time, because memory ran out", *one.notes]


# nothing but zeros ----------------------------------------------------------------------------------------------------


class Silent(Stacked):
    """Gives its blocks zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0 * x)


def silent() -> nn.Module:
    model = Silent(blocks=2)
    model.stem = nn.Identity()
    return model


@pytest.mark.parametrize("steps", [{}, {"update": False}, {"polish": 2}, {"reconstruct": {"epochs": 1}}])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@every_calibrated_method
def test_a_layer_that_saw_nothing_but_zeros_is_chosen_by_size(method, sequential, steps):
    """As in the first decoder layer of DETR, by construction. One warning, and the report does not say that this is
    without error."""
    if "reconstruct" in steps and sequential == "none":
        pytest.skip("refused together")
    model = silent()
    dense = copy.deepcopy(model)
    warned = warned_by(model, method, data_loader=vectors(20), sequential=sequential, **steps)
    said = "layer 'blocks.0.up' saw nothing but zeros on the calibration data: its weights are chosen by size alone"
    assert [each.partition(" (said once")[0] for each in warned if "zeros" in each] == [said]
    assert said in mts.report(model).notes
    if "reconstruct" in steps:
        mts.verify(model, "2:4")
        return
    (layer,) = (layer for layer in mts.report(model).layers if layer.name == "blocks.0.up")
    assert (layer.recipe, layer.error_from, layer.tokens) == ("magnitude", "weights", 0)
    weight = dense.blocks[0].up.weight.detach()
    sparse = model.blocks[0].up.weight.detach()
    assert torch.equal(sparse != 0, reference.nm_mask(weight.abs(), 2, 4))
    assert layer.error == pytest.approx(reference.output_error(weight, sparse, torch.eye(16)))


@every_calibrated_method
def test_inputs_too_small_for_the_sums_count_as_zeros(method):
    """Their squares are lost in float32; in float64 they are not."""
    inputs, model = torch.randn(64, 16), nn.Sequential(nn.Linear(16, 8))
    dense = model[0].weight.detach().clone()
    for scale, small in ((2.0**-48, False), (2.0**-60, True)):
        other = copy.deepcopy(model)
        warned = warned_by(other, method, data_loader=[scale * inputs])
        assert any("saw nothing but zeros" in each for each in warned) == small
        by_size = torch.equal(other[0].weight != 0, reference.nm_mask(dense.abs(), 2, 4))
        assert by_size == (mts.report(other).layers[0].recipe == "magnitude") == small
    mts.sparsify(model.double(), method, data_loader=[2.0**-60 * inputs.double()], progress=False)
    assert not mts.report(model).notes


def mixtral_with_a_silent_expert() -> nn.Module:
    """Expert 2 makes nothing of its tokens, so that its down_proj sees zeros."""
    model = MODELS["mixtral"]()
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data[2] = 0
    return model


@pytest.mark.parametrize("limit", [None, 100_000])
@pytest.mark.parametrize("how", ["pool", "all_tokens", "weight_only"])
def test_an_expert_that_saw_nothing_but_zeros_is_one_without_tokens(how, limit):
    model = mixtral_with_a_silent_expert()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    options = {"experts": how, "min_tokens": 16, "memory_limit": limit}
    mts.sparsify(model, "sparsegpt", data_loader=token_batches(20, vocab=53), progress=False, **options)
    for layer in mts.report(model).layers:
        if not layer.name.endswith("experts.down_proj"):
            continue
        assert layer.expert_tokens[2] == 0
        assert min(layer.expert_tokens[:2] + layer.expert_tokens[3:]) >= 16
        assert layer.notes[0].startswith("experts with fewer than 16 tokens were ")
        assert layer.notes[0].endswith(": 2 (0)")
        weight = model.get_parameter(layer.parameter).detach()
        assert zeros_in(weight) == layer.zeros == layer.size // 2
        # of zeros all tokens make zeros, too
        dead = ["24 of 96 input channels were zero on all calibration data (dead)"] if how == "all_tokens" else []
        assert layer.notes[1:] == dead
        if how != "pool":
            assert torch.equal(weight[2] != 0, reference.nm_mask(before[layer.parameter][2].abs(), 2, 4))


def test_an_expert_in_a_list_that_saw_nothing_but_zeros():
    class HalfSilent(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()) + self.experts[0](x) + self.experts[1](0 * x)

    model = Stacked(blocks=1, block=HalfSilent)
    mts.sparsify(model, "wanda", data_loader=vectors(10), min_tokens=8, progress=False)
    first, second = (layer for layer in mts.report(model).layers if "experts" in layer.name)
    assert first.tokens > 16
    note = "experts with fewer than 8 tokens were filled up to 8 from the tokens of all experts: this one (0)"
    assert (second.tokens, second.notes) == (0, [note])
    assert not torch.equal(*(expert.weight != 0 for expert in model.blocks[0].experts))
    mts.verify(model, "2:4")


# few tokens -----------------------------------------------------------------------------------------------------------


@every_calibrated_method
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_fewer_tokens_than_inputs_are_warned_of_once(method, sequential):
    """On the terminal and in the report, with the layer's name; though every layer of the model saw as few."""
    model = tiny_llama()
    (said,) = warned_by(model, method, data_loader=[torch.tensor([[5]])], sequential=sequential)
    assert said.startswith("layer 'model.layers.0.self_attn.q_proj' saw 1 token, fewer than its inputs (32)")
    assert mts.report(model).notes == [said]
    assert str(mts.report(model)).count("fewer than its inputs") == 1


def test_as_many_tokens_as_inputs_are_enough():
    """32 tokens for 32 inputs; of down_proj, which has 64, they are fewer."""
    model, batch = tiny_llama(), token_batches(1)
    assert batch[0].numel() == 32
    with pytest.warns(UserWarning, match="layer 'model.layers.0.mlp.down_proj' saw 32 tokens, fewer .* \\(64\\)"):
        mts.sparsify(model, "wanda", data_loader=batch, progress=False)
    model = tiny_llama()
    assert warned_by(model, "wanda", data_loader=token_batches(2)) == []
    assert warned_by(tiny_llama(), "magnitude", data_loader=batch, sequential="none") == []
    assert not mts.report(model).notes
