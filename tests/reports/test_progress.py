"""Bars, and the lines that stand for them in a log."""

import pytest

import modelopt_sparse as mts
from modelopt_sparse import run
from modelopt_sparse.run import Progress
from tests.helpers import refused, tiny_llama, token_batches

pytestmark = pytest.mark.core


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(run.time, "monotonic", lambda: self.now)


def test_a_line_every_minute_where_there_is_no_terminal(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    with Progress("sparsify", "block", 8) as bar:
        for block in range(8):
            bar.say(f"layers.{block}", "", "1.5 GB")
            clock.now += 40
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "sparsify: block 2 of 8, 01:20 gone, 04:00 left, layers.1, 1.5 GB",
        "sparsify: block 4 of 8, 02:40 gone, 02:40 left, layers.3, 1.5 GB",
        "sparsify: block 6 of 8, 04:00 gone, 01:20 left, layers.5, 1.5 GB",
        "sparsify: block 8 of 8, 05:20 gone, 00:00 left, layers.7, 1.5 GB",
    ]


@pytest.mark.parametrize(("show", "terminal", "bar", "lines"), [
    (None, False, False, True), (None, True, True, False), (False, False, False, False), (False, True, False, False),
    (True, False, True, False), (True, True, True, False),
])  # fmt: skip
def test_where_what_is_shown(monkeypatch, capsys, show, terminal, bar, lines):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(run.sys.stderr, "isatty", lambda: terminal, raising=False)
    with Progress("sparsify", "block", 2, show=show) as each:
        clock.now += 100
        each.update()
    written = capsys.readouterr().err
    assert ("|" in written, "sparsify: block 1 of 2, 01:40 gone" in written) == (bar, lines)


def test_a_notebook_is_no_terminal_and_has_a_bar(monkeypatch):
    Widget = type("Widget", (run.tqdm,), {"__module__": "tqdm.notebook"})
    shown = []

    class InNotebook(Widget):
        def __init__(self, **options):
            shown.append(not options["disable"])
            super().__init__(**{**options, "disable": True})

    monkeypatch.setattr(run, "tqdm", InNotebook)
    for show in (None, False):
        with Progress("sparsify", "block", 2, show=show):
            pass
    assert shown == [True, False]


def test_a_run_says_block_error_memory_and_what_was_reused(monkeypatch, capsys, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "dense")
    options = {"data_loader": token_batches(4), "reconstruct": 1, "progress": True}
    said, real = [], Progress.say

    def say(bar, *words):
        said.append(words)
        real(bar, *words)
        if len(said) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "say", say)
    refused(mts.sparsify_checkpoint, tmp_path / "dense", tmp_path / "out", "wanda", **options, error=KeyboardInterrupt)
    (first, error, memory, reused), (second, then, _, _) = said
    assert (first, error, reused, second) == ("model.layers.0", "", "", "model.layers.1")
    assert then.startswith("error 0.")
    assert then.endswith(" of the block before")
    assert float(memory.removesuffix(" GB")) > 0.1
    assert "model.layers.1, error 0." in capsys.readouterr().err
    mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "out", "wanda", **options)
    assert (said[-1][0], said[-1][-1]) == ("model.layers.1", "1 blocks reused")
