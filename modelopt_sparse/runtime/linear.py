"""The Linear layer whose weight is packed 2:4: its forward, and what happens when it is moved, copied or saved.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.model.devices import without_hook
from modelopt_sparse.model.layers import PackedLayer
from modelopt_sparse.model.masking import drop_bound_forward
from modelopt_sparse.runtime.kernels import (
    ALWAYS_SPARSE,
    BACKENDS,
    Backend,
    Choice,
    as_numbers,
    dtype_name,
    multiply,
    register_operators,
)

PACKED = ("packed", "metadata", "scales")  # the buffers of a packed layer


class SemiStructuredLinear(PackedLayer):
    """A Linear layer, for inference, that multiplies by its packed 2:4 weight. `pack_module` makes it, in place.

    It takes the inputs that nn.Linear takes: any leading dimensions, any strides, autocast. It stays on the device and
    in the dtype that it was packed for. ``state_dict`` holds the dense weight, on the CPU: the packed bytes are only
    valid for one library and GPU, and are never written. ``weight`` is torch's tensor subclass, for code that looks at
    its shape, dtype or device.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    dense_weight: nn.Parameter | None
    packed: Tensor
    metadata: Tensor | None
    scales: Tensor | None
    dtype: torch.dtype  # of inputs, outputs and the weight before packing
    requires_grad_before: bool
    backend: str
    choices: tuple[Choice, ...]
    record: Any  # the layer's entry in the report

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype != self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"this layer is packed for {self.dtype} inputs of {self.in_features} channels and got {x.dtype} of "
                f"{x.shape[-1]}: convert the input"
            )
        tensors = (self.packed, self.metadata, self.scales, self.dense_weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            whole = torch.ops.modelopt_sparse.linear_24
            out = whole(flat, *tensors, self.out_features, self.backend, as_numbers(self.choices))
        else:
            out = multiply(flat, *tensors, self.out_features, self.backend, self.choices)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The dense weight if it was kept, else the packed one as torch's tensor subclass."""
        if self.dense_weight is not None:
            return self.dense_weight
        shape = torch.Size((self.out_features, self.in_features))
        return BACKENDS[self.backend].as_tensor(self.packed, self.metadata, shape)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weight occupies, dense copy included; torch's tensor subclass would report the dense size."""
        held = (self.packed, self.metadata, self.scales, self.dense_weight)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    @torch.no_grad()
    def unpacked(self) -> Tensor:
        """The dense weight, bit for bit as it was packed; codes times scales if it was quantized."""
        if self.dense_weight is not None:
            return self.dense_weight.detach()
        weight = BACKENDS[self.backend].unpack(self.packed, self.metadata, self.in_features)
        if self.scales is None:
            return weight
        return (weight.float() * self.scales).to(self.dtype)

    def extra_repr(self) -> str:
        kind = dtype_name(self.dtype if self.scales is None else self.packed.dtype)
        both = ", dense beside it" if self.dense_weight is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"2:4 {kind} packed by {self.backend}{both}"
        )

    def _apply(self, fn, recurse: bool = True):
        """Moves and casts. Raises ValueError for a new dtype or device, which packed bytes cannot be converted to."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device))
        if probe.dtype != self.dtype or probe.device != self.packed.device:
            raise ValueError(
                f"a layer packed 2:4 in {self.dtype} on {self.packed.device} cannot become {probe.dtype} on "
                f"{probe.device}: call modelopt_sparse.to_dense(model), move or cast it, and pack it again"
            )
        packed_buffers = {name: self._buffers.pop(name) for name in PACKED}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._buffers.update(packed_buffers)

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        register_operators()  # the process that a copy is unpickled in may have packed nothing yet

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        if self.scales is not None:
            why = "is quantized for this GPU alone and is not saved"
            raise ValueError(f"{prefix}weight {why}: save the model before to_semi_structured")
        destination[f"{prefix}weight"] = self.unpacked().cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        del state_dict, local_metadata, strict, missing_keys, unexpected_keys
        error_msgs.append(f"{prefix}weight is packed 2:4: call modelopt_sparse.to_dense before loading into it")


@torch.no_grad()
def pack_module(
    module: Any,
    packed: tuple[Tensor, Tensor | None],
    scales: Tensor | None,
    backend: Backend,
    choices: Sequence[Choice] = ALWAYS_SPARSE,
) -> None:
    """Turn an nn.Linear, in place, into a `SemiStructuredLinear` of its packed weight; hooks and bias stay.

    ``packed`` are (values, metadata) of its weight, ``scales`` those of a quantized one. The dense Parameter stays
    beside them, as ``dense_weight``, if one of the choices is dense; otherwise it leaves the module.
    """
    register_operators()
    weight = module.get_parameter("weight")
    with without_hook(module), torch.inference_mode(False):
        drop_bound_forward(module)
        del module.weight
        object.__setattr__(module, "__class__", SemiStructuredLinear)
        for name, tensor in zip(PACKED, (*packed, scales)):
            module.register_buffer(name, tensor, persistent=False)
        module.register_parameter("dense_weight", None if all(choice.sparse for choice in choices) else weight)
        module.dtype, module.backend, module.choices = weight.dtype, backend.name, tuple(choices)
        module.requires_grad_before = weight.requires_grad


@torch.no_grad()
def unpack_module(module: SemiStructuredLinear) -> None:
    """Turn a `SemiStructuredLinear` back, in place, into the nn.Linear that it was."""
    with without_hook(module), torch.inference_mode(False):
        weight, bias = module.dense_weight, module.bias
        if weight is None:
            weight = nn.Parameter(module.unpacked(), module.requires_grad_before)
        drop_bound_forward(module)
        for name in (*PACKED, "dense_weight", "bias"):
            delattr(module, name)
        for name in ("dtype", "backend", "choices", "requires_grad_before", "record"):
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", nn.Linear)
        module.register_parameter("weight", weight)  # first, as nn.Linear has it
        module.register_parameter("bias", bias)
