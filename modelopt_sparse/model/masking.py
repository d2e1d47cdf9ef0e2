"""Sparse modules: the only code that enforces masks.

A module becomes sparse when its class is swapped, in place, for one that runs the base class's forward over masked
parameters. The parameter stays a real leaf Parameter and is exactly +0.0 at pruned places at rest. Its mask (bool,
True = kept) is the buffer ``<parameter>_mask`` beside it. Any parameter of any module can carry one.

The file reads from the mask to the bits: setting masks, the sparse class, its forward, when zeros are written again,
how they are written, and what becomes of gradients.
"""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils.checkpoint import checkpoint

from modelopt_sparse.distributed import is_fully_sharded, is_sharded, mask_like
from modelopt_sparse.model.devices import (
    count_nonzero,
    full_name,
    parameter_of,
    stored,
    unwrapped,
    without_hook,
)
from modelopt_sparse.model.forwards import has_own_forward, is_other, replaced_forward, why_other

SUFFIX = "_mask"

# masks of a model -----------------------------------------------------------------------------------------------------


def set_mask(module: nn.Module, name: str, mask: Tensor) -> None:
    """Make the parameter ``name`` (a full name such as "model.layers.0.mlp.up_proj.weight") of ``module`` sparse.

    ``mask`` is bool, shaped like the parameter, True = kept; it replaces an older one. Pruned weights become +0.0 in
    place, so the Parameter object and its optimizer stay valid. Call it on the whole model, so that `save_pretrained`
    leaves the mask out of the folder. Warns if the weight that the module's forward uses is another one.

    Raises ValueError if there is no such parameter, if the mask is not bool or has another shape, or if the module
    cannot become sparse: its forward was replaced on the instance, or it has an attribute with the mask's name.
    """
    module = unwrapped(module)
    owner, param, _ = _find_parameter(module, name)
    _check_mask(name, mask, stored(owner, param))
    refuse_what_cannot_be_sparse(module, name)
    with without_hook(owner), torch.inference_mode(False):  # an inference tensor could not be saved for backward
        buffer = mask.to(parameter_of(owner, param).device, copy=True).contiguous()
        if not isinstance(owner, SparseModule):
            _refuse_replaced_forward(owner)  # the one that a hook has wrapped
            drop_bound_forward(owner)
            object.__setattr__(owner, "__class__", _sparse_class(type(owner)))
        assert isinstance(owner, SparseModule)
        owner.register_buffer(param + SUFFIX, buffer)
        owner.masked_names = (*(n for n in owner.masked_names if n != param), param)
    if not is_fully_sharded(module):  # the Parameter of the moment may be one that FSDP fills without counting it up
        watch(owner)
    owner.masked_path = name.rpartition(".")[0]
    owner.count_kept()
    torch.autograd.graph.increment_version(stored(owner, param))  # a forward before had other zeros
    rezero_all(owner, recurse=False, tell=False)
    _hide_from_save_pretrained(module, name + SUFFIX, hidden=True)
    if param == "weight" and has_own_forward(owner, cls := dense_class(owner)) and is_other(owner, cls):
        warnings.warn(f"{cls.__name__}: {why_other(cls)}: masks hold in the stored weights, not in those", stacklevel=2)


def refuse_what_cannot_be_sparse(module: nn.Module, name: str) -> None:
    """Raise the ValueError of `set_mask` if the parameter ``name`` of ``module`` cannot carry a mask."""
    owner, param, _ = _find_parameter(module, name)
    if isinstance(owner, SparseModule) and param in owner.masked_names:
        return
    if hasattr(owner, param + SUFFIX):
        clash = f"{type(owner).__name__} has an attribute {param + SUFFIX!r}"
        raise ValueError(f"{name!r}: {clash}, where the mask belongs: rename it, or sparsify with enforce=False")
    weight = getattr(owner, param)
    codes = weight.is_quantized or (weight.is_floating_point() and weight.element_size() == 1)
    if weight.layout != torch.strided or codes or 0 in weight.stride():
        raise ValueError(f"{name!r} is sparse, quantized or expanded, and takes no zeros: give a dense copy of it")
    if not isinstance(owner, SparseModule):  # others may have wrapped its forward since
        _refuse_replaced_forward(owner)


def update_mask(module: nn.Module, name: str, mask: Tensor) -> None:
    """Change the mask that the parameter ``name`` of ``module`` carries, in place; newly pruned weights become +0.0.

    ``mask`` is bool, shaped like the parameter. The buffer stays the same tensor, as captured graphs want it.
    """
    owner, param, _ = _find_parameter(module, name)
    if (buffer := owner._buffers.get(param + SUFFIX)) is None:
        raise ValueError(f"{name!r} has no mask, as after its layer is replaced: mts.set_mask gives it one")
    _check_mask(name, mask, buffer)
    with torch.no_grad():
        buffer.copy_(mask)
    assert isinstance(owner, SparseModule)
    owner.count_kept()
    rezero(stored(owner, param), buffer, owner, param, tell=False)


def _check_mask(name: str, mask: Tensor, like: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask of {name!r} is a {type(mask).__name__}: give a torch.bool tensor, True = kept")
    fits = (mask.dtype, mask.shape, mask.layout) == (torch.bool, like.shape, torch.strided)
    if not fits or (mask.is_meta and not like.is_meta):
        form = f"{mask.layout} {mask.dtype} {list(mask.shape)} on {mask.device}"
        raise ValueError(f"mask of {name!r} is {form}: give torch.bool {list(like.shape)} with values, True = kept")


def named_masks(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full parameter name, mask) of every masked parameter; True = kept.

    The names are those of the model inside of torch.compile's wrapper, DataParallel or DistributedDataParallel.
    """
    for path, child in unwrapped(module).named_modules():
        if isinstance(child, SparseModule):
            for name, mask in _own_masks(child):
                yield full_name(path, name), mask


def apply_masks(module: nn.Module, *, recurse: bool = True) -> None:
    """Write +0.0 to every pruned place of the parameters, in place. ``recurse``: those of submodules as well.

    Whoever reads a weight as an attribute of its module gets it so, where anything can see that something has written
    to it. Call this after writes that nothing can see: through NumPy, DLPack or another process that shares the memory.
    """
    rezero_all(module, recurse=recurse)


def rezero_all(module: nn.Module, *, recurse: bool = True, tell: bool = True) -> None:
    """`apply_masks`; ``tell``: with a warning of what is lost."""
    for child in module.modules() if recurse else [module]:
        if isinstance(child, SparseModule):
            for name, mask in _own_masks(child):
                rezero(stored(child, name), mask, child, name, tell=tell)


def remove_masks(module: nn.Module, names: Container[str] | None = None) -> None:
    """Back to plain modules: original classes, no masks, weights zero at pruned places. Parameters stay the same.

    names: the full names of the parameters that lose their masks; None: all.
    """
    module = unwrapped(module)
    apply_masks(module)
    sparse = [(path, child) for path, child in module.named_modules() if isinstance(child, SparseModule)]
    for path, child in sparse:
        with without_hook(child):
            for name, _ in _own_masks(child):
                if names is None or full_name(path, name) in names:
                    delattr(child, name + SUFFIX)
                    unwatch(child._parameters.get(name), child)
                    child.masked_names = tuple(masked for masked in child.masked_names if masked != name)
                    _hide_from_save_pretrained(module, full_name(path, name) + SUFFIX, hidden=False)
            if _own_masks(child):
                continue
            for attribute in ("masked_names", "masked_path", "faint_parameters", "masks_told", "mask_sizes"):
                child.__dict__.pop(attribute, None)
            drop_bound_forward(child)
            # others may have built on the sparse class since (a subclass by fully_shard, a forward in the instance):
            # then it stays, and without a mask it does nothing
            if type(child) is _sparse_class(child.dense_type) and "forward" not in child.__dict__:
                object.__setattr__(child, "__class__", child.dense_type)


@contextmanager
def without_masks(module: nn.Module) -> Iterator[None]:
    """While entered, sparse modules run with their weights as they are, and gradients reach all places."""
    before = {child: child.masked_names for child in module.modules() if isinstance(child, SparseModule)}
    try:
        for child in before:
            child.masked_names = ()
        yield
    finally:
        for child, names in before.items():
            child.masked_names = names
        rezero_all(module, tell=False)


def pass_pruned_gradients(module: nn.Module, through: bool, names: Container[str]) -> None:
    """Switch whether gradients reach the pruned places of these masked parameters, as `faint_gradient` makes them."""
    for path, child in module.named_modules():
        if isinstance(child, SparseModule):
            chosen = {param for param in child.masked_names if full_name(path, param) in names}
            others = set(child.faint_parameters) - chosen
            child.faint_parameters = tuple(sorted(others | chosen if through else others))


def attach_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Re-apply the masks of ``model`` to its weights and to the optimizer's state after every step, and once now.

    It is needed where an optimizer can change a weight whose gradient is zero: Muon, momentum that is older than the
    mask, weight averaging in the optimizer. SGD, Adam, AdamW, Adafactor and LBFGS from a fresh state keep zeros without
    it. Returns a handle; ``handle.remove()`` ends it.

    Raises ValueError if the optimizer holds no parameter of ``model``.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    parameters = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(f"this {type(optimizer).__name__} holds no parameter of the model: build it after sparsify")

    @torch.no_grad()
    def reapply(*_: Any) -> None:
        rezero_all(model, tell=False)
        for name, mask in named_masks(model):
            zero_state(optimizer, _find_parameter(model, name)[2], mask)

    reapply()
    hook = torch.compiler.disable(reapply)  # for users who compile `step`
    return optimizer.register_step_post_hook(hook)  # type: ignore[arg-type]  # torch declares no result of `disable`


def zero_state(optimizer: torch.optim.Optimizer, weight: nn.Parameter, mask: Tensor) -> None:
    """Write +0.0 wherever ``mask`` is False to the optimizer's state of a weight: to all tensors of its shape.

    Tensors with an attribute ``requires_dense`` that is True stay as they are, and so do integers: they are codes
    (8-bit states), where the code 0 need not stand for the number 0. So does a state that holds more than numbers and
    tensors whose axes are those of the weight: moments beside matrices of another basis (SOAP, GaLore) are no moments
    of single weights, and zeros in them would let training diverge.
    """
    # optimizers inside: of ZeroRedundancyOptimizer, SAM, Lookahead
    inside = [x for x in vars(optimizer).values() if isinstance(x, torch.optim.Optimizer)]
    states = [x.state.get(weight, {}).values() for x in (optimizer, *inside)]
    for value in (value for state in states if all(_fits(x, weight) for x in state) for value in state):
        alike = isinstance(value, Tensor) and value.shape == weight.shape and value.is_floating_point()
        if alike and not getattr(value, "requires_dense", False):
            with torch.no_grad():
                write_zeros(value, mask_like(mask.to(value.device), value))


def _fits(value: Any, weight: Tensor) -> bool:
    """Whether a value of an optimizer's state is a number, a vector, or has the weight's axes, all but one or means."""
    if isinstance(value, Tensor):
        of_all = value.dim() == weight.dim() and all(a in (1, b) for a, b in zip(value.shape, weight.shape))
        without_one = [weight.shape[:i] + weight.shape[i + 1 :] for i in range(weight.dim())]
        return value.dim() < 2 or of_all or value.shape in without_one
    return value is None or isinstance(value, (bool, int, float, str))


def _find_parameter(module: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    module = unwrapped(module)
    try:
        path, _, param = name.rpartition(".")
        owner = module.get_submodule(path)
        return owner, param, parameter_of(owner, param)
    except AttributeError:
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}: give a full name") from None


def _hide_from_save_pretrained(model: nn.Module, key: str, *, hidden: bool) -> None:
    """Whether `save_pretrained` of ``model``, and of the models inside it, leaves out the mask ``key``.

    transformers, which takes seconds, is not imported here: if nobody has imported it, no model is one of its own.
    """
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    parts = key.split(".")
    for depth in range(len(parts)):
        inner: Any = model.get_submodule(".".join(parts[:depth]))
        if isinstance(inner, pretrained):
            ignored, name = set(inner._keys_to_ignore_on_save or ()), ".".join(parts[depth:])
            inner._keys_to_ignore_on_save = ignored | {name} if hidden else ignored - {name}


# the sparse class -----------------------------------------------------------------------------------------------------


class SparseModule(nn.Module):
    """Mixin of every sparse module; ``dense_type`` is the class that the module had and gets back on export.

    ``masked_names`` are the parameters that carry a mask, in the module that `set_mask` found at ``masked_path``.
    ``faint_parameters`` are those of them whose gradients reach pruned places (`pass_pruned_gradients`). ``masks_told``
    are those of which `_tell` has warned. ``mask_sizes``: in a copy of a module, how many weights each mask keeps, and
    its version then. Modules of the user's own have attributes too: these names are none that one would take.
    """

    dense_type: ClassVar[type[nn.Module]]
    masked_names: tuple[str, ...] = ()
    masked_path: str = ""
    masks_told: tuple[str, ...] = ()
    faint_parameters: tuple[str, ...] = ()
    mask_sizes: dict[str, tuple[int, int]] | None = None

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            apply_masks(self, recurse=False)
        return super().train(mode)

    def count_kept(self, *, copied: bool = False) -> None:
        """Remember how many weights each mask keeps, in a module that has been ``copied``, now or before."""
        if copied or self.mask_sizes is not None:
            masks = [(name, mask) for name, mask in _own_masks(self) if not (mask.is_meta or mask.is_inference())]
            self.mask_sizes = {name: (count_nonzero(mask), mask._version) for name, mask in masks}

    def refuse_averaged_mask(self, name: str, mask: Tensor) -> None:
        """An average of models is a copy, and averages of masks keep what any of the models has kept."""
        sizes = self.mask_sizes or {}
        if name not in sizes or mask.is_meta or mask.is_inference():
            return
        size, version = sizes[name]
        if version != mask._version and (now := count_nonzero(mask)) != size:
            problem = f"the mask of {full_name(self.masked_path, name)!r} keeps {now} weights, and kept {size}"
            cause = "something else than this package has written to it, as AveragedModel(use_buffers=True) does"
            raise ValueError(f"{problem}: {cause}: see 'Averages of weights' in docs/training.md")
        sizes[name] = size, mask._version

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        weight, _, part = name.rpartition("_")
        if weight in self.masked_names and part in ("orig", "g", "v"):
            self._refuse_another_weight(weight)  # prune, spectral_norm and weight_norm of torch.nn.utils
        super().register_parameter(name, param)
        watch(self)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return _masked(self, name, value) if name in self.masked_names else value

    def __delattr__(self, name: str) -> None:
        # parametrize and spectral_norm of torch.nn.utils begin with this; refused later, the weight would be lost. LoRA
        # on attention deletes it too, and puts one back: only the caller tells them apart.
        if name in self.masked_names and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.utils."):
            self._refuse_another_weight(name)
        super().__delattr__(name)

    def _refuse_another_weight(self, name: str) -> None:
        raise ValueError(f"{name!r} of this {type(self).__name__} carries a mask and stays as it is: mts.export first")

    def __prepare_scriptable__(self) -> Any:
        raise ValueError(f"torch.jit.script takes no {type(self).__name__}: mts.export first")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for name in self.masked_names:
            unwatch(self._parameters.get(name), self)  # torch makes new Parameters of plain ones only
        super()._apply(fn, recurse)
        for name, mask in _own_masks(self):  # `type(dtype)` converts buffers of all dtypes
            self._buffers[name + SUFFIX] = mask.bool()
        watch(self)
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.faint_parameters = ()  # nobody moves the masks of a copy
        self.count_kept(copied=True)
        watch(self)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        for name, mask in _own_masks(self):
            zeros = "?" if mask.is_meta else f"{1 - mask.count_nonzero().item() / max(mask.numel(), 1):.1%}"
            parts.append(f"{name}: {zeros} zeros")
        return ", ".join(filter(None, parts))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # classes made at run time cannot be found by name; rebuild from the base class
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _rebuild, (self.dense_type,), *state

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        apply_masks(self, recurse=False)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(  # the signature is nn.Module's
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        for name, mask in _own_masks(self):
            key = f"{prefix}{name}"
            state_dict.setdefault(key + SUFFIX, mask)  # a dense state dict: the module keeps its mask
            if local_metadata.get("assign_to_params_buffers"):  # they become the module's, and change with it
                state_dict[key + SUFFIX] = state_dict[key + SUFFIX].to(torch.bool, copy=True)
                if key in state_dict:
                    state_dict[key] = state_dict[key].clone()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.count_kept()
        apply_masks(self, recurse=False)


@functools.cache
def _sparse_class(base: type[nn.Module]) -> type[SparseModule]:
    # Trainer asks for the arguments of a model's forward, and config.json holds the name of its class
    wrapped = functools.wraps(base.forward)(lambda self, *args, **kwargs: _forward(self, *args, **kwargs))
    forward = _forward_linear if base.forward is nn.Linear.forward else wrapped
    members = {"dense_type": base, "forward": forward, "__module__": __name__}
    name = base.__name__ if hasattr(base, "save_pretrained") else f"Sparse{base.__name__}"
    return type(name, (SparseModule, base), members)


def _rebuild(base: type[nn.Module]) -> nn.Module:
    """A pickled sparse module without its state. Files of `torch.save(model)` hold the name of this function."""
    cls = _sparse_class(base)
    return cls.__new__(cls)


def dense_class(module: nn.Module) -> Any:
    """The class of a module, or the one that it had before it became sparse."""
    return module.dense_type if isinstance(module, SparseModule) else type(module)


def _refuse_replaced_forward(module: nn.Module) -> None:
    if replaced_forward(module) is not None:
        problem = f"the forward of this {type(module).__name__} was replaced on the instance"
        raise ValueError(f"{problem}: put it into a subclass, where a mask reaches it, or give enforce=False")


def drop_bound_forward(module: nn.Module) -> None:
    """Remove the class's own forward, as accelerate leaves it bound in an instance: it would outlive the class."""
    if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
        del module.__dict__["forward"]


def _own_masks(module: SparseModule) -> list[tuple[str, Tensor]]:
    """(parameter name, mask) of the masks that a module itself holds."""
    masks = ((name, module._buffers.get(name + SUFFIX)) for name in module.masked_names)
    return [(name, mask) for name, mask in masks if mask is not None and module._parameters.get(name) is not None]


# the forward ----------------------------------------------------------------------------------------------------------


def _forward(self: SparseModule, *args: Any, **kwargs: Any) -> Any:
    """The forward of a sparse module: that of its base class, which reads masked weights as everybody does."""
    if "_is_replica" in self.__dict__:  # of DataParallel: lives for one call, its weights are plain attributes
        for name in self.masked_names:
            self.__dict__[name] = _masked(self, name, self.__dict__.get(name))
    return self.dense_type.forward(self, *args, **kwargs)


def _forward_linear(self: SparseModule, *args: Any, **kwargs: Any) -> Any:
    """The forward of nn.Linear, which runs for each token that a language model writes, and in each training step.

    It saves what nn.Linear spends on finding its parameters, and a copy of the gradient, which here belongs to nobody
    else yet; so a layer takes about as long as a dense one (examples/benchmarks/masks.py).
    """
    parameters = self._parameters
    weight, mask = parameters.get("weight"), self._buffers.get("weight_mask")
    recorded = torch.compiler.is_dynamo_compiling() or torch._C._is_tracing()
    plain = self.masked_names == ("weight",) and len(args) == 1 and isinstance(args[0], Tensor)
    if recorded or not plain or mask is None or not isinstance(weight, MaskedParameter):
        return _forward(self, *args, **kwargs)
    bias: Any = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (`get` would look up both)
    if not torch.is_grad_enabled() and is_zeroed(weight, mask):
        return F.linear(args[0], weight.zeroed.plain, bias)  # type: ignore[union-attr]  # set: `is_zeroed`
    whole = self.faint_parameters or is_recorded(weight)
    if torch.is_grad_enabled() and weight.requires_grad and not whole:
        return F.linear(args[0], _CutInPlace.apply(_masked(self, "weight", weight), mask), bias)
    return _forward(self, *args, **kwargs)


def _masked(module: SparseModule, name: str, weight: Any) -> Any:
    """The weight that a reader gets: itself, zero at pruned places, with gradients that are cut; or else a masked copy.

    - A Parameter is zeroed in its own memory, and a hook on it cuts its gradient. A masked copy would stay alive until
      the backward pass, for every layer.
    - In a graph that runs later a masked copy is made; of a compiled one, once more in the backward pass.
    - Tensors that are no Parameter belong to the caller (functional_call), and so do Parameters without a gradient that
      are not the module's own: a masked copy is freed after the call.
    """
    own_mask = module._buffers.get(name + SUFFIX)
    if own_mask is None or weight is None:
        return weight
    if is_recorded(weight):
        if torch.onnx.is_in_onnx_export():
            problem = "its weights become products with masks, not constants: give mts.export(model)"
            warnings.warn(f"ONNX export of a sparse {type(module).__name__}: {problem}", stacklevel=2)
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting() or not torch.is_grad_enabled():
            return masked_copy(weight, own_mask)
        if name in module.faint_parameters:
            return _Zeroed.apply(weight, own_mask)
        return checkpoint(masked_copy, weight, own_mask, use_reentrant=False, preserve_rng_state=False)
    if not isinstance(weight, nn.Parameter):
        return masked_copy(weight, mask_like(own_mask, weight))
    if weight.is_meta or ensure_zeroed(weight, own_mask, module, name):
        return weight
    trained = torch.is_grad_enabled() and weight.requires_grad
    if trained or is_sharded(weight) or module in vars(weight).get("cuts", ()):
        cut_gradient(weight, module, name)
        rezero(weight, own_mask, module, name)
        return weight
    return nn.Parameter(masked_copy(weight, mask_like(own_mask, weight)).detach(), weight.requires_grad)


# when zeros are written again -----------------------------------------------------------------------------------------
# Writing them is a pass over the weight, so a forward does it only if something may have written to the weight since
# the last time. torch counts the in-place writes to a tensor, its version. Three kinds of writes it does not count:
#
# - through ``.data``: a `MaskedParameter` notices that somebody asks for it;
# - by torch's fused optimizers: they need a gradient, so a weight that has one is not trusted, nor is a weight that has
#   got one since, from a backward pass or by hand;
# - to weights that are put into the module for the length of a call (`functional_call`, FSDP, accelerate): only a
#   Parameter that is registered with the module is trusted.
#
# docs/training.md lists what no check can see.


class Zeroed(NamedTuple):
    """A moment at which a weight was zero at the pruned places of ``mask``, and the versions of both at that moment.

    ``plain`` is the weight's memory as a plain tensor, which torch's operators take faster than any class of ours.
    """

    mask: Tensor
    mask_version: int
    version: int
    plain: Tensor


GRAD: Any = torch.Tensor.grad  # a descriptor, declared as a tensor


class MaskedParameter(nn.Parameter):
    """A Parameter that is registered with sparse modules, and notices that somebody asks for its memory.

    ``cuts`` has, for each of these modules, the hooks that cut its gradient. ``zeroed`` is None as soon as something
    may have written to the weight without counting up its version. ``backwards`` counts gradients, and ``looked_at`` is
    their number when it was last zeroed. Copied, it is a MaskedParameter without all of these; pickled, it becomes a
    plain Parameter.
    """

    zeroed: Zeroed | None = None
    backwards: int = 0
    looked_at: int = 0

    @property
    def data(self) -> Tensor:  # type: ignore[override]  # torch declares an attribute
        self.zeroed = None
        return raw_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.zeroed = None
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a descriptor, declared as a tensor

    def _set_grad(self, value: Tensor | None) -> None:
        self.zeroed = None  # gradients by hand come without a backward pass
        GRAD.__set__(self, value)

    grad = property(GRAD.__get__, _set_grad, GRAD.__delete__)  # type: ignore[assignment]  # torch declares an attribute

    def untyped_storage(self) -> torch.UntypedStorage:
        self.zeroed = None
        return super().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name not in OURS})
        return plain.__reduce_ex__(protocol)


OURS = ("cuts", "zeroed", "backwards", "looked_at")  # attributes of a MaskedParameter


def watch(holder: SparseModule) -> None:
    """Make the Parameters that carry a mask `MaskedParameter`s, in place, and cut their gradients.

    Other classes (sharded, quantized tensors) stay what they are, and are zeroed whenever they are read.
    """
    for name in holder.masked_names:
        weight = holder._parameters.get(name)
        if type(weight) is nn.Parameter:
            object.__setattr__(weight, "__class__", MaskedParameter)
        if isinstance(weight, MaskedParameter):
            weight.zeroed = None
            cut_gradient(weight, holder, name)


def unwatch(weight: Tensor | None, holder: nn.Module) -> None:
    """End `watch`. A Parameter without a holder is a plain one again."""
    if isinstance(weight, MaskedParameter):
        cuts = vars(weight).get("cuts", {})
        for handle in cuts.pop(holder, {}).values():
            handle.remove()
        if not cuts:
            for name in OURS:
                vars(weight).pop(name, None)
            object.__setattr__(weight, "__class__", nn.Parameter)


def ensure_zeroed(weight: Tensor, mask: Tensor, holder: SparseModule, name: str, *, tell: bool = True) -> bool:
    """Make sure that a weight is zero wherever ``mask`` (True = kept) is False -> whether it is now.

    It is zeroed in place, once, unless it may not be written to: it belongs to somebody else, who has put it into
    ``holder`` for a call, or the call is recorded and runs again later.
    """
    if is_zeroed(weight, mask):
        return True
    holder.refuse_averaged_mask(name, mask)
    if (
        not isinstance(weight, MaskedParameter)
        or holder not in vars(weight).get("cuts", ())
        or weight.is_inference()  # tensors made in inference mode have no version
        or mask.is_inference()
        or weight.device != mask.device
        or weight.is_meta
        or is_recorded(weight)
    ):
        return False
    versions = mask._version, weight._version  # taken first: a write meanwhile is seen at the next forward
    if tell:
        _tell(weight, mask, holder, name)
    write_zeros(raw_data(weight), mask)
    if weight.grad is None:  # no fused step can follow, which does not count
        # with a Parameter's flag, for autocast keeps the casts of tensors that require a gradient, until it ends
        weight.zeroed = Zeroed(mask, *versions, raw_data(weight).requires_grad_(weight.requires_grad))
    return True


def is_zeroed(weight: Tensor, mask: Tensor) -> bool:
    """Whether nothing can have written to a weight since it was zeroed where ``mask`` is False."""
    zeroed: Zeroed | None = getattr(weight, "zeroed", None)
    return (
        zeroed is not None
        and zeroed.mask is mask
        and zeroed.mask_version == mask._version
        and zeroed.version == weight._version
        and GRAD.__get__(weight) is None
        and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())  # a plain tensor answers faster
    )


def _tell(weight: MaskedParameter, mask: Tensor, holder: SparseModule, name: str) -> None:
    """Warn, once for each weight, if there are values that the mask is about to throw away.

    To look is a pass over the weight, so of the steps of a training those are looked at whose number is a power of two.
    """
    stepped, weight.looked_at = weight.looked_at != weight.backwards, weight.backwards
    if name in holder.masks_told or not weight.numel() or (stepped and weight.backwards & (weight.backwards - 1)):
        return
    values = raw_data(weight)
    lost = torch.where(mask, 0, values)
    whole = not (values.is_floating_point() or values.is_complex())
    rounding = 0 if whole else torch.finfo(values.dtype).eps * values.abs().max()
    if count := int(((lost != 0) & ~(lost.abs() <= rounding)).sum()):
        holder.masks_told = (*holder.masks_told, name)
        loss = f"{count} values, up to {float(lost.abs().max()):.3g}, were written to pruned places of"
        where = "'What masks throw away' in docs/training.md"
        warnings.warn(f"{loss} {full_name(holder.masked_path, name)!r} and are lost: see {where}", stacklevel=2)


def rezero(weight: Tensor, mask: Tensor, holder: SparseModule, name: str, *, tell: bool = True) -> None:
    """Zero a weight wherever ``mask`` is False, in place, even if it seems to be zeroed."""
    if isinstance(weight, MaskedParameter):
        weight.zeroed = None
    if not ensure_zeroed(weight, mask, holder, name, tell=tell):
        with torch.inference_mode(weight.is_inference()):  # such tensors can only be written to in inference mode
            write_zeros(raw_data(weight), mask_like(mask.to(weight.device), weight))


def is_recorded(weight: Tensor) -> bool:
    """Whether operations on the weight go into a graph that runs later, or through a transform of `torch.func`."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or is_fx_symbolic_tracing()
        or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def raw_data(weight: Tensor) -> Tensor:
    """The weight's memory, as a tensor of its own: what is written to it does not count as a write to the weight.

    A backward pass that is still to come may use a weight that was zeroed this way: its forward used these zeros.
    """
    return torch.Tensor.data.__get__(weight)  # type: ignore[attr-defined]  # a descriptor, declared as a tensor


# how they are written -------------------------------------------------------------------------------------------------

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
PIECE = 2**19  # bytes that a core multiplies at once: torch first turns their mask into integers, which stay in cache


def write_zeros(tensor: Tensor, mask: Tensor) -> None:
    """Write +0.0 wherever ``mask`` (True = kept) is False, in place; over NaN, infinities and -0.0 as well.

    The bits of each number are multiplied by its mask, as integers. torch's `masked_fill_` and `where` go number by
    number on a CPU, and take about six times as long (examples/benchmarks/masks.py).
    """
    if (integers := _integers(tensor)) is None:
        tensor.masked_fill_(~mask, 0)
        return
    for numbers, part in _pieces(tensor.view(integers), mask):
        numbers.mul_(part)


def _integers(tensor: Tensor) -> torch.dtype | None:
    """What the numbers of a tensor are multiplied as; None if it is no plain tensor, or its numbers are too long."""
    plain = tensor.layout == torch.strided and not (is_sharded(tensor) or tensor.is_conj())
    return INTEGERS.get(tensor.element_size()) if plain else None


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in pieces that stay in a CPU's cache; as a whole where they are small, or on a GPU."""
    first = tensors[0]
    piece = PIECE // first.element_size() * torch.get_num_threads()
    if first.device.type != "cpu" or first.numel() <= piece:
        yield tensors
    elif all(x.is_contiguous() for x in tensors):
        yield from zip(*(x.view(-1).split(piece) for x in tensors))
    else:
        rows = max(1, piece * len(first) // first.numel())
        yield from zip(*(x.split(rows) for x in tensors))


def masked_copy(weight: Tensor, mask: Tensor) -> Tensor:
    """A copy with +0.0 wherever ``mask`` is False, through which gradients and transforms pass."""
    if torch.is_grad_enabled() or is_recorded(weight) or (integers := _integers(weight)) is None:
        return weight.masked_fill(~mask, 0)  # not `where`, which would take its memory layout from the mask
    copy = torch.empty_like(weight)
    for numbers, part, into in _pieces(weight.view(integers), mask, copy.view(integers)):
        torch.mul(numbers, part, out=into)
    return copy


# gradients ------------------------------------------------------------------------------------------------------------

FAINT = 2.0**-32  # exact in all dtypes but float16, where gradients this small are zero


def cut_gradient(weight: nn.Parameter, holder: nn.Module, name: str) -> None:
    """Mask every gradient of a Parameter that ``holder`` has as ``name``, whoever reads it; once for each of these."""
    cuts = vars(weight).setdefault("cuts", weakref.WeakKeyDictionary()).setdefault(holder, {})
    if name not in cuts and (weight.is_floating_point() or weight.is_complex()) and not weight.is_inference():
        trained = weight.requires_grad
        weight.requires_grad_(True)  # torch takes no hook of a frozen one, which may be trained later
        cuts[name] = weight.register_hook(partial(_cut, weakref.ref(holder), name))
        weight.requires_grad_(trained)


def _cut(holder: Callable[[], Any], name: str, gradient: Tensor) -> Tensor | None:
    """A gradient, masked by selection: NaN or inf at a pruned place stays out. None: as it is."""
    module = holder()
    mask = module._buffers.get(name + SUFFIX) if module is not None and name in module.masked_names else None
    if module is None or mask is None:
        return None
    if isinstance(weight := module._parameters.get(name), MaskedParameter):
        weight.zeroed = None  # an optimizer may follow; fused ones do not count up the version
        weight.backwards += 1
    if gradient.layout == torch.sparse_coo:
        return _masked_sparse(gradient, mask)
    if name in module.faint_parameters:
        if hasattr(gradient, "faint"):  # by another module that holds the weight
            return None
        gradient = faint_gradient(gradient, mask_like(mask, gradient))
        gradient.faint = True  # type: ignore[attr-defined]  # a mark for the hooks of the weight's other holders
        return gradient
    masked_by, *versions = getattr(gradient, "masked", (None,))
    if masked_by is mask and versions == [mask._version, gradient._version]:
        return None
    return masked_copy(gradient, mask_like(mask, gradient))  # somebody else may have this one


class _CutInPlace(torch.autograd.Function):
    """Identity on a weight. Its gradient, which nobody else has yet, is masked in place; `_cut` sees that it is, if
    nothing is added to it."""

    @staticmethod
    def forward(ctx, weight: Tensor, mask: Tensor) -> Tensor:
        # not in `setup_context`: torch would bind the arguments by name in each call, which takes as long as the rest
        ctx.mask = mask
        return weight.detach()  # counts writes with the weight; of a view, torch would refuse what reads it after one

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        if not (torch.is_grad_enabled() or is_sharded(gradient) or is_recorded(gradient)):
            write_zeros(gradient, ctx.mask)
            gradient.masked = ctx.mask, ctx.mask._version, gradient._version
        return gradient, None


def _masked_sparse(tensor: Tensor, mask: Tensor) -> Tensor:
    """A sparse gradient, of an embedding with ``sparse=True``, with +0.0 among its values where ``mask`` is False."""
    tensor = tensor.coalesce()
    values = tensor.values().masked_fill(~mask[tuple(tensor.indices())], 0)
    return torch.sparse_coo_tensor(tensor.indices(), values, tensor.shape, is_coalesced=True, check_invariants=False)


class _Zeroed(torch.autograd.Function):
    """A masked copy of a weight for a compiled graph. The whole gradient passes, to the hook on the Parameter."""

    @staticmethod
    def forward(ctx, weight: Tensor, mask: Tensor) -> Tensor:
        return weight.masked_fill(~mask, 0)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


def faint_gradient(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient as it is where ``mask`` is True, and times FAINT elsewhere; NaN and inf become 0.0 there.

    So faint that it does not count in the norm that a loop clips: squares of it are 2^-64 of those of its neighbours.
    """
    return torch.where(mask, gradient, (gradient * FAINT).nan_to_num(0.0, 0.0, 0.0))


def dense_gradient(gradient: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `faint_gradient`, but for NaN and inf."""
    return torch.where(mask, gradient, gradient / FAINT)
