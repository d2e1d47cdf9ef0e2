"""The HTML report from the command line: where it may be written, and what it shows."""

import json
from pathlib import Path

import pytest

import modelopt_sparse as mts
from tests.reports.pages import figures, tables, visible

pytest.importorskip("plotly", reason="the extra report (plotly) is not installed")


def test_sparsify_writes_a_page_beside_the_folder(run, work, tmp_path):
    out = tmp_path / "new" / "out"
    command = ("sparsify", work / "llama", "--out", out, "--method", "magnitude", "--no-progress", "--html")
    said = run(*command, "--eval", work / "held.txt", "--seq-len", 32).well()
    page = tmp_path / "new" / "out.html"
    assert said.splitlines()[-1] == f"The report as a page: {page}"
    assert not list(out.glob("*.html"))
    assert "masks" in figures(page)
    assert "<title>out</title>" in visible(page)
    measured = mts.report(out).evaluation
    assert f"{measured.reference_perplexity:.3f} \u2192 {measured.perplexity:.3f}" in visible(page)

    page.write_text("old")
    assert run(*command, "--overwrite").code == 0
    assert len(page.read_bytes()) > 1e6


def test_streaming_writes_a_page_as_well_and_one_that_is_there_is_refused_before_work(run, work, tmp_path):
    (tmp_path / "out.html").write_text("old")
    command = ("sparsify", work / "llama", "--out", tmp_path / "out", "--method", "magnitude", "--html")
    run(*command).wrong("out.html' exists: --overwrite replaces it")
    assert not (tmp_path / "out").exists()
    assert run(*command, "--stream", "--overwrite", "--no-progress").code == 0
    assert "masks" in figures(tmp_path / "out.html")


def test_report_writes_a_page(run, sparse, tmp_path):
    page = tmp_path / "a.html"
    assert run("report", sparse, "--html", page).well() == f"Written to {page}.\n"
    assert tables(page)["layers"]["layer"] == [layer.name for layer in mts.report(sparse).layers]
    assert "masks" in figures(page)
    run("report", sparse, "--html", page).wrong("exists: --overwrite replaces it, or give another path")
    for place, problem in ((tmp_path / "none" / "a.html", "there is no folder"), (tmp_path, "ends in .html")):
        done = run("report", sparse, "--html", place)
        done.wrong(problem)
        assert "partial" not in done.err
    again = run("report", sparse, "--html", page, "--overwrite", "--json").out
    assert json.loads(again) == mts.report(sparse).as_dict()


def test_report_compares_two_folders(run, sparse, tmp_path):
    mts.save(mts.sparsify(mts.load(sparse), "magnitude", pattern="1:4", progress=False), tmp_path / "more")
    page = tmp_path / "both.html"
    done = run("report", sparse, "--compare", tmp_path / "more", "--html", page)
    assert (done.code, done.out) == (0, f"Written to {page}.\n")
    rows = tables(page)["layers"]
    assert ({*rows["pattern, sparse"]}, {*rows["pattern, more"]}) == ({"2:4"}, {"1:4"})


def test_report_shows_what_eval_printed(run, work, sparse, tmp_path):
    measured = run("eval", sparse, "--data", work / "held.txt", "--seq-len", 32, "--json", "--no-progress").out
    (tmp_path / "eval.json").write_text(measured)
    perplexity = f"{json.loads(measured)['perplexity']:.3f}"
    report = ("report", sparse, "--evaluation", tmp_path / "eval.json")
    assert f"held-out perplexity: sparse {perplexity}; " in run(*report).out
    scores = {f"task{i}": {"acc,none": i / 10, "acc_stderr,none": 0.01} for i in range(9)}
    (tmp_path / "scores.json").write_text(json.dumps({"results": scores, "lm_eval_version": "0.4.13"}))
    run(*report, "--evaluation", tmp_path / "scores.json", "--html", tmp_path / "b.html")
    page = visible(tmp_path / "b.html")
    assert f"<dd>{perplexity}</dd>" in page
    assert "acc, task5" in page
    assert "acc, task6" not in page, "six at the top"
    assert tables(tmp_path / "b.html")["tasks"]["score"] == [i / 10 for i in range(9)]


def test_results_without_a_score_are_refused(run, sparse, tmp_path):
    (tmp_path / "scores.json").write_text('{"results": {"all": {"alias": "all"}}}')
    report = ("report", sparse, "--evaluation", tmp_path / "scores.json")
    run(*report).wrong("nor results of lm_eval: its results hold no score")


WRONG_PAGES = [
    ("--html {sparse}/a.html", "is inside of the model's folder: give a path beside it"),
    ("--compare {sparse} --html {sparse}/deep/../a.html", "is inside of the model's folder"),
    ("--compare {sparse}", "--compare goes with --html FILE"),
    ("--html model.safetensors", "a file that ends in .html"),
    ("--html a.html --evaluation {llama}/config.json", "is neither what `eval --json` printed nor results"),
    ("--html a.html --compare nowhere", "'nowhere' is not a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_PAGES)
def test_wrong_pages_are_one_clear_line(run, work, sparse, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(sparse.iterdir())
    run("report", sparse, *arguments.format(sparse=sparse, llama=work / "llama").split()).wrong(message)
    assert sorted(sparse.iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_whole_leaves_the_one_that_was_there(sparse, tmp_path, monkeypatch):
    page = tmp_path / "a.html"
    page.write_text("mine")

    def full(self, text, **_options):
        self.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        mts.report(sparse).to_html(page)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.html", b"mine")]
