"""Zeros at pruned places: how they are written, and how a weight is known to hold them still.

Writing them is a pass over the weight, so a forward does it only if something may have written to the weight since the
last time. torch counts the in-place writes to a tensor, its version. Three kinds of writes it does not count:

- through ``.data``: a `MaskedParameter` notices that somebody asks for it;
- by torch's fused optimizers: they need a gradient, so a weight that has one is not trusted, nor is a weight after a
  forward or backward pass with gradients;
- to weights that are put into the module for the length of a call (`functional_call`, FSDP, accelerate): only a
  Parameter that is registered with the module is trusted.

docs/training.md lists what no check can see.
"""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from modelopt_sparse.distributed import is_sharded, mask_like

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
FAINT = 2.0**-32  # exact in all dtypes but float16, where gradients this small are zero
PIECE = 2**19  # bytes that a core multiplies at once: torch first turns their mask into integers, which stay in cache


class Zeroed(NamedTuple):
    """A moment at which a weight was zero at the pruned places of ``mask``.

    ``plain`` is the weight's memory as a plain tensor, which torch's operators take faster than any class of ours.
    """

    mask: Tensor
    mask_version: int
    version: int  # of the weight
    on_gpu: bool
    plain: Tensor


class MaskedParameter(nn.Parameter):
    """A Parameter that is registered with sparse modules, and notices that somebody asks for its memory.

    ``holders`` are these modules. ``zeroed`` is None as soon as something may have written to the weight without
    counting up its version. Copied, it is a MaskedParameter without holders; pickled, it becomes a plain Parameter.
    """

    holders: "weakref.WeakSet[nn.Module]"
    zeroed: Zeroed | None = None

    @property
    def data(self) -> Tensor:  # type: ignore[override]  # torch declares an attribute
        self.zeroed = None
        return memory(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.zeroed = None
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a descriptor, declared as a tensor

    def untyped_storage(self) -> torch.UntypedStorage:
        self.zeroed = None
        return super().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        own = {"holders", "zeroed"}
        vars(plain).update({name: value for name, value in vars(self).items() if name not in own})
        return plain.__reduce_ex__(protocol)


def watch(weight: Tensor | None, holder: nn.Module) -> None:
    """Make a Parameter that is registered with a sparse module a `MaskedParameter`, in place.

    Other classes (sharded, quantized tensors) stay what they are, and are zeroed in each forward.
    """
    if type(weight) is nn.Parameter:
        object.__setattr__(weight, "__class__", MaskedParameter)
    if isinstance(weight, MaskedParameter):
        vars(weight).setdefault("holders", weakref.WeakSet()).add(holder)
        weight.zeroed = None


def as_plain(weight: Tensor | None) -> None:
    """Make a MaskedParameter a plain Parameter until it is watched again."""
    if isinstance(weight, MaskedParameter):
        weight.zeroed = None
        object.__setattr__(weight, "__class__", nn.Parameter)


def unwatch(weight: Tensor | None, holder: nn.Module) -> None:
    """The way back for a module that is no longer sparse; without a holder the Parameter is a plain one again."""
    if not isinstance(weight, MaskedParameter):
        return
    holders = vars(weight).get("holders", weakref.WeakSet())
    holders.discard(holder)
    if not holders:
        for name in ("holders", "zeroed"):
            vars(weight).pop(name, None)
        object.__setattr__(weight, "__class__", nn.Parameter)


def hold_zeros(weight: Tensor, mask: Tensor, holder: nn.Module) -> bool:
    """Make sure that a weight is zero wherever ``mask`` (True = kept) is False -> whether it is now.

    It is zeroed in place, once, unless it may not be written to: it belongs to somebody else, who has put it into
    ``holder`` for a call, or the call is recorded and runs again later.
    """
    if holds_zeros(weight, mask):
        return True
    if (
        not isinstance(weight, MaskedParameter)
        or holder not in vars(weight).get("holders", ())
        or weight.is_inference()  # tensors made in inference mode have no version
        or mask.is_inference()
        or weight.device != mask.device
        or weight.is_meta
        or is_recorded(weight)
    ):
        return False
    versions = mask._version, weight._version  # taken first: a write meanwhile is seen at the next forward
    write_zeros(memory(weight), mask)
    remember_zeros(weight, mask, *versions)
    return True


def renew_zeros(weight: Tensor, mask: Tensor, holder: nn.Module) -> None:
    """Zero a weight wherever ``mask`` is False, in place, whatever is known of it."""
    if isinstance(weight, MaskedParameter):
        weight.zeroed = None
    if not hold_zeros(weight, mask, holder):
        with torch.inference_mode(weight.is_inference()):  # such tensors can only be written to in inference mode
            write_zeros(memory(weight), mask_like(mask.to(weight.device), weight))


def holds_zeros(weight: Tensor, mask: Tensor) -> bool:
    """Whether nothing can have written to a weight since it was zeroed where ``mask`` is False."""
    zeroed: Zeroed | None = getattr(weight, "zeroed", None)
    return (
        zeroed is not None
        and zeroed.mask is mask
        and zeroed.mask_version == mask._version
        and zeroed.version == weight._version
        and weight.grad is None
        and not (zeroed.on_gpu and torch.cuda.is_current_stream_capturing())
    )


def remember_zeros(weight: MaskedParameter, mask: Tensor, mask_version: int, version: int) -> None:
    # a Parameter's flag, for autocast keeps the casts of tensors that require a gradient, until it ends
    plain = memory(weight).requires_grad_(weight.requires_grad)
    weight.zeroed = Zeroed(mask, mask_version, version, weight.is_cuda, plain)


def is_recorded(weight: Tensor) -> bool:
    """Whether operations on the weight go into a graph that runs later, or through a transform of `torch.func`."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or is_fx_symbolic_tracing()
        or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def memory(weight: Tensor) -> Tensor:
    """The weight's memory, as a tensor of its own: what is written to it does not count as a write to the weight.

    A backward pass that is still to come may use a weight that was zeroed this way: its forward used these zeros.
    """
    return torch.Tensor.data.__get__(weight)  # type: ignore[attr-defined]  # a descriptor, declared as a tensor


def write_zeros(tensor: Tensor, mask: Tensor) -> None:
    """Write +0.0 wherever ``mask`` (True = kept) is False, in place; over NaN, infinities and -0.0 as well.

    The bits of each number are multiplied by its mask, as integers. torch's `masked_fill_` and `where` go number by
    number on a CPU, and take about six times as long (examples/benchmarks/masks.py).
    """
    integers = INTEGERS.get(tensor.element_size())
    if integers is None or is_sharded(tensor) or tensor.layout != torch.strided:
        tensor.masked_fill_(~mask, 0)
        return
    for numbers, part in _pieces(tensor.view(integers), mask):
        numbers.mul_(part)


def masked_copy(weight: Tensor, mask: Tensor) -> Tensor:
    """A copy with +0.0 wherever ``mask`` is False, through which gradients and transforms pass."""
    if torch.is_grad_enabled() or is_sharded(weight) or is_recorded(weight):
        return weight.masked_fill(~mask, 0)  # not `where`, which would take its memory layout from the mask
    copy = weight.clone()
    write_zeros(copy, mask)
    return copy


def masked_gradient(gradient: Tensor, mask: Tensor, *, in_place: bool) -> Tensor:
    """The gradient with +0.0 wherever ``mask`` is False. ``in_place``: nobody else holds it, it may be overwritten."""
    if torch.is_grad_enabled() or is_sharded(gradient) or is_recorded(gradient):
        return torch.where(mask, gradient, 0)  # what is recorded must be differentiable once more
    masked = gradient if in_place else gradient.clone()
    write_zeros(masked, mask)
    return masked


def faint_gradient(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient as it is where ``mask`` is True, and times FAINT elsewhere; NaN and inf become 0.0 there.

    So faint that it does not count in the norm that a loop clips: squares of it are 2^-64 of those of its neighbours.
    """
    return torch.where(mask, gradient, (gradient * FAINT).nan_to_num(0.0, 0.0, 0.0))


def dense_gradient(gradient: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `faint_gradient`, but for NaN and inf.

    A weight that no masked forward reads (its parent reads it) has the full gradient at pruned places already. A faint
    one is at most 2^-32 of its neighbours' size, so half of that exponent tells which of the two it is.
    """
    largest_kept = torch.where(mask, gradient, 0).abs().amax()
    largest_pruned = torch.where(mask, 0, gradient).abs().amax()
    full = largest_pruned > largest_kept * FAINT**0.5
    return torch.where(mask | full, gradient, gradient / FAINT)


def _pieces(tensor: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A tensor and its mask in pieces that stay in a CPU's cache; as a whole where they are small, or on a GPU."""
    piece = PIECE // tensor.element_size() * torch.get_num_threads()
    if tensor.device.type != "cpu" or tensor.numel() <= piece:
        yield tensor, mask
    elif tensor.is_contiguous() and mask.is_contiguous():
        yield from zip(tensor.view(-1).split(piece), mask.view(-1).split(piece))
    else:
        rows = max(1, piece * len(tensor) // tensor.numel())
        yield from zip(tensor.split(rows), mask.split(rows))
