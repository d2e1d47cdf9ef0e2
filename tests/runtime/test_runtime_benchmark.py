"""examples/benchmarks/semi_structured.py as far as a CPU takes it: arguments, calls, tables, and the refusal.

unpacking.py stands in for the kernels and a made-up clock for time: no figure here is a measurement.
"""

import importlib.util
import json
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import modelopt_sparse as mts
from tests.helpers import ROOT
from tests.runtime.unpacking import packed_by

SCRIPT = "examples/benchmarks/semi_structured.py"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL |= {"vocab_size": 97, "max_position_embeddings": 64}


@pytest.fixture
def bench(monkeypatch) -> Any:
    spec = importlib.util.spec_from_file_location("semi_structured_benchmark", ROOT / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHAPES", {"good": (32, 128), "odd": (16, 128)})
    return module


def clock(calls) -> float:
    """3 us for a dense layer, 2 us for a packed one, 1 us for whatever else; everything is called once."""
    calls[0]()
    called = getattr(calls[0], "func", None)
    return 3e-6 if called is F.linear else 2e-6 if getattr(called, "__name__", "") == "multiply" else 1e-6


def results_of(bench, backend, *arguments: str) -> dict[str, Any]:
    given = bench.arguments(["--device", "cpu", "--tokens", "8,1", "--batches", "2", "--context", "3", *arguments])
    return bench.measure(given, lambda model, **options: packed_by(backend, model, clock, **options), clock, **SMALL)


def test_without_a_gpu_it_says_so_in_one_line(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    words = r"^semi_structured.py: 2:4 kernels run on CUDA devices \(Ampere or later\) and there is none here$"
    with pytest.raises(SystemExit, match=words):
        bench.main()
    assert capsys.readouterr().out == ""


def test_layers_have_a_row_for_each_count_or_the_reason(bench, backend):
    found, speedup = results_of(bench, backend, "--layers", "0"), pytest.approx(1.5)
    assert found["model"] is None
    rows = [(row["layer"], row.get("tokens"), row.get("speedup")) for row in found["layers"]]
    assert rows == [("good", 1, speedup), ("good", 8, speedup), ("odd", None, None)]
    assert found["layers"][2]["failed"] == "shape: 16 x 128 is no multiple of the 32 x 64 that unpacking takes"
    lines = bench.text(json.loads(json.dumps(found))).splitlines()
    assert lines[2] == "| good | 32 x 128 | 1 | 3.0 | 2.0 | 1.50 |"
    assert lines[4].startswith("| odd | 16 x 128 | failed: shape: 16 x 128 is no multiple")
    assert {line.count("|") for line in lines[:5]} == {7}
    assert f"torch {torch.__version__}" in lines[-2]


def test_the_model_is_timed_in_every_way(bench, backend):
    """A way that fails is a column without figures, and the others stand."""
    found = results_of(bench, backend, "--layers", "1")["model"]
    assert list(found) == ["dense", "2:4", "2:4 where faster"]
    works = ["prompt of 1", "prompt of 8", "step of 2 x 1 after 3"]
    for name in found:
        assert found[name]["seconds"] == dict.fromkeys(works, 1e-6)
    block, other = 4 * 64 * 64 + 3 * 64 * 128, 2 * 97 * 64 + 3 * 64
    assert found["dense"]["bytes"] == 2 * (block + other)
    assert found["2:4"]["bytes"] == 2 * (block * 9 // 16 + other)
    found["2:4"] = "no layer was packed"
    head, _, row, *_, last = bench.model_table(found).splitlines()
    assert (head, row) == ("| ms | dense | 2:4 | 2:4 where faster |", "| prompt of 1 | 0.00 | - | 0.00 |")
    assert last.startswith("- 2:4 failed: ")


def test_steps_and_prompts_are_those_of_a_model(bench):
    """The logits of a step are those of the whole sequence without a cache, as often as it is called."""
    torch.manual_seed(0)
    model = bench.random_llama(2, "cpu", **SMALL).float()
    mts.verify(model, "2:4")
    with torch.inference_mode():
        wanted = model(input_ids=torch.ones(3, 6, dtype=torch.long), use_cache=False).logits[:, -1:]
        step = bench.decode(model, 3, 5)
        for _ in range(3):
            torch.testing.assert_close(step(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bench.prefill(model, 6)(), wanted[:1], rtol=1e-4, atol=1e-5)
