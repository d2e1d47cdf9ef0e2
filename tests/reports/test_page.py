"""The HTML report: it says what the report says, needs nothing beside the file, and takes no name for HTML."""

import html
import math
import re
import sys
from statistics import mean

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.reports.page import drawn_masks, place_of
from modelopt_sparse.reports.values import BlockReport, Skipped
from tests.helpers import refused, tiny_llama, token_batches
from tests.models.tiny import tiny_mixtral
from tests.reports import pages
from tests.reports.pages import assert_golden, figures, full_report, layer, tables, unpacked, visible

plotly = pytest.importorskip("plotly", reason="the extra report (plotly) is not installed")
graph_objects = pytest.importorskip("plotly.graph_objects")

MEGABYTES = 1e6
script = plotly.offline.get_plotlyjs


@pytest.fixture(autouse=True)
def _short_script(monkeypatch):
    """Packing plotly's script takes longer than all else on a page; the pages of fixtures have it."""
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "a script")


# what it says ---------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_is_the_golden_text(tmp_path):
    """Texts, plots and tables of all that a report may hold; then of earlier runs too."""
    assert_golden("page", pages.as_text(full_report().to_html(tmp_path / "a.html", title="a run")))
    shrunk = pages.shrunk_report()
    shrunk.earlier = [{"layers": layers, "notes": ["then"], "settings": {"seed": 3}} for layers in ([], ["a"])]
    assert_golden("page-of-a-smaller-model", pages.as_text(shrunk.to_html(tmp_path / "b.html")))


def test_the_page_of_two_runs_is_the_golden_text(tmp_path):
    second = mts.Report([layer("h.0.fc", (0.3,)), layer("h.2.fc", (0.5,))], settings={"seed": 1, "update": True})
    options = {"compare": second, "compare_title": "two"}
    assert_golden("page-of-two", pages.as_text(full_report().to_html(tmp_path / "a.html", title="one", **options)))
    assert "error, A" in tables(full_report().to_html(tmp_path / "b.html", title="two", **options))["layers"]
    roles = [layer(f"a.0.{i}x", (0.01 * (i + 1),)) for i in range(12)]
    pairs = figures(mts.Report(roles).to_html(tmp_path / "c.html", compare=mts.Report(roles[1:])))["pairs"]
    assert all(trace["x"] == trace["y"] for trace in pairs["traces"]), "of many roles too, each beside itself"


def test_every_plot_whose_data_is_there(page):
    """Plotly raises for a property that it does not know."""
    drawn = figures(page)
    assert list(drawn) == ["errors", "steps", "reconstruction", "zeros", "seconds", "masks"]
    for key, figure in drawn.items():
        assert f'id="figure-{key}"' in visible(page)
        graph_objects.Figure(figure["traces"], figure["layout"])
    assert {"self_attn.q_proj", "mlp.up_proj"} <= {trace["name"] for trace in drawn["errors"]["traces"]}
    assert list(drawn["errors"]["choices"]) == ["after polish", "after sparsegpt"]


def test_a_plot_without_data_is_left_out(tmp_path):
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    drawn = figures(mts.report(model).to_html(tmp_path / "a.html"))
    assert {"zeros"} <= {*drawn} <= {"errors", "steps", "zeros", "seconds"}
    mts.Report(tasks={"arc": {"acc,none": math.nan}}).to_html(tmp_path / "nan.html")
    assert tables(tmp_path / "nan.html")["tasks"]["score"] == [None]
    mts.Report().to_html(tmp_path / "empty.html")
    assert figures(tmp_path / "empty.html") == tables(tmp_path / "empty.html") == {}
    assert unpacked(tmp_path / "empty.html", "plotly") == ""


def test_a_budget_and_experts_are_drawn(tmp_path):
    model = tiny_mixtral()
    mts.sparsify(model, "sparsegpt", data_loader=token_batches(1), progress=False, budget="50% zeros")
    drawn = figures(mts.report(model).to_html(tmp_path / "a.html"))
    assert {"tried", "curve", "levels", "experts"} <= set(drawn)
    by_place = {place_of(each.name): 100 * each.zeros / each.size for each in mts.report(model).layers}
    (levels,) = drawn["levels"]["traces"]
    for role, row in zip(levels["y"], levels["z"], strict=True):
        assert row == [pytest.approx(by_place.get((f"model.layers.{block}", role), 0)) for block in range(2)]


def test_the_map_of_a_mask(tmp_path):
    torch.manual_seed(0)
    masks = {"a.0.weight": torch.rand(192, 384) > 0.3, "a.1.experts": torch.rand(3, 4, 8) > 0.5}
    rows = [layer("a.0", (0.1,)), layer("a.1", (0.2,), parameter="a.1.experts", shape=[3, 4, 8])]
    drawn = figures(mts.Report(layers=rows).to_html(tmp_path / "a.html", masks=masks))["masks"]
    assert list(drawn["choices"]) == ["a.1.experts", "a.0.weight"]  # the larger error first
    first, _, corner, whole = drawn["traces"]
    parts = [masks["a.1.experts"][0], masks["a.0.weight"][:64, :64]]
    assert [first["z"], corner["z"]] == [(~part).int().tolist() for part in parts]
    blocks = (~masks["a.0.weight"]).float().view(96, 2, 192, 2).mean((1, 3))
    torch.testing.assert_close(torch.tensor(whole["z"]), blocks, atol=6e-4, rtol=0)
    assert (whole["dx"], whole["dy"]) == (2, 2)


def test_the_map_of_a_convolution_has_all_of_its_groups(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 6, 3, groups=2), torch.nn.Conv1d(6, 6, 3, groups=6))
    mts.sparsify(net, "magnitude", pattern=0.5, include=["0", "1"], progress=False)
    masks = dict(mts.named_masks(net))
    drawn = figures(mts.report(net).to_html(tmp_path / "a.html", masks=mts.named_masks(net)))["masks"]
    for name, (corner, _) in drawn["choices"].items():
        assert drawn["traces"][corner]["z"] == (~masks[name]).flatten(1).int().tolist()


def test_of_many_masks_those_with_the_largest_errors_are_drawn():
    report = mts.Report(layers=[layer(f"a.{i}", (i / 10,)) for i in range(9)])
    assert drawn_masks(report, [each.parameter for each in report.layers]) == [f"a.{i}.weight" for i in range(8, 2, -1)]


def test_sparse_training(tmp_path):
    model = training.Static(0.5, include=["*.mlp.*.weight"]).apply(tiny_llama())
    path = mts.report(model).to_html(tmp_path / "a.html", masks=dict(mts.named_masks(model)))
    assert (list(figures(path)), {*tables(path)["layers"]["recipe"]}) == (["zeros", "masks"], {"static"})
    assert ">step 0<" in visible(path)


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
    drawn = figures(mts.Report(layers=rows).to_html(tmp_path / "a.html"))
    lines = {trace["name"]: trace["y"] for trace in drawn["errors"]["traces"]}
    assert (len(lines), lines["others"]) == (10, [pytest.approx(mean(0.1 + i / 100 for i in range(9, 20)))])


# the file -------------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere_and_the_file_is_small(page, large):
    text = visible(page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,"}
    assert not re.search(r"https?:|@import|url\(", text)
    assert "default-src 'none'" in text
    assert (unpacked(page, "plotly"), text.count("packed-plotly")) == (script(), 1)
    assert page.stat().st_size < 3 * MEGABYTES
    assert large.stat().st_size < 6 * MEGABYTES


EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>&'


def test_names_and_notes_are_no_html(tmp_path):
    rows = [layer(f"a.0.{EVIL}", (0.1,), notes=[EVIL], recipe=EVIL, type=EVIL), layer("a.1.x", (0.2,), pattern=EVIL)]
    blocks, skipped = [BlockReport(EVIL, 0.2, 0.1, 1, 1.0)], (Skipped(EVIL, EVIL, (2, 2), EVIL),)
    report = mts.Report(rows, blocks, skipped, [EVIL], {EVIL: EVIL})
    curve = {"unit": "zeros", "points": [[50, 0.1, 0.2, None]]}
    report.settings["budget"] = {"asked": EVIL, "taken": EVIL, "tried": {EVIL: [0.1, 0.1]}, "curve": curve}
    report.earlier = [{"layers": [], "notes": [EVIL], "settings": {"a": EVIL}}]
    plain = report.to_html(tmp_path / "a.html", title=EVIL, masks={EVIL: torch.ones(4, 4, dtype=torch.bool)})
    both = report.to_html(tmp_path / "b.html", title=EVIL, compare=mts.Report(rows[:1], settings={EVIL: 1}))
    for path in (plain, both):
        text = visible(path)
        assert (text.count("<script"), text.count("<img")) == (3, 0)  # the data, plotly and the page's own
        assert EVIL in html.unescape(text)
        for figure in figures(path).values():
            shown = [figure["layout"], *({**trace, "z": None} for trace in figure["traces"])]
            assert "<" not in str(shown)  # plotly reads its texts as HTML


def test_without_plotly_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    refused(mts.Report().to_html, tmp_path / "a.html", match=r'pip install "modelopt-sparse\[report\]"')
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path):
    (tmp_path / "folder.html").mkdir()
    wrong = {"model.safetensors": "a file that ends in .html", "folder.html": "is a folder"}
    for path, why in (wrong | {"a.html": "'w' is no bool tensor"}).items():
        refused(mts.Report().to_html, tmp_path / path, masks={"w": torch.ones(2, 2)}, match=why)
