"""What a folder of a sparse model holds, and whether it is intact. The format is specified in docs/format.md.

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
ENTRIES = ("config.json", DESCRIPTION)  # without these nothing takes a folder for a model
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt")

Read = Callable[[str], Tensor | None]


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
    """What ``sparsity.json`` says."""

    model_class: str
    masks: Mapping[str, tuple[tuple[int, ...], int]]  # parameter name -> shape, number kept
    aliases: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]  # file name -> size, sha256
    report: Report | None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Description":
        """Raises KeyError, TypeError, AttributeError or ValueError if it is not as docs/format.md says."""
        return cls(
            model_class=str(given["model_class"]),
            masks={name: (tuple(map(int, of["shape"])), int(of["kept"])) for name, of in given["masks"].items()},
            aliases={name: str(other) for name, other in given["aliases"].items()},
            files={name: (int(of["size"]), str(of["sha256"])) for name, of in given["files"].items()},
            report=None if given["report"] is None else Report.from_dict(given["report"]),
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
        given = json.loads(path.read_text(encoding="utf-8"))
        version = given["format_version"] if given["format"] == "modelopt_sparse" else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is truncated, edited or of another format: {error!r}") from None
    if not isinstance(version, int):
        raise ValueError(f"{str(path)!r} is not in the format of modelopt_sparse.save")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {version}, this library reads up to {FORMAT_VERSION}: "
            "update modelopt_sparse"
        )
    if given.pop("checksum", None) != checksum(given):
        raise ValueError(
            f"{str(path)!r} has been edited since it was saved (its checksum differs): save the model anew"
        )
    try:
        return Description.parse(given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} does not hold what its format asks for: {error!r}") from None


def checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 of the description, without the checksum itself, as JSON with sorted keys and no spaces."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checked_path(folder: str | Path) -> Path:
    path = Path(folder)
    if path.suffix in PICKLES and not path.is_dir():
        raise ValueError(
            f"{str(path)!r} looks like a pickle file, which this library neither writes nor reads: give a folder, "
            f"for example {str(path.with_suffix(''))!r}"
        )
    return path


# the files ----------------------------------------------------------------------------------------------------------


def damaged_files(folder: Path, description: Description) -> dict[str, str]:
    """What is wrong with the files of a folder, by file name."""
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
    """The masks of a folder that are as its description says; what is wrong with the others goes to ``problems``."""
    masks: dict[str, Tensor] = {}
    try:
        packed = load_file(folder / MASKS)
    except (SafetensorError, OSError) as error:
        problems.append(f"file {MASKS!r} cannot be read: {error}")
        return masks
    for name in sorted(packed.keys() ^ description.masks.keys()):
        here, there = (MASKS, DESCRIPTION) if name in packed else (DESCRIPTION, MASKS)
        problems.append(f"mask {name!r} is in {here} and not in {there}")
    for name, (shape, kept) in description.masks.items():
        if name not in packed:
            continue
        if packed[name].dtype != torch.uint8 or packed[name].shape != (-(-torch.Size(shape).numel() // 8),):
            problems.append(f"mask {name!r} does not hold the bits of shape {list(shape)}")
            continue
        masks[name] = unpack_mask(packed[name], shape)
        if int(masks[name].sum()) != kept:
            problems.append(f"mask {name!r} keeps {int(masks[name].sum())} weights, not {kept}")
    return masks


def weight_files(folder: Path) -> list[str]:
    """Names of the files that ``from_pretrained`` reads weights from."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(folder / INDEX)!r} cannot be read: {error!r}") from None


def weight_reader(folder: Path, files: Iterable[str]) -> tuple[set[str], Read]:
    """Names of the tensors in a folder's weight files, and a function that reads one, or gives None."""
    opened = [safe_open(folder / name, framework="pt") for name in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
    return set(where), lambda name: where[name].get_tensor(name) if name in where else None


def move_in(finished: Path, folder: Path, names: Iterable[str]) -> None:
    """Move the ``names`` of a finished folder into one that exists, and remove the weights of what was there before.

    The folder's ``config.json`` and ``sparsity.json`` leave first and come last, so that what is half old and half new
    is no model to anybody. May be called again after it was broken off.
    """
    names = [*names]
    for name in reversed(ENTRIES):
        if (finished / name).is_file():
            (folder / name).unlink(missing_ok=True)
    for name in names:
        if name not in ENTRIES and (finished / name).is_file():
            (finished / name).replace(folder / name)
    for path in folder.glob("model*.safetensors*"):  # of what was there before
        if path.name not in names:
            path.unlink()
    for name in ENTRIES:
        if (finished / name).is_file():
            (finished / name).replace(folder / name)
