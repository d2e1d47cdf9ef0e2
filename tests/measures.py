"""How large the package is, and which of its files run between the first block and SparseGPT's mask.

    python tests/measures.py [--package FOLDER]

Lines of code are those that hold more than a comment or a docstring. Nodes are those of the syntax tree, without
docstrings: they stay the same when lines are packed. A file counts beside the `__init__.py` that hold no code.

The way to the mask: a Llama of two blocks is made sparse by "sparsegpt", 2:4. It begins when the first block is called
for the first time, and ends when `NM.mask` has returned for the first time. Functions on it are those that are called
in between, or go on; its lines are those of these functions, and its files those that they stand in. Files marked by *
have a function that waits for this mask, from `sparsify` down. The package must be the one that Python imports.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = 1  # flag of code that is neither a module's nor a class's


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def lines_of_code(text: str) -> set[int]:
    """The numbers of the lines that hold more than a comment or a docstring."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    lines = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    for docstring in docstrings(ast.parse(text)):
        lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def lines_of_functions(text: str, begins: set[int]) -> int:
    """How many lines of code the functions have that begin, with their decorators, in one of these lines."""
    spans = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            spans |= set(range(first, (node.end_lineno or first) + 1)) if first in begins else set()
    return len(spans & lines_of_code(text))


def nodes(text: str) -> int:
    """Nodes of the syntax tree; a docstring is two of them."""
    tree = ast.parse(text)
    return sum(1 for _ in ast.walk(tree)) - 2 * len(list(docstrings(tree)))


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def way_to_the_mask(package: Path) -> tuple[dict[str, int], set[str]]:
    """Files on it, in the order of their first function, with the lines of their functions on it; and the files that
    wait for the mask."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import modelopt_sparse as mts

    if not Path(mts.__file__).resolve().is_relative_to(package):
        raise SystemExit(f"{mts.__file__} is imported, which is not in {package}: set PYTHONPATH")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=2)).eval()
    ran: dict[str, set[int]] = {}
    waiting: set[str] = set()

    def file_of(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        known = frame.f_code.co_flags & FUNCTION and path.is_relative_to(package)
        return path.relative_to(package).as_posix() if known else None

    def note(frame: FrameType) -> None:
        if (name := file_of(frame)) is not None:
            ran.setdefault(name, set()).add(frame.f_code.co_firstlineno)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            note(frame)
        elif event == "return" and frame.f_code is mts.NM.mask.__code__:
            sys.setprofile(None)
            for waits in frames(frame):
                note(waits)
                waiting.update(filter(None, [file_of(waits)]))

    def begin(*_: Any) -> None:
        hook.remove()
        for called in frames(sys._getframe()):
            note(called)
        sys.setprofile(look)

    hook = model.model.layers[0].register_forward_pre_hook(begin)
    mts.sparsify(model, "sparsegpt", pattern="2:4", data_loader=[torch.arange(64).view(2, 32)], progress=False)
    sys.setprofile(None)
    texts = {name: (package / name).read_text("utf-8") for name in ran}
    return {name: lines_of_functions(texts[name], begins) for name, begins in ran.items()}, waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "modelopt_sparse"
    parser.add_argument("--package", type=Path, default=default, help="default: the one beside this file's folder")
    package = parser.parse_args().package.resolve()
    texts = {file.relative_to(package).as_posix(): file.read_text("utf-8") for file in sorted(package.rglob("*.py"))}
    lines = {name: len(lines_of_code(text)) for name, text in texts.items()}
    folders: Counter[str] = Counter()
    for name, count in lines.items():
        folders[name.rpartition("/")[0] or "."] += count
    for folder, count in folders.items():
        print(f"{count:6,}  {folder}")
    files = sum(not (name.endswith("__init__.py") and count == 0) for name, count in lines.items())
    print(f"{sum(lines.values()):6,}  lines of code, {sum(map(nodes, texts.values())):,} nodes, {files} files\n")
    ran, waiting = way_to_the_mask(package)
    for name, entered in ran.items():
        print(f"{entered:6,} of {lines[name]:3,}  {name}{' *' * (name in waiting)}")
    print(f"{sum(ran.values()):6,} of {sum(lines[x] for x in ran):,}  in {len(ran)} files to the first block's mask")
    print(f"{sum(lines[x] for x in waiting):6,}  in {len(waiting)} files that wait for it")


if __name__ == "__main__":
    main()
