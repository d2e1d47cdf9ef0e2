"""What the blocks of a stack are given: recorded for the first calls, filled in for those that are like them."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.recorder import StackRecorder
from modelopt_sparse.calibration.replay import StackReplay
from modelopt_sparse.model.devices import flat_tensors
from modelopt_sparse.model.layers import Stack
from tests.models.architectures import ARCHITECTURES


def varied(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each batch, one of its shape with other values and other padding, one without padding, and the first again."""
    others = [{name: x + 1 if x.is_floating_point() else x.flip(-1) for name, x in batch.items()} for batch in batches]
    full = [
        {name: torch.full_like(x, x.dtype != torch.bool) if "mask" in name else x for name, x in batch.items()}
        for batch in others
    ]
    return [batch for three in zip(batches, others, full) for batch in three] + batches


def uncached(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model without caches, as in calibration, and its batches."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model, architecture.batches("right")


@pytest.fixture
def every_module_called():
    """Without the fused path of nn.TransformerEncoder, as in calibration."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("every_module_called")
@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture.chained])
def test_calls_that_are_filled_in_are_those_that_blocks_would_be_given(name):
    """A recorder that stops the model as soon as it can, against one for each call, which sees all of its blocks."""
    model, batches = uncached(name)
    batches = varied(batches)
    for stack in mts.make_plan(model, "magnitude").stacks:
        assert sum(blocks_run(model, stack, batches)) < len(batches) * len(stack.blocks)


class Enough(Exception):
    """The recorder has all it needs of a call."""


def stop() -> None:
    raise Enough


def recorder_of(stack: Stack, complete: Callable[[], None] = lambda: None) -> StackRecorder:
    return StackRecorder(stack, complete, lambda x: x)


def blocks_run(model: nn.Module, stack: Stack, batches: list[Any]) -> list[int]:
    """How many blocks ran for each batch, under a recorder whose record is as right as one that saw all of them."""
    quick = recorder_of(stack, stop)
    ran = [recorded(model, quick, batch) for batch in batches]
    for batch, calls in zip(batches, quick.recording.calls):
        slow = recorder_of(stack)
        recorded(model, slow, batch)
        assert_same_calls(calls, slow.recording.calls[0])
    return ran


@torch.no_grad()
def recorded(model: nn.Module, recorder: StackRecorder, batch: dict[str, Tensor]) -> int:
    ran: list[int] = []
    with ExitStack() as hooks:
        for block in recorder.recording.stack.blocks:
            hooks.callback(block.register_forward_hook(lambda *_: ran.append(1)).remove)
        recorder.start()
        recorder.begin(TokenMasks())
        with suppress(Enough):
            model(**batch)
        recorder.stop()
    assert recorder.problem is None
    return len(ran)


def assert_same_calls(calls: Any, others: Any) -> None:
    if isinstance(calls, Tensor):
        torch.testing.assert_close(calls, others, rtol=0, atol=0, equal_nan=True)
    elif isinstance(calls, (tuple, list)):
        assert len(calls) == len(others)
        for one, other in zip(calls, others):
            assert_same_calls(one, other)
    elif isinstance(calls, dict):
        assert list(calls) == list(others)
        assert_same_calls(list(calls.values()), list(others.values()))
    else:
        assert calls == others


# a stack of three blocks, whose second or third is given something of its own ------------------------------------


class Given(nn.Module):
    def __init__(self, extra: Callable[[int, Tensor, list[Tensor]], dict[str, Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Taking() for _ in range(3)])
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for index, block in enumerate(self.blocks):
            outputs.append(block(outputs[-1], **self.extra(index, x, outputs)))
        return outputs[-1]


class Taking(nn.Module):
    def forward(self, x: Tensor, **extra: Any) -> Tensor:
        return x + sum(1.0 for value in extra.values() if value is not None)


def ran_with(extra: Callable[[int, Tensor, list[Tensor]], dict[str, Any]], *batches: Tensor) -> list[int]:
    model = Given(extra)
    stack = Stack("blocks", tuple(f"blocks.{i}" for i in range(3)), tuple(model.blocks))
    return blocks_run(model, stack, [{"x": x} for x in batches])


ROW, LONGER = torch.arange(4.0)[None], torch.arange(6.0)[None]


def test_one_call_is_enough_where_later_blocks_are_given_nothing_else():
    table = torch.ones(3)
    assert ran_with(lambda index, x, outputs: {"table": table}, ROW, ROW + 1, ROW + 2) == [3, 0, 0]


def test_what_a_later_block_is_given_by_length_is_seen_for_each_length():
    """Block 1 has a mask from five tokens on, which block 0 knows nothing of."""

    def extra(index, x, outputs):
        return {"mask": torch.ones(x.shape) if index == 1 and x.shape[1] > 4 else None}

    assert ran_with(extra, ROW, LONGER, ROW, LONGER + 1) == [3, 3, 0, 2]


def test_a_mask_that_appears_makes_another_template():
    def extra(index, x, outputs):
        return {"mask": torch.full(x.shape, index % 2) if x[0, 0] > 0 else None}

    assert ran_with(extra, ROW, ROW + 1, ROW, ROW + 2) == [3, 3, 0, 2]


def test_a_tensor_of_a_later_block_alone_is_recorded_in_each_call():
    assert ran_with(lambda index, x, outputs: {"own": x * index} if index == 2 else {}, ROW, ROW + 1) == [3, 2]


def test_a_constant_of_a_later_block_alone_is_recorded_in_each_call():
    """It may depend on the data, as a number of tokens does."""
    assert ran_with(lambda index, x, outputs: {"own": bool(x[0, 0] > 0) and index == 1}, ROW + 1, ROW) == [3, 3]


def test_an_earlier_output_that_comes_back_is_not_the_output_before():
    """Block 2 gets the output of block 0 again, which block 1 was given as the one before it."""

    def extra(index, x, outputs):
        return {"earlier": outputs[1] if index == 2 else None}

    assert ran_with(extra, ROW, ROW + 1) == [3, 2]


# the check of a record ----------------------------------------------------------------------------------------------


@torch.no_grad()
def checked(model: nn.Module, stack: Stack, batch: dict[str, Tensor]) -> tuple[str | None, list[int]]:
    """What the check of a record finds, and the first dimension of every output of a block in it."""
    recorder = recorder_of(stack)
    recorded(model, recorder, batch)
    replay = StackReplay(recorder.recording, lambda x: x)
    sizes: list[int] = []

    def see(block: nn.Module, args: tuple, output: Any) -> None:
        sizes.append(len(flat_tensors(output)[0]))

    with ExitStack() as hooks:
        for block in stack.blocks:
            hooks.callback(block.register_forward_hook(see).remove)
        return replay.problem(recorder.recording.first_outputs), sizes


@pytest.mark.usefixtures("every_module_called")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "mixtral", "vit"])
def test_the_last_row_of_a_batch_is_enough_to_check_a_record(name):
    model, (batch, *_) = uncached(name)
    for stack in mts.make_plan(model, "magnitude").stacks:
        assert checked(model, stack, batch) == (None, [1] * len(stack.blocks))


class Mixing(nn.Module):
    """Takes from each row the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > 1
        return 2 * x


@pytest.mark.parametrize(("block", "asked"), [(Mixing, [1, 1, 3, 3]), (Refusing, [3, 3])])
def test_the_whole_call_decides_where_a_row_does_not(block, asked):
    model = nn.Sequential(block(), block())
    stack = Stack("", ("0", "1"), tuple(model))
    assert checked(model, stack, {"input": torch.randn(3, 4)}) == (None, asked)


def test_the_whole_call_decides_where_writes_are_not_counted():
    """A user's loop in inference mode: the last row says nothing about what was written to the others in between."""
    model = nn.Sequential(Taking(), Taking())
    stack = Stack("", ("0", "1"), tuple(model))
    with torch.inference_mode():
        assert checked(model, stack, {"input": torch.randn(3, 4)}) == (None, [3, 3])


def test_blocks_that_do_not_give_the_models_own_output_are_found_out():
    model = nn.Sequential(Taking(), Taking())
    stack = Stack("", ("0", "1"), tuple(model))
    recorder = recorder_of(stack)
    recorded(model, recorder, {"input": torch.randn(3, 4)})
    recording = recorder.recording
    recording.first_outputs[len(stack.blocks) - 1][0][-1] += 1
    problem = StackReplay(recording, lambda x: x).problem(recording.first_outputs)
    assert problem == "blocks run one by one do not give the model's own output"
