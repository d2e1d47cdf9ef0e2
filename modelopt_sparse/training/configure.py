"""Sparse training from a configuration: the ``sparsity`` section of a YAML file, in all spellings that Cerebras had.

| spelling | becomes |
| --- | --- |
| a number | static, at that level |
| a list of mappings | a `Group`, in that order |
| ``type`` | ``algorithm`` |
| ``schedule`` with ``freq`` or ``steps`` in it | ``update`` |
| any other ``schedule`` | ``sparsity`` |
| ``sparsity_schedule: [[step, level], ...]`` | the levels as ``sparsity``, the steps as ``update`` |
| ``param_name_patterns``: one or several regular expressions | ``include``, matched by search |
| ``param_name_patterns``: a mapping of them to options | a `Group`; the options around it are defaults |
| ``param_filter``: one or several globs | ``include``, matched whole |
| neither of these | ``include="default"`` |
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from modelopt_sparse.checkpoint.folder import DESCRIPTION
from modelopt_sparse.checkpoint.save import add_masks, restore
from modelopt_sparse.distributed import is_fully_sharded
from modelopt_sparse.model.masking import SUFFIX
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.reports.fold import nearest
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm
from modelopt_sparse.training.planner import DEFAULT
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.values import read_yaml

# configure ------------------------------------------------------------------------------------------------------------


SECTION, IFT = "sparsity", "sparse_ift"
NAMES = ("param_name_patterns", "param_filter", "include")


def configure(config: Any) -> Sparsity:
    """Sparse training as a configuration says: a YAML file with a section ``sparsity``, what such a section holds (a
    mapping, a list of mappings, a level), or a mapping with that section in it.

    Other sections of a file (model, optimizer) are not looked at. ``algorithm`` is the name of any class that inherits
    from `SparsityAlgorithm`, your own included, in upper or lower case; the default is static. All other keys are
    options of that class, or stand in the table of spellings (training/configure.py, docs/sparse-training.md).

    Raises ValueError for a file without that section, and for keys, names and values that are not known.

    >>> training.configure("recipe.yaml").apply(model)
    >>> training.configure({"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 100}}).apply(model)
    """
    if isinstance(config, (str, Path)):
        return _of_section(_section_of(Path(config)), SECTION)
    if isinstance(config, Mapping):
        inner = config.get(SECTION)
        whole_file = isinstance(inner, Mapping) and "type" not in inner
        whole_file |= isinstance(inner, list) and any(isinstance(each, Mapping) for each in inner)
        return _of_section(inner if whole_file else config, SECTION)
    return _of_section(config, SECTION)


def content_of(path: Path) -> Any:
    """What a YAML file holds. Raises ValueError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as YAML: {error}") from None
    return read_yaml(text, repr(str(path)))


def _section_of(path: Path) -> Any:
    content = content_of(path)
    if isinstance(content, Mapping) and IFT in content:
        raise ValueError(
            f"{str(path)!r} holds a section {IFT!r}, which changes layers: call training.configure_sparse_ift with it "
            "and the model"
        )
    if not isinstance(content, Mapping) or SECTION not in content:
        raise ValueError(
            f"{str(path)!r} holds no section {SECTION!r} beside model and optimizer: without one, nothing is trained "
            "sparse, and a checkpoint with NaN for pruned weights has to be finalized first (modelopt-sparse finalize)"
        )
    return content[SECTION]


def _of_section(section: Any, where: str) -> Sparsity:
    if isinstance(section, float):
        return algorithm_of({"sparsity": section}, where)
    if isinstance(section, Sequence) and not isinstance(section, str):
        group = Group()
        for number, entry in enumerate(section):
            _add(group, entry, f"{where}[{number}]")
        group.members()  # raises for an empty one
        return group
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}: {section!r} is neither a level such as 0.9, a mapping, nor a list of mappings")
    patterns = section.get("param_name_patterns")
    if isinstance(patterns, Mapping):
        shared = {key: value for key, value in section.items() if key != "param_name_patterns"}
        group = Group()
        for pattern, options in patterns.items():
            block = f"{where}: param_name_patterns[{pattern!r}]"
            if not isinstance(options, Mapping):
                raise ValueError(f"{block} is {options!r}, and must be a mapping such as {{sparsity: 0.5}}")
            _add(group, {**shared, **options, "param_name_patterns": pattern}, block)
        return group
    return algorithm_of(section, where)


def _add(group: Group, entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r}, and must be a mapping")
    include = _include(entry, where)
    rest = {key: value for key, value in entry.items() if key not in NAMES}
    if "sparsity" in rest and rest["sparsity"] is None:
        group.add(include, None)
    else:
        group.add(include, algorithm_of(rest, where, in_group=True))


def algorithm_of(section: Mapping[str, Any], where: str, *, in_group: bool = False) -> SparsityAlgorithm:
    """The algorithm that a mapping describes, for the parameters that it names; ``in_group``: the group names them."""
    options = _translated(section, where)
    name = options.pop("algorithm", "static")
    cls = _class_of(name, where)
    if not in_group:
        options["include"] = _include(section, where)
    for key in NAMES[:2]:
        options.pop(key, None)
    allowed = _options_of(cls)
    for key in options:
        if key not in allowed:
            known = [*allowed, "algorithm", *NAMES]
            raise ValueError(
                f"{where}: {cls.__name__} has no option {key!r}{nearest(key, known)}; it takes {_list(known)}"
            )
    if isinstance(options.get("sparsity"), int):
        raise ValueError(f"{where}: sparsity is {options['sparsity']!r}, and must be a fraction such as 0.3")
    try:
        return cls(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _translated(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A section in the present spelling."""
    options = dict(section)
    if "type" in options:
        _rename(options, "type", "algorithm", where)
    schedule = options.get("schedule")
    if schedule is not None:
        is_update = isinstance(schedule, Mapping) and not {"freq", "steps"}.isdisjoint(schedule)
        _rename(options, "schedule", "update" if is_update else "sparsity", where)
    if "sparsity_schedule" in options:
        pairs = options.pop("sparsity_schedule")
        if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{where}: sparsity_schedule is {pairs!r}, and must be a list of [step, level]")
        for key, value in (("sparsity", [level for _, level in pairs]), ("update", {"steps": [s for s, _ in pairs]})):
            if key in options:
                raise ValueError(f"{where}: give sparsity_schedule or {key}, not both")
            options[key] = value
    return options


def _rename(options: dict[str, Any], old: str, new: str, where: str) -> None:
    if new in options:
        raise ValueError(f"{where}: {old} is another word for {new} here: give one of them")
    options[new] = options.pop(old)


def _include(section: Mapping[str, Any], where: str) -> Any:
    named = [key for key in NAMES if section.get(key) is not None]
    if len(named) > 1:
        raise ValueError(f"{where}: give one of {' and '.join(named)}")
    if not named:
        return DEFAULT
    value = section[named[0]]
    if named[0] != "param_name_patterns":
        return value
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f"{where}: param_name_patterns is {value!r}: give a regular expression, several, or a mapping")
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"{where}: param_name_patterns holds no regular expression: {error}") from None


def _class_of(name: Any, where: str) -> type[SparsityAlgorithm]:
    known: dict[str, type[SparsityAlgorithm]] = {}
    waiting: list[type[SparsityAlgorithm]] = [SparsityAlgorithm]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if not inspect.isabstract(cls):
            known[cls.__name__.lower()] = cls
    if str(name).lower() not in known:
        names = sorted(known)
        raise ValueError(f"{where}: algorithm {name!r} is not known{nearest(name, names)}; there are {_list(names)}")
    return known[str(name).lower()]


def _options_of(cls: type) -> list[str]:
    """Names of all options of a class, those that it hands on included."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        own = vars(base).get("__init__")
        if own is not None:
            for parameter in list(inspect.signature(own).parameters.values())[1:]:
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    names[parameter.name] = None
    return list(names)


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names)))


# callback -------------------------------------------------------------------------------------------------------------
# Sparse training in Hugging Face's Trainer: applied at its start, saved in its checkpoints, resumed from them.
#
# Trainer's checkpoints hold weights and no masks. Loaded into a model whose masks are older, all that has grown since
# would be zeroed without a word. So masks are written beside them, and read back with the weights.


class SparsityCallback(TrainerCallback):
    """Sparse training in Trainer.

    >>> Trainer(model, args, train_dataset=data, callbacks=[SparsityCallback(RigL(0.9, scope="row", include="blocks"))])

    sparsity: it is applied to the model when training starts, unless it has been, and to the optimizer.
    resume_from: the checkpoint that ``trainer.train(resume_from_checkpoint=...)`` gets, if it lies elsewhere than in
      ``output_dir``.

    Resuming and ``load_best_model_at_end`` bring weights and masks of the checkpoint back together; the model may be
    freshly built. Raises ValueError, which names the folder, if a checkpoint has no masks, or if its files do not
    belong together.
    """

    def __init__(self, sparsity: Sparsity, resume_from: str | Path | None = None) -> None:
        self.sparsity = sparsity
        self.resume_from = None if resume_from is None else Path(resume_from)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del control
        model = unwrapped(kwargs["model"])
        if is_fully_sharded(model) or args.deepspeed:
            raise ValueError(
                "SparsityCallback serves Trainer on one device and with DistributedDataParallel; for FSDP2 write the "
                "loop yourself and save with distributed checkpoints (docs/sparse-training.md)"
            )
        if state.global_step > 0:
            folder = self.resume_from or _checkpoint(args, state.global_step)
            _read_back(model, folder)
            self.sparsity.go_on(model, state.global_step, str(folder))
        elif not self.sparsity.sparse_params:
            self.sparsity.apply(model)
        self.sparsity.apply(kwargs["optimizer"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        del control
        if state.is_world_process_zero:
            add_masks(kwargs["model"], _checkpoint(args, state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del control
        if args.load_best_model_at_end and state.best_model_checkpoint:
            _read_back(unwrapped(kwargs["model"]), Path(state.best_model_checkpoint))


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _read_back(model: nn.Module, folder: Path) -> None:
    """Weights, masks and report of a checkpoint; Trainer has loaded the weights, but under other masks."""
    if not (folder / DESCRIPTION).is_file():
        raise ValueError(
            f"{str(folder)!r} holds no masks ({DESCRIPTION}): it was written without SparsityCallback, or lies "
            "elsewhere, which SparsityCallback(sparsity, resume_from=folder) says"
        )
    restore(model, folder)


# sentinel -------------------------------------------------------------------------------------------------------------
# NaN in the place of pruned weights: how the checkpoints of Cerebras' first sparse releases say what is pruned.
#
# A model must never run with such weights. `from_sentinel` gives masks and weights with zeros instead, and `finalize`
# writes a file that holds zeros and no pattern.


PICKLES = (".mdl", ".pt", ".pth", ".bin", ".ckpt")


def to_sentinel(state: Mapping[str, Any], optimizer_state: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """A sparse model's state dict with NaN where its masks are False, and without the masks; nothing else changes.

    ``optimizer_state``: name of a parameter -> its state tensors by name. Those of the parameter's shape get NaN as
    well, in place.
    """
    masks = {name.removesuffix(SUFFIX): mask for name, mask in state.items() if _is_mask(name, state)}
    marked = {name: value for name, value in state.items() if not _is_mask(name, state)}
    for name, mask in masks.items():
        marked[name] = marked[name].masked_fill(~mask, torch.nan)
        for value in (optimizer_state or {}).get(name, {}).values():
            if isinstance(value, Tensor) and value.shape == mask.shape and value.is_floating_point():
                value.masked_fill_(~mask, torch.nan)
    return marked


def from_sentinel(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `to_sentinel`: zeros where there is NaN, and a mask beside every tensor that holds one.

    Raises ValueError for inf, which marks nothing: the file is damaged.
    """
    sparse: dict[str, Any] = {}
    for name, value in state.items():
        sparse[name] = value
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.isinf().any():
                raise ValueError(f"{name!r} holds inf, which marks no pruned weight: the checkpoint is damaged")
            if (pruned := value.isnan()).any():
                sparse[name] = value.masked_fill(pruned, 0)
                sparse[name + SUFFIX] = ~pruned
    return sparse


def finalize(source: str | Path, destination: str | Path) -> tuple[dict[str, Tensor], int]:
    """Copy a safetensors file, with 0 in the place of every NaN -> (the masks, by name; how many tensors there are).

    The copy knows nothing of the masks.

    Raises ValueError for any other kind of file, for a destination that exists, and for inf.
    """
    source, destination = Path(source), Path(destination)
    for path in (source, destination):
        if path.suffix in PICKLES:
            raise ValueError(
                f"{str(path)!r} looks like a pickle file, which this library neither reads nor writes; in Python:\n"
                '    state = torch.load("checkpoint.mdl", weights_only=True)\n'
                '    safetensors.torch.save_file(state["model"], "checkpoint.safetensors")'
            )
    if destination.exists():
        raise ValueError(f"{str(destination)!r} exists already: give the name of a new file")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(source)!r} cannot be read as safetensors: {error}") from None
    sparse = from_sentinel(state)
    masks = {name.removesuffix(SUFFIX): sparse.pop(name) for name in list(sparse) if _is_mask(name, sparse)}
    save_file(sparse, destination, metadata=metadata)
    return masks, len(sparse)


def _is_mask(name: str, state: Mapping[str, Any]) -> bool:
    """Whether a tensor is the mask of another one of the state dict."""
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in state and state[name].dtype == torch.bool
