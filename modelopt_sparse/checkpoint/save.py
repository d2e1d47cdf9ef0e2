"""Writing a folder of a sparse model. The files in it are described in format.py."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.checkpoint.dequantize import save_as_dense
from modelopt_sparse.checkpoint.files import size_and_hash
from modelopt_sparse.checkpoint.format import (
    DESCRIPTION,
    FORMAT_VERSION,
    MASKS,
    WEIGHTS,
    checksum,
    pack_mask,
    weight_files,
    weight_reader,
)
from modelopt_sparse.checkpoint.place import checked_place, sources_of
from modelopt_sparse.checkpoint.staging import staged
from modelopt_sparse.distributed import rank
from modelopt_sparse.model.checks import refuse_no_model
from modelopt_sparse.model.masking import dense_class, named_masks
from modelopt_sparse.model.offload import stored
from modelopt_sparse.model.wrappers import refuse_wrapped_parts, unwrapped
from modelopt_sparse.reports.report import Report, attached_report
from modelopt_sparse.reports.values import library_versions


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
