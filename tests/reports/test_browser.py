"""The HTML report in a real browser, headless Chromium: it draws, sorts and filters, and loads nothing."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelopt_sparse as mts
from tests.reports.pages import figures, large_report, layer

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
Service = pytest.importorskip("selenium.webdriver.chrome.service").Service
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
pytest.importorskip("plotly", reason="the extra report (plotly) is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver (Debian: chromium, chromium-driver)"
)

PHONE, SCREEN = 390, 1280  # pixels
SLOW = 3  # how many times a busy machine may take what is promised


class Browser:
    """A page at a time, with what it has said on its console."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        switches = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-sync"
        switches += " disable-background-networking disable-component-update"
        for switch in (*switches.split(), f"user-data-dir={folder}"):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))

    def open(self, page: Path, *, width: int = SCREEN, scheme: str = "light") -> None:
        """Open a page, and wait until it is complete."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(page.as_uri())
        self.wait(lambda: self.run("return document.documentElement.dataset.ready || !trouble.hidden"))
        assert self.driver.get_log("browser") == []

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait(self, until: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, 60).until(lambda _: until())


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.driver.quit()


@pytest.mark.parametrize(("width", "scheme"), [(SCREEN, "light"), (PHONE, "dark")])
def test_every_plot_is_drawn_and_nothing_is_wider_than_the_screen(browser, page, scheme, width):
    browser.open(page, width=width, scheme=scheme)
    drawn = browser.run(
        "return [...document.querySelectorAll('.plot')]"
        ".map((plot) => plot.querySelectorAll('.trace, .heatmaplayer image').length)"
    )
    assert len(drawn) == len(figures(page))
    assert all(drawn)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    ink = browser.run("return getComputedStyle(document.body).color")
    assert browser.run("return getComputedStyle(document.querySelector('.xtick text')).fill") == ink
    assert browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


TICKS = [
    (1e-7, [0.01, 0.1, 1]),
    (0.001, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
    (0.3, [0.3, 0.32, 0.34, 0.36, 0.38, 0.4, 0.42, 0.44, 0.46, 0.48, 0.5]),
]


@pytest.mark.parametrize(("least", "ticks"), TICKS)
def test_the_fewer_decades_a_logarithmic_scale_has_the_more_ticks(browser, tmp_path, least, ticks):
    """Each is written in full: plotly's own, between powers of ten, are single digits."""
    rows = [layer("a.0.fc", (least,)), layer("a.1.fc", (0.5,))]
    browser.open(mts.Report(layers=rows).to_html(tmp_path / "a.html"))
    shown = browser.run("return [...document.querySelectorAll('#figure-errors .ytick text')].map((t) => t.textContent)")
    written = [float(text.replace("\N{MINUS SIGN}", "-")) for text in shown]
    assert [tick for tick in written if tick >= 0.01] == ticks


def test_a_choice_and_a_legend_change_what_is_drawn(browser, page):
    browser.open(page)
    lines = "return document.querySelectorAll('#figure-errors .scatterlayer .trace').length"
    drawn = "return document.querySelector('#figure-errors .js-line').getAttribute('d')"
    select = "const select = document.querySelector('#figure-errors select'); "
    assert browser.run(lines) == 7
    before = browser.run(drawn)
    browser.run(select + "select.value = 'after sparsegpt'; select.dispatchEvent(new Event('change'))")
    assert browser.run(lines) == 7
    assert browser.run(drawn) != before
    browser.run("document.querySelector('#figure-errors .legend button').click()")
    assert browser.run(lines) == 6


def test_two_runs(browser, page, tmp_path):
    browser.open(large_report(60).to_html(tmp_path / "both.html", compare=large_report(30)))
    assert browser.run("return document.querySelectorAll('.plot .trace').length") > 0


def test_names_stay_text(browser, tmp_path):
    report = large_report(30)
    report.layers = [mts.Report.from_dict(report.as_dict()).layers[0]]
    evil = "layers.0.<img src=x onerror=document.title='evil'>"
    object.__setattr__(report.layers[0], "name", evil)
    browser.open(report.to_html(tmp_path / "a.html", masks={evil: torch.ones(4, 4, dtype=torch.bool)}))
    assert browser.run("return document.title") == "Sparsity report"
    assert browser.run("return document.querySelector('#table-layers tbody td').textContent") == evil
    assert browser.run("return document.querySelector('.legend button span:last-child').textContent") == evil[9:]


# 20,000 rows ----------------------------------------------------------------------------------------------------------

SHOWN = (
    "return [...document.querySelectorAll('#table-layers tbody tr:not(.space)')]"
    ".map((row) => row.cells[{}].textContent)"
)
TIMED = "const began = performance.now(); {}; document.body.offsetHeight; return performance.now() - began"


def test_20000_rows_open_in_three_seconds(browser, large):
    browser.open(large)
    assert float(browser.run("return document.documentElement.dataset.tables")) < 3000 * SLOW
    assert browser.run("return document.querySelector('#table-layers .count').textContent") == "20,000 rows"
    assert len(browser.run(SHOWN.format(0))) < 100, "only the rows in view are in the page"


def test_20000_rows_sort_in_half_a_second(browser, large, rows):
    """By name layer 9 comes before layer 10, by error as numbers; a third press gives the first order back."""
    browser.open(large)
    names = [layer.name for layer in rows.layers]
    errors = sorted(layer.errors[-1] for layer in rows.layers)
    press = "document.querySelectorAll('#table-layers th button')[{}].click()"
    assert browser.run(TIMED.format(press.format(0))) < 500 * SLOW
    natural = sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])
    shown = browser.run(SHOWN.format(0))
    assert shown == natural[: len(shown)]
    browser.run("document.querySelector('#table-layers .scroll').scrollTop = 1e9")
    browser.wait(lambda: browser.run(SHOWN.format(0))[-1] == natural[-1])
    column = browser.run(
        "return [...document.querySelectorAll('#table-layers th')]"
        ".findIndex((head) => head.textContent.includes('polish'))"
    )
    browser.run(press.format(column))
    assert browser.run(TIMED.format(press.format(column))) < 500 * SLOW
    shown = [float(text) for text in browser.run(SHOWN.format(column))]
    assert shown == pytest.approx(errors[::-1][: len(shown)], rel=1e-4)
    browser.run(press.format(column))
    shown = browser.run(SHOWN.format(0))
    assert shown == names[: len(shown)]


def test_20000_rows_filter_in_half_a_second(browser, large, rows):
    browser.open(large)
    names = [layer.name for layer in rows.layers]
    write = (
        "const box = document.querySelector('#table-layers input');"
        "box.value = '{}'; box.dispatchEvent(new Event('input'))"
    )
    assert browser.run(TIMED.format(write.format("Layers.7. b_proj"))) < 500 * SLOW
    some = [name for name in names if "layers.7." in name and "b_proj" in name]
    shown = browser.run(SHOWN.format(0))
    assert shown == some[: len(shown)]
    counted = browser.run("return document.querySelector('#table-layers .count').textContent")
    assert counted == f"{len(some)} of 20,000 rows"
    assert browser.run(TIMED.format(write.format(""))) < 500 * SLOW
    assert len(browser.run(SHOWN.format(0))) > 10


def test_a_pressed_row_is_shown_in_full(browser, page):
    browser.open(page)
    browser.run("document.querySelector('#table-layers tbody tr').click()")
    text = browser.run("return document.querySelector('#table-layers .detail').textContent")
    assert "model.layers.0.self_attn.q_proj" in text
    assert "sparsegpt+polish+reconstruct" in text


def test_print_shows_all_rows_and_settings(browser, page):
    browser.open(page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert len(browser.run(SHOWN.format(0))) == 14
    assert browser.run("return [...document.querySelectorAll('details')].every((part) => part.open)")
    browser.open(page)
    assert len(browser.driver.print_page()) > 10_000
