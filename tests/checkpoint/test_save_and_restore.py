"""What save writes, and what restore and load bring back."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import folder
from modelopt_sparse.checkpoint.folder import DESCRIPTION, MASKS
from modelopt_sparse.methods.scores import Magnitude
from tests.checkpoint.folders import MODELS, PRUNED, outputs, scrambled, sparse
from tests.helpers import TESTBED, assert_bits, assert_same_state, plain_from_pretrained, refused, state_of, tiny_llama
from tests.models.tiny import tiny_mixtral

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", MODELS)
def test_restore_brings_back_every_tensor_tie_class_and_the_report(saved, name):
    model, reference = scrambled(name), sparse(name)

    def places():
        return {key: (id(p), p.data_ptr()) for key, p in model.named_parameters(remove_duplicate=False)}

    before = places()
    assert mts.restore(model, saved(name)) is model
    assert_same_state(model, state_of(reference))
    assert places() == before  # a live optimizer, and whoever holds a view, sees the new values
    assert_bits(outputs(name, model), outputs(name, reference))
    if name != "net":
        assert_same_state(mts.load(saved(name)), state_of(reference))
    found, made = mts.report(model).as_dict(), mts.report(saved(name)).as_dict()
    assert found == made
    assert len(found["layers"]) == PRUNED[name]


def test_masks_set_by_hand_are_saved_without_a_report(tmp_path):
    model = tiny_llama()
    mts.set_mask(model, "model.layers.0.mlp.up_proj.weight", torch.rand(64, 32) < 0.3)
    mts.save(model, tmp_path / "out")
    refused(mts.report, tmp_path / "out", match="carries no report")
    restored = mts.restore(sparse("llama"), tmp_path / "out")  # its own masks and report are gone
    assert_same_state(restored, state_of(model))
    refused(mts.report, restored, match="carries no report")


def test_models_without_masks_keep_their_report(tmp_path):
    """enforce=False, and export, leave plain modules: the folder says what was done and holds the zeros."""
    plain = sparse("llama", enforce=False)
    exported = mts.export(sparse("llama"))
    for name, model in (("plain", plain), ("exported", exported)):
        mts.save(model, tmp_path / name)
        assert load_file(tmp_path / name / MASKS) == {}
        assert len(mts.verify(tmp_path / name).layers) == 14
        again = mts.restore(scrambled("llama"), tmp_path / name)
        assert_same_state(again, state_of(model))
        assert dict(mts.named_masks(again)) == {}
        assert len(mts.report(again).layers) == 14
        assert_same_state(mts.load(tmp_path / name), state_of(model))


def test_save_writes_an_ordinary_folder(saved, tmp_path):
    """Plain from_pretrained reads it with nothing missing, and config.json is what save_pretrained writes. Its files
    are as readable as any new file."""
    model = sparse("llama")
    model.save_pretrained(tmp_path / "plain")
    folder = saved("llama")
    assert (folder / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    assert "spars" not in (folder / "config.json").read_text()
    plain = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in folder.iterdir()} == plain | {DESCRIPTION, MASKS}
    loaded: Any = plain_from_pretrained(folder, AutoModelForCausalLM)
    assert_bits(outputs("llama", loaded), outputs("llama", model))
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    (tmp_path / "any").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "any").stat().st_mode}


@pytest.mark.parametrize("says_so", [False, True])
def test_a_head_that_was_tied_by_hand_is_there_when_it_is_loaded(says_so, tmp_path):
    """Whether the config says that it is tied, and it is stored once, or not."""

    def tied():
        model = tiny_llama(tie_word_embeddings=False)
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = says_so
        return model

    model = mts.sparsify(tied(), "magnitude")
    mts.save(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not says_so)
    for again in (mts.load(tmp_path), plain_from_pretrained(tmp_path), mts.restore(tied(), tmp_path)):
        assert_bits(outputs("llama", again), outputs("llama", model))


def test_tensors_of_one_memory_are_written_each_for_itself(tmp_path):
    """Weights that are columns of one matrix, and buffers that lie across each other."""

    def shared():
        model, both = tiny_llama(), torch.randn(16, 64)
        attention = model.model.layers[0].self_attn
        for at, layer in enumerate((attention.k_proj, attention.v_proj)):
            layer.weight = nn.Parameter(both[:, at * 32 : at * 32 + 32])
        numbers = torch.arange(10.0)
        model.register_buffer("low", numbers[:6])
        model.register_buffer("high", numbers[4:])
        return model

    model = mts.sparsify(shared(), "magnitude")
    mts.save(model, tmp_path)
    assert_same_state(mts.restore(shared(), tmp_path), state_of(model))


@pytest.mark.parametrize("table", [{2: 0.5, 10: 0.25}, {(1, 2): 0.5, None: 0.25}])
def test_options_with_keys_that_are_no_text_are_read_again(table, tmp_path):
    class Own(Magnitude):
        options = {"table": table}

    mts.save(mts.sparsify(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Own()), tmp_path)
    assert mts.report(tmp_path).layers[0].options == {"table": {str(key): value for key, value in table.items()}}


def test_several_templates_of_a_tokenizer_travel_and_are_replaced(tmp_path):
    """They lie in a folder of their own, which anybody may read who may read the others."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    for name in ("tool_use", "rag"):
        tokenizer.chat_template = {"default": "{{ messages }}", name: "{{ tools }}"}
        mts.save(sparse("llama"), tmp_path / "out", companions=[tokenizer], overwrite=True)
        again = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert again.chat_template == tokenizer.chat_template
        assert again("import os")["input_ids"] == tokenizer("import os")["input_ids"]
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folder.stat().st_mode & 0o111
    assert (folder / "rag.jinja").stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode
    tokenizer.chat_template = "{{ messages }}"
    mts.save(sparse("llama"), tmp_path / "out", companions=[tokenizer], overwrite=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"


def test_a_tokenizer_takes_the_place_of_all_of_another(tmp_path):
    """Files that it does not write itself, and would read, are gone; without a tokenizer they stay."""
    tokenizer, out = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama"), tmp_path / "out"
    old = {"special_tokens_map.json": '{"eos_token": "<OLD>"}', "added_tokens.json": '{"<OLDER>": 2047}'}
    old |= {"chat_template.jinja": "OLD {{ messages }}", "vocab.json": "{}", "merges.txt": "", "notes.txt": "mine"}
    out.mkdir()
    for name, text in old.items():
        (out / name).write_text(text)
    mts.save(sparse("llama"), out, overwrite=True)
    assert {name: (out / name).read_text() for name in old} == old
    mts.save(sparse("llama"), out, overwrite=True, companions=[tokenizer])
    again = AutoTokenizer.from_pretrained(out)
    assert (again.eos_token, len(again), again.chat_template) == (tokenizer.eos_token, len(tokenizer), None)
    assert [name for name in old if (out / name).exists()] == ["notes.txt"]


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_of_several_dtypes_come_back_as_they_are_stored(packed, tmp_path):
    """transformers itself gives all of them that of config.json, the first one's."""
    model = sparse("bfloat16")
    model.get_submodule("model.norm").float()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(2**-20)  # no number of bfloat16
    mts.save(model, tmp_path, packed=packed)
    assert_same_state(mts.load(tmp_path), state_of(model))
    assert_same_state(mts.load(tmp_path, dtype="auto"), state_of(model))
    assert {p.dtype for p in mts.load(tmp_path, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_dtypes_that_are_lost_are_named(tmp_path):
    """Those of tensors that have other names in memory than in the files."""
    model = mts.sparsify(tiny_mixtral().bfloat16(), "magnitude")
    model.model.layers[0].mlp.experts.float()
    mts.save(model, tmp_path)
    lost = r"^not loaded as stored, in torch.bfloat16: '.*experts.*' \(torch.float32\).*: give dtype="
    with pytest.warns(UserWarning, match=lost):
        mts.load(tmp_path)


def test_shards_and_load_are_for_models_of_transformers(saved, tmp_path):
    one_file = "max_shard_size is for transformers' models; a Net goes into one file"
    refused(mts.save, sparse("net"), str(tmp_path), max_shard_size="1GB", match=one_file)
    refused(mts.load, saved("net"), match=r"holds no config\.json: build the Net and call restore\(model, folder\)")


HALF = mts.Unstructured(0.5, "matrix")


@pytest.mark.parametrize("how", ["set_mask", "load_state_dict"])
@pytest.mark.parametrize(("pattern", "shown", "zeros"), [("1:4", "1:4", 0.75), (HALF, "50% per matrix", 0.5)])
def test_reports_say_that_masks_were_replaced(how, pattern, shown, zeros, tmp_path):
    """Of 2:4 masks, by others with more zeros or with as many in other groups."""
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")
    names = [layer.name for layer in mts.report(model).layers]
    assert not any(layer.notes for layer in mts.report(model).layers)
    masks = dict(mts.named_masks(mts.sparsify(tiny_llama(), "magnitude", pattern=pattern)))
    if how == "set_mask":
        for name, mask in masks.items():
            mts.set_mask(model, name, mask)
    else:
        state = {f"{name}_mask": mask for name, mask in masks.items()}
        with pytest.warns(UserWarning, match="were written to pruned places"):  # the values are those of the old masks
            model.load_state_dict({**model.state_dict(), **state})
    mts.save(model, tmp_path / "saved")
    for report in map(mts.report, (model, tmp_path / "saved", mts.load(tmp_path / "saved"))):
        assert [layer.name for layer in report.layers] == names
        for layer in report.layers:
            assert (layer.pattern, layer.zeros / layer.size, layer.error) == ("2:4", zeros, None)
            assert layer.notes == [f"its mask was replaced since, by one of {shown}"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_hub_name_is_downloaded(packed, tmp_path, monkeypatch):
    """As a name that is no folder here: the hub's client gives a folder in its cache, and its weights and masks are
    asked for one by one."""
    model, asked = sparse("llama"), []
    mts.save(model, tmp_path, packed=packed)
    monkeypatch.setattr(folder, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    monkeypatch.setattr(folder, "cached_file", lambda *asking, revision: asked.append((*asking, revision)))
    assert_same_state(mts.load("org/name", revision="main"), state_of(model))
    weights = "packed.model.safetensors" if packed else "model.safetensors"
    assert asked == ["org/name", *(("org/name", name, "main") for name in sorted([weights, MASKS]))]


def test_a_report_does_not_call_dense_what_was_masked_by_hand(tmp_path):
    model = mts.sparsify(tiny_llama(tie_word_embeddings=False), "magnitude", pattern="2:4")
    assert "lm_head" in {x.name for x in mts.report(model).skipped}
    mts.set_mask(model, "lm_head.weight", torch.rand(97, 32) > 0.5)
    mts.save(model, tmp_path / "saved")
    for report in map(mts.report, (model, tmp_path / "saved")):
        by_hand = [x.name for x in report.skipped if "set by hand" in x.reason]
        assert (by_hand, {x.name for x in report.skipped}) == (["lm_head"], {"lm_head", "model.embed_tokens"})
