"""Writing and reading folders of sparse models: `save`, `restore`, `load` and `report`."""

import re
import shutil
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from modelopt_sparse.checkpoint.dequantize import DENSE, dtype_of, kept_wide, save_as_dense
from modelopt_sparse.checkpoint.folder import (
    DESCRIPTION,
    MASKS,
    SOURCE,
    WEIGHTS,
    Description,
    checked_path,
    checked_place,
    copy_companions,
    damaged_files,
    description_of,
    hub_folder,
    is_packed,
    read_description,
    read_json,
    sources_of,
    staged,
    weight_files,
    write_description,
    write_masks,
)
from modelopt_sparse.checkpoint.packed import (
    loaded,
    opened_folder,
    opened_weights,
    pack_files,
    plain_tensors,
    unpack_files,
)
from modelopt_sparse.distributed import is_sharded, rank
from modelopt_sparse.methods.patterns import NM, parse_pattern, pattern_of
from modelopt_sparse.model.devices import refuse_what_cannot_be_written, stored, unwrapped
from modelopt_sparse.model.find import PackedLayer, find_layers, usable
from modelopt_sparse.model.hf import model_class, unloaded
from modelopt_sparse.model.layers import Layer, as_row
from modelopt_sparse.model.masking import (
    SUFFIX,
    dense_class,
    named_masks,
    refuse_what_cannot_be_sparse,
    remove_masks,
    set_mask,
)
from modelopt_sparse.reports.report import Report, attach_report, attached_report
from modelopt_sparse.reports.text import first_few
from modelopt_sparse.reports.values import REPLACED, UNMASKED, LayerReport
from modelopt_sparse.runtime.convert import convert, loading_place

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ADAPTERS = re.compile(r"(^|\.)(base_layer\.|lora_)")  # in the names of their tensors
BY_HAND = "no run has pruned it, its mask was set by hand"
EXTRA = "_extra_state"  # the end of the name of what a module keeps beside parameters and buffers (`get_extra_state`)
SHOWN = 20  # how many problems an error names

Read = Callable[[str], Tensor | None]  # name of a tensor -> the tensor, None if there is none

# writing --------------------------------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    overwrite: bool = False,
    companions: Iterable[Any] = (),
    max_shard_size: int | str | None = None,
    packed: bool = False,
) -> None:
    """Write a sparse model to a folder that plain ``from_pretrained`` reads, and that `restore` and `load` check.

    ``companions`` are saved with the model: a tokenizer, a processor, anything with ``save_pretrained``.
    ``max_shard_size`` is that of transformers' ``save_pretrained``. ``packed``: pruned places of weights are not
    stored, as `pack` does: plain ``from_pretrained`` refuses the folder, `unpack` makes a plain one of it.

    A new folder appears only when it is complete. A folder that exists and is not empty is written to with
    ``overwrite=True`` alone: files are replaced one by one, ``sparsity.json`` last; until then the folder has none. No
    process waits for another. If several overwrite the same folder, it is whole when the last one is done.

    Raises ValueError

    - for a path that looks like a pickle file, and for a path that is a file;
    - for a folder that is not empty, or that others have filled meanwhile, without ``overwrite``;
    - whatever ``overwrite`` says, for the current directory and the folders above it, and for the folder that the
      model's weights are known to come from;
    - for values that cannot be saved, no tensors or on the meta device, and for adapters in a model of transformers;
    - for a model of transformers in another rank than 0 of a process group, where transformers writes nothing.

    Raises OSError if the folder cannot be written (a full disk). No partial files are left then.

    >>> mts.save(model, "sparse-model")
    """
    model = usable(model, "saved", packed=True)
    folder = checked_place(folder, overwrite=overwrite, sources=sources_of(model))
    if max_shard_size is not None and not isinstance(model, PreTrainedModel):
        raise ValueError(f"max_shard_size is for transformers' models; a {type(model).__name__} goes into one file")
    if isinstance(model, PreTrainedModel) and rank() > 0:
        raise ValueError(f"transformers writes in rank 0 alone, and this is rank {rank()}: save there, then barrier()")
    state = _tensors(model)
    with staged(folder, overwrite=overwrite) as staging:
        aliases: dict[str, str] = {}
        if isinstance(model, PreTrainedModel):
            options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            save_as_dense(model)
            model.save_pretrained(staging, state_dict=_for_transformers(model, state), **options)
        else:
            aliases = _tied(state)
            unique = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
            homes = Counter(tensor.untyped_storage().data_ptr() for tensor in unique.values())
            # safetensors takes no two tensors of one memory
            unique = {name: x.clone() if homes[x.untyped_storage().data_ptr()] > 1 else x for name, x in unique.items()}
            save_file(unique, staging / WEIGHTS, metadata={"format": "pt"})
            if callable(getattr(model, "save_config", None)):  # diffusers' classes
                hint = (
                    "mts.restore does, and mts.export(model).save_pretrained(folder) writes one for it, without masks"
                )
                warnings.warn(f"{type(model).__name__}.from_pretrained does not read this folder: {hint}", stacklevel=2)
        for companion in companions:
            companion.save_pretrained(staging)
        _write_masks_and_report(model, staging, aliases, packed=packed)


def pack(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> list[str]:
    """Write a packed copy of a folder that `save` wrote, or of a plain folder of transformers -> what was copied
    as it is, and what was left behind, as notes.

    Weights are packed by their masks; those without one by their zeros. What would not get smaller stays as it is.
    `load`, `restore`, `verify` and `report` read the copy, plain ``from_pretrained`` refuses it. ``overwrite`` is that
    of `save`; ``out`` appears only when it is complete.

    Raises ValueError for a folder that is damaged, is packed or holds no model; OSError if ``out`` cannot be written.

    >>> notes = mts.pack("sparse-model", "packed-model")
    """
    return _copy(Path(folder), out, overwrite, packed=False)


def unpack(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> list[str]:
    """Write the plain folder of a packed one, to the bit: what `save` would have written, or what `pack` was given.
    Returns notes as `pack` does.

    ``overwrite`` is that of `save`. Raises ValueError for a folder that is damaged, or not packed; OSError if ``out``
    cannot be written.

    >>> notes = mts.unpack("packed-model", "plain-model")
    """
    return _copy(Path(folder), out, overwrite, packed=True)


def _copy(folder: Path, out: str | Path, overwrite: bool, *, packed: bool) -> list[str]:
    """Write a plain copy of a folder that is ``packed``, a packed one of a plain folder. Returns notes of what lies
    beside the weights."""
    place = checked_place(out, overwrite=overwrite, sources=[folder])
    description = None
    if (folder / DESCRIPTION).is_file() or not (folder / "config.json").is_file():
        description = read_description(folder)
        contents = read_json(folder / DESCRIPTION)
    else:
        names = read_json(folder / "config.json").get("architectures") or [""]
        contents = {**description_of(names[0], {}, None), "plain": True}  # of a folder that `save` did not write
    if is_packed(folder) != packed:
        raise ValueError(f"{str(folder)!r} is {'not ' * packed}packed: there is nothing to do")
    opened_weights(folder)  # the files are whole
    with staged(place, overwrite=overwrite) as staging, ThreadPoolExecutor(1) as pool:
        damaged = pool.submit(damaged_files, folder, description) if description else None  # hashes meanwhile
        notes = copy_companions(folder, staging)
        if "plain" not in contents:
            shutil.copyfile(folder / MASKS, staging / MASKS)
        elif not packed:
            write_masks({}, staging / MASKS)
        if packed:
            unpack_files(folder, staging)
        else:
            pack_files(folder, weight_files(folder), staging, staging / MASKS, contents["files"])
        if not packed or "plain" not in contents:
            write_description(staging, contents)
        _refuse(f"{str(folder)!r} is damaged", [*damaged.result().values()] if damaged else [])
    return notes


def add_masks(model: nn.Module, folder: str | Path) -> None:
    """Write masks and report into a folder that holds the weights of a sparse model already, such as a checkpoint of
    Trainer's, so that `restore` and `load` read it. What was there of them is replaced.

    Raises ValueError if there are no safetensors files of weights, or if they are packed.
    """
    model, folder = unwrapped(model), Path(folder)
    if is_packed(folder):
        raise ValueError(f"{str(folder)!r} is packed by other masks: unpack it, or save the model to another folder")
    weights = opened_weights(folder)
    aliases = {name: shared_name for name, shared_name in _tied(_tensors(model)).items() if name not in weights}
    (folder / DESCRIPTION).unlink(missing_ok=True)
    _write_masks_and_report(model, folder, aliases)


def _write_masks_and_report(
    model: nn.Module, folder: Path, aliases: Mapping[str, str], *, packed: bool = False
) -> None:
    masks = write_masks(dict(named_masks(model)), folder / MASKS)
    if packed:
        pack_files(folder, weight_files(folder), folder, folder / MASKS)
    write_description(folder, description_of(dense_class(model).__name__, masks, _present_report(model), aliases))


def _state(model: nn.Module) -> dict[str, Any]:
    """The state dict without masks, zero at pruned places, with the model's own Parameters and buffers."""
    masks = {id(mask) for _, mask in named_masks(model)}
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) not in masks}


def _values(model: nn.Module, name: str, value: Any) -> Any:
    """A value of the state dict; for a parameter that accelerate has offloaded the tensor that holds its values."""
    path, _, key = name.rpartition(".")
    return stored(model.get_submodule(path), key) if isinstance(value, nn.Parameter) and value.is_meta else value


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is saved.

    Raises ValueError for a value that is no tensor, and for a tensor on the meta device, a sparse or a nested one, or
    one of a dtype that files do not have.
    """
    state = {name: _values(model, name, value) for name, value in _state(model).items()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is a {type(value).__name__}: only tensors can be saved without pickle")
        if value.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values: load the model before saving it")
        if value.layout != torch.strided or value.is_nested:
            advice = "register it with persistent=False, or make it dense"
            raise ValueError(f"{name!r} is a sparse or nested tensor: only dense ones can be saved: {advice}")
        if value.is_quantized or value.dtype in (torch.complex32, torch.complex128):
            raise ValueError(f"{name!r} is {value.dtype}, which safetensors does not store: convert it before saving")
    # files hold the memory of a tensor, which is not conjugated or negated in that of a view that stands for it
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in state.items()}


def _for_transformers(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict for save_pretrained: tensors that share memory in the model, and that ``from_pretrained`` does not
    tie again, are several, else one alone would be written, or none. Raises ValueError for an adapter."""
    if adapters := [name for name in state if ADAPTERS.search(name)]:
        problem = f"{adapters[0]!r} is part of an adapter, for which from_pretrained has no place"
        raise ValueError(f"{problem}: merge it first, for example by merge_and_unload()")
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    firsts: dict[int, str] = {}
    homes = {name: firsts.setdefault(tensor.untyped_storage().data_ptr(), name) for name, tensor in state.items()}
    untied = {name for name, first in homes.items() if declared.get(name, name) != declared.get(first, first)}
    return {name: tensor.clone() if name in untied else tensor for name, tensor in state.items()}


def _tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Aliases: a name whose tensor is that of an earlier name -> the earlier name. A file holds each tensor once."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


# reading --------------------------------------------------------------------------------------------------------------


def restore(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load weights, masks and report of a folder into a model of the same architecture, in place, and return it.

    Everything is checked first:

    - files against their sizes and hashes;
    - names, shapes and dtypes against the model;
    - that every weight is zero where its mask is False.

    Raises one ValueError that lists everything that is wrong, with the model untouched. Masks that the model has are
    replaced by those of the folder.
    """
    folder, inner = checked_path(folder), usable(model, "restored into")
    description, masks, weights, problems = opened_folder(folder)
    name = dense_class(inner).__name__
    if description.model_class != name:
        problems.insert(0, f"it holds a {description.model_class}, the model is a {name}")
    state = _state(inner)
    slots = _slots(inner, state)
    extra = {name: x for name, x in state.items() if name.endswith(EXTRA) and isinstance(x, Tensor)}
    known = [*(names for names, _ in slots), *([name] for name in extra)]
    problems += _misfits(inner, masks, known)
    filled: list[tuple[Tensor, str]] = []
    read: Read = dict[str, Tensor]().get  # nothing, of files that are damaged
    if weights is not None:
        read = _reader(inner, known, folder, description, masks, weights, problems)
        filled = _fill(slots, read, masks, problems)
        extra = {name: read(name) for name in extra}
        problems += [f"{name!r} of the model is not in the folder" for name, state in extra.items() if state is None]
    _refuse(f"{str(folder)!r} cannot be restored into this {name}", problems)
    for name, state in extra.items():  # code of the user's own, which may fail: nothing has been changed yet
        inner.get_submodule(name.rpartition(".")[0]).set_extra_state(state)
    remove_masks(inner)
    with torch.no_grad():
        for values, stored_as in filled:
            tensor = read(stored_as)  # once more: packed ones are not held
            assert tensor is not None, stored_as  # `_fill` has read it
            values.copy_(tensor)
    _attach(inner, folder, masks, description)
    return model


def load(folder: str | Path, *, semi_structured: bool | Mapping[str, Any] = False, **options: Any) -> nn.Module:
    """A sparse model from a Hugging Face folder that `save` wrote, or a hub name of one, masks and report included.

    ``options`` go to ``from_pretrained`` (dtype, device_map, ...). The default of ``dtype`` is the stored one, of
    each tensor. The class is the one named in config.json.

    ``semi_structured=True``, or a mapping of options of `to_semi_structured`, packs the layers for 2:4 kernels on the
    one CUDA device that ``device_map`` names (default: the current one). They are packed one by one on their way to the
    device, so that the dense model is never in the device's memory. Packed layers carry no masks.

    Raises ValueError with a list of everything that is wrong with the folder.

    >>> model = mts.load("sparse-model")
    >>> len(list(mts.named_masks(model)))
    14
    """
    if "output_loading_info" in options:
        raise ValueError("output_loading_info: load raises an error for all that it would name: leave it out")
    path = checked_path(folder)
    if not path.exists() and isinstance(folder, str) and HUB_NAME.fullmatch(folder):
        path = hub_folder(folder, options.get("revision"))
    packing = loading_place(options.pop("device_map", None), semi_structured) if semi_structured is not False else None
    head = f"{str(path)!r} cannot be loaded"
    description, masks, weights, problems = opened_folder(path)
    if not (path / "config.json").is_file():
        name = description.model_class
        raise ValueError(f"{str(path)!r} holds no config.json: build the {name} and call restore(model, folder)")
    _refuse(head, problems)
    assert weights is not None  # else there is a problem
    remote = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    architecture = model_class(AutoConfig.from_pretrained(path, **remote), path)
    model, info = loaded(architecture, path, weights, **options)
    problems += unloaded(info)
    if options.get("dtype", options.get("torch_dtype")) in (None, "auto"):
        _keep_dtypes(model, path, weights)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            problems.append(f"mask {name!r} fits no parameter of {type(model).__name__}")
        elif not parameters[name].is_meta:
            problems += _breaches(name, parameters[name].detach(), mask)
    _refuse(head, problems)
    refuse_what_cannot_be_written(model, {*masks})
    if packing is not None:
        attach_report(model, description.report)
        settings, place = packing
        convert(model, settings, lambda _: place)  # layer by layer, and then the rest
        return model.to(place.device)
    _attach(model, path, masks, description)
    return model


def report(model: nn.Module | str | Path) -> Report:
    """The report of a model that `sparsify`, `restore` or `load` gave back, or of a folder that `save` wrote.

    Raises ValueError if there is none.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        attached, subject = _present_report(model), f"this {type(model).__name__}"
    else:
        attached, subject = read_description(model).report, f"the model in {str(model)!r}"
    if attached is None:
        raise ValueError(f"{subject} carries no report: sparsify did not make it sparse")
    return attached


def _present_report(model: Any) -> Report | None:
    """The report that a model carries. Rows of layers whose masks are others since (`set_mask`, `load_state_dict`), as
    the number of their zeros or the pattern shows, or gone with a module that was replaced, say so, and have their
    zeros. The error went with the old mask; the pattern stays, for `verify` to hold the layer to. Weights that no run
    has pruned, and that carry a mask, say so. Names are those from before PEFT has wrapped model and layers."""
    report = attached_report(model)
    if report is not None:
        known = dict(model.named_parameters(remove_duplicate=False))
        if hasattr(model, "get_base_model") and not any(entry.parameter in known for entry in report.layers):
            model = model.get_base_model()
        masks, layers = dict(named_masks(model)), {layer.parameter_name: layer for layer in find_layers(model)[0]}
        names = {alike: name for name in masks for alike in (name, name.replace(".base_layer.", "."))}
        unmasked = report.unmasked(names)
        by_hand = {x for x in report.skipped if not names.keys().isdisjoint({x.name, f"{x.name}.weight"})}
        report.skipped = tuple(replace(x, reason=BY_HAND) if x in by_hand else x for x in report.skipped)
        for i, entry in enumerate(report.layers):
            if (name := names.get(entry.parameter)) is None:
                report.layers[i] = _without_mask(model, entry, layers.get(entry.parameter), lost=entry.name in unmasked)
                continue
            if (mask := masks[name]).is_meta or mask.numel() != entry.size:
                continue
            matrix = (layers.get(name) or as_row(model, name)).matrix(mask)
            zeros, pattern = mask.numel() - int(mask.count_nonzero()), parse_pattern(entry.pattern)
            if zeros != entry.zeros or (isinstance(pattern, NM) and pattern.count_nonzero_wrong(matrix)):
                report.layers[i] = _changed(entry, f"{REPLACED}, by one of {pattern_of(matrix, pattern)}", zeros=zeros)
    return report


def _without_mask(model: nn.Module, entry: LayerReport, layer: Layer | None, *, lost: bool) -> LayerReport:
    """The row of a layer without a mask. It changes if the mask was ``lost``, or if fewer zeros are there than it says,
    unless the layer is packed, or its values are not in memory."""
    path, _, name = entry.parameter.rpartition(".")
    module = dict(model.named_modules()).get(path)
    module = getattr(module, "base_layer", module)  # inside of PEFT's
    values = stored(module, name) if module is not None and name in dict(module.named_parameters()) else None
    if isinstance(module, PackedLayer) or (values is not None and values.is_meta):
        return entry
    if values is None:
        return _changed(entry, f"{UNMASKED}: {entry.parameter!r} is not in the model", zeros=0)
    zeros = values.numel() - int(values.count_nonzero())
    if not (lost or zeros < entry.zeros or values.numel() != entry.size):
        return entry
    shape = list((values if layer is None else layer.matrix(values)).shape)
    return _changed(entry, UNMASKED, zeros=zeros, shape=shape, size=values.numel())


def _changed(entry: LayerReport, note: str, **facts: Any) -> LayerReport:
    """The row of a layer that has another mask since, or none, with a note that says so."""
    notes = [note for note in entry.notes if not note.startswith((REPLACED, UNMASKED))]
    return replace(entry, **facts, error=None, steps=[], notes=[*notes, note])


def _misfits(model: nn.Module, masks: Mapping[str, Tensor], known: list[list[str]]) -> Iterator[str]:
    """What keeps masks from the parameters of a model; ``known``: the names of its tensors."""
    names = {alike for names in known for alike in names}
    for name in masks:
        if name not in names:
            yield f"mask {name!r} fits no parameter of the model"
            continue
        try:
            refuse_what_cannot_be_sparse(model, name)
        except ValueError as error:
            yield str(error)


def _unwritable(values: Tensor) -> str:
    """Why a tensor of the model cannot be written to, and what to do; "" if it can."""
    if values.is_meta:
        return "on the meta device, where there are no values: build the model on a device first"
    if is_sharded(values):
        return "sharded over processes (DTensor): restore into the model before it is sharded"
    if values.is_inference() and not torch.is_inference_mode_enabled():
        return "made in torch.inference_mode, for reading alone: build the model outside of it"
    if any(stride == 0 and size > 1 for stride, size in zip(values.stride(), values.shape)):
        return "several entries in one place of memory (expand): clone it first"
    return ""


def _fill(
    slots: list[tuple[list[str], Tensor]], read: Read, masks: Mapping[str, Tensor], problems: list[str]
) -> list[tuple[Tensor, str]]:
    """Pairs of a tensor of the model and the folder's name for it. What is wrong is appended to ``problems``."""
    filled: list[tuple[Tensor, str]] = []
    shared: dict[str, list[str]] = defaultdict(list)  # what is wrong, and what to do -> names
    for names, values in slots:
        if fault := _unwritable(values):
            shared[fault].append(repr(names[0]))
            continue
        alike = {name: tensor for name in names if (tensor := read(name)) is not None}
        if not alike:
            problems.append(f"{names[0]!r} of the model is not in the folder")
            continue
        stored_as, tensor = next(iter(alike.items()))
        filled.append((values, stored_as))
        for name, written in alike.items():
            if written.shape != values.shape:
                problems.append(f"{name!r} has shape {list(written.shape)} there and {list(values.shape)} in the model")
            elif written.dtype != values.dtype:
                advice = f"convert it first, model.to({written.dtype})"
                shared[f"{written.dtype} there and {values.dtype} in the model: {advice}"].append(repr(name))
            elif written is not tensor and not torch.equal(written, tensor):
                problems.append(f"{name!r} and {names[0]!r} are one tensor in the model and differ there")
            elif name in masks and masks[name].shape != written.shape:
                problems.append(f"mask {name!r} has shape {list(masks[name].shape)}, its weight {list(written.shape)}")
            elif name in masks:
                problems += _breaches(name, written, masks[name])
    for fault, names in shared.items():
        reason, _, advice = fault.partition(": ")
        problems.append(f"{reason}: {first_few(names, 1)}; {advice}")
    return filled


def _reader(
    model: nn.Module,
    known: list[list[str]],
    folder: Path,
    description: Description,
    masks: Mapping[str, Tensor],
    weights: Mapping[str, Any],
    problems: list[str],
) -> Read:
    """A function that reads the folder's tensor for one of the model's names.

    transformers stores some models under other names than they have in memory. For these it loads the folder into a
    second model, which takes the memory of the weights once more.
    """
    same_class = description.model_class == dense_class(model).__name__
    if isinstance(model, PreTrainedModel) and same_class and any(map(weights.keys().isdisjoint, known)):
        fresh, info = loaded(dense_class(model), folder, weights, dtype="auto")
        problems += unloaded(info)
        _keep_dtypes(fresh, folder, weights)
        return fresh.state_dict().get
    for name in sorted(set(weights).difference(*known)):
        mask = masks.get(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
        if mask is None:
            problems.append(f"{name!r} has no place in the model")
        elif not torch.equal(mask, weights[name].get_tensor(name)):  # Trainer saves masks of plain modules so
            problems.append(f"{name!r} is not the same in the weight files and in {MASKS}")

    def read(name: str) -> Tensor | None:
        stored_as = description.aliases.get(name, name)
        return weights[stored_as].get_tensor(stored_as) if stored_as in weights else None

    return read


def _keep_dtypes(model: Any, folder: Path, weights: Mapping[str, Any]) -> None:
    """Read tensors of a folder again that ``from_pretrained`` has given another dtype: it gives one to all of them, but
    for those that their class keeps wide. Warns of those that it has narrowed and that cannot be read again."""
    entries = {name: entry for file in weight_files(folder) for name, entry in plain_tensors(folder / file).items()}
    dtypes = {name: DENSE[entry["dtype"]] for name, entry in entries.items() if entry["dtype"] in DENSE}
    state, wide, general, left = model.state_dict(keep_vars=True), kept_wide(model), model.dtype, list[str]()
    for name, dtype in dtypes.items():
        if name in state and not state[name].is_meta:
            if state[name].dtype != (right := dtype_of(name, wide, dtype)):
                state[name].data = weights[name].get_tensor(name).to(state[name].device, right)
        elif torch.promote_types(dtype, now := dtype_of(name, wide, general)) != now:
            left.append(f"{name!r} ({dtype})")
    if left:
        warnings.warn(f"not loaded as stored, in {general}: {first_few(left)}: give dtype=", stacklevel=3)


def _slots(model: nn.Module, state: Mapping[str, Any]) -> list[tuple[list[str], Tensor]]:
    """(all names of a tensor, the tensor to write to), for everything in the model's state dict but extra states."""
    slots: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in state.items():
        if not name.endswith(EXTRA):
            slots.setdefault(id(value), ([], _values(model, name, value)))[0].append(name)
    return list(slots.values())


def _breaches(name: str, weight: Tensor, mask: Tensor) -> Iterator[str]:
    """What is wrong with a weight that is not zero where its mask is False."""
    if count := int(weight[~mask.to(weight.device)].count_nonzero()):
        yield f"weight {name!r} is not zero in {count} places where its mask is False"


def _attach(model: nn.Module, folder: Path, masks: Mapping[str, Tensor], description: Description) -> None:
    for name, mask in masks.items():
        set_mask(model, name, mask)
    attach_report(model, description.report)
    setattr(model, SOURCE, str(folder.resolve()))


def _refuse(head: str, problems: list[str]) -> None:
    """Raise ValueError with ``head`` and the first SHOWN of the problems, if there are any."""
    shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
    if shown:
        raise ValueError(f"{head}: {shown[0]}" if len(shown) == 1 else "\n- ".join([f"{head}:", *shown]))
