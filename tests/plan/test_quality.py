"""quality=: what it chooses, and what wins over it. masks=: masks of the user's own. update=: dense values."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.patterns import NM, parse_pattern
from modelopt_sparse.plan.options import QUALITIES, Distill, Reconstruct
from modelopt_sparse.plan.planner import resolve
from tests import helpers
from tests.helpers import assert_same_masks, assert_same_state, refused, state_of, tiny_llama, token_batches

OFF = {"self_data": 0, "permute": False, "update": True, "polish": 0, "reconstruct": None, "distill": None}
PATTERNS = ["2:4", "50%"]


def settings(method=None, config=None, **options) -> tuple[str, dict[str, object]]:
    found, made = resolve(method, config, options)
    return found.name, {name: getattr(made, name) for name in OFF}


def sparsified(method=None, **options):
    return mts.sparsify(tiny_llama(), method, **{"data_loader": token_batches(4), "progress": False, **options})


# quality ------------------------------------------------------------------------------------------------------------


def test_without_quality_a_method_is_the_published_algorithm_and_nothing_more():
    assert settings() == ("sparsegpt", OFF)
    for name in METHODS:
        assert settings(name) == (name, OFF)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_quality_chooses_method_and_options(quality, pattern):
    chosen = QUALITIES[quality]
    options = chosen.options_for([parse_pattern(pattern)])
    assert options.pop("budget", None) == (None if quality == "fast" else "auto")  # see test_budget.py
    if "reconstruct" in options:
        options["reconstruct"] = Reconstruct(**options["reconstruct"])
    if "distill" in options:
        options["distill"] = Distill(epochs={"best": 2, "max": 4}[quality], optional=True)
    expected = (chosen.method, {**OFF, **options})
    assert expected[1] != OFF
    assert settings(quality=quality, pattern=pattern) == expected
    assert settings(config={"quality": quality}, pattern=pattern) == expected
    assert settings(config=mts.SparsifyConfig(quality=quality), pattern=pattern) == expected
    if pattern == "2:4":
        assert settings(quality=quality) == expected


CONFIG = mts.SparsifyConfig
WINS = [
    (None, {"polish": False, "reconstruct": False}, {"polish": 0, "reconstruct": None}),
    ({"reconstruct": 3}, {"polish": 7}, {"polish": 7, "reconstruct": Reconstruct(epochs=3)}),
    (CONFIG(reconstruct=Reconstruct(epochs=3)), {}, {"reconstruct": Reconstruct(epochs=3)}),
    # even if it is the default
    (CONFIG(polish=0), {}, {"polish": 0}),
    (CONFIG(permute=False), {}, {"permute": False}),
    (CONFIG(reconstruct=False), {}, {"reconstruct": None}),  # type: ignore[arg-type] - what users may write
    (copy.deepcopy(CONFIG(polish=0)), {}, {"polish": 0}),
]


@pytest.mark.parametrize("quality", QUALITIES)
def test_what_is_said_wins_over_quality(quality):
    assert settings("wanda", quality=quality)[0] == "wanda"
    for config, options, expected in WINS:
        found = settings(config=config, quality=quality, **options)[1]
        assert {name: found[name] for name in expected} == expected
    assert settings(config=CONFIG(quality="fast"))[1]["polish"] == 3
    assert settings(config=replace(CONFIG(quality="fast"), seed=3))[1]["polish"] == 3


RECIPES = [
    ("fast", "2:4", {"sparsegpt+polish"}),
    ("balanced", "2:4", {"alps+reconstruct", "permute+alps+reconstruct"}),
    ("balanced", "50%", {"alps+reconstruct"}),
    ("best", "2:4", {"alps+reconstruct+distill", "permute+alps+reconstruct+distill"}),
    ("max", "2:4", {"alps+reconstruct+distill", "permute+alps+reconstruct+distill"}),
]


@pytest.mark.parametrize(("quality", "pattern", "recipes"), RECIPES)
def test_the_report_names_the_whole_recipe(quality, pattern, recipes):
    model = tiny_llama(num_hidden_layers=1)
    report = mts.report(mts.sparsify(model, data_loader=token_batches(4), quality=quality, pattern=pattern))
    assert {layer.recipe for layer in report.layers} == recipes
    assert report.settings["quality"] == quality


# dense values -------------------------------------------------------------------------------------------------------


def test_update_false_keeps_the_mask_and_the_dense_values():
    dense = tiny_llama()
    compensated = sparsified("sparsegpt", sequential="none")
    masks_only = sparsified("sparsegpt", sequential="none", update=False)
    assert_same_masks(masks_only, compensated)
    for name, mask in mts.named_masks(masks_only):
        helpers.assert_bits(masks_only.get_parameter(name).detach(), dense.get_parameter(name).detach() * mask + 0.0)
    assert {layer.recipe for layer in mts.report(masks_only).layers} == {"sparsegpt+dense-values"}
    assert {layer.recipe for layer in mts.report(sparsified("wanda", update=False)).layers} == {"wanda"}


# masks --------------------------------------------------------------------------------------------------------------


@functools.cache
def masks_of_magnitude() -> dict[str, torch.Tensor]:
    return dict(mts.named_masks(mts.sparsify(tiny_llama(), "magnitude")))


def some_masks() -> dict[str, torch.Tensor]:
    return {name: mask.clone() for name, mask in masks_of_magnitude().items()}


def test_masks_are_taken_as_they_are():
    masks, model, dense = some_masks(), tiny_llama(), tiny_llama()
    mts.sparsify(model, masks=masks)
    assert_same_state(model, state_of(mts.sparsify(dense, "magnitude")))
    assert {layer.recipe for layer in mts.report(model).layers} == {"masks"}
    assert all(layer.tokens == 0 for layer in mts.report(model).layers)


def test_masks_with_everything_that_follows():
    masks = some_masks()
    model = sparsified(masks=masks, polish=True, reconstruct=2)
    report = mts.report(model)
    assert {layer.recipe for layer in report.layers} == {"masks+polish+reconstruct"}
    assert all(after <= before for before, after in (layer.errors for layer in report.layers))
    assert_same_masks(model, masks)
    for quality, recipe in (("fast", "masks+polish"), ("best", "masks+reconstruct+distill")):
        plan = mts.make_plan(tiny_llama(), masks=masks, quality=quality, data_loader=token_batches())
        assert {layer.recipe for layer in plan.layers} == {recipe}


def test_layers_without_a_mask_stay_dense_and_say_so():
    masks = {name: mask for name, mask in some_masks().items() if "mlp" in name}
    model = mts.sparsify(tiny_llama(), masks=masks)
    assert dict(mts.named_masks(model)).keys() == masks.keys()
    dense = {item.name.split(".")[-1] for item in mts.report(model).skipped if item.reason == "no mask given"}
    assert dense == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_unstructured_masks_may_hold_any_count():
    masks = some_masks()
    name = next(iter(masks))
    masks[name] = torch.rand(masks[name].shape, generator=torch.Generator().manual_seed(0)) < 0.3
    model = mts.sparsify(tiny_llama(), masks=masks, pattern=0.5)
    entry = next(layer for layer in mts.report(model).layers if layer.parameter == name)
    assert entry.zeros == int((~masks[name]).sum())
    mts.verify(model)


SEVERAL_MATRICES = [
    (lambda: nn.Sequential(nn.Conv1d(8, 8, 3, groups=2), nn.Conv1d(8, 8, 3)), "0.weight"),
    (lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), "0.in_proj_weight"),
]


@pytest.mark.parametrize(("make", "parameter"), SEVERAL_MATRICES)
def test_unstructured_masks_may_hold_other_counts_in_each_of_several_matrices(make, parameter):
    model = make()
    mask = torch.arange(model.get_parameter(parameter).numel()).view_as(model.get_parameter(parameter)) > 20
    mts.sparsify(model, masks={parameter: mask}, pattern=0.5)
    mts.verify(model)
    mts.sparsify(model, masks={parameter: mask.roll(1, 0) & mask}, pattern=0.5)
    ((_, found),) = mts.named_masks(model)
    assert torch.equal(found, mask.roll(1, 0) & mask)
    assert mts.report(model).layers[0].zeros == int((~found).sum())
    mts.verify(model)


def as_they_are(masks, name):
    return masks


OTHERS = "masks= says which weights stay, and {} would choose others"
PLACES = "breaks pattern 2:4 in .* places: give its own, or 0.5 for any"


MISFITS = [
    (lambda m, n: {**m, n: m[n].float()}, {}, r"masks\['.*'\] must be a torch.bool tensor"),
    (lambda m, n: {**m, n: m[n].to("meta")}, {}, r"masks\['.*'\] must be a torch.bool tensor"),
    (lambda m, n: {**m, n: m[n] & ~m[n]}, {"pattern": 0.5}, r"masks\['.*'\] keeps nothing"),
    (lambda m, n: {**m, n: m[n][:4]}, {}, "has shape .*: it must be \\["),
    (lambda m, n: {**m, n: ~m[n] | m[n]}, {}, PLACES),
    (lambda m, n: {f"{n}s": m[n]}, {}, "belongs to no prunable parameter.*did you mean"),
    (lambda m, n: list(m), {}, "masks is a list: give a mapping"),
    (lambda m, n: {}, {}, "masks is empty: give a mapping"),
    (as_they_are, {"method": "wanda"}, "masks= takes the place of a method"),
    (as_they_are, {"permute": True}, OTHERS.format("permute")),
    (as_they_are, {"budget": "35% zeros"}, OTHERS.format("budget")),
    (as_they_are, {"pattern": NM(2, 5)}, "not a multiple of 5"),
]


@pytest.mark.parametrize(("change", "options", "message"), MISFITS)
def test_masks_that_do_not_fit(change, options, message):
    masks = some_masks()
    masks = change(masks, next(iter(masks)))
    refused(mts.sparsify, tiny_llama(), masks=masks, **options, match=message, error=(TypeError, ValueError))
