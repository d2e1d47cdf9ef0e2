"""accelerate's hooks: they wrap a module's forward, and can hold its weights elsewhere between calls (offloading).

No other file knows how accelerate leaves its hooks on a module.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor, nn


def has_hook(module: nn.Module) -> bool:
    """Whether accelerate wraps the forward of this module, or of one of its submodules."""
    return any(hasattr(child, "_hf_hook") for child in module.modules())


def execution_device(module: nn.Module) -> torch.device | None:
    """The device that accelerate's hook runs this module on; None without a hook, or if the hook names no device."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


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
            name = f"{path}.{param}".removeprefix(".")
            if name not in names:
                continue
            if hook is None and parameter.device.type == "meta":
                raise ValueError(
                    f"{name!r} is on the meta device and has no values: load the model first; "
                    "make_plan takes it as it is"
                )
            if hook is not None and _on_disk(hook, param):
                raise ValueError(
                    f"{name!r} is offloaded to disk, where it cannot be changed: load the model with enough CPU memory "
                    "(device_map without a disk entry), and give device= to calibrate on an accelerator; or make its "
                    "checkpoint sparse with sparsify_checkpoint, which never holds all of it"
                )
            if hook is not None and hook.offload_buffers and masks:
                raise ValueError(
                    f"{name!r} is offloaded with offload_buffers=True, which would lose its mask: dispatch the model "
                    "with offload_buffers=False, or use enforce=False"
                )


def refuse_to_tune_offloaded(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Raise ValueError if accelerate offloads weights of one of the blocks: they could not be tuned between calls."""
    inside = {module for block in blocks for module in block.modules()}
    for path, module in model.named_modules():
        if module in inside and offloading_hook(module) is not None:
            raise ValueError(
                f"reconstruct tunes the weights of whole blocks, and accelerate offloads those of {path!r} between "
                "calls: load the model without a device_map and give device=, which moves one block at a time; or "
                "leave reconstruction out (reconstruct=False, also with quality=)"
            )


def _on_disk(hook: AlignDevicesHook, param: str) -> bool:
    """Whether a parameter of the hook's module is offloaded to disk, not to the CPU."""
    source, key = hook.weights_map, param
    if isinstance(source, PrefixedDataset):
        source, key = source.dataset, f"{source.prefix}{param}"
    return isinstance(source, OffloadedWeightsLoader) and key not in source.state_dict


def stored(module: nn.Module, name: str) -> Tensor:
    """The tensor that holds the values of a parameter: the parameter itself, or accelerate's copy of it on the CPU."""
    hook = offloading_hook(module)
    if hook is None:
        return module.get_parameter(name)
    assert hook.weights_map is not None  # accelerate fills it in when the hook is added
    return hook.weights_map[name]


@contextmanager
def offloaded_after_errors(model: nn.Module) -> Iterator[None]:
    """If a forward inside raises, offload the weights again that accelerate had loaded for it."""
    try:
        yield
    except BaseException:
        for module in model.modules():
            hook = offloading_hook(module)
            if hook is not None and any(not p.is_meta for p in module.parameters(recurse=hook.place_submodules)):
                hook.post_forward(module, None)
        raise


def taken_off(model: nn.Module) -> dict[str, dict[str, str]]:
    """Remove all of accelerate's hooks from a model -> an index of the parameters that are offloaded to disk.

    The index: parameter name -> {"safetensors_file": path, "weight_name": name in that file}. These parameters stay on
    the meta device.
    """
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        hook = offloading_hook(module)
        source = None if hook is None else hook.weights_map
        if isinstance(source, PrefixedDataset):
            source = source.dataset
        if isinstance(source, OffloadedWeightsLoader):
            index.update(source.index)
    remove_hook_from_module(model, recurse=True)
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
