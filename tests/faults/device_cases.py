"""Models on an accelerator, and models whose blocks go there one at a time (``device=``): on a pretend device, where
whatever must lie on one device together does, or raises, and on a GPU if there is one. Results are those of the CPU."""

import copy
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import save as checkpoint
from modelopt_sparse.checkpoint import streamed as blocks
from modelopt_sparse.checkpoint.streamed import spilled
from modelopt_sparse.model.devices import stored
from modelopt_sparse.runtime.convert import Settings
from modelopt_sparse.training import distill
from tests.checkpoint.streams import Stopping
from tests.faults.pretend_device import AS_ON_A_GPU, BACKEND, Pretended, pretend_device
from tests.helpers import assert_same_masks, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.expert_models import MODELS
from tests.runtime.unpacking import installed, packed_by, place_for

PLACES = ["on it", "device="]
CPU = torch.device("cpu")
# The norms of a Llama and a T5 compute in float32, and a GPU rounds there otherwise than a CPU.
ROUNDINGS = {"pretend": 1e-10, "cuda": 1e-6}
DEVICES = ["pretend", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = {
    "magnitude": ("magnitude", {}),
    "wanda": ("wanda", {"sequential": "none"}),
    "ria": ("ria", {}),
    "sparsegpt": ("sparsegpt", {}),
    "sparsegpt by stages": ("sparsegpt", {"sequential": "stage"}),
    "sparsegpt, unstructured": ("sparsegpt", {"pattern": "60%"}),
    "alps": ("alps", {}),
    "permuted and polished": ("wanda", {"permute": True, "polish": True}),
    "reconstructed": ("magnitude", {"reconstruct": 1}),
    "reconstructed by the Fisher metric": ("magnitude", {"reconstruct": {"metric": "fisher", "epochs": 1}}),
}


@pytest.fixture
def device():
    with pretend_device() as device:
        yield device


def a_device(name: str) -> AbstractContextManager[torch.device]:
    return pretend_device() if name == "pretend" else nullcontext(torch.device(name, 0))


def sparse(
    model: nn.Module, data: list, method: str = "sparsegpt", place: str = "", device: torch.device = CPU, **options
) -> nn.Module:
    """The model made sparse on the CPU, or at a place of PLACES; on the CPU again, if it was moved."""
    if place == "on it":
        model.to(device)
    if place == "device=":
        options["device"] = device
    before = {name: (id(p), p.device) for name, p in model.named_parameters()}
    mts.sparsify(model, method, data_loader=data, progress=False, **options)
    assert {name: (id(p), p.device) for name, p in model.named_parameters()} == before
    assert {buffer.device for buffer in model.buffers()} <= {p.device for p in model.parameters()}
    return model.to("cpu")


def assert_same(found: nn.Module, expected: nn.Module, atol: float) -> None:
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_the_pretend_device_is_none_of_the_cpu(device):
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=device)
    assert isinstance(there, Pretended)
    assert (there.device, (there @ there).device) == (device, device)
    with pytest.raises(RuntimeError, match=AS_ON_A_GPU):
        here @ there
    with pytest.raises(RuntimeError, match=AS_ON_A_GPU):
        there.masked_fill(here > 0, 0)
    assert torch.equal((there @ here.to(device)).cpu(), here @ here)


SPARSIFIED = [*((way, "device=") for way in WAYS), *((way, "on it") for way in ("sparsegpt", "reconstructed"))]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("way", "place"), SPARSIFIED)
def test_every_way_to_sparsify(way, name, place):
    """In float64, so that no rounding decides about a mask. What is kept of activations is where the model is, however
    much is free on the device."""
    if (way, name) == ("reconstructed by the Fisher metric", "pretend"):
        pytest.skip("torch's autograd engine refuses this backward pass on a device that is written in Python")
    method, options = WAYS[way]
    model, data = tiny_llama(attn_implementation="eager").double(), token_batches(2)
    expected = sparse(copy.deepcopy(model), data, method, **options)
    seen: set[str] = set()
    # before the hook that moves them
    model.model.layers[1].register_forward_pre_hook(lambda block, args: seen.add(args[0].device.type))
    with a_device(name) as device:
        found = sparse(model, data, method, place, device, **options)
    assert seen == ({"cpu" if place == "device=" else device.type} if way != "magnitude" else set())
    in_float32 = "reconstruct" in options  # its loss
    assert_same(found, expected, atol=1e-5 if in_float32 else ROUNDINGS[name])


PADDED = [(name, "device=") for name in ("t5", "bert", "albert", "swin", "resnet_bottleneck", "multihead_attention")]
PADDED += [("t5", "on it"), ("albert", "on it")]


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize(("name", "place"), PADDED)
@pytest.mark.filterwarnings("ignore:.*runs of the model over the data")  # of those that are not run block by block
def test_architectures_with_padding(name, device_name, place):
    model = ARCHITECTURES[name].build().double()
    data = ARCHITECTURES[name].batches("right")[:2]
    for batch in data:
        batch.update({key: x.double() for key, x in batch.items() if x.is_floating_point()})
    expected = sparse(copy.deepcopy(model), data)
    with a_device(device_name) as device:
        found = sparse(model, data, place=place, device=device)
    assert_same(found, expected, atol=ROUNDINGS[device_name])


FEW = {"memory_limit": "200KB", "min_tokens": 4}


@pytest.mark.parametrize(
    ("name", "options", "place"),
    [("mixtral", {}, "on it"), ("mixtral", FEW, "device="), ("gpt_oss", {}, "device="), ("gpt_oss", FEW, "on it")],
)
def test_mixtures_of_experts(name, options, place):
    model, data = MODELS[name](), token_batches(2, vocab=53)
    expected = sparse(copy.deepcopy(model), data, **options)
    with pretend_device() as device:
        found = sparse(model, data, place=place, device=device, **options)
    assert_same(found, expected, atol=1e-5)


@pytest.mark.parametrize(("method", "spill"), [("magnitude", False), ("sparsegpt", True)])
def test_streaming(method, spill, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "dense")
    options = {"data_loader": token_batches(), "progress": False}
    mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "cpu", method, **options)
    with pretend_device() as device:
        mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "device", method, device=device, spill=spill, **options)
    assert_same(mts.load(tmp_path / "device"), mts.load(tmp_path / "cpu"), atol=1e-5)


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_a_streaming_run_that_was_stopped_goes_on(sequential, tmp_path, device):
    """A block of which an earlier run has made the weights takes them where it is now."""
    tiny_llama(num_hidden_layers=3).save_pretrained(tmp_path / "dense")
    method = Stopping(10)
    given = {"method": method, "sequential": sequential, "data_loader": token_batches(), "progress": False}
    for left, name in ((10, "stopped"), (0, "stopped"), (0, "at once")):
        method.left = left
        with pytest.raises(KeyboardInterrupt) if left else nullcontext():
            report = mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / name, device=device, **given)
            assert report.notes == (["1 of 3 blocks were reused from a stopped run"] if name == "stopped" else [])
    assert_same(mts.load(tmp_path / "stopped"), mts.load(tmp_path / "at once"), atol=0)


SHRUNK = [("on it", {"reconstruct": 1}), ("device=", {"refit": False}), ("streamed", {"reconstruct": 1})]


@pytest.mark.parametrize(("place", "more"), SHRUNK)
def test_shrink(place, more, tmp_path, device):
    options = {"mlp": 0.25, "blocks": 1, "blocks_by": "influence", "data_loader": token_batches(), "progress": False}
    options |= more
    expected, model = mts.shrink(tiny_llama(), **options), tiny_llama()
    if place == "streamed":
        model.save_pretrained(tmp_path / "dense")
        mts.shrink_checkpoint(tmp_path / "dense", tmp_path / "out", device=device, spill=True, **options)
        found = mts.load(tmp_path / "out")
    else:
        model = model.to(device) if place == "on it" else model
        found = mts.shrink(model, **options, **({"device": device} if place == "device=" else {})).to("cpu")
    assert_same(found, expected, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"sequential": "none"}, {"reconstruct": {"epochs": 1}}, {"permute": True}])
def test_weights_move_there_and_back_once_in_a_turn(options):
    """And once in the dense run, twice for each of the two rows that are rehearsed, and once in the rehearsal."""
    model = tiny_llama(attn_implementation="eager", intermediate_size=72)
    with pretend_device() as device:
        sparse(model, token_batches(), place="device=", device=device, enforce=False, **options)
    up_and_gate = 2 * len(model.model.layers)
    assert (BACKEND.came.count((72, 32)), BACKEND.went.count((72, 32))) == (7 * up_and_gate, 7 * up_and_gate)


@pytest.mark.parametrize(("padded", "each"), [(False, 0), (True, 4)])  # a block has four distinct inputs
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_statistics_of_a_batch_wait_for_nothing_but_padding(method, padded, each, device):
    model = tiny_llama(attn_implementation="eager").to(device)
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in token_batches(6)]
    for batch in data:
        batch["attention_mask"][0, : 3 * padded] = 0
    waits = []
    model.model.layers[1].register_forward_pre_hook(lambda block, args: waits.append(BACKEND.waits))
    mts.sparsify(model, method, data_loader=data, progress=False)
    collected = waits[-len(data) :]  # after the dense run and the check; nothing is behind the last block
    assert [after - before for before, after in itertools.pairwise(collected)] == [each] * 5


def test_activations_do_not_stay_where_they_go_to_files(tmp_path, monkeypatch):
    monkeypatch.setattr(BACKEND, "free", 1 << 40)
    tiny_llama().save_pretrained(tmp_path / "dense")
    placed = []
    monkeypatch.setattr(blocks, "spilled", lambda x, folder: placed.append(x.device.type) or spilled(x, folder))
    options = {"data_loader": token_batches(), "spill": True, "progress": False}
    with pretend_device() as device:
        mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "sparse", "sparsegpt", device=device, **options)
    assert set(placed) == {"cpu"}


THERE = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "lm_head"]


HOOKED = [(how, {"permute": True}) for how in ("offloaded", "spread")]
HOOKED += [("offloaded", {"sequential": "none"}), ("spread", {})]


@pytest.mark.parametrize(("how", "options"), HOOKED)
def test_models_that_accelerate_runs_on_the_device(how, options):
    """All weights come from the CPU for each call, or those of the last block do."""
    model = tiny_llama(attn_implementation="eager", tie_word_embeddings=False)
    expected = sparse(copy.deepcopy(model), token_batches(), **options)
    with pretend_device() as device:
        if how == "offloaded":
            cpu_offload(model, execution_device=device)
        else:
            spread = {**dict.fromkeys(THERE, device), "model.layers.1": "cpu", "model.norm": "cpu"}
            dispatch_model(model, spread, main_device=device, force_hooks=True)
        mts.sparsify(model, "sparsegpt", data_loader=token_batches(), progress=False, **options)
        assert BACKEND.came
        for layer in mts.report(model).layers:
            path, _, name = layer.parameter.rpartition(".")
            values = stored(model.get_submodule(path), name).cpu()
            torch.testing.assert_close(values, expected.get_parameter(layer.parameter).detach(), rtol=0, atol=1e-5)


def test_after_an_error_everything_is_at_home(device):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, args: (args[0] * float("inf"),))
    with pytest.raises(ValueError, match="NaN or inf"):
        sparse(model, token_batches(), place="device=", device=device)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert [len(block._forward_hooks) for block in model.model.layers] == [0, 0]


class Failing(mts.Method):
    needs = "gram"

    def solve(self, weight, state, pattern, options):
        raise ValueError("cannot be solved")


def test_a_permutation_is_undone_at_home(device):
    model = tiny_llama()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="cannot be solved"):
        sparse(model, token_batches(), Failing(), "device=", device, permute=True)
    assert_same(model, before, atol=0)


def test_masks_hold_on_the_device(device):
    model = tiny_llama().to(device)
    mts.sparsify(model, "magnitude", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mts.attach_optimizer(optimizer, model)
    ids = token_batches(1)[0].to(device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    assert mts.verify(model, pattern="2:4").layers
    masks = dict(mts.named_masks(model))
    assert {mask.device for mask in masks.values()} == {device}
    again = tiny_llama()
    mts.sparsify(again, masks=masks, device=device, progress=False)  # masks from the device for a model that is not
    assert_same_masks(again, {name: mask.cpu() for name, mask in masks.items()})
    mts.set_mask(model, *next((name, mask.cpu()) for name, mask in masks.items()))
    mts.export(model)
    mts.verify(model, pattern="2:4")


@pytest.mark.parametrize("packed", [False, True])
def test_layers_are_packed_for_the_device_that_a_model_is_loaded_to(tmp_path, monkeypatch, packed):
    """They are packed there while the rest of the model, their biases with it, is still on the CPU; from a folder that
    is packed as well."""
    model = tiny_llama(hidden_size=64, intermediate_size=128, attention_bias=True, mlp_bias=True).to(torch.bfloat16)
    mts.save(mts.sparsify(model, "magnitude", progress=False), tmp_path / "sparse", packed=packed)
    backend, eager = installed(monkeypatch), {"attn_implementation": "eager"}
    expected = packed_by(backend, mts.export(mts.load(tmp_path / "sparse", **eager)))
    ids = token_batches(1)[0]
    with pretend_device() as device, torch.no_grad():
        place = replace(place_for(backend), device=device)
        monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings.of({"tune": None}), place))
        found = mts.load(tmp_path / "sparse", semi_structured=True, **eager)
        logits = found(input_ids=ids.to(device), use_cache=False).logits
    assert {x.device for x in (*found.parameters(), *found.buffers())} == {device}
    assert torch.equal(logits.cpu(), expected(input_ids=ids, use_cache=False).logits)
    reports = mts.semi_structured_report(found), mts.semi_structured_report(expected)
    assert reports[0].packed
    assert [vars(layer) for layer in reports[0].layers] == [vars(layer) for layer in reports[1].layers]


@pytest.mark.parametrize("name", DEVICES)
def test_a_teacher_on_another_device_is_refused(name):
    model, teacher = tiny_llama().train(), tiny_llama()
    (batch,) = token_batches(1)
    with a_device(name) as device, distill(model, teacher):
        teacher.to(device)
        with pytest.raises(ValueError, match=f"teacher is on {device}: move it to cpu"):
            model(input_ids=batch, use_cache=False)
        model.to(device)
        assert model(input_ids=batch.to(device), use_cache=False).loss.item() == pytest.approx(0, abs=1e-6)
