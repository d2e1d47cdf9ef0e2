"""Changes single lines of the package for the worse, and says which changes the tests notice.

    pytest --cov=modelopt_sparse --cov-context=test --cov-report= --junitxml=times.xml   # pip install pytest-cov
    python tests/mutants.py CHECKOUT --survive OTHER_CHECKOUT --coverage CHECKOUT/.coverage --times times.xml

A mutant is its function's name, its line, and what becomes of it: a sign, a comparison, a number one larger, another
dimension, a call left out, two arguments swapped; the kinds take turns. Drawn are lines that stand in both checkouts,
once in functions of that name, in whatever file. So a seed gives the same mutants, whichever of the two is CHECKOUT.
The fastest tests that run a line, by the coverage, are run on its mutant in a copy of CHECKOUT, where all must pass.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from coverage import CoverageData

OPERATORS = {ast.Add: "sign + -", ast.Sub: "sign - +", ast.Lt: "compare < <=", ast.LtE: "compare <= <"}
OPERATORS |= {ast.Gt: "compare > >=", ast.GtE: "compare >= >", ast.Eq: "compare == !=", ast.NotEq: "compare != =="}
BY_PLACE = {"sum", "mean", "amax", "argsort", "cumsum", "unsqueeze", "squeeze", "flatten", "movedim", "transpose"}
OTHER_DIMENSION = {"-1": "-2", "-2": "-1", "0": "-1", "1": "0", "2": "1"}
IN_ANY_ORDER = {"isinstance", "max", "min"}  # calls that swapped arguments leave as they are, or break for certain
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Name = tuple[str, str, str, str]  # function, line, kind, what becomes of the line
Place = tuple[str, int, range]  # file, number of the line, lines of its statement


def changes(node: Any, line: str) -> Iterator[tuple[str, int, int, str]]:
    """Mutants of one node that lies in one line: kind, the columns from which to which, and what comes there."""
    operator = getattr(node, "op", getattr(node, "ops", [None])[0])
    if type(operator) in OPERATORS and len(getattr(node, "ops", [operator])) == 1 and hasattr(node, "left"):
        kind, old, new = OPERATORS[type(operator)].split()
        begin = line.index(old, node.left.end_col_offset)
        yield kind, begin, begin + len(old), new
    if isinstance(node, ast.Constant) and type(node.value) is int and line[: node.col_offset][-1:] != "-":
        yield "off by one", node.col_offset, node.end_col_offset, str(node.value + 1)
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        values = [keyword.value for keyword in node.keywords if keyword.arg in ("dim", "axis")]
        for value in values + node.args * (called in BY_PLACE):
            if (number := ast.unparse(value)) in OTHER_DIMENSION:
                yield "dimension", value.col_offset, value.end_col_offset, OTHER_DIMENSION[number]
        plain = [value for value in node.args[:2] if not isinstance(value, ast.Starred)]
        if len(plain) == 2 and called not in IN_ANY_ORDER:
            (a, b), (first, second) = plain, [line[x.col_offset : x.end_col_offset] for x in plain]
            yield "arguments", a.col_offset, b.end_col_offset, second + line[a.end_col_offset : b.col_offset] + first
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node.col_offset, node.end_col_offset, "pass"


def nodes_of(tree: ast.AST, function: str = "", rows: range = range(0)) -> Iterator[tuple[Any, str, range]]:
    """Nodes that lie in one line of a function: with its name, and the lines of their statement, or of its head."""
    for node in getattr(tree, "body", ()) if isinstance(tree, FUNCTIONS) else ast.iter_child_nodes(tree):
        inner, lines = getattr(node, "name", "") if isinstance(node, FUNCTIONS) else function, rows
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = range(node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0) + 1)
        if function and getattr(node, "lineno", None) == getattr(node, "end_lineno", 0):
            yield node, function, lines
        if not isinstance(node, ast.JoinedStr):  # before Python 3.12 nothing in it says where it stands
            yield from nodes_of(node, inner, lines)


def mutants(checkout: Path) -> dict[Name, list[Place]]:
    found: dict[Name, list[Place]] = defaultdict(list)
    for file in sorted((checkout / "modelopt_sparse").rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for node, function, rows in nodes_of(ast.parse("\n".join(lines))):
            line = lines[node.lineno - 1]
            for kind, begin, end, new in changes(node, line) if line.isascii() else ():
                name = (function, line.strip(), kind, f"{line[:begin]}{new}{line[end:]}".strip())
                if name[1] != name[3]:
                    found[name].append((file.relative_to(checkout).as_posix(), node.lineno, rows))
    return found


def drawn(checkout: Path, other: Path, count: int, seed: int) -> list[tuple[Name, Place]]:
    here, there = mutants(checkout), mutants(other)
    both = sorted(name for name in here if len(here[name]) == len(there.get(name, ())) == 1)
    random.Random(seed).shuffle(both)
    kinds = [[name for name in both if name[2] == kind] for kind in sorted({name[2] for name in both})]
    return [(name, here[name][0]) for turn in zip_longest(*kinds) for name in turn if name][:count]


def tests_of(place: Place, coverage: CoverageData, seconds: dict[str, float]) -> list[str]:
    """The tests that run a statement, fastest first; those of unknown time come last."""
    path = next((path for path in coverage.measured_files() if path.endswith(f"/{place[0]}")), "")
    by_line = coverage.contexts_by_lineno(path)
    names = {name.rpartition("|")[0] for line in place[2] for name in by_line.get(line, ()) if "|" in name}
    keys = {name: name.replace(".py::", ".").replace("::", ".").replace("/", ".") for name in names}
    return sorted(names, key=lambda name: (seconds.get(keys[name], float("inf")), name))


def passed(folder: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all of the tests pass in a checkout, and what pytest prints."""
    assert tests, "the coverage knows no test of these lines"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *tests]
    fixed = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **fixed}, capture_output=True, text=True)
    return done.returncode == 0, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="whose lines and tests these are")
    parser.add_argument("--survive", type=Path, required=True, metavar="OTHER_CHECKOUT")
    parser.add_argument("--coverage", type=Path, required=True, metavar="FILE", help="with contexts, of CHECKOUT")
    parser.add_argument("--times", type=Path, metavar="FILE", help="pytest's --junitxml, of CHECKOUT")
    for name, value in (("count", 60), ("most", 25), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    chosen = parser.parse_args()
    coverage = CoverageData(str(chosen.coverage))
    coverage.read()
    done = ET.parse(chosen.times).iter("testcase") if chosen.times else ()
    seconds = {f"{test.get('classname')}.{test.get('name')}": float(test.get("time", 0)) for test in done}
    cases = drawn(chosen.checkout, chosen.survive, chosen.count, chosen.seed)
    tests = [tests_of(place, coverage, seconds)[: chosen.most] for _, place in cases]
    fates: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "checkout"
        shutil.copytree(chosen.checkout, folder, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        whole, said = passed(folder, sorted({name for names in tests for name in names}))
        if not whole:
            raise SystemExit(f"without a mutant:\n{said[-4000:]}")
        for ((function, line, kind, new), (file, number, _)), names in zip(cases, tests):
            text = (folder / file).read_text(encoding="utf-8")
            lines = text.splitlines()
            lines[number - 1] = lines[number - 1].replace(line, new)
            (folder / file).write_text("\n".join([*lines, ""]), encoding="utf-8")
            fate = "no test" if not names else "survived" if passed(folder, names)[0] else "killed"
            (folder / file).write_text(text, encoding="utf-8")
            fates[fate] += 1
            print(f"{fate:8}  {len(names):2} tests  {kind:10}  {file} {function}: {line}  ->  {new}", flush=True)
    print(f"{len(cases)} mutants: {', '.join(f'{fates[x]} {x}' for x in ('killed', 'survived', 'no test'))}")


if __name__ == "__main__":
    main()
