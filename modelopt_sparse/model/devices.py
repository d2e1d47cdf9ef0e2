"""What lies around a model: its wrappers and modes, the devices that its tensors are on, the memory that is free there,
and what accelerate holds elsewhere.

No other file knows how accelerate leaves its hooks on a module. This file works without transformers.
"""

import ctypes
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset
from accelerate.utils.other import is_compiled_module  # in accelerate.utils itself only since 1.6
from torch import Tensor, nn

# names, wrappers and modes --------------------------------------------------------------------------------------------
# The wrappers of torch.compile, DataParallel and DistributedDataParallel put ``_orig_mod.`` or ``module.`` before every
# name, and hide the model's class and configuration. That of activation checkpointing names modules and parameters so,
# and leaves it out in the state dict.


def full_name(path: str, name: str) -> str:
    """The name that a parameter or child of the module at ``path`` has in the model."""
    return f"{path}.{name}" if path else name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers. It has the same Parameters, and names without the wrappers' prefixes."""
    while True:
        if is_compiled_module(model):
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_checkpoint_wrapped_module" in model._modules:
            model = model.get_submodule("_checkpoint_wrapped_module")
        else:
            return model


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """While entered, the model is in evaluation mode; afterwards each module is in its mode from before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            if type(module).train is not nn.Module.train:  # it may do more than set a flag
                module.train(training)
        for module, training in modes:
            module.training = training


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is compiled: hooks and sparse classes that come and go would have it compiled again each time."""
    # what nn.Module.compile() sets has no public name
    if not any(is_compiled_module(m) or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def forwards_replaced(modules: Iterable[nn.Module], replacement: Callable[..., Any]) -> Iterator[None]:
    """While entered, the forward of each module is ``replacement(module, forward, *args, **kwargs)``, which gets the
    one of before (as accelerate wraps it, if it does). ``previous`` of it is what the instance had before."""
    done: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            replaced: Any = functools.partial(replacement, module, module.forward)
            functools.update_wrapper(replaced, module.forward)
            replaced.previous = vars(module).get("forward")
            done.append((module, replaced.previous))
            vars(module)["forward"] = replaced
        yield
    finally:
        for module, previous in reversed(done):
            vars(module).pop("forward", None)
            if previous is not None:
                vars(module)["forward"] = previous


# nested tuples, lists and mappings ------------------------------------------------------------------------------------


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists and mappings replaced by ``function(tensor)``."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf in nested tuples, lists and mappings replaced by ``function(leaf)``.

    A torch.Size holds no tensors, although it is a tuple. Mappings that can be written to keep their class: a
    BatchEncoding, or a ModelOutput of transformers, which is known by its ``to_tuple``.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, entry) for entry in value))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(map_leaves(function, entry) for entry in value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, entry) for key, entry in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return mapped
        if hasattr(type(value), "to_tuple"):
            return type(value)(**mapped)
        new = copy(value)
        new.update(mapped)
        return new
    return function(value)


def version(x: Tensor) -> int:
    """A number that rises whenever something writes to ``x``; always 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def leaves_of(value: Any) -> list[Any]:
    """Every leaf of nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Size) or not isinstance(value, (Mapping, tuple, list)):
        return [value]
    return [leaf for entry in (value.values() if isinstance(value, Mapping) else value) for leaf in leaves_of(entry)]


def parts_of(value: Any) -> Mapping[Any, Any]:
    """The values that a container or an object holds, by name or index; empty for tensors, modules and plain values."""
    if isinstance(value, (Tensor, nn.Module, torch.Size, type)):
        return {}
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value))
    if isinstance(value, Mapping):
        return value
    slots = {slot.name: getattr(value, slot.name) for slot in fields(value)} if is_dataclass(value) else {}
    return {**slots, **getattr(value, "__dict__", {})}


def parts_within(value: Any, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (name or index, part) of all that containers and objects hold, at any depth, each object once."""
    seen = {} if seen is None else seen
    for name, part in parts_of(value).items() if id(value) not in seen else ():
        seen[id(value)] = value  # no id is reused
        yield str(name), part
        yield from parts_within(part, seen)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers are the tensors that they were before, with the same values, whatever forwards have written to
    them or put in their place. Masks are left alone, and what has become smaller."""
    before = [
        (module._buffers, name, x, x.detach().clone())
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None and not x.is_meta and not (x.dtype == torch.bool and hasattr(module, "masked_names"))
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, x, values in before:
                if (now := buffers.get(name)) is not None and now.shape == values.shape:
                    buffers[name] = x if x.grad_fn is None else x.detach_()  # what was written to it had one
                    if not torch.equal(dense_rows(x), dense_rows(values)):
                        x.copy_(values)


def count_nonzero(x: Tensor) -> int:
    """How many values are not zero, counted piece by piece: on a GPU torch's own count holds eight bytes for each."""
    return sum(int(piece.count_nonzero()) for piece in x.reshape(-1).split(2**22))


def dense_rows(x: Tensor) -> Tensor:
    """A sparse tensor as a dense one, a nested one as its rows, complex numbers as two each; any other as it is."""
    if x.is_nested:
        return torch.cat(x.unbind())
    x = x if x.layout == torch.strided else x.to_dense()
    return torch.view_as_real(torch.atleast_1d(x).resolve_conj()).flatten(-2) if x.is_complex() else x


def map_batch(function: Callable[[Any], Any], value: Any, kinds: tuple[type, ...] = (Tensor,)) -> Any:
    """`map_tensors` of what a model is called with, or of other ``kinds`` than tensors, also in objects, which are
    copied if they hold one that changes."""

    def mapped(leaf: Any) -> Any:
        inside = {id(x): x for _, x in parts_within([leaf]) if isinstance(x, (*kinds, nn.Module))}
        new = {key: function(x) if isinstance(x, kinds) else x for key, x in inside.items()}
        return leaf if all(new[key] is x for key, x in inside.items()) else deepcopy(leaf, dict(new))

    return map_leaves(mapped, value)


# devices --------------------------------------------------------------------------------------------------------------


def input_device(model: nn.Module) -> torch.device:
    """The device that the model's inputs go to.

    It is that of the first parameter with values, else the first that a hook of accelerate runs on, else the CPU.
    """
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device("cpu")


@contextmanager
def onloaded(block: nn.Module, device: torch.device, *, resident: bool) -> Iterator[None]:
    """While entered, every call of the block runs on ``device``; its outputs move to where the block came from.

    resident: the weights stay on ``device`` until the end; otherwise they move there and back for each call.

    Nothing happens to a block that is on ``device`` already, and to one that accelerate moves.
    """
    home = input_device(block)
    if home == device or has_hook(block):
        yield
        return

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not resident:
            module.to(device)
        return map_tensors(lambda x: x.to(device), args), map_tensors(lambda x: x.to(device), kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not resident:
            module.to(home)
        return map_tensors(lambda x: x.to(home), output)

    # the outputs move before other hooks see them: which block's output is whose input is told by identity
    with (
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, prepend=True),
    ):
        try:
            if resident:
                block.to(device)
            yield
        finally:
            block.to(home)


# products of bfloat16 on CPUs -----------------------------------------------------------------------------------------

PRODUCTS = ("avx512_bf16", "avx10_2", "amx_bf16", "bf16", "sve_bf16")  # of bfloat16; the last two are ARM's


def multiplies_bfloat16() -> bool:
    """Whether the CPU says of itself that it has products of bfloat16. True where torch has no way to ask it."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is None or any(capabilities().get(name) for name in PRODUCTS)


def widens(model: nn.Module, device: torch.device | None, choice: bool | None) -> bool:
    """Whether layers of bfloat16 that run on the CPU are to run in float32: where it has no products of bfloat16, or as
    the ``choice`` says."""
    on_cpu = (device or input_device(model)).type == "cpu"
    narrow = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return on_cpu and narrow and (not multiplies_bfloat16() if choice is None else choice)


def in_float32(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """While entered, modules with weights of bfloat16 run in float32 where no gradient is asked for. Their inputs come,
    and their outputs go, in bfloat16.

    The Parameters stay the same objects, and hold their own values again after each call, whatever happens in it.
    """

    def cast(value: Any, dtype: torch.dtype, to: torch.dtype) -> Any:
        return map_tensors(lambda x: x.to(to) if x.dtype == dtype else x, value)

    def widened(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*module.parameters(), *module.buffers()) if x.dtype == torch.bfloat16]
        if not tensors or torch.is_grad_enabled() or has_hook(module):
            return forward(*args, **kwargs)
        narrow = [x.data for x in tensors]
        args, kwargs = cast((args, kwargs), torch.bfloat16, torch.float32)
        try:
            for x in tensors:
                x.data = x.data.float()
            return cast(forward(*args, **kwargs), torch.float32, torch.bfloat16)
        finally:
            for x, values in zip(tensors, narrow):
                x.data = values

    return forwards_replaced(modules, widened)


# memory ---------------------------------------------------------------------------------------------------------------


CGROUPS = Path("/sys/fs/cgroup")


def bytes_of(device: torch.device) -> tuple[float, float]:
    """(bytes that this process can ever have on a device, those that are free now, with what torch has reserved and
    does not use); inf if that cannot be told. On the CPU limits of its cgroups and of its address space (``ulimit -v``)
    count, and swap."""
    if device.type not in ("cpu", "meta"):
        module: Any = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info") or (device.index or 0) >= module.device_count():  # planned for another
            return math.inf, math.inf
        free, most = module.mem_get_info(device)
        return most, free + module.memory_reserved(device) - module.memory_allocated(device)
    memory, swap, process = psutil.virtual_memory(), psutil.swap_memory(), psutil.Process()
    most, free = min([memory.total, *_cgroup_limits()]), memory.available
    usage = process.memory_info()
    most, free = most + swap.total, min(free, most - usage.rss) + swap.free
    if sys.platform == "linux" and (limit := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:
        most, free = min(most, limit), min(free, limit - usage.vms)
    return most, free


def _cgroup_limits() -> Iterator[int]:
    """The limits of the control groups that this process is in, of both versions, and of those around them."""
    roots = {"": (CGROUPS, "memory.max"), "memory": (CGROUPS / "memory", "memory.limit_in_bytes")}
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        root, name = roots.get(controllers, (None, ""))
        for folder in accumulate(Path(path).parts[1:], Path.joinpath, initial=root) if root is not None else ():
            if (folder / name).is_file() and (text := (folder / name).read_text().strip()).isdecimal():
                yield int(text)


def bytes_in_use(device: torch.device) -> int:
    """Bytes of tensors on an accelerator; on the CPU, and where the device cannot tell, those of this process."""
    module = _with_statistics(device)
    return psutil.Process().memory_info().rss if module is None else module.memory_allocated(device)


def _with_statistics(device: torch.device) -> Any:
    """torch's module of an accelerator that counts its bytes; None for others, and for the CPU."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def peak_bytes(device: torch.device) -> int:
    """The largest `bytes_in_use` of a device since this process began, or since torch's statistics were reset."""
    if (module := _with_statistics(device)) is not None:
        return module.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":  # not getrusage: it carries the peak of the parent process over
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# of a plain RuntimeError that says so: of the CPU's allocator, of C++'s, and of two of CUDA's libraries
WORDS = ("DefaultCPUAllocator: ", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation has failed, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def free_what_can_be_freed() -> None:
    """Return memory that nothing uses to the devices and to the system."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Have glibc return freed memory to the system.

    By itself glibc holds on to the memory of freed tensors of middle size, more with every block that is loaded and
    dropped. Other C libraries have no such call, and nothing happens.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# accelerate's hooks ---------------------------------------------------------------------------------------------------
# They wrap a module's forward, and can hold its weights elsewhere between calls (offloading).


WRAPPED_BY = frozenset({"forward", "_hf_hook"})  # what it sets on a module


def has_hook(module: nn.Module) -> bool:
    """Whether accelerate wraps the forward of this module, or of one of its submodules."""
    return any(hasattr(child, "_hf_hook") for child in module.modules())


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that holds this module's weights elsewhere between calls, if there is one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
    return next((h for h in hooks if isinstance(h, AlignDevicesHook) and h.offload), None)


def refuse_what_cannot_be_written(model: nn.Module, names: set[str], *, masks: bool = True) -> None:
    """Raise ValueError if one of the parameters ``names`` cannot be changed.

    - It is on the meta device, without a hook: there are no values.
    - It is offloaded to disk.
    - It is to get one of the ``masks``, and its module's buffers, of which a mask is one, are offloaded as well.
    """
    for path, module in model.named_modules():
        hook = offloading_hook(module)
        for param, parameter in module.named_parameters(recurse=False):
            if (name := full_name(path, param)) not in names:
                continue
            if hook is None and parameter.is_meta:
                raise ValueError(f"{name!r} is on the meta device and has no values: load the model first")
            source, key = (None, "") if hook is None else _source(hook, param)
            if isinstance(source, OffloadedWeightsLoader) and key not in source.state_dict:
                raise ValueError(f"{name!r} is offloaded to disk: use sparsify_checkpoint, or no disk in device_map")
            if hook is not None and hook.offload_buffers and masks:
                raise ValueError(f"{name!r} would lose its mask: use enforce=False, or offload_buffers=False")


def offloaded(model: nn.Module, blocks: Iterable[nn.Module]) -> str | None:
    """The name of a module inside the blocks whose weights accelerate offloads, so that nothing can tune them or see
    their gradients."""
    inside = {module for block in blocks for module in block.modules()}
    paths = (path for path, module in model.named_modules() if module in inside and offloading_hook(module) is not None)
    return next(paths, None)


def refuse_offloaded(model: nn.Module, blocks: Iterable[nn.Module], option: str) -> None:
    """Raise ValueError if accelerate offloads weights of one of the blocks."""
    if (path := offloaded(model, blocks)) is not None:
        raise ValueError(f"{option} needs gradients, and accelerate offloads {path!r}: load it whole, and give device=")


def _source(hook: AlignDevicesHook, param: str) -> tuple[Any, str]:
    """(the object in which the hook finds the weights of its module, the name of a parameter there)."""
    source = hook.weights_map
    return (source.dataset, f"{source.prefix}{param}") if isinstance(source, PrefixedDataset) else (source, param)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that a module itself holds, as it is: as an attribute a sparse module gives it masked."""
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r}")
    return parameter


def stored(module: nn.Module, name: str) -> Tensor:
    """The tensor that holds the values of a parameter: the parameter itself, or accelerate's copy of it on the CPU."""
    hook = offloading_hook(module)
    if hook is None:
        return parameter_of(module, name)
    assert hook.weights_map is not None  # accelerate fills it in when the hook is added
    return hook.weights_map[name]


def identity_of(module: nn.Module, name: str) -> int:
    """A number that modules have in common if they hold one parameter. accelerate's `cpu_offload` gives each of them a
    placeholder of its own, and holds values that share their memory."""
    hook = offloading_hook(module)
    source, key = (None, "") if hook is None else _source(hook, name)
    in_memory = source[key].data_ptr() if isinstance(source, dict) else 0
    return in_memory or id(parameter_of(module, name))


def reoffload(model: nn.Module) -> None:
    """Offload the weights that accelerate has loaded for forwards that did not come to their end."""
    for module in model.modules():
        hook = offloading_hook(module)
        if hook is not None and any(not p.is_meta for p in module.parameters(recurse=hook.place_submodules)):
            hook.post_forward(module, None)


def remove_hooks(model: nn.Module) -> dict[str, dict[str, str]]:
    """Remove all of accelerate's hooks from a model -> an index of the parameters that are offloaded to disk.

    The index: parameter name -> {"safetensors_file": path, "weight_name": name in that file}. These parameters stay on
    the meta device.
    """
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        if (hook := offloading_hook(module)) is not None:
            source, _ = _source(hook, "")
            if isinstance(source, OffloadedWeightsLoader):
                index.update(source.index)
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():  # what accelerate puts back is bound to the module, which would not end by itself
        vars(module).pop("forward", None)
    model.__dict__.pop("hf_device_map", None)  # transformers takes a model that has it for one that is still offloaded
    return index


@contextmanager
def without_hook(module: nn.Module) -> Iterator[None]:
    """Take accelerate's hook off while the module's class changes: the hook binds the old class's forward."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    remove_hook_from_module(module)
    try:
        yield
    finally:
        add_hook_to_module(module, hook)
