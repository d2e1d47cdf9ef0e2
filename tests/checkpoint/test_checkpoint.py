"""Folders: what save writes, what restore and load accept, and what verify finds in them."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import format
from modelopt_sparse.checkpoint import restore as checkpoint
from modelopt_sparse.checkpoint.format import DESCRIPTION, MASKS, pack_mask, unpack_mask
from tests.helpers import TESTBED, assert_bits, assert_same_state, run_python, state_of, tiny_llama, token_batches

GOLDEN = Path(__file__).parent / "golden"

pytestmark = pytest.mark.core


# models -------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A plain module with what a state dict can hold: buffers of several dtypes, a tie, a shared module."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.again = self.second  # one module under two names
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.second.weight
        self.head = nn.Linear(width, 5)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.head(self.tied(self.again(self.second(x)).relu()))


def net() -> Net:
    torch.manual_seed(3)
    model = Net()
    model(torch.randn(32, 8))  # BatchNorm's running statistics and its int64 counter move
    return model.eval()


def tiny_gpt2(**changes) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    settings = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes})).eval()


def tiny_llama_in_bfloat16() -> LlamaForCausalLM:
    torch.set_default_dtype(torch.bfloat16)  # as from_pretrained builds it: .bfloat16() rounds rotary tables as well
    try:
        return tiny_llama()
    finally:
        torch.set_default_dtype(torch.float32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "net": net,
    "bfloat16": tiny_llama_in_bfloat16,
}
PRUNED = {"llama": 14, "gpt2": 8, "net": 3, "bfloat16": 14}


def inputs_of(name: str) -> Tensor:
    return torch.linspace(-2, 2, 64).view(8, 8) if name == "net" else token_batches(1)[0]


@torch.no_grad()
def outputs(name: str, model: nn.Module) -> Tensor:
    out = model(inputs_of(name))
    return out if isinstance(out, Tensor) else out.logits


def sparse(name: str, **options) -> nn.Module:
    # Net's tied pair is a layer like any other; its head is as well, for nothing says what it is
    return mts.sparsify(MODELS[name](), "magnitude", {"pattern": "2:4", **options})


def scrambled(name: str) -> nn.Module:
    """The same architecture with other weights, dense."""
    model = MODELS[name]()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.full_like(tensor, 7))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a sparse model, saved once."""
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            mts.save(sparse(name), root / name)
        return root / name

    return folder


@pytest.fixture
def broken(saved, tmp_path) -> Callable[[str], Path]:
    """A copy of that folder, to be damaged."""

    def folder(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for path in saved(name).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        return target

    return folder


def describe(folder: Path) -> dict:
    return json.loads((folder / DESCRIPTION).read_text())


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    """Edit sparsity.json the way that somebody who knows the format would: the checksum fits again."""
    description = describe(folder)
    del description["checksum"]
    change(description)
    (folder / DESCRIPTION).write_text(json.dumps({**description, "checksum": format.checksum(description)}))


def relist(folder: Path, name: str) -> None:
    """Make sparsity.json agree with a file that has been replaced."""
    path = folder / name
    entry = {"size": path.stat().st_size, "sha256": format.file_hash(path)}
    rewrite(folder, lambda description: description["files"].update({name: entry}))


# packing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "packed"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], [1]),
        ([0, 0, 0, 0, 0, 0, 0, 1], [128]),
        ([1, 1, 0, 0, 1, 0, 1, 0, 0, 1], [0b01010011, 0b00000010]),
        ([], []),
        ([[1, 0], [0, 1], [1, 1]], [0b00111001]),
    ],
)
def test_pack_mask_puts_entry_8k_plus_i_into_bit_i_of_byte_k(mask, packed):
    assert pack_mask(torch.tensor(mask, dtype=torch.bool)).tolist() == packed
    assert unpack_mask(torch.tensor(packed, dtype=torch.uint8), torch.tensor(mask).shape).tolist() == [
        [bool(bit) for bit in row] if isinstance(row, list) else bool(row) for row in mask
    ]


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_unpack_is_the_inverse_of_pack(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_mask(mask)
    flat = mask.flatten().tolist()
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-len(flat) // 8)
    for index, bit in enumerate(flat):
        assert (int(packed[index // 8]) >> (index % 8)) & 1 == bit
    restored = unpack_mask(packed, tuple(shape))
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


def test_pack_mask_takes_masks_that_are_not_contiguous():
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    assert pack_mask(mask.T).tolist() == [0b00110001]  # 1 0, 0 0, 1 1


# the golden folder --------------------------------------------------------------------------------------------------


class Golden(nn.Module):
    """The model in tests/checkpoint/golden, with the dense weights that it was made from. Never change it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 2)
        self.down = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(torch.tensor([[1.0, 2, 3, 4, 4, 3, 2, 1], [-9.0, 1, 8, 2, 1, -5, 1, 6]]))
            self.up.bias.copy_(torch.tensor([0.5, -0.25]))
            self.down.weight.copy_(torch.tensor([[1.0, 1, 1, 1], [0.0, -2, 0, 3], [7.0, 5, 6, 4]]))


GOLDEN_WEIGHTS = {
    "up.weight": [[0, 0, 3, 4, 4, 3, 0, 0], [-9, 0, 8, 0, 0, -5, 0, 6]],
    "up.bias": [0.5, -0.25],
    "down.weight": [[1, 1, 0, 0], [0, -2, 0, 3], [7, 0, 6, 0]],
}
# up: 00111100 10100101, down: 1100 0101 1010, first entry in the lowest bit
GOLDEN_BYTES = {"up.weight": [0b00111100, 0b10100101], "down.weight": [0b10100011, 0b00000101]}


def golden_model() -> nn.Module:
    return mts.sparsify(Golden(), "magnitude", pattern="2:4")


def test_the_golden_folder_still_restores_to_the_bit():
    model = Golden()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(99)
    mts.restore(model, GOLDEN)
    masks = dict(mts.named_masks(model))
    assert masks.keys() == GOLDEN_BYTES.keys()
    for name, values in GOLDEN_WEIGHTS.items():
        assert_bits(model.get_parameter(name), torch.tensor(values, dtype=torch.float32))
        if name in masks:
            assert torch.equal(masks[name], torch.tensor(values) != 0)
    assert [layer.recipe for layer in mts.report(model).layers] == ["magnitude", "magnitude"]
    assert len(mts.verify(model).layers) == 2


def test_the_golden_folder_holds_these_bytes_of_packed_masks():
    content = (GOLDEN / MASKS).read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + header_size]), content[8 + header_size :]
    assert header.keys() - {"__metadata__"} == GOLDEN_BYTES.keys()
    for name, packed in GOLDEN_BYTES.items():
        begin, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == "U8"
        assert header[name]["shape"] == [len(packed)]
        assert list(body[begin:end]) == packed


def test_saving_the_golden_model_today_gives_the_golden_files(tmp_path):
    mts.save(golden_model(), tmp_path / "out")
    assert (tmp_path / "out" / MASKS).read_bytes() == (GOLDEN / MASKS).read_bytes()
    for name in ("model.safetensors", MASKS):
        ours, theirs = load_file(tmp_path / "out" / name), load_file(GOLDEN / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert_bits(tensor, theirs[key])
    ours, theirs = describe(tmp_path / "out"), describe(GOLDEN)
    assert ours.keys() == theirs.keys()
    for key in ("format", "format_version", "model_class", "masks", "aliases"):
        assert ours[key] == theirs[key]
    assert ours["files"].keys() == theirs["files"].keys()
    later = ("seconds", "steps", "expert_tokens")  # times differ, and the golden folder is older than the others
    timeless = [{k: v for k, v in layer.items() if k not in later} for layer in ours["report"]["layers"]]
    assert timeless == [{k: v for k, v in layer.items() if k not in later} for layer in theirs["report"]["layers"]]


# save and restore ---------------------------------------------------------------------------------------------------

IN_A_NEW_PROCESS = """
import sys
from pathlib import Path
from safetensors.torch import save_file
import modelopt_sparse as mts
from tests.checkpoint.test_checkpoint import MODELS, outputs, scrambled
for name in MODELS:
    folder = Path(sys.argv[1]) / name
    made = {"restored": mts.restore(scrambled(name), folder)}
    if (folder / "config.json").is_file():
        made["loaded"] = mts.load(folder)
    for how, model in made.items():
        found = {f"mask {key}": mask for key, mask in mts.named_masks(model)}
        save_file({**found, "outputs": outputs(name, model.eval())}, Path(sys.argv[1]) / f"{name}.{how}")
"""


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """Every model made sparse and saved here, restored and loaded by another process."""
    root = tmp_path_factory.mktemp("process")
    here = {}
    for name in MODELS:
        here[name] = sparse(name)
        mts.save(here[name], root / name)
    done = run_python("-c", IN_A_NEW_PROCESS, root)
    assert done.returncode == 0, done.stderr
    return root, here


@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_gets_bit_equal_outputs_and_masks(other_process, name):
    root, here = other_process
    model = here[name]
    masks = dict(mts.named_masks(model))
    assert len({id(model.get_parameter(key)) for key in masks}) == PRUNED[name]
    for how in ["restored"] if name == "net" else ["restored", "loaded"]:
        found = load_file(root / f"{name}.{how}")
        assert_bits(found.pop("outputs"), outputs(name, model))
        assert {key.removeprefix("mask "): tensor.tolist() for key, tensor in found.items()} == {
            key: mask.tolist() for key, mask in masks.items()
        }


@pytest.mark.parametrize("name", MODELS)
def test_restore_brings_back_every_tensor_tie_class_and_the_report(saved, name):
    model, reference = scrambled(name), sparse(name)

    def places():
        return {key: (id(p), p.data_ptr()) for key, p in model.named_parameters(remove_duplicate=False)}

    before = places()
    assert mts.restore(model, saved(name)) is model
    assert_same_state(model, state_of(reference))
    assert places() == before  # a live optimizer, and whoever holds a view, sees the new values
    found, made = mts.report(model).as_dict(), mts.report(saved(name)).as_dict()
    assert found == made
    assert len(found["layers"]) == PRUNED[name]


def test_restore_replaces_the_masks_that_a_model_has(saved):
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="1:4")
    mts.set_mask(model, "lm_head.weight", torch.zeros(97, 32, dtype=torch.bool))
    mts.restore(model, saved("llama"))
    assert_same_state(model, state_of(sparse("llama")))
    assert {layer.pattern for layer in mts.report(model).layers} == {"2:4"}
    assert mts.report(model).earlier == []


def test_the_report_of_several_runs_is_saved_whole(tmp_path):
    model = sparse("llama", include="*mlp*")
    mts.sparsify(model, "wanda", include="*self_attn*", data_loader=token_batches())
    mts.save(model, tmp_path / "out")
    made = mts.report(model).as_dict()
    assert made["earlier"][0]["layers"]
    assert made["calibration"]["sha256"]
    assert mts.report(tmp_path / "out").as_dict() == made
    assert mts.report(mts.load(tmp_path / "out")).as_dict() == made


def test_masks_set_by_hand_are_saved_without_a_report(tmp_path):
    model = tiny_llama()
    keep = torch.rand(64, 32) < 0.3
    mts.set_mask(model, "model.layers.0.mlp.up_proj.weight", keep)
    mts.save(model, tmp_path / "out")
    with pytest.raises(ValueError, match="carries no report"):
        mts.report(tmp_path / "out")
    restored = mts.restore(sparse("llama"), tmp_path / "out")  # its own masks and report are gone
    assert_same_state(restored, state_of(model))
    with pytest.raises(ValueError, match="carries no report"):
        mts.report(restored)


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


def test_a_model_that_is_itself_a_layer(tmp_path):
    model = nn.Linear(8, 4)
    dense = copy.deepcopy(model)
    mts.set_mask(model, "weight", torch.tensor([[True, False] * 4] * 4))
    mts.save(model, tmp_path / "out")
    assert describe(tmp_path / "out")["model_class"] == "Linear"
    assert_same_state(mts.restore(dense, tmp_path / "out"), state_of(model))


def test_save_writes_an_ordinary_folder(saved, tmp_path):
    """Plain from_pretrained reads it with nothing missing, and config.json is what save_pretrained writes."""
    model = sparse("llama")
    model.save_pretrained(tmp_path / "plain")
    folder = saved("llama")
    assert (folder / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    assert "spars" not in (folder / "config.json").read_text()
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "plain").iterdir()} | {
        DESCRIPTION,
        MASKS,
    }
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert_bits(outputs("llama", loaded), outputs("llama", model))
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear


def test_save_writes_no_masks_among_the_weights(saved):
    for name in MODELS:
        with safe_open(saved(name) / "model.safetensors", framework="pt") as file:
            keys = set(file.keys())
        assert not [key for key in keys if "mask" in key]
        assert "scratch" not in keys


def test_files_are_as_readable_as_any_new_file(saved, tmp_path):
    (tmp_path / "any").touch()
    modes = {path.name: path.stat().st_mode for path in saved("llama").iterdir()}
    assert set(modes.values()) == {(tmp_path / "any").stat().st_mode}, modes


def test_save_zeroes_what_was_written_to_pruned_places(tmp_path):
    model = sparse("llama")
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    mask = dict(mts.named_masks(model))["model.layers.0.mlp.up_proj.weight"]
    with torch.no_grad():
        weight.copy_(torch.where(mask, weight, -5.0))
    mts.save(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert_bits(stored[~mask], torch.zeros(int((~mask).sum())))


def test_companions_travel_with_the_model(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    mts.save(sparse("llama"), tmp_path / "out", companions=[tokenizer])
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("import os")["input_ids"] == tokenizer("import os")["input_ids"]
    assert again.chat_template == tokenizer.chat_template


def test_sharded_folders_restore_load_and_verify(tmp_path):
    model = sparse("llama")
    mts.save(model, tmp_path / "out", max_shard_size="20KB")
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert set(describe(tmp_path / "out")["files"]) == {path.name for path in shards} | {
        "model.safetensors.index.json",
        MASKS,
    }
    assert_same_state(mts.restore(scrambled("llama"), tmp_path / "out"), state_of(model))
    assert_same_state(mts.load(tmp_path / "out"), state_of(model))
    assert len(mts.verify(tmp_path / "out", "2:4").layers) == 14


def test_a_shard_size_is_refused_for_other_modules(tmp_path):
    with pytest.raises(ValueError, match="max_shard_size is for transformers' models; a Net goes into one file"):
        mts.save(sparse("net"), tmp_path / "out", max_shard_size="1GB")


def test_load_hands_options_to_from_pretrained(saved):
    half = mts.load(saved("llama"), dtype=torch.bfloat16, device_map="cpu")
    assert isinstance(half, LlamaForCausalLM)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    full = sparse("llama")
    assert {k: v.tolist() for k, v in mts.named_masks(half)} == {k: v.tolist() for k, v in mts.named_masks(full)}
    for name, mask in mts.named_masks(half):
        weight = half.get_parameter(name)
        assert_bits(weight, full.get_parameter(name).bfloat16())
        assert not weight[~mask].any()
    plain = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.bfloat16)
    assert_bits(outputs("llama", half), outputs("llama", plain))


def test_load_keeps_the_stored_dtype_unless_told_otherwise(saved):
    assert {parameter.dtype for parameter in mts.load(saved("bfloat16")).parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in mts.load(saved("llama")).parameters()} == {torch.float32}


def test_load_needs_a_hugging_face_folder(saved):
    with pytest.raises(ValueError, match=r"holds no config\.json to build its Net from: .*restore\(model, folder\)"):
        mts.load(saved("net"))


# models that are stored under other names than they have in memory --------------------------------------------------


def tiny_mixtral(**changes) -> MixtralForCausalLM:
    """Its experts are one fused parameter in memory and split by expert on disk."""
    torch.manual_seed(0)
    settings = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2}
    return MixtralForCausalLM(MixtralConfig(**{**settings, **changes})).eval()


@pytest.fixture
def mixtral(tmp_path) -> tuple[nn.Module, Path]:
    model = mts.sparsify(tiny_mixtral(), "magnitude", pattern="2:4", include="*self_attn*")
    expert = "model.layers.1.mlp.experts.gate_up_proj"  # fused weights can carry a mask as well
    weight = model.get_parameter(expert)
    mts.set_mask(model, expert, mts.NM(2, 4).mask(weight.detach().abs()))
    mts.save(model, tmp_path / "mixtral")
    stored = set(load_file(tmp_path / "mixtral" / "model.safetensors"))
    assert stored.isdisjoint({expert})
    assert "model.layers.1.self_attn.q_proj.weight" in stored
    return model, tmp_path / "mixtral"


def test_names_that_differ_on_disk(mixtral):
    model, folder = mixtral
    restored = tiny_mixtral()
    with torch.no_grad():
        for parameter in restored.parameters():
            parameter.fill_(7)
    for again in (mts.restore(restored, folder), mts.load(folder)):
        assert_same_state(again, state_of(model))
        assert_bits(again(token_batches(1)[0]).logits, model(token_batches(1)[0]).logits)
    assert len(mts.verify(folder, "2:4").layers) == 8


def test_names_that_differ_on_disk_and_a_model_that_does_not_fit(mixtral):
    _, folder = mixtral
    refused(folder, tiny_mixtral(num_hidden_layers=3), "'model.layers.2.mlp.experts.down_proj' of the model is not in")
    refused(
        folder, tiny_mixtral(num_hidden_layers=1), "mask 'model.layers.1.mlp.experts.gate_up_proj' fits no parameter"
    )
    refused(folder, tiny_mixtral(intermediate_size=64), "has shape [4, 96, 32] there and [4, 128, 32] in the model")


def test_names_that_differ_on_disk_and_an_expert_that_is_missing(mixtral):
    """transformers would fill it with random values."""
    _, folder = mixtral
    weights = load_file(folder / "model.safetensors")
    gone = [key for key in weights if key.startswith("model.layers.1.") and "experts" in key]
    assert len(gone) == 12
    save_file({k: v for k, v in weights.items() if k not in gone}, folder / "model.safetensors", {"format": "pt"})
    relist(folder, "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    refused(folder, tiny_mixtral(), f"'{name}' of the model is not in the folder")
    with pytest.raises(ValueError, match=f"'{name}' of the model is not in the folder"):
        mts.load(folder)


# saving where something is, and failing -----------------------------------------------------------------------------


def test_saving_over_a_folder_leaves_only_the_new_model(tmp_path):
    """One file over shards and back: nothing of the old model is read again, other people's files stay."""
    first, second = sparse("llama"), mts.sparsify(tiny_llama(), "magnitude", pattern="1:4")
    out = tmp_path / "out"
    for model, options in ((first, {}), (second, {"max_shard_size": "20KB"}), (first, {})):
        mts.save(model, out, **options)
        (out / "notes.txt").write_text("mine")
        assert len(list(out.glob("model-*"))) == 0 or options
        assert (out / "model.safetensors").exists() == (not options)
        assert (out / "model.safetensors.index.json").exists() == bool(options)
        assert_same_state(mts.load(out), state_of(model))
        assert_bits(outputs("llama", AutoModelForCausalLM.from_pretrained(out)), outputs("llama", model))
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_can_be_saved_over_the_folder_that_it_was_loaded_from(saved, broken):
    folder = broken("llama")
    mts.save(mts.load(folder), folder)
    assert_same_state(mts.load(folder), state_of(sparse("llama")))


def test_sparsity_json_leaves_first_and_comes_last_in_an_existing_folder(broken, monkeypatch):
    folder = broken("llama")
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    seen = []

    def watch(name):
        original = getattr(Path, name)

        def watched(self, *args, **kwargs):
            if folder in (self.parent, *(Path(arg).parent for arg in args)):
                changed = Path(args[0]) if args else self
                seen.append((name, changed.name, (folder / DESCRIPTION).exists()))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, watched)

    watch("replace")
    watch("unlink")
    mts.save(sparse("llama"), folder)
    assert seen[0][:2] == ("unlink", DESCRIPTION)
    assert seen[-1][:2] == ("replace", DESCRIPTION)
    assert {item[1] for item in seen} >= {"model.safetensors", MASKS, "model-00001-of-00009.safetensors"}
    assert not any(there for _, _, there in seen[1:])


class Interruption(BaseException):
    """Stands in for Ctrl-C."""


@pytest.mark.parametrize("step", ["save_file", "size_and_hash", "library_versions"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_save_that_is_stopped_changes_nothing(broken, tmp_path, monkeypatch, step, existing):
    folder = broken("net") if existing else tmp_path / "deep" / "er" / "out"
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if existing else None

    def stop(*_args, **_kwargs):
        raise Interruption

    monkeypatch.setattr(checkpoint, step, stop)
    with pytest.raises(Interruption):
        mts.save(sparse("net"), folder)
    if existing:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["net"]
    else:
        assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    mts.save(sparse("net"), folder)
    mts.restore(scrambled("net"), folder)


def test_a_save_that_is_stopped_while_files_are_replaced_leaves_no_description(broken, monkeypatch):
    folder = broken("net")

    def stop(self, target):
        del self, target
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(OSError, match=r"has no sparsity\.json now .*save again.*Input/output error"):
        mts.save(sparse("net"), folder)
    assert not (folder / DESCRIPTION).exists()
    assert [path.name for path in folder.parent.iterdir()] == ["net"]


ON_A_FULL_DISK = """
import resource, sys
import modelopt_sparse as mts
from tests.checkpoint.test_checkpoint import sparse
models = {name: sparse(name) for name in ("llama", "net")}
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # config.json fits, the weights do not
for folder in sys.argv[1:]:
    try:
        mts.save(models[folder.rpartition("/")[2]], folder)
    except OSError as error:
        print(type(error).__name__, error)
"""


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(broken, tmp_path):
    existing = [broken("llama"), broken("net")]
    before = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in existing]
    (tmp_path / "new").mkdir()
    folders = [*existing, tmp_path / "new" / "llama", tmp_path / "new" / "net"]
    done = run_python("-c", ON_A_FULL_DISK, *folders)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(folders)
    for folder, line in zip(folders, lines):
        kept = "what was there before is complete" if folder in existing else "nothing is left of it"
        assert line.startswith(f"OSError '{folder}' could not be written ({kept}): ")
        assert "File too large" in line
        assert line.endswith("; the disk is full: free space and save again")
    assert [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in existing] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "net", "new"]
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_oserror_with_its_name(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"out' could not be written .*Permission denied"):
        mts.save(sparse("net"), tmp_path / "out")


def test_saving_to_a_relative_path_and_into_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mts.save(sparse("net"), "some/where")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    mts.save(sparse("net"), ".")
    for folder in (tmp_path / "some" / "where", tmp_path / "here"):
        mts.restore(scrambled("net"), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "some"]


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "pytorch_model.bin", "model.pkl", "model.ckpt"])
def test_pickle_paths_are_refused_with_the_folder_form(tmp_path, name):
    path = tmp_path / name
    advice = f"looks like a pickle file.*give a folder, for example '{tmp_path / path.stem}'"
    with pytest.raises(ValueError, match=advice):
        mts.save(sparse("net"), path)
    assert list(tmp_path.iterdir()) == []
    torch.save({}, path)
    for read in (lambda: mts.restore(net(), path), lambda: mts.load(path), lambda: mts.report(path)):
        with pytest.raises(ValueError, match=advice):
            read()


def test_a_file_where_a_folder_is_expected_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"something of yours")
    with pytest.raises(ValueError, match="is a file: save writes a folder, give another path"):
        mts.save(sparse("net"), path)
    assert path.read_bytes() == b"something of yours"
    with pytest.raises(ValueError, match=r"weights\.safetensors' is not a folder"):
        mts.restore(net(), path)


def test_what_has_no_values_cannot_be_saved(tmp_path):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"'first\.weight' is on the meta device.*load the model before saving"):
        mts.save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_tensor_cannot_be_saved(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"anything": 1}

        def set_extra_state(self, state):
            del state

    with pytest.raises(ValueError, match=r"'0\._extra_state' is a dict: only tensors can be saved without pickle"):
        mts.save(nn.Sequential(Odd(8, 4)), tmp_path / "out")


# attacks ------------------------------------------------------------------------------------------------------------


def refused(folder: Path, model: nn.Module, *parts: str) -> str:
    """restore raises one ValueError that names the folder and every given part, and leaves the model alone."""
    before = state_of(model)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        mts.restore(model, folder)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert_same_state(model, before)
    return message


WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def test_restore_onto_another_class(saved):
    torch.manual_seed(0)
    config = MistralConfig(**{k: getattr(tiny_llama().config, k) for k in ("vocab_size", "hidden_size")})
    config.update({k: getattr(tiny_llama().config, k) for k in ("intermediate_size", "num_hidden_layers")})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True})
    same_tensors = MistralForCausalLM(config)
    assert {k: v.shape for k, v in same_tensors.state_dict().items()} == {
        k: v.shape for k, v in tiny_llama().state_dict().items()
    }
    message = refused(saved("llama"), same_tensors, "cannot be restored into this MistralForCausalLM")
    assert message.endswith(": it holds a LlamaForCausalLM, the model is a MistralForCausalLM")


def test_restore_onto_other_shapes(saved):
    refused(
        saved("llama"),
        tiny_llama(intermediate_size=96),
        "'model.layers.1.mlp.down_proj.weight' has shape [32, 64] there and [32, 96] in the model",
        "'model.layers.0.mlp.gate_proj.weight' has shape [64, 32] there and [96, 32] in the model",
    )


def test_restore_onto_another_dtype(saved):
    refused(
        saved("llama"),
        tiny_llama().bfloat16(),
        "'model.norm.weight' is torch.float32 there and torch.bfloat16 in the model: convert the model first",
    )


def test_restore_onto_more_blocks(saved):
    refused(
        saved("llama"), tiny_llama(num_hidden_layers=3), "'model.layers.2.input_layernorm.weight' of the model is not"
    )


def test_restore_onto_fewer_blocks(saved):
    refused(
        saved("llama"),
        tiny_llama(num_hidden_layers=1),
        "'model.layers.1.input_layernorm.weight' has no place in the model",
        "mask 'model.layers.1.mlp.up_proj.weight' fits no parameter of the model",
    )


def test_restore_onto_a_model_without_the_ties(broken, tmp_path):
    """A tie that only one side has is fine where the values agree, and an error where they do not."""
    mts.save(tiny_llama(tie_word_embeddings=False), tmp_path / "untied")
    refused(
        tmp_path / "untied",
        tiny_llama(),
        "'lm_head.weight' and 'model.embed_tokens.weight' are one tensor in the model and differ there",
    )
    tied = tiny_llama()
    mts.save(tied, tmp_path / "tied")
    untied = mts.restore(tiny_llama(tie_word_embeddings=False), tmp_path / "tied")
    assert_bits(untied.lm_head.weight, tied.lm_head.weight)


@pytest.mark.parametrize("name", ["model.safetensors", MASKS])
@pytest.mark.parametrize("model", ["llama", "net"])
def test_truncated_files(broken, name, model):
    folder = broken(model)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-9])
    refused(folder, MODELS[model](), f"file '{name}' has {len(content) - 9} bytes, not {len(content)}")


@pytest.mark.parametrize("name", ["model.safetensors", MASKS, DESCRIPTION])
@pytest.mark.parametrize("where", [0.03, 0.5, 0.97])
def test_a_flipped_bit_in_any_file(broken, name, where):
    folder = broken("llama")
    content = bytearray((folder / name).read_bytes())
    content[int(len(content) * where)] ^= 1
    (folder / name).write_bytes(content)
    reason = "sparsity.json" if name == DESCRIPTION else f"file '{name}' has changed since it was saved"
    refused(folder, tiny_llama(), reason)
    with pytest.raises(ValueError, match=r"sparsity|safetensors"):
        mts.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", MASKS])
def test_missing_files(broken, name):
    folder = broken("llama")
    (folder / name).unlink()
    refused(folder, tiny_llama(), f"file '{name}' is missing")


@pytest.mark.parametrize("length", [0, 1, 200, 2000])
def test_a_truncated_description(broken, length):
    folder = broken("llama")
    (folder / DESCRIPTION).write_bytes((folder / DESCRIPTION).read_bytes()[:length])
    refused(folder, tiny_llama(), "sparsity.json' is truncated, edited or of another format")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"2:4"', '"1:4"'), ('"kept": 512', '"kept": 513'), ('"aliases": {}', '"aliases": {"a": "b"}'), ("Llama", "Lama")],
)
def test_an_edited_description(broken, old, new):
    folder = broken("llama")
    text = (folder / DESCRIPTION).read_text()
    assert old in text
    (folder / DESCRIPTION).write_text(text.replace(old, new, 1))
    refused(folder, tiny_llama(), "has been edited since it was saved (its checksum differs)")


@pytest.mark.parametrize("text", ["[]", "null", '"modelopt_sparse"', "{}", '{"format_version": 1}', '{"a": NaN}'])
def test_json_of_another_format(broken, text):
    folder = broken("llama")
    (folder / DESCRIPTION).write_text(text)
    refused(folder, tiny_llama(), "sparsity.json' is truncated, edited or of another format")


def test_a_description_of_another_program(broken):
    folder = broken("llama")
    rewrite(folder, lambda description: description.update(format="other"))
    refused(folder, tiny_llama(), "sparsity.json' is not in the format of modelopt_sparse.save")


def test_a_newer_format(broken):
    folder = broken("llama")
    (folder / DESCRIPTION).write_text('{"format": "modelopt_sparse", "format_version": 2, "unheard": "of"}')
    refused(folder, tiny_llama(), "has format version 2, this library reads up to 1: update modelopt_sparse")


def _shape_of_another(description):
    description["masks"][WEIGHT]["shape"] = [1024]


def _not_a_shape(description):
    description["masks"][WEIGHT]["shape"] = "wide"


def _no_masks_listed(description):
    del description["files"][MASKS]


def _other_report(description):
    description["report"]["layers"][0]["unknown"] = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("files"), "sparsity.json' does not hold what its format asks for: KeyError('files')"),
        (lambda d: d.update(masks=[]), "sparsity.json' does not hold what its format asks for"),
        (_not_a_shape, "sparsity.json' does not hold what its format asks for"),
        (_other_report, "sparsity.json' does not hold what its format asks for"),
        (_no_masks_listed, f"sparsity.json does not list '{MASKS}'"),
        (
            lambda d: d["files"].pop("model.safetensors"),
            "weight file 'model.safetensors' does not belong to the folder",
        ),
        (lambda d: d["masks"].pop(WEIGHT), f"mask '{WEIGHT}' is in {MASKS} and not in sparsity.json"),
        (lambda d: d["masks"].update(other=d["masks"][WEIGHT]), f"mask 'other' is in sparsity.json and not in {MASKS}"),
        (lambda d: d["masks"][WEIGHT].update(kept=3), f"mask '{WEIGHT}' keeps 512 weights, not 3"),
        (
            lambda d: d["masks"][WEIGHT].update(shape=[32, 40]),
            f"mask '{WEIGHT}' does not hold the bits of shape [32, 40]",
        ),
        (_shape_of_another, f"mask '{WEIGHT}' has shape [1024], its weight [32, 32]"),
        (lambda d: d["files"].update({"../x": d["files"][MASKS]}), "file name '../x' leads out of the folder"),
        (
            lambda d: d["files"].update({"/etc/hosts": d["files"][MASKS]}),
            "file name '/etc/hosts' leads out of the folder",
        ),
    ],
)
def test_a_description_made_to_mislead(broken, change, reason):
    folder = broken("llama")
    rewrite(folder, change)
    refused(folder, tiny_llama(), reason)


def test_a_path_that_leads_out_is_not_even_read(broken, monkeypatch):
    folder = broken("llama")
    secret = folder.parent / "secret"
    secret.write_bytes(b"x" * 10)
    rewrite(folder, lambda d: d["files"].update({"../secret": {"size": 10, "sha256": "0"}}))
    read = []
    original = format.file_hash
    monkeypatch.setattr(format, "size_and_hash", lambda path: read.append(path.name) or original(path))
    refused(folder, tiny_llama(), "'../secret' leads out")
    assert "secret" not in read


def replace_masks(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    masks = load_file(folder / MASKS)
    change(masks)
    save_file(masks, folder / MASKS)
    relist(folder, MASKS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update({WEIGHT: m[WEIGHT][:-1].clone()}), f"mask '{WEIGHT}' does not hold the bits of shape"),
        (lambda m: m.update({WEIGHT: m[WEIGHT].to(torch.int32)}), f"mask '{WEIGHT}' does not hold the bits of shape"),
        (lambda m: m.update({WEIGHT: m[WEIGHT] & 0}), f"mask '{WEIGHT}' keeps 0 weights, not 512"),
        (
            lambda m: m.update({WEIGHT: ~m[WEIGHT]}),
            f"weight '{WEIGHT}' is not zero in 512 places where its mask is False",
        ),
        (lambda m: m.update({"x": m.pop(WEIGHT)}), f"mask 'x' is in {MASKS} and not in sparsity.json"),
    ],
)
def test_masks_made_to_mislead(broken, change, reason):
    folder = broken("llama")
    replace_masks(folder, change)
    refused(folder, tiny_llama(), reason)


def test_a_masks_file_that_is_no_safetensors_file(broken):
    folder = broken("llama")
    (folder / MASKS).write_bytes(b"\x80\x04pickled")
    relist(folder, MASKS)
    refused(folder, tiny_llama(), f"file '{MASKS}' cannot be read")


def test_a_weights_file_that_is_no_safetensors_file(broken):
    folder = broken("llama")
    (folder / "model.safetensors").write_bytes(b"\x80\x04pickled")
    relist(folder, "model.safetensors")
    refused(folder, tiny_llama(), "the weights cannot be read")


@pytest.mark.parametrize("name", ["llama", "net"])
def test_a_single_nonzero_under_the_mask(broken, name):
    folder = broken(name)
    key, mask = next(iter(mts.named_masks(sparse(name))))
    weights = load_file(folder / "model.safetensors")
    place = (~mask).nonzero()[7]
    weights[key][tuple(place)] = 1e-30
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    relist(folder, "model.safetensors")
    reason = f"weight '{key}' is not zero in 1 places where its mask is False"
    refused(folder, MODELS[name](), reason)
    if name == "llama":
        with pytest.raises(ValueError, match=reason):
            mts.load(folder)


def test_weights_that_were_added_to_the_folder(broken, tmp_path):
    """from_pretrained would read the added file instead of the shards that the description vouches for."""
    mts.save(sparse("llama"), tmp_path / "out", max_shard_size="20KB")
    tiny_llama().save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "out" / "model.safetensors")
    refused(tmp_path / "out", tiny_llama(), "weight file 'model.safetensors' does not belong to the folder")
    with pytest.raises(ValueError, match=r"weight file 'model\.safetensors' does not belong to the folder"):
        mts.load(tmp_path / "out")


def test_a_tensor_too_many_and_one_too_few(broken):
    folder = broken("net")
    weights = load_file(folder / "model.safetensors")
    weights["extra"] = weights.pop("norm.running_mean")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    relist(folder, "model.safetensors")
    refused(folder, net(), "'norm.running_mean' of the model is not in the folder", "'extra' has no place in the model")


def test_everything_that_is_wrong_stands_in_one_error(broken):
    folder = broken("llama")
    content = (folder / MASKS).read_bytes()
    (folder / MASKS).write_bytes(content[:-1])
    refused(
        folder,
        tiny_gpt2(),
        "cannot be restored into this GPT2LMHeadModel:\n- it holds a LlamaForCausalLM, the model is a GPT2LMHeadModel",
        f"\n- file '{MASKS}' has {len(content) - 1} bytes, not {len(content)}",
        "\n- 'model.embed_tokens.weight' has no place in the model",
        "\n- and ",
    )
    folder = folder.rename(folder.parent / "second")
    (folder / MASKS).write_bytes(content)
    replace_masks(folder, lambda masks: masks.update({WEIGHT: ~masks[WEIGHT]}))
    rewrite(folder, lambda d: d["masks"]["model.layers.0.mlp.up_proj.weight"].update(kept=1))
    refused(
        folder,
        tiny_llama(num_hidden_layers=1),
        f"\n- weight '{WEIGHT}' is not zero in 512 places",
        "\n- mask 'model.layers.0.mlp.up_proj.weight' keeps 1024 weights, not 1",
        "\n- mask 'model.layers.1.mlp.up_proj.weight' fits no parameter",
        "\n- 'model.layers.1.mlp.up_proj.weight' has no place",
    )


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: tiny_llama().save_pretrained(path)])
def test_folders_that_save_did_not_write(tmp_path, make):
    folder = tmp_path / "out"
    make(folder)
    refused(
        folder, tiny_llama(), "holds no sparsity.json: it is not a folder that modelopt_sparse.save wrote to its end"
    )
    for read in (mts.load, mts.report):
        with pytest.raises(ValueError, match=r"holds no sparsity\.json"):
            read(folder)


def test_a_folder_that_is_not_there(tmp_path):
    refused(tmp_path / "nowhere", tiny_llama(), "is not a folder: give one that modelopt_sparse.save wrote")


def test_load_reports_what_transformers_could_not_match(broken):
    """config.json asks for one block more than the folder has: no random weights are let in."""
    folder = broken("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' of the model is not in the folder"):
        mts.load(folder)


# verify -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["model", "folder"])
def judged(request, tmp_path):
    """A function that verifies a model as it is, or through the folder that it is saved to."""

    def judge(model: nn.Module, pattern: object = None, plain: bool = False) -> mts.Verification:
        if request.param == "model":
            return mts.verify(model, pattern)
        if plain:
            model.save_pretrained(tmp_path / "out")
        else:
            mts.save(model, tmp_path / "out")
        return mts.verify(tmp_path / "out", pattern)

    return judge


@pytest.mark.parametrize("name", ["llama", "gpt2", "bfloat16"])
def test_verify_finds_the_pattern_in_every_layer(judged, name):
    found = judged(sparse(name), "2:4")
    assert len(found.layers) == PRUNED[name]
    assert {item.pattern for item in found.layers} == {"2:4"}
    assert all(item.zeros * 2 == item.size and item.problem == "" for item in found.layers)
    assert "All" in str(found)


def test_verify_uses_the_patterns_in_the_report(judged):
    model = mts.sparsify(
        tiny_llama(), "magnitude", pattern="50%", rules={"*down_proj": {"pattern": "4:8"}, "*q_proj": None}
    )
    found = {item.name.rpartition(".")[2]: item.pattern for item in judged(model).layers}
    assert found["down_proj"] == "4:8"
    assert found["up_proj"] == "50% per matrix"
    assert "q_proj" not in found


@pytest.mark.parametrize(("pattern", "kept"), [("1:4", "4 hold"), ("75%", "matrix holds")])
def test_verify_refuses_a_stricter_pattern(judged, pattern, kept):
    with pytest.raises(ValueError, match=rf"^14 of 14 layers do not hold their pattern: model\..*{kept} more nonzeros"):
        judged(sparse("llama"), pattern)


def test_verify_accepts_a_looser_pattern(judged):
    assert len(judged(sparse("llama"), "3:4").layers) == 14
    assert len(judged(sparse("llama", pattern="1:4"), "2:4").layers) == 14


def test_verify_counts_an_unstructured_pattern_in_the_scope_that_it_was_made_with():
    """Rows of 5 have 2 zeros each at 50 %, for round(2.5) = 2: half of each row, not half of the matrix."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    mts.sparsify(model, "magnitude", pattern=mts.Unstructured(0.5, scope="row"))
    assert int((model[0].weight == 0).sum()) == 8
    mts.verify(model, "50%")
    with pytest.raises(ValueError, match="0: 1 matrix holds more nonzeros than 50% per matrix allows"):
        mts.verify(model, "50% per matrix")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_verify_finds_a_single_nonzero_too_many(name, tmp_path):
    """On the model itself, and in a folder whose weights were changed by somebody who kept the files valid."""
    model = mts.export(sparse(name))
    key = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}[name]
    weight = model.get_parameter(f"{key}.weight")
    place = tuple((weight == 0).nonzero()[5])
    with torch.no_grad():
        weight[place] = 1e-30
    problem = rf"1 of {PRUNED[name]} layers do not hold their pattern: {key}: 1 group of 4 holds more nonzeros than 2:4"
    with pytest.raises(ValueError, match=problem):
        mts.verify(model, "2:4")
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match=problem):
        mts.verify(tmp_path / "out", "2:4")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_verify_takes_negative_zero_for_a_nonzero(name):
    model = mts.export(sparse(name))
    layer = mts.verify(model, "2:4").layers[-1].name
    weight = model.get_parameter(f"{layer}.weight")
    with torch.no_grad():
        weight[tuple((weight == 0).nonzero()[3])] = -0.0
    problem = f"{layer}: 1 group of 4 holds more nonzeros than 2:4 allows, with -0.0 counted as one"
    with pytest.raises(ValueError, match=problem):
        mts.verify(model, "2:4")


def test_verify_accepts_negative_zero_among_the_kept():
    model = sparse("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[tuple(weight.nonzero()[0])] = -0.0
    assert len(mts.verify(model, "2:4").layers) == 14


def test_verify_knows_the_axis_of_transposed_weights(tmp_path):
    """GPT-2 keeps weights as [in, out]: 2:4 along the wrong axis is not 2:4, in memory and on disk."""
    model = tiny_gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                module.weight[:, 0::4] = 0
                module.weight[:, 1::4] = 0
    model.save_pretrained(tmp_path / "out")
    for judged in (model, tmp_path / "out"):
        with pytest.raises(
            ValueError, match=r"8 of 8 layers do not hold their pattern: transformer\.h\.0\.attn\.c_attn"
        ):
            mts.verify(judged, "2:4")


def test_verify_of_weights_that_disagree_with_their_mask():
    model = sparse("llama")
    name = "model.layers.0.mlp.up_proj"
    mask = dict(mts.named_masks(model))[f"{name}.weight"]
    weight = model.get_parameter(f"{name}.weight")
    with torch.no_grad():  # move one kept weight of a group to a pruned place: still 2:4
        group, allowed = weight[0, :4], mask[0, :4]
        kept, pruned = int(allowed.nonzero()[0]), int((~allowed).nonzero()[0])
        group[pruned] = group[kept].clone()
        group[kept] = 0
    assert int((weight[0, :4] != 0).sum()) == 2
    with pytest.raises(ValueError, match=rf"{name}: 1 entry is not \+0\.0 where the mask is False"):
        mts.verify(model, "2:4")


def test_verify_of_a_mask_that_lets_more_grow_than_the_pattern_allows(judged):
    model = sparse("llama")
    mts.set_mask(model, WEIGHT, torch.ones(32, 32, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"q_proj: 256 groups of 4 hold more entries kept by the mask than 2:4 allows"):
        judged(model)


def test_verify_of_masks_set_by_hand(judged):
    """Without a report the layers that carry masks are the pruned ones."""
    model = tiny_llama()
    mts.set_mask(model, WEIGHT, torch.tensor([True, False] * 16).repeat(32, 1))
    assert [item.name for item in judged(model, "2:4").layers] == [WEIGHT.removesuffix(".weight")]


def test_verify_of_plain_weights_looks_at_every_default_target(judged):
    exported = mts.export(sparse("gpt2"))
    del exported.sparsity_report
    assert len(judged(exported, "2:4", plain=True).layers) == 8
    with pytest.raises(ValueError, match="8 of 8 layers do not hold their pattern"):
        judged(tiny_gpt2(), "2:4", plain=True)


def test_verify_of_a_plain_export_with_save_pretrained(tmp_path):
    mts.export(sparse("gpt2")).save_pretrained(tmp_path / "out")
    assert len(mts.verify(tmp_path / "out", "2:4").layers) == 8


def test_verify_without_report_and_pattern_is_an_error(judged):
    with pytest.raises(
        ValueError, match="no report that says which pattern to look for: give pattern=, for example '2:4'"
    ):
        judged(tiny_llama(), plain=True)


def test_verify_of_a_pattern_that_does_not_fit():
    model = mts.sparsify(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)), "magnitude", pattern="50%")
    with pytest.raises(ValueError, match="0: 6 input channels are not a multiple of 4, so 2:4 does not fit"):
        mts.verify(model, "2:4")


def test_verify_of_a_folder_that_does_not_say_what_its_model_is(saved, tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json.*restore it into its model and verify that"):
        mts.verify(saved("net"), "2:4")
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        mts.verify(tmp_path / "nowhere", "2:4")


def test_verify_of_a_folder_with_damaged_masks(broken):
    folder = broken("llama")
    (folder / MASKS).write_bytes(b"junk")
    with pytest.raises(ValueError, match=f"has damaged masks: file '{MASKS}' cannot be read"):
        mts.verify(folder)


def test_verify_names_layers_of_a_report_that_are_not_there():
    model = sparse("llama")
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=r"layer 'model\.layers\.1\..*' of the report is not in this LlamaForCausalLM"):
        mts.verify(model)
