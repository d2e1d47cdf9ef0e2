"""The options of what tunes a model after its layers are solved: block by block, and the whole of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from modelopt_sparse.methods.base import is_number
from modelopt_sparse.reports.text import unknown_option

CHOICES: dict[str, tuple[str, ...]] = {
    "target": ("dense", "sparse"),
    "parts": ("block", "children"),
    "masks": ("frozen", "move", "auto"),
    "metric": ("plain", "fisher", "auto"),
}
MOMENTS = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """How blocks are reconstructed.

    epochs: passes over the calibration batches.
    learning_rate: of each tensor it is ``learning_rate * rms(kept weights) / sqrt(kept weights per output)``, and falls
      to 0 as a cosine. Where the block's relative squared error e is below 0.01 it is ``sqrt(e / 0.01)`` of that.
    target: "dense": what the block puts out in the dense model, so that it makes up for the blocks before it;
      "sparse": what the dense block makes of the input that it gets from the sparse blocks before it.
    parts: "block": all of it at once; "children": first each child of the block that holds pruned layers (the
      attention) against its own output, then the rest (the MLP and the norms) against the block's.
    norms_and_biases: tune the vectors too, not only the pruned weights. Matrices that stay dense are never touched.
    masks: "frozen", or "move": which weights are kept may change in the first part of the steps (SR-STE, arXiv
      2102.04010), which needs the data that lets it pay. Masks of your own stay. "auto": move, but for weights in
      float16, which is too coarse for it.
    metric: what the error of a block's output is measured with: "plain", the squared error; "fisher", by what the
      predictions of the dense model depend on, which takes one backward pass through the whole model; "auto": fisher
      where the model has logits and can be called, else plain, as the report says.
    """

    epochs: int = 4
    learning_rate: float = 0.4
    target: str = "dense"
    parts: str = "block"
    norms_and_biases: bool = True
    masks: str = "frozen"
    metric: str = "plain"

    def __post_init__(self) -> None:
        _check_epochs_and_rate("reconstruct", self.epochs, self.learning_rate)
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"reconstruct: {name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        if not isinstance(self.norms_and_biases, bool):
            raise ValueError(f"reconstruct: norms_and_biases={self.norms_and_biases!r}: must be True or False")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """How the whole sparse model is tuned to predict what the dense one did, as the last step.

    epochs: passes over the calibration batches.
    learning_rate: as in `Reconstruct`, and an order of magnitude smaller: all blocks move together.
    moments: the dtype that the optimizer holds its two moments in between steps, "bfloat16" or "float32", with which a
      weight that stays takes 12 bytes instead of 8. Steps are computed in float32.
    """

    epochs: int = 2
    learning_rate: float = 0.03
    moments: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_epochs_and_rate("distill", self.epochs, self.learning_rate)
        if self.moments not in MOMENTS:
            raise ValueError(f"distill: moments={self.moments!r}: allowed are {', '.join(map(repr, MOMENTS))}")


Tuning = TypeVar("Tuning", Reconstruct, Distill)


def parsed(name: str, make: Callable[..., Tuning], value: Any) -> Tuning | None:
    """An option ``name`` as users give it: True, False, a number of epochs, or a mapping."""
    if value is None or value is False:
        return None
    if isinstance(value, (Reconstruct, Distill)):
        return value  # type: ignore[return-value]  # of the option's own class: a field of the config
    if value is True:
        return make()
    if isinstance(value, int):
        return make(epochs=value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r}: give True, False, a number of epochs, or a mapping of its options")
    known = [option.name for option in fields(make)]  # type: ignore[arg-type]  # one of the two classes
    for key in value:
        if key not in known:
            raise ValueError(f"{name}: {unknown_option(key, known)}")
    return make(**value)


def _check_epochs_and_rate(name: str, epochs: Any, learning_rate: Any) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"{name}: epochs={epochs!r}: must be a positive whole number")
    if not is_number(learning_rate) or not 0 < learning_rate <= 10:
        raise ValueError(f"{name}: learning_rate={learning_rate!r}: must be a number in (0, 10]")
