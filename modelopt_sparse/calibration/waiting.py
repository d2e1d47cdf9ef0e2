"""Calls of the model that wait at each block.

Each calibration call runs in a coroutine of its own, and waits whenever it comes to a block. While it waits, the block
is run with the arguments at hand, so that the inputs of its layers are seen, and its layers are solved. Then the call
goes on through the sparse block to the next one. The model itself does what lies between blocks.

Calls that are under way at the same time compute what they would compute one after the other, unless the model or its
blocks keep something from one call to the next. `try_waiting` tries that before anything is changed.
"""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from modelopt_sparse.calibration.forward import (
    NumberedCall,
    PaddingError,
    call_model,
    errors_name_batch,
    forward_context,
    has_room,
    on_execution_device,
    sides_of,
)
from modelopt_sparse.calibration.run import Run, Unreadable, switched_off
from modelopt_sparse.model.devices import (
    dense_rows,
    flat_tensors,
    has_hook,
    map_tensors,
    offload_again,
    onloaded,
    version,
)
from modelopt_sparse.model.layers import Stack
from modelopt_sparse.plan.memory import activation_copies

ADDRESSED = ("cpu", "cuda")  # devices whose tensors say where their memory is
CANDIDATES = 4  # newest tensors of one shape that another one is compared with


@dataclass
class Memory:
    """Of a call: ``held``, the tensors that are where they are to be held; ``shared``, those that have their memory in
    common with other calls', and how often they have been written to. Both as far as they are alive."""

    held: list[ref[Tensor]] = field(default_factory=list)
    shared: list[tuple[ref[Tensor], int]] = field(default_factory=list)

    def storages(self) -> set[int]:
        """Where the memory of the tensors is."""
        alive = [x for held in self.held if (x := held()) is not None]
        return {x.untyped_storage().data_ptr() for x in alive if x.device.type in ADDRESSED}

    def is_written(self) -> bool:
        """Whether one of the shared tensors has been written to."""
        return any((x := shared()) is not None and version(x) != before for shared, before in self.shared)


class WaitingCall(greenlet):
    """One call of the model. It waits at ``block``, which it is about to call with ``args`` and ``kwargs``; None: it
    has not begun, or it has ended. ``state``: torch's state of the thread when it began to wait."""

    def __init__(self, run: Run, numbered: NumberedCall) -> None:
        super().__init__(lambda: call_model(run, numbered.call, numbered.number))
        self.run_of_model, self.numbered = run, numbered
        self.block: nn.Module | None = None
        self.args: tuple = ()
        self.kwargs: dict[str, Any] = {}
        self.state: tuple = ()

    def go_on(self, see: Callable[[nn.Module, tuple, dict], None] | None = None) -> None:
        """Run on to the next block, or to the end. ``see`` gets the block and its arguments first.

        Hooks that were registered on the block after the call had come to it are not called. Therefore its arguments
        are moved to its device here.
        """
        block, device = self.block, self.run_of_model.config.device
        if block is not None and device is not None and not has_hook(block):
            self.args, self.kwargs = map_tensors(lambda x: x.to(device), (self.args, self.kwargs))
        if see is not None:
            assert block is not None
            see(block, self.args, self.kwargs)
        self.block, self.parent = None, getcurrent()
        self.switch()

    def wait(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Let the others run until `go_on`; called by the call itself -> the arguments to go on with."""
        self.block, self.args, self.kwargs, self.state = block, args, kwargs, thread_state()
        assert self.parent is not None
        self.parent.switch()
        args, kwargs, self.args, self.kwargs = self.args, self.kwargs, (), {}
        return args, kwargs

    def run_block(self) -> Any:
        """The output of the block in this call, which stays where it is."""
        assert self.block is not None
        with errors_name_batch(self.run_of_model, self.numbered.call, self.numbered.number):
            return self.block(*self.args, **self.kwargs)


class WaitingCalls:
    """Calls of the model that wait at each of the ``blocks``, from `start` until `close`."""

    def __init__(self, run: Run, calls: Sequence[NumberedCall], blocks: Sequence[nn.Module]) -> None:
        self.run, self.calls = run, [WaitingCall(run, call) for call in calls]
        self._blocks = blocks
        self._hooks = ExitStack()
        self._memory = {call: Memory() for call in self.calls}
        self._newest: dict[tuple, deque[ref[Tensor]]] = {}
        self._not_ours: set[int] = set()

    def start(self, random: Sequence[Tensor | None] = ()) -> None:
        """Let each call come to its first block. ``random``: the state of the random numbers that it begins with; None:
        the one at that time."""
        run, hooks = self.run, self._hooks
        hooks.enter_context(switched_off(run.model, "output_hidden_states", "output_attentions"))
        for block in run.plan.blocks:
            if run.config.device is not None and block is not run.model and block not in self._blocks:
                hooks.enter_context(onloaded(block, run.config.device, resident=False))
        for block in self._blocks:
            # before all other hooks: a block is loaded when it runs, not when a call comes to it
            hooks.enter_context(block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(self._after))
        of_user = flat_tensors([(call.numbered.call.args, call.numbered.call.kwargs) for call in self.calls])
        self._not_ours = {id(x) for x in (*run.model.parameters(), *run.model.buffers(), *of_user)}
        for module in {module for module, _ in sides_of(run)[run.model]} - {run.model}:
            hooks.enter_context(module.register_forward_pre_hook(self._tell, prepend=True, with_kwargs=True))
        with forward_context(run):
            for call, state in zip_longest(self.calls, random):
                call.gr_context = copy_context()
                if state is not None:
                    torch.set_rng_state(state)
                call.go_on()

    def at(self, block: nn.Module) -> list[WaitingCall]:
        """The calls that wait at a block."""
        return [call for call in self.calls if call.block is block]

    def close(self) -> None:
        """End the calls where they are, the last one first: contexts that they have entered are left in order."""
        self._hooks.close()
        for call in reversed(self.calls):
            call.parent = getcurrent()
            while call:  # a model may catch everything and go on
                with suppress(Exception):  # of a call that nobody needs any more
                    call.throw()
        if self.calls:
            offload_again(self.run.model)
        self.calls = []
        self._memory.clear()

    def _before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Let the call wait. Tensors that its frames hold are moved into a file with spill, and what equals a tensor of
        another call (masks, rotary tables, positions) is held once."""
        call = self._current()
        if call is None:
            return None
        memory = self._memory[call]
        if memory.is_written():
            what = f"batch {call.numbered.number}: the model writes to a tensor that is the same in several calls"
            raise RuntimeError(f"{what}: give each batch once")
        hidden, frames, held = next(iter(flat_tensors((args, kwargs))), None), tensors_of_frames(), memory.storages()
        for x in frames:
            # a view's memory stays as long as the tensor that it is a view of
            ours = id(x) not in self._not_ours and not x._is_view()
            if ours and x.untyped_storage().data_ptr() not in held:
                self._hold(x, memory, share=x is not hidden, in_place=True)
        memory.held = [ref(x) for x in frames]
        # moving a tensor counts as a write, to what `detach` has made of it as well
        memory.shared = [(shared, version(x)) for shared, _ in memory.shared if (x := shared()) is not None]
        return call.wait(block, args, kwargs)

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """The output of a block, as the model will hold it: it may be a view of more (T5's position bias)."""
        call = self._current()
        if call is None or not isinstance(output, (Tensor, tuple)):
            return None
        hidden, memory = next(iter(flat_tensors(output)), None), self._memory[call]

        def hold(x: Tensor) -> Tensor:
            return self._hold(x, memory, share=x is not hidden and x.device.type in ADDRESSED, in_place=False)

        return map_tensors(hold, output)

    def _tell(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if (call := self._current()) is not None:
            call.numbered.masks.tell(module, args, kwargs)

    def _current(self) -> WaitingCall | None:
        """The call of these that runs now; None outside of them."""
        call = getcurrent()
        return call if isinstance(call, WaitingCall) and call in self.calls else None

    def _hold(self, x: Tensor, memory: Memory, *, share: bool, in_place: bool) -> Tensor:
        """The same values, where they are to be held; ``in_place``: the same tensor, wherever the model holds it.
        Hidden states are not shared: models may write to them."""
        alike = self._newest.setdefault((x.shape, x.dtype, x.device, x.stride()), deque(maxlen=CANDIDATES))
        known = [y for newest in alike if share and (y := newest()) is not None]
        if any(x.data_ptr() == y.data_ptr() for y in known):
            return x
        twin = next((y for y in known if torch.equal(x, y)), None)
        held = self.run.storage.hold_activations(x) if twin is None else twin
        if in_place and held is not x:
            held = x.set_(held.untyped_storage(), held.storage_offset(), held.shape, held.stride())
        if twin is not None:
            memory.shared += [(ref(y), version(y)) for y in (held, twin)]
        if share:
            alike.append(ref(held))
        memory.held.append(ref(held))
        return held


def tensors_of_frames() -> list[Tensor]:
    """All dense tensors in local variables of the caller and of what has called it, each once."""
    frame, tensors = inspect.currentframe(), {}
    while frame is not None:
        tensors |= {id(x): x for x in flat_tensors(list(frame.f_locals.values()))}
        frame = frame.f_back
    dense = (x for x in tensors.values() if type(x) is Tensor and x.layout == torch.strided)
    return [x for x in dense if x.device.type in ADDRESSED]


def thread_state() -> tuple:
    """What torch keeps for the thread, and contexts around the blocks would change for all calls."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    # there is no public way to see the modes of torch.overrides and torch.utils._python_dispatch
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, *modes


# whether calls can wait -----------------------------------------------------------------------------------------------

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
Print = list[tuple]  # tells whether two outputs are equal


@dataclass(frozen=True)
class DenseCall:
    """A call that the dense model has run alone. ``random``: the state of the CPU's random numbers at its beginning;
    ``prints``: of the output of each of its blocks, in the order in which it came to them; ``again``: the blocks that
    it came to more than once."""

    numbered: NumberedCall
    random: Tensor
    prints: dict[nn.Module, Print]
    again: set[nn.Module]


def print_of(output: Any, *, exact: bool) -> Print:
    """Of each tensor in an output its dtype, its shape and the sum of its bits; not ``exact``: sums of its numbers."""
    prints = []
    for x in map(dense_rows, flat_tensors(output)):
        real = torch.view_as_real(x) if x.is_complex() else x
        if exact:
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
            numbers = (int(real.view(bits).sum(dtype=torch.int64)),)
        else:
            wide = real.double().nan_to_num()
            numbers = (float(wide.abs().sum()), float(wide.square().sum()))
        prints.append((x.dtype, x.shape, numbers))
    return prints


def is_exact(run: Run) -> bool:
    """Whether equal calls give equal bits: on other devices than the CPU, atomic operations add in any order."""
    devices = {parameter.device.type for parameter in run.model.parameters()}
    return devices <= {"cpu", "meta"} and (run.config.device is None or run.config.device.type == "cpu")


def same(one: Print, other: Print) -> bool:
    """Whether two prints are those of equal outputs; if they are sums of numbers, up to a few roundings."""
    if [of_tensor[:2] for of_tensor in one] != [of_tensor[:2] for of_tensor in other]:
        return False
    for (dtype, _, numbers), (_, _, others) in zip(one, other):
        roundings = 8 * torch.finfo(dtype).eps if dtype.is_floating_point and isinstance(numbers[0], float) else 0
        if any(abs(a - b) > roundings * abs(b) for a, b in zip(numbers, others)):
            return False
    return True


OTHER = "blocks run one by one do not give the model's own output"
Problem = tuple[Stack, str]  # a stack of which the blocks cannot be waited at, and why


def try_waiting(
    run: Run,
    tried: Sequence[tuple[NumberedCall, DenseCall | None]],
    stacks: Sequence[Stack],
    blocks: Sequence[nn.Module],
    *,
    count: int,
    outputs_stay: bool,
) -> tuple[Problem | None, bool]:
    """(why calls cannot wait at all ``blocks``, in this order; None if they can; whether outputs stayed on the
    execution device between blocks of a stack, as ``outputs_stay`` asks if there is room for those of ``count`` calls).

    The calls that are ``tried`` wait at the blocks in turns. Those that have run alone run each block twice, have to
    come to the same blocks, and have to put out there what they did alone.
    """
    if any(isinstance(value, LOCKS) for module in run.model.modules() for value in vars(module).values()):
        return (stacks[0], "the model holds a lock, and calls of one thread would wait for each other"), outputs_stay
    home = {block: (stack, name) for stack in stacks for name, block in zip(stack.names, stack.blocks)}
    stack, name = stacks[0], stacks[0].names[0]
    waiting = WaitingCalls(run, [numbered for numbered, _ in tried], blocks)
    prints = {call: alone.prints for call, (_, alone) in zip(waiting.calls, tried) if alone is not None}
    expected = {(call, block) for call, of_call in prints.items() for block in of_call if block in home}
    try:
        with forward_context(run):
            outside = thread_state()
        with torch.random.fork_rng(devices=[]):  # what the model draws in front of its blocks is as in the dense run
            waiting.start([None if alone is None else alone.random for _, alone in tried])
        outputs_stay = outputs_stay and has_room(run, held_bytes(run, waiting.calls) * count // len(tried))
        for block in blocks:
            stack, name = home[block]
            expected -= {(call, block) for call in waiting.at(block)}
            if any(call.state != outside for call in waiting.at(block)):
                return (stack, "the model runs its blocks in another mode of torch than it is called in"), outputs_stay
            run.storage.load(block)  # before it moves to the execution device
            stays = outputs_stay and block is not stack.blocks[-1]
            with on_execution_device(run, block, outputs_stay=stays), forward_context(run):
                why = _differs(waiting, block, prints, last=block is blocks[-1])
            if why is not None:
                return (stack, why), outputs_stay
    except (PaddingError, Unreadable):
        raise
    except (
        ValueError
    ) as error:  # every other one of the model's, but for those of files and memory: `errors_name_batch`
        return (stack, f"calls of the model cannot wait at block {name!r} ({error.__cause__ or error})"), outputs_stay
    finally:
        waiting.close()
    if expected:
        return (home[next(iter(expected))[1]][0], "calls do not come to its blocks when they wait"), outputs_stay
    return None, outputs_stay


def held_bytes(run: Run, calls: Sequence[WaitingCall]) -> int:
    """Bytes that activations of these calls take while they go from block to block, by what they wait with."""
    inputs = {id(x): x for call in calls for x in flat_tensors((call.args, call.kwargs))}
    return activation_copies(run.config) * sum(x.nbytes for x in inputs.values())


def _differs(
    waiting: WaitingCalls, block: nn.Module, prints: Mapping[WaitingCall, dict[nn.Module, Print]], *, last: bool
) -> str | None:
    """How the block differs for calls that wait at it from what it put out when they ran alone (``prints``). The calls
    go on, but from the ``last`` block, where all of them are run and none goes on."""
    exact = is_exact(waiting.run)
    for call in waiting.at(block):
        if call not in prints and not last:
            continue
        before = [(x, version(x)) for x in flat_tensors((call.args, call.kwargs))]
        output = print_of(call.run_block(), exact=exact)
        if any(version(x) != was for x, was in before):
            return "blocks write to their inputs"
        if call in prints and not same(output, prints[call].get(block, [])):
            return OTHER
    for call in () if last else waiting.at(block):
        outputs: list[Print] = []

        def see(module: nn.Module, args: Any, output: Any, outputs: list[Print] = outputs) -> None:
            outputs.append(print_of(output, exact=exact))

        with block.register_forward_hook(see) if call in prints else nullcontext():
            call.go_on()
        if call in prints and not (outputs and same(outputs[0], prints[call].get(block, []))):
            return OTHER
    return None
