"""`shrink` and `plan_shrink`: plain models that are smaller, of many classes, against slow obvious oracles."""

import copy
import functools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.calibration.calls import AtBlock
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.forward import NumberedCall
from modelopt_sparse.calibration.padding import PaddingOfCall
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.shrinking import shrink as smaller
from modelopt_sparse.shrinking.cutting import Cutting
from modelopt_sparse.shrinking.importance import _Seen
from modelopt_sparse.shrinking.least_squares import gram_scores, least_squares
from modelopt_sparse.shrinking.plan import HINTS, STALE
from modelopt_sparse.shrinking.resize import WIDTHS, BlockCount, spans, twin_of
from modelopt_sparse.shrinking.sizes import COUNTED, ShrinkRequest, TargetSizes, costs, decided
from tests import helpers
from tests.helpers import assert_same_state, plain_from_pretrained, refused, state_of, trained_model, trained_windows
from tests.interruptions import interrupted
from tests.models.shrinkable import BASE, BLOCKS, CLASSES, NO_WIDTH, WIDTH, calls, shrinkable
from tests.models.tiny import TwoOutputs

SPLIT = ("InterleavedLlama", "SplitLlama")
QUICK = ("Llama", "GPT2", "Phi3", "Gemma2", "Dinov2", *SPLIT)
USUAL = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
T5 = "T5/T5ForConditionalGeneration"
llama = functools.partial(shrinkable, "Llama")


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def with_zeros(model: nn.Module, kept: dict[str, list[int]]) -> nn.Module:
    """The model, whose layers take zeros for all other channels: a hook on each."""
    for name, indices in kept.items():
        layer = model.get_submodule(name)
        mask = torch.zeros(layer.weight.shape[0 if type(layer).__name__ == "Conv1D" else 1])
        mask[indices] = 1
        layer.register_forward_pre_hook(lambda module, args, mask=mask: (args[0] * mask,))
    return model


def with_skipped(blocks: nn.ModuleList, kept: Sequence[int]) -> None:
    """Blocks put out what they get."""

    def skip(module: nn.Module, args: tuple, kwargs: dict[str, Any], found: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(found, Tensor) else (hidden, *found[1:])

    for place, block in enumerate(blocks):
        if place not in kept:
            block.register_forward_hook(skip, with_kwargs=True)


def reloaded(model: hf.PreTrainedModel, folder: Any) -> hf.PreTrainedModel:
    model.save_pretrained(folder)
    return plain_from_pretrained(folder, type(model)).eval()


def few(names: Sequence[str]) -> list[Any]:
    """All of these classes are slow together; some of them run always."""
    return [name if name.partition("/")[0] in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", few([name for name in (*CLASSES, *SPLIT) if name not in NO_WIDTH]))
def test_fewer_channels_are_zeros_in_their_place(name, tmp_path):
    """However fused ones lie, which is tried."""
    model = shrinkable(name)
    batches = list(calls(model))
    dense = copy.deepcopy(model)
    mts.shrink(model, mlp=0.25, refit=False, multiple_of=1, data_loader=batches, progress=False)
    kept = mts.report(model).shrunk.kept["mlp"]
    widths = {len(indices) for indices in kept.values()}
    assert len(widths) == 1
    assert len(kept) >= 3
    wanted = output(with_zeros(dense, kept), batches[0])
    assert (wanted - output(shrinkable(name), batches[0])).abs().max() > 1e-3
    torch.testing.assert_close(output(model, batches[0]), wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))
    written = json.loads((tmp_path / "config.json").read_text())
    assert widths <= {written.get(key) for key in WIDTHS}
    assert mts.report(model).settings["multiple_of"] == 1


@pytest.mark.parametrize("name", few([name for name in CLASSES if "T5" not in name]))
def test_fewer_blocks_are_skipped_ones(name, tmp_path):
    model = shrinkable(name)
    batches = list(calls(model))
    mts.shrink(model, blocks=1, data_loader=batches, progress=False)
    ((stack, kept),) = mts.report(model).shrunk.kept["blocks"].items()
    assert len(kept) == BLOCKS - 1 == len(model.get_submodule(stack))
    dense = shrinkable(name)
    with_skipped(dense.get_submodule(stack), kept)
    torch.testing.assert_close(output(model, batches[0]), output(dense, batches[0]), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))
    written = model.config.to_dict()
    assert BLOCKS - 1 in [written.get(key) for key in USUAL]
    assert len(written.get("layer_types") or kept) == BLOCKS - 1


def test_parametrized_modules_are_of_one_kind(tmp_path):
    """torch makes a class for each; wav2vec 2.0 and its relatives have one before their blocks."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    waves: Any = {"conv_dim": (16,), "conv_kernel": (8,), "conv_stride": (8,), "num_conv_pos_embedding_groups": 2}
    torch.manual_seed(0)
    model = hf.HubertForCTC(hf.HubertConfig(vocab_size=97, initializer_range=0.2, **sizes, **waves)).eval()
    dense, batches = copy.deepcopy(model), [{"input_values": x} for x in torch.randn(3, 2, 400).unbind()]
    mts.shrink(model, blocks=[1], data_loader=batches, progress=False)
    with_skipped(dense.hubert.encoder.layers, [0, 2, 3])
    assert torch.equal(output(model, batches[0]), output(dense, batches[0]))
    assert torch.equal(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))


def test_each_side_of_an_encoder_decoder_by_its_own_name(tmp_path):
    model = shrinkable(T5)
    batches = list(calls(model))
    dense = copy.deepcopy(model)
    both = r"one stack of blocks: give to=\{'num_layers': ...\} or to=\{'num_decoder_layers'"
    refused(mts.plan_shrink, model, match=both, blocks=1)
    sizes = {"num_decoder_layers": BLOCKS - 1, "d_ff": 40}
    shrunk = mts.report(mts.shrink(model, to=sizes, refit=False, data_loader=batches, progress=False)).shrunk
    assert shrunk.sizes == {"num_decoder_layers": [BLOCKS, BLOCKS - 1], "d_ff": [WIDTH, 40]}
    assert [len(side.block) for side in (model.encoder, model.decoder)] == [3, BLOCKS - 1]
    with_zeros(dense, shrunk.kept["mlp"])
    with_skipped(dense.decoder.block, shrunk.kept["blocks"]["decoder.block"])
    torch.testing.assert_close(output(model, batches[0]), output(dense, batches[0]), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))
    again = mts.shrink(shrinkable(T5), kept=shrunk, refit=False, data_loader=batches, progress=False)
    assert_same_state(again, state_of(model))


def test_shared_experts_depend_on_the_width_of_experts():
    model = shrinkable("DeepseekV3")
    found = {(span.name, span.old, span.new) for span in spans(model, twin_of(model, {"moe_intermediate_size": 12}))}
    assert ("model.layers.1.mlp.shared_experts.down_proj.weight", 32, 24) in found
    assert ("model.layers.1.mlp.experts.down_proj", 16, 12) in found
    assert not any("layers.0." in name for name, *_ in found)


LOADER = {"data_loader": [torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))] * 3}
REFUSED = {
    "nothing": ({}, "none of them"),
    "two ways": ({"mlp": 0.25, "to": {"intermediate_size": 8}}, "shrink takes blocks= with mlp= or experts=, or to="),
    "all": ({"mlp": 1.0}, "mlp=1.0: give what goes, as a share"),
    "too little": ({"mlp": 0.01}, "makes 48 of 48 channels"),
    "no share": ({"mlp": "2:4"}, "give what goes, as a share"),
    "all blocks": ({"blocks": 4}, "give how many of the 4 blocks go"),
    "a block twice": ({"blocks": [1, 1]}, "each once"),
    "a block that is not there": ({"blocks": [9]}, "name some, each once"),
    "no such size": ({"to": {"intermediate_sizes": 8}}, "did you mean 'intermediate_size'"),
    "larger": ({"to": {"intermediate_size": 64}}, "below 48"),
    "heads": ({"to": {"num_key_value_heads": 1}}, "heads cost far more"),
    "heads of queries": ({"to": {"num_attention_heads": 2}}, "heads cost far more"),
    "a budget beside": ({"mlp": 0.25, "budget": "70% params"}, r"got \['mlp', 'budget'\]"),
    "a budget of time": ({"budget": "5 ms"}, "allowed are params, bytes, flops"),
    "two budgets": ({"budget": {"params": "70%", "flops": "70%"}}, "give text, such as '35% bytes'"),
    "a budget that is met": ({"budget": "100% params"}, "the model has .* params already"),
    "a budget that is too small": ({"budget": "1% params"}, "cannot be met"),
    "devices": ({"mlp": 0.25, "tensor_parallel": 0}, "tensor_parallel=0"),
    "a width for devices": ({"mlp": 30, "tensor_parallel": 4}, "intermediate_size=18 does not divide by"),
    "hidden": ({"to": {"hidden_size": 16}}, "outside of the blocks"),
    "multiple": ({"mlp": 0.25, "multiple_of": 0}, "multiple_of=0"),
    "criterion": ({"mlp": 0.25, "criterion": "gramm"}, "allowed are 'gram', 'norm', 'minitron'"),
    "blocks by": ({"blocks": 1, "blocks_by": "ppl"}, "allowed are 'kl', 'influence'"),
    "pattern": ({"mlp": 0.25, "pattern": "2:4"}, "pattern"),
    "masks": ({"mlp": 0.25, "reconstruct": {"masks": "move"}}, "a shrunk model has none"),
    "one batch": ({"mlp": 0.25, "data_loader": LOADER["data_loader"][:1]}, "at least two calibration batches"),
    "no data": ({"mlp": 0.25, "data_loader": None}, "needs calibration data"),
    **{name: ({name: 0.5}, f"option '{name}' is not known to shrink: ") for name in HINTS},
    "kept of another": ({"kept": {"mlp": {"model.layers.0.mlp.up": [1]}}}, "of its 0 channels"),
    "kept twice": ({"kept": {"mlp": {"model.layers.0.mlp.down_proj": [1, 1]}}}, "each once"),
    "kept of nothing": ({"kept": {"heads": {}}}, "kept= takes"),
    "kept that is no mapping": ({"kept": {"mlp": 3}}, "kept= takes report.shrunk"),
    "kept that is no list": ({"kept": {"blocks": {"model.layers": 3}}}, "ascending indices of its 4 blocks"),
    "kept is all": ({"kept": {"blocks": {"model.layers": [0, 1, 2, 3]}}}, "kept= takes nothing away: give mlp=0.25"),
    "to nothing": ({"to": {}}, "to= takes nothing away: give mlp=0.25"),
    "to a name": ({"to": "abc"}, "to='abc': give a mapping of the config's names to sizes"),
    "kept blocks twice": ({"kept": {"blocks": {"model.layers": [0, 1, 1]}}}, "ascending indices of its 4 blocks"),
    "kept blocks that are not there": ({"kept": {"blocks": {"model.layers": [0, 1, 9]}}}, "of its 4 blocks"),
}


def numbered_experts() -> Any:
    model = shrinkable("Qwen3Moe")
    model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda gate, _: gate.weight[3] is None or None)
    return model


MODELS = {
    "a block by its number": (
        lambda: shrinkable("NumberedLlama"),
        {"blocks": 1},
        "this NumberedLlama cannot be called with fewer blocks: index 3 is out of range",
    ),
    "an expert by its number": (
        numbered_experts,
        {"experts": 1},
        "this Qwen3MoeForCausalLM cannot be called with fewer experts: index 3 is out of bounds",
    ),
    "places": (lambda: shrinkable("ScaledByPlace"), {"blocks": [1]}, "depend on their index"),
    "near places": (lambda: shrinkable("ScaledByPlace"), {"blocks": [2]}, "depend on their index"),
    "norm": (lambda: shrinkable("NormedLlama"), {"mlp": 0.25}, "not of channels between two linear layers"),
    "softmax": (lambda: shrinkable("SoftmaxLlama"), {"mlp": 0.25}, "MLPs cannot be cut"),
    "two stacks": (lambda: shrinkable(T5), {"to": {"num_layers": 1, "num_decoder_layers": 1}}, "two stacks: shrink"),
    "two sizes": (lambda: shrinkable("Qwen3Moe", mlp_only_layers=[0, 2]), {"budget": "80% params"}, "differ in size"),
    "sparse": (lambda: mts.sparsify(llama(), "magnitude", pattern="2:4"), {"mlp": 0.25}, "is sparse"),
    "not of transformers": (lambda: nn.Linear(4, 4), {"mlp": 0.25}, "a Linear has none"),
    **{name: (functools.partial(shrinkable, name), {"mlp": 0.25}, why) for name, why in NO_WIDTH.items()},
}


@pytest.mark.parametrize("case", [*REFUSED, *MODELS])
def test_refused_with_the_model_untouched(case):
    make, options, problem = MODELS.get(case) or (llama, *REFUSED[case])
    model = make()
    refused(mts.shrink, model, match=problem, error=(ValueError, TypeError), **{**LOADER, "progress": False, **options})
    assert make is not llama or model.config.intermediate_size == WIDTH


def test_a_loss_does_not_stand_for_what_the_model_puts_out():
    """By chance a loss may be what it was, though channels that are cut are not as zeros in their place."""
    for seed in range(6):
        torch.manual_seed(seed)
        batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (3, 2, 16))]
        refused(mts.shrink, shrinkable("SoftmaxLlama"), match="MLPs cannot be cut", mlp=0.25, data_loader=batches)


@pytest.mark.parametrize("name", ["Llama", T5])
def test_a_smaller_model_is_distilled_without_its_own_loss(name):
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (6, 2, 16))]
    model = mts.shrink(shrinkable(name), mlp=0.25, distill=1, data_loader=batches, progress=False)
    assert "distilled" in mts.report(model).shrunk.kl


@pytest.mark.parametrize("way", [{"blocks_by": "kl"}, {"blocks_by": "influence"}, {}])
def test_data_that_does_not_reach_what_goes_is_an_error(way):
    """Text says nothing of a tower for images."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    images = hf.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = hf.LlavaConfig(vision_config=images, text_config=LlamaConfig(**BASE), image_token_index=96)
    size = {"num_hidden_layers": 2} if way else {"intermediate_size": 32}
    to = {f"vision_config.{name}": number for name, number in size.items()}
    match = "the calibration data does not reach them: give data that does" if way else "fc2' saw no calibration data"
    refused(mts.shrink, hf.LlavaForConditionalGeneration(config), match=match, to=to, **way, **LOADER, progress=False)


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
def test_influence_is_for_blocks_that_can_be_run_by_themselves():
    options = {"blocks": 1, **LOADER, "progress": False}
    match = "cannot be run by themselves: give blocks_by='kl'"
    refused(mts.shrink, shrinkable("CountingLlama"), match=match, **options, blocks_by="influence")
    assert len(mts.shrink(shrinkable("CountingLlama"), **options).model.layers) == BLOCKS - 1


def test_the_plan_is_what_is_made():
    model = llama()
    plan = mts.plan_shrink(model, mlp=0.5, blocks=1)
    assert plan.changes["intermediate_size"] == (WIDTH, 24)
    assert "which blocks go is chosen with data" in str(plan)
    refused(mts.plan_shrink, model, match="allowed are 'gram', 'norm', 'minitron'", mlp=0.5, criterion="gramm")
    mts.shrink(model, mlp=0.5, blocks=1, **LOADER, progress=False)
    assert plan.changes["parameters"][1] == sum(p.numel() for p in model.parameters())
    assert plan.changes["bytes of keys and values"] == (2 * 4 * 1024 * 16 * 4, 2 * 3 * 1024 * 16 * 4)
    old, new = plan.changes["FLOPs of a call"]
    block, lost = 2 * 1024 * 32 * (2 * 32 + 2 * 16), 2 * 1024 * 32 * 3 * 24
    attention = 2 * 2 * 1024 * 1024 * 32
    assert old - new == block + attention + 2 * 1024 * 32 * 3 * WIDTH + 3 * lost


class Listening(LlamaForCausalLM):
    """It writes text, and takes no tokens."""

    def forward(self, input_features: Tensor) -> Any:
        return super().forward(inputs_embeds=input_features)


def test_the_flops_of_a_model_that_takes_no_tokens_are_not_known():
    plan = mts.plan_shrink(Listening(LlamaConfig(**BASE)), mlp=0.25)
    assert "FLOPs of a call" not in plan.changes
    assert plan.notes[0].startswith("FLOPs and cache are not known")


@pytest.mark.parametrize(("mlp_only_layers", "differ"), [([0, 2], True), ([], False)])
def test_the_plan_says_that_blocks_differ_in_size(mlp_only_layers, differ):
    plan = mts.plan_shrink(shrinkable("Qwen3Moe", mlp_only_layers=mlp_only_layers), blocks=1)
    (note,) = [note for note in plan.notes if note.startswith("which blocks go is chosen with data")]
    assert ("they differ in size" in note) == differ


def test_a_second_run_says_what_the_first_has_done():
    model = mts.shrink(llama(), blocks=1, **LOADER, progress=False)
    first = mts.report(model).shrunk.summary()
    mts.shrink(model, blocks=1, **LOADER, progress=False)
    assert mts.report(model).shrunk.sizes["num_hidden_layers"] == [3, 2]
    assert f"the time before: {first}" in mts.report(model).notes


def test_numbers_may_be_those_of_numpy():
    for options in ({"blocks": np.int64(1)}, {"blocks": [np.int64(3)]}, {"to": {"num_hidden_layers": np.int32(3)}}):
        plan = mts.plan_shrink(llama(), **options)
        assert json.loads(plan.to_json())["changes"]["num_hidden_layers"] == [4, 3]


@pytest.mark.parametrize(
    ("share", "old", "multiple_of", "devices", "new"),
    [(0.25, 384, "auto", 1, 288), (0.25, 2816, "auto", 1, 2112), (0.25, 14336, "auto", 1, 10752),
     ("50%", 100, "auto", 1, 48), (0.3, 100, 7, 1, 70), (30, 100, "auto", 1, 70), (0.25, 11008, "auto", 1, 8192),
     (0.25, 384, "auto", 3, 288), (0.25, 14336, "auto", 8, 10752), (0.25, 14336, 10, 6, 10740),
     (30, 100, "auto", 7, 70)],
)  # fmt: skip
def test_widths_are_rounded(share, old, multiple_of, devices, new):
    config = LlamaConfig(**{**BASE, "intermediate_size": old, "num_hidden_layers": 1})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = mts.plan_shrink(model, mlp=share, multiple_of=multiple_of, tensor_parallel=devices)
    assert plan.changes["intermediate_size"] == (old, new)


def cost_of(config: Any, budget: str, **sizes: int) -> int:
    """What a model of these sizes costs."""
    with torch.device("meta"):
        model = LlamaForCausalLM(type(config).from_dict({**config.to_dict(), **sizes}))
    return costs(model, 1, 1024)[COUNTED[budget.split()[-1].replace("MB", "bytes")]]


BUDGETS = [("70% params", 0.7), ("96% flops", 0.96), ("0.1MB bytes", 1e5), ("0.1 MB", 1e5), ("55% params", 0.55)]


@pytest.mark.parametrize(("budget", "left"), BUDGETS)
def test_a_budget_leaves_the_widest_mlps_for_each_number_of_blocks(budget, left):
    model, wanted = llama(), []
    ceiling = left if left > 1 else left * cost_of(model.config, budget)
    for blocks in range(BLOCKS, 0, -1):
        widths = [{"num_hidden_layers": blocks, "intermediate_size": width} for width in range(8, WIDTH + 1, 8)]
        fitting = [sizes for sizes in widths if cost_of(model.config, budget, **sizes) <= ceiling]
        wanted += fitting[-1:]
        if len(fitting) == len(widths):
            break
    config = SparsifyConfig(pattern=Unstructured(0.5))
    _, offered = decided(model, plan_for(model, Magnitude(), config), ShrinkRequest(budget=budget), config)
    now = {"num_hidden_layers": BLOCKS, "intermediate_size": WIDTH}
    assert [now | {name: new for name, (_, new) in sizes.changes.items()} for sizes in offered] == wanted
    assert len(wanted) > 1
    assert f"num_hidden_layers {wanted[1]['num_hidden_layers']}" in str(mts.plan_shrink(model, budget=budget))


def test_bytes_are_those_of_each_tensors_own_dtype():
    """T5 in float16 holds some matrices in float32."""
    model = shrinkable(T5).half()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert mts.plan_shrink(model, mlp=0.25).changes["bytes"][0] == size
    assert mts.plan_shrink(model, budget=f"{size - 2000} bytes").changes["bytes"][1] <= size - 2000


def test_numbers_that_the_user_has_set_in_modules_stay():
    model = llama()
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[0].self_attn.attention_dropout = 0.25
    mts.shrink(model, mlp=0.25, blocks=[2], **LOADER, progress=False)
    assert (model.model.norm.variance_epsilon, model.model.layers[0].self_attn.attention_dropout) == (0.5, 0.25)
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2]


def test_a_budget_is_kept():
    model: Any = mts.shrink(llama(), budget="70% params", tensor_parallel=2, **LOADER, progress=False)
    assert mts.report(model).settings["tensor_parallel"] == 2
    old, new = mts.report(model).shrunk.costs["parameters"]
    assert new == sum(p.numel() for p in model.parameters()) <= 0.7 * old
    assert model.config.intermediate_size % 16 == 0
    assert "budget 70% params: KL after 1 epoch of reconstruction: " in str(mts.report(model)).replace("\n  ", " ")
    with pytest.raises(ValueError, match=r"no logits but 'last_hidden_state' .* 'pooled' .*: give output="):
        mts.shrink(TwoOutputs(model.config), budget="70% params", **LOADER, progress=False)


@pytest.mark.slow
def test_a_budget_takes_the_best_of_all_pairs():
    """Of all numbers of blocks and multiples of 32, each shrunk for itself and reconstructed as long as it may be."""
    batches = list(trained_windows("calibration.txt", 64)[:8].split(2))
    model, budget = trained_model(), "70% params"
    ceiling, divergences = 0.7 * cost_of(model.config, budget), {}
    for blocks in range(6, 1, -1):
        widths = [{"num_hidden_layers": blocks, "intermediate_size": width} for width in range(32, 385, 32)]
        for sizes in [x for x in widths if cost_of(model.config, budget, **x) <= ceiling][-1:]:
            other = trained_model()
            changed = {name: size for name, size in sizes.items() if getattr(other.config, name) != size}
            mts.shrink(other, to=changed, data_loader=batches, progress=False, reconstruct=2)
            divergences[(*sizes.values(),)] = mts.report(other).shrunk.kl["reconstructed"]
    mts.shrink(model, budget=budget, multiple_of=32, data_loader=batches, progress=False)
    best = min(divergences, key=divergences.__getitem__)
    assert (model.config.num_hidden_layers, model.config.intermediate_size) == best


KEPT = [(llama, {"mlp": 0.25, "blocks": 1}), (functools.partial(shrinkable, "Mixtral"), {"experts": "25%"})]


@pytest.mark.parametrize(("make", "options"), KEPT)
def test_what_was_kept_is_taken_back(tmp_path, make, options):
    """From the report, from sparsity.json, and as llm-compressor's REAP writes experts; `load` reads the folder."""
    model = mts.shrink(make(), **options, **LOADER, progress=False)
    mts.save(model, tmp_path)
    assert mts.report(tmp_path).shrunk == mts.report(model).shrunk
    assert_same_state(mts.load(tmp_path), state_of(model))
    shrunk = mts.report(model).shrunk
    choices = [shrunk, json.loads((tmp_path / "sparsity.json").read_text())["report"]["shrunk"]]
    if "experts" in shrunk.kept:
        by_mixture = {name.removesuffix(".experts.down_proj"): x for name, x in shrunk.kept["experts"].items()}
        assert "model.layers.0.mlp" in by_mixture
        choices.append(by_mixture)
    for kept in choices:
        again = mts.shrink(make(), kept=kept, **LOADER, progress=False)
        assert_same_state(again, state_of(model))
        assert mts.report(again).shrunk.criterion == "given"


def test_a_repair_that_breaks_off_leaves_a_whole_smaller_model(monkeypatch, tmp_path):
    model, plain = llama(), llama()
    options = {"mlp": 0.25, "blocks": [1], **LOADER, "progress": False}
    with monkeypatch.context() as nothing_tuned:
        nothing_tuned.setattr(smaller, "reconstruct", lambda *_: None)
        mts.shrink(plain, **options, reconstruct=1)
        with interrupted(smaller, "reconstruct", 2) as calls:
            mts.shrink(model, **options, reconstruct=1)
    assert [task.name for task, *_ in calls] == ["model.layers.0", "model.layers.2"]
    assert "stopped by KeyboardInterrupt" in str(mts.report(model))
    assert_same_state(model, state_of(plain))
    assert output(reloaded(model, tmp_path), {"input_ids": LOADER["data_loader"][0]}).isfinite().all()


AT_THE_END = [(smaller, "costs"), (TargetSizes, "narrow"), (BlockCount, "drop", 2), (nn.ModuleList, "__delitem__", 2)]


@pytest.mark.parametrize("place", AT_THE_END)
def test_a_stop_at_the_end_leaves_a_whole_smaller_model(monkeypatch, tmp_path, place):
    """While the last of it is cut, or counted."""
    model, options = llama(), {"mlp": 0.25, "blocks": [0, 2], **LOADER, "progress": False}
    everything, plain = Cutting.everything, mts.shrink(llama(), **options)

    def stopped(cutting: Cutting, whole: Any) -> None:
        if whole is not model or "the end" in seen:
            return everything(cutting, whole)
        seen.append("the end")
        with interrupted(*place):
            everything(cutting, whole)
            smaller.costs(whole)
        raise KeyboardInterrupt

    seen: list[str] = []
    monkeypatch.setattr(Cutting, "everything", stopped)
    with pytest.raises(KeyboardInterrupt):
        mts.shrink(model, **options)
    assert "stopped by KeyboardInterrupt" in str(mts.report(model))
    assert_same_state(model, state_of(plain))
    assert output(reloaded(model, tmp_path), {"input_ids": LOADER["data_loader"][0]}).isfinite().all()


def test_a_width_of_another_name_is_the_mlps_where_nothing_is_wider():
    with torch.device("meta"):
        sizes = {"num_hidden_layers": 20, "vocab_size": 128, "vocab_size_per_layer_input": 128}
        model = hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**sizes))
    refused(mts.plan_shrink, model, mlp=0.25, match="has no width that all of its MLPs share")


def test_repair_tunes_all_matrices_and_helps():
    batches = list(trained_windows("calibration.txt", 64)[:64].split(4))
    found = {}
    for name, options in {"refit": {}, "repaired": {"reconstruct": 1, "distill": 1}}.items():
        model = trained_model()
        before = model.model.layers[1].self_attn.q_proj.weight.clone()
        optimizer_knows = list(model.parameters())
        mts.shrink(model, mlp=0.25, data_loader=batches, progress=False, **options)
        assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, before) == (name != "repaired")
        assert all(model.model.layers[1].mlp.down_proj.weight is not parameter for parameter in optimizer_knows)
        assert STALE in mts.report(model).notes
        found[name] = mts.report(model).shrunk.kl
    assert found["refit"]["refit"] < 0.8 * found["refit"]["as is"]
    assert found["repaired"]["reconstructed"] < found["repaired"]["refit"]
    assert found["repaired"]["distilled"] < found["repaired"]["reconstructed"]


def test_the_block_that_goes_is_the_one_that_costs_least():
    model, batches = trained_model(), list(trained_windows("calibration.txt", 128)[:16].split(4))
    dense = copy.deepcopy(model)
    mts.shrink(model, blocks=1, data_loader=batches, progress=False)
    ids = batches[1], batches[2]  # the last ones that do not judge, with eight rows
    wanted = {}
    for place in range(6):
        other = copy.deepcopy(dense)
        with_skipped(other.model.layers, [i for i in range(6) if i != place])
        p, q = (torch.cat([output(m, {"input_ids": x}).log_softmax(-1) for x in ids]) for m in (dense, other))
        wanted[f"model.layers.{place}"] = float((p.exp() * (p - q)).sum(-1).mean())
    (tried,) = mts.report(model).shrunk.tried
    assert tried == pytest.approx(wanted, rel=1e-3)
    best = min(wanted, key=wanted.__getitem__)
    assert f"model.layers.{6 - 1}" != best
    assert int(best[-1]) not in mts.report(model).shrunk.kept["blocks"]["model.layers"]


def test_then_two_of_four_and_two_steps_of_trainer(tmp_path):
    model = mts.shrink(llama(), mlp=0.25, blocks=1, **LOADER, progress=False)
    rows = [{"input_ids": row, "labels": row} for row in LOADER["data_loader"][0]]
    arguments: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1, "report_to": [], "use_cpu": True}
    hf.Trainer(model, hf.TrainingArguments(tmp_path, **arguments, disable_tqdm=True), train_dataset=rows).train()
    mts.sparsify(model, "magnitude", pattern="2:4", progress=False)
    mts.verify(model, "2:4")
    assert mts.report(model).shrunk is not None
    assert "Shrunk (criterion 'gram')" in str(mts.report(model))


# what is chosen, against slow oracles ---------------------------------------------------------------------------------


def problem(columns: int = 12) -> tuple[Tensor, Tensor]:
    weight = torch.randn(5, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return weight, helpers.correlated_inputs(200, columns)


def test_greedy_choice_is_that_of_fresh_least_squares():
    weight, x = problem()
    gram = x.T @ x
    damped = gram + 1e-3 * gram.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    left, current = list(range(12)), weight.clone()
    while len(left) > 5:
        losses = []
        for gone in left:
            rest = [other for other in left if other != gone]
            solved = torch.linalg.solve(damped[rest][:, rest], (current @ damped)[:, rest].T).T
            error = current.clone()
            error[:, gone], error[:, rest] = current[:, gone], current[:, rest] - solved
            losses.append(float(((error @ damped) * error).sum()))
        gone = left.pop(losses.index(min(losses)))
        solved = torch.linalg.solve(damped[left][:, left], (current @ damped)[:, left].T).T
        current = torch.zeros_like(current).index_copy(1, torch.tensor(left), solved)
        assert gone not in left
    kept, scores = gram_scores(weight, gram, 5, chunk=1)
    assert kept.tolist() == left
    assert scores.min() >= 0


@pytest.mark.parametrize(("tokens", "best"), [(100, 2), (20, 3), (8, 4), (0, 0)])
def test_refit_is_damped_least_squares_and_never_worse(tokens, best):
    """The fewer tokens, the more damping; none where those that judge are of another kind."""
    weight, x = problem()
    kept, judge = torch.tensor([0, 2, 3, 7, 11]), x[100:] if tokens else helpers.correlated_inputs(50, 12, seed=9)
    x = x[:tokens] if tokens else x
    values, as_is, least = least_squares(weight, kept, x.T @ x, judge.T @ judge)
    candidates = [weight[:, kept]]
    for damping in (1e-3, 1e-2, 1e-1, 1.0):
        root = (damping * x.square().sum(0).mean()).sqrt()
        rows = torch.cat([x[:, kept], root * torch.eye(5, dtype=torch.float64)])
        goal = torch.cat([x @ weight.T, root * weight[:, kept].T])
        candidates.append(torch.linalg.lstsq(rows, goal).solution.T)
    total = (judge @ weight.T).square().sum()
    errors = [float((judge @ weight.T - judge[:, kept] @ each.T).square().sum() / total) for each in candidates]
    assert errors.index(min(errors)) == best
    assert as_is == pytest.approx(errors[0])
    assert least == pytest.approx(min(errors))
    torch.testing.assert_close(values, candidates[errors.index(min(errors))])
    other = torch.eye(12, dtype=torch.float64)  # judged where channels have nothing to do with each other
    values, as_is, least = least_squares(weight, kept, x.T @ x, other)
    assert least <= as_is


@pytest.mark.parametrize("criterion", ["norm", "minitron"])
def test_scores_of_channels_are_the_published_ones(criterion):
    model, watched, batches = llama(), llama(), list(calls(llama(), 4))
    batches[3]["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
    batches[3]["attention_mask"][:, 11:] = 0
    seen: list[Tensor] = []
    watched.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for batch in batches:
        output(watched, batch)
    seen[3] = seen[3][:, :11]
    windows = [window.double() for x in seen for window in x]
    if criterion == "norm":
        wanted = torch.cat(windows).square().sum(0).sqrt()
    else:
        wanted = torch.stack([window.abs().mean(0).square() for window in windows]).sum(0).sqrt()
    mts.shrink(model, mlp=0.25, criterion=criterion, multiple_of=1, data_loader=batches, progress=False)
    shrunk = mts.report(model).shrunk
    name = "model.layers.2.mlp.down_proj"
    assert shrunk.scores[name] == pytest.approx(wanted.tolist(), rel=2e-3)
    assert shrunk.kept["mlp"][name] == sorted(wanted.argsort(descending=True)[:36].tolist())


def test_calls_that_do_not_come_to_a_block_count_for_what_judges(monkeypatch):
    """Of four calls the second and the fourth do."""
    monkeypatch.setattr("modelopt_sparse.calibration.calls.forward_context", lambda run: nullcontext())
    monkeypatch.setattr("modelopt_sparse.calibration.calls.input_hooks", lambda *args: nullcontext(Mock()))
    block = nn.Linear(2, 2)
    calls = [NumberedCall(number, Call((), {}), PaddingOfCall(), way=(block,)) for number in (1, 3)]
    again, seen, places = MagicMock(), _Seen(Mock(), Mock(), set()), []
    again.run_to.side_effect = lambda *args: places.append(seen.number)
    AtBlock(again, calls, [block], ()).at(block).collect([], seen.see, seen.begin)
    assert places == [1, 3]


@pytest.mark.parametrize("name", ["Gemma3Text/Gemma3ForCausalLM", "Olmo3"])
def test_the_last_sliding_block_may_go(name, tmp_path):
    """With its frequencies, which are not saved: plain transformers reads the folder, and puts out the same."""
    layers = [*["full_attention"] * (BLOCKS - 1), "sliding_attention"]
    model = shrinkable(name, layer_types=layers, sliding_window=8)
    (batch, *_), batches = calls(model), calls(model)
    mts.shrink(model, blocks=[BLOCKS - 1], data_loader=batches, progress=False)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batch), output(model, batch))


@pytest.mark.skipif(
    not hasattr(hf.PreTrainedConfig, "per_layer_config"), reason="no config has values of single blocks"
)
def test_values_of_single_blocks_move_with_them(tmp_path):
    """In the config of Gemma 4 these are the heads of blocks with full attention."""
    kinds: Any = {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    heads: Any = {"head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0, "sliding_window": 8}
    torch.manual_seed(0)
    model = hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**{**BASE, **kinds, **heads})).eval()
    dense, (batch, *_) = copy.deepcopy(model), calls(model)
    mts.shrink(model, blocks=[0], data_loader=calls(model), progress=False)
    with_skipped(dense.model.layers, [1, 2, 3])
    torch.testing.assert_close(output(model, batch), output(dense, batch))
    torch.testing.assert_close(output(reloaded(model, tmp_path), batch), output(model, batch))
    assert model.config.to_dict()["per_layer_config"] == {"0": {"head_dim": 16}, "2": {"head_dim": 16}}
