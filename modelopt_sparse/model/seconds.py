"""How long a call of a model and of a smaller one takes here: measured, and predicted from the model's parts.

All seconds are the least of several calls, in turns, so that other work on the machine disturbs them little.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.model.devices import flat_tensors

TIMES, LONG = 5, 2.0  # so many calls are timed, and more until the least three agree, or they took so many seconds
AGREE = 1.05


def seconds_of_call(
    model: nn.Module,
    smaller: nn.Module,
    blocks: Mapping[str, nn.Module],
    gone: Collection[nn.Module],
    cut: Mapping[str, nn.Module],
    ids: Tensor,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """[of a model, of a ``smaller`` one, of that as predicted]. Nothing where other work on the machine disturbs them:
    where three calls of the same model do not agree.

    ``blocks`` of the model, of which some are ``gone`` from the smaller one. ``cut``: name -> the block in its smaller
    size, of one of each kind. The prediction sees no more of the smaller model than these. They are called among whole
    blocks: called again and again by themselves, they would find their weights in the cache.
    """
    seconds: dict[Any, list[float]] = defaultdict(list)

    def timed(spent: dict[Any, float], key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = clock()
        output = function(*args, **kwargs)
        flat_tensors(output)[0].flatten()[0].item()  # waits for the device
        spent[key] = spent.get(key, 0.0) + clock() - began
        return output

    def agree(each: nn.Module) -> bool:
        return sorted(seconds[each])[2] <= AGREE * min(seconds[each])

    while len(seconds[model]) < TIMES or not (agree(model) and agree(smaller)):
        if len(seconds[model]) >= TIMES and sum(seconds[model]) + sum(seconds[smaller]) >= LONG:
            return []
        for whole in (model, smaller):
            timed(spent := {}, whole, whole, input_ids=ids)
            seconds[whole].append(spent[whole])
        for instead in ({}, cut):
            spent = defaultdict(float)
            running = {name: instead.get(name, block) for name, block in blocks.items()}
            with ExitStack() as ending:
                for name, block in blocks.items():
                    block.forward = partial(timed, spent, running[name], running[name].forward)
                    ending.callback(vars(block).pop, "forward")
                timed(spent, "outside", model, input_ids=ids)
            spent["outside"] -= sum(spent[block] for block in running.values())
            for part in (*running.values(), "outside"):
                seconds[part].append(spent[part])
    least = {part: min(each) for part, each in seconds.items()}
    of_kind = {repr(blocks[name]): least[block] for name, block in cut.items()}
    old = {block: least[block] for block in blocks.values()}
    new = {block: of_kind.get(repr(block), same) for block, same in old.items() if block not in gone}
    # as a share, for parts that are timed are a little slower, each in its best call a little faster
    share = (least["outside"] + sum(new.values())) / (least["outside"] + sum(old.values()))
    return [least[model], least[smaller], least[model] * share]
