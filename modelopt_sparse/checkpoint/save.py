"""Writing a folder of a sparse model. The files in it are described in format.py."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from modelopt_sparse.checkpoint.dequantize import save_as_dense
from modelopt_sparse.checkpoint.folder import (
    DESCRIPTION,
    FORMAT_VERSION,
    MASKS,
    WEIGHTS,
    Description,
    Read,
    checked_path,
    checked_place,
    checksum,
    damaged_files,
    pack_mask,
    read_description,
    read_masks,
    remember_source,
    size_and_hash,
    sources_of,
    staged,
    weight_files,
    weight_reader,
)
from modelopt_sparse.distributed import rank
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.hf import model_class, unloaded
from modelopt_sparse.model.layers import refuse_packed
from modelopt_sparse.model.masking import SUFFIX, dense_class, named_masks, remove_masks, set_mask
from modelopt_sparse.model.wrappers import refuse_no_model, refuse_wrapped_parts, unwrapped
from modelopt_sparse.reports.report import Report, attach_report, attached_report, library_versions
from modelopt_sparse.runtime.convert import loading_place, pack_onto

# save -----------------------------------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    overwrite: bool = False,
    companions: Iterable[Any] = (),
    max_shard_size: int | str | None = None,
) -> None:
    """Write a sparse model to a folder that plain ``from_pretrained`` reads, and that `restore` and `load` check.

    ``companions`` are saved with the model: a tokenizer, a processor, anything with ``save_pretrained``.
    ``max_shard_size`` is that of transformers' ``save_pretrained``.

    A new folder appears only when it is complete. A folder that exists and is not empty is written to with
    ``overwrite=True`` alone: files are replaced one by one, ``sparsity.json`` last; until then the folder has none. No
    process waits for another. If several overwrite the same folder, it is whole when the last one is done.

    Raises ValueError

    - for a path that looks like a pickle file, and for a path that is a file;
    - for a folder that is not empty, or that others have filled meanwhile, without ``overwrite``;
    - whatever ``overwrite`` says, for the current directory and the folders above it, and for the folder that the
      model's weights are known to come from;
    - for a model with values that cannot be saved: no tensors, or tensors on the meta device;
    - for a model of transformers in another rank than 0 of a process group, where transformers writes nothing.

    Raises OSError if the folder cannot be written (a full disk). No partial files are left then.

    >>> mts.save(model, "sparse-model")
    """
    refuse_no_model(model)
    model = unwrapped(model)
    refuse_wrapped_parts(model, "saved")
    folder = checked_place(folder, overwrite=overwrite, sources=sources_of(model))
    if max_shard_size is not None and not isinstance(model, PreTrainedModel):
        raise ValueError(f"max_shard_size is for transformers' models; a {type(model).__name__} goes into one file")
    if isinstance(model, PreTrainedModel) and rank() > 0:
        raise ValueError(
            f"transformers writes a model in rank 0 of a process group alone, and this is rank {rank()}: call save "
            "there, and torch.distributed.barrier() in all of them afterwards"
        )
    state = _state(model)
    with staged(folder, overwrite=overwrite) as staging:
        aliases: dict[str, str] = {}
        if isinstance(model, PreTrainedModel):
            options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            save_as_dense(model)
            model.save_pretrained(staging, state_dict=dict(state), **options)
        else:
            aliases = _tied(state)
            unique = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
            save_file(unique, staging / WEIGHTS, metadata={"format": "pt"})
        masks = dict(named_masks(model))
        save_file({name: pack_mask(mask) for name, mask in masks.items()}, staging / MASKS)
        for companion in companions:
            companion.save_pretrained(staging)
        described = {name: describe_mask(mask) for name, mask in masks.items()}
        write_description(staging, dense_class(model).__name__, described, attached_report(model), aliases)


def add_masks(model: nn.Module, folder: str | Path) -> None:
    """Write masks and report into a folder that holds the weights of a sparse model already, such as a checkpoint of
    Trainer's, so that `restore` and `load` read it. What was there of them is replaced.

    Raises ValueError if there are no safetensors files of weights.
    """
    model, folder = unwrapped(model), Path(folder)
    missing = [name for name in weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{str(folder)!r} holds no {missing[0]}, so there are no weights that masks would belong to")
    masks = dict(named_masks(model))
    (folder / DESCRIPTION).unlink(missing_ok=True)
    save_file({name: pack_mask(mask) for name, mask in masks.items()}, folder / MASKS)
    described = {name: describe_mask(mask) for name, mask in masks.items()}
    names, _ = weight_reader(folder, weight_files(folder))
    aliases = {name: other for name, other in _tied(_state(model)).items() if name not in names}
    write_description(folder, dense_class(model).__name__, described, attached_report(model), aliases)


def describe_mask(mask: Tensor) -> dict[str, Any]:
    """A mask as ``sparsity.json`` describes it: its shape, and how many weights are kept."""
    return {"shape": list(mask.shape), "kept": int(mask.count_nonzero())}


def write_description(
    folder: Path,
    model_class: str,
    masks: Mapping[str, Mapping[str, Any]],
    report: Report | None,
    aliases: Mapping[str, str] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write ``sparsity.json`` into a folder that is complete except for it.

    ``masks`` are parameter names with what `describe_mask` says, ``aliases`` those of `format.Description`. ``known``
    holds sizes and hashes of the folder's files that need not be computed again.
    """
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".safetensors", ".index.json")))
    description = {
        "format": "modelopt_sparse",
        "format_version": FORMAT_VERSION,
        "versions": library_versions(),
        "model_class": model_class,
        "masks": masks,
        "aliases": aliases or {},
        "files": {path.name: (known or {}).get(path.name) or size_and_hash(path) for path in files},
        "report": None if report is None else report.as_dict(),
    }
    text = json.dumps({**description, "checksum": checksum(description)}, indent=2, default=str)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without masks, zero at pruned places. Offloaded tensors are read from accelerate's copies.

    Raises ValueError for a value that is no tensor, and for a tensor on the meta device.
    """
    masks = {id(mask) for _, mask in named_masks(model)}
    skipped = {name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in masks}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in skipped}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                state[f"{path}.{name}".removeprefix(".")] = stored(module, name)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is a {type(value).__name__}: only tensors can be saved without pickle")
        if value.device.type == "meta":
            raise ValueError(f"{name!r} is on the meta device and has no values: load the model before saving it")
    return state


def _tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Aliases: a name whose tensor is that of an earlier name -> the earlier name. A file holds each tensor once."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


# restore --------------------------------------------------------------------------------------------------------------
# Reading a folder of a sparse model: `restore`, `load`, and `report`. The files in a folder are read in format.py.


SHOWN = 20  # how many problems an error names


def restore(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load weights, masks and report of a folder into a model of the same architecture, in place, and return it.

    Everything is checked first:

    - files against their sizes and hashes;
    - names, shapes and dtypes against the model;
    - that every weight is zero where its mask is False.

    Raises one ValueError that lists everything that is wrong, with the model untouched. Masks that the model has are
    replaced by those of the folder.
    """
    refuse_no_model(model)
    folder = checked_path(folder)
    _restore(unwrapped(model), folder)
    return model


def _restore(model: nn.Module, folder: Path) -> None:
    """`restore` into a model without wrappers."""
    refuse_packed(model, "restored into")
    refuse_wrapped_parts(model, "restored into")
    description = read_description(folder)
    problems = []
    if description.model_class != dense_class(model).__name__:
        problems.append(f"it holds a {description.model_class}, the model is a {dense_class(model).__name__}")
    damaged = damaged_files(folder, description)
    problems += damaged.values()
    masks = read_masks(folder, description, problems) if MASKS not in damaged else {}
    slots = list(_slots(model))
    known = {name for names, _ in slots for name in names}
    problems += [f"mask {name!r} fits no parameter of the model" for name in masks if name not in known]
    filled: list[tuple[Tensor, Tensor]] = []
    if damaged.keys() <= {MASKS}:
        read = _reader(model, slots, folder, description, masks, problems)
        dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        filled = [pair for slot in slots if (pair := _fill(*slot, read, masks, problems, dtypes)) is not None]
        problems += [
            f"{names[0]!r} is {there} there and {here} in the model"
            + (f", and so are {len(names) - 1} others" if len(names) > 1 else "")
            + f": convert the model first, with model.to({there})"
            for (there, here), names in dtypes.items()
        ]
    if problems:
        raise ValueError(
            _listed(f"{str(folder)!r} cannot be restored into this {dense_class(model).__name__}", problems)
        )
    remove_masks(model)
    with torch.no_grad():
        for values, tensor in filled:
            values.copy_(tensor)
    _attach(model, masks, description)
    remember_source(model, folder)


def load(folder: str | Path, *, semi_structured: bool | Mapping[str, Any] = False, **options: Any) -> nn.Module:
    """A sparse model from a Hugging Face folder that `save` wrote, masks and report included.

    ``options`` go to ``from_pretrained`` (dtype, device_map, ...). The default of ``dtype`` is the stored one. The
    class is the one named in config.json.

    ``semi_structured=True``, or a mapping of options of `to_semi_structured`, packs the layers for 2:4 kernels on the
    one CUDA device that ``device_map`` names (default: the current one). They are packed one by one on their way to the
    device, so that the dense model is never in the device's memory. Packed layers carry no masks.

    Raises ValueError with a list of everything that is wrong with the folder.

    >>> model = mts.load("sparse-model")
    >>> len(list(mts.named_masks(model)))
    14
    """
    folder = checked_path(folder)
    packing = loading_place(options.pop("device_map", None), semi_structured) if semi_structured is not False else None
    description = read_description(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} holds no config.json to build its {description.model_class} from: build the model "
            "yourself and call restore(model, folder)"
        )
    head = f"{str(folder)!r} cannot be loaded"
    damaged = damaged_files(folder, description)
    problems = list(damaged.values())
    masks = read_masks(folder, description, problems) if MASKS not in damaged else {}
    if problems:
        raise ValueError(_listed(head, problems))
    remote = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    architecture = model_class(AutoConfig.from_pretrained(folder, **remote), folder)
    model, info = architecture.from_pretrained(folder, **options, output_loading_info=True)
    problems += unloaded(info)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            problems.append(f"mask {name!r} fits no parameter of {type(model).__name__}")
        elif parameters[name].device.type != "meta":
            problems += _breaches(name, parameters[name].detach(), mask)
    if problems:
        raise ValueError(_listed(head, problems))
    if packing is not None:
        attach_report(model, description.report)
        return pack_onto(model, *packing)
    _attach(model, masks, description)
    remember_source(model, folder)
    return model


def report(model: nn.Module | str | Path) -> Report:
    """The report of a model that `sparsify`, `restore` or `load` gave back, or of a folder that `save` wrote.

    Raises ValueError if there is none.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        attached, subject = attached_report(model), f"this {type(model).__name__}"
    else:
        attached, subject = read_description(model).report, f"the model in {str(model)!r}"
    if attached is None:
        raise ValueError(f"{subject} carries no report: sparsify did not make it sparse")
    return attached


def _reader(
    model: nn.Module,
    slots: Iterable[tuple[list[str], Tensor]],
    folder: Path,
    description: Description,
    masks: Mapping[str, Tensor],
    problems: list[str],
) -> Read:
    """A function that reads the folder's tensor for one of the model's names. ``slots`` are those of `_slots`.

    transformers stores some models under other names than they have in memory. For these it loads the folder into a
    second model, which takes the memory of the weights once more.
    """
    try:
        names, read = weight_reader(folder, weight_files(folder))
    except SafetensorError as error:
        problems.append(f"the weights cannot be read: {error}")
        return lambda name: None
    same_class = description.model_class == dense_class(model).__name__
    if isinstance(model, PreTrainedModel) and same_class and any(names.isdisjoint(alike) for alike, _ in slots):
        fresh, info = dense_class(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
        problems += unloaded(info)
        return fresh.state_dict().get
    known = {name for alike, _ in slots for name in alike}
    for name in sorted(names - known):
        mask, other = masks.get(name.removesuffix(SUFFIX)), read(name)
        if mask is None or other is None or not name.endswith(SUFFIX):
            problems.append(f"{name!r} has no place in the model")
        elif not torch.equal(mask, other):  # Trainer saves masks of plain modules with the weights
            problems.append(f"{name!r} is not the same in the weight files and in {MASKS}")
    return lambda name: read(description.aliases.get(name, name))


def _slots(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """(all names of a tensor, the tensor to write to), for everything in the model's state dict except for masks."""
    masks = {id(mask) for _, mask in named_masks(model)}
    slots: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}".removeprefix(".")
            slots.setdefault(id(tensor), ([], stored(module, name)))[0].append(full)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}".removeprefix(".")
            if id(tensor) not in masks and name not in module._non_persistent_buffers_set:
                slots.setdefault(id(tensor), ([], tensor))[0].append(full)
    yield from slots.values()


def _fill(
    names: list[str],
    values: Tensor,
    read: Read,
    masks: Mapping[str, Tensor],
    problems: list[str],
    dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]],
) -> tuple[Tensor, Tensor] | None:
    """(a tensor of the model, the folder's tensor for it); None if the folder has none.

    ``names`` are all names of the model's tensor ``values``. What is wrong is appended to ``problems``; the names of
    tensors of another dtype go into ``dtypes``, under (the dtype there, the dtype in the model).
    """
    stored_tensors = {name: tensor for name in names if (tensor := read(name)) is not None}
    if not stored_tensors:
        problems.append(f"{names[0]!r} of the model is not in the folder")
        return None
    tensor = next(iter(stored_tensors.values()))
    for name, other in stored_tensors.items():
        if other.shape != values.shape:
            problems.append(f"{name!r} has shape {list(other.shape)} there and {list(values.shape)} in the model")
        elif other.dtype != values.dtype:
            dtypes.setdefault((other.dtype, values.dtype), []).append(name)
        elif other is not tensor and not torch.equal(other, tensor):
            problems.append(f"{name!r} and {names[0]!r} are one tensor in the model and differ there")
        elif name in masks and masks[name].shape != other.shape:
            problems.append(f"mask {name!r} has shape {list(masks[name].shape)}, its weight {list(other.shape)}")
        elif name in masks:
            problems += _breaches(name, other, masks[name])
    return values, tensor


def _breaches(name: str, weight: Tensor, mask: Tensor) -> list[str]:
    """What is wrong with a weight that is not zero where its mask is False; [] if nothing is."""
    count = int(weight[~mask.to(weight.device)].count_nonzero())
    return [f"weight {name!r} is not zero in {count} places where its mask is False"] if count else []


def _attach(model: nn.Module, masks: Mapping[str, Tensor], description: Description) -> None:
    for name, mask in masks.items():
        set_mask(model, name, mask)
    attach_report(model, description.report)


def _listed(head: str, problems: list[str]) -> str:
    """The text of an error: ``head``, and the first SHOWN of the problems."""
    shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
    return f"{head}: {shown[0]}" if len(shown) == 1 else "\n- ".join([f"{head}:", *shown])
