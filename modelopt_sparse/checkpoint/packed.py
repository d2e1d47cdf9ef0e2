"""Packed folders: of a weight with many zeros only the values that are not pruned are stored, and a bit for each place.

docs/format.md specifies them. ``packed.model.safetensors`` stands in the place of ``model.safetensors``: it has the
values under the weight's name, in row-major order, and in its metadata the header of the plain file. The bits are those
of a mask in ``sparsity_masks.safetensors`` that has them, else they stand beside the values. Values are taken as
integers here, so that every dtype comes back to the bit.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from modelopt_sparse.checkpoint.folder import (
    INDEX,
    MASKS,
    PACKED,
    Description,
    damaged_files,
    file_hash,
    generation_of,
    is_packed,
    pack_mask,
    read_description,
    read_masks,
    refuse_adapter,
    shape_of,
    size_and_hash,
    weight_files,
)
from modelopt_sparse.model.hf import empty_model, unloaded
from modelopt_sparse.reports.text import Column, first_few, paragraph, rows_of

BITS = ".bits"  # what the name of a weight is followed by where its bits stand beside its values
ENTRY = 128  # bytes that a tensor takes in the header of a file
LEAST = 2**-12  # a weight that is a smaller part of a mask is not looked for in it: no layer has as many experts
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value: safetensors' sizes
PART = 2**20  # places that are packed or unpacked at a time, a multiple of 8
SHOWN = 20  # how many problems an error names

# reading --------------------------------------------------------------------------------------------------------------


class PackedFile:
    """The tensors of a packed file by their names, as they stand in the plain file: one is unpacked when it is read.

    ``masks`` is the file of masks. Raises ValueError that lists all that is wrong, before anything is unpacked;
    SafetensorError or OSError for a file that cannot be read.
    """

    def __init__(self, path: Path, masks: Path) -> None:
        self._file, self._masks = (safe_open(file, framework="pt") for file in (path, masks))
        try:
            self.facts: dict[str, Any] = json.loads(self._file.metadata()["packed"])
            tensors = _tensors_in(self.facts["header"]).items()
            self.header = dict(sorted(tensors, key=lambda named: named[1]["data_offsets"]))
            self.shapes = {name: shape_of(entry["shape"]) for name, entry in self.header.items()}
            self._places: dict[str, tuple[str, int] | None] = self.facts["places"]
            beside = {f"{name}{BITS}" for name, place in self._places.items() if place is None}
            stored = set(self._file.keys())
            problems = [f"{name!r} is missing" for name in sorted(self.shapes.keys() - stored)]
            problems += [f"{name!r} has no place" for name in sorted(stored - self.shapes.keys() - beside)]
            problems += [problem for name in self._places if name in stored and (problem := self._problem(name))]
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            problems = [f"its metadata is not that of a packed file ({str(error)[:100]})"]
        if problems:
            raise ValueError(f"{str(path)!r} cannot be unpacked: {first_few(problems, SHOWN)}: get it again")

    def _problem(self, name: str) -> str:
        """What is wrong with a packed weight, or ""; no more memory is taken than its values and bits have."""
        size, values = math.prod(self.shapes[name]), self._file.get_tensor(name)
        try:
            bits = self._bits(name)
        except (SafetensorError, RuntimeError) as error:
            return f"the bits of {name!r} cannot be read ({error})"
        if not values.ndim == bits.ndim == 1 or bits.dtype != torch.uint8 or len(bits) != -(-size // 8):
            return f"{name!r} does not hold values and bits for {size} places"
        number = int.from_bytes(bits.numpy().data, "little")
        if number.bit_length() > size or number.bit_count() != len(values):
            return f"{name!r} has {len(values)} values for {number.bit_count()} bits in {size} places"
        return ""

    def _bits(self, name: str) -> Tensor:
        """The bits of a packed weight, as `pack_mask` gives them."""
        if (place := self._places[name]) is None:
            return self._file.get_tensor(f"{name}{BITS}")
        mask, begin = place
        return self._masks.get_tensor(mask)[begin : begin - (-math.prod(self.shapes[name]) // 8)]

    def keys(self) -> Iterable[str]:
        return self.shapes.keys()

    def get_tensor(self, name: str) -> Tensor:
        """A tensor as it stands in the plain file."""
        values = self._file.get_tensor(name)
        if name not in self._places:
            return values
        words, done = _words(values), 0
        dense = torch.zeros(math.prod(self.shapes[name]), dtype=WORDS[values.element_size()], device="cpu")
        for part, places in _set_places(self._bits(name), len(dense)):
            dense.numpy()[part][places] = words[done : done + len(places)]
            done += len(places)
        return dense.view(values.dtype).view(self.shapes[name])

    def size(self, name: str) -> int:
        """Bytes that are stored of a tensor, with its bits."""
        return self._file.get_tensor(name).nbytes + (len(self._bits(name)) if name in self._places else 0)


def _tensors_in(header: str) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, shape and offsets, in the header of a safetensors file."""
    return {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}


def plain_tensors(file: Path) -> dict[str, dict[str, Any]]:
    """The same of a weight file; of a packed one, as its plain form has them."""
    header = _header_of(file)
    if file.name.startswith(PACKED):
        header = json.loads(json.loads(header)["__metadata__"]["packed"])["header"]
    return _tensors_in(header)


def _words(tensor: Tensor) -> np.ndarray:
    """The values of a tensor as integers, in row-major order."""
    return tensor.flatten().view(WORDS[tensor.element_size()]).numpy()


def _set_places(bits: Tensor, size: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The places whose bits are set, of ``size`` in all: (a part of all places, indices in it). Indices are several
    times as fast as a mask, and in parts they take little memory."""
    for begin in range(0, size, PART):
        packed = bits.numpy()[begin // 8 : (begin + PART) // 8]
        mask = np.unpackbits(packed, count=min(PART, size - begin), bitorder="little").view(bool)
        yield slice(begin, begin + PART), np.flatnonzero(mask)


def opened_file(path: Path, masks: Path) -> Any:
    """A weight file, packed or plain, with ``keys`` and ``get_tensor``; ``masks``: what a packed one needs."""
    return PackedFile(path, masks) if path.name.startswith(PACKED) else safe_open(path, framework="pt")


def opened_weights(folder: Path) -> dict[str, Any]:
    """Name of a tensor in a folder's weight files -> the `opened_file` that has it.

    Raises ValueError that names the files that are missing, truncated or damaged, or have a tensor that another has.
    """
    where, problems = dict[str, Any](), []
    for name in weight_files(folder):
        try:
            file = opened_file(folder / name, folder / MASKS)
            if twice := where.keys() & set(file.keys()):
                problem = f"{min(twice)!r} is in {name!r} and in another file"
                problems.append(f"{problem}, and which one counts is not known: write the folder anew")
            where.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as error:
            problem = f"{str(folder / name)!r} is missing, truncated or damaged ({error})"
            problems.append(f"{problem}: get it again, or write it with save_pretrained")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return where


def opened_folder(
    folder: Path, *, hashes: bool = True
) -> tuple[Description, dict[str, Tensor], dict[str, Any] | None, list[str]]:
    """(a folder's description, its masks, what `opened_weights` gives of it or None, all that is wrong so far); sizes
    and hashes are not looked at without ``hashes``."""
    description, weights = read_description(folder), None
    damaged = damaged_files(folder, description) if hashes else {}
    problems = list(damaged.values())
    masks = read_masks(folder, description, problems) if MASKS not in damaged else {}
    if damaged.keys() <= {MASKS}:
        try:
            weights = opened_weights(folder)
        except ValueError as error:
            problems.append(str(error))
    return description, masks, weights, problems


@dataclass(frozen=True)
class Unread:
    """A tensor of a packed folder as transformers takes what is still in a file: it is read when it is indexed."""

    file: Any
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.file.get_tensor(self.name)[index]

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self[...], attribute)


def loaded(
    architecture: Any, source: str | Path, weights: Mapping[str, Any] | None = None, /, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """What ``architecture.from_pretrained(source)`` gives, and its loading info, of packed folders too: weights are
    unpacked one by one. ``weights``: what `opened_weights` gives, if it has been called."""
    folder = Path(source)
    refuse_adapter(folder)
    generation = generation_of(folder)
    options = {"ignore_mismatched_sizes": True, **options}  # `unloaded` names them
    named = issubclass(architecture, PreTrainedModel)  # else it is an Auto class, which wants a name
    remote = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    config = AutoConfig.from_pretrained(source, **remote)
    if named and type(config) is not architecture.config_class:
        options = {"config": config, **options}  # EXAONE's: its class, a Llama's, would read and write that of a Llama
    if not is_packed(folder):
        return architecture.from_pretrained(source, output_loading_info=True, **options)
    model_type: Any = architecture if named else type(empty_model(folder, **remote))
    weights = opened_weights(folder) if weights is None else weights
    unread = {name: Unread(file, name) for name, file in weights.items()}
    options = {"config": str(folder), **options, "state_dict": unread}
    model, info = model_type.from_pretrained(None, output_loading_info=True, **options)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    model.name_or_path = model.config.name_or_path = str(folder)
    return model, info


def loaded_whole(architecture: Any, folder: Path, weights: Mapping[str, Any] | None = None, /, **options: Any) -> Any:
    """The model of `loaded`. Raises ValueError if the folder does not hold all of it, or more."""
    model, info = loaded(architecture, folder, weights, **options)
    if problems := unloaded(info):
        raise ValueError(f"{str(folder)!r} does not hold a whole {type(model).__name__}: {first_few(problems)}")
    return model


# writing --------------------------------------------------------------------------------------------------------------


def pack_files(folder: Path, names: Sequence[str], out: Path, masks: Path, known: Any = None) -> list[Path]:
    """Write packed forms of the weight files ``names`` of a folder, and of their index, to ``out`` -> their paths.

    In the same folder the plain files are deleted. ``masks`` is the file of masks. ``known`` holds sizes and hashes of
    the files that need not be computed again. A packed file is in memory until it is written.
    """
    headers = {name: _header_of(folder / name) for name in names}
    places = _places_in(masks, {name: entry for text in headers.values() for name, entry in _tensors_in(text).items()})
    for name in names:
        sha256 = ((known or {}).get(name) or size_and_hash(folder / name))["sha256"]
        facts = {"header": headers[name], "places": {}, "sha256": sha256}
        _pack_file(folder / name, out / f"{PACKED}{name}", masks, places, facts)
        if out == folder:
            (folder / name).unlink()
    if (folder / INDEX).is_file():
        shutil.copyfile(folder / INDEX, out / f"{PACKED}{INDEX}")
        if out == folder:
            (folder / INDEX).unlink()
    return [out / f"{PACKED}{name}" for name in names]


def _header_of(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(int.from_bytes(opened.read(8), "little")).decode()


def _digest(bits: Tensor) -> bytes:
    return blake2b(bits.numpy().data, digest_size=16).digest()


def _places_in(masks: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[bytes, tuple[str, int]]:
    """Digest of the bits of a weight -> (name of a mask that has them, the byte they begin at there).

    For masks of layers that are several tensors in the files: experts that transformers fuses.
    """
    numbers = {math.prod(entry["shape"]) for entry in tensors.values() if len(entry["shape"]) > 1}
    places: dict[bytes, tuple[str, int]] = {}
    with safe_open(masks, framework="pt") as opened:
        for mask in sorted(set(opened.keys()) - tensors.keys()):
            bits = opened.get_tensor(mask)
            for size in {number // 8 for number in numbers if number and number % 8 == 0}:
                if len(bits) % size == 0 and size >= LEAST * len(bits):
                    places |= {_digest(bits[at : at + size]): (mask, at) for at in range(0, len(bits), size)}
    return places


def _pack_file(
    file: Path, path: Path, masks: Path, places: Mapping[bytes, tuple[str, int]], facts: dict[str, Any]
) -> None:
    """Write the packed form of a weight file; ``facts``: what stands in its metadata, but for the places of bits."""
    with safe_open(file, framework="pt") as weights, safe_open(masks, framework="pt") as opened:
        names, masked = set(weights.keys()), set(opened.keys())

        def stored(name: str) -> dict[str, Tensor]:
            tensor = weights.get_tensor(name)
            if f"{name}{BITS}" in names or list(tensor.shape) != weights.get_slice(name).get_shape():
                return {name: tensor}
            words = _words(tensor)
            bits = pack_mask(torch.from_numpy(words != 0))
            mask = opened.get_tensor(name) if name in masked else bits[:0]
            if mask.shape == bits.shape and not (bits & ~mask).any():  # a value that is not pruned may be zero
                place, bits = (name, 0), mask
            else:
                place = places.get(_digest(bits))
            size = int.from_bytes(bits.numpy().data, "little").bit_count() * words.itemsize
            if size + (len(bits) + ENTRY if place is None else 0) >= tensor.nbytes:
                return {name: tensor}
            parts = [words[part][places] for part, places in _set_places(bits, len(words))]
            values = torch.from_numpy(np.concatenate(parts)).view(tensor.dtype)
            facts["places"][name] = place
            return {name: values, f"{name}{BITS}": bits} if place is None else {name: values}

        with ThreadPoolExecutor() as pool:
            tensors = {name: x for parts in pool.map(stored, sorted(names)) for name, x in parts.items()}
        # one entry: safetensors writes several in any order
        save_file(tensors, path, metadata={"packed": json.dumps(facts, sort_keys=True)})


def unpack_files(folder: Path, out: Path) -> None:
    """Write the plain weight files of a packed folder, and their index.

    Raises ValueError for a file that is not the one that was packed, by its SHA-256.
    """
    for name in weight_files(folder):
        packed, path = PackedFile(folder / name, folder / MASKS), out / name.removeprefix(PACKED)
        text = packed.facts["header"].encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in packed.header:
                file.write(_words(packed.get_tensor(tensor)).data)
        if file_hash(path) != packed.facts["sha256"]:
            raise ValueError(f"{path.name!r} is not the file that was packed (its hash differs): pack the folder anew")
    if (folder / f"{PACKED}{INDEX}").is_file():
        shutil.copyfile(folder / f"{PACKED}{INDEX}", out / INDEX)


def saving(folder: Path, *, all_rows: bool = False) -> str:
    """What packing saves in a packed folder, as text: in all, and for each kind of weight; ``all_rows``: for each."""
    plain = packed = (folder / MASKS).stat().st_size
    rows: dict[str, tuple[str, str, str]] = {}
    for path in (folder / name for name in weight_files(folder)):
        file = PackedFile(path, folder / MASKS)
        plain, packed = plain + 8 + len(file.facts["header"].encode()), packed + path.stat().st_size
        for name, entry in file.header.items():
            before, after = entry["data_offsets"][1] - entry["data_offsets"][0], file.size(name)
            plain += before
            rows[name] = f"{before:,}", f"{after:,}", f"{after / max(before, 1):.1%}"
    columns = [Column(head, cells, "range") for head, cells in zip(("bytes", "packed", "share"), zip(*rows.values()))]
    head = f"Weights and masks: {plain:,} bytes, packed {packed:,} ({packed / plain:.1%})."
    return f"{paragraph(head, all_rows=all_rows)}\n\n{rows_of('weight', list(rows), columns, all_rows=all_rows)}"
