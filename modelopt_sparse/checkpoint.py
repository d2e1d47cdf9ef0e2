"""Folders of sparse models: save, restore, load. The format is specified in docs/format.md.

An ordinary Hugging Face folder (or one model.safetensors) whose weights hold exact zeros, plus ``sparsity.json`` and
``sparsity_masks.safetensors``. No pickle.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from modelopt_sparse.modules import apply_masks, named_masks, set_mask
from modelopt_sparse.offload import stored
from modelopt_sparse.report import ATTRIBUTE, Report, attach_report, library_versions

FORMAT_VERSION = 1
DESCRIPTION = "sparsity.json"
MASKS = "sparsity_masks.safetensors"
WEIGHTS = "model.safetensors"  # of models that are not transformers'
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt")
SHOWN = 10  # problems that an error spells out


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


# save ---------------------------------------------------------------------------------------------------------------


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a sparse model to a folder that plain ``from_pretrained`` reads and that `restore` and `load` check.

    A new folder appears only when it is complete. In an existing one files are replaced one by one, ``sparsity.json``
    last; until then the folder has none. Raises ValueError for a pickle path, OSError (a full disk) with nothing left
    behind.
    """
    folder = _folder(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: save writes a folder, give another path")
    apply_masks(model)
    with _staged(folder) as staging:
        state = _state(model)
        aliases: dict[str, str] = {}
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(staging, state_dict=dict(state))
        else:
            kept: dict[tuple, str] = {}
            unique: dict[str, Tensor] = {}
            for name, tensor in state.items():
                key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
                if kept.setdefault(key, name) != name:
                    aliases[name] = kept[key]
                else:
                    unique[name] = tensor.contiguous()
            save_file(unique, staging / WEIGHTS, metadata={"format": "pt"})
        masks = dict(named_masks(model))
        save_file({name: pack_mask(mask) for name, mask in masks.items()}, staging / MASKS)
        files = sorted(path for path in staging.iterdir() if path.name.endswith((".safetensors", ".index.json")))
        description = {
            "format": "modelopt_sparse",
            "format_version": FORMAT_VERSION,
            "versions": library_versions(),
            "model_class": type(model).__name__,
            "masks": {
                name: {"shape": list(mask.shape), "kept": int(mask.sum()), "of": mask.numel()}
                for name, mask in masks.items()
            },
            "aliases": aliases,
            "files": {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files},
            "report": getattr(model, ATTRIBUTE, Report()).as_dict(),
        }
        (staging / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without masks; what accelerate offloads is taken from where it really is."""
    masks = {f"{name}_mask" for name, _ in named_masks(model)}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in masks}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                state[f"{path}.{name}".removeprefix(".")] = stored(module, name)
    return state


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder to write to beside ``folder``; it takes its place at the end, or is removed if anything fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for path in staging.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        if not folder.exists():
            staging.rename(folder)
            return
        (folder / DESCRIPTION).unlink(missing_ok=True)
        new = {path.name for path in staging.iterdir()}
        for path in sorted(staging.iterdir(), key=lambda path: path.name == DESCRIPTION):
            path.replace(folder / path.name)
        for path in folder.glob("model*.safetensors*"):  # shards of what was there before
            if path.name not in new:
                path.unlink()
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# read ---------------------------------------------------------------------------------------------------------------


def read_description(folder: str | Path) -> dict[str, Any]:
    """The checked ``sparsity.json`` of a folder. Raises ValueError if there is none that this version can read."""
    folder = _folder(folder)
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} holds no {DESCRIPTION}: it is not a folder that modelopt_sparse.save wrote to its end"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version = description["format_version"]
        known = description["format"] == "modelopt_sparse" and isinstance(version, int)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read, it is truncated or edited: {error}") from None
    if not known:
        raise ValueError(f"{str(path)!r} is not a description of this format")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {version}, this library reads up to {FORMAT_VERSION}: "
            "update modelopt_sparse"
        )
    return description


def restore(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load weights and masks of a folder into a model of the same architecture, in place, and return it.

    Everything is checked first: files against their sizes and hashes, names, shapes and dtypes against the model, and
    that no weight is nonzero where its mask is False. All that is wrong stands in one ValueError, with the model
    untouched.
    """
    folder = _folder(folder)
    description = read_description(folder)
    head = f"{str(folder)!r} cannot be restored into this {type(model).__name__}"
    if problems := _damaged_files(folder, description):
        raise ValueError(_listed(head, problems))
    source = _source(model, folder, description)
    masks = _read_masks(folder, description, problems)
    slots = list(_slots(model))
    problems += _misfits(slots, source, masks, type(model).__name__, description)
    if problems:
        raise ValueError(_listed(head, problems))
    with torch.no_grad():
        for names, values in slots:
            values.copy_(next(tensor for name in names if (tensor := source(name)) is not None))
    _attach(model, masks, description)
    return model


def load(folder: str | Path, **options: Any) -> nn.Module:
    """A sparse model from a Hugging Face folder that `save` wrote, masks and report included.

    ``options`` go to ``from_pretrained`` (dtype, device_map, ...). The model class is the one named in config.json.
    Raises ValueError listing everything that is wrong with the folder.
    """
    folder = _folder(folder)
    description = read_description(folder)
    problems = _damaged_files(folder, description)
    masks = {} if problems else _read_masks(folder, description, problems)
    if problems:
        raise ValueError(_listed(f"{str(folder)!r} cannot be loaded", problems))
    options.setdefault("dtype", "auto")
    model = model_class(folder, **_remote(options)).from_pretrained(folder, **options)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            problems.append(f"mask {name!r} fits no parameter of {type(model).__name__}")
        elif parameters[name].device.type != "meta" and parameters[name].detach()[~mask].count_nonzero():
            problems.append(f"weight {name!r} is not zero where its mask is False")
    if problems:
        raise ValueError(_listed(f"{str(folder)!r} cannot be loaded", problems))
    _attach(model, masks, description)
    return model


def model_class(folder: str | Path, **options: Any) -> Any:
    """The transformers class that a folder or hub name names in its config.json."""
    config = AutoConfig.from_pretrained(folder, **options)
    names = config.architectures or []
    if names and (found := getattr(transformers, names[0], None)) is not None:
        return found
    remote = getattr(config, "auto_map", None) or {}
    for auto in remote:
        if auto.startswith("AutoModel") and (not names or remote[auto].endswith(f".{names[0]}")):
            return getattr(transformers, auto)
    raise ValueError(f"config.json of {str(folder)!r} names no model class that transformers knows: {names}")


def _remote(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("revision", "trust_remote_code") if key in options}


def _attach(model: nn.Module, masks: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    for name, mask in masks.items():
        set_mask(model, name, mask)
    attach_report(model, Report.from_dict(description["report"]))


def _folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.suffix in PICKLES:
        raise ValueError(
            f"{str(path)!r} looks like a pickle file, which this library neither writes nor reads: give a folder, "
            f"for example {str(path.with_suffix(''))!r}"
        )
    return path


def _damaged_files(folder: Path, description: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, expected in description["files"].items():
        path = folder / name
        if Path(name).name != name:
            problems.append(f"file name {name!r} leads out of the folder")
        elif not path.is_file():
            problems.append(f"file {name!r} is missing")
        elif path.stat().st_size != expected["size"]:
            problems.append(f"file {name!r} has {path.stat().st_size} bytes, not {expected['size']}")
        elif _sha256(path) != expected["sha256"]:
            problems.append(f"file {name!r} has changed since it was saved (its hash differs)")
    if MASKS not in description["files"]:
        problems.append(f"{DESCRIPTION} does not list {MASKS!r}")
    return problems


def _read_masks(folder: Path, description: Mapping[str, Any], problems: list[str]) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = {}
    try:
        packed = load_file(folder / MASKS)
    except SafetensorError as error:
        problems.append(f"file {MASKS!r} cannot be read: {error}")
        return masks
    if packed.keys() != description["masks"].keys():
        problems.append(f"{MASKS!r} and {DESCRIPTION} list different masks")
        return masks
    for name, entry in description["masks"].items():
        size = torch.Size(entry["shape"]).numel()
        if packed[name].dtype != torch.uint8 or packed[name].numel() != -(-size // 8):
            problems.append(f"mask {name!r} does not hold the bits of shape {entry['shape']}")
            continue
        masks[name] = unpack_mask(packed[name], tuple(entry["shape"]))
        if int(masks[name].sum()) != entry["kept"]:
            problems.append(f"mask {name!r} keeps {int(masks[name].sum())} weights, not {entry['kept']}")
    return masks


def weight_reader(folder: Path) -> tuple[set[str], Callable[[str], Tensor]]:
    """Names of the tensors in a folder's weight files, and a function that reads one."""
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("model*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
    return set(where), lambda name: where[name].get_tensor(name)


def _source(model: nn.Module, folder: Path, description: Mapping[str, Any]) -> Callable[[str], Tensor | None]:
    """A function from the model's names to the folder's tensors.

    Where transformers stores a model under other names than it has in memory, it loads the folder itself, at the price
    of a second copy of the weights.
    """
    names, read = weight_reader(folder)
    aliases = description["aliases"]
    if isinstance(model, PreTrainedModel) and any(not names & set(alike) for alike, _ in _slots(model)):
        fresh = type(model).from_pretrained(folder, dtype="auto").state_dict()
        return fresh.get

    def source(name: str) -> Tensor | None:
        name = aliases.get(name, name)
        return read(name) if name in names else None

    return source


def _slots(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Everything that a state dict holds, apart from masks: (all names of a tensor, the tensor to write to)."""
    masks = {f"{name}_mask" for name, _ in named_masks(model)}
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            full = f"{path}.{name}".removeprefix(".")
            found.setdefault(id(tensor), ([], stored(module, name)))[0].append(full)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}".removeprefix(".")
            if full not in masks and name not in module._non_persistent_buffers_set:
                found.setdefault(id(tensor), ([], tensor))[0].append(full)
    yield from found.values()


def _misfits(
    slots: list[tuple[list[str], Tensor]],
    source: Callable[[str], Tensor | None],
    masks: Mapping[str, Tensor],
    class_name: str,
    description: Mapping[str, Any],
) -> list[str]:
    problems = []
    if description["model_class"] != class_name:
        problems.append(f"it holds a {description['model_class']}")
    known = set()
    for names, values in slots:
        known.update(names)
        tensor = next((found for name in names if (found := source(name)) is not None), None)
        if tensor is None:
            problems.append(f"{names[0]!r} of the model is not in the folder")
        elif tensor.shape != values.shape:
            problems.append(f"{names[0]!r} has shape {list(tensor.shape)} there and {list(values.shape)} in the model")
        elif tensor.dtype != values.dtype:
            problems.append(f"{names[0]!r} is {tensor.dtype} there and {values.dtype} in the model")
        else:
            for name in names:
                if name in masks and tensor[~masks[name]].count_nonzero():
                    problems.append(f"weight {name!r} is not zero where its mask is False")
    problems += [f"mask {name!r} fits no parameter of the model" for name in masks if name not in known]
    return problems


def _listed(head: str, problems: list[str]) -> str:
    shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
    return f"{head}: " + "; ".join(shown)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
