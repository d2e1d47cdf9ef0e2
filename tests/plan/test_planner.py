"""The plan: which layer gets what, why the rest stays dense, and that it promises what is then done."""

import json
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts
from tests.helpers import Snapshot, assert_same_masks, refused, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.expert_models import MODELS, build

pytestmark = pytest.mark.core

LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ALL = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]


def names(plan: mts.Plan) -> list[str]:
    return [item.name for item in plan.layers]


def reasons(plan: mts.Plan) -> dict[str, str]:
    return {item.name: item.reason for item in plan.skipped}


def untied(**changes):
    return tiny_llama(tie_word_embeddings=False, **changes)


# what is pruned by default --------------------------------------------------------------------------------------------


def renamed() -> nn.Module:
    """Its head is found by its role, whatever its name."""
    model = untied()
    model.vocabulary = model.lm_head
    del model.lm_head
    model.get_output_embeddings = lambda: model.vocabulary
    return model


def with_a_twin_of_the_head() -> nn.Module:
    model = untied()
    model.model.layers[0].extra = nn.Linear(32, 97, bias=False)
    model.model.layers[0].extra.weight = model.lm_head.weight
    return model


def linears(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def two() -> nn.Sequential:
    return linears((8, 8), (8, 8))


def with_lists() -> nn.Module:
    """As in the encoder of Mimi, and in the convolutional stem of wav2vec2."""
    mixed = nn.ModuleList([nn.Linear(8, 8), two(), nn.ELU(), nn.Linear(8, 8)])
    return nn.ModuleDict({"mixed": mixed, "stem": nn.ModuleList(two()), "layers": nn.ModuleList([two(), two()])})


class Mixture(nn.Module):
    """Experts as a list of modules, with a router that is a plain Linear."""

    def __init__(self):
        super().__init__()
        self.gate, self.shared_expert_gate = nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(linears((16, 16), (16, 16)) for _ in range(3))


class GatedMLP(nn.Module):
    """A gate without experts beside it is an ordinary layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)


class TopKRouter(nn.Sequential):
    pass


def routed_by_class() -> nn.Module:
    return nn.Sequential(TopKRouter(*linears((16, 8), (8, 4))), GatedMLP())


def adapted() -> nn.Module:
    """Adapters are known by their names."""
    sizes = {"linear": (8, 8), "lora_a": (8, 4), "lora_b": (4, 8)}
    return nn.Sequential(*(nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(2)))


def with_a_named_head() -> nn.Module:
    return nn.ModuleDict({"mlp": GatedMLP(), "lm_head": nn.Linear(16, 20)})


def three() -> nn.Sequential:
    return linears((16, 8), (16, 12), (24, 8))


def with_a_stem() -> nn.Module:
    return nn.ModuleDict({"stem": nn.Linear(8, 8), "layers": nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), two()])})


def of_all_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 2), nn.Linear(8, 8), Conv1D(8, 8))


def depthwise() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 8, 1, groups=8), nn.Conv1d(8, 8, 3, groups=8), nn.Conv1d(8, 8, 1))


def misfits() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 8), nn.Conv2d(6, 8, 2), nn.Conv2d(8, 8, 2, groups=4))


def with_a_router() -> nn.Module:
    """As altup.modality_router of Gemma 3n, which is no router of experts."""
    return nn.Sequential(nn.ModuleDict({"up": nn.Linear(8, 8), "modality_router": nn.Linear(8, 4)}))


def with_codes(dtype: torch.dtype = torch.int8) -> nn.Module:
    model = two()
    model[1].weight = nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)
    return model


def with_complex() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8))


def modelopts(rules: dict) -> dict:
    return {"method": [("sparse_magnitude", rules)]}


EMBEDDING, HEAD = {"model.embed_tokens": "embedding"}, {"lm_head": "output head"}
LLAMA, TIED = EMBEDDING | HEAD, {"model.embed_tokens": "tied: also held by lm_head"}
OUTSIDE = "outside the model's blocks (name it in include to prune it)"
BESIDE = "adapter beside the layer (PEFT, LoRA)"
HARDWARE = "shape is not a multiple of 8 x 16 (hardware_only)"
FIT = "{} input channels are not a multiple of 4, so 2:4 does not fit"
LEFT_OUT = "not in include"
DEFAULT_RULES = {"nn.Linear": {"*": {}, "*lm_head*": None}, "nn.Conv2d": {"*": {}, "*lm_head*": None}}
NONE = "{} leaves none of 1 weights"
NO_STACKS = ["mixed.0", "mixed.1.0", "mixed.1.1", "mixed.3", "stem.0", "stem.1"]
SHARES = ["*.down_proj", "model.layers.0.self_attn.?_proj"]
NO_SHARES = ["lm_head"] + [name for name in ALL if "down" not in name and not name.startswith("model.layers.0.self")]
FIRST = {"include": "model.layers.0.*", "rules": {"*.q_proj": {"pattern": "1:4"}}, "exclude": "*.q_proj"}
NOT_FIRST = dict.fromkeys(("lm_head", *ALL[7:]), LEFT_OUT) | dict.fromkeys(ALL[::7], "excluded by '*.q_proj'")
ROUTERS = {"0.gate": "MoE router", "0.shared_expert_gate": "MoE router"}
MIXTRAL = LLAMA | {f"model.layers.{i}.mlp.gate": "MoE router" for i in range(2)}
BIASES = [f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias" for side in ("encoder", "decoder")]
T5 = dict.fromkeys(BIASES, "embedding")
T5["shared"] = "tied: also held by encoder.embed_tokens, decoder.embed_tokens, lm_head"
OF_MAMBA = {"num_hidden_layers": 1, "state_size": 4, "time_step_rank": 4, "tie_word_embeddings": False}
MAMBA = {
    "backbone.embeddings": "embedding",
    "backbone.layers.0.mixer.A_log": "no adapter for MambaMixer.A_log",
    "backbone.layers.0.mixer.conv1d": FIT.format(1),
    "backbone.layers.0.mixer.dt_proj": "MambaMixer reads the weight without calling the module",
    "lm_head": "output head",
}
ADAPTERS = {f"{i}.lora_{letter}": BESIDE for i in range(2) for letter in "ab"}
NO_STEM = dict.fromkeys(("layers.0.0", "layers.1.0", "layers.1.1"), LEFT_OUT)
# case -> (model, options, why weights stay dense); all others are pruned
PLANS = {
    "all but the head": (untied, {}, LLAMA),
    "a tied head": (tiny_llama, {}, TIED),
    "a head by its role": (renamed, {"include": "*"}, EMBEDDING | {"vocabulary": "output head"}),
    "a twin of the head": (with_a_twin_of_the_head, {}, EMBEDDING | {"model.layers.0.extra": "output head"}),
    "outside of blocks": (with_a_stem, {}, {"stem": OUTSIDE}),
    "lists that are no stacks": (with_lists, {}, dict.fromkeys(NO_STACKS, OUTSIDE)),
    "named lists": (with_lists, {"include": ["mixed.*", "stem.*", "layers.*"]}, {}),
    "a router by the experts beside it": (lambda: nn.Sequential(Mixture(), GatedMLP()), {}, ROUTERS),
    "a router by its class": (routed_by_class, {}, {"0.0": "MoE router", "0.1": "MoE router"}),
    "a router by its name": (with_a_router, {}, {"0.modality_router": "router"}),
    "a head by its name": (with_a_named_head, {"include": "*"}, HEAD),
    # though 6 x 2 x 2 is a multiple
    "no fit": (misfits, {}, {"0": FIT.format(10), "2": FIT.format(6), "3": FIT.format(2)}),
    "fits": (misfits, {"pattern": "50%"}, {}),
    "would leave nothing": (depthwise, {"pattern": "60%"}, {"0": NONE.format("60% per matrix")}),
    "would leave nothing of a row": (depthwise, {"pattern": "60% per row"}, {"0": NONE.format("60% per row")}),
    "hardware": (three, {"hardware_only": True}, {"1": HARDWARE, "2": HARDWARE}),
    "any hardware": (three, {}, {}),
    "include": (untied, {"include": SHARES}, EMBEDDING | dict.fromkeys(NO_SHARES, LEFT_OUT)),
    "exclude before include and rules": (untied, FIRST, EMBEDDING | NOT_FIRST),
    "a glob, include": (untied, {"include": "*"}, LLAMA),
    "a glob, rules": (untied, {"rules": {"*": {}}}, LLAMA),
    "a glob, class rules": (untied, {"rules": {"nn.Linear": {"*": {}}}}, LLAMA),
    "a name, include": (untied, {"include": ["*", "lm_head"]}, EMBEDDING),
    "a name, rules": (untied, {"rules": {"lm_head": {}}}, EMBEDDING),
    "included stem": (with_a_stem, {"include": "st*"}, NO_STEM),
    "a stem by a glob": (with_a_stem, {"rules": {"st*": {}}}, {"stem": OUTSIDE}),
    "a stem by name": (with_a_stem, {"rules": {"stem": {}}}, {}),
    "left dense already, exclude": (tiny_llama, {"exclude": "lm_head"}, TIED),
    "left dense already, a glob": (tiny_llama, {"exclude": "*embed*"}, TIED),
    "left dense already, rules": (tiny_llama, {"rules": {"*lm_head*": None}}, TIED),
    "rules of a class": (of_all_kinds, modelopts({"nn.Linear": {"*": {}, "2": None}}), {"2": "left dense by rule '2'"}),
    "ModelOpt's default rules": (two, modelopts(DEFAULT_RULES), {}),
    "ModelOpt's default rules, a tied head": (tiny_llama, modelopts(DEFAULT_RULES), TIED),
    "adapters": (adapted, {}, ADAPTERS),
    "fused experts and their routers": (MODELS["mixtral"], {}, MIXTRAL),
    "encoder and decoder": (ARCHITECTURES["t5"].build, {}, T5),
    "weights that a parent reads": (build("MambaForCausalLM", "MambaConfig", **OF_MAMBA), {"method": "wanda"}, MAMBA),
    "codes": (with_codes, {"exclude": "1"}, {"1": "excluded by '1'"}),
    "complex": (with_complex, {}, {"0": "complex weights: methods prune real ones"}),
}


@pytest.mark.parametrize(("width", "notes"), [(10, []), (11, ["26% of the weights that can be pruned lie outside of"])])
def test_a_note_says_that_much_lies_outside_of_the_blocks(width, notes):
    """64 weights in each of four layers of the blocks, and eight times the width in the stem; an embedding is never
    pruned, and does not count."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    model = nn.ModuleDict({"layers": blocks, "stem": nn.Linear(8, width), "embed": nn.Embedding(100, 8)})
    found = mts.make_plan(model, "magnitude").notes
    assert [note.startswith(start) for note, start in zip(found, notes, strict=True)] == [True] * len(notes)
    assert not mts.make_plan(model, "magnitude", include="*").notes


@pytest.mark.parametrize("case", PLANS)
def test_what_is_pruned_and_why_the_rest_stays_dense(case):
    build, options, dense = PLANS[case]
    plan = mts.make_plan(model := build(), **{"method": "magnitude", **options})
    assert reasons(plan) == dense
    matrices = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1]
    assert names(plan) == [name for name in matrices if name not in dense]


def test_the_head_of_a_model_without_a_stack_stays_dense():
    """transformers: all that lies outside of the base model. Other models: the last layer, by the name of its child."""
    config = hf.MobileNetV1Config(num_channels=3, image_size=32, depth_multiplier=0.25, min_depth=8)
    plan = mts.make_plan(hf.MobileNetV1ForImageClassification(config), "magnitude", pattern=0.5)
    assert plan.stacks[0].names == ("",)
    assert reasons(plan) == {"classifier": "output head"}
    assert mts.make_plan(hf.MobileNetV1ForImageClassification(config), "magnitude", include="classifier").layers

    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    body, head = nn.Sequential(layers[0]), nn.Sequential(nn.Dropout(), *layers[1:])
    plain = nn.ModuleDict({"features": body, "classifier": head})
    assert reasons(mts.make_plan(plain, "magnitude")) == {"classifier.2": "output head"}
    assert not reasons(mts.make_plan(nn.ModuleDict({"features": body, "output": head}), "magnitude"))
    assert not reasons(mts.make_plan(nn.ModuleDict({"fc": layers[0]}), "magnitude"))  # all there is


# include, exclude, rules ----------------------------------------------------------------------------------------------


def test_of_several_rules_the_first_match_wins():
    rules = {"model.layers.0.*.q_proj": None, "*.q_proj": {"pattern": "1:4"}}
    rules |= {"model.layers.1.*": {"pattern": "50%"}, "*": {}}
    plan = mts.make_plan(untied(), "magnitude", rules=rules)
    assert reasons(plan)[ALL[0]] == "left dense by rule 'model.layers.0.*.q_proj'"
    expected = dict.fromkeys(ALL[1:7], "2:4") | {ALL[7]: "1:4"} | dict.fromkeys(ALL[8:], "50% per matrix")
    assert {item.name: str(item.pattern) for item in plan.layers} == expected
    turned = mts.make_plan(untied(), "magnitude", rules=dict(reversed(rules.items())))
    assert {str(item.pattern) for item in turned.layers} == {"2:4"}


def test_a_rule_gives_a_layer_its_own_method_and_options():
    """A scope that is left open is the method's own."""
    rules = {"*.q_proj": {"method": "wanda", "pattern": "50%"}}
    rules |= {"*.k_proj": {"method": "ria", "alpha": 1.0, "pattern": "40% per row"}}
    rules |= {"*.v_proj": {"damping": 0.2}, "*.o_proj": {"method": "sparsegpt"}}
    plan = mts.make_plan(untied(), "sparsegpt", damping=0.05, rules=rules)
    found = {item.name.rpartition(".")[2]: (item.method.name, item.pattern, item.options) for item in plan.layers}
    assert found["q_proj"] == ("wanda", mts.Unstructured(0.5, "row"), {})
    assert found["k_proj"] == ("ria", mts.Unstructured(0.4, "row"), {"alpha": 1.0})
    assert found["v_proj"] == ("sparsegpt", mts.NM(2, 4), {"damping": 0.2, "block_size": 128})
    assert found["o_proj"] == found["up_proj"] == ("sparsegpt", mts.NM(2, 4), {"damping": 0.05, "block_size": 128})


# errors ---------------------------------------------------------------------------------------------------------------


class Needing(mts.Method):
    name = "own"
    needs = "everything"

    def solve(self, weight, state, pattern, options):
        raise NotImplementedError


NO_MATCH = r"'\*.q_prj' matches no prunable layer of this LlamaForCausalLM; names look like .*q_proj"
TIED_HEAD = "'lm_head' matches no prunable layer .*, only weights that stay dense: tied: also held by lm_head"
NO_FIT = "layer '0', which you name: 10 input channels are not a multiple of 4, .* choose another pattern or leave"
NOTHING_FITS = "nothing to prune in this Sequential: 10 input channels are not .*; 6 input"
ODD_SHAPE = {"include": ["0"], "pattern": "1:2", "hardware_only": True}
IN_RULE = r"rule '\*.q_proj' with method '{}': option '{}' is not known{}; allowed are {}"
UNKNOWN = IN_RULE.format("sparsegpt", "dampening", r", did you mean 'damping'\?", "block_size, choices, damping, me")
OF_OTHERS = IN_RULE.format("wanda", "damping", "", "choices, method")
CODES = "layer '1' holds codes, quantized: load the model dequantized"
# (model, method, options, words of the error)
REFUSED = [
    (untied, "sparsgpt", {}, "'sparsgpt' is not known, did you mean 'sparsegpt'.; allowed are magnitude, wanda, ria"),
    (untied, "xyz", {}, "method 'xyz' is not known; allowed are magnitude, wanda, ria"),
    (untied, 2, {}, r"method is a int: give a name \(magnitude, .*\) or a Method object"),
    (untied, Needing(), {}, "method 'own': needs='everything'; allowed are nothing, square_sums, gram"),
    # its own Linear layers have no adapter, and its lm_head holds a plain one
    (build("IBertForMaskedLM", "IBertConfig"), "magnitude", {}, "nothing to prune in this IBert.*: .*output head"),
    (untied, "magnitude", {"include": ["*", "*.q_prj"]}, NO_MATCH),
    (untied, "magnitude", {"exclude": "*.q_prj"}, NO_MATCH),
    (untied, "magnitude", {"rules": {"*.q_prj": None}}, NO_MATCH),
    (untied, "magnitude", {"exclude": "model.layers.0"}, "'model.layers.0' matches no prunable layer"),
    (tiny_llama, "magnitude", {"include": ["*", "lm_head"]}, TIED_HEAD),
    (tiny_llama, "magnitude", {"rules": {"lm_head": {}}}, TIED_HEAD),
    (lambda: linears((10, 8), (6, 6)), "magnitude", {}, NOTHING_FITS),
    (lambda: nn.LayerNorm(4), "magnitude", {}, "nothing to prune in this LayerNorm: it holds no weight matrices"),
    (misfits, "magnitude", {"include": ["0", "1"]}, NO_FIT),
    (misfits, "magnitude", {"rules": {"0": {}}}, NO_FIT),
    (misfits, "magnitude", ODD_SHAPE, "layer '0', which you name: shape is not a multiple of 8 x 16"),
    (untied, "sparsegpt", {"damping": 5}, r"sparsegpt: damping=5: must be a number in \(0, 1\]"),
    (untied, "sparsegpt", {"rules": {"*.q_proj": {"damping": -1}}}, "sparsegpt: damping=-1"),
    (untied, "sparsegpt", {"rules": {"*.q_proj": {"dampening": 0.1}}}, UNKNOWN),
    (untied, "sparsegpt", {"rules": {"*.q_proj": {"method": "wanda", "damping": 0.1}}}, OF_OTHERS),
    (untied, "sparsegpt", {"rules": {"*q_proj": {"method": "wandas"}}}, "method 'wandas' .*, did you mean 'wanda'"),
    (untied, "sparsegpt", {"rules": {"*.q_proj": {"pattern": "2/4"}}}, "pattern '2/4' is not known"),
    *((partial(with_codes, dtype), "magnitude", {}, CODES) for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)),
    (with_complex, "magnitude", {"include": "0"}, r"'0' matches no prunable layer .* complex weights"),
    (untied, "magnitude", {"quality": "best"}, "quality='best' is for methods that learn from calibration data"),
    (untied, None, {"quality": "bets"}, "quality='bets'.*did you mean 'best'"),
    (untied, None, {"quality": 3}, "quality=3.*allowed are 'fast'"),
    (untied, None, {"quality": "best", "update": False}, "update=False keeps the dense values.*set by quality='best'"),
    (untied, "wanda", {"budget": "60% bytes"}, "a plain folder stores zeros: give runtime='cusparselt'"),
    (untied, "wanda", {"budget": "70% macs"}, "unit 'macs' is not known"),
    (untied, "wanda", {"choices": ["dense", "2:4"]}, "choices go with budget="),
    (untied, "wanda", {"rules": {"*": {"choices": ["2:4"]}}}, "choices go with budget="),
    (untied, "wanda", {"budget": "35% zeros", "choices": ["dense"]}, "at least one pattern beside 'dense'"),
]


@pytest.mark.parametrize(("build", "method", "options", "words"), REFUSED, ids=[row[3][:50] for row in REFUSED])
def test_what_cannot_be_planned_says_what_is_wrong_and_what_is_allowed(build, method, options, words):
    error = TypeError if "method is a" in words else ValueError
    for call in (mts.make_plan, mts.sparsify):
        refused(call, build(), method, options, match=words, error=error)


# a plan is only a plan ------------------------------------------------------------------------------------------------


def test_a_model_on_meta_is_planned_like_a_real_one():
    with torch.device("meta"):
        on_meta = untied()
    assert on_meta.lm_head.weight.is_meta
    assert mts.make_plan(on_meta, "sparsegpt").as_dict() == mts.make_plan(untied(), "sparsegpt").as_dict()


def test_planning_changes_nothing_in_the_model():
    model, loader = tiny_llama().train(), iter([torch.zeros(1, 4, dtype=torch.long)])
    model.model.layers[0].eval()
    before, config = Snapshot(model), model.config.to_dict()
    mts.make_plan(model, "sparsegpt", data_loader=loader, rules={"*.q_proj": None})
    assert Snapshot(model).look == before.look
    assert model.config.to_dict() == config
    assert len(list(loader)) == 1, "no batch is taken"


def test_sparsify_does_what_the_plan_says():
    options = {"exclude": "*.q_proj", "rules": {"*.k_proj": None, "*.v_proj": {"pattern": "1:4"}, "*.up_proj": {}}}
    model = tiny_llama()
    plan = mts.make_plan(model, "magnitude", options)
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

        def solve(self, weight, state, pattern, options):
            raise AssertionError("a plan solves nothing")

    plan = mts.make_plan(tiny_llama(), First(), pattern="50%", strength=3)
    planned = {(item.method.name, item.pattern, item.options["strength"]) for item in plan.layers}
    assert planned == {("first", mts.Unstructured(0.5, "row"), 3)}
    refused(mts.make_plan, tiny_llama(), First(), match="strength must not be negative", strength=-1)


# adapters of fine-tuning ----------------------------------------------------------------------------------------------


def peft_model(kind: str, **options):
    import peft

    return peft.get_peft_model(tiny_llama(), getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **options))


ADAPTERS_OF_PEFT = [
    ("LoraConfig", {"r": 4}),
    ("LoraConfig", {"r": 4, "use_dora": True}),
    ("LoHaConfig", {}),
    ("OFTConfig", {}),
]


# peft 0.21 asks transformers 5.23 by an old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("kind", "options"), ADAPTERS_OF_PEFT)
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


# weights that are computed from other parameters, and weights that are shared -----------------------------------------


COMPUTED = [  # (what wraps a layer, what unwraps its weight)
    (prune.identity, "prune.remove"),
    (nn.utils.weight_norm, "remove_weight_norm"),
    (nn.utils.spectral_norm, "remove_spectral_norm"),
    (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations"),
    (nn.utils.parametrizations.spectral_norm, "parametrize.remove_parametrizations"),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("wrap", "function"), COMPUTED)
def test_a_weight_that_is_computed_says_what_to_call_first(wrap, function):
    """And what it says to call is what helps."""
    model = two()
    wrap(model[1], "weight")
    plan = mts.make_plan(model, "magnitude")
    assert names(plan) == ["0"]
    assert set(reasons(plan).values()) == {f"a weight is computed from it: call torch.nn.utils.{function} first"}
    attrgetter(function)(nn.utils)(model[1], "weight")
    assert names(mts.make_plan(model, "magnitude")) == ["0", "1"]


def test_tied_layers_say_who_shares_them():
    model = linears(*[(8, 8)] * 4)
    model[1].weight = model[3].weight = model[0].weight
    plan = mts.make_plan(model, "magnitude")
    assert names(plan) == ["0", "2"]
    assert plan.notes == ("0 is tied: also held by 1, 3",)
    assert "0 is tied: also held by 1, 3" in str(plan)
    llama = tiny_llama()
    llama.extra = nn.Embedding(97, 32)
    llama.extra.weight = llama.lm_head.weight
    assert reasons(mts.make_plan(llama, "magnitude"))["model.embed_tokens"] == "tied: also held by lm_head, extra"


def test_the_report_holds_what_the_plan_skips(tmp_path):
    """The same values, in memory and from a folder."""
    model = tiny_llama()
    plan = mts.make_plan(model, "magnitude", exclude="*.q_proj")
    mts.sparsify(model, "magnitude", exclude="*.q_proj")
    assert mts.report(model).skipped == plan.skipped
    mts.save(model, tmp_path / "sparse")
    assert mts.report(tmp_path / "sparse").skipped == plan.skipped
    assert mts.report(model).as_dict()["skipped"] == plan.as_dict()["skipped"]
    assert json.loads(mts.report(model).to_json()) == mts.report(model).as_dict()


# what is no model, and weights that no method takes -------------------------------------------------------------------


CALLS = [(mts.make_plan, "magnitude"), (mts.sparsify, "magnitude"), (mts.export,), (mts.verify, "2:4")]
CALLS += [(mts.save, Path("out")), (mts.restore, Path("out"))]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model_is_said_to_be_none(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, *arguments = call
    inner = nn.Sequential(nn.Linear(8, 8))
    wrong = [
        ("gpt2", TypeError, "the model is a str: give an nn.Module, such as from_pretrained"),
        (Path("gpt2"), TypeError, "the model is a PosixPath: give an nn.Module"),
        (nn.Linear, TypeError, "the model is a type: give an nn.Module"),
        (torch.jit.script(inner), ValueError, "is a ScriptModule, .* take the module that it was made from"),
        (nn.Sequential(torch.jit.trace(inner, torch.ones(1, 8))), ValueError, "module '0' is a ScriptModule"),
        (nn.Sequential(nn.LazyLinear(8)), ValueError, "module '0' is a LazyLinear without shapes yet"),
    ]
    for model, error, match in wrong[3:] if function is mts.verify else wrong:  # verify takes names of folders
        with pytest.raises(error, match=match):
            function(model, *arguments)
    assert not Path("out").exists()


def test_modelopts_signature():
    """``sparsify(model, mode, config=None)``, with ``mode`` as a keyword: the method, everywhere that takes one."""
    config = {"data_loader": token_batches(2), "collect_func": lambda batch: batch}
    for mode in ("sparsegpt", [("sparse_magnitude", {"nn.Linear": {"*": {}, "*q_proj*": None}})]):
        by_position = mts.sparsify(tiny_llama(), mode, dict(config), progress=False)
        assert_same_masks(mts.sparsify(tiny_llama(), mode=mode, config=dict(config), progress=False), by_position)
    match = "method='wanda' and mode='sparsegpt' mean the same"
    refused(mts.make_plan, tiny_llama(), "wanda", mode="sparsegpt", match=match)
