"""Which layers of a model are packed, and what is left of it where that breaks off."""

import gc
import weakref

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.runtime.kernels import Cutlass
from modelopt_sparse.runtime.linear import SemiStructuredLinear
from tests.helpers import assert_bits, token_batches
from tests.runtime.unpacking import Unpacking, chain, llama, packed_by, pruned, reasons


class Doubling(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_every_layer_left_dense_has_its_reason(backend):
    model = nn.ModuleDict(
        {
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
            "fast": nn.TransformerEncoderLayer(64, 1, 64, dtype=torch.bfloat16),
        }
    )
    model["bias"].bias = nn.Parameter(torch.zeros(32))
    model["head"].weight = model["words"].weight
    model["tied"] = pruned(32, 64)
    model["tied"].weight = model["twin"].weight
    model["replaced"].forward = lambda x: x
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
        "fast.self_attn.in_proj_weight": "a MultiheadAttention, not a plain nn.Linear",
        "fast.self_attn.out_proj": "a NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "fast.linear1": uncalled,
        "fast.linear2": uncalled,
    }
    (entry,) = mts.semi_structured_report(model).packed
    assert (entry.name, entry.runs, entry.backend, entry.shape) == ("good", "2:4", "unpacking", (32, 64))
    assert (entry.dense_bytes, entry.bytes) == (4096, 2304)


def test_a_linear_that_is_the_model(backend):
    model = pruned(32, 64)
    assert packed_by(backend, model) is model
    assert type(model) is SemiStructuredLinear
    assert [layer.name for layer in mts.semi_structured_report(model).packed] == ["weight"]


def test_one_module_in_two_places_is_packed_once(backend):
    shared = pruned(64, 64)
    model = packed_by(backend, chain(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert type(model[2]) is SemiStructuredLinear
    assert len(mts.semi_structured_report(model).layers) == 1


@pytest.mark.parametrize("how", [{"include": ["0", "1"]}, {"strict": True}, {"include": "*", "strict": True}])
def test_layers_that_were_to_be_packed_are_an_error_before_anything_changes(backend, how):
    model = chain(pruned(32, 64), nn.Linear(64, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"1 layers that you ask for cannot be packed 2:4: 1: not 2:4: row 0 has 4"):
        packed_by(backend, model, **how)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    packed_by(backend, model, include="0", strict=True)
    assert reasons(model) == {"1": "not in include"}


def test_a_layer_asked_for_that_fails_only_in_packing_is_an_error(monkeypatch, backend):
    monkeypatch.setattr(type(backend), "unpack", lambda self, packed, metadata, columns: torch.zeros(32, 64).bfloat16())
    model = chain(pruned(32, 64))
    packed_by(backend, model)
    assert reasons(model) == {"0": "unpacking does not give its weight back bit for bit"}
    with pytest.raises(ValueError, match="layer '0' cannot be packed 2:4: unpacking does not give"):
        packed_by(backend, model, strict=True)


def test_globs_that_match_nothing_are_refused(backend):
    for key in ("include", "exclude"):
        with pytest.raises(ValueError, match="'lm_haed' matches no layer of this LlamaForCausalLM"):
            packed_by(backend, llama(), **{key: "lm_haed"})


def test_a_second_call_keeps_what_is_packed(backend):
    model = chain(pruned(32, 64), pruned(32, 64))
    packed_by(backend, model, include="0")
    first = model[0].packed
    packed_by(backend, model)
    assert model[0].packed is first
    assert [layer.name for layer in mts.semi_structured_report(model).packed] == ["0", "1"]


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
    with pytest.raises(torch.OutOfMemoryError):
        packed_by(backend, model)
    assert [type(layer) for layer in model] == [SemiStructuredLinear, nn.Linear, nn.Linear]
    assert [layer.runs for layer in mts.semi_structured_report(model).layers] == ["2:4", "dense", "dense"]
    model[0](torch.zeros(1, 64, dtype=torch.bfloat16))


def test_outputs_of_a_model_are_those_of_its_dense_form(backend):
    model, (tokens,) = llama(), token_batches(1)
    with torch.no_grad():
        wanted = model(tokens).logits
        found = packed_by(backend, model)(tokens).logits
        back = mts.to_dense(model)(tokens).logits
    # sums in another order and in another precision, through two blocks in bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert_bits(back, wanted)
