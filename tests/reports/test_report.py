"""What a report says: the error of each layer against its inputs, the time of each part, what stays with it."""

import json
import math
import time

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.reports.page import cost_of
from tests.helpers import tiny_llama, token_batches
from tests.oracles import reference
from tests.oracles.brute_force import inputs_of
from tests.reports.pages import full_report, shrunk_report

RULES = {"*o_proj": {"method": "wanda"}, "*.down_proj": {"method": "magnitude"}, "*.layers.1.*": {"method": "ria"}}


@pytest.mark.parametrize("error_from", ["gram", "square_sums", "weights"])
def test_each_row_says_what_its_error_means(error_from):
    """Exact where a Gram matrix was made, whatever the method; otherwise of channels that are taken as uncorrelated,
    and without data as equal."""
    model, dense, batches = tiny_llama(), tiny_llama(), token_batches(6)
    methods = {"*.layers.1.*": {"method": "magnitude"}} if error_from == "weights" else RULES
    sequential = "block" if error_from == "weights" else "none"
    mts.sparsify(model, "sparsegpt", data_loader=batches, rules=methods, sequential=sequential, progress=False)
    report = mts.report(model)
    layers = [layer for layer in report.layers if layer.error_from == error_from]
    assert {layer.recipe for layer in layers} == {
        "gram": {"sparsegpt", "wanda", "magnitude"},
        "square_sums": {"wanda", "magnitude", "ria"},
        "weights": {"magnitude"},
    }[error_from]

    table = report.text(all_rows=True).splitlines()
    (head,) = (line for line in table if line.startswith("layer "))
    place = slice(head.index("error from"), head.index("seconds"))
    inputs = inputs_of(dense, [layer.name for layer in layers], batches)
    for layer in layers:
        x = inputs[layer.name]
        x = {"gram": x, "square_sums": x.norm(dim=0).diag(), "weights": torch.eye(x.shape[1])}[error_from]
        weights = (each.get_submodule(layer.name).weight.detach() for each in (dense, model))
        assert layer.error == pytest.approx(reference.output_error(*weights, x), rel=1e-3), layer.name
        (row,) = (line for line in table if line.split(" ")[0] == layer.name)
        said = {"gram": "X", "square_sums": "norms of X", "weights": "W alone"}[error_from]
        assert row[place].strip() == said
        assert f"from {said}: " in table[-1]


def test_the_parts_of_a_run_are_all_of_its_time():
    """Each is timed once, and what blocks took is told apart."""
    began = time.perf_counter()
    options = {"data_loader": token_batches(4), "progress": False, "budget": "60% zeros", "choices": ["2:4", "1:4"]}
    tuning = {"reconstruct": {"epochs": 1, "metric": "fisher"}, "distill": 1, "self_data": 8}
    model = mts.sparsify(tiny_llama(), "sparsegpt", permute=True, **options, **tuning)
    whole = time.perf_counter() - began
    report = mts.report(model)
    named = {"calibration data", "dense run", "budget", "dense predictions", "blocks", "permutation", "distillation"}
    assert set(report.seconds) == named
    assert 0 < report.seconds["permutation"] < report.seconds["blocks"]
    known = sum(report.seconds.values()) - report.seconds["permutation"]
    assert 0.5 * whole < known <= whole + 0.01
    parts = report.time_by_part()
    assert sum(parts.values()) == pytest.approx(known)
    solving, tuning = (sum(each.seconds for each in rows) for rows in (report.layers, report.blocks))
    known_parts = {"permutation": report.seconds["permutation"], "solving": solving, "reconstruction": tuning}
    assert parts.items() >= known_parts.items()
    assert 0 < parts["forwards and statistics"] < report.seconds["blocks"]
    value, more = cost_of(report)["time"]
    assert value == f"{sum(parts.values()):.1f} s"
    assert [each.rsplit(" ", 2)[0] for each in more.split(", ")] == list(parts)
    report.settings["processes"] = 2
    del report.seconds["permutation"]  # is in what blocks took
    assert report.time_by_part() == report.seconds


def test_a_second_run_has_its_own_time_and_the_blocks_whose_layers_stand():
    data = {"data_loader": token_batches(4), "progress": False}
    model = mts.sparsify(tiny_llama(), "sparsegpt", reconstruct=1, pattern="1:4", **data)
    first, second = "model.layers.0", "model.layers.1"
    mts.sparsify(model, "magnitude", replace=True, include=f"{first}.*", progress=False)
    report = mts.report(model)
    assert [block.name for block in report.blocks] == [second], "nothing of the first one is tuned any more"
    assert report.time_by_part() == report.seconds, "what solving and tuning took is that of both runs"
    mts.sparsify(model, "wanda", replace=True, **data)
    assert mts.report(model).blocks == []

    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    data["data_loader"] = [torch.randn(8, 16) for _ in range(4)]
    mts.sparsify(net, "sparsegpt", reconstruct=1, include=["0", "2"], **data)
    for name, left in ("0", ["Sequential"]), ("2", []):
        mts.sparsify(net, "magnitude", include=name, progress=False)
        assert [block.name for block in mts.report(net).blocks] == left


@pytest.mark.parametrize("trained", [["*.mlp.*.weight"], ["model.embed_tokens.weight", "*norm*"]], ids=["mlp", "other"])
@pytest.mark.parametrize("first", ["sparsify", "training"])
def test_each_matrix_counts_once_where_sparse_training_and_sparsify_meet(first, trained):
    model = tiny_llama()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    for run in (first, *{"sparsify", "training"} - {first}):
        if run == "training":
            training.Static(0.75, include=trained).apply(model)
        else:
            mts.sparsify(model, "magnitude", include="*q_proj", progress=False)
        report = mts.report(model)
        assert report.weights[1] == matrices + sum(row.size for row in report.layers if "norm" in row.name)
        held = {name for row in report.layers for name in (row.name, row.parameter)}
        assert held.isdisjoint({x.name for x in report.skipped} | {f"{x.name}.weight" for x in report.skipped})


def test_what_shrink_measured_and_noted_stands_after_later_runs():
    data = {"data_loader": token_batches(6), "progress": False}
    model = mts.shrink(tiny_llama(), mlp=0.5, divergence="squared", reconstruct=1, **data)
    shrunk = mts.report(model)
    assert "; squared error from the model before" in shrunk.summaries()[0]
    for _ in range(2):
        mts.sparsify(model, "magnitude", replace=True, progress=False)
        report = mts.report(model)
        assert report.summaries()[1] == shrunk.summaries()[0]
        assert "squared error from the model before" in cost_of(report)
        assert report.all_notes() == shrunk.notes
        assert [run["settings"] for run in report.earlier] == [shrunk.settings]
        assert report.blocks == shrunk.blocks


def test_what_was_measured_stays_with_the_report(llama, tmp_path):
    mts.save(llama, tmp_path / "sparse")
    assert mts.report(tmp_path / "sparse").evaluation == mts.report(llama).evaluation
    again = mts.sparsify(mts.load(tmp_path / "sparse"), "magnitude", pattern="1:4", progress=False)
    assert mts.report(again).evaluation is None, "it was measured before this run"
    mts.report(again).tasks = {"arc": {"acc,none": math.nan}}
    mts.save(again, tmp_path / "again")
    json.loads((tmp_path / "again" / "sparsity.json").read_text(), parse_constant=pytest.fail)
    for report in (full_report(), shrunk_report()):
        assert mts.Report.from_dict(json.loads(report.to_json())) == report
