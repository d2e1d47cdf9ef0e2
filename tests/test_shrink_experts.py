"""`shrink(experts=)`: fewer experts in every mixture, of all types of models that have some, against oracles."""

import copy
import gc
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import flat_tensors
from modelopt_sparse.model.experts import DOWN, LLAMA4_DOWN
from modelopt_sparse.shrinking.least_squares import RoutedCall, refit_experts
from modelopt_sparse.shrinking.sizes import EXPERT_CRITERIA
from tests.helpers import assert_bits, refused
from tests.models.every_type import batch_of, strengthen, tiny_model
from tests.models.expert_models import EXPERTS, GROUPS, LATENT, MODELS, MOE, WIDTH, build
from tests.models.routed import without_experts
from tests.models.type_exceptions import VERSION

QUICK = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "longcat_flash", "llama4_text")
SLOW = (
    "afmoe", "aria", "aria_text", "axk2", "cohere2_moe", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm5_next", "glm5_next_text", "glm_moe_dsa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v3", "hy_v4", "hy_v4_vl", "hy_v4_vl_text", "inkling2",
    "inkling2_loop", "inkling2_loop_text", "inkling2_text",
    "inkling_mm_model", "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text", "mistral4",
    "mistral_large4", "mistral_large4_text", "muse_spark_text", "olmoe", "openai_privacy_filter", "phimoe",
    "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "solar_open", "step3p7", "unlimited_ocr", "zaya",
)  # fmt: skip
GROUPED = ("axk1", "bailing_hybrid", "beam", "deepseek_v32")  # tiny ones have 2 groups of 2 experts
REFUSED = {
    **dict.fromkeys(GROUPED, "in 2 groups: give a multiple of 2, at least 4"),
    **dict.fromkeys(("jetmoe", "vitpose", "llama"), "has no number of experts that can be smaller: it has no"),
    "deepseek_v4": "computes something else with its experts in another order",  # tables name experts by number
    "hunyuan_v1_moe": "has no number of experts that can be smaller",
}


slow = partial(pytest.param, marks=pytest.mark.slow)


def given(model: nn.Module) -> dict[str, Any]:
    batch = batch_of(model)
    return {"data_loader": [batch, batch], "progress": False}


def cut(model: nn.Module, data: list[Any], **options: Any) -> Any:
    """Shrink -> what the report says of it."""
    return mts.report(mts.shrink(model, data_loader=data, progress=False, **options)).shrunk


def output(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return flat_tensors(model(**batch))[0]


only_of_version = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERSION}."), reason=f"model types are those of transformers {VERSION}"
)


LATENT_GREEDY = {**LATENT, "topk_method": "greedy", "n_group": None, "topk_group": None, "head_dim": 8}
GEMMA4 = {
    "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 24, "head_dim": 8,
    "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 53, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"], "num_global_key_value_heads": 2,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 24, "head_dim": 8,
}  # fmt: skip
FLINT = {"num_experts": EXPERTS, "head_dim": 8, "mlp_only_layers": [0], "sliding_window": 8}
FIRST_DENSE = {**GROUPS, **MOE, "first_k_dense_replace": 1}
# types whose tiny models by the general rules have no mixture, or cannot be called
BY_HAND = {
    "deepseek_v2": build("DeepseekV2ForCausalLM", "DeepseekV2Config", **{**FIRST_DENSE, **LATENT_GREEDY}),
    "deepseek_v3": MODELS["deepseek_v3"],
    "dots1": build("Dots1ForCausalLM", "Dots1Config", **FIRST_DENSE, head_dim=8, max_window_layers=2),
    "gemma4_text": build("Gemma4ForCausalLM", "Gemma4TextConfig", **GEMMA4),
    "nemotron_h": build("NemotronHForCausalLM", "NemotronHConfig", **{**GROUPS, **MOE, **NEMOTRON}),
    "flint": build("FlintForCausalLM", "FlintConfig", **MOE, **FLINT),
    "hunyuan_v1_moe": build("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", num_experts=EXPERTS, head_dim=8),
}


def mixture_of(name: str) -> Any:
    if name in BY_HAND:
        return BY_HAND[name]()
    change = {"n_routed_experts": 8, "num_experts": 8} if name in GROUPED else {}
    model = tiny_model(name, **change)
    strengthen(model)
    return model


@only_of_version
@pytest.mark.filterwarnings("ignore")  # what the models themselves say
@pytest.mark.parametrize("name", [*QUICK, *map(slow, (*SLOW, *BY_HAND, *GROUPED))])
def test_a_smaller_mixture_is_the_whole_one_that_never_chooses_the_others(tmp_path, name):
    """Before and after stock transformers has written and read it."""
    model = mixture_of(name)
    whole, batch = copy.deepcopy(model), batch_of(model)
    shrunk = cut(model, [batch, batch], experts=0.25, refit=False)
    assert {(old, new) for old, new in shrunk.sizes.values()} - {(1, 0)} == {(8, 6) if name in GROUPED else (4, 3)}
    small = output(model, batch)
    with without_experts(whole, model, shrunk.kept["experts"]):
        wanted = output(whole, batch)
    change = (wanted - output(whole, batch)).abs().max()
    assert change > 0
    assert (small - wanted).abs().max() <= 1e-4 * change + 4 * torch.finfo(wanted.dtype).eps * wanted.abs().max()
    model.save_pretrained(tmp_path)
    assert_bits(output(type(model).from_pretrained(tmp_path).eval(), batch), small)


@only_of_version
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*map(slow, REFUSED)])
def test_what_has_no_experts_that_can_go_is_refused_untouched(name):
    model: Any = tiny_model(name)
    refused(mts.shrink, model, experts=0.25, **given(model), parts=[REFUSED[name]])


def test_groups_keep_as_many_experts_each():
    """Of 2 groups of 4 experts 3 stay in each, and the small model is the whole one without the others."""
    model, whole = GROUPED_GLM(), GROUPED_GLM()
    batches = [{"input_ids": torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(i))} for i in (0, 1)]
    shrunk = cut(model, batches, experts=2, criterion="frequency", refit=False)
    for kept in shrunk.kept["experts"].values():
        assert [sum(start <= expert < start + 4 for expert in kept) for start in (0, 4)] == [3, 3]
    with without_experts(whole, model, shrunk.kept["experts"]):
        wanted = output(whole, batches[0])
    torch.testing.assert_close(output(model, batches[0]), wanted)
    for gone in (1, 4):
        refused(mts.plan_shrink, GROUPED_GLM(), experts=gone, match=r"give a multiple of|which takes 3: keep more")


GROUPED_GLM = build(
    "Glm4MoeForCausalLM", "Glm4MoeConfig", n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=3,
    n_shared_experts=1, moe_intermediate_size=24, first_k_dense_replace=1, head_dim=8,
)  # fmt: skip


# criteria -------------------------------------------------------------------------------------------------------------


def routed_tokens(model: nn.Module, batches: list[dict[str, Tensor]], real: list[Tensor]) -> dict[str, list[Any]]:
    """Layer -> (the experts chosen, their gates, what each puts out) of each real token, in float64, one by one."""
    seen: dict[str, list[Any]] = {}

    def look(module: Any, args: tuple, name: str, mask: list[Tensor]) -> None:
        hidden, index, gates = args
        for token in mask[0].flatten().nonzero().flatten().tolist():
            outputs = []
            for expert in index[token].tolist():
                gate, up = (module.gate_up_proj[expert].double() @ hidden[token].double()).chunk(2)
                outputs.append(module.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up))
            seen.setdefault(name, []).append((index[token].tolist(), gates[token].double(), torch.stack(outputs)))

    mask: list[Tensor] = [torch.empty(0)]
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(partial(look, name=f"{name}.down_proj", mask=mask))
    with torch.no_grad():
        for batch, mask[0] in zip(batches, real):
            model(**batch)
    return seen


@pytest.mark.parametrize("criterion", EXPERT_CRITERIA)
def test_criteria_are_sums_over_routed_tokens(criterion, tmp_path):
    """Each as published, token by token; padding counts for nothing. The mean of gate times norm is REAP's. What is
    written of them is JSON, which has no infinity."""
    model: Any = MODELS["qwen3_moe"]()
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 50, (2, 9), generator=generator)} for _ in range(2)]
    real = [torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)]
    real[1][1, 5:] = False
    batches[1]["attention_mask"] = real[1].long()
    tokens = routed_tokens(model, batches, real)
    shrunk = cut(model, batches, experts=2, criterion=criterion, refit=False)
    for name, of_layer in tokens.items():
        own: dict[int, list[tuple[float, float]]] = {expert: [] for expert in range(EXPERTS)}
        for experts, gates, outputs in of_layer:
            for expert, gate, made in zip(experts, gates, outputs, strict=True):
                own[expert].append((float(gate), float(made.norm())))
        wanted = [SCORES[criterion](pairs) for pairs in own.values()]
        assert shrunk.scores[name] == pytest.approx(wanted, rel=2e-3, abs=1e-6)
        gone = sorted(range(EXPERTS), key=wanted.__getitem__)[:2]
        assert shrunk.kept["experts"][name] == [expert for expert in range(EXPERTS) if expert not in gone]
        assert shrunk.tokens[name] == [len(pairs) for pairs in own.values()]
    mts.save(model, tmp_path / "out")
    json.loads((tmp_path / "out" / "sparsity.json").read_text(), parse_constant=pytest.fail)


@only_of_version
@torch.no_grad()
def test_gates_inside_of_experts_count_once():
    """Llama 4 scales what an expert gets: what it puts out is its whole share of the mixture's output."""
    model: Any = tiny_model("llama4_text")
    strengthen(model)
    dense, batch, seen, shares = copy.deepcopy(model), batch_of(model), {}, {}
    mixtures = {f"{name}.experts.down_proj": m for name, m in dense.named_modules() if hasattr(m, "router")}
    for name, module in mixtures.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1)}))
    dense(**batch)
    for name, module in mixtures.items():
        scores, _ = module.router(seen[name])
        rows = (seen[name].expand(len(scores.T), -1, -1) * scores.T[..., None]).flatten(0, 1)
        shares[name] = module.experts(rows).view(len(scores.T), *seen[name].shape).double(), scores > 0
    shrunk = cut(model, [batch, batch], experts=1, refit=False)
    assert shrunk.kept["experts"].keys() == shares.keys()
    for name, (outputs_ETR, routed_TE) in shares.items():
        wanted = outputs_ETR.norm(dim=-1).sum(-1) / routed_TE.sum(0).clamp_min(1)
        torch.testing.assert_close(torch.tensor(shrunk.scores[name]).double(), wanted, rtol=2e-3, atol=1e-9)


SCORES: dict[str, Any] = {
    "frequency": len,
    "reap": lambda pairs: sum(gate * norm for gate, norm in pairs) / len(pairs),
    "reap_sum": lambda pairs: sum(gate * norm for gate, norm in pairs),
}


# refit ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
@torch.no_grad()
def test_refit_is_least_squares_expert_by_expert(name):
    """Against ridge regressions on stacked rows, in float64: transposed, with biases, and with gates inside as well."""
    model: Any = MODELS[name]()
    mixture = next(m for n, m in reversed([*model.named_modules()]) if n.endswith((".mlp", ".feed_forward")))
    module, adapter = mixture.experts, LLAMA4_DOWN if name == "llama4" else DOWN
    old, calls, slow, mix = module.down_proj.clone(), [], [], torch.randn(WIDTH, WIDTH)
    for place in range(4):
        hidden = torch.randn(40 + place, WIDTH)
        logits = torch.randn(len(hidden), EXPERTS)
        gates, index = logits.sigmoid().topk(1 if name == "llama4" else 2)
        inputs = (hidden, index, gates, logits)[: 4 if name == "llama4" else 3]
        whole = (hidden @ mix).tanh()
        calls.append(RoutedCall.of(place, module, adapter, inputs, whole))
        lacks, rows = whole.double(), {}
        for expert in range(EXPERTS):
            token, at = (index == expert).nonzero(as_tuple=True)
            scale = gates[token, at, None]
            seen = adapter.hidden(module, expert, hidden[token] * scale if name == "llama4" else hidden[token])
            scale = 1 if name == "llama4" else scale
            lacks[token] -= (adapter.output(module, expert, seen) * scale).double()
            rows[expert] = token, (seen * scale).double()
        slow.append((lacks, rows))
        torch.testing.assert_close(calls[place].residual.double(), lacks, rtol=1e-4, atol=1e-4)
    run: Any = SimpleNamespace(processes=Processes())
    sizes = [call.energy for call in calls]
    batches = BatchNumbers.of(Processes(), [None] * 4, 0)
    values, (before, after) = refit_experts(module, adapter, calls, batches, run)
    matrices = adapter.matrix(module, old).double().clone()
    assert before == pytest.approx(float(slow[3][0].square().sum()) / sizes[3], rel=1e-4)
    for expert in [*range(EXPERTS)] * 2:
        x = torch.cat([rows[expert][1] for _, rows in slow[:3]])
        r = torch.cat([lacks[rows[expert][0]] for lacks, rows in slow[:3]])
        token, judging = slow[3][1][expert]
        tried = [(slow[3][0][token].square().sum(), torch.zeros_like(matrices[expert]))]
        for damping in (1e-3, 1e-2, 1e-1, 1.0):
            ridge = (damping * x.square().sum() / x.shape[1]).sqrt() * torch.eye(x.shape[1], dtype=torch.float64)
            goal = torch.cat([r, r.new_zeros(len(ridge), r.shape[1])])
            change = torch.linalg.lstsq(torch.cat([x, ridge]), goal).solution.T
            tried.append(((slow[3][0][token] - judging @ change.T).square().sum(), change))
        _, change = min(tried, key=lambda pair: pair[0])
        matrices[expert] += change
        for lacks, rows in slow:
            lacks[rows[expert][0]] -= rows[expert][1] @ change.T
    torch.testing.assert_close(adapter.matrix(module, values).double(), matrices, rtol=1e-3, atol=1e-4)
    assert after == pytest.approx(float(slow[3][0].square().sum()) / sizes[3], rel=1e-3)
    assert after < before
    assert torch.equal(module.down_proj, old)


@only_of_version
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "longcat_flash", "llama4_text"])
def test_refit_brings_predictions_closer(name):
    """In the model that is there afterwards as in what the report says; what is not refitted is as it is without."""
    model: Any = tiny_model(name)
    strengthen(model)
    for key, weight in model.named_parameters():
        if ".experts." in key:  # transformers draws them so small that nothing depends on them
            weight.data.mul_(8)
    whole, plain = copy.deepcopy(model), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, 50, (4, 12), generator=generator)} for _ in range(24)]
    cut(plain, data, experts=1, refit=False)
    kl = cut(model, data, experts=1).kl
    assert kl["refit"] < kl["as is"]
    now = model.state_dict()
    others = {key for key, value in plain.state_dict().items() if not torch.equal(value, now[key])}
    assert others
    assert all(key.endswith("experts.down_proj") for key in others)
    wanted, was, closer = (output(each, data[-1]).log_softmax(-1) for each in (whole, plain, model))
    far = [float(nn.functional.kl_div(each, wanted, log_target=True, reduction="sum")) / 48 for each in (was, closer)]
    assert far == pytest.approx([kl["as is"], kl["refit"]], rel=1e-3)


# options --------------------------------------------------------------------------------------------------------------


def mixtral_data() -> list[Tensor]:
    return [torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_the_written_config_holds_the_number_under_every_name(tmp_path):
    """Qwen3-MoE's is "num_local_experts" for transformers, and "num_experts" for engines; shrunk twice as well."""
    model: Any = MODELS["qwen3_moe"]()
    mts.save(model, tmp_path / "dense")
    for left in (3, 2):
        mts.shrink(model, experts=1, refit=False, data_loader=mixtral_data(), progress=False)
        model.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["num_experts"] == written["num_local_experts"] == left
    streamed = tmp_path / "streamed"
    mts.shrink_checkpoint(tmp_path / "dense", streamed, experts=1, data_loader=mixtral_data(), progress=False)
    written = json.loads((streamed / "config.json").read_text())
    assert written["num_experts"] == written["num_local_experts"] == 3


def test_experts_and_blocks_go_together_and_are_tuned():
    model: Any = MODELS["mixtral"]()
    shrunk = cut(model, mixtral_data(), experts=1, blocks=1, reconstruct=1)
    assert shrunk.sizes == {"num_local_experts": [4, 3], "num_hidden_layers": [2, 1]}
    assert len(model.model.layers) == 1
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 3
    assert shrunk.kl.keys() == {"as is", "reconstructed"}
    assert mts.report(model).settings["refit"] is False


def test_blocks_that_hold_all_mixtures_may_go():
    model: Any = MODELS["glm4_moe"]()
    mts.shrink(model, experts=1, blocks=[1], data_loader=mixtral_data(), progress=False)
    assert (len(model.model.layers), model.config.n_routed_experts) == (1, 3)


def test_experts_that_no_token_reached_are_named_and_go_first():
    model: Any = MODELS["glm4_moe"]()
    model.model.layers[1].mlp.gate.e_score_correction_bias[2] = -10
    mts.shrink(model, experts=1, data_loader=mixtral_data(), progress=False)
    report: Any = mts.report(model)
    (name,) = report.shrunk.tokens
    assert report.shrunk.tokens[name][2] == 0
    assert report.shrunk.kept["experts"] == {name: [0, 1, 3]}
    assert f"{name!r}: no token reached experts [2]: the data does not tell what they are for" in report.notes


def kept(name: str, count: int) -> dict[str, Any]:
    return {"kept": {"experts": {name: [*range(count)]}}}


NOT_CUT = "is missing, or is not cut: name the layers that are"
TOO_FEW = "num_local_experts=1 leaves 1 experts for a token, which takes 2: keep more"


WRONG_OPTIONS = [
    (kept("model.layers.0.mlp.experts.down_proj", 3), NOT_CUT),  # one layer of two
    (kept("model.layers.0.mlp.experts.gate_up_proj", 3), NOT_CUT),
    (kept("model.layers.1.mlp.experts.down_proj", 6), "as many experts must stay in each of 2 groups"),
    ({"experts": 0.1}, "experts=0.1 takes 0 of 4 experts away"),
    ({"experts": 1, "protect": {"*": [0]}}, "give kept=, the experts that stay"),
    ({"experts": 4}, "experts=4 takes 4 of 4 experts away"),
    ({"experts": 3}, TOO_FEW),
    ({"to": {"num_local_experts": 1}}, TOO_FEW),
    ({"experts": "x"}, "experts='x': give what goes, as a share"),
    ({"experts": 1, "mlp": 0.5}, "shrink takes blocks= with mlp= or experts=, or to="),
    ({"experts": 1, "criterion": "gram"}, "criterion"),
    ({"experts": 1, "criterion": "gate"}, "allowed are 'reap', 'reap_sum', 'frequency'"),
    ({"mlp": 0.5}, "holds experts: give experts= or blocks="),
    (kept("nowhere", 2), "give ascending indices of its 0 experts"),
    ({"kept": {"nowhere": [0, 1]}}, "give ascending indices of its 0 experts"),
]


@pytest.mark.parametrize(("options", "problem"), WRONG_OPTIONS)
def test_wrong_options_are_refused_untouched(options, problem):
    model: Any = (GROUPED_GLM if "groups" in problem else MODELS["mixtral"])()
    refused(mts.shrink, model, data_loader=mixtral_data(), progress=False, **options, parts=[problem])


def test_rounding_of_half_precision_is_no_other_model():
    """One of 32 experts changes as little as the order in which bfloat16 adds them up."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": False, "num_hidden_layers": 6}
    model: Any = build("Qwen3MoeForCausalLM", "Qwen3MoeConfig", moe_intermediate_size=24, **sizes)().bfloat16()
    mts.shrink(model, experts=1, refit=False, data_loader=mixtral_data(), progress=False)
    assert model.config.num_experts == 31


def test_experts_that_are_no_equals_are_refused():
    """What a mixture puts out depends on the numbers of its experts."""
    model: Any = MODELS["mixtral"]()
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda module, args, made: made * (1 + args[1].float().mean()))
    order = "something else with its experts in another order"
    refused(mts.shrink, model, experts=1, data_loader=mixtral_data(), progress=False, match=order)


def test_the_plan_tells_numbers_and_heads_that_go():
    plan = mts.plan_shrink(MODELS["glm4_moe"](), to={"n_routed_experts": 3})
    assert plan.changes["n_routed_experts"] == (4, 3)
    assert plan.changes["num_nextn_predict_layers"] == (1, 0)
    assert "num_nextn_predict_layers becomes 0" in str(plan)


def test_refit_leaves_no_copies_of_blocks_behind():
    """They end with the run, and not with the next garbage collection: streamed, each takes as much as a block."""
    model: Any = MODELS["mixtral"]()
    kind = type(model.model.layers[0].mlp.experts)
    gc.collect()
    gc.disable()
    try:
        mts.shrink(model, experts=0.25, **given(model))
        alive = [each for each in gc.get_objects() if type(each) is kind]
    finally:
        gc.enable()
    assert {id(each) for each in alive} <= {id(module) for module in model.modules()}
