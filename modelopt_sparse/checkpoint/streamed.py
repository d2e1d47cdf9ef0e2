"""The blocks of a model that is streamed: where their weights lie, one of them at a time in memory, and its shard.

The files of the source are watched from the start of a run to its end.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from modelopt_sparse.checkpoint.dequantize import Quantized, dtype_of, kept_wide, load_dequantized
from modelopt_sparse.checkpoint.folder import (
    INDEX,
    MASKS,
    PACKED,
    WEIGHTS,
    file_hash,
    hub_folder,
    is_packed,
    weight_files,
    write_masks,
)
from modelopt_sparse.checkpoint.packed import loaded_whole, opened_file, opened_weights, pack_files, plain_tensors
from modelopt_sparse.checkpoint.workfolder import BUDGET, BlockRecord, WorkFolder
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import give_back_freed_memory, remove_hooks
from modelopt_sparse.model.hf import empty_model, model_class
from modelopt_sparse.model.masking import named_masks, remove_masks
from modelopt_sparse.plan.memory import parameters_by_block
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.values import BlockReport, LayerReport
from modelopt_sparse.run import Storage, Unreadable
from modelopt_sparse.shrinking.resize import tensors_of

ONE_FILE = 2**60  # a shard size that no block reaches

# the source -----------------------------------------------------------------------------------------------------------


def local_folder(source: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint; for a hub name that of `hub_folder`.

    Raises ValueError if ``source`` is neither a folder of a model nor a checkpoint on the hub.
    """
    if not Path(source).is_dir():
        return hub_folder(str(source), revision)
    if not (Path(source) / "config.json").is_file():
        raise ValueError(f"{str(source)!r} holds no config.json: it is not a folder of a transformers model")
    return Path(source)


COPY_AGAIN = "copy the source again, or put it where all processes see it"


class SourceFiles:
    """The weight files of a folder, its ``config.json``, and code of the model's own.

    A file is hashed when a block is first read from it: what is read for the hash, in order and fast, is in the
    system's cache when the block is read. Raises ValueError for a file that is missing, that is not as long as its own
    header says, or that is another one for another process. Wrong numbers in a file cannot be noticed, as safetensors
    stores no checksums.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._processes = processes
        self._hashes: dict[str, str] = {}  # of the files that have been read from
        opened_weights(folder)
        code = sorted(path.name for path in folder.glob("*.py"))
        names = ["config.json", *code, *weight_files(folder), *([MASKS] if is_packed(folder) else [])]
        self._names = {(folder / name).resolve(): name for name in names}
        self._as_seen = {path: _look(path) for path in self._names}
        sizes = {f"the size of {name!r}": (folder / name).stat().st_size for name in names}
        processes.check_same(sizes, COPY_AGAIN)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """File name -> SHA-256, of all files. All processes ask for it at the same time."""
        for path in self._names:
            self.begin(path)
        facts = {f"the SHA-256 of {name!r}": sha256 for name, sha256 in self._hashes.items()}
        self._processes.check_same(facts, COPY_AGAIN)
        return self._hashes

    def begin(self, path: Path) -> None:
        """`check` a file that is to be read from, and hash it the first time. Nothing happens for other files."""
        name = self._names.get(path.resolve())
        if name is not None:
            self.check(path)
            if name not in self._hashes:
                self._hashes[name] = file_hash(path)

    def check(self, path: Path) -> None:
        """Raise Unreadable (a ValueError) if a file of the source is gone, or has changed since the run started.

        A change is told by its size, its time and its place on the disk.
        """
        if not path.exists() or _look(path) != self._as_seen[path.resolve()]:
            raise Unreadable(f"{str(path)!r} has changed since the run started: put it back, and start again")

    def check_all(self) -> None:
        """`check` all files of the source."""
        for path in self._as_seen:
            self.check(path)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If reading fails inside and a file of the source has changed, raise Unreadable in the place of the error."""
        try:
            yield
        except (OSError, SafetensorError):
            self.check_all()
            raise


def _look(path: Path) -> tuple[int, ...]:
    """What tells whether a file has changed: device, inode, size and time."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# a model without its blocks -------------------------------------------------------------------------------------------


def without_blocks(
    folder: Path,
    names: list[str],
    dtype: Any,
    quantized: Quantized | None,
    work: WorkFolder,
    remote: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, tuple[Path, str]]]:
    """The model, with placeholders in the place of the parameters of its blocks ``names``; and (file, name in it) of
    each of those parameters."""
    config = AutoConfig.from_pretrained(folder, **remote)
    architecture = model_class(config, folder)
    devices = _devices(empty_model(folder, **remote), names)
    options = {"device_map": devices, "offload_folder": str(work.converted()), **remote}
    with quiet():
        if quantized is None:
            model = loaded_whole(architecture, folder, dtype=dtype, **options)
        else:
            model = load_dequantized(architecture, folder, config, quantized, **options)
    places = {name: (Path(at["safetensors_file"]), at["weight_name"]) for name, at in remove_hooks(model).items()}
    wide = kept_wide(model)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and name in places:
            placeholder = _nothing(parameter.shape, dtype_of(name, wide, parameter.dtype))
            new.setdefault(parameter, nn.Parameter(placeholder, requires_grad=parameter.requires_grad))
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in new:  # a tie stays a tie
                setattr(module, key, new[parameter])
    return model, places


def _devices(model: nn.Module, names: list[str]) -> dict[str, str]:
    """A device map with the blocks ``names`` on disk and everything else on the CPU: modules, and of those that hold
    blocks the tensors that are their own."""
    devices, inside = dict.fromkeys(names, "disk"), tuple(f"{name}." for name in names)
    for name in tensors_of(model):
        path, _, _ = name.rpartition(".")
        if not name.startswith(inside):
            holds_blocks = not path or any(block.startswith(f"{path}.") for block in inside)
            devices[name if holds_blocks else path] = "cpu"
    return devices


def _nothing(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape in the memory of one number: NaN, so that nothing takes it for a weight."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu").expand(shape)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, one for each block, and accelerate's remark that weights are offloaded."""
    bars, remarks = transformers.utils.logging.is_progress_bar_enabled(), logging.getLogger("accelerate.big_modeling")
    level = remarks.level
    transformers.utils.logging.disable_progress_bar()
    remarks.setLevel(logging.ERROR)
    try:
        yield
    finally:
        remarks.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


class Streamed(Storage):
    """The blocks of a model on disk. One is open, or none; one more may be passing through a run of the whole model;
    the others hold placeholders. Entered, every block has its weights when it is called."""

    resident = False

    def __init__(
        self,
        model: Any,
        names: list[str],
        places: Mapping[str, tuple[Path, str]],
        work: WorkFolder,
        files: SourceFiles,
        *,
        spill: bool,
        packed: bool = False,
    ) -> None:
        self.model, self.names, self._places = model, names, places
        self._packed = packed
        self._work, self._files, self._spill = work, files, spill
        self._blocks = [model.get_submodule(name) for name in names]
        self._home = {module: block for block in self._blocks for module in block.modules()}
        self._own = dict(zip(self._blocks, map(list, parameters_by_block(model, names).values())))
        self._over: set[nn.Module] = set()
        self._open: nn.Module | None = None
        self._passing: nn.Module | None = None
        self._handles: list[Any] = []
        self._on_request = False
        self.choice, self.block_names = work.budget, {name: name for name in names}
        owned = self._owned()
        for name, parameter in model.named_parameters():  # those that a block shares, or that lie outside, stay
            if name in places and parameter not in owned:
                parameter.data = self._read(name, parameter)

    def __enter__(self) -> "Streamed":
        for block in self._blocks:
            # a copy of the block that shares its parameters loads this one
            hook = lambda module, _, block=block: None if self._on_request else self.load(block)  # noqa: E731 - a partial would be copied
            self._handles.append(block.register_forward_pre_hook(hook, prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._drop_passing()

    # Storage ----------------------------------------------------------------------------------------------------------

    def load(self, module: nn.Module) -> None:
        block = self._home.get(module)
        if block is not None and block is not self._open and block is not self._passing:
            self._drop_passing()
            self._fill(block)
            self._passing = block

    @contextmanager
    def on_request(self) -> Iterator[None]:
        before, self._on_request = self._on_request, True
        try:
            yield
        finally:
            self._on_request = before

    @contextmanager
    def open(self, block: nn.Module | None, report: Report) -> Iterator[Callable[[], None] | None]:
        self._work.check(self._files.hashes, report.calibration.get("sha256"))
        if block is None:
            yield None
            return
        index = self._blocks.index(block)
        record = self._work.done.get(index)
        begun = len(report.layers), len(report.blocks)
        self.load(block)
        self._open, self._passing = block, None
        try:
            yield None if record is None else partial(self.fill_sparse, block)
            if index not in self.written:
                return
            if record is None:
                if self._work.leads:
                    self._write(index, report.layers[begun[0] :], report.blocks[begun[1] :])
                remove_masks(block)
                self._work.share_block(index)
            else:
                report.layers += [LayerReport.from_dict(layer) for layer in record.layers]
                report.blocks += [BlockReport(**tuned) for tuned in record.blocks]
                self.reused += 1
            self._over.add(block)
        finally:
            self._open = None
            self._drop(block)

    def hold(self, x: Tensor, *, weights: bool = False) -> Tensor:
        return spilled(x, self._work.path / "writing") if self._spill or weights else x

    def save_choice(self, choice: dict[str, Any]) -> None:
        if self._work.leads:
            self._work.write_json(BUDGET, choice)

    # reading ----------------------------------------------------------------------------------------------------------

    def _drop_passing(self) -> None:
        if self._passing is not None:
            self._drop(self._passing)
        self._passing = None

    @torch.no_grad()
    def _fill(self, block: nn.Module) -> None:
        written = block in self._over
        for name, parameter in self._parameters(block).items():
            parameter.data = (
                torch.empty(parameter.shape, device="cpu").to(parameter) if written else self._read(name, parameter)
            )
        if written:
            self.fill_sparse(block)

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        file, key = self._places[name]
        self._files.begin(file)
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(key).to(parameter.dtype)
        if tensor.shape != parameter.shape:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)} in {file.name!r}, not {list(parameter.shape)}")
        return tensor

    @torch.no_grad()
    def fill_sparse(self, block: nn.Module) -> None:
        """Put what has been written of a block in the place of its dense weights, in the same memory."""
        index = self._blocks.index(block)
        named = f"named/{index:05d}.safetensors"
        files = self._work.done[index].files
        path = self._work.path / (named if named in files else self._shard(index))
        opened = opened_file(path, self._work.path / f"masks/{index:05d}.safetensors")
        for name, parameter in self._own_as_written(index).items():
            parameter.copy_(opened.get_tensor(name))

    def _parameters(self, block: nn.Module) -> dict[str, nn.Parameter]:
        """The block's own parameters by their names in the model; what has been cut is new."""
        path = f"{self.names[self._blocks.index(block)]}."
        present = dict(block.named_parameters(remove_duplicate=False))
        return {name: present[name.removeprefix(path)] for name in self._own[block]}

    def _drop(self, block: nn.Module) -> None:
        for parameter in self._parameters(block).values():
            parameter.data = _nothing(parameter.shape, parameter.dtype)
        give_back_freed_memory()

    # writing ----------------------------------------------------------------------------------------------------------

    @property
    def written(self) -> dict[int, str]:
        """Index of a block -> its name in the target."""
        return {index: self.block_names[name] for index, name in enumerate(self.names) if name in self.block_names}

    def _shard(self, index: int) -> str:
        return self.shard_name(list(self.written).index(index) + 2)

    def shard_name(self, number: int) -> str:
        """The path in the work folder of a shard of the target, counted from 1."""
        prefix = PACKED if self._packed else ""
        return f"folder/{prefix}model-{number:05d}-of-{len(self.written) + 1:05d}.safetensors"

    def _owned(self) -> set[nn.Parameter]:
        return {parameter for block in self._blocks for parameter in self._parameters(block).values()}

    def _own_as_written(self, index: int) -> dict[str, nn.Parameter]:
        """The block's parameters by their names in the target, as transformers has them in memory."""
        old, new = self.names[index], self.written[index]
        parameters = self._parameters(self._blocks[index])
        return {new + name.removeprefix(old): parameter for name, parameter in parameters.items()}

    def _write(self, index: int, layers: list[LayerReport], tuned: list[BlockReport]) -> None:
        block, name, work = self._blocks[index], self.written[index], self._work
        masks = {f"{name}.{key}": mask for key, mask in named_masks(block)}
        remove_masks(block)
        tensors = self._own_as_written(index)
        owned = set(tensors.values())
        state = {
            f"{name}.{key}": value.detach()
            for key, value in block.state_dict(keep_vars=True).items()
            if value in owned or not isinstance(value, nn.Parameter)
        }
        file, place = work.scratch() / "masks.safetensors", f"masks/{index:05d}.safetensors"
        described = write_masks(masks, file)
        files = work.place(file, place)
        shard = self.saved(state, place)
        with safe_open(shard, framework="pt") as opened:
            converted = not set(tensors) <= set(opened.keys())
        files |= work.place(shard, self._shard(index))
        if converted:
            file = work.scratch() / "named.safetensors"
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, file)
            files |= work.place(file, f"named/{index:05d}.safetensors")
        work.scratch()  # nothing stays of what save_pretrained has written beside the shard
        parts = [asdict(layer) for layer in layers], [asdict(part) for part in tuned]
        work.finish_block(index, BlockRecord(self.names[index], files, described, *parts))

    def saved(self, state: Mapping[str, Tensor], masks: str) -> Path:
        """A file of these tensors as save_pretrained writes them, under the names that the checkpoint has; packed, if
        the target is. ``masks``: the path of their masks in the work folder."""
        folder = self._work.scratch()
        with quiet():
            self.model.save_pretrained(folder, state_dict=dict(state), max_shard_size=ONE_FILE)
        if not state:  # then transformers writes no file
            save_file({}, folder / WEIGHTS)
        return pack_files(folder, [WEIGHTS], folder, self._work.path / masks)[0] if self._packed else folder / WEIGHTS

    def write_the_rest(self) -> None:
        """Blocks that were never opened, because nothing in their stack is pruned."""
        for index in self.written:
            if index not in self._work.done:
                self.load(self._blocks[index])
                self._write(index, [], [])

    def outside(self) -> dict[str, Tensor]:
        """The state dict without what the blocks' shards hold."""
        within = {f"{name}.{key}" for i, name in self.written.items() for key in self._blocks[i].state_dict()}
        owned = self._owned()
        stays = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p not in owned}
        return {name: value for name, value in self.model.state_dict().items() if name not in within or name in stays}


# activations in files -------------------------------------------------------------------------------------------------


def spilled(x: Tensor, folder: Path) -> Tensor:
    """A copy of a dense tensor on the CPU, of the same layout, in a file in ``folder``.

    The file is gone when the tensor is. A tensor that is empty, on another device or in a file is returned as it is.
    """
    if x.device.type != "cpu" or not x.numel() or x.untyped_storage().filename is not None:
        return x
    dense = x.detach().clone()  # its storage holds its elements, each once, and nothing else
    flat = dense.as_strided((dense.numel(),), (1,))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # macOS and Windows have none: a full disk there ends the process
            os.posix_fallocate(file.fileno(), 0, flat.nbytes)
        mapped = torch.from_file(file.name, shared=True, size=flat.numel(), dtype=flat.dtype)
        mapped.copy_(flat)
    return mapped.as_strided(dense.shape, dense.stride())


# files of the target --------------------------------------------------------------------------------------------------


def write_index(folder: Path, parameters: int) -> None:
    """Write the index of a folder's weight files, as transformers does. ``parameters``: how many numbers they are.

    That of packed files is the index of the plain ones.
    """
    weight_map: dict[str, str] = {}
    size, prefix = 0, ""
    for path in sorted([*folder.glob("model-*.safetensors"), *folder.glob(f"{PACKED}model-*.safetensors")]):
        prefix = PACKED if path.name.startswith(PACKED) else ""
        tensors = plain_tensors(path)
        size += sum(end - begin for begin, end in (entry["data_offsets"] for entry in tensors.values()))
        weight_map.update(dict.fromkeys(tensors, path.name.removeprefix(prefix)))
    index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
    (folder / f"{prefix}{INDEX}").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def concatenate(files: Iterable[Path], out_path: Path) -> None:
    """Write the masks of several files into one file, byte for byte as safetensors would.

    One at a time is in memory: save_file would take all. https://github.com/huggingface/safetensors#format
    """
    opened = [safe_open(path, framework="np") for path in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(where):
        (size,) = where[name].get_slice(name).get_shape()
        begin, end = end, end + size
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with out_path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            out.write(where[name].get_tensor(name).data)
