"""Allocation: numbers of zeros, and OWL against a slow oracle."""

import math
import random

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import modelopt_sparse as mts
from modelopt_sparse.calibration.run import calibrating
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import plan_for, resolve
from modelopt_sparse.solving.budget import allocate, owl_sparsities
from modelopt_sparse.solving.budget import allocated as allocated_data
from tests.helpers import assert_same_state, calibrated_run, state_of, tiny_llama, token_batches


def planned(model, method="wanda", **options):
    found, config = resolve(method, None, {"pattern": 0.6, "progress": False, **options})
    return plan_for(model, found, config), config


def allocated(model, method="wanda", **options):
    _, data = calibrated_run(model, method, **{"pattern": 0.6, "allocation": "owl", **options})
    with calibrating(model):
        return allocated_data(data).run.plan


def by_owl(model, batches, method="wanda", m=5.0, lambda_=0.08, **options):
    _, data = calibrated_run(model, method, **{"pattern": 0.6, "data_loader": batches, **options})
    with calibrating(model):
        return owl_sparsities(data, m, lambda_)


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
    found = allocate(plan, wanted, zeros(plan))

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
    found = allocate(plan, {"0.0": 0.41237, "0.1": 0.6}, zeros(plan))
    assert [item.pattern.sparsity * 1e4 % 1 for item in found.layers] == pytest.approx([0, 0], abs=1e-9)
    assert 0 <= zeros(found) - zeros(plan) < 6  # 60,000 * 0.0001
    assert found.layers[0].pattern.sparsity == pytest.approx(0.5 - (0.6 - 0.41237) * 62 / 122, abs=2e-4)


def test_only_the_differences_of_what_is_wanted_count():
    plan, _ = planned(tiny_llama())
    wanted = {item.name: 0.3 + 0.01 * i for i, item in enumerate(plan.layers)}
    higher = {name: value + 0.25 for name, value in wanted.items()}
    assert sparsities(allocate(plan, wanted, 9000)) == sparsities(allocate(plan, higher, 9000))


def test_more_wanted_is_more_given_and_less_for_the_others():
    plan, _ = planned(tiny_llama(), pattern=Unstructured(0.6, "matrix"))
    wanted = {item.name: 0.4 + 0.03 * i for i, item in enumerate(plan.layers)}
    first = sparsities(allocate(plan, wanted, zeros(plan)))
    assert list(first.values()) == sorted(first.values())
    name = plan.layers[3].name
    second = sparsities(allocate(plan, {**wanted, name: wanted[name] + 0.2}, zeros(plan)))
    assert second[name] > first[name] + 0.1
    assert all(second[other] < first[other] for other in first if other != name)


def test_what_does_not_fit_into_a_layer_goes_to_the_others():
    plan, _ = planned(tiny_llama(), pattern=Unstructured(0.9, "matrix"))
    first, second, *others = [item.name for item in plan.layers]
    found = allocate(plan, {first: 7.0, second: -7.0, **dict.fromkeys(others, 0.9)}, zeros(plan))
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
        allocate(plan, wanted, zeros(plan))
    plan, _ = planned(tiny_llama(), pattern=0.995)
    with pytest.raises(ValueError, match="no layer is pruned by more than 99%"):
        allocate(plan, sparsities(plan), zeros(plan))
    with pytest.raises(ValueError, match="unstructured"):
        planned(tiny_llama(), pattern="2:4", allocation="owl")
    model = tiny_llama()
    before = state_of(model)
    with pytest.raises(ValueError, match="allocation='owl' needs calibration data"):
        mts.sparsify(model, "magnitude", pattern="60%", allocation="owl")
    for gone in ("block", "search"):
        with pytest.raises(ValueError, match=f"allocation='{gone}' is no more: .*: give budget='50% zeros'"):
            planned(model, allocation=gone)
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
    found = by_owl(model, token_batches(), pattern=0.7, include=["*"], rules={"lm_head": {}}, m=3.0, lambda_=0.1)

    shares = {}
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
    low, high = min(shares.values()), max(shares.values())
    assert len(set(shares.values())) == 4
    density = {unit: (share - low) / (high - low) * 0.2 for unit, share in shares.items()}
    for item in plan.layers:
        assert found[item.name] == pytest.approx(0.7 - density[item.block or item.name], abs=1e-9)


def test_owl_of_blocks_without_a_difference_changes_nothing():
    found = by_owl(tiny_llama(num_hidden_layers=1), token_batches())
    assert set(found.values()) == {0.6}


def test_owl_keeps_what_rules_say_between_layers_of_a_block():
    found = by_owl(tiny_llama(), token_batches(), rules={"*down_proj": {"pattern": 0.3}})
    assert found["model.layers.0.mlp.up_proj"] != found["model.layers.1.mlp.up_proj"]
    for block in ("model.layers.0.", "model.layers.1."):
        assert found[f"{block}mlp.up_proj"] - found[f"{block}mlp.down_proj"] == pytest.approx(0.3)


def test_inputs_that_are_missing_or_not_finite_are_named():
    model = nn.Sequential(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    model.unused = nn.Linear(4, 4)
    model.forward = lambda x: model[0](x)
    data = [torch.randn(4, 20)]
    with pytest.raises(ValueError, match="saw no calibration data: unused"):
        allocated(model, "wanda", include=["*"], pattern=0.5, data_loader=data)
    with pytest.raises(ValueError, match=r"layer '0.0': its input holds NaN or inf"):
        allocated(model, "wanda", include=["0.*"], pattern=0.5, data_loader=[data[0] * math.inf])


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
def test_the_model_stays_what_it_was_to_the_bit(name):
    model, data = architectures()[name]
    before = state_of(model)
    found = allocated(model, data_loader=data)
    assert_same_state(model, before)
    assert_no_hooks(model)
    finest = min(item.size // item.shape[-1] for item in found.layers)
    assert 0 <= zeros(found) - zeros(planned(model)[0]) < finest


def test_a_generator_is_gone_over_once():
    first, second = tiny_llama(), tiny_llama()
    mts.sparsify(first, "wanda", pattern="60%", allocation="owl", data_loader=token_batches(4), progress=False)
    generator = (batch for batch in token_batches(4))
    mts.sparsify(second, "wanda", pattern="60%", allocation="owl", data_loader=generator, progress=False)
    assert_same_state(second, state_of(first))
