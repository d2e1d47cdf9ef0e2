"""The site that Sphinx builds of README, docs/ and the examples' READMEs: without a warning, whole, and by itself."""

import importlib.util
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import modelopt_sparse as mts
from modelopt_sparse import training
from tests.helpers import ROOT, run_python

NEEDED = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra 'docs': no {', '.join(MISSING)}"),
]


class Page(HTMLParser):
    """What a page is called by (ids), leads to (links), and takes by itself (loaded)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links |= {values["href"]} if tag == "a" and "href" in values else set()
        self.loaded |= {values[name] for name in ("src", "data") if name in values}
        self.loaded |= {values["href"]} if tag == "link" and "href" in values else set()


def is_elsewhere(address: str) -> bool:
    return re.match(r"[a-z]+:|//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = run_python("-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def place(page: Path, address: str) -> tuple[Path, str]:
    """The file and the id that an address on a page means."""
    path, _, anchor = address.partition("#")
    path = path.partition("?")[0]
    return ((page.parent / unquote(path)).resolve() if path else page), unquote(anchor)


def test_every_link_leads_to_a_file_and_a_place_in_it(pages):
    for path, page in pages.items():
        for address in page.links | page.loaded:
            if not is_elsewhere(address):
                file, anchor = place(path, address)
                assert file.is_file(), f"{path.name}: {address}"
                assert not anchor or file not in pages or anchor in pages[file].ids, f"{path.name}: {address}"


def test_every_page_can_be_reached_from_the_first(site, pages):
    first = site / "docs" / "index.html"
    assert "url=docs/index.html" in (site / "index.html").read_text(encoding="utf-8")
    reached, waiting = set(), [first]
    while waiting:
        path = waiting.pop()
        if path in pages and path not in reached:
            reached.add(path)
            waiting += [place(path, address)[0] for address in pages[path].links if not is_elsewhere(address)]
    sources = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    assert {site / page.relative_to(ROOT).with_suffix(".html") for page in sources} <= reached


def test_every_public_name_has_a_place(site, pages):
    """In the index that other projects' pages link by, too."""
    head, index = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)
    assert head.startswith(b"# Sphinx inventory version 2")
    listed = {line.split()[0] for line in zlib.decompress(index).decode().splitlines()}
    for module, page in ((mts, "api"), (training, "api-training")):
        names = {f"{module.__name__}.{name}" for name in module.__all__}
        assert names <= listed
        assert names <= pages[site / "docs" / f"{page}.html"].ids


def test_docstrings_show_no_markup(site):
    """No backtick and no escape is left in what readers see, outside of code."""
    for page in ("api", "api-training"):
        text = (site / "docs" / f"{page}.html").read_text(encoding="utf-8")
        text = re.sub(r"<(script|style|pre|code)\b.*?</\1>|<[^>]+>", "", text, flags=re.DOTALL)
        assert not re.search(r"[`\\]", text), page


def test_pages_ask_no_other_server_for_anything(site, pages):
    for path, page in pages.items():
        assert not [address for address in page.loaded if is_elsewhere(address)], path.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name
