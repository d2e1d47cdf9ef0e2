"""safetensors files: the index of a folder's weight files, and the concatenation of several files to one.

The layout is that of https://github.com/huggingface/safetensors#format: eight bytes with the length of a JSON header;
the header, padded with spaces; and the tensors' bytes, whose offsets are in the header.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelopt_sparse.checkpoint.format import INDEX

CHUNK = 2**20  # bytes that are copied at a time


def write_index(folder: Path, parameters: int) -> None:
    """Write the index of a folder's weight files, as transformers does. ``parameters``: how many numbers they are."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("model-*.safetensors")):
        header, _ = _header(path)
        size += sum(end - begin for begin, end in (entry["data_offsets"] for entry in header.values()))
        weight_map.update(dict.fromkeys(header, path.name))
    index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def concatenate(files: Sequence[Path], out_path: Path) -> None:
    """Write the tensors of several files, all of one dtype, into one file, byte for byte as safetensors would.

    No tensor is held in memory.
    """
    where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        header, data = _header(path)
        where.update({name: (path, data, entry) for name, entry in header.items()})
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(where):
        entry = where[name][2]
        begin, end = end, end + entry["data_offsets"][1] - entry["data_offsets"][0]
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with out_path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            path, data, entry = where[name]
            begin, end = entry["data_offsets"]
            with path.open("rb") as file:
                file.seek(data + begin)
                for left in range(end - begin, 0, -CHUNK):
                    out.write(file.read(min(left, CHUNK)))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """(a file's header: tensor name -> dtype, shape and offsets; the place in the file where the data begins)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length
