"""Folders that are damaged, edited or made to mislead, and models that they do not fit."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.folder import DESCRIPTION, MASKS
from tests.checkpoint.folders import WEIGHT, change_config, change_tensors, relist, rewrite, scrambled, sparse
from tests.faults.faulty import flip
from tests.helpers import assert_bits, assert_same_state, refused, state_of, tiny_llama
from tests.models.tiny import tiny_gpt2, tiny_mixtral


def test_restore_onto_another_dtype(saved):
    """One line, and with what it says to do it works."""
    model = tiny_llama().bfloat16()
    count = len(list(model.parameters()))
    message = refused(mts.restore, model, saved("llama"))
    assert ": torch.float32 there and torch.bfloat16 in the model: '" in message
    assert message.endswith(f"'; and {count - 1} more; convert it first, model.to(torch.float32)")
    assert "\n" not in message
    mts.restore(model.to(torch.float32), saved("llama"))
    one = tiny_llama()
    one.model.norm.bfloat16()
    of_norm = r"^[^\n]*: torch.float32 there and [^:]*: 'model.norm.weight'; conv"
    refused(mts.restore, one, saved("llama"), match=of_norm)


def test_restore_onto_a_model_without_the_ties(tmp_path):
    """A tie that only one side has is fine where the values agree, and an error where they do not."""
    mts.save(tiny_llama(tie_word_embeddings=False), tmp_path / "untied")
    differ = "'lm_head.weight' and 'model.embed_tokens.weight' are one tensor in the model and differ there"
    refused(mts.restore, tiny_llama(), tmp_path / "untied", parts=[differ])
    tied = tiny_llama()
    mts.save(tied, tmp_path / "tied")
    untied = mts.restore(tiny_llama(tie_word_embeddings=False), tmp_path / "tied")
    assert_bits(untied.lm_head.weight, tied.lm_head.weight)


def written(name: str, content: bytes | str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, length: int) -> Callable[[Path], object]:
    """A file up to so many bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def flipped(name: str, where: float) -> Callable[[Path], None]:
    """One bit, at a share of the file's length."""
    return lambda folder: flip(str(folder / name), where)


def edited(old: str, new: str) -> Callable[[Path], object]:
    """By somebody who does not know of its checksum."""

    def change(folder: Path) -> None:
        text = (folder / DESCRIPTION).read_text()
        assert old in text
        (folder / DESCRIPTION).write_text(text.replace(old, new, 1))

    return change


def described(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Edited by somebody who knows the format."""
    return lambda folder: rewrite(folder, change)


def entry(**changes: object) -> Callable[[Path], None]:
    """What is said of a mask."""
    return described(lambda description: description["masks"][WEIGHT].update(changes))


def masked(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder / MASKS, change)


def grown(folder: Path) -> None:
    """One pruned weight, by as little as can be."""
    place = (0, int((load_file(folder / "model.safetensors")[WEIGHT][0] == 0).nonzero()[7]))
    change_tensors(folder / "model.safetensors", lambda weights: weights[WEIGHT].__setitem__(place, 1e-30))


def listed(name: str, content: bytes) -> Callable[[Path], None]:
    """A file with another content, which the description tells."""

    def replaced(folder: Path) -> None:
        (folder / name).write_bytes(content)
        relist(folder, name)

    return replaced


NO_FORMAT = "sparsity.json' is truncated, edited or of another format"
EDITED = "has been edited since it was saved (its checksum differs)"
NOT_ASKED_FOR = "sparsity.json' does not hold what its format asks for"
NO_BITS = f"mask '{WEIGHT}' does not hold the bits of shape"
NOT_ZERO = f"weight '{WEIGHT}' is not zero in {{}} places where its mask is False"
NOT_OURS = "weight file 'model.safetensors' does not belong to the folder"
NEWER = '{"format": "modelopt_sparse", "format_version": 3, "unheard": "of"}'
DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    *((lambda f, name=name: (f / name).unlink(), f"file '{name}' is missing") for name in ("model.safetensors", MASKS)),
    *((cut(DESCRIPTION, length), NO_FORMAT) for length in (0, 1, 200, 2000)),
    *((cut(name, -9), f"file '{name}' has ") for name in ("model.safetensors", MASKS)),
    *(
        (flipped(name, where), "sparsity.json" if name == DESCRIPTION else f"file '{name}' has changed since it was")
        for name in ("model.safetensors", MASKS, DESCRIPTION)
        for where in (0.03, 0.5, 0.97)
    ),
    (edited('"2:4"', '"1:4"'), EDITED),
    (edited('"aliases": {}', '"aliases": {"a": "b"}'), EDITED),
    *(
        (written(DESCRIPTION, text), NO_FORMAT)
        for text in ("[]", "null", '"modelopt_sparse"', "{}", '{"format_version": 1}', '{"a": NaN}')
    ),
    (described(lambda d: d.update(format="other")), NO_FORMAT),
    (written(DESCRIPTION, NEWER), "has format version 3, above 2: update modelopt_sparse"),
    (described(lambda d: d.pop("files")), f"{NOT_ASKED_FOR}: KeyError('files')"),
    (described(lambda d: d.update(masks=[])), NOT_ASKED_FOR),
    (entry(shape="wide"), NOT_ASKED_FOR),
    (described(lambda d: d["report"]["layers"][0].update(unknown=1)), NOT_ASKED_FOR),
    (described(lambda d: d["files"].pop(MASKS)), f"sparsity.json does not list '{MASKS}'"),
    (described(lambda d: d["files"].pop("model.safetensors")), NOT_OURS),
    (described(lambda d: d["masks"].pop(WEIGHT)), f"mask '{WEIGHT}' is in {MASKS} and not in sparsity.json"),
    (described(lambda d: d["masks"].update(x=d["masks"][WEIGHT])), f"mask 'x' is in sparsity.json and not in {MASKS}"),
    (entry(kept=3), f"mask '{WEIGHT}' keeps 512 weights, not 3"),
    (entry(shape=[32, 40]), f"{NO_BITS} [32, 40]"),
    (entry(shape=[-1, 32]), f"{NOT_ASKED_FOR}: ValueError('a mask has the shape [-1, 32]')"),
    (entry(shape=[1024]), f"mask '{WEIGHT}' has shape [1024], its weight [32, 32]"),
    (described(lambda d: d["files"].update({"../x": d["files"][MASKS]})), "file name '../x' leads out of the folder"),
    (described(lambda d: d["files"].update({"/x": d["files"][MASKS]})), "file name '/x' leads out of the folder"),
    (masked(lambda m: m.update({WEIGHT: m[WEIGHT][:-1].clone()})), NO_BITS),
    (masked(lambda m: m.update({WEIGHT: m[WEIGHT].to(torch.int32)})), NO_BITS),
    (masked(lambda m: m.update({WEIGHT: m[WEIGHT] & 0})), f"mask '{WEIGHT}' keeps 0 weights, not 512"),
    (masked(lambda m: m.update({WEIGHT: ~m[WEIGHT]})), NOT_ZERO.format(512)),
    (grown, NOT_ZERO.format(1)),
    (masked(lambda m: m.update({"x": m.pop(WEIGHT)})), f"mask 'x' is in {MASKS} and not in sparsity.json"),
    (listed(MASKS, b"\x80\x04pickled"), f"file '{MASKS}' cannot be read"),
    (listed("model.safetensors", b"\x80\x04pickled"), "model.safetensors' is missing, truncated or damaged"),
]


@pytest.mark.parametrize(("change", "reason"), DAMAGED, ids=[f"{i}: {row[1]}" for i, row in enumerate(DAMAGED)])
def test_folders_damaged_or_made_to_mislead(broken, change, reason):
    folder = broken("llama")
    change(folder)
    refused(mts.restore, tiny_llama(), folder, parts=[reason])
    refused(mts.load, folder, match=r"sparsity|safetensors|mask|leads out")


def test_everything_that_is_wrong_stands_in_one_error(broken):
    folder = broken("llama")
    content = (folder / MASKS).read_bytes()
    (folder / MASKS).write_bytes(content[:-1])
    begin = "cannot be restored into this GPT2LMHeadModel:\n- it holds a LlamaForCausalLM, the model is a GPT2LM"
    size = f"\n- file '{MASKS}' has {len(content) - 1} bytes, not {len(content)}"
    rest = ["\n- 'model.embed_tokens.weight' has no place in the model", "\n- and "]
    refused(mts.restore, tiny_gpt2(), folder, parts=[begin, size, *rest])
    folder = folder.rename(folder.parent / "second")
    (folder / MASKS).write_bytes(content)
    masked(lambda masks: masks.update({WEIGHT: ~masks[WEIGHT]}))(folder)
    rewrite(folder, lambda d: d["masks"]["model.layers.0.mlp.up_proj.weight"].update(kept=1))
    wrong = [
        f"\n- weight '{WEIGHT}' is not zero in 512 places",
        "\n- mask 'model.layers.0.mlp.up_proj.weight' keeps 1024 weights, not 1",
        "\n- mask 'model.layers.1.mlp.up_proj.weight' fits no parameter",
        "\n- 'model.layers.1.mlp.up_proj.weight' has no place",
    ]
    refused(mts.restore, tiny_llama(num_hidden_layers=1), folder, parts=wrong)


def test_names_that_differ_on_disk_and_what_does_not_fit(tmp_path):
    """Of a mixture whose experts are single on disk. What is missing transformers would fill with random values."""
    gate, folder = "model.layers.1.mlp.experts.gate_up_proj", tmp_path / "mixtral"
    mts.save(mts.sparsify(tiny_mixtral(), "magnitude", pattern="2:4"), folder)
    weights = folder / "model.safetensors"
    assert gate not in load_file(weights)
    for sizes, part in (
        ({"num_hidden_layers": 3}, "'model.layers.2.mlp.experts.down_proj' of the model is not in"),
        ({"num_hidden_layers": 1}, f"mask '{gate}' fits no parameter"),
        ({"intermediate_size": 64}, "has shape [4, 96, 32] there and [4, 128, 32] in the model"),
    ):
        refused(mts.restore, tiny_mixtral(**sizes), folder, parts=[part])
    gone = [name for name in load_file(weights) if name.startswith("model.layers.1.") and "experts" in name]
    change_tensors(weights, lambda tensors: [tensors.pop(name) for name in gone])
    refused(mts.restore, tiny_mixtral(), folder, parts=[f"'{gate}' of the model is not in the folder"])
    refused(mts.load, folder, match=f"'{gate}' of the model is not in the folder")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: tiny_llama().save_pretrained(path)])
def test_folders_that_save_did_not_write(tmp_path, make):
    folder = tmp_path / "out"
    make(folder)
    unfinished = "holds no sparsity.json: modelopt_sparse.save did not write it to its end"
    refused(mts.restore, tiny_llama(), folder, parts=[unfinished])
    for read in (mts.load, mts.report):
        refused(read, folder, match=r"holds no sparsity\.json")
    nowhere = "is not a folder: give one that modelopt_sparse.save wrote"
    refused(mts.restore, tiny_llama(), tmp_path / "nowhere", parts=[nowhere])


def test_load_reports_what_transformers_could_not_match(broken):
    """config.json asks for one block more than the folder has, or for wider ones: no random weights are let in."""
    folder = broken("llama")
    for change, problem in (
        ({"num_hidden_layers": 3}, "'model.layers.2.mlp.up_proj.weight' of the model is not in the folder"),
        ({"vocab_size": 98}, "'model.embed_tokens.weight' has shape [97, 32] in the folder and [98, 32] in the model"),
    ):
        change_config(folder, **change)
        refused(mts.load, folder, match=re.escape(problem))


@pytest.mark.parametrize("packed", [False, True])
def test_a_generation_config_that_cannot_be_read_is_no_empty_one(tmp_path, packed):
    mts.save(sparse("llama"), tmp_path, packed=packed)
    (tmp_path / "generation_config.json").write_text('{"max_new_')
    refused(mts.load, tmp_path, match=r"generation_config\.json' is not a valid JSON file", error=OSError)


def test_load_returns_the_model_alone_and_leaves_no_sparse_layers_on_disk(saved, tmp_path):
    alone = "output_loading_info: load raises an error for all that it would name"
    refused(mts.load, saved("llama"), output_loading_info=True, match=alone)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    on_disk = f"'{WEIGHT}' is offloaded to disk: .* no disk in device_map"
    refused(mts.load, saved("llama"), device_map=places, offload_folder=tmp_path, match=on_disk)


def test_files_that_no_weights_are_read_from_are_not_looked_at(broken):
    """What docs/format.md says of files that sparsity.json does not list."""
    folder = broken("llama")
    for name in ("model-00009-of-00009.safetensors", "pytorch_model.bin", "notes.txt"):
        (folder / name).write_bytes(b"junk")
    assert_same_state(mts.load(folder), state_of(sparse("llama")))
    assert_same_state(mts.restore(scrambled("llama"), folder), state_of(sparse("llama")))


def test_texts_of_a_description_are_no_commands_to_a_terminal(broken):
    folder = broken("llama")
    rewrite(folder, lambda description: description["report"]["notes"].append("a\x1b]0;owned\x07\u202eb\nc"))
    for found in (mts.report(folder), mts.report(mts.load(folder))):
        assert found.notes[-1] == "a\\x1b]0;owned\\x07\\u202eb\nc"


def into_meta() -> nn.Module:
    with torch.device("meta"):
        return tiny_llama()


def into_one_place() -> nn.Module:
    model = tiny_llama()
    model.model.norm.weight = nn.Parameter(torch.ones(1).expand(32))
    return model


def into_inference() -> nn.Module:
    with torch.inference_mode():
        return tiny_llama()


def into_a_forward_of_its_own() -> nn.Module:
    model = tiny_llama()
    model.get_submodule(WEIGHT.removesuffix(".weight")).forward = lambda x: x
    return model


UNFILLABLE = [
    (into_meta, "on the meta device, where there are no values: 'model.embed_tokens.weight'; and 19"),
    (into_one_place, "several entries in one place of memory (expand): 'model.norm.weight'; clone it first"),
    (into_inference, "made in torch.inference_mode, for reading alone: 'model.embed"),
    (into_a_forward_of_its_own, "forward"),
]


@pytest.mark.parametrize(("make", "reason"), UNFILLABLE)
def test_a_model_that_cannot_be_filled_keeps_its_masks(saved, make, reason):
    model = make()
    name = "model.layers.1.mlp.up_proj.weight"
    if make is not into_meta:
        mts.set_mask(model, name, torch.arange(2048).view(64, 32) % 3 > 0)
    refused(mts.restore, model, saved("llama"), match=f"^[^\n]*{re.escape(reason)}[^\n]*$")


class Stateful(nn.Linear):
    """A layer that keeps a tensor beside its parameters, whose shape may change, and may not take it back."""

    seen, fails = torch.zeros(0), False

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("not now")
        self.seen = state


def test_a_tensor_that_is_extra_state_comes_back(tmp_path):
    model = nn.Sequential(Stateful(8, 4), nn.Linear(4, 4))
    model[0].seen = torch.arange(3.0)
    mts.sparsify(model, "magnitude")
    mts.save(model, tmp_path / "out")
    other = nn.Sequential(Stateful(8, 4), nn.Linear(4, 4))
    mts.restore(other, tmp_path / "out")
    assert_same_state(other, state_of(model))
    other[0].fails, other[0].seen = True, torch.zeros(0)
    with pytest.raises(RuntimeError, match="not now"):
        mts.restore(other, tmp_path / "out")
    assert len([*mts.named_masks(other)]) == 2
    mts.save(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), tmp_path / "without")
    refused(mts.restore, other, tmp_path / "without", parts=["'0._extra_state' of the model is not in the folder"])


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/other/model.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_not_followed(broken, tmp_path, outside):
    folder = broken("llama")
    for name in ("model.safetensors", DESCRIPTION):
        (folder / name).unlink()
    index = {"metadata": {}, "weight_map": {WEIGHT: outside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (mts.verify, partial(mts.sparsify_checkpoint, target=tmp_path / "x", method="magnitude")):
        refused(read, folder, match=f"index.json' names '{outside}', which leads out of the folder")
