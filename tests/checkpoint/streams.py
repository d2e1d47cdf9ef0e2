"""Dense folders, what is made of them in memory and as a stream, and whether that is the same."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.streamed import Streamed
from modelopt_sparse.methods.scores import Wanda
from modelopt_sparse.model.hf import model_class
from tests.helpers import assert_alike, assert_equal, token_batches
from tests.models.tiny import VOCAB


def saved(folder: Path, make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(3)
    model: Any = make().to(dtype)
    model.save_pretrained(folder, **options)
    return folder


def batches(name: str = "llama", count: int = 4, seed: int = 1) -> list[dict[str, Tensor]]:
    ids = token_batches(count, length=12, vocab=VOCAB, seed=seed)
    if name == "t5":
        return [{"input_ids": x, "decoder_input_ids": x[:, :5]} for x in ids]
    masks = [torch.ones_like(x) for x in ids]
    masks[1][0, 9:] = 0
    return [{"input_ids": x, "attention_mask": mask} for x, mask in zip(ids, masks)]


def in_memory(source: Path, folder: Path, method: Any, **options: Any) -> Path:
    """The oracle: the whole model loaded, made sparse and saved."""
    cls = model_class(AutoConfig.from_pretrained(source), source)
    model = cls.from_pretrained(source, dtype=options.pop("dtype", "auto"))
    mts.save(mts.sparsify(model, method, progress=False, **options), folder)
    return folder


def streamed(source: Path, folder: Path, method: Any, **options: Any) -> mts.Report:
    return mts.sparsify_checkpoint(source, folder, method, progress=False, **options)


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found.update(load_file(path))
    return found


def assert_same_folders(one: Path, other: Path) -> None:
    """Equal tensors to the bit, under equal names; equal bytes of masks, equal configs; and both are whole."""
    assert_equal(weights(one), weights(other))
    masks = "sparsity_masks.safetensors"
    assert (one / masks).read_bytes() == (other / masks).read_bytes()
    for name in ("config.json", "generation_config.json"):
        here, there = (json.loads((x / name).read_text()) if (x / name).is_file() else None for x in (one, other))
        assert here == there
    if mts.report(one).layers:  # else nothing is sparse
        assert str(mts.verify(one)) == str(mts.verify(other))


def assert_alike_folders(one: Path, other: Path) -> None:
    """What sums of other roundings have made; and both are whole."""
    assert_alike(*(mts.load(folder).state_dict() for folder in (one, other)))
    assert str(mts.verify(one)) == str(mts.verify(other))


@contextmanager
def blocks_in_memory() -> Iterator[list[int]]:
    """How many blocks of what is streamed within have all of their weights, whenever one of them has been read."""
    counts: list[int] = []
    fill = Streamed._fill  # pyright: ignore[reportPrivateUsage]

    def counting(self: Any, block: Any) -> None:
        fill(self, block)
        own = [self._parameters(block).values() for block in self._own]
        sizes = [[(p.untyped_storage().nbytes(), p.numel() * p.element_size()) for p in block] for block in own]
        counts.append(sum(any(held >= size for held, size in block) for block in sizes))

    with patch.object(Streamed, "_fill", counting):
        yield counts


class Stopping(Wanda):
    """Wanda that is interrupted at its ``at``-th layer, once."""

    name = "stopping"

    def __init__(self, at: int) -> None:
        self.left = at

    def solve(self, weight, state, pattern, options):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().solve(weight, state, pattern, options)
