"""Allocation: budgets, OWL and the even split against slow oracles, the search against models really pruned."""

import math
import random
import weakref
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import SequenceClassifierOutput

import modelopt_sparse as mts
from modelopt_sparse.accuracy import allocate as allocation
from modelopt_sparse.accuracy import allocate as divergence
from modelopt_sparse.accuracy.allocate import (
    allocate,
    allocation_for,
    block_sparsities,
    masked,
    owl_sparsities,
    search_plan,
)
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import Unstructured, count_zeros
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import plan_for, resolve
from tests.helpers import assert_same_state, calibrated_run, state_of, tiny_llama, token_batches


def planned(model, method="wanda", **options):
    found, config = resolve(method, None, {"pattern": 0.6, "progress": False, **options})
    return plan_for(model, found, config), config


def allocated(model, method="wanda", **options):
    _, data = calibrated_run(model.eval(), method, **{"pattern": 0.6, **options})
    with torch.no_grad():
        return allocation_for(data)


def zeros_of(item) -> int:
    """The zeros of a mask that the layer's pattern really makes."""
    return int((~item.pattern.mask(torch.randn(item.shape))).sum())


def zeros(plan: Plan) -> int:
    return sum(zeros_of(item) for item in plan.layers if isinstance(item.pattern, Unstructured))


def sparsities(plan: Plan) -> dict[str, float]:
    return {item.name: item.pattern.sparsity for item in plan.layers}


def dense_stats(model, plan, batches) -> dict[str, Stats]:
    """Square sums of every layer's inputs, by a plain hook on each."""
    sums: dict[str, torch.Tensor] = {}

    def hook(name):
        def add(_, args):
            sums[name] = sums.get(name, 0) + args[0].flatten(0, -2).square().sum(0)

        return add

    hooks = [item.layer.owner.register_forward_pre_hook(hook(item.name)) for item in plan.layers]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in hooks:
        handle.remove()
    return {name: Stats(1, total) for name, total in sums.items()}


def assert_no_hooks(model) -> None:
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


# budgets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["row", "matrix"])
@pytest.mark.parametrize("seed", range(4))
def test_allocate_meets_the_zeros_of_the_plan(scope, seed):
    rules = {"*down_proj": {"pattern": Unstructured(0.35, scope)}, "*0.self_attn.k_proj": {"pattern": "2:4"}}
    plan, _ = planned(tiny_llama(intermediate_size=60), pattern=Unstructured(0.613, scope), rules=rules)
    shared = [item for item in plan.layers if isinstance(item.pattern, Unstructured)]
    pick = random.Random(seed)
    wanted = {item.name: pick.uniform(-0.2, 1.3) for item in shared}
    found = allocate(plan, wanted)

    finest = min(item.shape[0] if scope == "row" else 1 for item in shared)
    assert 0 <= zeros(found) - zeros(plan) < finest
    for item, before in zip(found.layers, plan.layers, strict=True):
        assert item.layer is before.layer
        assert type(item.pattern) is type(before.pattern)
        if before.name not in wanted:
            assert item.pattern == before.pattern
            continue
        assert item.pattern.scope == scope
        assert item.pattern.sparsity == round(item.pattern.sparsity, 4)
        assert 0 <= item.pattern.sparsity <= 0.99


def test_allocate_of_a_matrix_of_many_weights_steps_by_a_ten_thousandth():
    model = nn.Sequential(nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 310)))
    plan, _ = planned(model, "magnitude", pattern=0.5)
    found = allocate(plan, {"0.0": 0.41237, "0.1": 0.6})
    assert [item.pattern.sparsity * 1e4 % 1 for item in found.layers] == pytest.approx([0, 0], abs=1e-9)
    assert 0 <= zeros(found) - zeros(plan) < 6  # 60,000 * 0.0001
    assert found.layers[0].pattern.sparsity == pytest.approx(0.5 - (0.6 - 0.41237) * 62 / 122, abs=2e-4)


def test_only_the_differences_of_what_is_wanted_count():
    plan, _ = planned(tiny_llama())
    wanted = {item.name: 0.3 + 0.01 * i for i, item in enumerate(plan.layers)}
    higher = {name: value + 0.25 for name, value in wanted.items()}
    assert sparsities(allocate(plan, wanted)) == sparsities(allocate(plan, higher))


def test_more_wanted_is_more_given_and_less_for_the_others():
    plan, _ = planned(tiny_llama(), pattern=Unstructured(0.6, "matrix"))
    wanted = {item.name: 0.4 + 0.03 * i for i, item in enumerate(plan.layers)}
    first = sparsities(allocate(plan, wanted))
    assert list(first.values()) == sorted(first.values())
    name = plan.layers[3].name
    second = sparsities(allocate(plan, {**wanted, name: wanted[name] + 0.2}))
    assert second[name] > first[name] + 0.1
    assert all(second[other] < first[other] for other in first if other != name)


def test_what_does_not_fit_into_a_layer_goes_to_the_others():
    plan, _ = planned(tiny_llama(), pattern=Unstructured(0.9, "matrix"))
    first, second, *others = [item.name for item in plan.layers]
    found = allocate(plan, {first: 7.0, second: -7.0, **dict.fromkeys(others, 0.9)})
    given = sparsities(found)
    assert given[first] == pytest.approx(0.99, abs=1e-3)
    assert given[second] == 0
    assert len({round(given[name], 2) for name in others}) == 1
    assert zeros(found) == zeros(plan)


def test_allocate_says_what_is_wrong():
    plan, _ = planned(tiny_llama())
    wanted = sparsities(plan)
    missing = wanted.popitem()[0]
    with pytest.raises(KeyError, match=missing):
        allocate(plan, wanted)
    plan, _ = planned(tiny_llama(), pattern=0.995)
    with pytest.raises(ValueError, match="prunes no layer by more than 99%"):
        allocate(plan, sparsities(plan))
    with pytest.raises(ValueError, match="unstructured"):
        planned(tiny_llama(), pattern="2:4", allocation="owl")
    model = tiny_llama()
    before = state_of(model)
    with pytest.raises(ValueError, match="allocation='search' needs calibration data"):
        mts.sparsify(model, "magnitude", pattern="60%", allocation="search")
    assert_same_state(model, before)


# OWL ----------------------------------------------------------------------------------------------------------------


def test_owl_against_a_loop():
    """The formula of the authors' code, one score at a time; the output head is outside of the blocks."""
    model = tiny_llama(num_hidden_layers=3, hidden_size=16, intermediate_size=24, tie_word_embeddings=False).double()
    with torch.no_grad():
        for i, block in enumerate(model.model.layers):  # outliers, more of them in later blocks
            block.mlp.up_proj.weight[: i + 1] *= 40
    plan, _ = planned(model, pattern=0.7, include=["*"], rules={"lm_head": {}})
    assert plan.layers[-1].name == "lm_head"
    stats = dense_stats(model, plan, token_batches())
    found = owl_sparsities(plan, stats, m=3.0, lambda_=0.1)

    shares, sizes = {}, {}
    for unit in [*(f"model.layers.{i}" for i in range(3)), "lm_head"]:
        scores = [
            abs(w) * math.sqrt(total)
            for item in plan.layers
            if item.name.startswith(unit)
            for row in item.layer.owner.weight.tolist()
            for w, total in zip(row, stats[item.name].square_sums.tolist())
        ]
        mean = sum(scores) / len(scores)
        shares[unit] = sum(score > 3 * mean for score in scores) / len(scores)
        sizes[unit] = len(scores)
    low, high = min(shares.values()), max(shares.values())
    assert len(set(shares.values())) == 4
    density = {unit: (share - low) / (high - low) * 0.2 for unit, share in shares.items()}
    mean = sum(density[unit] * sizes[unit] for unit in density) / sum(sizes.values())
    budget = zeros(plan) / sum(sizes.values())
    for item in plan.layers:
        unit = item.block or item.name
        assert found[item.name] == pytest.approx(budget - (density[unit] - mean), abs=1e-9)


def test_owl_of_blocks_without_a_difference_changes_nothing():
    plan, _ = planned(tiny_llama(num_hidden_layers=1))
    stats = {item.name: Stats(1, torch.ones(item.shape[-1])) for item in plan.layers}
    assert len(set(owl_sparsities(plan, stats).values())) == 1


def test_owl_keeps_what_rules_say_between_layers_of_a_block():
    model = tiny_llama()
    plan, _ = planned(model, rules={"*down_proj": {"pattern": 0.3}})
    found = owl_sparsities(plan, dense_stats(model, plan, token_batches()))
    assert found["model.layers.0.mlp.up_proj"] != found["model.layers.1.mlp.up_proj"]
    for block in ("model.layers.0.", "model.layers.1."):
        assert found[f"{block}mlp.up_proj"] - found[f"{block}mlp.down_proj"] == pytest.approx(0.3)


# the search -----------------------------------------------------------------------------------------------------------


def test_the_even_split_prunes_the_smallest_relative_errors_of_a_block():
    model = tiny_llama().double()
    plan, _ = planned(model, pattern=0.5)
    stats = dense_stats(model, plan, token_batches())
    found = allocation._even_sparsities(plan, stats)
    for block in ("model.layers.0", "model.layers.1"):
        items = [item for item in plan.layers if item.block == block]
        errors = []
        for item in items:
            energy = (item.layer.owner.weight.abs() * stats[item.name].square_sums.sqrt()) ** 2
            errors += [(value, item.name) for value in (energy / energy.sum()).flatten().tolist()]
        errors.sort()
        pruned = [name for _, name in errors[: len(errors) // 2]]
        for item in items:
            assert found[item.name] == pruned.count(item.name) / item.size


@pytest.mark.parametrize("early", [True, False])
def test_the_search_leaves_what_matters_denser(early):
    """Blocks whose output is scaled down hardly matter, so that the others should keep more."""
    model = tiny_llama(num_hidden_layers=4)
    with torch.no_grad():
        for i, block in enumerate(model.model.layers):
            scale = 0.2 ** (i if early else 3 - i)
            block.self_attn.o_proj.weight *= scale
            block.mlp.down_proj.weight *= scale
    found = allocated(model, allocation="search", data_loader=token_batches())
    tried = dict(found.tried)
    slope = float(found.description.split()[1].rstrip(","))
    assert slope > 0 if early else slope < 0
    assert tried[found.description] == min(tried.values()) < 0.8 * tried["slope 0, balance 0"]
    of_block = [[s for name, s in sparsities(found.plan).items() if f"layers.{i}." in name] for i in range(4)]
    means = [sum(values) / 7 for values in of_block]
    assert (means[0] < means[3]) == early


def test_the_search_is_never_worse_than_the_plan_as_it_came():
    """A measure that likes nothing else: the plan itself comes back."""
    plan, _ = planned(tiny_llama())
    stats = {item.name: Stats(1, torch.ones(item.shape[-1])) for item in plan.layers}
    found = search_plan(plan, stats, lambda plans: [float(other is not plan) for other in plans])
    assert found.plan is plan
    found = search_plan(plan, stats, lambda plans: [math.inf for _ in plans])
    assert found.plan is plan


def test_the_search_walks_down_both_coordinates():
    plan, _ = planned(tiny_llama(num_hidden_layers=3), pattern=Unstructured(0.5, "matrix"))
    torch.manual_seed(0)
    stats = {item.name: Stats(1, torch.rand(item.shape[-1]) ** 4) for item in plan.layers}
    seen = []

    def distance(plans):
        seen.extend(plans)
        return [sum((sparsities(other)[name] - goal[name]) ** 2 for name in goal) for other in plans]

    even = allocation._even_sparsities(plan, stats)
    tilt = {"model.layers.0": -1, "model.layers.1": 0, "model.layers.2": 1}
    goal = {item.name: 0.5 + 0.125 * tilt[item.block] + 0.75 * (even[item.name] - 0.5) for item in plan.layers}
    found = search_plan(plan, stats, distance)
    assert found.description == "slope 0.125, balance 0.75"
    assert found.plan is seen[list(dict(found.tried)).index(found.description)]
    assert len(found.tried) == len(set(found.tried)) == len(seen)
    for name, value in sparsities(found.plan).items():
        assert value == pytest.approx(goal[name], abs=2e-3)
    assert all(zeros(other) - zeros(plan) in (0, 1) for other in seen)


def padded(batches):
    """Batches with padding on the right, and on the left."""
    calls = []
    for i, batch in enumerate(batches):
        mask = torch.ones_like(batch)
        mask[0, -5:] = 0
        mask[1, : i + 1] = 0
        calls.append({"input_ids": batch, "attention_mask": mask})
    return calls


@pytest.mark.parametrize("scope", ["row", "matrix"])
def test_what_is_measured_is_the_divergence_of_the_pruned_model(scope):
    """Against models that were really pruned by Wanda, on dense inputs; padding left out; one layer N:M."""
    dense = tiny_llama()
    calls = padded(token_batches())
    rules = {"*0.mlp.up_proj": {"pattern": "2:4"}}
    options = {"pattern": Unstructured(0.6, scope), "rules": rules, "data_loader": calls}
    found = allocated(dense, allocation="search", **options)
    assert found.measure == "mean KL from the dense model, in nats"
    for plan, described in ((planned(dense, **options)[0], "slope 0, balance 0"), (found.plan, found.description)):
        model = deepcopy(dense)
        given = {item.name: {"pattern": item.pattern} for item in plan.layers}
        mts.sparsify(model, "wanda", rules=given, data_loader=calls, sequential="none", progress=False)
        total, count = 0.0, 0
        with torch.no_grad():
            for call in calls:
                p, q = (m(**call).logits.double().softmax(-1) for m in (dense, model))
                kl = (p * (p / q).log()).sum(-1)[call["attention_mask"] == 1]
                total, count = total + kl.sum().item(), count + len(kl)
        assert dict(found.tried)[described] == pytest.approx(total / count, rel=1e-4)


class Tied(nn.Module):
    """Two blocks that share a weight, and no logits."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)))
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        x = self.blocks(x)
        return {"loss": x.mean(), "hidden": x}


def test_a_model_without_logits_is_measured_by_the_squared_error_of_its_output():
    """And a weight that two blocks hold is pruned in both."""
    dense = Tied()
    data = [torch.randn(4, 8) for _ in range(3)]
    found = allocated(dense, allocation="search", pattern=0.5, data_loader=data)
    assert found.measure == "relative squared error of the output"
    model = deepcopy(dense)
    mts.sparsify(model, "wanda", pattern=0.5, data_loader=data, sequential="none", progress=False)
    assert model.blocks[0][0].weight is model.blocks[1][0].weight
    with torch.no_grad():
        pairs = [(dense(x)["hidden"], model(x)["hidden"]) for x in data]
    error = sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs)
    assert dict(found.tried)["slope 0, balance 0"] == pytest.approx(error.item(), rel=1e-5)


def test_logits_of_minus_infinity_are_measured():
    """As models give for a padded vocabulary; they were refused."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return SequenceClassifierOutput(logits=x.masked_fill(torch.arange(16) > 12, -math.inf))

    found = allocated(Padded(), allocation="search", pattern=0.5, data_loader=[torch.randn(32, 16)])
    assert all(0 < value < math.inf for value in dict(found.tried).values())


def test_a_forward_loop_is_measured_like_the_same_batches():
    batches = token_batches(count=3)

    def loop(model):
        with torch.inference_mode():
            for batch in batches:
                model(batch)

    model = tiny_llama()
    before = state_of(model)
    by_loop = allocated(model, allocation="search", forward_loop=loop)
    by_batches = allocated(model, allocation="search", data_loader=batches)
    assert by_loop.tried == by_batches.tried
    assert sparsities(by_loop.plan) == sparsities(by_batches.plan)
    assert_same_state(model, before)
    assert_no_hooks(model)


def test_a_loop_that_generates_is_refused():
    def loop(model):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, use_cache=True)

    with pytest.raises(ValueError, match="call with a cache"):
        allocated(tiny_llama(), allocation="search", forward_loop=loop)


def test_the_search_measures_on_samples_from_all_over_the_data(monkeypatch):
    monkeypatch.setattr(divergence, "SAMPLES", 6)
    model = tiny_llama()
    batches = token_batches(count=9)
    seen = []
    with model.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        allocated(model, allocation="search", data_loader=batches)
    positions = [next(i for i, batch in enumerate(batches) if torch.equal(batch, x)) for x in seen]
    assert positions[:9] == list(range(9))  # the statistics take all of it
    assert set(positions[9:]) == {0, 3, 6}


def test_a_forward_loop_is_measured_on_its_first_samples(monkeypatch):
    monkeypatch.setattr(divergence, "SAMPLES", 6)
    model = tiny_llama()
    batches = token_batches(count=9)

    def loop(model):
        for batch in batches:
            model(batch)

    found = allocated(model, allocation="search", forward_loop=loop)
    first = allocated(model, allocation="search", forward_loop=loop, pattern=0.6)
    assert found.tried == first.tried
    batches[3:] = token_batches(count=6, seed=5)  # other statistics, but the same calls are repeated
    seen = []
    with model.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        allocated(model, allocation="search", forward_loop=loop)
    repeated = [x for before, x in pairwise(seen) if before is x]
    assert {next(i for i, batch in enumerate(batches) if batch is x) for x in repeated} == {0, 1, 2}


def test_what_hooks_of_the_user_do_to_the_arguments_is_done_once():
    """The repeated calls get what the model was called with."""
    batches = token_batches()
    expected = allocated(tiny_llama(), allocation="search", data_loader=[batch + 1 for batch in batches])
    model = tiny_llama()
    with model.register_forward_pre_hook(lambda _, args: (args[0] + 1,)):
        assert allocated(model, allocation="search", data_loader=batches).tried == expected.tried


def test_weights_that_accelerate_keeps_elsewhere_are_pruned_there():
    expected = allocated(tiny_llama(), allocation="search", data_loader=token_batches())
    model = cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    assert allocated(model, allocation="search", data_loader=token_batches()).tried == expected.tried


class Fragile(nn.Module):
    """NaN if its first block has lost too much."""

    def __init__(self, nan_from: float):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)) for _ in range(3)))
        self.nan_from = nan_from

    def forward(self, x):
        lost = 0.0

        def count(layer, *_):
            nonlocal lost
            lost = max(lost, (layer.weight == 0).float().mean().item())

        with self.blocks[0][0].register_forward_pre_hook(count):
            x = self.blocks(x)
        return x * (math.nan if lost > self.nan_from else 1)


def test_a_plan_whose_model_gives_nan_is_never_chosen():
    data = [torch.randn(4, 20)]
    found = allocated(Fragile(0.59), allocation="search", pattern=0.6, data_loader=data)
    tried = dict(found.tried)
    assert tried["slope 0, balance 0"] == math.inf
    assert math.isfinite(tried[found.description])


def test_a_model_without_blocks_is_one_block():
    model = nn.Module()
    model.first, model.second = nn.Linear(8, 16), nn.Linear(16, 8)
    model.forward = lambda x: model.second(model.first(x))
    plan, _ = planned(model)
    assert {item.block for item in plan.layers} == {""}
    stats = {"first": Stats(1, torch.ones(8)), "second": Stats(1, torch.arange(16.0) ** 16)}  # outliers
    assert len(set(owl_sparsities(plan, stats).values())) == 1


def test_logits_of_one_value_are_no_predictions():
    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))

        def forward(self, x):
            return SequenceClassifierOutput(logits=self.blocks(x))

    found = allocated(Regression(), allocation="search", pattern=0.5, data_loader=[torch.randn(4, 8)])
    assert found.measure == "relative squared error of the output"


@pytest.mark.parametrize("kind", ["owl", "search"])
def test_inputs_that_are_missing_or_not_finite_are_named(kind):
    model = Fragile(1.0)
    model.unused = nn.Linear(4, 4)
    data = [torch.randn(4, 20)]
    with pytest.raises(ValueError, match="layer 'unused' saw no calibration data"):
        allocated(model, "magnitude", allocation=kind, include=["*"], pattern=0.5, data_loader=data)
    with pytest.raises(ValueError, match=r"layer 'blocks.0.0': its input holds NaN or inf"):
        allocated(model, "magnitude", allocation=kind, pattern=0.5, data_loader=[data[0] * math.inf])


def test_an_output_that_cannot_be_compared_is_an_error():
    data = [torch.randn(4, 20)]
    with pytest.raises(ValueError, match="the dense model's output holds NaN or inf"):
        allocated(Fragile(-1.0), allocation="search", pattern=0.5, data_loader=data)
    model = Fragile(1.0)
    model.register_forward_hook(lambda *_: {"tokens": torch.tensor([1])})
    with pytest.raises(ValueError, match="gives no number but zero"):
        allocated(model, allocation="search", pattern=0.5, data_loader=data)


def test_statistics_hold_no_inputs():
    model = tiny_llama()
    early: list[weakref.ref] = []
    alive: list[bool] = []
    first, last = (model.model.layers[i].mlp.down_proj for i in (0, 1))
    with (
        first.register_forward_pre_hook(lambda _, args: early.append(weakref.ref(args[0]))),
        last.register_forward_pre_hook(lambda *_: alive.append(early[-1]() is not None)),
    ):
        allocated(model, allocation="owl", data_loader=token_batches())
    assert alive == [False] * 3


def architectures():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    t5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    convolutions = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2)) for _ in range(2)))
    tokens = token_batches()
    return {
        "gpt2": (gpt2, tokens),
        "t5": (T5ForConditionalGeneration(t5), [{"input_ids": x, "labels": x} for x in tokens]),
        "attention": (encoder, [torch.randn(2, 5, 16)]),
        "convolutions": (convolutions, [torch.randn(2, 4, 12, 12)]),
    }


@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("kind", ["owl", "search"])
def test_the_model_stays_what_it_was_to_the_bit(name, kind):
    model, data = architectures()[name]
    before = state_of(model)
    found = allocated(model, allocation=kind, data_loader=data)
    assert_same_state(model, before)
    assert_no_hooks(model)
    finest = min(item.size // item.shape[-1] for item in found.plan.layers)
    assert 0 <= zeros(found.plan) - zeros(planned(model)[0]) < finest


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", [nn.Module, cpu_offload])
def test_the_model_stays_what_it_was_when_the_search_is_stopped(error, kind, monkeypatch):
    """Stopped inside of a layer, while it is pruned."""
    model = tiny_llama()
    layer = model.model.layers[1].mlp.down_proj
    before = state_of(model)
    forward = layer.forward
    pruned = 0

    def stop(x):
        nonlocal pruned
        pruned += int((layer.weight == 0).sum() > layer.weight.numel() / 2)
        if pruned == 4:
            raise error
        return forward(x)

    monkeypatch.setattr(layer, "forward", stop)
    if kind is cpu_offload:
        cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(error if error is KeyboardInterrupt else ValueError):
        allocated(model, allocation="search", data_loader=token_batches(count=2))
    assert_no_hooks(model)
    if kind is cpu_offload:
        assert all(p.is_meta for p in model.parameters())
        remove_hook_from_submodules(model)
    assert_same_state(model, before)


class Forgiving(nn.Module):
    """Calls its layer again if that fails."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.fails = True

    def forward(self, x):
        try:
            return self.layer(x)
        except RuntimeError:
            return self.layer(x)


def test_a_call_that_failed_inside_of_the_model_loses_no_weight():
    model = Forgiving()
    plan, _ = planned(model, include=["layer"])
    stats = {"layer": Stats(1, torch.ones(8))}
    before = state_of(model)
    failures = [True]

    def fail(module, args):
        if failures and (module.weight == 0).any():
            failures.pop()
            raise RuntimeError

    with masked(plan, stats):
        with model.layer.register_forward_pre_hook(fail):
            model(torch.randn(2, 8))
        assert not failures
        assert_same_state(model, before)
    assert_same_state(model, before)


def test_one_layer_at_a_time_is_pruned_by_its_pattern():
    model = tiny_llama()
    plan, _ = planned(model)
    stats = dense_stats(model, plan, token_batches())
    before = state_of(model)
    seen = {}

    def watch(name):
        def hook(*_):
            seen[name] = [item.name for item in plan.layers if (item.layer.owner.weight == 0).any()]
            zero = (dict(model.named_modules())[name].weight == 0).sum(-1)
            assert (zero == count_zeros(0.6, dict(model.named_modules())[name].in_features)).all()

        return hook

    with masked(plan, stats), torch.no_grad():
        handles = [item.layer.owner.register_forward_pre_hook(watch(item.name)) for item in plan.layers]
        model(token_batches()[0])
    for handle in handles:
        handle.remove()
    assert seen == {item.name: [item.name] for item in plan.layers}
    assert_same_state(model, before)


def test_block_shares_out_each_blocks_zeros_and_loses_less():
    """Each block keeps its zeros; the sum of its relative errors, by sorting, falls; it goes half of the way."""
    model = tiny_llama(num_hidden_layers=3)
    plan = mts.make_plan(model, "wanda", pattern="60%")
    stats = {item.name: Stats(1, torch.ones(item.shape[-1])) for item in plan.layers}
    found = block_sparsities(plan, stats)
    whole = block_sparsities(plan, stats, share=1.0)
    for block in {item.block for item in plan.layers}:
        items = [item for item in plan.layers if item.block == block]
        size = sum(item.size for item in items)
        assert sum(item.size * found[item.name] for item in items) == pytest.approx(0.6 * size, rel=1e-3)

        def lost(sparsities, items=items) -> float:
            total = 0.0
            for item in items:
                energy = item.layer.parameter.detach().double().square().flatten().sort().values
                total += float(energy[: round(sparsities[item.name] * item.size)].sum() / energy.sum())
            return total

        uniform = {item.name: 0.6 for item in items}
        assert lost(whole) < lost(found) < lost(uniform)
        for item in items:
            assert found[item.name] == pytest.approx((whole[item.name] + 0.6) / 2)


@pytest.mark.parametrize("kind", ["block", "owl", "search"])
def test_a_generator_is_gone_over_once(kind):
    first, second = tiny_llama(), tiny_llama()
    mts.sparsify(first, "wanda", pattern="60%", allocation=kind, data_loader=token_batches(4), progress=False)
    generator = (batch for batch in token_batches(4))
    mts.sparsify(second, "wanda", pattern="60%", allocation=kind, data_loader=generator, progress=False)
    assert_same_state(second, state_of(first))
