"""Calls of the model that are run again, each alone, until the block that is wanted has been seen.

Whenever the inputs of a block are wanted, the model is called with each call's arguments and random numbers, from its
beginning. Blocks that are finished for the call do not compute: they answer with their kept output. The model itself
does all that lies between blocks, each time. When the call has come to the wanted block as often as it will, it is
stopped.

Before, each call is run once without values, where all that blocks put out is `Unknown`. That shows its way: to which
blocks it comes, and which outputs these need, and nothing else is kept. If a call looks at values, its way is that of a
whole run, and the last output of each stack is kept. If that is not enough, the call starts again through all blocks
as they are, and keeps every output from then on.
"""

import copy
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.forward import (
    NOT_OF_THE_BATCH,
    Begin,
    CalibrationData,
    NumberedCall,
    See,
    call_model,
    forward_context,
    input_hooks,
    onloaded_blocks,
    output_tensor,
    record_outputs,
)
from modelopt_sparse.calibration.rerun import (
    Answer,
    Arguments,
    ModelState,
    Needed,
    Source,
    Unknown,
    draw_from,
    objects_of,
    random_states,
    settings_of,
    with_copied_arguments,
)
from modelopt_sparse.model.devices import (
    flat_tensors,
    forwards_replaced,
    has_hook,
    input_device,
    map_tensors,
    onloaded,
    reoffload,
)
from modelopt_sparse.model.find import Stack
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.run import Run


class Stop(BaseException):
    """Ends a call of the model that has done what it was run for."""


@dataclass(eq=False)
class Attempt:
    """One run of a call, while it lasts.

    wanted: the block that it is run for, with gradients or without; None: it runs to its end.
    finished: blocks whose outputs are kept. only_shapes: no block runs, all that they put out is unknown.
    last: the index of the last visit of the wanted block, while the call goes its way.
    called: whether the model's call has begun. begun: whether the wanted block has begun to run.
    over: the call was stopped, what follows is not wanted.
    guessed: something in this run is unknown. needed: its values were asked for.
    """

    call: NumberedCall
    wanted: nn.Module | None = None
    finished: Set[nn.Module] = frozenset()
    only_shapes: bool = False
    gradients: bool = False
    last: int | None = None
    visits: list[nn.Module] = field(default_factory=list)
    needs: dict[Source, int] = field(default_factory=dict)
    called: bool = False
    begun: bool = False
    over: bool = False
    guessed: bool = False
    needed: bool = False

    @property
    def index(self) -> int:
        """Of the visit that has begun last."""
        return len(self.visits) - 1

    def need(self) -> NoReturn:
        self.needed = True
        raise Needed


Seen = Callable[[Attempt, nn.Module, Any, bool], object]  # gets a visit that is over: the output, whether it has run


DECIDING = (bool, float, str)  # kinds of attributes; integers are mostly counters


class Calls:
    """Runs calls of the model while its blocks are watched.

    stack_of: block -> its stack. outside: blocks that were called outside of a call of the model.
    attempt: the run under way. seen: gets each visit of a block in it. running: the block that computes.
    leaving: blocks that change attributes of their own that are DECIDING; late: blocks of which layers are called
      after them as well; both known of runs that are `seen`.
    shapes: (block, signature of its arguments) -> its output without values, of all visits that have run; None where
      values decide what it puts out.
    """

    def __init__(self, data: CalibrationData, shapes: dict[Any, Answer | None] | None = None) -> None:
        self.data, self.run = data, data.run
        self.stack_of = {block: stack for stack in self.run.plan.stacks for block in stack.blocks}
        self.outside: set[nn.Module] = set()
        self.seen: Seen | None = None
        self.running: nn.Module | None = None
        self.leaving: set[nn.Module] = set()
        self.late: set[nn.Module] = set()
        self.shapes: dict[Any, Answer | None] = {} if shapes is None else shapes
        modules = [*self.run.model.modules()]
        self._state = partial(ModelState, modules, objects_of(modules))
        self.attempt: Attempt | None = None
        self._newest: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
        self._offloads, moved = has_hook(self.run.model), self.run.config.device is not None
        self._home = {block: input_device(block) for block in self.stack_of if moved and not has_hook(block)}

    def follow(self, call: NumberedCall | None) -> None:
        """A call that the user's own loop makes begins, and is seen; None: it is over."""
        self.attempt = None if call is None else Attempt(call)

    # running a call -------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, *, moved_by_hooks: bool = False) -> Iterator[None]:
        """While entered, each block answers, runs or stops the call, as the call under way wants it. With
        ``moved_by_hooks`` blocks that run are brought to the execution device before, so that hooks which are entered
        later see what they get there."""
        with ExitStack() as undo:
            if moved_by_hooks:
                undo.enter_context(onloaded_blocks(self.run))
            else:  # a block has its weights before it moves
                undo.enter_context(self.run.storage.on_request())
            for module in {module for module, _ in self.data.sides[self.run.model]}:
                undo.enter_context(module.register_forward_pre_hook(self._tell, with_kwargs=True))
            undo.enter_context(forwards_replaced(self.run.plan.blocks, self._visit))
            yield

    def _tell(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Pre-hook of the model and parts of it: note which tokens their arguments call padding, for this call."""
        if (attempt := self.attempt) is None or attempt.only_shapes:
            return
        masks = attempt.call.masks
        if module is self.run.model and not attempt.called:  # told before, by arguments that no device is waited for
            attempt.called, masks.told = True, dict(masks.first)
        else:
            masks.tell(module, args, kwargs)

    def learn_way(self, call: NumberedCall) -> None:
        """See to which blocks a call comes, and what these need: by the shapes of what blocks put out, if these tell
        it; else the way alone, by a whole run."""
        try:
            attempt = self._run(Attempt(call, only_shapes=True))
            call.way, call.needed = tuple(attempt.visits), attempt.needs
        except Needed:
            self.run_to(call)

    def run_to(
        self, call: NumberedCall, block: nn.Module | None = None, finished: Set[nn.Module] = frozenset()
    ) -> None:
        """Run a call until it has come to ``block`` for the last time; None: to its end. What ``finished`` blocks put
        out is kept from now on. The way of a call that has come to its end is the one that it went now."""
        attempt = Attempt(call, block, finished, gradients=torch.is_grad_enabled())
        try:
            self._run(attempt)
        except Needed:
            if call.keeps_all or attempt.begun or not call.starts_again:
                problem = f"batch {call.number}: the model looks at what an earlier block has put out"
                raise RuntimeError(f"{problem}, which the calls that were tried do not: leave it out") from None
            call.answers, call.keeps_all = [], True
            self.run_to(call, block, finished)

    def _run(self, attempt: Attempt) -> Attempt:
        """Raises `Needed` if the call asks for what was not kept."""
        call, self.attempt, ended = attempt.call, attempt, False
        if attempt.wanted is not None:
            attempt.last = max((n for n, block in enumerate(call.way) if block is attempt.wanted), default=None)
        state, (copied_call, put_back) = self._state(), with_copied_arguments(call.call)
        try:
            with ExitStack() as hooks:
                if attempt.wanted is not None:  # after all other hooks, which see the output
                    hooks.callback(attempt.wanted.register_forward_hook(self._after).remove)
                hooks.enter_context(torch.no_grad())
                if attempt.wanted is not None and attempt.gradients:  # the block's hooks see them, too
                    hooks.callback(attempt.wanted.register_forward_pre_hook(_with_gradients, prepend=True).remove)
                call_model(self.run, copied_call, call.number, call.random)
            ended = not attempt.over
        except Stop:
            pass
        except Exception as error:
            if attempt.guessed and not attempt.over and not isinstance(error, (*NOT_OF_THE_BATCH, MemoryError)):
                raise Needed from None  # by what takes no tensor without values
            if not attempt.over:
                raise
        finally:
            self.attempt = None
            put_back()
            if not ended or attempt.only_shapes:
                state.put_back()
                if self._offloads:
                    reoffload(self.run.model)
        if attempt.needed:  # and the model has caught it
            raise Needed
        if ended and attempt.last is not None and attempt.last < len(attempt.visits):
            raise RuntimeError(f"the model calls the forward of a {type(attempt.wanted).__name__} past its hooks")
        if ended and not attempt.only_shapes:
            call.way = tuple(attempt.visits)
        return attempt

    # a visit of a block ---------------------------------------------------------------------------------------------

    def _visit(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a block's ``forward``: answer with a kept output, compute, or stop the call."""
        if (attempt := self.attempt) is None:
            self.outside.add(block)
            return forward(*args, **kwargs)
        if attempt.needed:
            raise Needed
        if attempt.over:
            raise Stop  # the model has caught the first one
        attempt.visits.append(block)
        arguments = Arguments(args, kwargs)
        answer = self._answer(attempt, block, arguments)
        if answer is None:
            output = self._computed(attempt, block, forward, arguments)
        else:
            output = answer.put_out(arguments, attempt.index, attempt.need)
            attempt.guessed |= any(isinstance(x, Unknown) for x in flat_tensors(output))
        if self.seen is not None:
            self.seen(attempt, block, output, answer is None)
        return output

    def _answer(self, attempt: Attempt, block: nn.Module, arguments: Arguments) -> Answer | None:
        """The kept output that answers the visit which has begun; None: the block computes."""
        call, index = attempt.call, attempt.index
        if attempt.only_shapes:
            for x in arguments.tensors:
                attempt.needs |= dict.fromkeys(x.sources if isinstance(x, Unknown) else (), index)
            return self.shapes.get((block, arguments.signature())) or attempt.need()
        if index >= len(call.answers):
            return None
        if call.way[index] is not block:
            batch = f"calibration batch {call.number}"
            raise RuntimeError(f"{batch} comes to the blocks in another order than before, with the same inputs")
        answer = call.answers[index]
        if answer.random is not None:
            draw_from(answer.random)  # as if the block had drawn its own
        return answer

    def _computed(self, attempt: Attempt, block: nn.Module, forward: Callable, arguments: Arguments) -> Any:
        if any(isinstance(x, Unknown) for x in arguments.tensors):
            attempt.need()
        index, key, random = attempt.index, (block, arguments.signature()), random_states()
        attempt.begun |= block is attempt.wanted
        before = self.seen and settings_of([*block.modules()], DECIDING)
        self.running = block
        output = self._forward(attempt, block, forward, arguments.args, arguments.kwargs)
        self.running = None
        if self.seen and settings_of([*block.modules()], DECIDING) != before:
            self.leaving.add(block)
        answer = Answer.of(output, arguments, random, self._home.get(block))
        config = self.run.config
        dense_wanted = config.sequential == "none" or config.reconstruct is not None or config.budget is not None
        if answer is None and block in attempt.finished and dense_wanted:
            raise RuntimeError(f"the output of a {type(block).__name__} cannot be kept: nested, sparse or in an object")
        if answer is not None:
            known = self.shapes.setdefault(key, answer)
            if known is None or answer.kind is None or answer.kind != known.kind:
                self.shapes[key] = attempt.call.needed = None
            if index == len(attempt.call.answers) and block in attempt.finished:
                self._keep(attempt, answer, answer.tensors(output, arguments))
        if attempt.last is not None and attempt.call.way[index : index + 1] != (block,):
            attempt.last = None  # another way than before: it is run to its end
        return output

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        if (attempt := self.attempt) is not None and attempt.last == attempt.index:
            attempt.over = True
            raise Stop

    def _forward(
        self, attempt: Attempt, block: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run the block itself, with its weights where it runs; those of the wanted block are there."""
        device = self.run.config.device
        self.run.storage.load(block)
        if block is attempt.wanted and attempt.gradients:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = map_tensors(lambda x: x.clone() if x.is_inference() else x, (args, kwargs))
                return forward(*args, **kwargs)
        in_place = block is attempt.wanted or block is self.run.model or has_hook(block)
        if device is None or in_place or input_device(block) == device:
            return forward(*args, **kwargs)
        home = input_device(block)
        block.to(device)
        try:
            args, kwargs = map_tensors(lambda x: x.to(device), (args, kwargs))
            return map_tensors(lambda x: x.to(home), forward(*args, **kwargs))
        finally:
            block.to(home)

    def _keep(self, attempt: Attempt, answer: Answer, tensors: Sequence[Tensor]) -> None:
        """Keep those ``tensors`` of a visit that later visits need, and drop earlier ones that none needs any more."""
        call, index = attempt.call, len(attempt.call.answers)
        newest = {self.stack_of.get(block): n for n, block in enumerate(attempt.visits)}

        def is_wanted(n: int, number: int) -> bool:
            if call.keeps_all:
                return True
            if call.needed is None:  # not known: the last output of each stack
                return n in newest.values()
            return call.needed.get((n, number), -1) > index

        for n, earlier in enumerate(call.answers):
            if earlier.values:
                values = {number: x for number, x in earlier.values.items() if is_wanted(n, number)}
                call.answers[n] = replace(earlier, values=values)
        home = self._home.get(attempt.visits[index])
        values = {n: self._hold(x.to(home or x.device), n) for n, x in enumerate(tensors) if is_wanted(index, n)}
        call.answers.append(replace(answer, values=values))

    @torch.inference_mode(False)
    def _hold(self, x: Tensor, number: int) -> Tensor:
        """Copy ``x``, tensor ``number`` of an output, to where activations are held; nothing writes to the copy.
        Tensors behind the first, such as position biases, are held once for calls that have the same in a row."""
        key = number, x.shape, x.dtype, x.stride()
        newest = self._newest.get(key) if number else None
        if newest is None or newest.device != x.device or not torch.equal(x, newest):
            newest = self._newest[key] = copied(x.detach(), self.run)
        return newest


def _with_gradients(*_: Any) -> None:
    torch.set_grad_enabled(True)  # until the call is stopped


def copied(x: Tensor, run: Run) -> Tensor:
    """A copy of ``x`` where activations are held."""
    held = run.storage.hold(x)
    return held.clone() if held.data_ptr() == x.data_ptr() else held


# the inputs of one block after the other ------------------------------------------------------------------------------


class WholeModel:
    """Gives the inputs of layers by running the whole model over the data, each time that they are asked for. It has
    the methods of `AtBlock`. ``data`` is None where no method asks."""

    def __init__(self, data: CalibrationData | None) -> None:
        self.data = data

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, begin: Begin, *, go_on: bool) -> None:
        assert self.data is not None
        hooks = input_hooks(layer_plans, self.data.run.plan.blocks, self.data.sides, see)
        self.data.run_model(begin, hooks)

    def advance(self) -> None:
        """Do nothing: the next run of the whole model goes through the block as it is then."""


@dataclass(eq=False)
class AtBlock:
    """Calls on their way through ``blocks``, in the order in which they come to them, and the block that they are at.

    again: what runs them. walked: all of them. repeated: blocks to which some call comes more than once.
    done: blocks whose outputs are final.
    dense: if blocks are reconstructed, the same calls on their way through the dense blocks of a stack alone; what lies
      before the stack is sparse.
    calls: those that come to the ``block``.
    """

    again: Calls
    walked: list[NumberedCall]
    blocks: Sequence[nn.Module]
    repeated: Container[nn.Module]
    done: frozenset[nn.Module] = frozenset()
    dense: dict[Stack, list[NumberedCall]] = field(default_factory=dict)
    block: nn.Module = field(init=False)
    calls: list[NumberedCall] = field(init=False)

    @property
    def data(self) -> CalibrationData:
        return self.again.data

    @property
    def run(self) -> Run:
        return self.again.run

    @property
    def once(self) -> bool:
        """Whether each call comes to the block once."""
        return self.block not in self.repeated

    def at(self, block: nn.Module) -> "AtBlock":
        """The work on a block begins."""
        self.block, self.calls = block, [call for call in self.walked if block in call.way]
        if self.run.config.reconstruct is not None:
            self.dense.setdefault(self.again.stack_of[block], [call.going_on() for call in self.walked])
        return self

    def on_device(self) -> AbstractContextManager[Any]:
        """To be entered for all the work on a block: its weights go to the execution device and come back once."""
        device = self.run.config.device
        return nullcontext() if device is None else onloaded(self.block, device, resident=True)

    def collect(
        self,
        layer_plans: Sequence[LayerPlan] = (),
        see: See = lambda *_: None,
        begin: Begin = lambda numbered: None,
        *,
        go_on: bool = False,
    ) -> None:
        """Run each call to the block; ``begin`` gets it first, and ``see`` sees the inputs of the layers. ``go_on``:
        the block's output is kept, as in `advance`."""
        hooks = input_hooks(layer_plans, [self.block], self.data.sides, see)
        done = self.done | {self.block} if go_on else self.done
        with self.again.watching(), hooks as padding, forward_context(self.run):
            for call in self.calls:
                padding.begin(call.masks)
                begin(call)
                self._run_to(call, self.block, done)
        self.done = done
        if go_on:
            self._leave()

    def advance(self) -> None:
        """From now on the block answers with its output as it is now. A block that stays as it is, and at hand, runs
        when the next one is wanted, which saves a run of what lies before it."""
        config = self.run.config
        self.done |= {self.block}
        later = self.run.storage.resident and config.device is None and config.sequential != "none"
        if not later and self.block is not self.blocks[-1]:
            self.collect()
        self._leave()

    def _leave(self) -> None:
        """The work on a block is done. The last block of all done, each call that may go other ways than it went when
        it was dense is run to its end, so that none has come to a finished block unseen."""
        stack, blocks = self.again.stack_of[self.block], self.blocks
        if not any(later_block in stack.blocks for later_block in blocks[blocks.index(self.block) + 1 :]):
            self.dense.pop(stack, None)
        if self.block is not blocks[-1]:
            return
        with self.again.watching(), forward_context(self.run):
            for call in self.walked:
                if call.needed is None:
                    self._run_to(call, None, self.done)
        for call in self.walked:
            call.answers.clear()

    def _run_to(self, call: NumberedCall, block: nn.Module | None, done: Set[nn.Module]) -> None:
        """A call that has come to its end may have gone another way than before, but not back to a finished block."""
        before = call.way
        self.again.run_to(call, block, done)
        if late := [block for block in Counter(call.way) - Counter(before) if block in done and block in self.blocks]:
            name = next(name for name, block in self.run.plan.named_blocks.items() if block is late[0])
            problem = f"calibration batch {call.number} comes back to block {name!r}, which is sparse by now"
            raise ValueError(f"{problem}; its statistics are without that: leave this batch out")

    # for permutation and reconstruction, before and after the layers of a block are solved ----------------------------

    def only(self, numbers: Container[int]) -> "AtBlock":
        """A copy with the calls of these numbers alone."""
        some = copy.copy(self)
        some.calls = [call for call in self.calls if call.number in numbers]
        return some

    def outputs_of(self, modules: Sequence[nn.Module], index: int, *, first_alone: bool = False) -> list[Tensor]:
        """What each module puts out (`output_tensor`) in a run of call ``index`` to the block. Gradients are those of
        the block alone."""
        call = self.calls[index]
        run = partial(self._run_to, call, self.block, self.done)
        with self.again.watching():
            return record_outputs(run, modules, lambda x: self._taken(call, x, first_alone=first_alone))

    def dense_outputs(self, *, wanted: bool) -> dict[int, Tensor]:
        """Number of a call -> what the block puts out (`output_tensor`) when the call has come through dense blocks
        alone, if that is ``wanted``; to be asked for while the block is dense."""
        goals: dict[int, Tensor] = {}
        with self.again.watching(), forward_context(self.run):
            for call in self.dense[self.again.stack_of[self.block]]:
                if self.block in call.way:
                    run = partial(self._run_to, call, self.block, self.done | {self.block})
                    take = partial(lambda call, x: copied(self._taken(call, x), self.run), call)
                    for x in record_outputs(run, [self.block] * wanted, take):
                        goals[call.number] = x
        return goals

    def _taken(self, call: NumberedCall, output: Any, *, first_alone: bool = False) -> Tensor:
        """The `output_tensor`. Padding is that of the first stream."""
        padded = call.masks.at(self.data.sides[self.block]) is not None
        return output_tensor(output, first_alone=first_alone or padded)


Inputs = WholeModel | AtBlock  # of the layers of one block after the other
