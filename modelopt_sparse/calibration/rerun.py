"""What it takes to run a call of the model again.

Finished blocks answer with outputs that are kept, or with tensors of which only the shape is known where they are not.
Random numbers are drawn from the states of before. What a call that was stopped leaves behind is put back.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from functools import partial
from itertools import count
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import Call
from modelopt_sparse.model.devices import (
    WRAPPED_BY,
    flat_tensors,
    leaves_of,
    map_leaves,
    map_tensors,
    parts_within,
    version,
)

# tensors that are not kept --------------------------------------------------------------------------------------------


class Needed(BaseException):
    """A call needs the values of a tensor that is not kept."""


Source = tuple[int, int]  # the place of a visit in its call, and of a tensor in what the block put out


CHOOSING = (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)  # a known index tells their shape


class Unknown(Tensor):
    """A tensor of which only shape, strides, dtype and device are known. ``meta``: the same on meta. ``sources``: which
    tensors of which outputs it is computed from.

    What is computed from it is unknown as well. Whatever would let its values decide something, or write them to a
    tensor that is known, calls ``need``, which raises `Needed`.
    """

    meta: Tensor
    sources: set[Source]
    need: Callable[[], NoReturn]

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, sources: set[Source], need: Callable[[], NoReturn]
    ) -> "Unknown":
        x = Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)  # type: ignore[attr-defined]
        x.meta, x.sources, x.need = meta, sources, need
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, arguments = dict(kwargs or {}), func._schema.arguments
        named = {**{argument.name: x for argument, x in zip(arguments, args)}, **kwargs}
        unknown = [x for x in flat_tensors((args, kwargs)) if isinstance(x, Unknown)]
        written = [named.get(x.name) for x in arguments if x.alias_info is not None and x.alias_info.is_write]
        decides = torch.Tag.data_dependent_output in func.tags
        if torch.Tag.dynamic_output_shape in func.tags:
            decides |= func not in CHOOSING or not isinstance(args[0], Unknown) or len(unknown) > 1
        if decides or any(not isinstance(x, Unknown) for x in flat_tensors(written)):
            unknown[0].need()
        device = torch.device(kwargs.get("device") or unknown[0].device)
        try:  # drawing random numbers goes on in the generator, which meta has none of
            where = device if torch.Tag.nondeterministic_seeded in func.tags else torch.device("meta")
            return cls._computed(func, args, kwargs, where, device)
        except (RuntimeError, TypeError, IndexError):  # by an index with values, which tells the shape
            return cls._computed(func, args, kwargs, device, device)

    @classmethod
    def _computed(
        cls, func: Any, args: tuple, kwargs: dict[str, Any], where: torch.device, device: torch.device
    ) -> Any:
        """The output of an operation, computed on ``where``, with zeros for what is unknown unless that is meta."""
        by_filled: dict[int, Unknown] = {}

        def value(x: Tensor) -> Tensor:
            if not isinstance(x, Unknown):
                return x.to(where)
            filled = x.meta if where.type == "meta" else torch.zeros_like(x.meta, device=where)
            by_filled[id(filled)] = x
            return filled

        args, kwargs = map_tensors(value, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = where
        first, *others = by_filled.values()
        output = func(*args, **kwargs)
        if any(x is not None and not isinstance(x, Tensor) for x in leaves_of(output)):
            first.need()
        sources = set(first.sources)
        if any(x.alias_info is not None for x in func._schema.returns):  # what is written to a view, its base holds
            sources = first.sources
        sources.update(*(x.sources for x in others))

        def unknown(x: Tensor) -> Unknown:
            return by_filled[id(x)] if id(x) in by_filled else cls(x.to("meta"), device, sources, first.need)

        return map_tensors(unknown, output)


# outputs of blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """Tensor ``number`` of an output: what it looks like on meta, its device, and which tensor of the block's arguments
    it is, if it is one of them as it was given."""

    number: int
    meta: Tensor
    device: torch.device
    same: int | None


@dataclass(frozen=True)
class Answer:
    """The output of a block in one visit, and what the block has written into mappings among its arguments, with a
    `Leaf` for each tensor. values: those of the tensors that are kept, by number. random: the states of the random
    numbers after the visit; None: the block has drawn none."""

    output: Any
    written: list[dict[Any, Any]]
    random: Sequence[Any] | None
    values: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, output: Any, arguments: "Arguments", random: Sequence[Any], home: torch.device | None
    ) -> "Answer | None":
        """Without values; None for what no answer holds: sparse and nested tensors, and tensors inside of objects of an
        output. ``random``: the states of the random numbers before the visit. ``home``: where the model will see the
        output, if not where it is."""
        if any(
            x.is_nested or x.layout != torch.strided for x in flat_tensors((output, arguments.args, arguments.kwargs))
        ):
            return None
        objects = [leaf for leaf in leaves_of((output,)) if not isinstance(leaf, Tensor)]
        if any(isinstance(part, Tensor) for _, part in parts_within(objects)):
            return None
        inputs, numbers = enumerate(zip(arguments.tensors, arguments.versions)), count()
        indices = {id(x): n for n, (x, was) in inputs if not x.is_inference() and version(x) == was}
        written = [
            {key: value for key, value in mapping.items() if was.get(key, was) is not value}
            for was, mapping in zip(arguments.copies, arguments.mappings)
        ]

        def leaf(x: Tensor) -> Leaf:
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return Leaf(next(numbers), meta, home or x.device, indices.get(id(x)))

        (output, written), after = map_tensors(leaf, (output, written)), random_states()
        return cls(output, written, None if same_states(random, after) else after)

    @property
    def kind(self) -> list[Any] | None:
        """All of the output but the values of its tensors; None if it holds numbers, text or plain records, which may
        depend on values."""
        leaves = leaves_of((self.output, self.written))
        plain = (bool, int, float, str, np.generic, Enum)
        if any(isinstance(x, plain) or (is_dataclass(x) and not isinstance(x, Leaf)) for x in leaves):
            return None
        return [(x.meta.shape, x.meta.dtype, x.same) if isinstance(x, Leaf) else type(x) for x in leaves]

    def tensors(self, output: Any, arguments: "Arguments") -> list[Tensor]:
        """The tensors of the visit that this answer was made of, in the order of their numbers."""
        written = [{key: new[key] for key in old} for old, new in zip(self.written, arguments.mappings)]
        return flat_tensors((output, written))

    def put_out(self, arguments: "Arguments", index: int, need: Callable[[], NoReturn]) -> Any:
        """Rebuild the output for visit ``index`` of a call, in which the block is called with these arguments. A tensor
        that is neither kept nor an argument is `Unknown`."""

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, Leaf):
                return leaf
            if leaf.number in self.values:
                return self.values[leaf.number].to(leaf.device, copy=True)  # the model may write to it
            if leaf.same is not None and leaf.same < len(arguments.tensors):
                return arguments.tensors[leaf.same]
            return Unknown(leaf.meta, leaf.device, {(index, leaf.number)}, need)

        output, written = map_leaves(tensor, (self.output, self.written))
        for mapping, new in zip(arguments.mappings, written):
            mapping.update(new)
        return output


class Arguments:
    """What a block is called with in one visit: the tensors in it, and how often they have been written to; the
    mappings, which the block may write to, and copies of them."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = flat_tensors((args, kwargs))
        self.versions = [version(x) for x in self.tensors]
        self.mappings = [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]
        self.copies = [dict(mapping) for mapping in self.mappings]

    def signature(self) -> tuple[Any, ...]:
        """A key for the shapes of a block's output: shapes and types of its arguments, and numbers among them."""
        leaves = []
        for leaf in leaves_of((self.args, self.kwargs)):
            constant = leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)
            leaves.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else constant)
        return len(self.args), tuple(self.kwargs), tuple(leaves)


# random numbers -------------------------------------------------------------------------------------------------------


def random_states() -> list[Any]:
    """The states of torch's generators, Python's and NumPy's."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), on_cuda, random.getstate(), np.random.get_state()]  # noqa: NPY002 - models use it


def draw_from(states: Sequence[Any]) -> None:
    torch_state, on_cuda, python_state, numpy_state = states
    torch.set_rng_state(torch_state)
    if on_cuda:
        torch.cuda.set_rng_state_all(on_cuda)
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002 - models use it


@contextmanager
def drawing_from(states: Sequence[Any] | int) -> Iterator[None]:
    """While entered, random numbers are drawn from these states, or by this seed; afterwards from those of before."""
    before = random_states()
    if isinstance(states, int):
        torch.default_generator.manual_seed(states)  # `torch.manual_seed` formats a stack for each absent accelerator
        if before[1]:
            torch.cuda.manual_seed_all(states)
        random.seed(states)
        np.random.seed(states % 2**32)  # noqa: NPY002
    else:
        draw_from(states)
    try:
        yield
    finally:
        draw_from(before)


def same_states(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether nothing was drawn between the two times that these states are of."""
    torch_state, on_cuda, python_state, numpy_state = second
    same = first[2] == python_state and all(map(np.array_equal, first[3], numpy_state))
    same &= torch.equal(first[0], torch_state) and len(first[1]) == len(on_cuda)
    return same and all(map(torch.equal, first[1], on_cuda))


# what a call that was stopped leaves behind: attributes, buffers, torch's flags, writes to its arguments --------------

CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    *((partial(torch.is_autocast_enabled, x), partial(torch.set_autocast_enabled, x)) for x in ("cpu", "cuda")),
    *((partial(torch.get_autocast_dtype, x), partial(torch.set_autocast_dtype, x)) for x in ("cpu", "cuda")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    *((partial(getattr, CUDNN, x), partial(setattr, CUDNN, x)) for x in ("enabled", "benchmark", "deterministic")),
]
OF_A_MODULE = frozenset(vars(nn.Module())) - {"training"} | WRAPPED_BY  # never put back


class ModelState:
    """Attributes of modules, what lists, sets and dicts among them hold, attributes of objects among them such as
    configs, buffers (not what these hold), and torch's flags for the process."""

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        self._attributes = [(attrs, dict(attrs), _contents(attrs)) for attrs in map(vars, (*modules, *objects))]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        self._flags = [get() for get, _ in FLAGS]

    def put_back(self) -> None:
        for attributes, before, contents in self._attributes:
            same = len(attributes) == len(before) and all(map(is_, attributes.values(), before.values()))
            for key in () if same else (attributes.keys() | before.keys()) - OF_A_MODULE:
                if key in before:
                    attributes[key] = before[key]
                else:
                    del attributes[key]
            for value, was in contents:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(was)
        for buffers, before in self._buffers:
            buffers.clear()
            buffers.update(before)
        for (get, put), before in zip(FLAGS, self._flags):
            if get() != before:
                put(before)


def settings_of(modules: Sequence[nn.Module], kinds: tuple[type, ...] = (bool, int, float, str)) -> list[Any]:
    """What a call depends on beside its arguments and tensors, as far as it is plain: torch's flags, and each module's
    modes, attributes that are numbers or text (of these ``kinds``), and number of hooks."""

    def plain(attrs: Mapping[str, Any]) -> list[Any]:
        values = [(key, value) for key, value in attrs.items() if isinstance(value, kinds)]
        return [*values, len(attrs["_forward_hooks"]), len(attrs["_forward_pre_hooks"])]

    return [[get() for get, _ in FLAGS], [plain(vars(module)) for module in modules]]


def objects_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Attributes of modules that have attributes themselves, each once: no modules, tensors, classes and functions."""
    attrs = [(key, value) for module in modules for key, value in vars(module).items()]
    values = {id(value): value for key, value in attrs if key not in OF_A_MODULE}
    others = (nn.Module, Tensor, type, FunctionType, MethodType, partial, ModuleType)
    return [x for x in values.values() if isinstance(getattr(x, "__dict__", None), dict) and not isinstance(x, others)]


def _contents(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Lists, sets and dicts among a module's attributes, each with a copy."""
    values = (value for key, value in attributes.items() if key not in OF_A_MODULE)
    return [(value, copy.copy(value)) for value in values if type(value) in (list, set, dict)]


def with_copied_arguments(call: Call) -> tuple[Call, Callable[[], None]]:
    """Copy a call with all arguments but tensors and modules -> (the copy, what undoes writes to its tensors)."""
    tensors = flat_tensors((call.args, call.kwargs))
    before = [(x, version(x), x.detach().clone()) for x in tensors]
    held = [x for x in leaves_of((call.args, call.kwargs)) if isinstance(x, (Tensor, nn.Module))]
    try:
        args, kwargs = copy.deepcopy((call.args, dict(call.kwargs)), {id(x): x for x in held})
    except (TypeError, RuntimeError, AttributeError):  # what cannot be copied, such as a lock, is handed on
        args, kwargs = map_tensors(lambda x: x, (call.args, dict(call.kwargs)))

    @torch.no_grad()
    def put_back() -> None:
        for x, was, values in before:
            if version(x) != was:
                x.copy_(values)

    return replace(call, args=args, kwargs=kwargs), put_back
