"""The contract of sparse training: all algorithms, patterns and kinds of parameters, under several optimizers."""

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel
from transformers.optimization import Adafactor

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.training.planner import find_weights
from modelopt_sparse.training.updates import Scope
from tests.helpers import assert_same_masks, assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models.tricky import Shared
from tests.training.cases import LAYERS, OTHERS, RECIPES, Zoo, applied, batch, loss_of, masks_of, take_step


class Lion(torch.optim.Optimizer):
    """Steps by the sign of the gradient, so that the faintest one counts as much as any."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad.sign()


FACTORS = {"relative_step": False, "scale_parameter": False}
OPTIMIZERS = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)],
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=3e-3)],
    "adam, small eps": lambda model: [torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-15)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=1e-2)],
    "rmsprop, small eps": lambda model: [torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-12)],
    "lion": lambda model: [Lion(model.parameters(), lr=1e-3)],
    "adafactor": lambda model: [Adafactor(model.parameters(), lr=3e-3, **FACTORS)],
    "muon beside adamw": lambda model: [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=3e-3),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=3e-3),
    ],
}


def assert_zero_at_rest(model, optimizers, before):
    """Weights and state of the weights' shape are +0.0 where they are pruned, or were ``before``: what grows starts
    there."""
    for name, mask in named_masks(model):
        weight, live = model.get_parameter(name), mask & before[name]
        values = [state for optimizer in optimizers for state in optimizer.state.get(weight, {}).values()]
        for value in [weight.detach(), *(v for v in values if torch.is_tensor(v) and v.shape == weight.shape)]:
            assert not value[~live].any(), name
            assert not torch.signbit(value[~live]).any(), name


def train(model, optimizers, steps, start=0):
    for step in range(start, start + steps):
        before = masks_of(model)
        take_step(loss_of(model, batch(step)), *optimizers)
        assert_zero_at_rest(model, optimizers, before)


def made_sparse(sparsity, kind="adamw"):
    model = sparsity.apply(Zoo())
    return model, [sparsity.apply(optimizer) for optimizer in OPTIMIZERS[kind](model)]


# counts, zeros, reruns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_contract(recipe):
    include = LAYERS if recipe.scope == "out groups" or recipe.pattern else [*LAYERS, *OTHERS]
    sparsity = recipe.build(include=include)
    model, optimizers = made_sparse(sparsity)
    before = masks_of(model)
    train(model, optimizers, 7)
    middle = state_of(model)
    train(model, optimizers, 9, start=7)
    moved = []
    assert sparsity.sparse_params.keys() <= {*include}
    for weight in find_weights(model):
        if weight.name not in include:
            continue
        mask = weight.layer.matrix(sparsity.sparse_params[weight.name].mask)
        scope = {"row": Scope("row"), "in groups": Scope("in_groups", 2), "out groups": Scope("out_groups", 2)}
        scopes = scope.get(recipe.scope, Scope()).within(mask)
        assert ((~scopes).sum(-1) == round(recipe.level * scopes.shape[-1])).all(), weight.name
        if recipe.pattern:
            assert NM(2, 4).count_kept_wrong(mask) == 0
        moved.append(not torch.equal(sparsity.sparse_params[weight.name].mask, before[weight.name]))
    # of a bias in two groups a single weight is live in each, of which none drops
    assert sum(moved) >= 0.7 * len(moved) if not recipe.name.startswith("static") else not any(moved)
    mts.verify(model)
    zeros = {layer.parameter: layer.zeros for layer in mts.report(model).layers}
    assert zeros == {name: int((~sparse.mask).sum()) for name, sparse in sparsity.sparse_params.items()}

    again, others = made_sparse(recipe.build(include=include))
    train(again, others, 7)
    assert_same_state(again, middle)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("name", ["set, matrix", "rigl, row", "gmp, 2:4"])
def test_zeros_hold_in_every_optimizer(kind, name):
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    sparsity = recipe.build(include=LAYERS if recipe.pattern else [*LAYERS, *OTHERS])
    model, optimizers = made_sparse(sparsity, kind)
    before = masks_of(model)
    train(model, optimizers, 7)
    assert sparsity.step == 7
    moved = [not torch.equal(mask, before[name]) for name, mask in named_masks(model)]
    assert sum(moved) >= 0.5 * len(moved)


class Around(torch.optim.Optimizer):
    """As SAM and Lookahead: another one makes the step."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.optim = inner

    def step(self, closure=None):
        self.optim.step()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shared_out", [False, True])
def test_the_state_of_an_optimizer_inside_of_another_is_zeroed(shared_out, group_of_one):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    sparsity = training.SET(0.5, include=LAYERS, update=2)
    model, inner = sparsity.apply(Zoo()), torch.optim.AdamW
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, inner) if shared_out else Around(inner(parameters))
    sparsity.apply(optimizer)
    for number in range(3):
        before = masks_of(model)
        take_step(loss_of(model, batch(number)), optimizer)
        assert_zero_at_rest(model, [optimizer.optim], before)


# RigL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [nn.Linear.forward, lambda model, x: nn.functional.linear(x, model.weight)])
def test_rigl_grows_by_the_gradient_of_the_whole_weight(call):
    """Against a dense twin whose gradient is read directly; also of a weight that its parent reads, which a hook on the
    Parameter makes faint."""
    torch.manual_seed(1)
    model, twin = nn.Linear(12, 6, bias=False), nn.Linear(12, 6, bias=False)
    optimizer = applied(training.RigL(0.5, drop_fraction=0.25, update=2), model)
    for step in range(1, 7):
        mask = model.weight_mask.clone()
        x = torch.randn(9, 12)
        with torch.no_grad():
            twin.weight.copy_(model.weight)
        twin.zero_grad()
        twin(x).square().sum().backward()
        take_step(call(model, x).square().sum(), optimizer)
        if step % 2:
            assert torch.equal(model.weight_mask, mask)
            continue
        stepped = torch.where(mask, twin.weight.detach() - 0.1 * twin.weight.grad, 0.0).flatten()
        live = mask.flatten().nonzero().flatten().tolist()
        kept = sorted(live, key=lambda i: -abs(float(stepped[i])))[: len(live) - round(0.25 * len(live))]
        rest = [i for i in range(72) if i not in kept]
        grown = sorted(rest, key=lambda i: -abs(float(twin.weight.grad.flatten()[i])))[: 36 - len(kept)]
        assert set(model.weight_mask.flatten().nonzero().flatten().tolist()) == {*kept, *grown}


def test_gradients_reach_pruned_places_only_on_the_step_before_an_update():
    sparsity = training.RigL(0.75, include=["linear.weight", "conv.weight"], update=3)
    model, (optimizer,) = made_sparse(sparsity)
    sparse, faint = sparsity.sparse_params.values(), []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        pruned = [each.parameter.grad[~each.mask].abs().max() for each in sparse]
        faint.append(all(pruned))
        assert all(p <= each.parameter.grad[each.mask].abs().max() * 2**-20 for p, each in zip(pruned, sparse))
        optimizer.step()
    assert faint == [False, False, True, False, False, True]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "release"])
def test_gradients_stay_away_from_pruned_places_once_no_update_follows(how):
    sparsity = training.RigL(0.75, include=LAYERS, update=2)
    model, optimizers = made_sparse(sparsity)
    train(model, optimizers, 1)
    if how == "release":
        sparsity.release()
    else:
        model = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    model.zero_grad()
    for step in range(2):
        loss_of(model, batch(step)).backward()
    assert not any(model.get_parameter(name).grad[~mask].any() for name, mask in named_masks(model))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Adafactor])
def test_without_drops_rigl_trains_as_static_does_to_the_bit(kind):
    """Faint gradients reach nothing but the choice of what grows. Adafactor divides by means of rows and columns."""
    states, options = [], {"include": LAYERS, "init_method": "topk"}
    for sparsity in (training.RigL(0.9, drop_fraction=0.0, update=1, **options), training.Static(0.9, **options)):
        model = Zoo()
        optimizer = applied(sparsity, model, kind, lr=1e-2, **FACTORS if kind is Adafactor else {})
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            clipped = [p for n, p in model.named_parameters() if "list" not in n and "read" not in n]
            nn.utils.clip_grad_norm_(clipped, 0.1)
            optimizer.step()
        states.append(state_of(model))
    assert_same_state(model, states[0])


def test_an_expert_without_tokens_keeps_its_mask():
    model, (optimizer,) = made_sparse(training.RigL(0.5, include="experts.experts.gate_up_proj", update=1))
    model.experts.gate.weight.data[:] = torch.tensor([[1.0], [1.0], [-1.0]])
    model.embed.weight.data.abs_()
    mask, busy = model.experts.experts.gate_up_proj_mask.clone(), set()
    model.experts.gate.register_forward_hook(lambda module, args, output: busy.update(output[-1].flatten().tolist()))
    take_step(loss_of(model, batch(0)), optimizer)
    after = model.experts.experts.gate_up_proj_mask
    assert busy != {0, 1, 2}, "the test needs an expert without tokens"
    for expert in range(3):
        assert torch.equal(after[expert], mask[expert]) == (expert not in busy)


def test_a_layer_without_samples_keeps_its_mask():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = applied(training.RigL(0.5, include="*.weight", update=1), model)
    before = masks_of(model)
    take_step(model[1](torch.randn(4, 8)).square().sum(), optimizer)
    assert [torch.equal(mask, before[name]) for name, mask in named_masks(model)] == [True, False]


class Poisoned(nn.Linear):
    """The gradient of its first pruned weight is NaN."""

    def forward(self, input):
        weight = self.weight.clone()
        place = tuple((weight == 0).nonzero()[0])
        weight.register_hook(lambda gradient: gradient.index_put(place, torch.tensor(torch.nan)))
        return nn.functional.linear(input, weight)


def test_nan_at_a_pruned_place_reaches_nothing():
    model = nn.Sequential(Poisoned(8, 8, bias=False))
    optimizer = applied(training.RigL(0.5, update=1), model, torch.optim.AdamW)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        assert torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        assert torch.isfinite(model[0].weight).all()


def step_one_by_one(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


STUCK = [
    (training.RigL(0.5, update=1), None, "'0.weight' has no gradient after step 1"),
    (training.RigL(0.5, update=1), torch.ones(1, 8), "'0.weight' has no gradient after step 1: keep it until all"),
    (training.SET(0.5, update=1), torch.full((1, 8), torch.inf), "weight '0.weight' holds NaN or inf after step 1"),
]


@pytest.mark.parametrize(("algorithm", "x", "match"), STUCK)
def test_a_step_by_which_masks_cannot_move_says_so(algorithm, x, match):
    """One optimizer for each weight, whose gradients go when it has made its step, as in a backward pass that steps."""
    model = algorithm.apply(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    optimizers = [algorithm.apply(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in model]
    if x is not None:
        model(x).square().sum().backward()
    refused(step_one_by_one, optimizers, match=match, error=RuntimeError)


# what is applied to what --------------------------------------------------------------------------------------------


def test_static_takes_every_parameter_and_says_so():
    model = tiny_llama()
    with pytest.warns(UserWarning, match=r"Static takes every parameter, .*include='default'"):
        training.Static(0.3).apply(model)
    for name, parameter in model.named_parameters():
        assert int((parameter == 0).sum()) == round(0.3 * parameter.numel()), name
    assert set(dict(named_masks(model))) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_default_and_blocks_leave_dense_what_they_say():
    model = tiny_llama(tie_word_embeddings=False)
    sparsity = training.Static(0.3, include="default")
    plan = sparsity.plan(model)
    parts = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert {row.name for row in plan.rows} == {f"model.layers.{i}.{x}_proj.weight" for i in range(2) for x in parts}
    reasons = {skipped.name: skipped.reason for skipped in plan.skipped}
    why = {"model.norm.weight": "one dimension", "lm_head.weight": "output head"}
    assert reasons.items() >= (why | {"model.embed_tokens.weight": "embedding"}).items()
    tied = {skipped.name: skipped.reason for skipped in sparsity.plan(tiny_llama(tie_word_embeddings=True)).skipped}
    assert tied == {name: reason for name, reason in reasons.items() if name != "lm_head.weight"}
    blocks = training.Static(0.3, include="blocks").plan(model)
    assert {row.name for row in blocks.rows} == {row.name for row in plan.rows}
    assert training.Static(0.3, include="default").plan(nn.Linear(8, 8)).rows[0].name == "weight"


def test_requires_dense_on_parameters_and_modules():
    """On state of optimizers: test_guides.py."""
    model = Zoo()
    model.linear.weight.requires_dense = True
    model.conv.requires_dense = True
    sparsity = training.SET(0.5, include=[*LAYERS, "linear.bias"], update=1)
    reasons = {each.name: each.reason for each in sparsity.plan(model).skipped}
    why = {"linear.weight": "requires_dense", "conv.weight": "requires_dense of its module"}
    assert reasons.items() >= why.items()
    sparsity.apply(model)
    assert not {"linear.weight", "conv.weight", "conv.bias"} & set(sparsity.sparse_params)


def test_autoupdate_off_leaves_it_to_update():
    sparsity = training.RigL(0.5, include="linear.weight")
    model, (optimizer,) = made_sparse(sparsity)
    sparsity.autoupdate = False
    mask = model.linear.weight_mask.clone()
    train(model, [optimizer], 3)
    assert torch.equal(model.linear.weight_mask, mask)
    sparsity.update()
    assert not torch.equal(model.linear.weight_mask, mask)
    assert_zero_at_rest(model, [optimizer], {"linear.weight": mask})
    assert mts.report(model).layers[0].zeros == 32
    optimizer.zero_grad(set_to_none=False)
    with pytest.warns(UserWarning, match="all gradients are zero after step 3, so that nothing new grows"):
        sparsity.update()


def test_masks_depend_on_the_seed_and_not_on_the_filter():
    masks = []
    for include, seed in (("linear.weight", 0), ("linear.weight", 1), (LAYERS, 0)):
        model = training.Static(0.5, include=include, seed=seed).apply(Zoo())
        masks.append(model.linear.weight_mask)
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], model.read.weight_mask), "each name has masks of its own"


def test_erk_shares_the_level_out():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(128, 128, bias=False))
    training.Static(0.9, distribution="erk").apply(model)
    zeros = [int((module.weight == 0).sum()) for module in model]
    assert sum(zeros) == pytest.approx(0.9 * (64 + 128**2), abs=1)
    assert zeros[0] == 0, "a density of 16 / 64 eps is over 1"
    rows = training.Static(0.5, include=["linear.weight", "experts.*"], distribution="erk").plan(Zoo()).rows
    size = sum(row.size for row in rows)
    assert sum(row.zeros for row in rows) == pytest.approx(0.5 * size, abs=4), "a bank is three"


# groups, and algorithms of one's own --------------------------------------------------------------------------------


def test_the_first_match_counts_and_groups_can_be_extended():
    group = training.Group({"linear.weight": training.Static(0.25)})
    group.extend(training.Group({"linear.*": training.Static(0.5)}))
    rows = {row.name: row.zeros / row.size for row in group.plan(Zoo()).rows}
    assert rows == {"linear.weight": 0.25, "linear.bias": 0.5}


class FewestFirst(training.DynamicSparsityAlgorithm):
    """The first places of each row."""

    def update_mask(self, p, mask, sparsity):
        return (torch.arange(p.shape[-1]) < round((1 - sparsity) * p.shape[-1])).expand(mask.shape)


class NoMask(FewestFirst):
    def update_mask(self, p, mask, sparsity):
        return None


def test_an_algorithm_of_ones_own_sees_weights_as_out_by_in():
    """One that sets masks itself is in test_guides.py."""
    model, (optimizer,) = made_sparse(FewestFirst(0.5, include=["linear.weight", "conv1d.weight"], update=2))
    train(model, [optimizer], 2)
    assert torch.equal(model.linear.weight_mask, (torch.arange(8) < 4).expand(8, 8))
    assert torch.equal(model.conv1d.weight_mask.mT, (torch.arange(8) < 4).expand(8, 8)), "stored as [in, out]"
    assert {layer.recipe for layer in mts.report(model).layers} == {"fewestfirst"}
    with pytest.raises(ValueError, match=r"update_mask returned NoneType, no bool mask \[8, 8\]"):
        train(*made_sparse(NoMask(0.5, include=["linear.weight"])), 1)


# levels that change -------------------------------------------------------------------------------------------------


def test_nan_marks_pruned_places_and_inf_is_damage():
    model = nn.Linear(8, 8, bias=False)
    model.weight.data[:, :4] = torch.nan
    training.Static(0.5, init_method="topk").apply(model)
    assert torch.equal(model.weight_mask, (torch.arange(8) >= 4).expand(8, 8))
    assert not model.weight[:, :4].any()
    model.weight.data[0, 5] = torch.inf
    refused(training.Static(0.6).apply, model, match="'weight' holds inf")


# what is refused ----------------------------------------------------------------------------------------------------


WRONG_OPTIONS = [
    (lambda: training.Static(), "Static needs a level"),
    (lambda: training.SET(0.9, pattern="2:4"), r"sparsity=0\.9: 2:4 stands in its place"),
    (lambda: training.Static(1.0), r"sparsity=1.0: must be a number in \[0, 1\)"),
    (lambda: training.GMP(training.Cubic(0.0, 90, 0, 4)), "sparsity=90: must be a number in"),
    (lambda: training.GMP(0.5), "GMP prunes by a schedule, not at one level .0.5.*use Static"),
    (lambda: training.Static([0.5, 0.6]), "Static keeps one level.*use GMP"),
    (lambda: training.Static(0.5, scope="column"), "scope='column': allowed are 'row', 'matrix'"),
    (lambda: training.RigL(0.5, scope="row", balance_in_groups=2), "give one of scope, balance_in_groups"),
    (lambda: training.RigL(0.5, balance_in_groups=0), "balance_in_groups=0: must be a positive whole number"),
    (lambda: training.Static(0.5, init_method="magnitude"), "init_method='magnitude': allowed are 'random'"),
    (lambda: training.Static(0.5, distribution="ERK"), "allowed are 'uniform', 'erk'"),
    (lambda: training.Static(pattern="2:4", distribution="erk"), "pattern 2:4 has its own"),
    (lambda: training.Static(pattern="50%"), "Static takes N:M here"),
    (lambda: training.SET(0.5, drop_fraction=1.5), "drop_fraction=1.5"),
    (lambda: training.GMP([0.0, 0.5], pattern="2:4", init_method="random"), "leave init_method out"),
    (lambda: training.Static(0.5, include=3), "include=3: give globs"),
    (lambda: training.SET(0.5, exclude=[3]), r"exclude=\[3\]: give globs"),
    *((lambda x=x: training.SET(0.5, include="*weight", exclude=x), "exclude=") for x in ("default", "blocks")),
    (lambda: training.SET(0.5, include="*weight", exclude=[re.compile("lm_head")]), "exclude="),
    *((lambda s=s: training.SET(0.5, seed=s), "seed=.*a whole number of at") for s in ("a", 1.5, -1, None, True)),
    (
        lambda: training.SET(0.5, drop_fraction=training.Cosine(0.3, 0)),
        "half_period=0: must be a number in .0, inf",
    ),
    (
        lambda: training.Group([("*", training.Static(0.5))]),
        "Group takes a mapping of globs .* this is a list",
    ),
    (lambda: training.Group({"a": training.Group()}), "a Group in a Group"),
    (lambda: training.Group({"a": training.Static(0.5, include="b")}), "leave include out of its algorithms"),
    (lambda: training.Group(dict.fromkeys("ab", training.Static(0.5))), "'b': this Static is in the group already"),
]


@pytest.mark.parametrize(("build", "match"), WRONG_OPTIONS)
def test_wrong_options(build, match):
    refused(build, match=match, error=TypeError if match.startswith("Group takes") else ValueError)


WRONG_PLANS = [
    (lambda: training.Static(0.5, include="*.wieght"), r"'\*.wieght' matches no parameter of this Zoo"),
    (lambda: training.Static(0.5, exclude="nothing"), "'nothing' matches no parameter"),
    (lambda: training.Static(0.5, include=re.compile("zzz")), "regex 'zzz' matches no parameter"),
    (lambda: training.Group(), "this Group is empty"),
    (lambda: training.RigL(0.5, include="linear.weight", balance_in_groups=3), "cannot be divided into 3 equal"),
    (lambda: training.RigL(pattern="2:4", include="linear.weight", balance_in_groups=4), "cut through groups of 4"),
    (lambda: training.Static(pattern="2:4", include="norm.*"), "2:4 is for weight matrices"),
]


@pytest.mark.parametrize(("build", "match"), WRONG_PLANS)
def test_what_a_plan_refuses(build, match):
    model = Zoo()
    refused(build().plan, model, match=match)
    refused(build().apply, model, match=match)


class WithoutHooks(torch.optim.Optimizer):
    def __init__(self, inner):
        self.param_groups, self.state = inner.param_groups, inner.state


def test_what_apply_refuses():
    """And a level that says the same as the pattern is no mistake."""
    training.RigL(0.5, pattern="2:4")
    model, sparsity = Zoo(), training.SET(0.5, include=LAYERS)
    refused(sparsity.apply, torch.optim.SGD(model.parameters(), lr=0.1), match="apply this SET to the model first")
    refused(sparsity.report, match="applied to no model yet")
    optimizer, inner = applied(sparsity, model), torch.optim.SGD(model.parameters(), lr=0.1)
    deepspeed = type("DeepSpeedOptimizer", (torch.optim.SGD,), {"__module__": "deepspeed.runtime"})
    for thing, match in (
        (model, "applied to a Zoo already"),
        (torch.optim.SGD(Zoo().parameters(), lr=0.1), "this SGD holds no sparse parameter of the model"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS calls its closure several times"),
        (deepspeed(model.parameters(), lr=0.1), "DeepSpeed has buffers of its own"),
        (optimizer, "has this SET already"),
        (WithoutHooks(inner), "give the optimizer that it wraps"),
        ("model", "takes a model or an optimizer, and this is str"),
    ):
        refused(sparsity.apply, thing, match=match, error=TypeError if thing == "model" else ValueError)
    sparsity.apply(inner)  # it is as it was


def test_parameters_that_an_optimizer_gets_later_are_trained_when_it_is_applied_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsity = training.SET(0.5, include="*.weight", update=1)
    sparsity.apply(model)
    sparsity.apply(optimizer := torch.optim.AdamW(model[1].parameters()))
    optimizer.add_param_group({"params": [*model[0].parameters()]})
    with pytest.warns(UserWarning, match="1 masks do not move .*apply this to the optimizer that trains them"):
        take_step(model(torch.randn(4, 8)).sum(), optimizer)
    sparsity.apply(optimizer)
    mask = model[0].weight_mask.clone()
    take_step(model(torch.randn(4, 8)).sum(), optimizer)
    assert sparsity.step == 2
    assert not torch.equal(model[0].weight_mask, mask)
    assert not optimizer.state[model[0].weight]["exp_avg_sq"][~model[0].weight_mask].any()


class Clearing(torch.optim.SGD):
    """Clears gradients in its step."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def test_a_gradient_that_the_step_has_cleared_stays_cleared():
    """And masks move by it."""
    masks = []
    for kind in (torch.optim.SGD, Clearing):
        torch.manual_seed(0)
        model, x = nn.Linear(16, 8, bias=False), torch.randn(4, 16)
        optimizer = applied(training.RigL(0.5, update=2, include=["weight"], scope="row"), model, kind, lr=0.0)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            assert kind is torch.optim.SGD or model.weight.grad is None
            optimizer.zero_grad()
        masks.append(model.weight_mask)
    assert torch.equal(*masks)


def test_what_cannot_be_sparse_is_refused_and_left_as_it_was():
    """Sparse embeddings and float16; the second of two modules."""
    for kind in (nn.Embedding, nn.EmbeddingBag):
        embedding = kind(8, 8, sparse=True)
        refused(training.RigL(0.5).apply, embedding, match="'weight' is of an embedding with sparse=True.*sparse=False")
    refused(training.RigL(0.5).apply, nn.Linear(8, 8).half(), match="'weight' is float16.*under autocast")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].forward = lambda x: x
    refused(training.Static(0.5, include="*.weight").apply, model, match="was replaced on the instance")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        training.SET(0.5).apply(nn.Linear(8, 8).half())


def test_gradients_that_float16_has_lost_are_told():
    """Whatever came before the optimizer: weights, a policy of FSDP, or DDP's compression. A mask without zeros has
    lost none."""
    model, dense = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = applied(training.RigL(0.5, include="weight", update=1), model)
    model.half()(torch.randn(4, 8).half()).sum().backward()
    with pytest.warns(UserWarning, match="'weight' first. have no gradient at any pruned place: float16 weights, FSDP"):
        optimizer.step()
    optimizer = applied(training.RigL(0.0, include="weight", update=1), dense)
    take_step(dense(torch.randn(4, 8)).sum(), optimizer)


def test_units_that_are_dead_have_lost_nothing():
    """All pruned places are theirs."""
    model = nn.Linear(4, 8)
    sparsity = training.RigL(0.5, include="weight", update=1, init_method=lambda weight, _: first_half(weight))
    optimizer = applied(sparsity, model)
    take_step(model(torch.randn(16, 4))[:, :4].sum(), optimizer)


def first_half(weight: Tensor) -> Tensor:
    return (torch.arange(weight.numel()) < weight.numel() // 2).view(weight.shape)


class Looking(training.DynamicSparsityAlgorithm):
    """Keeps the gradients that it gets, and the masks as they are."""

    needs_gradient = True

    def update_mask(self, p, mask, sparsity):
        self.gradient = p.grad
        return mask


def test_gradients_of_a_weight_that_two_modules_hold_are_whole():
    """Pruned places have those of the dense weight, as live ones do."""
    model = Shared()
    algorithm = Looking(0.5, include="*weight", update=1)
    optimizer, x = applied(algorithm, model), torch.randn(16, 8)
    assert len(algorithm.sparse_params) == 1
    weight = model.first.weight.detach().clone().requires_grad_()
    hidden = F.linear(x, weight, model.first.bias).relu()
    F.linear(hidden, weight, model.second.bias).square().sum().backward()
    take_step(model(x).square().sum(), optimizer)
    torch.testing.assert_close(algorithm.gradient, weight.grad)


def test_a_plan_works_on_meta_and_apply_does_not():
    model, sparsity = nn.Linear(8, 8, device="meta"), training.Static(0.5, include="weight")
    assert sparsity.plan(model).rows[0].zeros == 32
    refused(sparsity.apply, model, match="is on the meta device")


# warnings, reports, plans -------------------------------------------------------------------------------------------


def test_language_models_are_warned_of_counting_per_matrix():
    with pytest.warns(UserWarning, match=r"RigL without a scope counts per matrix.*scope='row'"):
        training.RigL(0.5, include="blocks", update=10).apply(tiny_llama())
    (note,) = training.SET(0.5, include="blocks").plan(tiny_llama()).notes
    assert "SET without a scope" in note
    assert "RigL" not in note
    vision = ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    assert not training.SET(0.5, include="blocks").plan(vision).notes
    for quiet in (training.RigL(0.5, include="blocks", scope="row"), training.Static(0.5, include="blocks")):
        assert not quiet.plan(tiny_llama()).notes


def test_save_load_verify_and_go_on(tmp_path):
    model = tiny_llama()
    options = {"include": "blocks", "scope": "row", "update": 2}
    optimizer = applied(training.SET(0.5, **options), model)
    for ids in token_batches(3):
        take_step(model(input_ids=ids, labels=ids).loss, optimizer)
    mts.save(model, tmp_path / "sparse")
    mts.verify(tmp_path / "sparse")
    again = mts.load(tmp_path / "sparse")
    assert mts.report(again).settings["training"]["step"] == 3
    masks = masks_of(again)
    more = training.SET(0.5, **options)
    more.apply(again)
    assert more.step == 3
    assert_same_masks(again, masks)
    other = training.SET(0.75, **options)
    other.apply(again)
    assert other.step == 0
    assert not any((mask & ~masks[name]).any() for name, mask in named_masks(again)), "old zeros stay"


def test_verify_looks_at_masks_of_biases_and_embeddings():
    model = training.Static(0.5, include=["linear.bias", "embed.weight", "linear.weight"]).apply(Zoo())
    names = {layer.name for layer in mts.verify(model).layers}
    assert names == {"linear", "linear.bias", "embed.weight", "head.weight"}
    model.embed.weight.data.fill_(1.0)
    refused(mts.verify, model, match=r"embed\.weight", error=mts.PatternError)
    plain = nn.Linear(8, 8)
    mts.set_mask(plain, "bias", torch.arange(8) < 4)
    mts.set_mask(plain, "weight", (torch.arange(8) % 2 == 0).expand(8, 8))
    patterns = {layer.name: layer.pattern for layer in mts.verify(plain, "50%").layers}
    assert patterns == {"weight": "50%", "bias": "its mask"}


@pytest.mark.parametrize(
    ("method", "share", "warns"), [("random", 0.7, True), ("topk", 0.7, False), ("random", 0.0, False)]
)
def test_a_random_mask_over_zeros_that_are_there_warns(method: str, share: float, warns: bool):
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].weight.data.view(-1)[: round(share * 256)] = 0
    algorithm = training.Static(0.7, include=["0.weight"], init_method=method)
    assert [("zeros are there already" in note) for note in algorithm.plan(model).notes] == [True] * warns
    with warnings.catch_warnings(action="ignore"):
        algorithm.apply(model)
    share = (model[0].weight == 0).double().mean() - (~model[0].weight_mask).double().mean()
    (entry,) = mts.report(model).layers
    assert entry.notes == [f"zeros beyond those of the mask when it was set: {share:.1%}"] * bool(share)
    assert bool(share) == warns


def test_flags_of_regular_expressions_count():
    plan = training.SET(0.5, include=[re.compile("LINEAR.w", re.IGNORECASE)]).plan(Zoo())
    assert [row.name for row in plan.rows] == ["linear.weight"]


def test_sparse_training_takes_no_copy():
    model = nn.Linear(8, 8, bias=False)
    sparsity = copy.deepcopy(training.SET(0.5, update=1))
    optimizer = applied(sparsity, model)
    with pytest.raises(TypeError, match="this SET has optimizers and cannot be copied"):
        copy.deepcopy((model, optimizer, sparsity))
