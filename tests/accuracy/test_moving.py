"""Masks that move while a block is tuned: the start, each step against SR-STE written out, and what stays as it was."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.accuracy import tuning
from modelopt_sparse.accuracy.tuning import BELOW, TrainableMask, masks_move
from modelopt_sparse.model.find import find_layers
from modelopt_sparse.model.masking import SparseModule
from modelopt_sparse.solving import solve
from tests import helpers
from tests.accuracy.tuned import BATCHES, Adam, tuned_model
from tests.helpers import assert_same_masks, assert_same_state, in_steps, refused, state_of, tiny_llama, token_batches
from tests.models.tiny import tiny_mixtral

MOVE = {"epochs": 3, "masks": "move"}


sparsified = partial(tuned_model, reconstruct=MOVE)


# a weight by itself -------------------------------------------------------------------------------------------------


def movable(pattern, rows=3, columns=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    (layer,), _ = find_layers(model)
    sums = torch.rand(columns) + 0.1
    sums[2] = 0.0
    return TrainableMask.of(layer, pattern, sums), sums


PATTERNS = [mts.NM(2, 4), mts.Unstructured(0.5, "row"), mts.Unstructured(0.5, "matrix")]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_start_by_loops(pattern):
    """A pruned place starts with its dense value, as far as that scores below the least that its scope keeps."""
    each, sums = movable(pattern)
    norms = [math.sqrt(float(x)) if x > 0 else min(math.sqrt(float(y)) for y in sums if y > 0) for x in sums]
    values = torch.randn(3, 8)
    mask = pattern.mask(values.abs() * torch.tensor(norms))
    wanted = values.clone()
    for row, column in itertools.product(range(3), range(8)):
        if not mask[row, column]:
            rows = range(3) if pattern == PATTERNS[2] else [row]
            columns = range(column // 4 * 4, column // 4 * 4 + 4) if pattern == PATTERNS[0] else range(8)
            least = min(abs(float(values[r, c])) * norms[c] for r in rows for c in columns if mask[r, c])
            limit = BELOW * least / norms[column]
            wanted[row, column] = max(-limit, min(limit, float(each.dense[row, column])))
    start = each.initial_values(values, mask)
    torch.testing.assert_close(start, wanted)
    assert torch.equal(each.mask(start), mask), "the solution's mask is the one that the start leads to"


def test_masks_stay_in_the_last_part_of_the_steps():
    assert [masks_move(step, 10) for step in range(10)] == 5 * [True] + 5 * [False]


# a run --------------------------------------------------------------------------------------------------------------


def test_steps_are_sr_ste_written_out():
    """One linear block, squared error, Adam by hand, gradients straight through the mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False)).double()
    batches = [torch.randn(32, 16, dtype=torch.float64) for _ in range(BATCHES)]
    dense = model[0].weight.detach().clone()
    options = {"include": "*", "enforce": True, "data_loader": batches}
    before = mts.sparsify(copy.deepcopy(model), "wanda", progress=False, **options)
    mask = dict(mts.named_masks(before))["0.weight"].clone()
    batches = in_steps(batches, cut=False)
    values = torch.where(mask, dense, 0)
    norms = torch.cat(batches).square().sum(0).sqrt()

    least = (values.abs() * norms).masked_fill(~mask, torch.inf).unflatten(-1, (-1, 4)).amin(-1, keepdim=True)
    limit = (BELOW * least).expand(-1, -1, 4).flatten(-2) / norms
    rms, steps = values[mask].square().mean().sqrt(), 2 * (BATCHES - 1)

    def judge(w, mask):
        return float(((batches[-1] @ (w * mask - dense).T) ** 2).sum())

    def tuned(rate, mask):
        """(the error after each epoch, values, mask) of the best epoch, and the masks of all steps."""
        w, states, judged = torch.where(mask, values, dense.clamp(-limit, limit)), [], []
        adam, order, step = Adam(w), torch.Generator().manual_seed(0), 0
        for _ in range(2):
            for number in torch.randperm(BATCHES - 1, generator=order).tolist():
                x = batches[number]
                goal = x @ dense.T
                gradient = 2 * (x @ (w * mask).T - goal).T @ x / goal.square().sum() * goal.numel() ** 0.5
                scale = min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
                w = w - rate * rms / math.sqrt(8) * scale * adam.direction(gradient)
                if step + 1 < 0.6 * steps:
                    w = torch.where(mask, w, w * (1 - 0.02 * scale))
                    mask = mts.NM(2, 4).mask(w.abs() * norms)
                step += 1
                states.append(mask)
            judged.append((judge(w, mask), w * mask, mask))
        return min(judged, key=lambda epoch: epoch[0]), states

    before = judge(values, mask)
    assert tuned(0.2, mask)[0][0] > before, "in this case nothing is gained at the whole rate"
    (best, *result), states = tuned(0.05, mask)
    assert best < before
    mts.sparsify(model, "wanda", progress=False, **options, reconstruct={"epochs": 2, "masks": "move"})
    assert not torch.equal(states[0], states[-1]), "masks move in this case"
    assert torch.equal(dict(mts.named_masks(model))["0.weight"], result[1])
    torch.testing.assert_close(model[0].weight.detach(), result[0] * result[1], rtol=1e-6, atol=1e-9)
    (block,) = mts.report(model).blocks
    energy = float((batches[-1] @ dense.T).square().sum())
    assert block.error_after == pytest.approx(best / energy, rel=1e-6)


def test_how_weights_and_gradients_lie_in_memory_changes_no_step():
    torch.manual_seed(0)
    values, gradient, stepped = torch.randn(6, 4), torch.randn(6, 4), []
    ways = [lambda x: x.clone(), lambda x: x.T.contiguous().T]
    for weight_lies, gradient_lies in itertools.product(ways, ways):
        parameter = nn.Parameter(weight_lies(values))
        weight = tuning.TunedWeight(parameter, None, None, 0.1, None)
        parameter.grad = gradient_lies(gradient)
        weight.step(weight.pop_gradient(), 1.0)
        stepped.append(parameter.detach().contiguous())
    assert not torch.equal(stepped[0], values)
    for other in stepped[1:]:
        helpers.assert_bits(other, stepped[0])


MOVES = [
    (mts.NM(2, 4), True),
    (mts.NM(2, 4), False),
    (mts.Unstructured(0.6, "row"), True),
    (mts.Unstructured(0.6, "matrix"), True),
]


@pytest.mark.parametrize(("pattern", "enforce"), MOVES, ids=str)
def test_masks_move_and_hold_their_pattern(pattern, enforce):
    options = {"pattern": pattern, "enforce": enforce}
    model, frozen = sparsified(reconstruct={**MOVE, "epochs": 4}, **options), sparsified(reconstruct=4, **options)
    mts.verify(model, pattern)
    kept, others = ({n: p != 0 for n, p in each.named_parameters() if "proj" in n} for each in (model, frozen))
    assert_same_masks(model, kept if enforce else {})
    assert any(not torch.equal(kept[name], others[name]) for name in kept)
    for name, mask in kept.items():
        assert mask.sum() == others[name].sum()
        if pattern == mts.Unstructured(0.6, "row"):
            assert torch.equal(mask.sum(-1), others[name].sum(-1))
    shares = []
    for block in mts.report(model).blocks:
        assert block.error_after <= block.error_before
        (note,) = block.notes
        assert note.endswith("% of the places that are kept are others than those of the solution")
        shares.append(float(note.split("%")[0]))
    assert max(shares) > 0
    assert all(m.masked_names for m in model.modules() if isinstance(m, SparseModule)), "masks are on again"


def test_a_method_that_looks_at_no_inputs_keeps_its_masks():
    model, frozen = sparsified(method="magnitude"), sparsified(method="magnitude", reconstruct=3)
    assert_same_state(model, state_of(frozen))


def moved_layers(monkeypatch, model, tokens_per_channel, **options):
    """The names of a model's layers whose masks may move, with so many tokens being enough."""
    names, of = [], TrainableMask.of

    def seen(layer, *args):
        names.append(layer.name.removeprefix("model.layers."))
        return of(layer, *args)

    monkeypatch.setattr(solve, "TOKENS_TO_MOVE", tokens_per_channel)
    monkeypatch.setattr(TrainableMask, "of", seen)
    sparsified(model, reconstruct={**MOVE, "epochs": 1, "masks": "auto"}, **options)
    return {name for name in names if name.startswith("0.")}


def test_auto_moves_masks_of_layers_that_have_seen_enough_tokens(monkeypatch):
    """The down projection has the most input channels, and the experts of a mixture share the tokens out."""
    tokens, width = sum(ids.numel() for ids in token_batches(BATCHES)), 32
    moved = partial(moved_layers, monkeypatch)
    assert not moved(tiny_llama(), tokens // width + 1)
    assert moved(tiny_llama(), tokens // 64) - moved(tiny_llama(), tokens // width) == {"0.mlp.down_proj"}
    assert not moved(tiny_llama().half(), 0)
    of_experts = {"0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"}
    assert moved(tiny_mixtral(), 0) - moved(tiny_mixtral(), tokens // width) == of_experts  # 2 of 4 experts for a token
    assert of_experts - moved(tiny_mixtral(), tokens // width // 2) == {"0.mlp.experts.down_proj"}


def test_auto_moves_no_masks_of_the_users(monkeypatch):
    masks = {name: mask.clone() for name, mask in mts.named_masks(sparsified(reconstruct=None))}
    assert not moved_layers(monkeypatch, None, 0, method=None, masks=masks)


def test_zeros_of_a_mask_that_is_there_stay():
    model = sparsified(tiny_llama(), method="magnitude", pattern="3:4", reconstruct=None)
    before = {name: mask.clone() for name, mask in mts.named_masks(model)}
    sparsified(model)
    for name, mask in mts.named_masks(model):
        assert not (mask & ~before[name]).any()


def test_what_is_refused():
    refused(sparsified, tiny_llama().half(), parts=["is float16, too coarse for the gradients that masks move by"])
    refused(sparsified, tiny_llama(), reconstruct={"masks": "moves"}, parts=["masks='moves': allowed are 'frozen'"])
    masks = {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 32, dtype=torch.bool)}
    refused(sparsified, tiny_llama(), method=None, masks=masks, parts=["and reconstruct's masks='move' would choose"])
