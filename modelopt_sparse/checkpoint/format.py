"""The files in a folder of a sparse model: reading and checking them. The format is specified in docs/format.md.

An ordinary Hugging Face folder (or one model.safetensors) whose weights hold exact zeros, plus ``sparsity.json`` and
``sparsity_masks.safetensors``. No pickle.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from modelopt_sparse.checkpoint.files import file_hash
from modelopt_sparse.reports.report import Report

FORMAT_VERSION = 1
DESCRIPTION = "sparsity.json"
MASKS = "sparsity_masks.safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files
ENTRIES = ("config.json", DESCRIPTION)  # a folder without these is not read as a model
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt")

Read = Callable[[str], Tensor | None]  # name of a tensor -> the tensor, None if there is none


# packing ------------------------------------------------------------------------------------------------------------


def pack_mask(mask: Tensor) -> Tensor:
    """Bool mask of any shape -> uint8 ``[ceil(numel / 8)]``; bit i of byte k is entry 8 k + i in row-major order."""
    bits = mask.flatten().cpu().to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_mask`."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[: torch.Size(shape).numel()].view(shape).bool()


# the description ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """The contents of ``sparsity.json``.

    model_class: name of the model's class.
    masks: parameter name -> shape of its mask, and how many weights are kept.
    aliases: further name of a tensor -> the name under which the weight files hold it.
    files: name of a file -> its size in bytes, and its SHA-256.
    report: of the run that made the model sparse, if there is one.
    """

    model_class: str
    masks: Mapping[str, tuple[tuple[int, ...], int]]
    aliases: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    report: Report | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Description":
        """The description in JSON data.

        Raises KeyError, TypeError, AttributeError or ValueError if the data is not as docs/format.md says.
        """
        return cls(
            model_class=str(data["model_class"]),
            masks={name: (tuple(map(int, mask["shape"])), int(mask["kept"])) for name, mask in data["masks"].items()},
            aliases={name: str(other) for name, other in data["aliases"].items()},
            files={name: (int(file["size"]), str(file["sha256"])) for name, file in data["files"].items()},
            report=None if data["report"] is None else Report.from_dict(data["report"]),
        )


def read_description(folder: str | Path) -> Description:
    """The checked ``sparsity.json`` of a folder. Raises ValueError if there is none that this version can read."""
    folder = checked_path(folder)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder: give one that modelopt_sparse.save wrote")
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} holds no {DESCRIPTION}: it is not a folder that modelopt_sparse.save wrote to its end"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"] if data["format"] == "modelopt_sparse" else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is truncated, edited or of another format: {error!r}") from None
    if not isinstance(version, int):
        raise ValueError(f"{str(path)!r} is not in the format of modelopt_sparse.save")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {version}, this library reads up to {FORMAT_VERSION}: "
            "update modelopt_sparse"
        )
    if data.pop("checksum", None) != checksum(data):
        raise ValueError(
            f"{str(path)!r} has been edited since it was saved (its checksum differs): save the model anew"
        )
    try:
        return Description.parse(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} does not hold what its format asks for: {error!r}") from None


def checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 of the description, without the checksum itself, as JSON with sorted keys and no spaces."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checked_path(folder: str | Path) -> Path:
    """The path of a folder to read or write. Raises ValueError for the name of a pickle file."""
    path = Path(folder)
    if path.suffix in PICKLES and not path.is_dir():
        raise ValueError(
            f"{str(path)!r} looks like a pickle file, which this library neither writes nor reads: give a folder, "
            f"for example {str(path.with_suffix(''))!r}"
        )
    return path


# the files ----------------------------------------------------------------------------------------------------------


def damaged_files(folder: Path, description: Description) -> dict[str, str]:
    """File name -> what is wrong with the file, for all damaged files of a folder."""
    damaged = {name: f"{DESCRIPTION} does not list {name!r}" for name in {MASKS} - description.files.keys()}
    for name, (size, sha256) in description.files.items():
        path = folder / name
        if Path(name).name != name:
            damaged[name] = f"file name {name!r} leads out of the folder"
        elif not path.is_file():
            damaged[name] = f"file {name!r} is missing"
        elif path.stat().st_size != size:
            damaged[name] = f"file {name!r} has {path.stat().st_size} bytes, not {size}"
        elif file_hash(path) != sha256:
            damaged[name] = f"file {name!r} has changed since it was saved (its hash differs)"
    if not damaged:
        for name in set(weight_files(folder)) - description.files.keys():
            damaged[name] = f"weight file {name!r} does not belong to the folder: {DESCRIPTION} does not list it"
    return damaged


def read_masks(folder: Path, description: Description, problems: list[str]) -> dict[str, Tensor]:
    """Parameter name -> mask, for the masks of a folder that agree with its description.

    What is wrong with the others is appended to ``problems``.
    """
    masks: dict[str, Tensor] = {}
    try:
        packed = load_file(folder / MASKS)
    except (SafetensorError, OSError) as error:
        problems.append(f"file {MASKS!r} cannot be read: {error}")
        return masks
    for name in sorted(packed.keys() ^ description.masks.keys()):
        holder, lacker = (MASKS, DESCRIPTION) if name in packed else (DESCRIPTION, MASKS)
        problems.append(f"mask {name!r} is in {holder} and not in {lacker}")
    for name, (shape, count) in description.masks.items():
        if name not in packed:
            continue
        if packed[name].dtype != torch.uint8 or packed[name].shape != (-(-torch.Size(shape).numel() // 8),):
            problems.append(f"mask {name!r} does not hold the bits of shape {list(shape)}")
            continue
        masks[name] = unpack_mask(packed[name], shape)
        if int(masks[name].sum()) != count:
            problems.append(f"mask {name!r} keeps {int(masks[name].sum())} weights, not {count}")
    return masks


def read_mask(folder: Path, description: Description, name: str) -> Tensor:
    """One mask of a folder. Raises ValueError if it cannot be read."""
    shape, _ = description.masks[name]
    try:
        with safe_open(folder / MASKS, framework="pt") as packed:
            return unpack_mask(packed.get_tensor(name), shape)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"mask {name!r} cannot be read from {str(folder / MASKS)!r}: {error}") from None


def weight_files(folder: Path) -> list[str]:
    """Names of the files that ``from_pretrained`` reads weights from."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(folder / INDEX)!r} cannot be read: {error!r}") from None


def weight_reader(folder: Path, files: Iterable[str]) -> tuple[set[str], Read]:
    """(names of the tensors in a folder's weight files, a function that reads one of them by name)."""
    opened = [safe_open(folder / name, framework="pt") for name in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
    return set(where), lambda name: where[name].get_tensor(name) if name in where else None


def move_in(finished: Path, folder: Path, names: Iterable[str]) -> None:
    """Move the files ``names`` of a finished folder into one that exists, and remove that one's old weight files.

    The old ``config.json`` and ``sparsity.json`` are deleted first, and the new ones moved last. So a folder that is
    half old and half new is not read as a model. It may be called again after it was interrupted.
    """
    names = [*names]
    for name in reversed(ENTRIES):
        if (finished / name).is_file():
            (folder / name).unlink(missing_ok=True)
    for name in names:
        if name not in ENTRIES and (finished / name).is_file():
            (finished / name).replace(folder / name)
    for path in folder.glob("model*.safetensors*"):  # the old weight files
        if path.name not in names:
            path.unlink()
    for name in ENTRIES:
        if (finished / name).is_file():
            (finished / name).replace(folder / name)
