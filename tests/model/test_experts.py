"""Mixtures of experts: every expert's matrix is a layer with statistics from the tokens that are routed to it."""

import copy
import weakref
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import modelopt_sparse as mts
from modelopt_sparse.accuracy.tuning import learning_rates
from tests.helpers import assert_same_state, plain_from_pretrained, refused, state_of
from tests.model.sparse_modules import lost_zeros, written_on_purpose
from tests.models.architectures import texts
from tests.models.expert_models import CHOSEN, EXPERTS, INKLING, MODELS, STEP3P7, VOCAB
from tests.oracles.brute_experts import brute_experts, stored_as_matrices
from tests.oracles.brute_force import Recording, Seen, make_sparse

every_model = pytest.mark.parametrize("name", MODELS)
OPTIONS: dict[str, Any] = {"min_tokens": 1, "progress": False}


def fused(model: nn.Module) -> list[str]:
    """The parameters that hold experts' matrices."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


def two_of_four(matrix: Tensor) -> bool:
    return bool(((matrix != 0).unflatten(-1, (-1, 4)).sum(-1) == 2).all())


def blocks_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__.endswith("DecoderLayer")]


def recorded(dense: nn.Module, side: str = "left", **options: Any) -> tuple[nn.Module, dict[str, mts.Stats]]:
    """The model made sparse, and the statistics that each fused parameter was solved with, in one piece."""
    method = Recording()
    sparse = mts.sparsify(copy.deepcopy(dense), method, data_loader=texts(side), **OPTIONS, **options)
    return sparse, {name: stats for name, ((_, stats),) in in_parts(method, dense).items()}


def assert_experts(found: dict[str, mts.Stats], expected: Seen, counts: dict[str, list[int]]) -> None:
    """``found`` with min_tokens=1: an expert that got no token has the average of all tokens."""
    assert found.keys() == expected.grams.keys()
    for name, own in expected.grams.items():
        none = torch.tensor(counts[name]) == 0
        gram = torch.where(none[:, None, None], own.sum(0) / sum(counts[name]), own)
        stats = found[name]
        assert stats.counts.tolist() == counts[name], name
        assert stats.tokens == sum(counts[name]), name
        error = (stats.gram - gram).abs().amax((-2, -1)) / gram.abs().amax((-2, -1))
        assert float(error.max()) <= 1e-5, (name, error)
        assert torch.equal(stats.square_sums, stats.gram.diagonal(dim1=-2, dim2=-1))


@every_model
def test_grams_of_the_half_sparse_model(name):
    """Those of plain loops over tokens, where the blocks before are sparse; padding does not count."""
    dense = MODELS[name]()
    sparse, found = recorded(dense)
    half_sparse, expected, counts = copy.deepcopy(dense), Seen(), {}
    for block in blocks_of(dense):
        seen, counted = brute_experts(half_sparse, texts("left"), [block])
        expected.grams.update(seen.grams)
        counts.update(counted)
        make_sparse(half_sparse, sparse, [block])
    assert_experts(found, expected, counts)


DENSE = {name: MODELS[name] for name in ("mixtral", "gpt_oss", "llama4", "jetmoe")} | {"step3p7": STEP3P7}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DENSE)
def test_grams_of_the_dense_model(name, side):
    """Experts of Step 3 bound what the gate lets through, and their class is called like the interface."""
    dense = DENSE[name]()
    sparse, found = recorded(dense, side, sequential="none")
    assert_experts(found, *brute_experts(dense, texts(side), blocks_of(dense)))
    assert {name for name, _ in mts.named_masks(sparse)} > set(fused(dense))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "jetmoe"])
def test_grams_of_stages(name):
    """With what comes before in the block sparse: down_proj sees a sparse gate_up_proj."""
    dense = MODELS[name]()
    sparse, found = recorded(dense, sequential="stage")
    (first, second), final = blocks_of(dense), sparse.state_dict()
    half_sparse = copy.deepcopy(dense)
    make_sparse(half_sparse, sparse, [first])
    for name in [name for name in fused(dense) if name.startswith(second)]:
        before = copy.deepcopy(half_sparse)
        for other, parameter in before.named_parameters():  # by hand: what a block calls before this parameter
            if other.startswith(f"{second}.") and order(other) < order(name):
                parameter.data.copy_(final[other])
        seen, counts = brute_experts(before, texts("left"), [second])
        own = Seen({name: seen.grams[name]}, {name: seen.tokens[name]})
        assert_experts({name: found[name]}, own, {name: counts[name]})


def order(name: str) -> int:
    """How late a matrix of a decoder layer is called."""
    attention = ["self_attention.experts.input_linear", "kv_proj", "q_proj", "k_proj", "v_proj"]
    attention += ["self_attention.experts.output_linear", "o_proj", "gate_up_proj", "mlp.input_linear", "down_proj"]
    return next((i for i, part in enumerate([*attention, "mlp.output_linear"]) if part in name), -1)


# experts outside of transformers' experts interface -----------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_grams_of_inkling_s_shared_experts(side):
    dense = INKLING()
    sparse, found = recorded(dense, side, sequential="none")
    seen, _ = brute_experts(dense, texts(side), blocks_of(dense))
    expected = {name: gram for name, gram in seen.grams.items() if ".shared_experts." in name}
    assert len(expected) == 6
    tokens = sum(int(batch["attention_mask"].sum()) for batch in texts(side))
    for name, gram in expected.items():
        assert found[name].tokens == tokens
        shared = found[name].gram
        torch.testing.assert_close(shared.expand(gram.shape).double(), gram, rtol=1e-5, atol=1e-5 * float(gram.max()))
        assert two_of_four(sparse.get_parameter(name)), name


def test_inkling_is_saved_and_reconstructed(tmp_path):
    sparse = mts.sparsify(INKLING(), "sparsegpt", reconstruct={"epochs": 1}, data_loader=plenty(), **OPTIONS)
    mts.save(sparse, tmp_path / "sparse")
    plain: Any = copy.deepcopy(plain_from_pretrained(tmp_path / "sparse", type(INKLING()))).eval()
    for batch in texts("right"):
        assert torch.equal(plain(**batch).logits, sparse(**batch).logits)
    assert_same_state(mts.load(tmp_path / "sparse"), state_of(sparse))


# what is pruned, and what stays -------------------------------------------------------------------------------------


def plenty() -> list[dict[str, Tensor]]:
    """Batches without padding, with more tokens than a matrix has columns for every expert."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, VOCAB, (6, 24), generator=generator)} for _ in range(3)]


@every_model
def test_every_expert_is_2_4_and_the_folder_loads_in_plain_transformers_with_equal_logits(name, tmp_path):
    """Routers keep every bit. Experts are split on disk for some of these models, and fused, transposed or interleaved
    for others."""
    dense = MODELS[name]()
    sparse = mts.sparsify(copy.deepcopy(dense), "sparsegpt", data_loader=texts("left"), progress=False)
    parameters = dict(sparse.named_parameters())
    assert fused(dense)
    for key, before in dense.named_parameters():
        if key in fused(dense):
            assert two_of_four(stored_as_matrices(sparse, key)), key
            assert f"{key}_mask" in sparse.state_dict()
        elif ".layers." in key and before.dim() == 2 and not key.endswith("_bias") and not router(key):
            assert two_of_four(parameters[key]), key
        else:
            assert torch.equal(parameters[key], before), key
    assert len(mts.verify(sparse, "2:4").layers) == len(mts.report(sparse).layers)

    mts.save(sparse, tmp_path / "sparse")
    plain = plain_from_pretrained(tmp_path / "sparse", type(MODELS[name]()))
    report = mts.report(tmp_path / "sparse")
    assert [layer.expert_tokens for layer in report.layers] == [x.expert_tokens for x in mts.report(sparse).layers]
    assert len(mts.verify(tmp_path / "sparse", "2:4").layers) == len(report.layers)
    for again in (mts.load(tmp_path / "sparse"), mts.restore(MODELS[name](), tmp_path / "sparse")):
        assert_same_state(again, state_of(sparse))
    logits = [sparse(**batch).logits for batch in texts("right")]
    exported = mts.export(sparse)
    assert not list(mts.named_masks(exported))
    assert not any(type(module).__name__.startswith("Sparse") for module in exported.modules() if fused(module))
    plain = copy.deepcopy(plain).eval()  # a file's tensors lie at odd addresses, where kernels round differently
    for batch, expected in zip(texts("right"), logits, strict=True):
        for model in (plain, exported):
            assert torch.equal(model(**batch).logits, expected)


def router(name: str) -> bool:
    return any(part in name for part in (".gate.weight", ".router."))


def test_verify_sees_one_weight_too_many_in_one_expert(tmp_path):
    sparse = mts.sparsify(MODELS["gpt_oss"](), "magnitude", enforce=False, progress=False)
    name = "model.layers.1.mlp.experts.down_proj"
    with torch.no_grad():
        group = sparse.get_parameter(name)[2, 4:8, 5]  # [E, C, R]: four input channels of one output
        group[group == 0] = 1.0
    refused(mts.verify, sparse, match=f"1 of 12 layers do not hold their pattern: {name}: more nonzeros than 2:4")
    mts.save(sparse, tmp_path / "sparse")
    refused(mts.verify, tmp_path / "sparse", match=f"{name}: more nonzeros than 2:4")


@every_model
def test_sparsegpt_beats_magnitude_in_output_error(name):
    """In every expert matrix, with the error taken from float64 Gram matrices of plain loops."""
    dense = MODELS[name]()
    seen, counts = brute_experts(dense, plenty(), blocks_of(dense))
    solved = mts.sparsify(copy.deepcopy(dense), "sparsegpt", data_loader=plenty(), sequential="none", **OPTIONS)
    cut = mts.sparsify(copy.deepcopy(dense), "magnitude", progress=False)
    for key, gram in seen.grams.items():
        weight = stored_as_matrices(dense, key).double()
        left = (weight - stored_as_matrices(solved, key), weight - stored_as_matrices(cut, key), weight)
        better, worse, whole = (((matrix @ gram) * matrix).sum((-2, -1)) for matrix in left)
        used = torch.tensor(counts[key]) > 0
        assert bool((better[used] < 0.9 * worse[used]).all()), (key, better / worse)
        assert float(better.sum()) < 0.8 * float(worse.sum()), key
        (entry,) = (layer for layer in mts.report(solved).layers if layer.parameter == key)
        if bool(used.all()):  # else the report's error counts an average token
            assert entry.error == pytest.approx(float(better.sum() / whole.sum()), rel=1e-4)


# experts with few tokens --------------------------------------------------------------------------------------------


FEW = 30
DONE = {
    "pool": f"were filled up to {FEW} from the tokens of all experts",
    "all_tokens": "were solved as if every token were routed to them",
    "weight_only": "were solved by their weights alone",
}


def gram_by_the_words(how: str, grams: Tensor, everyone: Tensor, counts: list[int], expert: int) -> Tensor:
    """By the words of docs/experts.md."""
    average, missing = grams.sum(0) / sum(counts), FEW - counts[expert]
    if missing <= 0:
        return grams[expert]
    return {
        "pool": grams[expert] + missing * average,
        "all_tokens": everyone[expert],
        "weight_only": FEW * average.diagonal().mean() * torch.eye(len(average), dtype=torch.float64),
    }[how]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
@pytest.mark.parametrize("limit", [None, 100_000])
@pytest.mark.parametrize("how", DONE)
def test_what_experts_with_few_tokens_are_solved_with(name, how, limit):
    """In plain float64; the same whether Gram matrices are formed at once or not. Wanda: the diagonal alone."""
    dense, method = MODELS[name](), Recording()
    options = {"experts": how, "min_tokens": FEW, "memory_limit": limit, "sequential": "none", "progress": False}
    sparse = mts.sparsify(copy.deepcopy(dense), method, data_loader=texts("left"), **options)
    by_wanda = mts.sparsify(copy.deepcopy(dense), "wanda", data_loader=texts("left"), **options)
    found = in_parts(method, dense)
    seen, counts = brute_experts(dense, texts("left"), blocks_of(dense))
    everyone, _ = brute_experts(dense, texts("left"), blocks_of(dense), everyone=True)
    for key, grams in seen.grams.items():
        assert min(counts[key]) < FEW
        assert [c for _, stats in found[key] for c in stats.counts.tolist()] == counts[key]
        actual, squares = (torch.cat([getattr(s, what) for _, s in found[key]]) for what in ("gram", "square_sums"))
        assert actual.dtype == torch.float32
        for expert in range(len(grams)):
            gram = gram_by_the_words(how, grams, everyone.grams[key], counts[key], expert)
            assert float((actual[expert] - gram).abs().max() / gram.abs().max()) <= 1e-5, (key, expert)
            assert torch.allclose(squares[expert].double(), gram.diagonal(), rtol=1e-5)
            score = stored_as_matrices(dense, key)[expert].double().abs() * gram.diagonal().sqrt()
            kept = stored_as_matrices(by_wanda, key)[expert] != 0
            assert torch.equal(kept, mts.NM(2, 4).mask(score)), (key, expert)
        (entry,) = (layer for layer in mts.report(sparse).layers if layer.parameter == key)
        listed = ", ".join(f"{expert} ({c})" for expert, c in enumerate(counts[key]) if c < FEW)
        assert entry.expert_tokens == counts[key]
        assert entry.notes == [f"experts with fewer than {FEW} tokens {DONE[how]}: {listed}"]


def in_parts(method: Recording, model: nn.Module) -> dict[str, list]:
    """(weights, statistics) of the parts of each fused parameter, in the order of its experts."""
    found: dict[str, list] = {}
    for weight, stats in method.seen:
        for name in fused(model):
            matrices = stored_as_matrices(model, name)
            if weight.dim() == 3 and matrices.shape[1:] == weight.shape[1:]:
                starts = [i for i in range(len(matrices)) if torch.equal(matrices[i : i + len(weight)], weight)]
                if starts:
                    assert starts == [sum(len(part) for part, _ in found.get(name, []))]
                    found.setdefault(name, []).append((weight, stats))
    for name, parts in found.items():
        assert sum(len(part) for part, _ in parts) == len(model.get_parameter(name)), name
    return found


# in these words
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "'model.layers.0.mlp.input_linear' is given nothing but the rows that are ": ("jetmoe", {"experts": "all_tokens"}),
    "experts='none': allowed are 'pool', 'all_tokens', 'weight_only'": ("mixtral", {"experts": "none"}),
    "one expert takes 81,920 bytes, more than memory_limit=81,919: raise it": ("mixtral", {"memory_limit": 81_919}),
    "'much': give bytes, or a number with a unit, such as '16GB'": ("mixtral", {"memory_limit": "much"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_experts_cannot_be_solved_with_is_refused_before_any_work(message):
    name, options = REFUSED[message]
    refused(mts.make_plan, MODELS[name](), "sparsegpt", **options, match=message)


# memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"), [*((name, 100_000) for name in MODELS), ("mixtral", 250_000), ("llama4", 250_000)]
)
def test_a_memory_limit_changes_nothing_but_how_many_experts_are_solved_at_once(name, limit):
    dense, method = MODELS[name](), Recording()
    options = {"data_loader": plenty(), "progress": False}
    plan = mts.make_plan(dense, method, memory_limit=limit)
    at_once = {layer.layer.parameter_name: layer.at_once for layer in plan.layers}
    assert any(at_once.values())
    mts.sparsify(copy.deepcopy(dense), method, **options, memory_limit=limit, sequential="none")
    seen, counts = brute_experts(dense, plenty(), blocks_of(dense))
    for key, parts in in_parts(method, dense).items():
        whole = at_once[key] or len(seen.grams[key])
        assert [len(part) for part, _ in parts][:-1] == [whole] * (len(parts) - 1)
        assert len(parts[-1][0]) <= whole
        if min(counts[key]) >= 128:
            gram = torch.cat([stats.gram for _, stats in parts])
            assert torch.allclose(gram.double(), seen.grams[key], rtol=1e-4, atol=1e-4 * float(seen.grams[key].max()))

    expected = mts.sparsify(copy.deepcopy(dense), "sparsegpt", **options, polish=2)
    found = mts.sparsify(copy.deepcopy(dense), "sparsegpt", **options, polish=2, memory_limit=limit)
    for one, other in zip(mts.report(expected).layers, mts.report(found).layers):
        assert (one.name, one.zeros, one.notes, one.error_from) == (other.name, other.zeros, other.notes, "gram")
        assert other.errors == pytest.approx(one.errors, rel=1e-3)
    for key, weight in expected.named_parameters():
        same = ((weight == 0) == (found.get_parameter(key) == 0)).double().mean()
        assert float(same) > 0.999, key  # rounding may turn a tie


def test_only_the_gram_matrices_of_the_experts_being_solved_are_alive():
    grams: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watching(Recording):
        """Magnitude that notes how many experts' Gram matrices are alive when it is called."""

        def solve(self, weight, state, pattern, options) -> mts.Solution:
            if weight.dim() == 3:
                grams.append(weakref.ref(state.gram))
                alive.append(sum(len(gram) for ref in grams if (gram := ref()) is not None))
            mask = pattern.mask(weight.abs())
            return mts.Solution(weight.masked_fill(~mask, 0), mask, 0.0)

    mts.sparsify(MODELS["mixtral"](), Watching(), data_loader=plenty(), memory_limit=100_000, progress=False)
    assert alive == [1, 1, 1, 1, 2, 2] * 2


def test_the_plan_states_the_memory_of_experts():
    """Gram matrices of all experts of a block, or none of them and the tokens that are kept."""
    plan = mts.make_plan(MODELS["mixtral"](), "sparsegpt", memory_limit="250KB")
    assert [layer.at_once for layer in plan.layers if len(layer.shape) == 3] == [3, None, 3, None]
    text = {"data": ["a"], "tokenizer": len, "num_samples": 5, "seq_len": 8}
    attention = (32 * 32) + 32 * 32  # q, k and v one each in the bound; o
    whole = mts.make_plan(MODELS["mixtral"](), "sparsegpt", **text).memory
    assert whole["statistics_of_one_block"] == 4 * (2 * attention + EXPERTS * (32 * 32 + 24 * 24))
    assert "routed_tokens_of_one_block" not in whole
    few = mts.make_plan(MODELS["mixtral"](), "sparsegpt", **text, memory_limit=100_000).memory
    assert few["statistics_of_one_block"] == 4 * (2 * attention + EXPERTS * (32 + 24))
    assert few["routed_tokens_of_one_block"] == 4 * 5 * 8 * (32 + CHOSEN * 24)
    assert few["solver_workspace"] <= 100_000 < whole["solver_workspace"]


# every method and step ----------------------------------------------------------------------------------------------

STEPS = {
    "ria": ("ria", {}),
    "alps": ("alps", {}),
    "polish": ("magnitude", {"polish": 3}),
    "dense values": ("sparsegpt", {"update": False}),
    "1:4": ("sparsegpt", {"pattern": "1:4"}),
    "half": ("sparsegpt", {"pattern": 0.5}),
    "budget": ("wanda", {"budget": "50% zeros", "choices": ["30%", "50%", "70%"]}),
    "no masks": ("wanda", {"enforce": False}),
}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "jetmoe"])
@pytest.mark.parametrize("steps", STEPS)
def test_methods_and_steps_take_experts(name, steps):
    """Each leaves its pattern, and less output error than cutting at random would."""
    method, options = STEPS[steps]
    sparse = mts.sparsify(MODELS[name](), method, data_loader=plenty(), progress=False, **options)
    mts.verify(sparse)
    entries = [layer for layer in mts.report(sparse).layers if layer.parameter in fused(sparse)]
    assert entries
    for entry in entries:
        assert 0 < entry.error < entry.zeros / entry.size
        assert entry.errors == sorted(entry.errors, reverse=True) or steps == "dense values"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "jetmoe"])
def test_reconstruction_tunes_experts(name):
    """It lowers the block's error, keeps the masks, and leaves routers and the biases of experts alone."""
    options = {"data_loader": plenty(), "progress": False}
    sparse = mts.sparsify(MODELS[name](), "sparsegpt", **options)
    tuned = mts.sparsify(MODELS[name](), "sparsegpt", **options, reconstruct={"epochs": 2, "learning_rate": 0.1})
    mts.verify(tuned, "2:4")
    first = mts.report(tuned).blocks[0]
    assert first.error_after < first.error_before
    for key, weight in sparse.named_parameters():
        other = tuned.get_parameter(key)
        if key in fused(sparse) and ".layers.0." in key:
            assert torch.equal(weight == 0, other == 0), key
            assert not torch.equal(weight, other), key
        elif router(key) or (".experts." in key and key.endswith("_bias")):
            assert torch.equal(weight, other), key


def test_experts_learn_at_the_pace_of_a_single_matrix():
    """Reconstruction's learning rate goes by how many kept values meet in one output, whatever stands in front."""
    weight, mask = torch.randn(3, 8, 16), torch.rand(3, 8, 16) > 0.5
    (alone,) = learning_rates([weight.flatten(0, 1)], [mask.flatten(0, 1)], [24], 0.4)
    (fused,) = learning_rates([weight], [mask], [24], 0.4)
    assert fused == pytest.approx(alone)


def test_permutation_says_that_it_leaves_experts_alone():
    plan = mts.make_plan(MODELS["deepseek_v3"](), "wanda", permute=True)
    note = "permute leaves the channels of fused experts in their order (2 layers)"
    assert plan.notes == (note,)
    assert f"Note: {note}." in str(plan)
    assert plan.as_dict()["notes"] == [note]
    sparse = mts.sparsify(MODELS["deepseek_v3"](), "wanda", data_loader=plenty(), permute=True, progress=False)
    assert note in mts.report(sparse).notes
    recipes = {layer.parameter: layer.recipe for layer in mts.report(sparse).layers}
    assert {recipes[key] for key in fused(sparse)} == {"wanda"}
    assert "permute+wanda" in recipes.values()  # the shared expert's
    assert mts.make_plan(MODELS["deepseek_v3"](), "wanda").notes == ()


def test_masks_of_the_users_own_a_few_experts_at_a_time():
    model = MODELS["gpt_oss"]()
    ranks = {name: torch.rand_like(stored_as_matrices(model, name)) for name in fused(model)}
    masks = {name: mts.NM(2, 4).mask(rank).mT.contiguous() for name, rank in ranks.items()}
    dense = copy.deepcopy(model)
    mts.sparsify(model, masks=masks, polish=5, memory_limit=100_000, data_loader=plenty(), progress=False)
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)
        assert not torch.equal(model.get_parameter(name)[mask], dense.get_parameter(name)[mask])
    for layer in mts.report(model).layers:
        assert [step.step for step in layer.steps] == ["masks", "polish"]
        assert layer.errors[1] < layer.errors[0]


# masks --------------------------------------------------------------------------------------------------------------


@written_on_purpose
@every_model
def test_masks_hold_in_forward_and_training(name):
    """What is written to pruned places never reaches an output, and AdamW leaves them zero; kept weights learn."""
    sparse = mts.sparsify(MODELS[name](), "wanda", data_loader=texts("left"), progress=False)
    batch = plenty()[0]
    with torch.no_grad():
        expected = sparse(**batch).logits
        for key in fused(sparse):
            sparse.get_parameter(key).masked_fill_(~sparse.get_buffer(f"{key}_mask"), 3.0)
        assert torch.equal(sparse(**batch).logits, expected)
    optimizer = torch.optim.AdamW([p for p in sparse.parameters() if p.dim() == 3], lr=1e-2)
    before = {key: sparse.get_parameter(key).detach().clone() for key in fused(sparse)}
    for batch in plenty()[:2]:
        sparse(**batch, labels=batch["input_ids"]).loss.backward()
        for key in fused(sparse):
            gradient, mask = sparse.get_parameter(key).grad, sparse.get_buffer(f"{key}_mask")
            assert not gradient[~mask].any()
            assert gradient[mask].any()
        optimizer.step()
        optimizer.zero_grad()
    assert not lost_zeros(sparse)
    for key in fused(sparse):
        assert bool((sparse.get_parameter(key) != before[key])[sparse.get_buffer(f"{key}_mask")].any())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_every_experts_implementation_gives_the_same_model(name, implementation):
    """Calibrated and run by any of transformers' own: nothing is registered there."""
    model: Any = MODELS[name]()
    before = dict(ALL_EXPERTS_FUNCTIONS)
    model.set_experts_implementation(implementation)
    mts.sparsify(model, "sparsegpt", data_loader=plenty(), progress=False)
    assert dict(ALL_EXPERTS_FUNCTIONS) == before
    assert model.config._experts_implementation == implementation
    other = mts.sparsify(MODELS[name](), "sparsegpt", data_loader=plenty(), progress=False)
    for key, weight in other.named_parameters():
        assert float(((weight == 0) == (model.get_parameter(key) == 0)).double().mean()) > 0.999, key
    assert torch.equal(model(**plenty()[0]).logits, mts.export(copy.deepcopy(model))(**plenty()[0]).logits)


def test_an_interrupted_run_leaves_no_hook_behind():
    """On routers as well, which tell JetMoe's tokens apart."""

    def loop(model):
        for batch in texts("left")[:2]:
            model(**batch)
        raise KeyboardInterrupt

    model = MODELS["jetmoe"]()
    model(**texts("left")[0])
    refused(mts.sparsify, model, "wanda", forward_loop=loop, error=KeyboardInterrupt)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_accelerate_offloads(name):
    """What down_proj sees is computed from weights that are on the CPU between calls, and nowhere on the module."""
    expected = mts.sparsify(MODELS[name](), "sparsegpt", data_loader=plenty(), progress=False)
    model = MODELS[name]()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    mts.sparsify(model, "sparsegpt", data_loader=plenty(), progress=False)
    assert torch.equal(model(**plenty()[0]).logits, expected(**plenty()[0]).logits)
    assert [x.error for x in mts.report(model).layers] == [x.error for x in mts.report(expected).layers]
