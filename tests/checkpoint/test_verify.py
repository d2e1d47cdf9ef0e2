"""What verify finds in models and in folders."""

from typing import Any

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.checkpoint.folders import PRUNED, WEIGHT, sparse
from tests.faults.faulty import flip
from tests.helpers import refused, tiny_llama
from tests.models.tiny import tiny_gpt2


@pytest.fixture(params=["model", "folder"])
def judged(request, tmp_path):
    """A function that verifies a model as it is, or through the folder that it is saved to."""

    def judge(model: nn.Module, pattern: object = None, plain: bool = False) -> mts.Verification:
        if request.param == "model":
            return mts.verify(model, pattern)
        if plain:
            model.save_pretrained(tmp_path / "out")
        else:
            mts.save(model, tmp_path / "out", overwrite=True)
        return mts.verify(tmp_path / "out", pattern)

    return judge


@pytest.mark.parametrize("name", ["llama", "gpt2", "bfloat16"])
def test_verify_finds_the_pattern_in_every_layer(judged, name):
    """And a looser one."""
    found = judged(sparse(name), "2:4")
    assert len(found.layers) == PRUNED[name]
    assert {item.pattern for item in found.layers} == {"2:4"}
    assert all(item.zeros * 2 == item.size and item.problem == "" for item in found.layers)
    assert "All" in str(found)
    for model, looser in ((sparse(name), "3:4"), (sparse(name, pattern="1:4"), "2:4")):
        assert [item.pattern for item in judged(model, looser).layers] == [looser] * PRUNED[name]


def test_verify_uses_the_patterns_in_the_report(judged):
    rules: dict[str, Any] = {"*down_proj": {"pattern": "4:8"}, "*q_proj": None}
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="50%", rules=rules)
    found = {item.name.rpartition(".")[2]: item.pattern for item in judged(model).layers}
    assert (found["down_proj"], found["up_proj"]) == ("4:8", "50% per matrix")
    assert "q_proj" not in found


@pytest.mark.parametrize(("pattern", "where"), [("1:4", "256 times"), ("75%", "1 times")])
def test_verify_refuses_a_stricter_pattern(judged, pattern, where):
    wrong = rf"^14 of 14 layers do not hold their pattern: model\.[\w.]*: more nonzeros than [^;]* \({where}\);"
    refused(judged, sparse("llama"), pattern, match=wrong)


def test_verify_counts_an_unstructured_pattern_in_the_scope_that_it_was_made_with():
    """Rows of 5 have 2 zeros each at 50 %, for round(2.5) = 2: half of each row, not half of the matrix."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    mts.sparsify(model, "magnitude", pattern=mts.Unstructured(0.5, scope="row"))
    assert int((model[0].weight == 0).sum()) == 8
    mts.verify(model, "50%")
    refused(mts.verify, model, "50% per matrix", match=r"0: more nonzeros than 50% per matrix allows, .* \(1 times\)")


@pytest.mark.parametrize("value", [1e-30, -0.0])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_verify_finds_a_single_nonzero_too_many(judged, name, value):
    model = mts.export(sparse(name))
    key = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}[name]
    weight = model.get_parameter(f"{key}.weight")
    with torch.no_grad():
        weight[tuple((weight == 0).nonzero()[5])] = value
    problem = rf"1 of {PRUNED[name]} layers do not hold their pattern: {key}: more nonzeros than 2:4 allows, "
    refused(judged, model, "2:4", plain=True, match=rf"{problem}where -0.0 counts as one \(1 times\)")


def test_verify_accepts_negative_zero_among_the_kept():
    model = sparse("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[tuple(weight.nonzero()[0])] = -0.0
    assert len(mts.verify(model, "2:4").layers) == 14


def test_verify_knows_the_axis_of_transposed_weights(judged):
    """GPT-2 keeps weights as [in, out]: 2:4 along the wrong axis is not 2:4, in memory and on disk."""
    model = tiny_gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                module.weight[:, 0::4] = 0
                module.weight[:, 1::4] = 0
    wrong = r"8 of 8 layers do not hold their pattern: transformer\.h\.0\.attn\.c_at"
    refused(judged, model, "2:4", plain=True, match=wrong)


def test_verify_of_weights_that_disagree_with_their_mask():
    """A group whose nonzeros have moved on by one place is still 2:4."""
    model = sparse("llama")
    with torch.no_grad():
        group = model.get_parameter(WEIGHT)[0, :4]
        group.copy_(group.roll(1))
    wrong = r"self_attn\.q_proj: not \+0\.0 where the mask is False \(entries: [12]\)"
    refused(mts.verify, model, "2:4", match=f"^1 of 14 layers .*{wrong}")


def test_verify_of_a_mask_that_lets_more_grow_than_the_pattern_allows(judged):
    model = sparse("llama")
    mts.set_mask(model, WEIGHT, torch.ones(32, 32, dtype=torch.bool))
    refused(judged, model, match=r"q_proj: more entries kept by the mask than 2:4 allows \(256 times\)")


def test_verify_of_masks_set_by_hand(judged):
    """The layers that carry masks are the pruned ones, beside those of a report if there is one."""
    model, half = tiny_llama(), torch.tensor([True, False] * 16)
    mts.set_mask(model, WEIGHT, half.repeat(32, 1))
    assert [item.name for item in judged(model, "2:4").layers] == [WEIGHT.removesuffix(".weight")]
    model = mts.sparsify(tiny_llama(), "magnitude", include="*mlp*")
    mts.set_mask(model, WEIGHT, half.repeat(32, 1))
    assert len(judged(model, "2:4").layers) == 7


def test_verify_of_plain_weights_looks_at_every_default_target_for_the_pattern_that_is_named(judged):
    exported = mts.export(sparse("gpt2"))
    del exported.sparsity_report
    assert len(judged(exported, "2:4", plain=True).layers) == 8
    unnamed = "no report that says which pattern to look for: give pattern=, for example '2:4'"
    for pattern, words in (("2:4", "8 of 8 layers do not hold their pattern"), (None, unnamed)):
        refused(judged, tiny_gpt2(), pattern, plain=True, match=words)


def test_verify_of_a_pattern_that_does_not_fit():
    model = mts.sparsify(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)), "magnitude", pattern="50%")
    refused(mts.verify, model, "2:4", match="0: 6 input channels are not a multiple of 4, so 2:4 does not fit")


def test_verify_of_folders_that_do_not_say_what_their_model_is(saved, tmp_path):
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "started.json").write_text("{}")
    for folder, words in (
        (saved("net"), r"holds no config\.json.*restore it into its model and verify that"),
        (tmp_path / "nowhere", "nowhere' is not a folder"),
        (tmp_path / "x.partial", r"x\.partial' is what a stopped run has done so far: start it again"),
    ):
        refused(mts.verify, folder, "2:4", match=words)


def test_verify_names_layers_of_a_report_that_are_not_there():
    model = sparse("llama")
    model.model.layers = model.model.layers[:1]
    refused(mts.verify, model, match=r"layer 'model\.layers\.1\..*' of the report is not in this LlamaForCausalLM")


def test_verify_compares_a_folders_files_with_their_hashes(broken):
    """One flipped bit of a kept weight breaks no pattern."""
    folder = broken("llama")
    assert "by their SHA-256." in str(mts.verify(folder))
    flip(str(folder / "model.safetensors"), 0.999)
    refused(mts.verify, folder, match=r"is damaged: file 'model\.safetensors' has changed since it was saved")
    assert "SHA-256 of the files was not looked at" in " ".join(str(mts.verify(folder, hashes=False)).split())
    (folder / "sparsity.json").unlink()
    assert "no sparsity.json to compare the files with" in " ".join(str(mts.verify(folder, "2:4")).split())


def test_verify_of_a_live_model_says_what_the_next_forward_would_zero():
    model = sparse("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.add_(1)
    refused(mts.verify, model, match=r"; 2048 weights were written to .* mts\.apply_masks", error=mts.PatternError)
    assert int((model.model.layers[0].mlp.up_proj._parameters["weight"] == 0).sum()) == 0
    with pytest.warns(UserWarning, match=r"1024 values, up to 1, were written to pruned places"):
        mts.apply_masks(model)
    mts.verify(model)
    mts.export(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1
    refused(mts.verify, model, "2:4", match=r"\(512 times\)$", error=mts.PatternError)


def headed(model):
    model.lm_head = nn.Linear(*model.lm_head.weight.T.shape, bias=False)


def fused(model):
    """As fuse of a detector does: the same values in a new module."""
    weight = model.lm_head.weight.detach().clone()
    headed(model)
    model.lm_head.weight = nn.Parameter(weight)


@pytest.mark.parametrize("replace", [lambda model: model.resize_token_embeddings(70), headed, fused])
def test_a_layer_that_was_replaced_is_said_to_carry_no_mask(replace, tmp_path):
    model = tiny_llama(tie_word_embeddings=False)
    mts.sparsify(model, "magnitude", pattern="2:4", include=["model.layers.*", "lm_head"], progress=False)
    replace(model)
    mts.save(model, tmp_path / "out")
    weight = model.lm_head.weight
    for each in (model, tmp_path / "out"):
        *others, head = mts.report(each).layers
        assert head.notes == ["it carries no mask any more"]
        assert (head.zeros, head.size, head.shape) == (int((weight == 0).sum()), weight.numel(), list(weight.shape))
        assert not any(layer.notes for layer in others)
        if replace is headed:
            refused(mts.verify, each, match=r"1 of 15 layers .*lm_head: .*; it carries no mask any more")
        else:
            assert "ok, but it carries no mask any more" in mts.verify(each).text(all_rows=True)


@pytest.mark.parametrize("end", [mts.export, lambda model: mts.sparsify(tiny_llama(), "magnitude", enforce=False)])
def test_layers_that_are_to_carry_no_mask_are_not_said_to_have_lost_one(end):
    model = end(mts.sparsify(tiny_llama(), "magnitude", progress=False))
    assert not any(layer.notes for layer in mts.report(model).layers)
    assert "mask" not in str(mts.verify(model))


def test_verify_of_weights_without_numbers_to_look_at(tmp_path):
    """Codes in a folder whose config says nothing of them, and a model on the meta device."""
    model = mts.export(mts.sparsify(tiny_llama(), "magnitude", pattern="2:4"))
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    model.save_pretrained(tmp_path)
    refused(mts.verify, tmp_path, "2:4", match=r"'model\.layers\.0\.mlp\.up_proj' holds codes")
    refused(mts.verify, tiny_llama().to("meta"), "2:4", match="q_proj' is on the meta device and has no values")


def test_verify_of_complex_weights_under_masks():
    model: Any = mts.sparsify(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "magnitude", pattern="2:4")
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    mts.set_mask(model, "turn", torch.tensor([True, False]))
    assert [layer.zeros for layer in mts.verify(model).layers] == [32, 32, 1]
    model._parameters["turn"].data[1] = -0.0j
    refused(mts.verify, model, match=r"turn: not \+0\.0 where the mask is False \(entries: 1\)", error=mts.PatternError)
