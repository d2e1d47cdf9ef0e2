"""Masks that move, and weights that nobody trains; models that become plain; tools that replace weights."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.model.masking import SparseModule, named_masks
from tests.helpers import assert_bits, assert_same_masks, assert_same_state, refused, state_of, tiny_llama
from tests.training.cases import applied, masks_of, take_step


class Mlp(nn.Module):
    """``second`` is read by its parent, which does not call it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 20, bias=False), nn.Linear(20, 10, bias=False)

    def forward(self, x):
        return F.linear(self.first(x).relu(), self.second.weight)


MOVING = {"set": training.SET, "rigl": training.RigL}


def step(model, *optimizers, seed=0):
    x = torch.randn(32, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(seed))
    take_step(model(x).square().mean(), *optimizers)


def test_another_algorithm_beside_rigl_changes_nothing():
    """Each has parameters of its own, and so has the flag that lets gradients through."""
    ends = []
    for order in ("a group", "rigl first", "rigl last"):
        model, names = Mlp(), ("first.weight", "second.weight") if order != "a group" else (None, None)
        rigl = training.RigL(0.5, update=2, include=names[0], scope="matrix")
        both = [rigl, training.Static(0.5, include=names[1])][:: -1 if order == "rigl last" else 1]
        if order == "a group":
            both = [training.Group(dict(zip(("first.weight", "second.weight"), both)))]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for thing in (model, optimizer):
            for each in both:
                each.apply(thing)
        start = masks_of(model)
        for number in range(10):
            step(model, optimizer, seed=number)
        assert [torch.equal(mask, start[name]) for name, mask in named_masks(model)] == [False, True]
        assert {layer.recipe: layer.zeros for layer in mts.report(model).layers} == {"rigl": 240, "static": 100}
        ends.append(state_of(model))
        assert_same_state(model, ends[0])


@pytest.mark.parametrize("algorithm", MOVING)
@pytest.mark.parametrize("why", ["frozen", "frozen later", "no optimizer"])
def test_weights_that_nobody_trains_keep_their_masks(why, algorithm):
    model = Mlp()
    first, second = model.parameters()
    first.requires_grad_(why != "frozen")
    sparsity = MOVING[algorithm](0.5, update=1, include="*weight", scope="matrix")
    before = first.detach().clone()
    plan = sparsity.plan(model)
    sparsity.apply(model)
    start = masks_of(model)
    optimizer = sparsity.apply(torch.optim.SGD([second] if why == "no optimizer" else [first, second], lr=0.05))
    first.requires_grad_(why == "no optimizer")
    if why == "frozen":
        assert [(each.name, each.reason[:6]) for each in plan.skipped] == [("first.weight", "frozen")]
        for number in range(3):
            step(model, optimizer, seed=number)
        assert_bits(first, before)
        return
    with pytest.warns(UserWarning, match=r"1 masks do not move.*'first.weight'"):
        step(model, optimizer)
    for number in range(1, 9):  # a second warning would be an error
        step(model, optimizer, seed=number)
    assert int(first.count_nonzero()) == first.numel() // 2, "none of its live weights is lost"
    assert [torch.equal(mask, start[name]) for name, mask in named_masks(model)] == [True, False]
    assert "does not move" in str(mts.report(model).layers[0].notes)
    first.requires_grad_()
    later = [sparsity.apply(torch.optim.SGD([first], lr=0.05))] if why == "no optimizer" else []  # takes them over
    step(model, optimizer, *later, seed=9)
    assert not torch.equal(masks_of(model)["first.weight"], start["first.weight"])
    assert not mts.report(model).layers[0].notes


def test_without_an_optimizer_the_second_forward_warns():
    model = training.SET(0.5, include="*weight", scope="matrix").apply(Mlp())
    pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 24)
    model(x)
    with pytest.warns(UserWarning, match="masks will not move: apply this SET"):
        model(x)
    static, trained = training.Static(0.5, include="*weight").apply(Mlp()), Mlp()
    applied(training.SET(0.5, include="*weight", scope="matrix"), trained)
    for quiet in (static, trained, model):
        for _ in range(3):
            quiet(x)


def test_an_optimizer_that_makes_no_steps_is_told():
    """One that was made anew, or that wraps the one whose step is called."""
    model = Mlp()
    sparsity = training.SET(0.5, include="*weight", scope="matrix", update={"freq": 1, "stop": 8})
    first = applied(sparsity, model)
    for _ in range(3):  # accumulated gradients, and a step at last
        model(torch.randn(2, 24)).sum().backward()
    step(model, first)
    anew = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, anew)
    with pytest.warns(UserWarning, match="masks do not move: weights change without steps of the SGD that has this"):
        step(model, anew)
    sparsity.release()
    sparsity.apply(anew)
    before = masks_of(model)
    for _ in range(7):
        step(model, anew)
    assert not torch.equal(model.first.weight_mask, before["first.weight"])
    for _ in range(5):  # no mask is to move any more
        step(model, first)


@pytest.mark.parametrize("how", ["export", "export a part", "remove"])
def test_dense_training_follows_sparse_training(how):
    """Guide: sparse pre-training, then dense training with the same optimizer, which has a hook of the user's. Nothing
    warns."""
    model = Mlp()
    sparsity = training.RigL(0.5, update=1, include="*weight", scope="matrix")
    optimizer = applied(sparsity, model, torch.optim.AdamW, lr=1e-3)
    finished = []
    optimizer.register_step_post_hook(lambda *_: finished.append(sparsity.step))
    for number in range(3):
        step(model, optimizer, seed=number)
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    if how == "remove":
        sparsity.remove()
        assert not model._forward_pre_hooks
    else:
        mts.export(model if how == "export" else model.first)
        assert len(sparsity.report().layers) == 2
    assert_bits(optimizer.state_dict()["state"][0]["exp_avg"], moments[0]["exp_avg"])
    dense = [module for module in (model.first, model.second) if not isinstance(module, SparseModule)]
    assert len(dense) == 1 + (how != "export a part")
    for number in range(3, 11):
        step(model, optimizer, seed=number)
    assert all(module.weight.count_nonzero() == module.weight.numel() for module in dense)
    assert finished == [1, 2, 3, *(range(4, 12) if how == "export a part" else [3] * 8)]
    if how != "export a part":  # then it can begin anew
        sparsity.apply(model)
        sparsity.apply(optimizer)
        assert (sparsity.step, len(masks_of(model))) == (0, 2)


@pytest.mark.filterwarnings("ignore:.*zeros are there already:UserWarning")
def test_remove_takes_no_masks_of_others():
    model = mts.sparsify(Mlp(), "magnitude", pattern="2:4", include=["second"])
    sparsity = training.SET(0.5, include="first.weight", scope="matrix")
    sparsity.apply(model)
    sparsity.remove()
    assert [name for name, _ in named_masks(model)] == ["second.weight"]
    sparsity.apply(model)
    assert len(masks_of(model)) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_a_step_is_finished_when_all_optimizers_have_made_it(slow):
    """Whichever of them makes its steps less often."""
    sparsity = training.SET(0.5, update=1, include="*weight", scope="matrix")
    model = sparsity.apply(Mlp())
    optimizers = [sparsity.apply(torch.optim.SGD([parameter], lr=0.1)) for parameter in model.parameters()]
    start = masks_of(model)
    for number in range(3):
        step(model, optimizers[1 - slow], seed=number)
    assert sparsity.step == 0
    assert_same_masks(model, start)
    step(model, optimizers[slow])
    assert sparsity.step == 1
    assert not any(torch.equal(mask, start[name]) for name, mask in named_masks(model))


def test_a_layer_that_is_replaced_is_named():
    model = Mlp()
    optimizer = applied(training.SET(0.5, include="*weight", scope="matrix", update=1), model)
    model.second = nn.Linear(20, 10)
    with pytest.raises(ValueError, match=r"'second\.weight' has no mask, as after its layer is replaced"):
        step(model, optimizer)


# tools that put another weight into a sparse module -----------------------------------------------------------------

TOOLS = {
    "prune": lambda m: torch.nn.utils.prune.l1_unstructured(m, "weight", 0.5),
    "parametrize": lambda m: torch.nn.utils.parametrize.register_parametrization(m, "weight", nn.Identity()),
    "spectral_norm": torch.nn.utils.spectral_norm,
    "script": torch.jit.script,
    "script of the model": lambda m: torch.jit.script(nn.Sequential(m)),
    "weight_norm": torch.nn.utils.weight_norm,  # deletes the weight before anything can be said
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_cannot_take_a_sparse_module_say_so(tool):
    module = training.Static(0.5, include="weight").apply(nn.Linear(8, 8))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"mts.export first"):
        TOOLS[tool](module)
    if tool == "weight_norm":
        return
    assert list(module.state_dict()) == list(before)
    module(torch.randn(2, 8))
    assert type(mts.export(module)) is nn.Linear
    TOOLS[tool](module)


# what is said -------------------------------------------------------------------------------------------------------


def test_warnings_of_schedules_that_do_nothing_or_too_much():
    never = training.SET(0.5, include="*weight", scope="matrix", update={"freq": 10, "start": 7, "stop": 5})
    with pytest.warns(UserWarning, match="never move: update stops"):
        never.apply(Mlp())
    short = training.GMP(training.Cubic(0.0, 0.8, 0, 20), include="*weight", update={"freq": 10, "stop": 20})
    (note,) = short.plan(Mlp()).notes
    assert note.endswith("ends at 70.00%: its last update is at step 10, before the schedule's stop")
    linear, model = training.GMP(training.Linear(0.5, 0.3), include="*weight", update=1), Mlp()
    optimizer = applied(linear, model)
    step(model, optimizer)
    with pytest.warns(UserWarning, match="the level is 1, where no weight is left"):
        step(model, optimizer)


def test_how_algorithms_and_their_levels_are_printed():
    text = "Static(sparsity=Constant(value=0.9), scope=row, init_method=random, distribution=uniform, include="
    algorithm = training.Static(0.9, scope="row")
    assert repr(algorithm) == f"{text}every parameter, seed=0)"
    group = training.Group({"*.mlp.*": algorithm, "blocks": None})
    assert repr(group) == f"Group('*.mlp.*': {algorithm}, blocks: None)"
    model = training.Static(0.9, include="weight", scope="row").apply(nn.Linear(192, 8))
    assert mts.report(model).layers[0].pattern == "90% per row"
    mts.verify(model)


def test_sparse_ift_prints_few_lines():
    """Its plan has a golden text in tests/reports."""
    assert len(repr(training.sparse_ift(tiny_llama(), 0.5))) < 500


def test_nan_for_pruned_weights_names_finalize():
    model = Mlp()
    model.first.weight.data[0, 0] = torch.nan
    refused(mts.sparsify, model, "magnitude", pattern="2:4", match=r"first.*NaN(.|\n)*modelopt-sparse finalize")
