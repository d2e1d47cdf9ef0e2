"""The HTML report: it says what the report says, needs nothing beside the file, and takes no name for HTML."""

import html
import re
import sys
from dataclasses import replace
from statistics import mean

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.reports.page import compared_figures, cost_of, drawn_masks, place_of
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.values import BlockReport, Distilled, Shrunk, Skipped
from tests.helpers import tiny_llama, token_batches
from tests.reports.pages import figures, layer, tables, unpacked, visible

plotly = pytest.importorskip("plotly", reason="the extra report (plotly) is not installed")
graph_objects = pytest.importorskip("plotly.graph_objects")

MEGABYTES = 1e6
script = plotly.offline.get_plotlyjs


@pytest.fixture(autouse=True)
def _short_script(monkeypatch):
    """Packing plotly's script takes longer than all else on a page; the pages of fixtures have it."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "a script")


# what it says ---------------------------------------------------------------------------------------------------------


def test_the_top_says_what_was_done_and_what_it_cost(llama, page):
    report = mts.report(llama)
    text = html.unescape(re.sub(r"<[^>]+>", " ", visible(page).partition("packed-data")[0]))
    assert report.summary() in text
    dense = sum(weight.shape[0] * weight.shape[1] for weight in report.skipped)
    pruned = sum(layer.shape[0] * layer.shape[1] for layer in report.layers)
    measured = report.evaluation
    assert measured is not None
    assert measured.kl is not None
    errors = [layer.error for layer in report.layers if layer.error is not None]
    worst = max(report.layers, key=lambda layer: layer.error or 0.0)
    blocks = [mean(getattr(block, which) for block in report.blocks) for which in ("error_before", "error_after")]
    for said in (
        f"of {pruned:,} weights in pruned layers; {0.5 * pruned / (pruned + dense):.2%} of all matrix weights",
        "14 pruned",
        f"{len(report.skipped)} stay dense",
        f"{measured.reference_perplexity:.3f} \u2192 {measured.perplexity:.3f}",
        f"{measured.kl:.4f}",
        f"{mean(errors):.4f} the mean; the largest is {max(errors):.4f}, of {worst.name}",
        f"{blocks[0]:.4f} \u2192 {blocks[1]:.4f}",
        torch.__version__,
    ):
        assert said in re.sub(r"\s+", " ", text), said


def test_tables_hold_every_row(llama, page):
    report, shown = mts.report(llama), tables(page)
    rows = shown["layers"]
    assert rows["layer"] == [layer.name for layer in report.layers]
    assert rows["% zeros"] == [50.0] * 14
    for number, step in enumerate(("sparsegpt", "polish")):
        expected = [layer.steps[number].error for layer in report.layers]
        assert rows[f"error after {step}"] == pytest.approx(expected, rel=1e-4)
    assert shown["blocks"]["error after"] == pytest.approx([block.error_after for block in report.blocks], rel=1e-4)
    assert shown["skipped"]["reason"] == [weight.reason for weight in report.skipped]


def test_every_plot_whose_data_is_there(page):
    """Plotly raises for a property that it does not know."""
    drawn = figures(page)
    assert list(drawn) == ["errors", "steps", "reconstruction", "zeros", "seconds", "masks"]
    for key, figure in drawn.items():
        assert f'id="figure-{key}"' in visible(page)
        graph_objects.Figure(figure["traces"], figure["layout"])
    roles = {trace["name"] for trace in drawn["errors"]["traces"]}
    assert {"self_attn.q_proj", "mlp.up_proj"} <= roles
    assert list(drawn["errors"]["choices"]) == ["after polish", "after sparsegpt"]


def test_lines_are_the_report_s_numbers(llama, page):
    report, drawn = mts.report(llama), figures(page)
    lines = {trace["name"]: trace["y"] for trace in drawn["steps"]["traces"]}
    for number, step in enumerate(("sparsegpt", "polish")):
        for block in range(2):
            inside = [each for each in report.layers if each.name.startswith(f"model.layers.{block}.")]
            expected = mean(each.steps[number].error or 0.0 for each in inside)
            assert lines[f"after {step}"][block] == pytest.approx(expected, rel=1e-5)
    before, after = (trace["y"] for trace in drawn["reconstruction"]["traces"])
    assert before == pytest.approx([block.error_before for block in report.blocks], rel=1e-5)
    assert after == pytest.approx([block.error_after for block in report.blocks], rel=1e-5)
    axis = drawn["reconstruction"]["layout"]["yaxis"]
    assert (axis["type"], axis["nticks"]) == ("log", 8)  # ticks at all digits of three powers of ten overlap
    spent = sum(sum(trace["y"]) for trace in drawn["seconds"]["traces"])
    assert spent == pytest.approx(sum(row.seconds for row in [*report.layers, *report.blocks]), rel=0.02)


def test_a_plot_without_data_is_left_out(tmp_path):
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    path = mts.report(model).to_html(tmp_path / "a.html")
    drawn = figures(path)
    assert set(drawn) <= {"errors", "steps", "zeros", "seconds"}
    assert "zeros" in drawn
    Report().to_html(tmp_path / "empty.html")
    assert figures(tmp_path / "empty.html") == tables(tmp_path / "empty.html") == {}
    assert unpacked(tmp_path / "empty.html", "plotly") == ""


def test_budget_and_experts(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=97, num_hidden_layers=2, num_local_experts=4, **sizes)).eval()
    options = {"data_loader": token_batches(1), "progress": False, "budget": "50% zeros"}
    mts.sparsify(model, "sparsegpt", options)
    report = mts.report(model)
    drawn = figures(report.to_html(tmp_path / "a.html", masks=dict(mts.named_masks(model))))
    said = report.settings["budget"]
    (bars,) = drawn["tried"]["traces"]
    assert bars["x"] == [kl for _, kl in said["tried"].values()]
    assert [name for name in bars["y"] if "(chosen)" in name] == [f"{said['taken']} (chosen)"]
    own, plain = drawn["curve"]["traces"]
    assert [list(point) for point in zip(own["x"], own["y"], plain["y"])] == [p[:3] for p in said["curve"]["points"]]
    assert drawn["curve"]["layout"]["xaxis"]["title"]["text"] == "% zeros"
    (levels,) = drawn["levels"]["traces"]
    by_place = {place_of(each.name): 100 * each.zeros / each.size for each in report.layers}
    for role, row in zip(levels["y"], levels["z"], strict=True):
        assert row == [pytest.approx(by_place.get((f"model.layers.{block}", role), 0)) for block in range(2)]
    (tokens,) = drawn["experts"]["traces"]
    fused = [each.expert_tokens for each in report.layers if each.name.endswith("gate_up_proj")]
    assert tokens["z"] == [list(counts) for counts in zip(*fused, strict=True)]


def test_experts_in_a_list(tmp_path):
    rows = [layer(f"layers.{b}.moe.experts.{e}.{w}", tokens=10 * b + e) for b in (0, 1) for e in (0, 1) for w in "ab"]
    drawn = figures(Report(layers=rows).to_html(tmp_path / "a.html"))
    (tokens,) = drawn["experts"]["traces"]
    assert tokens["z"] == [[0, 10], [1, 11]]
    assert {trace["name"] for trace in drawn["zeros"]["traces"]} == {"moe.experts.*.a", "moe.experts.*.b"}


def test_the_map_of_a_mask(tmp_path):
    torch.manual_seed(0)
    masks = {"a.0.weight": torch.rand(192, 384) > 0.3, "a.1.experts": torch.rand(3, 4, 8) > 0.5}
    rows = [layer("a.0", (0.1,)), layer("a.1", (0.2,), parameter="a.1.experts", shape=[3, 4, 8])]
    drawn = figures(Report(layers=rows).to_html(tmp_path / "a.html", masks=masks))["masks"]
    assert list(drawn["choices"]) == ["a.1.experts", "a.0.weight"]  # the larger error first
    first, _, corner, whole = drawn["traces"]
    assert first["z"] == (~masks["a.1.experts"][0]).int().tolist()
    assert corner["z"] == (~masks["a.0.weight"][:64, :64]).int().tolist()
    blocks = (~masks["a.0.weight"]).float().view(96, 2, 192, 2).mean((1, 3))
    torch.testing.assert_close(torch.tensor(whole["z"]), blocks, atol=6e-4, rtol=0)
    assert (whole["dx"], whole["dy"]) == (2, 2)


def test_the_map_of_a_convolution_has_all_of_its_groups(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 6, 3, groups=2), torch.nn.Conv1d(6, 6, 3, groups=6))
    mts.sparsify(net, "magnitude", pattern=0.5, include=["0", "1"], progress=False)
    masks = dict(mts.named_masks(net))
    drawn = figures(mts.report(net).to_html(tmp_path / "a.html", masks=masks))["masks"]
    for name, (corner, _) in drawn["choices"].items():
        assert drawn["traces"][corner]["z"] == (~masks[name]).flatten(1).int().tolist()


def test_of_many_masks_those_with_the_largest_errors_are_drawn():
    report = Report(layers=[layer(f"a.{i}", (i / 10,)) for i in range(9)])
    assert drawn_masks(report, [each.parameter for each in report.layers]) == [f"a.{i}.weight" for i in range(8, 2, -1)]


def test_sparse_training(tmp_path):
    model = tiny_llama()
    training.Static(0.5, include=["*.mlp.*.weight"]).apply(model)
    path = mts.report(model).to_html(tmp_path / "a.html", masks=dict(mts.named_masks(model)))
    assert list(figures(path)) == ["zeros", "masks"]
    assert ">step 0<" in visible(path)
    assert set(tables(path)["layers"]["recipe"]) == {"static"}


BLOCKS_AND_ROLES = [
    ("model.layers.3.mlp.up_proj", ("model.layers.3", "mlp.up_proj")),
    ("encoder.block.0.layer.1.wi", ("encoder.block.0", "layer.*.wi")),
    ("h.11.experts.7.w1", ("h.11", "experts.*.w1")),
    ("0", ("0", "layer")),
    ("classifier.fc1", ("classifier", "fc1")),
    ("head", ("head", "head")),
]


@pytest.mark.parametrize(("name", "place"), BLOCKS_AND_ROLES)
def test_block_and_role(name, place):
    assert place_of(name) == place


def test_many_kinds_of_layers_are_few_lines(tmp_path):
    rows = [layer(f"layers.0.kind{chr(97 + i)}", (0.1 + i / 100,)) for i in range(20)]
    drawn = figures(Report(layers=rows).to_html(tmp_path / "a.html"))
    lines = {trace["name"]: trace["y"] for trace in drawn["errors"]["traces"]}
    assert len(lines) == 10
    assert lines["others"] == [pytest.approx(mean(0.1 + i / 100 for i in range(9, 20)))]


def test_an_error_of_zero_is_a_gap_on_the_logarithmic_scale(tmp_path):
    rows = [layer("a.0.fc", (0.0,)), layer("a.1.fc", (0.5,))]
    (line,) = figures(Report(layers=rows).to_html(tmp_path / "a.html"))["errors"]["traces"]
    assert line["y"] == [None, 0.5]


# two runs -------------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side(tmp_path):
    first = Report([layer("a.0.x", (0.2, 0.1)), layer("a.1.x", (0.4,))], settings={"seed": 0, "update": True})
    first.blocks = [BlockReport("a.0", 0.3, 0.2, 1, 4.0)]
    second = Report([layer("a.0.x", (0.3,)), layer("a.2.x", (0.5,))], settings={"seed": 1, "update": True})
    path = first.to_html(tmp_path / "a.html", title="one", compare=second, compare_title="two")
    rows = tables(path)["layers"]
    assert rows["layer"] == ["a.0.x", "a.1.x", "a.2.x"]
    assert rows["error, one"] == [0.1, 0.4, None]
    assert rows["error, two"] == [0.3, None, 0.5]
    assert rows["second / first"] == [pytest.approx(3.0), None, None]
    text = visible(path)
    for name, values in cost_of(first).items():
        assert f"<th>{name}</th><td><b>{values[0]}</b>" in text
    assert "<th>seed</th><td>0</td><td>1</td>" in text
    assert "<th>update</th><td>true</td><td>true</td>" not in text
    assert "<title>one and two</title>" in text
    drawn = figures(path)
    assert list(drawn) == ["errors", "pairs", "reconstruction", "zeros", "seconds"]
    lines = [(trace["name"], trace["y"]) for trace in drawn["errors"]["traces"]]
    assert lines == [("one", [0.1, 0.4]), ("two", [0.3, 0.5])]
    assert [trace["y"] for trace in drawn["seconds"]["traces"]] == [[5.0, 0.5, 0.0], [0.5, 0.0, 0.5]]
    roles = [layer(f"a.0.{i}x", (0.01 * (i + 1),)) for i in range(12)]
    compared = compared_figures([("one", Report(roles)), ("two", Report(roles[1:]))])
    (pairs,) = (figure for figure in compared if figure and figure.key == "pairs")
    assert all(trace["x"] == trace["y"] for trace in pairs.traces), "of many roles too, each is compared with itself"
    same = first.to_html(tmp_path / "b.html", title="one", compare=second, compare_title="one")
    assert "error, A" in tables(same)["layers"]


# the file -------------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere_and_the_file_is_small(page, large):
    text = visible(page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,"}
    assert not re.search(r"https?:|@import|url\(", text)
    assert "default-src 'none'" in text
    assert unpacked(page, "plotly") == script()
    assert text.count("packed-plotly") == 1
    assert page.stat().st_size < 3 * MEGABYTES
    assert large.stat().st_size < 6 * MEGABYTES


EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>&'


def test_names_and_notes_are_no_html(tmp_path):
    rows = [layer(f"a.0.{EVIL}", (0.1,), notes=[EVIL], recipe=EVIL, type=EVIL), layer("a.1.x", (0.2,), pattern=EVIL)]
    blocks, skipped = [BlockReport(EVIL, 0.2, 0.1, 1, 1.0)], (Skipped(EVIL, EVIL, (2, 2), EVIL),)
    report = Report(rows, blocks, skipped, [EVIL], {EVIL: EVIL})
    curve = {"unit": "zeros", "points": [[50, 0.1, 0.2, None]]}
    report.settings["budget"] = {"asked": EVIL, "taken": EVIL, "tried": {EVIL: [0.1, 0.1]}, "curve": curve}
    report.earlier = [{"layers": [], "notes": [EVIL], "settings": {"a": EVIL}}]
    plain = report.to_html(tmp_path / "a.html", title=EVIL, masks={EVIL: torch.ones(4, 4, dtype=torch.bool)})
    both = report.to_html(tmp_path / "b.html", title=EVIL, compare=Report(rows[:1], settings={EVIL: 1}))
    for path in (plain, both):
        text = visible(path)
        assert len(re.findall("<script", text)) == 3  # the data, plotly and the page's own
        assert "<img" not in text
        assert EVIL in html.unescape(text)
        for figure in figures(path).values():
            shown = [figure["layout"], *({**trace, "z": None} for trace in figure["traces"])]
            assert "<" not in str(shown)  # plotly reads its texts as HTML


def test_without_plotly_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match=r'pip install "modelopt-sparse\[report\]"'):
        Report().to_html(tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path):
    (tmp_path / "folder.html").mkdir()
    for path, why in (("model.safetensors", "a file that ends in .html"), ("folder.html", "is a folder")):
        with pytest.raises(ValueError, match=why):
            Report().to_html(tmp_path / path)
    with pytest.raises(ValueError, match="'w' is no bool tensor"):
        Report().to_html(tmp_path / "a.html", masks={"w": torch.ones(2, 2)})


def test_the_top_says_what_distillation_did():
    tuned = Distilled(0.25, 0.125, 2, 30.0)
    with_it, without = (cost_of(Report(layers=[layer("a", (0.1,))], distillation=each)) for each in (tuned, None))
    value, more = with_it["KL by distillation"]
    assert value == "0.2500 \N{RIGHTWARDS ARROW} 0.1250"
    assert more == "nats, on calibration batches that it was not tuned on"
    assert with_it["time"][0] == "30.5 s"
    assert with_it["time"][1] == "distillation 30.0 s, solving 0.5 s"
    assert "KL by distillation" not in without
    assert without["time"] == ("0.5 s", "solving 0.5 s")


# smaller models -------------------------------------------------------------------------------------------------------


def test_the_page_of_a_smaller_model_shows_what_went(tmp_path):
    names = [f"model.layers.{i}.mlp.experts.down_proj" for i in (0, 1)]
    report = Report()
    report.shrunk = Shrunk(
        sizes={"num_experts": [3, 2]},
        criterion="reap",
        kept={"experts": {names[0]: [0, 2], names[1]: [1, 2]}},
        scores={names[0]: [4.0, 1.0, 2.0], names[1]: [0.0, 5.0, 5.0]},
        errors={names[0]: [0.25], names[1]: [0.5]},
        kl={"as is": 0.5, "reconstructed": 0.125},
        costs={"parameters": [1000.0, 750.0]},
    )
    report.earlier = [{"layers": layers, "notes": [], "settings": {"seed": 3}} for layers in ([], ["a"])]
    page = report.to_html(tmp_path / "page.html")
    assert "Earlier run 1, which made the model smaller: settings" in visible(page)
    assert "Earlier run 2, of 1 layers: settings" in visible(page)
    assert "0 layers pruned" not in visible(page)
    for text in ("num_experts 3 -&gt; 2", "<dd>66.7%</dd>", "<dd>75.0%</dd>", "0.5000 \N{RIGHTWARDS ARROW} 0.1250"):
        assert text in visible(page)
    found = figures(page)
    assert list(found) == ["kl", "shrunk", "stay"]
    assert found["kl"]["traces"][0]["y"] == [0.5, 0.125]
    assert found["shrunk"]["traces"][0]["y"] == [0.25, 0.5]
    (stay,) = found["stay"]["traces"]
    assert (stay["y"], stay["z"]) == (["0", "1", "2"], [[1.0, None], [None, 1.0], [0.5, 1.0]])
    report.shrunk = replace(report.shrunk, kl={"as is": 0.5}, scores={}, errors={})
    assert list(figures(report.to_html(tmp_path / "less.html"))) == ["kl"]
