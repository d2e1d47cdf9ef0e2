"""Sparse training in checkpoints, of Trainer and of Cerebras.

Trainer's checkpoints hold weights and no masks. Under older masks all that has grown since would be zeroed. So
`SparsityCallback` writes masks beside the weights, and reads both back.

Cerebras' first sparse checkpoints hold NaN for pruned weights. A model must never run with those: `from_sentinel` gives
masks and zeros instead, and `finalize` writes a file with zeros and no masks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from modelopt_sparse.checkpoint.folder import DESCRIPTION, PICKLES
from modelopt_sparse.checkpoint.packed import opened_weights
from modelopt_sparse.checkpoint.save import add_masks, restore
from modelopt_sparse.distributed import is_fully_sharded
from modelopt_sparse.model.devices import unwrapped
from modelopt_sparse.model.masking import SUFFIX, SparseModule, named_masks
from modelopt_sparse.reports.text import in_one_piece
from modelopt_sparse.training.sparsity import Sparsity

# Trainer --------------------------------------------------------------------------------------------------------------


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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model = unwrapped(kwargs["model"])
        if is_fully_sharded(model) or args.deepspeed or hasattr(model, "peft_config"):
            wrong = "SparsityCallback goes with checkpoints of whole models, unlike those of FSDP, DeepSpeed and PEFT"
            raise ValueError(f"{wrong}: write the loop yourself (docs/training.md)")
        if state.global_step > 0:
            folder = self.resume_from or _checkpoint(args, state.global_step)
            _read_back(model, folder, resumes=True)
            self.sparsity.go_on(model, state.global_step, str(folder))
        elif not self.sparsity.sparse_params:
            self.sparsity.apply(model)
        self.sparsity.release()  # of the optimizer of an earlier train()
        self.sparsity.apply(kwargs["optimizer"])
        if args.load_best_model_at_end:
            _tell_losses(model, False)  # Trainer loads weights under other masks, and then `on_train_end` reads both

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.sparsity.write_trainer_step(state.global_step)
            add_masks(kwargs["model"], _checkpoint(args, state.global_step))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:
            _read_back(unwrapped(kwargs["model"]), Path(state.best_model_checkpoint))
            _tell_losses(unwrapped(kwargs["model"]), True)


def _tell_losses(model: nn.Module, tell: bool) -> None:
    """Whether a warning says what masks throw away."""
    for child in model.modules():
        if isinstance(child, SparseModule):
            child.masks_told = () if tell else child.masked_names


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _read_back(model: nn.Module, folder: Path, *, resumes: bool = False) -> None:
    """Weights, masks and report of a checkpoint; Trainer has loaded the weights, but under other masks. Where training
    ``resumes``, it has not said from which folder."""
    advice = "name the checkpoint as resume_from=folder"
    if not (folder / DESCRIPTION).is_file():
        raise ValueError(f"{str(folder)!r} holds no masks ({DESCRIPTION}): {advice}")
    stored, masked = opened_weights(folder) if resumes else {}, {name for name, _ in named_masks(model)}
    for name, parameter in model.named_parameters():
        if name in stored and name not in masked:
            values = stored[name].get_tensor(name).to(parameter)
            if values.shape != parameter.shape or not torch.equal(values, parameter):
                raise ValueError(f"Trainer has loaded another {name!r} than that of {str(folder)!r}: {advice}")
    restore(model, folder)


# NaN ------------------------------------------------------------------------------------------------------------------


def to_sentinel(state: Mapping[str, Any], optimizer_state: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """A sparse model's state dict with NaN where its masks are False, and without the masks; nothing else changes.

    ``optimizer_state``: name of a parameter -> its state tensors by name. Those of the parameter's shape get NaN as
    well, in place.
    """
    marked = dict(state)
    for name, mask in _taken_masks(marked).items():
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
            wide = value.float() if value.element_size() == 1 else value  # torch asks no float8 for NaN
            if wide.isinf().any():
                raise ValueError(f"{name!r} holds inf, which marks no pruned weight: the checkpoint is damaged")
            if (pruned := wide.isnan()).any():
                sparse[name] = wide.masked_fill(pruned, 0).to(value.dtype)
                sparse[name + SUFFIX] = ~pruned
    return sparse


def finalize(source: str | Path, destination: str | Path) -> tuple[dict[str, Tensor], int]:
    """Copy a safetensors file, with 0 in the place of every NaN -> (the masks, by name; how many tensors there are).

    The copy holds no masks. Raises ValueError for any other kind of file, for a destination that exists, and for inf.
    """
    source, destination = Path(source), Path(destination)
    for path in (source, destination):
        if path.suffix in (*PICKLES, ".mdl"):  # .mdl: Cerebras' HDF5
            raise ValueError(f"{str(path)!r} is no safetensors file: write its state dict as safetensors")
    if destination.exists():
        raise ValueError(f"{str(destination)!r} exists already: give the name of a new file")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(source)!r} cannot be read as safetensors: {error}") from None
    sparse = from_sentinel(state)
    masks = _taken_masks(sparse)
    with in_one_piece(destination) as unfinished:
        save_file(sparse, unfinished, metadata=metadata)
    return masks, len(sparse)


def _taken_masks(state: dict[str, Any]) -> dict[str, Tensor]:
    """The masks of a state dict, by the names of their weights, taken out of it."""
    names = [name for name in state if name + SUFFIX in state and state[name + SUFFIX].dtype == torch.bool]
    return {name: state.pop(name + SUFFIX) for name in names}
