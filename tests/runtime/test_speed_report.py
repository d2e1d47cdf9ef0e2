"""What the report on packed layers says."""

import json

import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.runtime import convert
from modelopt_sparse.runtime.convert import Settings
from modelopt_sparse.runtime.kernels import Choice, as_numbers
from tests.runtime.stopwatch import OTHER, TABLE, Stopwatch, timed_place
from tests.runtime.unpacking import chain, packed_by, pruned


def test_the_report_says_everything_as_text_and_as_json(backend, blas):
    model = chain(pruned(32, 64), pruned(64, 128, bias=False), nn.Linear(128, 64, dtype=torch.bfloat16))
    convert.convert(model, Settings.of({"tune": (1, 64)}), lambda device: timed_place(backend, Stopwatch(**TABLE)))
    text = str(mts.semi_structured_report(model))
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "shape", "runs", "MiB", "us", "at", "1", "us", "at", "64", "notes"]
    assert " ".join(lines[2].split()) == "0 32 x 64 2:4 0.0 -> 0.0 10.0 -> 9.0 8.0 -> 5.0"
    assert "stays dense: 2 (not 2:4: row 0 has 4 nonzeros in columns 0 to 3; 64 of 64 rows break the pattern)" in text
    assert "2 of 3 layers run 2:4 on a CPU, weights 0.0 -> 0.0 MiB." in text
    assert "us: microseconds of a call, dense -> 2:4, each with its fastest library or algorithm; timed eager." in text
    report = mts.semi_structured_report(model)
    read = json.loads(report.to_json())
    again = mts.SpeedReport.from_dict(read)
    assert again.layers == report.layers
    assert str(again) == text
    assert json.loads(again.to_json()) == read
    assert read["layers"][0]["timings"][0]["algorithm"] == [0, 1, -1]
    assert read["versions"]["torch"] == torch.__version__
    assert read["settings"]["tune"] == [1, 64]


def test_the_report_says_when_nothing_was_timed(backend):
    model = packed_by(backend, chain(pruned(32, 128)), quantize="int8")
    text = str(mts.semi_structured_report(model))
    assert "Not timed: 2:4 may be slower here. Name the token counts that matter with tune=." in text
    assert "2:4 int8" in text
    assert "Errors: ||A - B||^2 / ||B||^2 against the unquantized layer; outputs on normal inputs." in text


def test_negative_zeros_are_told(backend):
    model = chain(pruned(32, 64))
    with torch.no_grad():
        model[0].weight[3, 5] = -0.0
    packed_by(backend, model)
    assert mts.semi_structured_report(model).layers[0].notes == ("1 weights were -0.0 and are +0.0 now",)


def test_operators_take_choices_as_numbers():
    assert as_numbers((Choice(8, True, OTHER), Choice(64, False))) == [8, 1, 3, 4, 2, 64, 0, 0, 1, -1]
