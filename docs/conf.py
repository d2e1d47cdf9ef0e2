"""The site of these pages: python -m sphinx -W --keep-going -c docs . build/docs

The source is the whole checkout, so that links between docs/, README and examples/ are the same here and on GitHub.
"""

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import modelopt_sparse as mts
from modelopt_sparse import __version__, training

project = "modelopt_sparse"
author = "the authors of modelopt_sparse"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/**", "examples/*/README.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "**/.*", "build", "dist", "out", "modelopt_sparse", "tests"]  # folders left out
myst_heading_anchors = 4
smartquotes = False  # "2:4" is a value

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = html_show_sphinx = False
templates_path = ["_templates"]
html_additional_pages = {"index": "to_the_start.html"}  # the root document lies one folder down

autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

PAGES = {"docs/api": mts, "docs/api-training": training}
PUBLIC = {name: f"{module.__name__}.{name}" for module in (training, mts) for name in module.__all__}


def list_public_names(app, page: str, source: list[str]) -> None:
    """The pages of the API end with all public names of their module."""
    if page not in PAGES:
        return
    module = PAGES[page]
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": [], "Data": []}
    for name in module.__all__:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(value) and issubclass(value, Exception):
            groups["Exceptions"] += [f".. autoexception:: {full}\n   :show-inheritance:"]
        elif inspect.isclass(value):
            groups["Classes"] += [f".. autoclass:: {full}\n   :members:\n   :member-order: bysource"]
        elif callable(value):
            groups["Functions"] += [f".. autofunction:: {full}"]
        else:
            groups["Data"] += [f".. py:data:: {name}\n   :value: {value!r}"]
    texts = [f"{group}\n{'-' * len(group)}\n\n" + "\n\n".join(entries) for group, entries in groups.items() if entries]
    source[0] += f"\n.. automodule:: {module.__name__}\n\n" + "\n\n".join(texts) + "\n"


def list_other_pages(app, page: str, source: list[str]) -> None:
    """The start page ends with the pages that none of its groups names."""
    if page == root_doc:
        named = re.findall(r"^   (\S+)$", source[0], re.MULTILINE)
        pages = sorted(path.stem for path in Path(app.confdir).glob("*.md"))
        others = [name for name in pages if not any(fnmatch(name, pattern) for pattern in named)]
        source[0] += "\n.. toctree::\n   :caption: More\n   :maxdepth: 1\n\n   " + "\n   ".join(others) + "\n"


# what reStructuredText would take for markup; examples and double backticks are matched to be left as they are
MARKUP = re.compile(r"^ *>>>.*?(?=\n\s*\n|\Z)|``.+?``|`([^`]+)`|[*|\\]|_(?!\w)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r'( *)("?[a-z]\w*"?(?:, [a-z]\w*)*): (.*)')


def inline(found: re.Match[str]) -> str:
    """`sparsify` becomes a link and `anything else` code; other markup is text."""
    if found[1]:
        name, dot, member = found[1].partition(".")
        return f":py:obj:`{found[1]} <{PUBLIC[name]}{dot}{member}>`" if name in PUBLIC else f"``{found[1]}``"
    return f"\\{found[0]}" if len(found[0]) == 1 else found[0]


def docstring(app, what, name, value, options, lines: list[str]) -> None:
    """Lines "name: text", whose text may go on indented, become a list of definitions."""
    result, entry = [""], -1  # the indent of the entry that a line may go on with; -1: of none
    for line in MARKUP.sub(inline, "\n".join(lines)).split("\n"):
        before, indent, found = result[-1].strip(), len(line) - len(line.lstrip()), ENTRY.fullmatch(line)
        if found and (indent <= entry or not before or before.endswith(":")):
            result += [""] if 0 <= entry < indent else []
            entry = indent
            result += [f"{found[1]}``{found[2]}``", f"{found[1]}  {found[3]}"]
            continue
        if line and indent <= entry:
            entry, line = indent - 1, f"\n{line}"
        result += line.split("\n")
    lines[:] = [*result[1:], ""]


def setup(app) -> None:
    app.connect("source-read", list_public_names)
    app.connect("source-read", list_other_pages)
    app.connect("autodoc-process-docstring", docstring)
