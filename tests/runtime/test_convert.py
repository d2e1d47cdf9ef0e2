"""Which options are refused, which layers of a model are packed, and what the report says of them."""

import gc
import json
import re
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import save as checkpoint
from modelopt_sparse.runtime import convert
from modelopt_sparse.runtime.convert import Settings, loading_place
from modelopt_sparse.runtime.kernels import Cutlass, SemiStructuredLinear
from tests.helpers import ROOT, assert_bits, refused, tiny_llama
from tests.runtime.stopwatch import TABLE, Stopwatch
from tests.runtime.unpacking import Unpacking, chain, packed_by, place_for, pruned, reasons

LAYER, MASKED = chain(pruned(32, 64)), mts.sparsify(tiny_llama(), "magnitude", progress=False)


REFUSED = [
    (LAYER, {}, r'this Sequential is on cpu: move it with model.to\("cuda"\) first'),
    (MASKED, {}, r"14 weights are held by masks .*modelopt_sparse.export\(model\) first"),
    (LAYER, {"tunes": 1}, r"option 'tunes' is not known, did you mean 'tune'\?; allowed are"),
    (LAYER, {"tune": ()}, r"tune=\(\): give token counts from 1"),
    (LAYER, {"tune": (1, 0)}, r"tune=\(1, 0\): give token counts from 1"),
    (LAYER, {"tune": "64"}, r"tune=\('64',\): give token counts from 1"),
    (LAYER, {"tune": True}, r"tune=\(True,\): give token counts"),
    (LAYER, {"min_speedup": 0}, r"min_speedup=0: must be a number in \(0, inf\]"),
    (LAYER, {"strict": "no"}, "strict='no': must be True or False"),
    (LAYER, {"backend": "triton"}, "backend='triton': allowed are 'cusparselt', 'cutlass'"),
]


@pytest.mark.parametrize(("model", "options", "wrong"), REFUSED)
def test_the_cpu_masks_and_wrong_options_are_refused(model, options, wrong):
    refused(mts.to_semi_structured, model, match=wrong, **options)


def test_the_page_lists_every_option_with_its_default():
    page = (ROOT / "docs" / "semi-structured.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE)
    listed = {name: value.strip("`").replace('"', "") for name, value in rows}
    assert listed == {item.name: str(item.default) for item in fields(Settings)}


class Doubling(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_every_layer_left_dense_has_its_reason(backend):
    layers = {
        "good": pruned(32, 64),
        "dense": nn.Linear(64, 32, dtype=torch.bfloat16),
        "wide": pruned(32, 64, torch.float32),
        "narrow": pruned(16, 64),
        "bias": pruned(32, 64),
        "own": Doubling(64, 32, dtype=torch.bfloat16),
        "conv": nn.Conv1d(64, 32, 1, dtype=torch.bfloat16),
        "words": nn.Embedding(32, 64, dtype=torch.bfloat16),
        "head": pruned(32, 64, seed=1),
        "twin": pruned(32, 64, seed=2),
        "replaced": pruned(32, 64),
        "left": pruned(32, 64),
        "marked": pruned(32, 64),
        "fast": nn.TransformerEncoderLayer(64, 1, 64, dtype=torch.bfloat16),
    }
    model = nn.ModuleDict(layers)
    model["bias"].bias = nn.Parameter(torch.zeros(32))
    model["head"].weight = model["words"].weight
    model["tied"] = pruned(32, 64)
    model["tied"].weight = model["twin"].weight
    model["replaced"].forward = lambda x: x
    model["marked"].metadata = "of another library"
    packed_by(backend, model, exclude="left")
    uncalled = "TransformerEncoderLayer reads the weight without calling the layer"
    assert reasons(model) == {
        "dense": "not 2:4: row 0 has 4 nonzeros in columns 0 to 3; 32 of 32 rows break the pattern",
        "wide": "dtype: float32, the kernels take float16 and bfloat16: cast the model first",
        "narrow": "shape: 16 x 64 is no multiple of the 32 x 64 that unpacking takes",
        "bias": "dtype: its bias is float32, its weight bfloat16",
        "own": "a Doubling, not a plain nn.Linear",
        "conv": "a Conv1d, not a plain nn.Linear",
        "words": "tied: also held by head",
        "twin": "tied: another module holds the same weight",
        "replaced": "its forward was replaced on the instance",
        "left": "excluded by 'left'",
        "marked": "it has an attribute 'metadata', where its packed form belongs",
        "fast.self_attn.in_proj_weight": "a MultiheadAttention, not a plain nn.Linear",
        "fast.self_attn.out_proj": "a NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "fast.linear1": uncalled,
        "fast.linear2": uncalled,
    }
    (entry,) = mts.semi_structured_report(model).packed
    assert (entry.name, entry.runs, entry.backend, entry.shape) == ("good", "2:4", "unpacking", (32, 64))
    assert (entry.dense_bytes, entry.bytes) == (4096, 2304)


ONCE = {"Linear": (pruned(32, 64), ["weight"]), "shared": (chain(*[pruned(64, 64)] * 2), ["0"])}


@pytest.mark.parametrize(("model", "names"), ONCE.values(), ids=ONCE)
def test_what_is_packed_once(backend, model, names):
    """A Linear that is the model, and a module in two places."""
    packed_by(backend, model)
    assert {type(module) for module in model.modules()} - {nn.Sequential} == {SemiStructuredLinear}
    assert [layer.name for layer in mts.semi_structured_report(model).layers] == names


@pytest.mark.parametrize("how", [{"include": ["0", "1"]}, {"strict": True}, {"include": "*", "strict": True}])
def test_layers_that_were_to_be_packed_are_an_error_before_anything_changes(backend, how):
    model = chain(pruned(32, 64), nn.Linear(64, 32, dtype=torch.bfloat16))
    wrong = r"1 layers that you ask for cannot be packed 2:4: 1: not 2:4: row 0 has 4"
    refused(packed_by, backend, model, match=wrong, **how)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    packed_by(backend, model, include="0", strict=True)
    assert reasons(model) == {"1": "not in include"}


def test_a_layer_asked_for_that_fails_only_in_packing_is_an_error(monkeypatch, backend):
    monkeypatch.setattr(type(backend), "unpack", lambda self, packed, metadata, columns: torch.zeros(32, 64).bfloat16())
    model = chain(pruned(32, 64))
    packed_by(backend, model)
    assert reasons(model) == {"0": "unpacking does not give its weight back bit for bit"}
    cannot = "layer '0' cannot be packed 2:4: unpacking does not give"
    refused(packed_by, backend, model, strict=True, match=cannot)


def test_globs_that_match_nothing_are_refused(backend):
    for globs in ({"include": "haed"}, {"exclude": "haed"}):
        wrong = "'haed' matches no layer of this ModuleDict; names look like head"
        refused(packed_by, backend, nn.ModuleDict({"head": pruned(32, 64)}), **globs, match=wrong)


def test_an_option_of_none_is_the_default(backend):
    model = chain(pruned(32, 64))
    packed_by(backend, model, include=None, exclude=None, strict=None, min_speedup=None)
    assert len(mts.semi_structured_report(model).packed) == 1


def test_a_second_call_keeps_what_is_packed(backend):
    model = chain(pruned(32, 64), pruned(32, 64))
    packed_by(backend, model, include="0")
    first = model[0].packed
    packed_by(backend, model)
    assert model[0].packed is first
    report = mts.semi_structured_report(model)
    assert [layer.name for layer in report.packed] == ["0", "1"]
    packed_by(backend, model)
    assert mts.semi_structured_report(model) == report, "and where it runs"
    dense = packed_by(backend, chain(nn.Linear(64, 32, dtype=torch.bfloat16)))
    assert str(mts.semi_structured_report(dense)).endswith("0 of 1 layers run 2:4, weights 0.0 -> 0.0 MiB.")


def test_the_dense_weight_is_gone_before_the_next_layer_is_packed(backend, monkeypatch):
    model = chain(*(pruned(32, 64, seed=seed) for seed in range(3)))
    dense = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def watching(self, weight):
        gc.collect()
        alive.append(sum(reference() is not None for reference in dense))
        return Cutlass.pack(self, weight)

    monkeypatch.setattr(Unpacking, "pack", watching)
    packed_by(backend, model)
    assert alive == [3, 2, 1]
    gc.collect()
    assert not any(reference() for reference in dense)


def test_nothing_is_recorded_for_autograd(backend):
    layer = packed_by(backend, pruned(32, 64))
    for tensor in (layer.packed, layer.metadata):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
    with torch.inference_mode():
        made_inside = packed_by(backend, pruned(32, 64))
    assert not made_inside.packed.is_inference()
    made_inside(torch.zeros(1, 64, dtype=torch.bfloat16))


def test_a_run_that_breaks_off_leaves_whole_layers(backend, monkeypatch):
    model = chain(pruned(32, 64), pruned(32, 64), pruned(32, 64))
    packs = iter([False, True])

    def failing(self, weight):
        if next(packs):
            raise torch.OutOfMemoryError("no memory left")
        return Cutlass.pack(self, weight)

    monkeypatch.setattr(Unpacking, "pack", failing)
    refused(packed_by, backend, model, error=torch.OutOfMemoryError)
    assert [type(layer) for layer in model] == [SemiStructuredLinear, nn.Linear, nn.Linear]
    assert [layer.runs for layer in mts.semi_structured_report(model).layers] == ["2:4", "dense", "dense"]
    model[0](torch.zeros(1, 64, dtype=torch.bfloat16))


REPORT = """\
layer  shape     runs  MiB         us at 1      us at 64    notes
-----  --------  ----  ----------  -----------  ----------  -----
0      32 x 64   2:4   0.0 -> 0.0  10.0 -> 9.0  8.0 -> 5.0
1      64 x 128  2:4   0.0 -> 0.0  10.0 -> 9.0  8.0 -> 5.0

stays dense: 2 (not 2:4: row 0 has 4 nonzeros in columns 0 to 3; 64 of 64 rows break the pattern)

2 of 3 layers run 2:4 on a CPU, weights 0.0 -> 0.0 MiB.
us: microseconds of a call, dense -> 2:4, each with its fastest library or algorithm."""


def test_the_report_says_everything_as_text_and_as_json(backend, blas):
    model = chain(pruned(32, 64), pruned(64, 128, bias=False), nn.Linear(128, 64, dtype=torch.bfloat16))
    packed_by(backend, model, Stopwatch(**TABLE), tune=[64, 1, 64], include="*")
    assert str(mts.semi_structured_report(model)) == REPORT
    read = json.loads(mts.semi_structured_report(model).to_json())
    assert read["layers"][0]["timings"][0]["algorithm"] == [0, 1, -1]
    assert read["versions"]["torch"] == torch.__version__
    assert (read["settings"]["tune"], read["settings"]["include"]) == ([1, 64], ["*"])


def test_negative_zeros_are_told_and_that_nothing_was_timed(backend):
    model = chain(pruned(32, 64))
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([-0.0, 1.0, -0.0, -2.0])  # with its signs counted, four of four
    report = mts.semi_structured_report(packed_by(backend, model))
    assert report.layers[0].notes == ("2 weights were -0.0 and are +0.0 now",)
    assert_bits(model[0].unpacked()[0, :4], torch.tensor([0.0, 1.0, 0.0, -2.0]).bfloat16())
    not_timed = "Not timed: 2:4 may be many times slower here. Name the token counts that matter with tune=."
    assert str(report).endswith(not_timed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder") / "sparse"
    model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    mts.save(mts.sparsify(model.to(torch.bfloat16), "magnitude", pattern="2:4", progress=False), path)
    return path


def test_load_packs_each_layer_on_its_way(backend, folder, monkeypatch):
    """The layers are packed before the model as a whole is moved, which then moves what stayed dense."""
    moved = []
    original = nn.Module.to

    def to(self, *args, **kwargs):
        moved.append(sum(isinstance(module, SemiStructuredLinear) for module in self.modules()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(tune=None), place_for(backend)))
    monkeypatch.setattr(type(tiny_llama()), "to", to)
    model, dense = mts.load(folder, semi_structured=True), mts.export(mts.load(folder))
    assert moved == [14]
    assert dict(mts.named_masks(model)) == {}
    assert mts.report(model).layers
    assert len(mts.semi_structured_report(model).packed) == 14
    for name, weight in mts.to_dense(model).state_dict().items():
        assert_bits(weight, dense.state_dict()[name])


def test_load_refuses_before_it_reads(folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    one = "2:4 layers are packed for one CUDA device: give 'cuda:0'"
    for wrong, options, place in (
        ("packs layers for a CUDA device and there is none here", True, {}),
        *((one, True, {"device_map": places}) for places in ("auto", "cpu", {"model": 0, "lm_head": 1})),
        ("option 'tun' is not known", {"tun": 1}, {}),
        ("semi_structured='yes': give True or", "yes", {}),
    ):
        refused(mts.load, folder, semi_structured=options, **place, match=wrong)


@pytest.mark.parametrize("device_map", [None, "cuda", "cuda:0", torch.device("cuda"), {"": "cuda:0"}])
def test_load_takes_the_device_that_is_named(monkeypatch, device_map):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(convert, "_place", lambda device, settings: device)
    settings, place = loading_place(device_map, {"min_speedup": 2, "backend": "cutlass"})
    assert place == torch.device("cuda:0")
    assert (settings.backend, settings.min_speedup) == ("cutlass", 2)


def test_load_still_checks_weights_against_masks(backend, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "loading_place", lambda *_: (Settings(tune=None), place_for(backend)))
    description, masks, *rest = checkpoint.opened_folder(folder)
    other = {name: ~mask for name, mask in masks.items()}
    monkeypatch.setattr(checkpoint, "opened_folder", lambda _: (description, other, *rest))
    refused(mts.load, folder, semi_structured=True, match="is not zero in 2048 places where its mask is False")
