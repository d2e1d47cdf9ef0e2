"""Weight files of a folder that are written one after the other: the index of them, and several files made one.

The layout is that of https://github.com/huggingface/safetensors#format: eight bytes that give the length of a JSON
header, the header, padded with spaces, and the tensors' bytes, whose offsets the header gives.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelopt_sparse.checkpoint.format import INDEX

CHUNK = 2**20


def write_index(folder: Path, parameters: int) -> None:
    """Write the index of a folder's weight files, as transformers does."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("model-*.safetensors")):
        header, _ = _header(path)
        size += sum(end - begin for begin, end in (of["data_offsets"] for of in header.values()))
        weight_map.update(dict.fromkeys(header, path.name))
    index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def concatenate(files: Sequence[Path], target: Path) -> None:
    """Write the tensors of several files, all of one dtype, into one, as safetensors would, holding none of them."""
    where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        header, data = _header(path)
        where.update({name: (path, data, of) for name, of in header.items()})
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(where):
        of = where[name][2]
        begin, end = end, end + of["data_offsets"][1] - of["data_offsets"][0]
        header[name] = {"dtype": of["dtype"], "shape": of["shape"], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            path, data, of = where[name]
            begin, end = of["data_offsets"]
            with path.open("rb") as file:
                file.seek(data + begin)
                for left in range(end - begin, 0, -CHUNK):
                    out.write(file.read(min(left, CHUNK)))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file holds, by name, and where its data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length
