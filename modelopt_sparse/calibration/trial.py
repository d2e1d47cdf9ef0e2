"""Whether calls of the model can be run again, block by block: tried with the dense model, before anything is changed.

What a call computes when it is run again, with blocks that answer and a stop at the end, has to be what it computed as
a whole: the inputs of the layers and the outputs of the blocks, to the bit. A model that keeps something from one call
to the next, where nothing puts it back, is found out here. Its blocks are calibrated through whole runs.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.calls import AtBlock, Attempt, Calls
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.forward import NumberedCall, forward_context
from modelopt_sparse.calibration.padding import PaddingError
from modelopt_sparse.model.devices import buffers_kept, dense_rows, flat_tensors, map_batch, parts_within
from modelopt_sparse.model.find import Stack
from modelopt_sparse.run import Run, Unreadable

# what is compared -----------------------------------------------------------------------------------------------------

Fingerprint = list[tuple]  # tells whether the tensors of two values are equal
SIGNS = 8  # sums of numbers with random signs
ROUNDING = 1e-4  # of a tensor's norm: what atomic operations may change, or two units in the last place if that is more


def fingerprint_of(value: Any, *, exact: bool) -> Fingerprint:
    """Dtype and shape of each tensor in ``value``, with a hash of its bits, or, unless ``exact``, with its norm and
    sums of its numbers with random signs."""
    prints = []
    for x in flat_tensors(value):
        x = dense_rows(x.detach())
        if exact:
            bits = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            numbers: tuple = (hash(bits.tobytes()),)
        else:
            wide = x.double().nan_to_num(1.0, 2.0, -2.0)
            numbers = (float(wide.norm()), *_signed_sums(wide))
        prints.append((x.dtype, x.shape, numbers))
    return prints


def _signed_sums(x: Tensor) -> list[float]:
    """Sums of a tensor's numbers with random signs: of the differences of two tensors their mean square is about the
    squared norm (Alon, Matias and Szegedy 1996)."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1] if x.dim() else 1)
    random = torch.Generator().manual_seed(0)
    left, right = (1 - 2.0 * torch.randint(2, (SIGNS, size), generator=random, device="cpu") for size in rows.shape)
    return ((left.to(rows) @ rows) * right.to(rows)).sum(1).tolist()


def is_exact(run: Run) -> bool:
    """Whether equal calls give equal bits: on other devices than the CPU, atomic operations add in any order."""
    devices = {parameter.device.type for parameter in run.model.parameters()}
    return devices <= {"cpu", "meta"} and (run.config.device is None or run.config.device.type == "cpu")


def same_fingerprint(first: Fingerprint, second: Fingerprint) -> bool:
    """Whether two fingerprints are those of equal tensors; if they are sums of numbers, up to roundings."""
    if [entry[:2] for entry in first] != [entry[:2] for entry in second]:
        return False
    for (dtype, _, numbers), (_, _, others) in zip(first, second):
        if numbers == others:
            continue
        if len(numbers) == 1:
            return False
        inexact = dtype.is_floating_point or dtype.is_complex
        share = max(ROUNDING, 2 * torch.finfo(dtype).eps) if inexact else 0.0
        distance = math.dist(numbers[1:], others[1:]) / math.sqrt(SIGNS)
        if not max(distance, abs(numbers[0] - others[0])) <= share * others[0]:
            return False
    return True


@dataclass(frozen=True)
class Visit:
    """One visit of a block: fingerprints of its layers' inputs, in order, and of its own output; none if it has
    answered."""

    block: nn.Module
    prints: list[tuple[nn.Module, Fingerprint]]

    def is_like(self, whole: "Visit") -> bool:
        """Whether it is the same visit as ``whole``, which is of a whole run."""
        pairs = zip(self.prints, whole.prints)
        alike = all(a is b and same_fingerprint(first, second) for (a, first), (b, second) in pairs)
        complete = len(self.prints) in (0, len(whole.prints))
        return self.block is whole.block and alike and complete


@contextmanager
def watching(
    calls: Calls, run: Run, only: Container[NumberedCall] | None = None
) -> Iterator[dict[Attempt, list[Visit]]]:
    """While entered, runs of calls, or of these ``only``, are seen: run -> its visits of blocks so far."""
    exact, runs, homes = is_exact(run), defaultdict[Attempt, list[Visit]](list), run.plan.homes
    names = {block: name for name, block in run.plan.named_blocks.items()}
    inputs: list[tuple[Attempt, nn.Module, Fingerprint]] = []  # since the last visit

    def on_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
        attempt = calls.attempt
        if attempt is None:
            return
        over = {block for block in attempt.visits if names[block] in homes.get(module, ())}
        calls.late |= over if calls.running not in over else set()
        if only is None or attempt.call in only:
            inputs.append((attempt, module, fingerprint_of((args, kwargs), exact=exact)))

    def seen(attempt: Attempt, block: nn.Module, output: Any, ran: bool) -> None:
        if only is None or attempt.call in only:
            before = [(module, prints) for of, module, prints in inputs if of is attempt]
            prints = [*before, (block, fingerprint_of(output, exact=exact))] if ran else []
            runs[attempt].append(Visit(block, prints))
        inputs.clear()

    with ExitStack() as hooks:
        for module in {module for layer_plan in run.plan.layers for module in layer_plan.layer.hooked_modules}:
            hooks.enter_context(module.register_forward_pre_hook(on_layer, with_kwargs=True))
        calls.seen = seen
        hooks.callback(setattr, calls, "seen", None)
        yield runs


# the trial ------------------------------------------------------------------------------------------------------------


def single_rows(call: Call) -> Iterator[Call]:
    """Calls of one row each, if all tensors of a batch have the same number of rows; else the batch. What has rows is
    taken to have samples, which may be wrong: whether the model takes them is seen."""
    tensors = [x for _, x in parts_within((call.args, call.kwargs)) if isinstance(x, Tensor)]
    plain = all(x.layout == torch.strided and not x.is_nested and x.dim() > 0 for x in tensors)
    if not plain or len({len(x) for x in tensors}) != 1:
        yield call
        return
    for row in range(len(tensors[0])):  # made as they are asked for: a batch may have many
        yield Call(*map_batch(lambda x, row=row: x[row : row + 1], (call.args, call.kwargs)))


# calls that are tried -> their visits in a whole run, before any call was stopped; None: the call only goes beside the
# others, as one that could disturb them
Tried = dict[NumberedCall, list[Visit] | None]
CHANGES = "a call that is run again computes something else"
OTHER_OUTPUT = "blocks that answer in the place of computing do not give the model's own output"


def truth_of(calls: Calls, tried: Iterable[NumberedCall]) -> Tried:
    """Run each of the calls whole -> their visits."""
    with watching(calls, calls.run) as runs, calls.watching(), forward_context(calls.run):
        for call in tried:
            calls.run_to(call)
    truth: Tried = {call: [] for call in tried}
    return truth | {attempt.call: visits for attempt, visits in runs.items()}


def is_repeatable(calls: Calls, tried: Tried) -> bool:
    """Whether the calls compute the same as before when they are run whole once more."""
    pairs = [(visits or [], tried[call] or []) for call, visits in truth_of(calls, tried).items()]
    return all(_alike(visits, truth) and len(visits) == len(truth) for visits, truth in pairs)


def _alike(visits: Sequence[Visit], truth: Sequence[Visit]) -> bool:
    return len(visits) <= len(truth) and all(visit.is_like(whole) for visit, whole in zip(visits, truth))


def rehearse(walk: AtBlock, tried: Tried, dense_run: Run) -> str | None:
    """Do with the dense model what the run will do with the calls that are ``tried``, each block twice -> why it is not
    what whole runs do; None: it is. ``walk``: of these calls. ``dense_run``: plans the layers that were seen in whole
    runs."""
    run = walk.run
    truth = dict(zip(walk.walked, tried.values()))
    try:
        with buffers_kept(run.model):
            for block in walk.blocks:
                run.storage.load(block)  # before it moves to the execution device
                at_block = walk.at(block)
                with at_block.on_device(), watching(walk.again, dense_run) as runs:
                    if run.config.reconstruct is not None:
                        at_block.dense_outputs(wanted=True)
                    for _ in range(2 if block is walk.blocks[-1] else 1):
                        at_block.collect()
                    at_block.advance()
                for attempt, visits in runs.items():
                    expected = truth.get(attempt.call)  # none of those that only go on
                    if expected is not None and not _alike(visits, expected):
                        return OTHER_OUTPUT
    except (PaddingError, Unreadable):
        raise
    except (ValueError, RuntimeError) as error:  # the model's own are `errors_name_batch`'s
        return f"calls cannot be run again ({error.__cause__ or error})"
    return None


def warn_of_whole_runs(run: Run, why: str, pruned: int) -> None:
    """Say what whole runs cost, in a warning and in the report; a streamed model is refused."""
    why = f"{type(run.model).__name__} is calibrated through the whole model, because {why}"
    if not run.storage.resident:
        raise ValueError(f"{why}: streaming would read all of it once for each block; do it with the model in memory")
    text = f"{why}: {pruned} runs of the model over the data, one for each block, instead of two"
    if left := _left_out(run):
        text += f"; {left}"
    warnings.warn(text, stacklevel=2)
    run.report.notes.append(text)


def warn_of_repeated(run: Run, stack: Stack) -> None:
    """Say what blocks that a call comes to more than once go without."""
    if left := _left_out(run):
        text = f"calls come to blocks of stack {stack.name or type(run.model).__name__!r} more than once; {left}"
        warnings.warn(text, stacklevel=2)
        run.report.notes.append(text)


def _left_out(run: Run) -> str:
    asked = {"permuted": run.config.permute, "reconstructed": run.config.reconstruct is not None}
    wanted = " and ".join(word for word, wanted in asked.items() if wanted)
    return f"its blocks are not {wanted}" if wanted else ""
