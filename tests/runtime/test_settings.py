"""What the public functions refuse, and the backends that they choose."""

import re
from dataclasses import fields

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.runtime import kernels as backends
from modelopt_sparse.runtime.convert import Settings
from modelopt_sparse.runtime.kernels import CuSparseLt, Cutlass
from modelopt_sparse.runtime.linear import SemiStructuredLinear
from tests.helpers import ROOT, tiny_llama
from tests.runtime.unpacking import llama


def test_a_model_on_the_cpu_is_refused():
    model = llama()
    with pytest.raises(ValueError, match=r'LlamaForCausalLM is on cpu: move it with model.to\("cuda"\) first'):
        mts.to_semi_structured(model)
    assert not any(isinstance(module, SemiStructuredLinear) for module in model.modules())


def test_masks_are_to_be_exported_first():
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    with pytest.raises(ValueError, match=r"14 weights are held by masks .*modelopt_sparse.export\(model\) first"):
        mts.to_semi_structured(model)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (
            {"tunes": 1},
            r"option 'tunes' is not known, did you mean 'tune'\?; allowed are",
        ),
        ({"tune": ()}, r"tune \(\): give token counts from 1"),
        ({"tune": (1, 0)}, r"tune \(1, 0\): give token counts from 1"),
        ({"tune": "64"}, "tune '64': give token counts from 1"),
        ({"tune": True}, "tune True: give token counts"),
        ({"timing": "wall"}, "timing 'wall' is not known: allowed are eager, graph"),
        ({"min_speedup": 0}, "min_speedup 0: it must be above 0"),
        ({"quantize": "int4"}, "quantize 'int4' is not known: allowed are fp8, int8"),
        ({"backend": "triton"}, "backend 'triton' is not known: allowed are cusparselt, cutlass"),
        ({"keep_both": True}, "keep_both is for layers that are timed: give tune="),
        ({"cache": "times.json"}, "cache is for layers that are timed: give tune="),
        ({"tune": 8, "keep_both": True, "quantize": "fp8"}, "keep_both with quantize would give"),
    ],
)
def test_wrong_options_are_refused(options, wrong):
    with pytest.raises(ValueError, match=wrong):
        mts.to_semi_structured(llama(), **options)


def test_the_page_lists_every_option_with_its_default():
    page = (ROOT / "docs" / "semi-structured.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE)
    assert {name: value.strip("`").replace('"', "") for name, value in rows} == {
        item.name: str(item.default) for item in fields(Settings)
    }


def test_options_are_put_in_order():
    settings = Settings.of({"tune": [64, 1, 64], "include": "a", "exclude": ["b", "c"]})
    assert (settings.tune, settings.include, settings.exclude) == ((1, 64), ("a",), ("b", "c"))
    assert Settings.of({"tune": 8}).tune == (8,)


CAPABILITIES = [
    ((7, 5), True, "cusparselt: compute capability 7.5 has no Sparse.*cutlass: its kernels run on .* 8.x.*has 7.5"),
    ((8, 0), True, CuSparseLt),
    ((8, 0), False, Cutlass),
    ((9, 0), True, CuSparseLt),
    ((9, 0), False, "cusparselt: this build of torch has no cuSPARSELt; cutlass: its kernels run on .* 8.x.*has 9.0"),
    ((10, 0), True, CuSparseLt),
]


@pytest.mark.parametrize(("capability", "has_cusparselt", "chosen"), CAPABILITIES)
def test_the_backend_is_the_first_that_runs_on_the_device(monkeypatch, capability, has_cusparselt, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: has_cusparselt)
    device = torch.device("cuda:0")
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=f"no 2:4 kernels for cuda:0: {chosen}; leave the model dense"):
            backends.choose_backend(device)
    else:
        assert type(backends.choose_backend(device)) is chosen
    fp8 = {CuSparseLt: capability >= (8, 9), Cutlass: False}
    if chosen in fp8:
        assert (backends.no_fp8(device, backends.choose_backend(device)) == "") == fp8[chosen]


def test_an_asked_for_backend_is_not_replaced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"no 2:4 kernels for cuda:0: cutlass: .*; leave"):
        backends.choose_backend(torch.device("cuda:0"), "cutlass")
    with pytest.raises(ValueError, match="backend 'cublas' is not known: allowed are cusparselt, cutlass"):
        backends.choose_backend(torch.device("cuda:0"), "cublas")
