"""Calls of the model that wait at its blocks: how they end, what they hold, and what users see of them."""

import gc
import re
import traceback
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.calibration.waiting import WaitingCall, thread_state
from tests.calibration.collecting import collected
from tests.checkpoint.streams import batches, saved
from tests.helpers import tiny_llama, token_batches
from tests.models.stacked import STACKED, Stacked, vectors
from tests.models.tiny import tiny_t5


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def waiting() -> list[WaitingCall]:
    """The calls of any model that have not ended."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is WaitingCall and x]


class Failing(Stacked):
    """Raises in the n-th run of one of its modules."""

    def __init__(self, at: int, error: BaseException, module: str = "blocks.1") -> None:
        super().__init__()
        self.runs, self.at, self.error = 0, at, error
        self.get_submodule(module).register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.runs += 1
        if self.runs == self.at:
            raise self.error


@pytest.mark.filterwarnings("ignore:stack 'blocks' is calibrated through the whole model")
@pytest.mark.parametrize("module", ["stem", "blocks.0", "blocks.2.down"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("target", ["dense", "sparse"])
def test_whatever_run_fails_nothing_is_left(module, error, target):
    """In the dense run, in the check, when calls begin, while they wait, when they go on, in reconstruction."""
    options = {"data_loader": vectors(), "min_tokens": 1, "progress": False}
    options["reconstruct"] = {"epochs": 1, "target": target}
    counting = Failing(0, error, module)
    mts.sparsify(counting, **options)
    for at in sorted({*range(1, min(12, counting.runs)), counting.runs // 2, counting.runs}):
        model, before = Failing(at, error, module), thread_state()
        hooks = hooks_of(model)
        try:
            mts.sparsify(model, **options)
        except (ValueError, RuntimeError, KeyboardInterrupt):
            pass
        else:  # found out in the check: the model was calibrated through whole runs
            assert any("broken" in note for note in mts.report(model).notes)
        assert hooks_of(model) == hooks
        assert thread_state() == before
        assert not waiting()
        assert mts.report(mts.sparsify(model, **options)).sparsity == 0.5


def test_an_error_between_blocks_shows_the_batch_and_the_users_line():
    class Between(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                assert x.abs().max() < self.limit, "too large"
            return self.head(x)

    model, batches = Between(), [batch[:5] for batch in vectors()]
    model.limit = 1e4
    batches[2][0] = 1e5  # neither in the dense run nor in the check
    with pytest.raises(ValueError, match=re.escape("Between cannot take calibration batch 2, {0: 'torch.float32")) as e:
        mts.sparsify(model, data_loader=batches, min_tokens=1, progress=False)
    assert "too large" in str(e.value)
    frames = "".join(traceback.format_exception(e.value))
    assert 'assert x.abs().max() < self.limit, "too large"' in frames


def test_calls_that_come_back_to_a_block_are_none_of_its_statistics_twice():
    """Hooks of a user's own see each block once when it is collected and once when the call goes on, with the inputs
    that they themselves change."""
    model = Stacked()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        block.register_forward_hook(lambda module, args, output: output + 1)
    found = collected(model, STACKED, data_loader=vectors(), sequential="none")
    x = [model.stem(batch) for batch in vectors()]
    with torch.no_grad():
        expected = sum(0.25 * (y.T @ y) for y in x)
    torch.testing.assert_close(found["blocks.0.up"].gram, expected)


def test_calls_see_the_context_variables_of_their_caller():
    scale: ContextVar[float] = ContextVar("scale", default=100.0)

    class Contextual(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * scale.get())

    token = scale.set(2.0)
    try:
        found = collected(Contextual(), STACKED, data_loader=vectors(), sequential="none")
    finally:
        scale.reset(token)
    x = [Stacked().stem(2.0 * batch) for batch in vectors()]
    torch.testing.assert_close(found["blocks.0.up"].gram, sum(y.T @ y for y in x).detach())


def test_hidden_states_that_the_model_would_collect_are_switched_off_for_a_while():
    """A call that waits would hold all of them. The dense run, which ends, gives them as before."""
    model, seen = tiny_llama(), []
    model.config.output_hidden_states = True
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(model.config.output_hidden_states))
    mts.sparsify(model, data_loader=token_batches(), progress=False)
    assert seen[0] is True
    assert seen[-1] is False
    assert model.config.output_hidden_states is True


def test_calls_are_ended_in_the_reverse_order_of_their_beginning():
    """What a model enters around its blocks is left in order, as if calls stood inside of each other."""
    entered: list[object] = []
    in_order: list[bool] = []

    class Entering(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            own = object()
            entered.append(own)
            try:
                return super().forward(x)
            finally:
                in_order.append(entered.pop() is own)

    mts.sparsify(Entering(), data_loader=vectors(), min_tokens=1, progress=False)
    assert len(in_order) == 3 + 2 + 3  # in the dense run, for all are of other shapes; in the check; in the run itself
    assert all(in_order)


class Positioned(Stacked):
    """Adds positions, or something of the batch, to the input of each block; before the last one they change."""

    def __init__(self, *, in_place: bool = False, of_batch: bool = False) -> None:
        super().__init__()
        self.in_place, self.of_batch = in_place, of_batch

    def forward(self, x: Tensor) -> Tensor:
        positions = x.cos() if self.of_batch else torch.linspace(-1, 1, 6 * 16).view(6, 16).cos()
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index == 2:
                positions = positions.add_(x) if self.in_place else positions + x
            x = block(x + positions)
        return self.head(x)


def storages_of_waiting_calls(count: int) -> list[dict[str, tuple[int, bool]]]:
    """Of each of ``count`` calls that wait: name -> the memory of a tensor in its frames, and whether it is a file."""
    calls = [call for call in waiting() if call.block is not None]
    if len(calls) != count:
        return []
    of_calls = []
    for call in calls:
        frame, of_call = call.gr_frame, {}
        while frame is not None:
            for name, x in frame.f_locals.items():
                if isinstance(x, Tensor) and x.is_floating_point():
                    of_call[f"{frame.f_code.co_name}.{name}"] = (x.data_ptr(), x.untyped_storage().filename is not None)
            frame = frame.f_back
        of_calls.append(of_call)
    return of_calls


def test_what_is_the_same_in_all_calls_is_held_once():
    """Positions, which no block is called with; and hidden states never, although two batches are equal."""
    model, seen = Positioned(), []
    batches = [torch.randn(6, 16), torch.randn(6, 16), torch.randn(6, 16)]
    model.blocks[1].register_forward_hook(lambda *_: seen.append(storages_of_waiting_calls(4)))
    mts.sparsify(model, data_loader=[*batches, batches[0]], min_tokens=1, progress=False)
    of_calls = next(of_calls for of_calls in seen if of_calls)
    assert len({of_call["forward.positions"] for of_call in of_calls}) == 1
    assert len({of_call["forward.x"] for of_call in of_calls}) == 4


def test_a_model_that_writes_to_what_calls_have_in_common_is_never_calibrated_wrongly():
    """The check finds it out. What only batches that it does not run have in common, is an error later."""
    data = [torch.randn(6, 16) for _ in range(4)]
    options = {"min_tokens": 1, "progress": False}
    with pytest.warns(UserWarning, match="the model writes to a tensor that is the same in several calls"):
        model = mts.sparsify(Positioned(in_place=True), data_loader=data, **options)
    expected = mts.sparsify(Positioned(), data_loader=data, **options)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight)
    with pytest.raises(ValueError, match=r"batch 3: .* give each batch once"):
        mts.sparsify(Positioned(in_place=True, of_batch=True), data_loader=[*data[:3], data[2]], **options)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_spill_leaves_nothing_of_a_waiting_call_in_memory(tmp_path, name):
    """Embeddings, masks, rotary tables and position biases are in files as hidden states are."""
    source, found = saved(tmp_path / "dense", {"llama": tiny_llama, "t5": tiny_t5}[name]), []

    def look(module: nn.Module, *_: object) -> None:
        if type(module).__name__ in ("LlamaDecoderLayer", "T5Block"):
            found.extend(storages_of_waiting_calls(len(data)))

    data = batches(name)
    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        mts.sparsify_checkpoint(source, tmp_path / "sparse", data_loader=data, spill=True, progress=False)
    finally:
        hook.remove()
    tensors = {key: in_file for of_call in found for key, (_, in_file) in of_call.items() if not key.startswith("look")}
    assert {"forward.inputs_embeds", "forward.hidden_states"} <= tensors.keys()
    assert [key for key, in_file in tensors.items() if not in_file] == []
