"""Sparse training in Hugging Face's Trainer: applied at its start, saved in its checkpoints, resumed from them.

Trainer's checkpoints hold weights and no masks. Loaded into a model whose masks are older, all that has grown since
would be zeroed without a word. So masks are written beside them, and read back with the weights.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from modelopt_sparse.checkpoint.format import DESCRIPTION
from modelopt_sparse.checkpoint.restore import restore
from modelopt_sparse.checkpoint.save import add_masks
from modelopt_sparse.distributed import is_fully_sharded
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.training.sparsity import Sparsity


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
