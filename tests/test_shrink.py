"""`shrink` and `plan_shrink`: plain models that are smaller, of many classes, against slow obvious oracles."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import modelopt_sparse as mts
from tests.models.shrinkable import BLOCKS, CLASSES, NO_WIDTH, WIDTH, calls, shrinkable

USUAL = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def with_zeros(model: nn.Module, kept: dict[str, list[int]]) -> nn.Module:
    """The model, whose layers take zeros for all other channels: a hook on each."""
    for name, indices in kept.items():
        layer = model.get_submodule(name)
        mask = torch.zeros(layer.weight.shape[0 if type(layer).__name__ == "Conv1D" else 1])
        mask[indices] = 1
        layer.register_forward_pre_hook(lambda module, args, mask=mask: (args[0] * mask,))
    return model


def with_skipped(blocks: nn.ModuleList, kept: Sequence[int]) -> None:
    """Blocks put out what they get."""

    def skip(module: nn.Module, args: tuple, kwargs: dict[str, Any], found: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(found, Tensor) else (hidden, *found[1:])

    for place, block in enumerate(blocks):
        if place not in kept:
            block.register_forward_hook(skip, with_kwargs=True)


def reloaded(model: PreTrainedModel, folder: Any) -> PreTrainedModel:
    model.save_pretrained(folder)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return loaded.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NO_WIDTH])
def test_fewer_channels_are_zeros_in_their_place(name, tmp_path):
    model = shrinkable(name)
    batches = list(calls(model))
    dense = copy.deepcopy(model)
    mts.shrink(model, mlp=0.25, refit=False, multiple_of=1, data_loader=batches, progress=False)
    kept = mts.report(model).shrunk.kept["mlp"]
    widths = {len(indices) for indices in kept.values()}
    assert len(widths) == 1
    assert len(kept) >= 3
    wanted = output(with_zeros(dense, kept), batches[0])
    assert 1e-3 < (wanted - output(shrinkable(name), batches[0])).abs().max()
    torch.testing.assert_close(output(model, batches[0]), wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if "T5" not in name])
def test_fewer_blocks_are_skipped_ones(name, tmp_path):
    model = shrinkable(name)
    batches = list(calls(model))
    mts.shrink(model, blocks=1, data_loader=batches, progress=False)
    ((stack, kept),) = mts.report(model).shrunk.kept["blocks"].items()
    assert len(kept) == BLOCKS - 1 == len(model.get_submodule(stack))
    dense = shrinkable(name)
    with_skipped(dense.get_submodule(stack), kept)
    torch.testing.assert_close(output(model, batches[0]), output(dense, batches[0]), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output(reloaded(model, tmp_path), batches[0]), output(model, batches[0]))
    written = model.config.to_dict()
    assert BLOCKS - 1 in [written.get(key) for key in USUAL]
    assert len(written.get("layer_types") or kept) == BLOCKS - 1


@pytest.mark.parametrize("name", NO_WIDTH)
def test_models_without_one_width_are_refused(name):
    model = shrinkable(name)
    with pytest.raises(ValueError, match=NO_WIDTH[name]):
        mts.plan_shrink(model, mlp=0.25)
