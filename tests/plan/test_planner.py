"""The plan: which layer gets what, why the rest stays dense, and that it promises what is then done."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import (
    IBertConfig,
    IBertForMaskedLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MobileNetV1Config,
    MobileNetV1ForImageClassification,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import make_plan, resolve_method
from tests.helpers import tiny_llama, token_batches

pytestmark = pytest.mark.core

LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ALL = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]


def names(plan: Plan) -> list[str]:
    return [item.name for item in plan.layers]


def reasons(plan: Plan) -> dict[str, str]:
    return {item.name: item.reason for item in plan.skipped}


def untied(**changes):
    return tiny_llama(tie_word_embeddings=False, **changes)


# methods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_by_its_name(name):
    assert resolve_method(name) == (METHODS[name], ())


def test_modelopt_s_name_of_magnitude_is_an_alias():
    assert resolve_method("sparse_magnitude")[0] is METHODS["magnitude"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparsgpt", "method 'sparsgpt' is not known, did you mean 'sparsegpt'.; allowed are magnitude, wanda, ria"),
        ("xyz", "method 'xyz' is not known; allowed are magnitude, wanda, ria"),
    ],
)
def test_an_unknown_method_is_an_error_that_names_the_known_ones(name, message):
    with pytest.raises(ValueError, match=message):
        resolve_method(name)


def test_a_method_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match=r"method is a int: give a name \(magnitude, .*\) or a Method object"):
        resolve_method(2)


class Own(mts.Method):
    name = "own"
    needs = "everything"

    def solve(self, weight, state, pattern, options):
        raise NotImplementedError


def test_a_method_of_the_user_must_need_something_that_there_is():
    message = "method 'own': needs='everything'; allowed are nothing, square_sums, gram"
    with pytest.raises(ValueError, match=message):
        resolve_method(Own())


# what is pruned by default --------------------------------------------------------------------------------------------


def test_by_default_every_layer_in_the_blocks_is_pruned_and_the_head_is_not():
    plan = make_plan(untied(), "magnitude")
    assert names(plan) == ALL
    assert reasons(plan) == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    assert {item.block for item in plan.layers} == {"model.layers.0", "model.layers.1"}


def test_a_tied_head_is_skipped_with_its_embedding():
    assert reasons(make_plan(tiny_llama(), "magnitude")) == {"model.embed_tokens": "tied: also held by lm_head"}


def test_an_output_head_is_found_by_its_role_whatever_its_name():
    class Renamed(type(tiny_llama())):
        def __init__(self, config):
            super().__init__(config)
            self.vocabulary = self.lm_head
            del self.lm_head

        def get_output_embeddings(self):
            return self.vocabulary

    plan = make_plan(Renamed(untied().config), "magnitude", include="*")
    assert reasons(plan)["vocabulary"] == "output head"


def test_the_head_of_a_model_without_a_stack_stays_dense():
    """transformers: all that lies outside of the base model. Other models: the last layer, by the name of its child."""
    config = MobileNetV1Config(num_channels=3, image_size=32, depth_multiplier=0.25, min_depth=8)
    plan = make_plan(MobileNetV1ForImageClassification(config), "magnitude", pattern=0.5)
    assert plan.stacks[0].names == ("",)
    assert reasons(plan) == {"classifier": "output head"}
    assert make_plan(MobileNetV1ForImageClassification(config), "magnitude", include="classifier").layers

    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    body, head = nn.Sequential(layers[0]), nn.Sequential(nn.Dropout(), *layers[1:])
    plain = nn.ModuleDict({"features": body, "classifier": head})
    assert reasons(make_plan(plain, "magnitude")) == {"classifier.2": "output head"}
    assert not reasons(make_plan(nn.ModuleDict({"features": body, "output": head}), "magnitude"))
    assert not reasons(make_plan(nn.ModuleDict({"fc": layers[0]}), "magnitude"))  # all there is


def test_an_lm_head_is_protected_with_all_that_it_holds():
    """I-BERT: its own Linear layers have no adapter, and its lm_head holds a plain one."""
    config = IBertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match=r"nothing to prune in this IBertForMaskedLM: .*output head"):
        make_plan(IBertForMaskedLM(config), "magnitude")


def test_a_linear_that_shares_its_weight_with_the_output_head_is_protected_as_well():
    model = untied()
    model.model.layers[0].extra = nn.Linear(32, 97, bias=False)
    model.model.layers[0].extra.weight = model.lm_head.weight
    assert reasons(make_plan(model, "magnitude"))["model.layers.0.extra"] == "output head"


def test_layers_outside_of_the_blocks_stay_dense():
    model = nn.ModuleDict({"stem": nn.Linear(8, 8), "layers": nn.ModuleList([nn.Sequential(nn.Linear(8, 8))] * 1)})
    model["layers"].append(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    plan = make_plan(model, "magnitude")
    assert names(plan) == ["layers.0.0", "layers.1.0", "layers.1.1"]
    assert reasons(plan) == {"stem": "outside the model's blocks (name it in include to prune it)"}


def test_layers_in_a_list_that_is_no_stack_stay_dense_unless_they_are_named():
    """As in the encoder of Mimi, and in the convolutional stem of wav2vec2."""
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    model = nn.ModuleDict(
        {
            "mixed": nn.ModuleList([nn.Linear(8, 8), block(), nn.ELU(), nn.Linear(8, 8)]),
            "stem": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            "layers": nn.ModuleList([block(), block()]),
        }
    )
    plan = make_plan(model, "magnitude")
    assert [stack.name for stack in plan.stacks] == ["layers"]
    outside = ["mixed.0", "mixed.1.0", "mixed.1.1", "mixed.3", "stem.0", "stem.1"]
    assert reasons(plan) == dict.fromkeys(outside, "outside the model's blocks (name it in include to prune it)")
    assert len(make_plan(model, "magnitude", include=["mixed.*", "stem.*", "layers.*"]).layers) == 10


def test_routers_of_a_mixture_stay_dense_and_its_fused_experts_do_not():
    config = MixtralConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=20, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        plan = make_plan(MixtralForCausalLM(config), "magnitude")
    assert reasons(plan) == {
        "model.embed_tokens": "embedding",
        "model.layers.0.mlp.gate": "MoE router",
        "lm_head": "output head",
    }
    experts = {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 32, 16),
        "model.layers.0.mlp.experts.down_proj": (2, 16, 16),
    }
    assert names(plan) == [*ALL[:4], *experts]
    assert {layer.name: layer.shape for layer in plan.layers[4:]} == experts


class Mixture(nn.Module):
    """Experts as a list of modules, with a router that is a plain Linear."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.shared_expert_gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3))


class GatedMLP(nn.Module):
    """A gate without experts beside it is an ordinary layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)


def test_a_router_is_found_by_the_experts_beside_it():
    model = nn.Sequential(Mixture(), GatedMLP())
    plan = make_plan(model, "magnitude")
    assert reasons(plan) == {"0.gate": "MoE router", "0.shared_expert_gate": "MoE router"}
    assert names(plan) == [*(f"0.experts.{i}.{j}" for i in range(3) for j in range(2)), "1.gate", "1.up"]


def test_a_router_is_found_by_the_name_of_its_class_with_all_that_it_holds():
    class TopKRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(16, 8), nn.Linear(8, 4)

    plan = make_plan(nn.ModuleDict({"mlp": GatedMLP(), "choose": TopKRouter()}), "magnitude")
    assert reasons(plan) == {"choose.down": "MoE router", "choose.up": "MoE router"}


def test_a_router_is_found_by_its_own_name():
    """As altup.modality_router of Gemma 3n, which is no router of experts."""
    block = nn.ModuleDict({"up": nn.Linear(8, 8), "modality_router": nn.Linear(8, 4), "down": nn.Linear(8, 8)})
    plan = make_plan(nn.Sequential(block), "magnitude")
    assert reasons(plan) == {"0.modality_router": "router"}


def test_an_lm_head_of_a_plain_module_is_an_output_head():
    plan = make_plan(nn.ModuleDict({"mlp": GatedMLP(), "lm_head": nn.Linear(16, 20)}), "magnitude", include="*")
    assert reasons(plan) == {"lm_head": "output head"}


def test_weights_that_a_parent_reads_without_calling_their_module_are_named_as_such():
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20, state_size=4, time_step_rank=4)
    with torch.device("meta"):
        plan = make_plan(MambaForCausalLM(config), "wanda")
    mixer = "backbone.layers.0.mixer"
    assert reasons(plan)[f"{mixer}.dt_proj"] == "MambaMixer reads the weight without calling the module"
    assert f"{mixer}.in_proj" in names(plan)


def test_a_pattern_that_does_not_fit_a_layer_leaves_it_dense_with_the_reason():
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 8), nn.Conv2d(6, 8, 2), nn.Conv2d(8, 8, 2, groups=4))
    plan = make_plan(model, "magnitude")
    assert names(plan) == ["1"]
    assert reasons(plan) == {
        "0": "10 input channels are not a multiple of 4, so 2:4 does not fit",
        "2": "6 input channels are not a multiple of 4, so 2:4 does not fit",  # though 6 x 2 x 2 is one
        "3": "2 input channels are not a multiple of 4, so 2:4 does not fit",
    }
    assert names(make_plan(model, "magnitude", pattern="50%")) == ["0", "1", "2", "3"]


def test_hardware_only_skips_shapes_that_asp_does_not_take():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 12), nn.Linear(24, 8))
    plan = make_plan(model, "magnitude", hardware_only=True)
    assert names(plan) == ["0"]
    message = "shape is not a multiple of 8 x 16 (hardware_only)"
    assert reasons(plan) == {"1": message, "2": message}
    assert names(make_plan(model, "magnitude")) == ["0", "1", "2"]


# include, exclude, rules ----------------------------------------------------------------------------------------------


def test_include_prunes_only_what_it_matches():
    plan = make_plan(untied(), "magnitude", include=["*.down_proj", "model.layers.0.self_attn.?_proj"])
    assert names(plan) == [*ALL[:4], ALL[6], ALL[13]]
    assert reasons(plan)["model.layers.0.mlp.up_proj"] == "not in include"


def test_exclude_wins_over_include_and_rules():
    options = {"include": "model.layers.0.*", "rules": {"*.q_proj": {"pattern": "1:4"}}, "exclude": "*.q_proj"}
    plan = make_plan(untied(), "magnitude", options)
    assert names(plan) == ALL[1:7]
    assert reasons(plan)[ALL[0]] == "excluded by '*.q_proj'"


def test_a_glob_never_overrides_the_default_exclusions():
    for options in ({"include": "*"}, {"rules": {"*": {}}}, {"rules": {"nn.Linear": {"*": {}}}}):
        plan = make_plan(untied(), "magnitude", options)
        assert names(plan) == ALL
        assert reasons(plan)["lm_head"] == "output head"


@pytest.mark.parametrize("options", [{"include": ["*", "lm_head"]}, {"rules": {"lm_head": {}}}])
def test_a_full_name_overrides_the_default_exclusions(options):
    assert names(make_plan(untied(), "magnitude", options)) == [*ALL, "lm_head"]


def test_an_included_layer_may_lie_outside_of_the_blocks():
    model = nn.ModuleDict({"stem": nn.Linear(8, 8), "layers": nn.ModuleList([GatedMLP(), GatedMLP()])})
    assert names(make_plan(model, "magnitude", include="st*")) == ["stem"]
    plan = make_plan(model, "magnitude", rules={"st*": {"pattern": "1:4"}})
    assert reasons(plan)["stem"].startswith("outside the model's blocks")
    assert "stem" in names(make_plan(model, "magnitude", rules={"stem": {"pattern": "1:4"}}))


def test_of_several_rules_the_first_match_wins():
    rules = {
        "model.layers.0.*.q_proj": None,
        "*.q_proj": {"pattern": "1:4"},
        "model.layers.1.*": {"pattern": "50%"},
        "*": {},
    }
    plan = make_plan(untied(), "magnitude", rules=rules)
    patterns = {item.name: str(item.pattern) for item in plan.layers}
    assert reasons(plan)[ALL[0]] == "left dense by rule 'model.layers.0.*.q_proj'"
    assert patterns[ALL[7]] == "1:4"
    assert patterns[ALL[8]] == "50% per matrix"
    assert patterns[ALL[1]] == "2:4"
    turned = make_plan(untied(), "magnitude", rules=dict(reversed(rules.items())))
    assert {str(item.pattern) for item in turned.layers} == {"2:4"}


def test_a_rule_gives_a_layer_its_own_method_and_options():
    rules = {
        "*.q_proj": {"method": "wanda", "pattern": "50%"},
        "*.k_proj": {"method": "ria", "alpha": 1.0},
        "*.v_proj": {"damping": 0.2},
        "*.o_proj": {"method": "sparsegpt"},
    }
    plan = make_plan(untied(), "sparsegpt", damping=0.05, rules=rules)
    found = {item.name.rpartition(".")[2]: item for item in plan.layers}
    assert (found["q_proj"].method.name, found["q_proj"].pattern) == ("wanda", Unstructured(0.5, "row"))
    assert found["q_proj"].options == {}
    assert (found["k_proj"].method.name, found["k_proj"].options) == ("ria", {"alpha": 1.0})
    assert found["v_proj"].options == {"damping": 0.2, "block_size": 128}
    assert found["o_proj"].options == {"damping": 0.05, "block_size": 128}
    assert found["up_proj"].options == {"damping": 0.05, "block_size": 128}
    assert found["up_proj"].pattern == NM(2, 4)


def test_class_rules_apply_to_their_class_only():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 2), nn.Linear(8, 8), Conv1D(8, 8))
    plan = make_plan(model, [("sparse_magnitude", {"nn.Linear": {"*": {}, "2": None}})])
    assert names(plan) == ["0", "1", "3"]
    assert reasons(plan) == {"2": "left dense by rule '2'"}
    plan = make_plan(model, [("sparse_magnitude", {"nn.Linear": {"0": {}}, "nn.Conv1d": None})])
    assert names(plan) == ["0", "3"]


def test_modelopt_s_default_class_rules_fit_any_model():
    rules = {"nn.Linear": {"*": {}, "*lm_head*": None}, "nn.Conv2d": {"*": {}, "*lm_head*": None}}
    for model in (untied(), tiny_llama(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))):
        assert names(make_plan(model, [("sparsegpt", rules)])) == names(make_plan(model, "sparsegpt"))


@pytest.mark.parametrize(("method", "scope"), [("magnitude", "matrix"), ("wanda", "row"), ("sparsegpt", "matrix")])
def test_an_open_scope_is_the_method_s_own(method, scope):
    plan = make_plan(untied(), method, pattern="50%", rules={"*.q_proj": {"pattern": "40% per row"}})
    assert {item.pattern for item in plan.layers} == {Unstructured(0.5, scope), Unstructured(0.4, "row")}


# errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"include": ["*", "*.q_prj"]},
        {"exclude": "*.q_prj"},
        {"rules": {"*.q_prj": None}},
        {"rules": {"*": {}, "*.q_prj": {}}},
    ],
)
def test_a_glob_that_matches_nothing_is_an_error_with_names_that_are_near(options):
    message = re.escape("'*.q_prj' matches no prunable layer of this LlamaForCausalLM; names look like ")
    with pytest.raises(ValueError, match=f"{message}.*q_proj"):
        make_plan(untied(), "magnitude", options)


@pytest.mark.parametrize("options", [{"exclude": "lm_head"}, {"exclude": "*embed*"}, {"rules": {"*lm_head*": None}}])
def test_leaving_a_weight_dense_that_is_never_pruned_is_no_error(options):
    """``exclude="lm_head"`` works whether the head is tied or not."""
    assert names(make_plan(tiny_llama(), "magnitude", options)) == ALL


@pytest.mark.parametrize("options", [{"include": ["*", "lm_head"]}, {"rules": {"lm_head": {}}}])
def test_asking_for_a_weight_that_is_never_pruned_is_an_error_that_says_why(options):
    message = "'lm_head' matches no prunable layer .*, only weights that stay dense: tied: also held by lm_head"
    with pytest.raises(ValueError, match=message):
        make_plan(tiny_llama(), "magnitude", options)


def test_the_name_of_a_block_is_not_the_name_of_its_layers():
    """A glob must not silently exclude nothing."""
    with pytest.raises(ValueError, match=r"'model.layers.0' matches no prunable layer"):
        make_plan(untied(), "magnitude", exclude="model.layers.0")


def test_a_pattern_that_fits_nothing_is_an_error():
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(6, 6))
    with pytest.raises(ValueError, match=r"nothing to prune in this Sequential: 10 input channels are not .*; 6 input"):
        make_plan(model, "magnitude")


def test_a_model_without_weight_matrices_is_an_error():
    with pytest.raises(ValueError, match="nothing to prune in this LayerNorm: it holds no weight matrices"):
        make_plan(nn.LayerNorm(4), "magnitude")


@pytest.mark.parametrize("options", [{"include": ["0", "1"]}, {"rules": {"0": {}}}])
def test_a_pattern_that_does_not_fit_a_layer_named_in_full_is_an_error(options):
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 8))
    message = "layer '0', which you name: 10 input channels are not a multiple of 4, .* choose another pattern or leave"
    with pytest.raises(ValueError, match=message):
        make_plan(model, "magnitude", options)
    with pytest.raises(ValueError, match=r"layer '0', which you name: shape is not a multiple of 8 x 16"):
        make_plan(model, "magnitude", options, pattern="1:2", hardware_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 5}, r"sparsegpt: damping=5: must be a number in \(0, 1\]"),
        ({"block_size": 0}, "sparsegpt: block_size=0: must be a positive whole number"),
        ({"rules": {"*.q_proj": {"damping": -1}}}, "sparsegpt: damping=-1"),
        ({"rules": {"*.q_proj": {"method": "ria", "alpha": 2}}}, "ria: alpha=2"),
        (
            {"rules": {"*.q_proj": {"dampening": 0.1}}},
            r"rule '\*.q_proj' with method 'sparsegpt': option 'dampening' is not known, did you mean 'damping'\?; "
            "allowed are block_size, choices, damping, method, pattern",
        ),
        (
            {"rules": {"*.q_proj": {"method": "wanda", "damping": 0.1}}},
            r"rule '\*.q_proj' with method 'wanda': option 'damping' is not known; allowed are choices, method",
        ),
        ({"rules": {"*.q_proj": {"method": "wandas"}}}, "method 'wandas' is not known, did you mean 'wanda'"),
        ({"rules": {"*.q_proj": {"pattern": "2/4"}}}, "pattern '2/4' is not known"),
    ],
)
def test_bad_options_of_a_method_or_a_rule_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(untied(), "sparsegpt", options)


def test_weights_that_are_no_floats_are_refused_by_name():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"layer '1' holds codes, quantized: load the model dequantized"):
        make_plan(model, "magnitude")
    assert names(make_plan(model, "magnitude", exclude="1")) == ["0"]


# a plan is only a plan ------------------------------------------------------------------------------------------------


def test_a_model_on_meta_is_planned_like_a_real_one():
    with torch.device("meta"):
        on_meta = untied()
    assert on_meta.lm_head.weight.is_meta
    assert make_plan(on_meta, "sparsegpt").as_dict() == make_plan(untied(), "sparsegpt").as_dict()


def test_planning_changes_nothing_in_the_model():
    model = tiny_llama().train()
    model.model.layers[0].eval()
    parameters = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    types = {name: type(module) for name, module in model.named_modules()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    config = model.config.to_dict()
    make_plan(model, "sparsegpt", data_loader=iter([]), rules={"*.q_proj": None})
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert set(model.state_dict()) == set(values)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert model.config.to_dict() == config


def test_planning_takes_no_batch_from_the_loader():
    loader = iter([torch.zeros(1, 4, dtype=torch.long)])
    make_plan(tiny_llama(), "sparsegpt", data_loader=loader)
    assert len(list(loader)) == 1


def test_sparsify_does_what_the_plan_says():
    options = {"exclude": "*.q_proj", "rules": {"*.k_proj": None, "*.v_proj": {"pattern": "1:4"}, "*.up_proj": {}}}
    model = tiny_llama()
    plan = make_plan(model, "magnitude", options)
    mts.sparsify(model, "magnitude", options, progress=False)
    masks = dict(mts.named_masks(model))
    assert list(masks) == [item.layer.parameter_name for item in plan.layers]
    for item in plan.layers:
        assert item.pattern.count_kept_wrong(item.layer.matrix(masks[item.layer.parameter_name])) == 0


def test_a_method_of_the_user_stands_in_the_plan_with_its_options():
    class First(mts.Method):
        name = "first"
        options = {"strength": 2}
        scope = "row"

        def check(self, options):
            if options["strength"] < 0:
                raise ValueError("strength must not be negative")

        def solve(self, weight, state, pattern, options) -> Solution:
            raise AssertionError("a plan solves nothing")

    plan = make_plan(tiny_llama(), First(), pattern="50%", strength=3)
    assert {(item.method.name, item.pattern, item.options["strength"]) for item in plan.layers} == {
        ("first", Unstructured(0.5, "row"), 3)
    }
    with pytest.raises(ValueError, match="strength must not be negative"):
        make_plan(tiny_llama(), First(), strength=-1)


def test_every_registered_method_can_be_planned_for_an_encoder_decoder():
    config = T5Config(num_layers=1, num_decoder_layers=1, d_model=16, d_ff=16, d_kv=8, num_heads=2, vocab_size=20)
    with torch.device("meta"):
        model = T5(config)
    attention = [f"SelfAttention.{letter}" for letter in "qkvo"]
    cross_attention = [f"EncDecAttention.{letter}" for letter in "qkvo"]
    mlp = ["DenseReluDense.wi", "DenseReluDense.wo"]
    stacks = {"encoder": [attention, mlp], "decoder": [attention, cross_attention, mlp]}
    expected = [
        f"{stack}.block.0.layer.{i}.{linear}"
        for stack, parts in stacks.items()
        for i, linears in enumerate(parts)
        for linear in linears
    ]
    for method in METHODS:
        assert names(make_plan(model, method)) == expected


# adapters of fine-tuning ----------------------------------------------------------------------------------------------


def peft_model(kind: str, **options: Any) -> Any:
    import peft

    return peft.get_peft_model(tiny_llama(), getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **options))


# peft 0.21 asks transformers 5.23 by an old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("LoraConfig", {"r": 4}), ("LoraConfig", {"r": 4, "use_dora": True}), ("LoHaConfig", {}), ("OFTConfig", {})],
)
def test_adapters_stay_dense(kind, options):
    """Whatever PEFT puts beside a layer, by its types; the layers that it wraps are pruned as any other."""
    model = peft_model(kind, **options)
    plan = mts.make_plan(model, "magnitude")
    wrapped = [layer.name.replace(".base_layer", "").removeprefix("base_model.model.") for layer in plan.layers]
    assert wrapped == [layer.name for layer in mts.make_plan(tiny_llama(), "magnitude").layers]
    beside = [name for name, p in model.named_parameters() if p.requires_grad and p.dim() >= 2]
    assert len(beside) >= 4
    for name in beside:
        assert reasons(plan)[name.removesuffix(".weight")] == "adapter beside the layer (PEFT, LoRA)"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_not_touched_by_a_run_and_may_be_named_in_full():
    model = peft_model("LoraConfig", r=4)
    before = {name: p.clone() for name, p in model.named_parameters() if "lora" in name}
    mts.sparsify(model, "sparsegpt", data_loader=token_batches(), progress=False)
    assert len(dict(mts.named_masks(model))) == 14
    assert all(torch.equal(model.get_parameter(name), p) for name, p in before.items())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert [layer.name for layer in mts.make_plan(model, "magnitude", include=name).layers] == [name]


def test_adapters_of_other_libraries_are_known_by_name():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lora_a, self.lora_b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)

    plan = mts.make_plan(nn.Sequential(Adapted(), Adapted()), "magnitude")
    assert [layer.name for layer in plan.layers] == ["0.linear", "1.linear"]
    assert {weight.reason for weight in plan.skipped} == {"adapter beside the layer (PEFT, LoRA)"}


# weights that are computed from other parameters, and weights that are shared -----------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "unwrap", "function"),
    [
        (
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
            lambda layer: prune.remove(layer, "weight"),
            "prune.remove",
        ),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm, "remove_weight_norm"),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm, "remove_spectral_norm"),
        (
            nn.utils.parametrizations.weight_norm,
            lambda layer: parametrize.remove_parametrizations(layer, "weight"),
            "parametrize.remove_parametrizations",
        ),
        (
            nn.utils.parametrizations.spectral_norm,
            lambda layer: parametrize.remove_parametrizations(layer, "weight"),
            "parametrize.remove_parametrizations",
        ),
    ],
)
def test_a_weight_that_is_computed_says_what_to_call_first(wrap, unwrap, function):
    """And what it says to call is what helps."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrap(model[1])
    plan = make_plan(model, "magnitude")
    assert names(plan) == ["0"]
    assert plan.skipped
    for reason in reasons(plan).values():
        assert reason == f"a weight is computed from it: call torch.nn.utils.{function} first"
    unwrap(model[1])
    assert names(make_plan(model, "magnitude")) == ["0", "1"]


def test_tied_layers_say_who_shares_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[3].weight = model[0].weight
    plan = make_plan(model, "magnitude")
    assert names(plan) == ["0", "2"]
    assert plan.notes == ("0 is tied: also held by 1, 3",)
    assert "0 is tied: also held by 1, 3" in str(plan)
    llama = tiny_llama()
    llama.extra = nn.Embedding(97, 32)
    llama.extra.weight = llama.lm_head.weight
    assert reasons(make_plan(llama, "magnitude"))["model.embed_tokens"] == "tied: also held by lm_head, extra"


def test_the_report_holds_what_the_plan_skips(tmp_path):
    """The same values, in memory and from a folder."""
    model = tiny_llama()
    plan = make_plan(model, "magnitude", exclude="*.q_proj")
    mts.sparsify(model, "magnitude", exclude="*.q_proj")
    assert mts.report(model).skipped == plan.skipped
    mts.save(model, tmp_path / "sparse")
    assert mts.report(tmp_path / "sparse").skipped == plan.skipped
    assert mts.report(model).as_dict()["skipped"] == plan.as_dict()["skipped"]
    assert json.loads(mts.report(model).to_json()) == mts.report(model).as_dict()


# what is no model, and weights that no method takes -------------------------------------------------------------------


CALLS = {
    "make_plan": lambda model, folder: make_plan(model, "magnitude"),
    "sparsify": lambda model, folder: mts.sparsify(model, "magnitude"),
    "export": lambda model, folder: mts.export(model),
    "save": lambda model, folder: mts.save(model, folder),
    "restore": lambda model, folder: mts.restore(model, folder),
    "verify": lambda model, folder: mts.verify(model, "2:4"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model_is_said_to_be_none(call, tmp_path):
    inner = nn.Sequential(nn.Linear(8, 8))
    wrong = [
        ("gpt2", TypeError, "the model is a str: give an nn.Module, such as from_pretrained"),
        (Path("gpt2"), TypeError, "the model is a PosixPath: give an nn.Module"),
        (nn.Linear, TypeError, "the model is a type: give an nn.Module"),
        (torch.jit.script(inner), ValueError, "is a ScriptModule, .* take the module that it was made from"),
        (nn.Sequential(torch.jit.trace(inner, torch.ones(1, 8))), ValueError, "module '0' is a ScriptModule"),
        (nn.Sequential(nn.LazyLinear(8)), ValueError, "module '0' is a LazyLinear without shapes yet"),
    ]
    for model, error, match in wrong[3:] if call == "verify" else wrong:  # verify takes names of folders
        with pytest.raises(error, match=match):
            CALLS[call](model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_complex_weights_stay_dense_and_are_not_called_quantized():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8))
    plan = make_plan(model, "magnitude")
    assert names(plan) == ["1"]
    assert reasons(plan) == {"0": "complex weights: methods prune real ones"}
    with pytest.raises(ValueError, match=r"'0' matches no prunable layer .* complex weights"):
        make_plan(model, "magnitude", include="0")


def test_modelopts_signature():
    """``sparsify(model, mode, config=None)``, with ``mode`` as a keyword: the method, everywhere that takes one."""
    config = {"data_loader": token_batches(2), "collect_func": lambda batch: batch}
    for mode in ("sparsegpt", "sparse_magnitude", [("sparse_magnitude", {"nn.Linear": {"*": {}, "*q_proj*": None}})]):
        found = {name: mts.sparsify(tiny_llama(), progress=False, config=dict(config), **{name: mode}) for name in AS}
        one, other = (dict(mts.named_masks(model)) for model in found.values())
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert str(mts.make_plan(tiny_llama(), mode="magnitude")) == str(mts.make_plan(tiny_llama(), "magnitude"))
    with pytest.raises(ValueError, match="method='wanda' and mode='sparsegpt' mean the same; give one"):
        mts.make_plan(tiny_llama(), "wanda", mode="sparsegpt")


AS = ("method", "mode")
