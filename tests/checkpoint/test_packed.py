"""Packed folders: to the bit there and back, read by all that reads folders, refused where they are broken."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import packed as form
from modelopt_sparse.checkpoint.folder import DESCRIPTION, MASKS, pack_mask, unpack_mask, write_masks
from modelopt_sparse.checkpoint.packed import PackedFile, pack_files, unpack_files
from modelopt_sparse.checkpoint.save import add_masks
from tests import helpers
from tests.checkpoint.folders import MODELS, WEIGHT, change_tensors, describe, files_of, relist, scrambled, sparse
from tests.checkpoint.streams import Stopping, batches, streamed
from tests.checkpoint.streams import saved as dense
from tests.faults.faulty import flip
from tests.helpers import (
    assert_bits,
    assert_same_masks,
    assert_same_state,
    refused,
    state_of,
    tiny_llama,
    token_batches,
)
from tests.models.expert_models import MODELS as MIXTURES

PACKED = "packed.model.safetensors"


def pairs(folder: Path, model: nn.Module, **options: Any) -> tuple[Path, Path]:
    """(what `save` writes of a model, what it writes packed)."""
    mts.save(model, folder / "plain", **options)
    mts.save(model, folder / "packed", packed=True, **options)
    return folder / "plain", folder / "packed"


@pytest.fixture
def packed(saved, tmp_path) -> Callable[[str], Path]:
    """A packed copy of the folder of a sparse model, to be damaged."""

    def folder(name: str) -> Path:
        mts.pack(saved(name), tmp_path / f"packed-{name}")
        return tmp_path / f"packed-{name}"

    return folder


# masks as bits --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_entry_8k_plus_i_goes_into_bit_i_of_byte_k_and_back(shape, seed):
    """What is behind the end is 0; dimensions may lie in memory in another order."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = mask.mT if mask.dim() > 1 else mask
    packed = pack_mask(mask)
    flat = mask.flatten().tolist()
    assert packed.dtype == torch.uint8
    assert [bool(byte >> i & 1) for byte in packed.tolist() for i in range(8)] == flat + [False] * (-len(flat) % 8)
    restored = unpack_mask(packed, tuple(mask.shape))
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


# there and back -------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("name", [*MODELS, "shards", *MIXTURES])
def test_saved_packed_unpacked(name, tmp_path):
    """`pack` of what `save` writes is what `save` writes packed, and `unpack` gives the first back, byte for byte. All
    that reads the plain folder reads the packed one alike."""
    options, name = ({"max_shard_size": "20KB"}, "llama") if name == "shards" else ({}, name)
    make = (MIXTURES | MODELS)[name]
    model = mts.sparsify(make(), "magnitude", pattern="2:4", progress=False)
    plain, packed = pairs(tmp_path, model, **options)
    mts.pack(plain, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(packed)
    with torch.device("meta"):  # which torch.set_default_device sets as well: files are read on the CPU
        mts.unpack(packed, tmp_path / "unpacked")
    assert files_of(tmp_path / "unpacked") == files_of(plain)
    modes = {path.stat().st_mode for folder in ("packed", "unpacked") for path in (tmp_path / folder).iterdir()}
    assert modes == {(plain / DESCRIPTION).stat().st_mode}
    assert (describe(packed)["format_version"], describe(plain)["format_version"]) == (2, 1)
    sizes = [sum(path.stat().st_size for path in folder.glob("*model*.safetensors")) for folder in (plain, packed)]
    assert sizes[1] < sizes[0] or name == "net"  # which has fewer bytes than its header
    assert_same_state(mts.restore(make(), packed), state_of(model))
    assert mts.report(packed) == mts.report(plain)
    if name in MIXTURES:  # on disk, an expert's rows, which lie together in the fused weight, are a matrix of their own
        with safe_open(packed / PACKED, framework="pt") as file:
            places = json.loads(file.metadata()["packed"])["places"]
            assert not [key for key in file.keys() if key.endswith(".bits")]  # noqa: SIM118 - not a mapping
        assert {place[0] for place in places.values()} == set(describe(packed)["masks"])
    if name != "net":
        for folder in (packed, plain):
            assert_same_state(mts.load(folder), state_of(model))
        assert str(mts.verify(packed)) == str(mts.verify(plain))


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int64, torch.bool, torch.complex64),
]
ODD = (0.0, -0.0, float("nan"), float("inf"), 1.5)


@st.composite
def tensors(draw) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Name -> (a tensor, a mask that may fit it)."""
    found = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0, 0.1, 0.5, 1]))
        values = torch.randn(shape, generator=generator)
        odd = torch.tensor(ODD)[torch.randint(5, shape, generator=generator)]
        values = torch.where(torch.rand(shape, generator=generator) < 0.2, odd, values).masked_fill(~mask, 0)
        if draw(st.booleans()) and values.numel():
            values.view(-1)[-1] = draw(st.sampled_from(ODD))  # which the mask may not keep
        values = values.nan_to_num() if dtype in (torch.int8, torch.int64) else values
        choice = draw(st.sampled_from(["fits", "none", "another"]))
        masks = {"fits": mask, "none": None, "another": torch.ones(draw(st.integers(0, 99)), dtype=torch.bool)}
        found[f"layer.{number}.weight"] = values.to(dtype), masks[choice]
    return found


@given(tensors(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tensors_come_back_to_the_bit(tmp_path_factory, made, in_place):
    """Whatever their dtypes, shapes and masks are; -0.0, and values that a mask does not keep, come back as well."""
    folder = tmp_path_factory.mktemp("made")
    weights, out = folder / "model.safetensors", folder if in_place else folder / "out"
    out.mkdir(exist_ok=True)
    save_file({name: tensor for name, (tensor, _) in made.items()}, weights, metadata={"format": "pt"})
    write_masks({name: mask for name, (_, mask) in made.items() if mask is not None}, folder / MASKS)
    original = weights.read_bytes()
    (path,) = pack_files(folder, [weights.name], out, folder / MASKS)
    assert weights.exists() != in_place
    found = PackedFile(path, folder / MASKS)
    assert set(found.keys()) == set(made)
    for name, (tensor, _) in made.items():
        assert_bits(found.get_tensor(name), tensor)
    if in_place:
        (folder / "unpacked").mkdir()
        unpack_files(folder, folder / "unpacked")
        assert (folder / "unpacked" / "model.safetensors").read_bytes() == original


def test_what_would_not_get_smaller_stays_as_it_is(tmp_path):
    """Dense weights, and those with so few zeros that their bits would take more."""
    model: Any = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.view(-1)[:10] = 0
    model.save_pretrained(tmp_path / "plain")
    mts.pack(tmp_path / "plain", tmp_path / "packed")
    with safe_open(tmp_path / "packed" / PACKED, framework="pt") as file:
        assert json.loads(file.metadata()["packed"])["places"] == {}
    assert load_file(tmp_path / "packed" / PACKED).keys() == load_file(tmp_path / "plain/model.safetensors").keys()


def test_a_plain_export_is_packed_by_its_zeros(tmp_path):
    """And comes back as it was, without masks and report, which it never had."""
    model: Any = mts.export(sparse("llama"))
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    AutoTokenizer.from_pretrained(helpers.TESTBED / "tiny-llama").save_pretrained(tmp_path / "plain")
    mts.pack(tmp_path / "plain", tmp_path / "packed")
    loaded = mts.load(tmp_path / "packed")
    assert_same_state(loaded, state_of(model))
    assert not list(mts.named_masks(loaded))
    assert_same_state(mts.restore(scrambled("llama"), tmp_path / "packed"), state_of(model))
    assert len(mts.verify(tmp_path / "packed", "2:4").layers) == 14
    refused(mts.report, tmp_path / "packed", match="carries no report")
    mts.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert files_of(tmp_path / "unpacked") == files_of(tmp_path / "plain")


# reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_options_of_load(packed, tmp_path):
    """And a generation config comes with it."""
    model: Any = sparse("llama")
    model.generation_config.max_new_tokens = 7
    folders = pairs(tmp_path, model)
    folder = folders[packed]
    half: Any = mts.load(folder, dtype=torch.bfloat16, device_map="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    assert_same_masks(half, model)
    assert_same_state(mts.export(half), state_of(plain))
    assert half.generation_config.max_new_tokens == 7
    eager: Any = mts.load(folder, attn_implementation="eager", use_cache=False)
    assert (eager.config._attn_implementation, eager.config.use_cache) == ("eager", False)
    assert eager.name_or_path == eager.config.name_or_path == str(folder)
    refused(mts.save, eager, folder, overwrite=True, match="is the folder that the weights come from")
    config = AutoConfig.from_pretrained(folder, rms_norm_eps=0.1)
    assert mts.load(folder, config=config).config.rms_norm_eps == 0.1


def test_one_weight_at_a_time_is_unpacked(packed, monkeypatch):
    """Restored: the tensor before is let go when the next one is unpacked."""
    folder, alive, most = packed("bfloat16"), [], []
    unpack = PackedFile.get_tensor

    def watched(self: PackedFile, name: str) -> Tensor:
        tensor = unpack(self, name)
        alive[:] = [other for other in alive if other() is not None]
        alive.append(weakref.ref(tensor))
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(PackedFile, "get_tensor", watched)
    mts.restore(scrambled("bfloat16"), folder)
    assert len(most) > 20
    assert max(most) <= 3


# over one another, and what is refused --------------------------------------------------------------------------------


def test_what_is_refused(saved, broken, packed, tmp_path):
    folder, damaged = packed("llama"), broken("llama")
    flip(str(damaged / "model.safetensors"), 0.99)
    (tmp_path / "empty").mkdir()
    for call, place, text in (
        (mts.pack, folder, "is packed: there is nothing to do"),
        (mts.unpack, saved("llama"), "is not packed: there is nothing to do"),
        (mts.pack, tmp_path / "empty", r"holds no sparsity\.json"),
        (mts.pack, tmp_path / "nowhere", "is not a folder"),
        (mts.pack, damaged, "is damaged: file 'model.safetensors' has changed since it was saved"),
    ):
        refused(call, place, tmp_path / "out", match=text)
    for call, place in ((mts.pack, saved("llama")), (mts.unpack, folder)):
        refused(call, place, place, overwrite=True, match="is the folder that the weights come from")
        refused(call, place, folder if call is mts.pack else saved("llama"), match="exists and is not empty")
    refused(add_masks, sparse("llama"), folder, match="is packed by other masks: unpack it")
    refused(AutoModelForCausalLM.from_pretrained, folder, match=r"no file named model\.safetensors", error=OSError)
    assert not (tmp_path / "out").exists()


def test_what_is_left_behind_is_said(saved, tmp_path):
    shutil.copytree(saved("llama"), tmp_path / "plain")
    for name in (".env", "pytorch_model.bin", "notes.txt", "mtp.safetensors"):
        (tmp_path / "plain" / name).write_text("x")
    notes = mts.pack(tmp_path / "plain", tmp_path / "packed")
    left = ".env (hidden), mtp.safetensors (other weights), pytorch_model.bin (weights of another format)"
    assert f"left behind: {left}" in notes
    (tmp_path / "packed" / "mtp.safetensors").write_text("x")
    assert "left behind: mtp.safetensors (other weights)" in mts.unpack(tmp_path / "packed", tmp_path / "again")
    assert (tmp_path / "packed" / "notes.txt").exists()
    assert not (tmp_path / "packed" / "pytorch_model.bin").exists()


# broken ---------------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def edit(folder: Path, change: Change) -> None:
    """Change tensors and metadata of a packed file, with a description that agrees."""
    with safe_open(folder / PACKED, framework="pt") as file:
        facts = json.loads(file.metadata()["packed"])
    stored = {name: tensor.clone() for name, tensor in load_file(folder / PACKED).items()}
    change(stored, facts)
    save_file(stored, folder / PACKED, metadata={"packed": json.dumps(facts)})
    relist(folder, PACKED)


def in_header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A change of the plain file's header."""

    def changed(_: dict[str, Tensor], facts: dict[str, Any]) -> None:
        header = json.loads(facts["header"])
        change(header)
        facts["header"] = json.dumps(header)

    return changed


def place(value: Any) -> Change:
    """Another place of the bits of a weight."""
    return lambda _, facts: facts["places"].update({WEIGHT: value})


def shape(value: Any) -> Change:
    return in_header(lambda header: header[WEIGHT].update(shape=value))


def a_bit_too_many(stored: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """All bits of 128 bytes are set, beside a shape of 1,023 places."""
    stored |= {WEIGHT: torch.ones(1024), f"{WEIGHT}.bits": torch.full((128,), 255, dtype=torch.uint8)}
    place(None)(stored, facts)
    shape([31, 33])(stored, facts)


BROKEN: dict[str, tuple[Change, str]] = {
    "a bit too many": (a_bit_too_many, "has 1024 values for 1024 bits in 1023 places"),
    "a value less": (lambda x, _: x.update({WEIGHT: x[WEIGHT][1:].clone()}), "has 511 values for 512 bits in 1024 p"),
    "a value more": (lambda x, _: x.update({WEIGHT: x[WEIGHT].repeat(2)[:513].clone()}), "has 513 values for 512"),
    "values in rows": (lambda x, _: x.update({WEIGHT: x[WEIGHT].view(2, -1)}), "does not hold values and bits for 10"),
    "no weight": (lambda x, _: x.pop(WEIGHT), f"'{WEIGHT}' is missing"),
    "one that nobody knows": (lambda x, _: x.update(more=torch.ones(2)), "'more' has no place"),
    "no metadata": (lambda _, facts: facts.clear(), "its metadata is not that of a packed file"),
    "a header of no JSON": (lambda _, facts: facts.update(header="{"), "its metadata is not that of a packed file"),
    "a deep header": (lambda _, facts: facts.update(header="[" * 99_999), "its metadata is not that of a packed file"),
    "a list": (lambda _, facts: facts.update(header="[]"), "its metadata is not that of a packed file"),
    "places that are a list": (lambda _, facts: facts.update(places=[]), "its metadata is not that of a packed"),
    "bits elsewhere": (place(["nowhere", 0]), "the bits of 'model.layers.0.self_attn.q_proj.weight' cannot be read"),
    "bits beside it": (place(None), "the bits of 'model.layers.0.self_attn.q_proj.weight' cannot be read"),
    "bits behind the end": (place([WEIGHT, 99]), "does not hold values and bits for 1024 places"),
    "bits before the beginning": (place([WEIGHT, -1]), "does not hold values and bits for 1024 places"),
    "bits at a word": (place([WEIGHT, "1"]), "its metadata is not that of a packed file"),
    "bits far away": (place([WEIGHT, 2**70]), "does not hold values and bits for 1024 places"),
    "a larger shape": (shape([32, 40]), "does not hold values and bits for 1280 places"),
    "a huge shape": (shape([2**40, 2**40]), f"does not hold values and bits for {2**80} places"),
    "a shape below zero": (shape([-32, -32]), "its metadata is not that of a packed file"),
    "a shape of words": (shape("wide"), "its metadata is not that of a packed file"),
    "a dtype of words": (in_header(lambda header: header.update({WEIGHT: "F32"})), "its metadata is not that of a pa"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_before_anything_is_changed(case, packed, tmp_path, monkeypatch):
    """By all that reads it, and nothing is unpacked, so that no header asks for memory."""
    folder, (change, text) = packed("llama"), BROKEN[case]
    edit(folder, change)
    monkeypatch.setattr(form.torch, "zeros", None)
    refused(mts.restore, tiny_llama(), folder, parts=[text])
    for read in (mts.load, mts.verify, lambda folder: mts.unpack(folder, tmp_path / "out")):
        refused(read, folder, match=r"packed\.model\.safetensors' cannot be unpacked: .*: get it again")
    assert not (tmp_path / "out").exists()


NOT_WHAT_WAS_PACKED = [
    (place(["model.layers.0.mlp.up_proj.weight", 1]), f"weight '{WEIGHT}' is not zero in "),
    (lambda x, _: x.update({WEIGHT: x[WEIGHT] + 1}), ""),
]


@pytest.mark.parametrize(("change", "tells"), NOT_WHAT_WAS_PACKED, ids=["bits of another mask", "other values"])
def test_a_file_that_is_not_what_was_packed_does_not_unpack(packed, tmp_path, change, tells):
    """Its counts are right, and its description agrees: the hash of the plain file tells, and of bits the mask."""
    folder = packed("llama")
    edit(folder, change)
    refused(mts.unpack, folder, tmp_path / "out", match=r"'model\.safetensors' is not the file that was packed")
    assert not (tmp_path / "out").exists()
    if tells:
        refused(mts.restore, tiny_llama(), folder, parts=[tells])
        refused(mts.load, folder, match=tells)


def test_all_problems_stand_in_one_error(packed):
    folder = packed("llama")
    other = WEIGHT.replace("q_proj", "k_proj")
    edit(folder, lambda x, _: (x.pop(WEIGHT), x.update({other: x[other][1:].clone()}), x.update(more=torch.ones(2))))
    parts = [f"'{WEIGHT}' is missing", "'more' has no place", f"'{other}' has 255 values for 256 bits"]
    refused(mts.restore, tiny_llama(), folder, parts=parts)


def test_all_shards_that_are_broken_stand_in_one_error(tmp_path):
    mts.save(sparse("llama"), tmp_path / "packed", packed=True, max_shard_size="20KB")
    paths = sorted((tmp_path / "packed").glob("packed.model-*.safetensors"))[1:3]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-9])
        relist(tmp_path / "packed", path.name)
    refused(mts.restore, tiny_llama(), tmp_path / "packed", parts=[path.name for path in paths])


def test_a_value_that_is_not_pruned_may_be_zero(tmp_path):
    """Also -0.0; it stays, and the mask keeps it."""
    model = sparse("llama")
    mask = dict(mts.named_masks(model))[WEIGHT]
    with torch.no_grad():
        model.get_parameter(WEIGHT)[mask] *= torch.tensor([0.0, -0.0, 1.0, 1.0]).repeat(128)
    _, packed = pairs(tmp_path, model)
    assert len(load_file(packed / PACKED)[WEIGHT]) == int(mask.sum())
    assert_same_state(mts.load(packed), state_of(model))


def test_plain_weights_beside_packed_ones_are_refused(packed, saved):
    folder = packed("llama")
    shutil.copy(saved("llama") / "model.safetensors", folder)
    refused(mts.restore, tiny_llama(), folder, parts=["weight file 'model.safetensors' does not belong to the folder"])


# streaming ------------------------------------------------------------------------------------------------------------


def timeless(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for the description, which tells times."""
    return {name: content for name, content in files_of(folder).items() if name != DESCRIPTION}


def as_packed(plain: Path, folder: Path) -> dict[str, bytes]:
    """The files of a packed copy."""
    mts.pack(plain, folder)
    return timeless(folder)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_streaming_writes_packed_folders(name, tmp_path):
    """What `pack` makes of the plain target; and `unpack` gives that."""
    source = dense(tmp_path / "dense", tiny_llama if name == "llama" else MIXTURES[name])
    data = {"data_loader": batches(), "min_tokens": 1} if name == "llama" else {}
    method = "wanda" if name == "llama" else "magnitude"
    streamed(source, tmp_path / "plain", method, **data)
    streamed(source, tmp_path / "packed", method, packed=True, **data)
    assert timeless(tmp_path / "packed") == as_packed(tmp_path / "plain", tmp_path / "again")
    mts.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert timeless(tmp_path / "plain") == timeless(tmp_path / "unpacked")
    assert describe(tmp_path / "plain")["files"] == describe(tmp_path / "unpacked")["files"]


def test_a_stopped_run_goes_on_packed(tmp_path):
    """Its blocks are packed already; started without packed it is refused."""
    source = dense(tmp_path / "dense", lambda: tiny_llama(num_hidden_layers=3))
    target, data = tmp_path / "sparse", {"data_loader": token_batches(3)}
    refused(streamed, source, target, Stopping(10), packed=True, **data, error=KeyboardInterrupt)
    (shard,) = (tmp_path / "sparse.partial" / "folder").iterdir()
    assert shard.name == "packed.model-00002-of-00004.safetensors"
    refused(streamed, source, target, Stopping(0), **data, match="packed: True there, None now")
    report = streamed(source, target, Stopping(0), packed=True, **data)
    assert report.notes == ["1 of 3 blocks were reused from a stopped run"]
    streamed(source, tmp_path / "plain", Stopping(0), **data)
    assert timeless(target) == as_packed(tmp_path / "plain", tmp_path / "again")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_packed_folder_is_a_source_of_streaming(name, tmp_path):
    source = dense(tmp_path / "dense", tiny_llama if name == "llama" else MIXTURES[name], max_shard_size="30KB")
    for path in source.glob("model-*"):  # many zeros, so that something is packed
        change_tensors(path, lambda weights: [x.masked_fill_(x.abs() < x.abs().mean(), 0) for x in weights.values()])
    mts.pack(source, tmp_path / "packed")
    data = {"data_loader": batches()} if name == "llama" else {}
    for folder in (source, tmp_path / "packed"):
        streamed(folder, tmp_path / f"of-{folder.name}", "wanda" if data else "magnitude", **data)
    assert timeless(tmp_path / "of-packed") == timeless(tmp_path / "of-dense")
    smaller = {"mlp": 0.25, "data_loader": token_batches(2), "progress": False}
    if name == "llama":
        for folder in (source, tmp_path / "packed"):
            mts.shrink_checkpoint(folder, tmp_path / f"smaller-{folder.name}", **smaller)
        assert_same_state(mts.load(tmp_path / "smaller-packed"), state_of(mts.load(tmp_path / "smaller-dense")))
