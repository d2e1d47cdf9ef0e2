"""Models in the wrappers of torch.compile, DataParallel, DistributedDataParallel and activation checkpointing: as if
these were not there."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import modelopt_sparse as mts
from tests.checkpoint.streams import assert_same_folders
from tests.helpers import assert_same_masks, assert_same_state, refused, state_of, tiny_llama, token_batches

# DistributedDataParallel wants a process group
pytestmark = [pytest.mark.core, pytest.mark.usefixtures("group_of_one")]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "checkpointed": checkpoint_wrapper,
    "several": lambda model: compiled(nn.DataParallel(compiled(model))),
}
OPTIONS: dict[str, Any] = {"method": "sparsegpt", "data_loader": token_batches(), "progress": False}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return mts.sparsify(tiny_llama(), **OPTIONS)


def without_times(report: mts.Report) -> list[tuple]:
    return [(layer.name, layer.parameter, layer.recipe, layer.zeros, layer.error) for layer in report.layers]


@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapped_model_is_pruned_saved_and_restored_like_the_one_inside(tmp_path, plain, name):
    inner = tiny_llama()
    wrapped = WRAPS[name](inner)
    assert str(mts.make_plan(wrapped, **OPTIONS)) == str(mts.make_plan(tiny_llama(), **OPTIONS))
    assert mts.sparsify(wrapped, **OPTIONS) is wrapped
    assert_same_state(inner, state_of(plain))
    assert without_times(mts.report(wrapped)) == without_times(mts.report(plain))
    assert_same_masks(wrapped, plain)
    assert str(mts.verify(wrapped)) == str(mts.verify(plain))

    for folder, model in (("wrapped", wrapped), ("plain", plain)):
        mts.save(model, tmp_path / folder)
    assert_same_folders(tmp_path / "wrapped", tmp_path / "plain")
    assert_same_state(mts.load(tmp_path / "wrapped"), state_of(plain))

    again = WRAPS[name](tiny_llama(initializer_range=0.5))
    assert mts.restore(again, tmp_path / "wrapped") is again
    assert str(mts.verify(again)) == str(mts.verify(plain))
    refused(mts.save, again, tmp_path / "wrapped", overwrite=True, match="is the folder that the weights come from")
    assert mts.export(again) is again
    assert not list(mts.named_masks(again))
    assert type(inner.model.layers[0].mlp.up_proj) is not nn.Linear


@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapped_model_computes_and_trains_with_its_masks(name):
    """Also one that was compiled, and called, when it was dense."""
    plain, wrapped = tiny_llama(num_hidden_layers=1), WRAPS[name](tiny_llama(num_hidden_layers=1))
    (ids,) = token_batches(1)
    dense = wrapped(input_ids=ids).logits
    for each in (plain, wrapped):
        mts.sparsify(each, "magnitude", progress=False)
    sparse = wrapped(input_ids=ids).logits
    torch.testing.assert_close(sparse, plain(input_ids=ids).logits)
    assert not torch.allclose(sparse, dense)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for parameter in wrapped.parameters():  # older than the masks
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    mts.attach_optimizer(optimizer, wrapped)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    mts.verify(wrapped, "2:4")


@pytest.mark.parametrize("name", WRAPS)
def test_masks_of_a_wrapped_model_go_by_the_names_of_the_one_inside(name):
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    wrapped, mask = WRAPS[name](model), torch.tensor([[True, False], [False, True]])
    mts.set_mask(wrapped, "1.weight", mask)
    assert_same_masks(wrapped, {"1.weight": mask})
    model(torch.ones(3, 4)).sum().backward()
    assert not model[1].weight.grad[~mask].any()


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("wrap", [torch.compile, in_place])
def test_nothing_is_compiled_while_a_compiled_model_is_pruned(plain, wrap):
    """A loop of the user's may call the wrapper itself."""
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    wrapped: Any = wrap(tiny_llama(), backend=backend)

    def loop(_model):
        for ids in token_batches():
            wrapped(input_ids=ids)

    mts.sparsify(wrapped, "sparsegpt", forward_loop=loop, progress=False)
    assert not calls
    for (_, mask), (_, expected) in zip(mts.named_masks(wrapped), mts.named_masks(plain)):
        assert (mask == expected).float().mean() > 0.99
    wrapped(input_ids=token_batches()[0])
    assert calls


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, checkpoint_wrapper])
def test_a_part_with_a_wrapper_of_its_own_is_refused_by_name(tmp_path, plain, wrap):
    mts.save(plain, tmp_path / "sparse")
    model = copy.deepcopy(plain)
    model.model.layers[1] = wrap(model.model.layers[1])
    calls: list[Callable[[nn.Module], Any]] = [
        lambda model: mts.sparsify(model, **OPTIONS),
        lambda model: mts.make_plan(model, **OPTIONS),
        lambda model: mts.save(model, tmp_path / "new"),
        lambda model: mts.restore(model, tmp_path / "sparse"),
        mts.verify,
    ]
    part = f"'model.layers.1' is wrapped by {type(model.model.layers[1]).__name__}"
    for call in calls:
        refused(call, model, parts=[part, "unwrap it, wrap it after"])
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]


def test_the_folder_of_a_wrapped_module_that_is_not_transformers_holds_its_own_names(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mts.save(mts.sparsify(nn.DataParallel(model), "magnitude", include="*"), tmp_path / "out")
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert_same_state(mts.restore(other, Path(tmp_path / "out")), state_of(model))
