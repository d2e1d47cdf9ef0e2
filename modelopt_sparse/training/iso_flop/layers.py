"""Sparse Wide for plain modules: the layers of a copy are made wider, all by the same factor.

Every width is multiplied by the same fraction, so that whatever is equal, concatenated or flattened in the model stays
so. What the model reads and gives keeps its size.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.calibration.modes import calibrating
from modelopt_sparse.model.nested import flat_tensors
from modelopt_sparse.reports.text import first_few
from modelopt_sparse.training.iso_flop.plan import call

CHANNELS = ("in_channels", "out_channels")
SIZES: dict[type[nn.Module], tuple[str, str]] = {  # names of a layer's inputs and outputs; "": it has none
    nn.Linear: ("in_features", "out_features"),
    nn.Embedding: ("", "embedding_dim"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), CHANNELS),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), CHANNELS),
}
NORMS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "num_features"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "num_features"),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), "normalized_shape"),
    nn.GroupNorm: "num_channels",
}


def rebuilt(module: nn.Module, **changes: Any) -> Any:
    """A new module of the same kind and settings, but for ``changes``, freshly initialized as torch does it.

    torch's layers and norms keep the arguments of their constructors under the same names.
    """
    kind = next(kind for kind in (*SIZES, *NORMS) if isinstance(module, kind))
    settings: dict[str, Any] = {}
    for name in inspect.signature(kind).parameters:
        if name == "bias":
            settings[name] = module.bias is not None
        elif name not in ("device", "dtype") and not name.startswith("_"):
            settings[name] = getattr(module, name)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in (tensor for tensor in tensors if tensor.is_floating_point()):
        settings.update(device=tensor.device, dtype=tensor.dtype)
    return kind(**{**settings, **changes}).train(module.training)


@dataclass
class Ends:
    """Whether a module reads what the model reads, or makes what the model gives: those sizes stay."""

    reads: bool = False
    makes: bool = False


def widened_layers(model: nn.Module, factor: float, multiple: int, example: Any) -> tuple[nn.Module, dict[str, str]]:
    """(a wider copy of a model, why layers are to stay dense by name).

    Widths grow by ``factor``, rounded up to the next fraction that keeps all of them whole, multiples of ``multiple``
    and divisible by their groups. All layers of the copy are new; their weights are random. The copy is run once.

    Raises ValueError for parameters in modules whose sizes are not known, for layers that the example does not reach,
    and for a model that does not run or gives another shape when it is wider.
    """
    _refuse_unknown(model)
    ends = _ends(model, example)
    sizes: dict[str, dict[str, int]] = {
        name: dict(_inner_sizes(model.get_submodule(name), ends[name])) for name in ends
    }
    inner = [size for own in sizes.values() for size in own.values()]
    if not inner:
        raise ValueError(f"this {type(model).__name__} has no width of its own: its first layer is its last")
    unit = math.gcd(*inner)
    steps = [step for name, own in sizes.items() for step in _steps(model.get_submodule(name), own, unit)]
    new = math.ceil(round(factor * unit / math.lcm(multiple, *steps), 6)) * math.lcm(multiple, *steps)
    wide = copy.deepcopy(model)
    wider = {
        model.get_submodule(name): _wider(model.get_submodule(name), own, unit, new) for name, own in sizes.items()
    }
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in wider:
            wide.set_submodule(name, wider[module])
    _tie(model, wide)
    _check(model, wide, example)
    why = {name: _why(end) for name, end in ends.items() if type(model.get_submodule(name)) in SIZES}
    return wide, why


def _refuse_unknown(model: nn.Module) -> None:
    name = type(model).__name__
    for path, module in model.named_modules():
        known = type(module) in SIZES or type(module) in NORMS
        own = [each for each, _ in module.named_parameters(recurse=False)]
        if own and not known and not (isinstance(module, nn.PReLU) and module.num_parameters == 1):
            raise ValueError(
                f"Sparse Wide does not know which sizes of {path or name!r} ({type(module).__name__} with {own[0]!r}) "
                "are widths: the other members replace layers anywhere"
            )
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
            raise ValueError(
                f"Sparse Wide: {path!r} is normalized over {list(module.normalized_shape)}: allowed is one"
            )
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise ValueError(f"this {name} is on the meta device: build it, so that it can be run on the example")


def _ends(model: nn.Module, example: Any) -> dict[str, Ends]:
    """How each layer and norm stands to the model's inputs and outputs, from a run: by the memory that they read and
    write, and by their order. What runs before the first layer reads, what runs after the last one makes."""
    paths = {module: path for path, module in model.named_modules() if type(module) in SIZES or type(module) in NORMS}
    order: list[nn.Module] = []
    read, made = [], []
    with calibrating(model), _watched(paths, order, read, made):
        outputs = _memory(call(model, example))
    if missed := [path for module, path in paths.items() if module not in set(order)]:
        raise ValueError(f"the example does not reach {first_few(missed)}: whether its sizes may change is not known")
    inputs = _memory(example)
    layers = [number for number, module in enumerate(order) if type(module) in SIZES]
    ends = {path: Ends() for path in paths.values()}
    for number, module in enumerate(order):
        end = ends[paths[module]]
        end.reads |= number <= layers[0] or bool(read[number] & inputs)
        end.makes |= number >= layers[-1] or bool(made[number] & outputs)
    return ends


@contextmanager
def _watched(
    paths: Mapping[nn.Module, str], order: list[nn.Module], read: list[set[int]], made: list[set[int]]
) -> Iterator[None]:
    """While it is open: every call of a module, and the memory that it reads and writes. Outputs are held, so that no
    memory is used twice."""
    held = []

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        held.append((args, output))
        order.append(module)
        read.append(_memory(args))
        made.append(_memory(output))

    handles = [module.register_forward_hook(after) for module in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _memory(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in flat_tensors(value) if isinstance(tensor, Tensor)}


def _inner_sizes(module: nn.Module, end: Ends) -> Iterator[tuple[str, int]]:
    """The sizes of a module that are widths of the model, by the name of the setting."""
    if type(module) in NORMS:
        name = NORMS[type(module)]
        value = getattr(module, name)
        if not end.reads and not end.makes:
            yield name, value[0] if isinstance(value, tuple) else value
        return
    inputs, outputs = SIZES[type(module)]
    if inputs and not end.reads:
        yield inputs, getattr(module, inputs)
    if not end.makes:
        yield outputs, getattr(module, outputs)


def _depthwise(module: nn.Module, own: Mapping[str, int]) -> bool:
    return len(own) == 2 and getattr(module, "groups", 1) == getattr(module, "in_channels", 0) > 1


def _steps(module: nn.Module, own: Mapping[str, int], unit: int) -> Iterator[int]:
    """What ``new / unit`` times the sizes must be divided by: groups, unless they grow with the channels."""
    groups = getattr(module, "groups", getattr(module, "num_groups", 1))
    if groups > 1 and not _depthwise(module, own):
        for size in own.values():
            yield groups // math.gcd(groups, size // unit)


def _wider(module: nn.Module, own: Mapping[str, int], unit: int, new: int) -> nn.Module:
    changes: dict[str, Any] = {name: size // unit * new for name, size in own.items()}
    if "normalized_shape" in changes:
        changes["normalized_shape"] = (changes["normalized_shape"],)
    if _depthwise(module, own):
        changes["groups"] = changes["in_channels"]
    return rebuilt(module, **changes)


def _tie(model: nn.Module, wide: nn.Module) -> None:
    """Modules of the wide model share the parameters that they share in the model."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        path, _, own = name.rpartition(".")
        if wide.get_parameter(known).shape != wide.get_parameter(name).shape:
            raise ValueError(
                f"{known!r} and {name!r} are one parameter, and would have different sizes in a wider model"
            )
        wide.get_submodule(path).register_parameter(own, wide.get_parameter(known))


def _why(end: Ends) -> str:
    if end.reads:
        return "reads what the model reads"
    return "makes what the model gives" if end.makes else ""


def _check(model: nn.Module, wide: nn.Module, example: Any) -> None:
    """Run both on the example. Raises ValueError unless the shapes of what they give are the same."""
    shapes = []
    for each in (model, wide):
        try:
            with calibrating(each):
                shapes.append([tuple(tensor.shape) for tensor in flat_tensors(call(each, example))])
        except (RuntimeError, ValueError, TypeError) as error:
            if each is model:
                raise
            raise ValueError(
                f"this {type(model).__name__} does not run when its layers are wider: its forward holds a size of its "
                f"own. The other members replace layers and keep sizes ({error})"
            ) from error
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"this {type(model).__name__} gives {shapes[1]} instead of {shapes[0]} when its layers are wider: what it "
            "gives is not the output of one of its layers. The other members replace layers and keep sizes"
        )
