"""Errors about a layer: which layer it was, and, where memory ran out, what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from modelopt_sparse.model.devices import is_out_of_memory
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan

# what is done for all of a layer at once
COPIED, PREPARED, JOINED, WRITTEN = (
    "while its weight was copied",
    "while its solver was prepared",
    "while its solution was put together",
    "while its solution was written into the model",
)


@contextmanager
def errors_name_layer(layer_plan: LayerPlan, *, when: str = "") -> Iterator[None]:
    """A method knows no names: say whose layer its error is about. ``when``: what is done takes memory for all of the
    layer, so that there are no smaller pieces if it runs out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer_plan.name!r}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if when and is_out_of_memory(error):
            raise no_memory(layer_plan, when, error) from error
        raise


def no_memory(layer_plan: LayerPlan, when: str, error: BaseException) -> MemoryError:
    """The error of a layer for which memory ran out ``when`` something was done, and what to do."""
    advice = []
    routed = isinstance(layer_plan.layer.adapter, RoutedAdapter)
    if layer_plan.at_once is None and routed and layer_plan.needs == "gram":
        advice.append("memory_limit=, which holds the Gram matrices of a few experts at a time")
    if layer_plan.needs == "gram" and when not in (COPIED, JOINED, WRITTEN):
        advice.append("a method without a Gram matrix (wanda, magnitude), for this layer through rules=")
    advice.append("device= with more memory, or exclude=")
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    asked = f" ({wanted[1]} more were asked for)" if wanted else ""
    return MemoryError(
        f"layer {layer_plan.name!r} {list(layer_plan.shape)}: out of memory{asked} {when}; give {'; or '.join(advice)}"
    )
