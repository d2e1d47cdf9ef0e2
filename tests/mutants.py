"""Changes single lines of the package for the worse, and says which changes the tests notice.

    python tests/mutants.py CHECKOUT --survive OTHER_CHECKOUT

A mutant is its function's name, its line, and what becomes of it: a sign, a comparison, a number one larger, another
dimension, a call left out, two arguments swapped; the kinds take turns. Drawn are lines that stand in both checkouts,
once in functions of that name, in whatever file. So a seed gives the same mutants, whichever of the two is CHECKOUT.
Each is put into a copy of CHECKOUT. The tests of the file's folder run on it, those of the file itself first; if all
pass, the tests elsewhere that name the file, or call what it defines. Slow tests are left out. A test that does not end
in two minutes has noticed the mutant. In the end, the tests that noticed something must pass without a mutant.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

OPERATORS = {ast.Add: "sign + -", ast.Sub: "sign - +", ast.Lt: "compare < <=", ast.LtE: "compare <= <"}
OPERATORS |= {ast.Gt: "compare > >=", ast.GtE: "compare >= >", ast.Eq: "compare == !=", ast.NotEq: "compare != =="}
BY_PLACE = {"sum", "mean", "amax", "argsort", "cumsum", "unsqueeze", "squeeze", "flatten", "movedim", "transpose"}
OTHER_DIMENSION = {"-1": "-2", "-2": "-1", "0": "-1", "1": "0", "2": "1"}
IN_ANY_ORDER = {"isinstance", "max", "min"}  # calls that swapped arguments leave as they are, or break for certain
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Name = tuple[str, str, str, str]  # function, line, kind, what becomes of the line


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


def nodes_of(tree: ast.AST, function: str = "") -> Iterator[tuple[Any, str]]:
    """Nodes that lie in one line of a function, with its name."""
    for node in getattr(tree, "body", ()) if isinstance(tree, FUNCTIONS) else ast.iter_child_nodes(tree):
        inner = getattr(node, "name", "") if isinstance(node, FUNCTIONS) else function
        if function and getattr(node, "lineno", None) == getattr(node, "end_lineno", 0):
            yield node, function
        if not isinstance(node, ast.JoinedStr):  # before Python 3.12 nothing in it says where it stands
            yield from nodes_of(node, inner)


def mutants(checkout: Path) -> dict[Name, list[tuple[str, int]]]:
    found: dict[Name, list[tuple[str, int]]] = defaultdict(list)
    for file in sorted((checkout / "modelopt_sparse").rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for node, function in nodes_of(ast.parse("\n".join(lines))):
            line = lines[node.lineno - 1]
            for kind, begin, end, new in changes(node, line) if line.isascii() else ():
                name = (function, line.strip(), kind, f"{line[:begin]}{new}{line[end:]}".strip())
                if name[1] != name[3]:
                    found[name].append((file.relative_to(checkout).as_posix(), node.lineno))
    return found


def drawn(checkout: Path, other: Path, count: int, seed: int) -> list[tuple[Name, tuple[str, int]]]:
    here, there = mutants(checkout), mutants(other)
    both = sorted(name for name in here if len(here[name]) == len(there.get(name, ())) == 1)
    random.Random(seed).shuffle(both)
    kinds = [[name for name in both if name[2] == kind] for kind in sorted({name[2] for name in both})]
    return [(name, here[name][0]) for turn in zip_longest(*kinds) for name in turn if name][:count]


def tests_of(checkout: Path, file: str) -> tuple[list[Path], list[Path]]:
    """Files of tests, nearest first: those of the file's folder, and those elsewhere that name the file or call it."""
    *folders, name = Path(file).with_suffix("").parts[1:]
    while folders and not checkout.joinpath("tests", *folders).is_dir():
        folders.pop()
    defined = re.findall(r"^(?:def|class) (\w+)", (checkout / file).read_text(encoding="utf-8"), re.MULTILINE)
    named = re.compile(rf"\b({'|'.join(defined)})\(|\bimport .*\b{name}\b|\.{name} import\b")
    tests = {path: named.findall(path.read_text(encoding="utf-8")) for path in checkout.glob("tests/**/test_*.py")}
    order = sorted(tests, key=lambda path: (not path.name.startswith(f"test_{name}"), -len(tests[path]), path))
    near = [path for path in order if folders and checkout.joinpath("tests", *folders) in path.parents]
    return near, [path for path in order if tests[path] and path not in near]


def noticed(checkout: Path, tests: Sequence[object], seconds: int) -> str:
    """The first test that fails, "" if all pass of those that begin within so many seconds."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--timeout=120"]
    command = [sys.executable, "-m", "pytest", *options, f"--session-timeout={seconds}", *map(str, tests)]
    fixed = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **fixed}, capture_output=True, text=True)
    if failed := re.search(r"^(FAILED|ERROR) (.+?)( - .*)?$", done.stdout, re.MULTILINE):
        return failed[2] + " - does not end" * ("from pytest-timeout" in done.stdout)
    if "session-timeout: " in done.stdout:
        print("not all tests ran", end="  ")
    elif done.returncode not in (0, 5):
        return f"{tests[0]} - pytest ends with {done.returncode}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="whose lines and tests these are")
    parser.add_argument("--survive", type=Path, required=True, metavar="OTHER_CHECKOUT")
    for name, value in (("count", 60), ("seed", 0), ("seconds", 300)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    chosen = parser.parse_args()
    cases = drawn(chosen.checkout, chosen.survive, chosen.count, chosen.seed)
    found: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "checkout"
        shutil.copytree(chosen.checkout, folder, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        for (function, line, kind, new), (file, number) in cases:
            text = (folder / file).read_text(encoding="utf-8")
            lines = text.splitlines()
            lines[number - 1] = lines[number - 1].replace(line, new)
            (folder / file).write_text("\n".join([*lines, ""]), encoding="utf-8")
            runs = (noticed(folder, tests, chosen.seconds) for tests in tests_of(folder, file) if tests)
            found.append(next(filter(None, runs), ""))
            (folder / file).write_text(text, encoding="utf-8")
            print(f"{found[-1] or 'SURVIVED'}  {kind}  {file} {function}: {line}  ->  {new}", flush=True)
        tests = sorted({how.split(" - ")[0] for how in found if how})
        if tests and (wrong := noticed(folder, tests, 60 * len(tests))):
            raise SystemExit(f"without a mutant: {wrong}")
    print(f"{len(cases)} mutants, {found.count('')} survived")


if __name__ == "__main__":
    main()
