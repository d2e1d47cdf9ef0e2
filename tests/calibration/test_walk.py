"""The walk over the blocks: what is sparse when a layer is collected, what is shared, what is alive."""

import weakref

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.methods.scores import Wanda
from tests.calibration.collecting import LAYERS, STAGES, assert_same, collected, padded, steps_of
from tests.helpers import refused, tiny_llama, token_batches
from tests.oracles.brute_force import Recording, assert_stats, brute_force, matrices_of, stepwise

pytestmark = pytest.mark.core


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_what_is_sparse_when_a_layer_is_collected(sequential, side):
    """ "none": nothing; "block": the blocks before; "stage": the stages before it in its own block as well."""
    dense, model = tiny_llama(), tiny_llama()
    found = collected(model, data_loader=padded(side), sequential=sequential)
    steps, real = steps_of(sequential, LAYERS, STAGES), lambda batch, name: batch["attention_mask"].bool()
    assert_stats(found, stepwise(dense, model, padded(side), steps, real))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_float32_or_better(dtype):
    """Half-precision inputs are summed as they are, in float32; float64 ones stay what they are."""
    found = collected(tiny_llama().to(dtype), data_loader=token_batches(), sequential="none")
    assert_stats(found, brute_force(tiny_llama().to(dtype), token_batches(), LAYERS))
    assert {stats.gram.dtype for stats in found.values()} == {torch.promote_types(dtype, torch.float32)}


def test_a_users_own_autocast_is_refused():
    """It would round the solvers' products."""
    with torch.autocast("cpu", torch.bfloat16):
        refused(mts.sparsify, tiny_llama(), match="leave it, and give autocast=", data_loader=token_batches())


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_only_one_blocks_statistics_are_alive_at_a_time_and_only_one_layers_solution(sequential):
    """While a block, or with "stage" a stage, is collected, nothing is left of what was collected before it."""
    grams: list[weakref.ref] = []
    solutions: list[weakref.ref] = []

    def left(*_: object, of: list[weakref.ref] = grams) -> None:
        assert not any(reference() is not None for reference in of)

    class Watched(Wanda):
        name, needs = "watched", "gram"

        def prepare(self, stats, options):
            grams.append(weakref.ref(stats.gram))
            return super().prepare(stats, options)

        def solve(self, weight, state, pattern, options):
            left(of=solutions)
            solution = super().solve(weight, state, pattern, options)
            solutions.extend([weakref.ref(solution.weight), weakref.ref(solution.mask)])
            return solution

    model = tiny_llama(num_hidden_layers=3)
    for block in model.model.layers:
        block.mlp.down_proj.register_forward_pre_hook(left)
    mts.sparsify(model, Watched(), data_loader=token_batches(), sequential=sequential, progress=False)
    assert (len(grams), len(solutions)) == (3 * 4, 3 * 7 * 2)


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_only_one_blocks_inputs_are_alive_in_the_dense_run(sequential):
    """The first batch goes through the whole model, however deep it is; each block's inputs go with it. The layers see
    what they share all the same."""
    inputs: list[list[weakref.ref]] = []
    leftover: list[int] = []

    def begin(*_) -> None:
        leftover.append(sum(reference() is not None for block in inputs for reference in block))
        inputs.append([])

    model = tiny_llama(num_hidden_layers=4)
    for block in model.model.layers:
        block.mlp.gate_proj.register_forward_pre_hook(begin)
        for layer in (block.mlp.gate_proj, block.mlp.down_proj):
            layer.register_forward_pre_hook(lambda _, args: inputs[-1].append(weakref.ref(args[0])))
    mts.sparsify(model, data_loader=token_batches(1), sequential=sequential, progress=False)
    assert len(leftover) >= 4
    assert max(leftover) == 0


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_methods_may_be_mixed_within_a_block(sequential):
    """A magnitude rule takes its layer out of the statistics' hands, and leaves those of the others alone."""
    dense, model, method = tiny_llama(), tiny_llama(), Recording()
    rules = {"*.v_proj": {"method": "magnitude"}, "model.layers.1.mlp.*": None}
    mts.sparsify(model, method, rules=rules, data_loader=token_batches(), sequential=sequential, progress=False)
    found = method.by_layer(matrices_of(dense, LAYERS))
    recipes = {layer.name: layer.recipe for layer in mts.report(model).layers}
    by_magnitude = [name for name, recipe in recipes.items() if recipe == "magnitude"]
    assert by_magnitude == [f"{block}.self_attn.v_proj" for block in LAYERS]
    assert found.keys() == {name for name, recipe in recipes.items() if recipe == "recording"}
    assert len(recipes) == 14 - 3
    alone = mts.sparsify(tiny_llama(), "magnitude")
    for name in by_magnitude:
        assert torch.equal(model.get_submodule(name).weight, alone.get_submodule(name).weight)
    # Recording prunes by magnitude too: the statistics are those of a run in which all layers record
    everywhere = collected(tiny_llama(), data_loader=token_batches(), sequential=sequential, exclude="*.1.mlp.*")
    assert_same(found, {name: everywhere[name] for name in found})


def test_a_method_that_needs_square_sums_gets_no_gram_matrix():
    class Sums(Recording):
        needs = "square_sums"

        def by_layer(self, dense):
            return {name: stats for name, stats in super().by_layer(dense).items() if stats.gram is None}

    method = Sums()
    mts.sparsify(tiny_llama(), method, data_loader=padded(), sequential="none", progress=False)
    found = method.by_layer(matrices_of(tiny_llama(), LAYERS))
    expected = brute_force(tiny_llama(), padded(), LAYERS, lambda batch, name: batch["attention_mask"].bool())
    assert found.keys() == expected.grams.keys()
    for name, stats in found.items():
        torch.testing.assert_close(stats.square_sums, expected.grams[name].diagonal().float(), rtol=1e-5, atol=1e-5)
