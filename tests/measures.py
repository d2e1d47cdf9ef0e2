"""How large the package is, and which of its files run between the first block and SparseGPT's mask.

    python tests/measures.py [--package FOLDER]

Lines of code are those that hold more than a comment or a docstring. Nodes are those of the syntax tree, without
docstrings: they stay the same when lines are packed. A file counts beside the `__init__.py` that hold no code.

The way to the mask: a Llama of two blocks is made sparse by "sparsegpt", 2:4. It begins when the first block is called
for the first time, and ends when `NM.mask` has returned for the first time. Files on it are those of which a function
is called in between, or goes on. Those marked by * have a function that waits for this mask, from `sparsify` down. The
package must be the one that Python imports.
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


def code_lines(text: str) -> int:
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    lines = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    for docstring in docstrings(ast.parse(text)):
        lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def nodes(text: str) -> int:
    """Nodes of the syntax tree; a docstring is two of them."""
    tree = ast.parse(text)
    return sum(1 for _ in ast.walk(tree)) - 2 * len(list(docstrings(tree)))


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def way_to_the_mask(package: Path) -> tuple[list[str], set[str]]:
    """Files that run on it, in the order of their first function, and those that wait for the mask."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import modelopt_sparse as mts

    if not Path(mts.__file__).resolve().is_relative_to(package):
        raise SystemExit(f"{mts.__file__} is imported, which is not in {package}: set PYTHONPATH")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=2)).eval()
    ran: dict[str, None] = {}
    waiting: set[str] = set()

    def file_of(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        known = frame.f_code.co_flags & FUNCTION and path.is_relative_to(package)
        return path.relative_to(package).as_posix() if known else None

    def files_of(called: FrameType | None) -> Iterator[str]:
        return (name for frame in frames(called) if (name := file_of(frame)) is not None)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := file_of(frame)) is not None:
            ran.setdefault(name)
        elif event == "return" and frame.f_code is mts.NM.mask.__code__:
            sys.setprofile(None)
            waiting.update(files_of(frame))
            ran.update(dict.fromkeys(waiting))

    def begin(*_: Any) -> None:
        hook.remove()
        ran.update(dict.fromkeys(reversed(list(files_of(sys._getframe())))))
        sys.setprofile(look)

    hook = model.model.layers[0].register_forward_pre_hook(begin)
    mts.sparsify(model, "sparsegpt", pattern="2:4", data_loader=[torch.arange(64).view(2, 32)], progress=False)
    sys.setprofile(None)
    return list(ran), waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "modelopt_sparse"
    parser.add_argument("--package", type=Path, default=default, help="default: the one beside this file's folder")
    package = parser.parse_args().package.resolve()
    texts = {file.relative_to(package).as_posix(): file.read_text("utf-8") for file in sorted(package.rglob("*.py"))}
    lines = {name: code_lines(text) for name, text in texts.items()}
    folders: Counter[str] = Counter()
    for name, count in lines.items():
        folders[name.rpartition("/")[0] or "."] += count
    for folder, count in folders.items():
        print(f"{count:6,}  {folder}")
    files = sum(not (name.endswith("__init__.py") and count == 0) for name, count in lines.items())
    print(f"{sum(lines.values()):6,}  lines of code, {sum(map(nodes, texts.values())):,} nodes, {files} files\n")
    ran, waiting = way_to_the_mask(package)
    for name in ran:
        print(f"{lines[name]:6,}  {name}{' *' * (name in waiting)}")
    print(f"{sum(lines[x] for x in ran):6,}  lines of code in {len(ran)} files between the first block and its mask")
    print(f"{sum(lines[x] for x in waiting):6,}  in {len(waiting)} files that wait for it")


if __name__ == "__main__":
    main()
