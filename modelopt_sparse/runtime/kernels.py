"""Packs and multiplies 2:4 weights with torch's two 2:4 libraries, behind one contract; and the Linear layer
that holds such a weight: its forward, and what happens when it is moved, copied or saved.

No other file touches torch's private 2:4 functions. torch's public interface, the tensor subclasses of torch.sparse, is
not enough:

- a tensor holds one algorithm for all token counts;
- it refuses non-contiguous inputs in `linear`;
- cuSPARSELt's search, and the converters of the CUTLASS format, have no public name.

No class flag of torch is ever set: a backend is chosen by calling its own functions.

Shape letters: R rows (out features), C columns (in features), G groups of four columns, T tokens.
"""

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from modelopt_sparse.model.devices import without_hook
from modelopt_sparse.model.find import PackedLayer
from modelopt_sparse.model.masking import drop_bound_forward

# backends -------------------------------------------------------------------------------------------------------------


DTYPES = (torch.float16, torch.bfloat16)  # of weights that can be packed
UNPACKED_AT_ONCE = 1024  # columns of the identity matrix that unpacking multiplies with at a time
ALIGNMENT = 16  # bytes: both libraries are told that every operand's address is a multiple of this


class Algorithm(NamedTuple):
    """cuSPARSELt's numbers for one way to multiply. They mean something for one library version, GPU and shape only."""

    alg_id: int = 0
    split_k: int = 1
    split_k_mode: int = -1


DEFAULT = Algorithm()


class Backend(ABC):
    """How one library packs a 2:4 weight [R, C] and multiplies inputs [T, C] by it. Stateless."""

    name: ClassVar[str]
    tensor_class: ClassVar[type[SparseSemiStructuredTensor]]

    def multiples(self, dtype: torch.dtype) -> Any:
        """The numbers that shapes must be multiples of: the rows and columns of a weight of ``dtype``
        (``sparse_min_rows``, ``sparse_min_cols``), which is never padded, and an input's tokens (``dense_min_rows``).
        """
        return self.tensor_class._DTYPE_SHAPE_CONSTRAINTS[dtype]

    @abstractmethod
    def unavailable(self, device: torch.device) -> str:
        """Why this library cannot run on a CUDA device, or ""."""

    @abstractmethod
    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """(values, metadata) of a contiguous weight, whose pattern is not checked here; cuSPARSELt's values are flat.

        ``metadata`` is None for a library that stores it together with the values.
        """

    @abstractmethod
    def unpack(self, packed: Tensor, metadata: Tensor | None, columns: int) -> Tensor:
        """The weight [R, C] that was packed."""

    @abstractmethod
    def multiply(
        self,
        packed: Tensor,
        metadata: Tensor | None,
        x: Tensor,
        bias: Tensor | None = None,
        algorithm: Algorithm = DEFAULT,
    ) -> Tensor:
        """x W^T (+ bias) as [T, R], contiguous. x [T, C] is contiguous, T a multiple of ``dense_min_rows``."""

    def search(self, packed: Tensor, metadata: Tensor | None, x: Tensor, bias: Tensor | None) -> list[Algorithm]:
        """The algorithms worth timing for this input, the default first."""
        return [DEFAULT]


class CuSparseLt(Backend):
    """NVIDIA's cuSPARSELt: for compute capability 8.0 and later, and the only library for 9.0 and later."""

    name = "cusparselt"
    tensor_class = SparseSemiStructuredTensorCUSPARSELT

    def unavailable(self, device):
        if not torch.backends.cusparselt.is_available():
            return "this build of torch has no cuSPARSELt"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"compute capability {major}.{minor} has no Sparse Tensor Cores, which came with 8.0"
        return ""

    def pack(self, weight):
        return torch._cslt_compress(weight), None

    def unpack(self, packed, metadata, columns):
        # the layout is not documented, so the weight is computed as W = (I W^T)^T: every sum has one nonzero term
        parts = []
        for start in range(0, columns, UNPACKED_AT_ONCE):
            size = min(UNPACKED_AT_ONCE, columns - start)
            identity = torch.zeros(size, columns, dtype=torch.float16, device=packed.device)
            identity.diagonal(start).fill_(1)
            parts.append(self.multiply(packed, metadata, identity.to(packed.dtype)).t())
        return torch.cat(parts, dim=1)

    def multiply(self, packed, metadata, x, bias=None, algorithm=DEFAULT):
        return torch._cslt_sparse_mm(
            packed,
            x.t(),
            bias=bias,
            transpose_result=True,
            alg_id=algorithm.alg_id,
            split_k=algorithm.split_k,
            split_k_mode=algorithm.split_k_mode,
        )

    def search(self, packed, metadata, x, bias):
        private: Any = torch._C
        alg_id, split_k, mode, _ = private._cusparselt.mm_search(packed, x.t(), bias, None, None, True)
        fastest = Algorithm(int(alg_id), int(split_k), int(mode) if split_k != 1 else -1)
        return [DEFAULT] if fastest == DEFAULT else [DEFAULT, fastest]


class Cutlass(Backend):
    """The CUTLASS kernels inside torch: compute capability 8.x alone. Packing and unpacking run on any device."""

    name = "cutlass"
    tensor_class = SparseSemiStructuredTensorCUTLASS

    def unavailable(self, device):
        major, minor = torch.cuda.get_device_capability(device)
        if major != 8:
            return f"its kernels run on compute capability 8.x, this device has {major}.{minor}"
        return ""

    # private functions are imported where they are used: if a later torch moves them, this file can still be imported

    def pack(self, weight):
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

        return sparse_semi_structured_from_dense_cutlass(weight)

    def unpack(self, packed, metadata, columns):
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

        return sparse_semi_structured_to_dense_cutlass(packed, metadata)

    def multiply(self, packed, metadata, x, bias=None, algorithm=DEFAULT):
        assert metadata is not None
        if bias is None:
            product = torch._sparse_semi_structured_mm(packed, metadata, x.t())
        else:
            product = torch._sparse_semi_structured_addmm(bias, packed, metadata, x.t())
        return product.t().contiguous()


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CuSparseLt(), Cutlass())}


def choose_backend(device: torch.device, asked: str | None = None) -> Backend:
    """The backend named ``asked``, else the first that runs on the device.

    Raises ValueError, with the reasons, if it does not run there, or none does.
    """
    reasons = {}
    for name in BACKENDS if asked is None else [asked]:
        if not (reason := BACKENDS[name].unavailable(device)):
            return BACKENDS[name]
        reasons[name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no 2:4 kernels for {device}: {why}; leave the model dense here")


def library_version(backend: Backend) -> str:
    """The library's version. Packed bytes, algorithms and timings are only valid for this one."""
    if backend.name == "cusparselt":
        return f"cuSPARSELt {torch.backends.cusparselt.version()}"
    return f"torch {torch.__version__}"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# packing --------------------------------------------------------------------------------------------------------------
# torch's packing does not check its input. Of three nonzeros in a group it drops one silently, and some kernels take
# -0.0 for a nonzero. So the pattern is checked first, -0.0 becomes +0.0, and the packed form is unpacked and compared.


class NotPackable(ValueError):
    """A weight does not come back bit for bit. The text is the reason alone: the caller knows the layer's name."""


def misfit(weight: Tensor) -> str:
    """Why a weight [R, C] cannot be packed 2:4, with the first row that breaks the pattern, or ""."""
    rows, columns = weight.shape
    if not torch.isfinite(weight).all():
        return "its weight holds NaN or inf"
    if columns % 4:
        return f"not 2:4: {columns} input channels are not a multiple of 4"
    nonzeros_RG = (weight != 0).view(rows, -1, 4).sum(-1, dtype=torch.uint8)
    breaking_R = (nonzeros_RG > 2).any(-1)
    if not breaking_R.any():
        return ""
    row = int(breaking_R.nonzero()[0])
    group = int((nonzeros_RG[row] > 2).nonzero()[0])
    return (
        f"not 2:4: row {row} has {int(nonzeros_RG[row, group])} nonzeros in columns {4 * group} to {4 * group + 3}; "
        f"{int(breaking_R.sum())} of {rows} rows break the pattern"
    )


def shape_misfit(shape: torch.Size, dtype: torch.dtype, backend: Backend) -> str:
    """Why a backend cannot pack a weight of shape [R, C] as ``dtype``, or ""."""
    rows, columns, *_ = backend.multiples(dtype)
    if shape[0] % rows or shape[1] % columns:
        return f"shape: {shape[0]} x {shape[1]} is no multiple of the {rows} x {columns} that {backend.name} takes"
    return ""


@torch.no_grad()
def pack(weight: Tensor, backend: Backend) -> tuple[Tensor, Tensor | None]:
    """(values, metadata) of a weight [R, C] in which `misfit` and `shape_misfit` find nothing wrong.

    Raises NotPackable if it does not unpack bit for bit.
    """
    clean = weight.detach().masked_fill(weight == 0, 0).contiguous()  # -0.0 is +0.0 here
    packed, metadata = backend.pack(clean)
    back = backend.unpack(packed, metadata, weight.shape[1])
    if not torch.equal(back.view(torch.uint8), clean.view(torch.uint8)):
        raise NotPackable(f"{backend.name} does not give its weight back bit for bit")
    return packed, metadata


# multiplying ----------------------------------------------------------------------------------------------------------


def algorithm_for(tokens: int, choices: Sequence[int]) -> Algorithm:
    """The last algorithm that is for so many tokens; the first if none is; the default without choices.

    Choices are four integers each, for an operator takes no tuples: the fewest tokens of inputs that it is for, in
    rising order, and the numbers of the algorithm.
    """
    begin = max((i for i in range(0, len(choices), 4) if choices[i] <= tokens), default=0)
    return Algorithm(*choices[begin + 1 : begin + 4])


def multiply(
    x: Tensor,
    packed: Tensor,
    metadata: Tensor | None,
    bias: Tensor | None,
    rows: int,
    backend: str,
    choices: Sequence[int],
) -> Tensor:
    """x W^T (+ bias) as [T, R] for x [T, C]."""
    tokens, kernels = x.shape[0], BACKENDS[backend]
    if not tokens:
        return x.new_empty(0, rows)
    x = operand(x, kernels.multiples(packed.dtype).dense_min_rows)
    return kernels.multiply(packed, metadata, x, bias, algorithm_for(tokens, choices))[:tokens]


def operand(x: Tensor, multiple: int) -> Tensor:
    """x as the kernels require it: contiguous, aligned, and padded with rows of zeros to a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    if missing:
        return nn.functional.pad(x, (0, 0, 0, missing))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


@functools.cache
def register_operators() -> None:
    """Register `multiply` as an operator, which torch.compile does not trace into.

    One graph then serves any number of tokens. It is done when the first layer is packed, not at import. The backward
    pass is an operator that raises when it runs: a model may be compiled with gradients on, but a gradient that leaves
    this layer out would be wrong.
    """

    def no_gradient(gradient: Tensor, shape: Sequence[int]) -> Tensor:
        raise RuntimeError("layers packed 2:4 have no backward pass: call modelopt_sparse.to_dense(model) to train")

    def shapes(ctx, inputs, output):
        x, _, _, bias, *_ = inputs
        ctx.shapes = [None if tensor is None else list(tensor.shape) for tensor in (x, bias)]

    def backward(ctx, gradient):
        refuse = torch.ops.modelopt_sparse.no_gradient
        x, bias = (None if shape is None else refuse(gradient, shape) for shape in ctx.shapes)
        return x, None, None, bias, None, None, None

    linear = torch.library.custom_op("modelopt_sparse::linear_24", multiply, mutates_args=())
    linear.register_fake(lambda x, packed, metadata, bias, rows, *_: x.new_empty(x.shape[0], rows))
    refusal = torch.library.custom_op("modelopt_sparse::no_gradient", no_gradient, mutates_args=())
    refusal.register_fake(lambda gradient, shape: gradient.new_empty(shape))
    linear.register_autograd(backward, setup_context=shapes)


# the layer ------------------------------------------------------------------------------------------------------------


PACKED = ("packed", "metadata")  # the buffers of a packed layer
HELD = ("backend", "choices", "requires_grad_before", "record")  # what else is in its instance


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
    packed: Tensor
    metadata: Tensor | None
    requires_grad_before: bool
    backend: str
    choices: tuple[int, ...]
    record: Any  # the layer's entry in the report

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype != self.packed.dtype or x.shape[-1] != self.in_features:
            wanted = f"{self.packed.dtype} inputs of {self.in_features} channels"
            raise ValueError(f"packed for {wanted}, and got {x.dtype} of {x.shape[-1]}: convert the input")
        opaque = torch.is_grad_enabled() or torch.compiler.is_compiling()
        product = torch.ops.modelopt_sparse.linear_24 if opaque else multiply
        flat, tensors = x.reshape(-1, self.in_features), (self.packed, self.metadata, self.bias)
        out = product(flat, *tensors, self.out_features, self.backend, self.choices)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The packed weight as torch's own tensor subclass: it has a shape, dtype and device, and a few operations."""
        shape = torch.Size((self.out_features, self.in_features))
        with warnings.catch_warnings():  # that the API of torch's classes is a prototype
            warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
            return BACKENDS[self.backend].tensor_class(shape, self.packed, self.metadata, None, None, None)

    @torch.no_grad()
    def unpacked(self) -> Tensor:
        """The dense weight, bit for bit as it was packed."""
        return BACKENDS[self.backend].unpack(self.packed, self.metadata, self.in_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"2:4 {dtype_name(self.packed.dtype)} packed by {self.backend}"
        )

    def _apply(self, fn, recurse: bool = True):
        """Moves and casts. Raises ValueError for a new dtype or device, which packed bytes cannot be converted to."""
        probe = fn(self.packed.new_empty(0))
        if probe.dtype != self.packed.dtype or probe.device != self.packed.device:
            layer = f"a layer packed 2:4 in {self.packed.dtype} on {self.packed.device}"
            raise ValueError(f"{layer} cannot become {probe.dtype} on {probe.device}: call to_dense(model) first")
        packed_buffers = {name: self._buffers.pop(name) for name in PACKED}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._buffers.update(packed_buffers)

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        register_operators()  # the process that a copy is unpickled in may have packed nothing yet

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[f"{prefix}weight"] = self.unpacked().cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        error_msgs.append(f"{prefix}weight is packed 2:4: call modelopt_sparse.to_dense before loading into it")


@torch.no_grad()
def pack_module(
    module: Any,
    packed: tuple[Tensor, Tensor | None],
    backend: Backend,
    choices: Sequence[int],
) -> None:
    """Turn an nn.Linear, in place, into a `SemiStructuredLinear` of its packed weight; hooks and bias stay.

    ``packed`` are (values, metadata) of its weight, which leaves the module.
    """
    register_operators()
    with without_hook(module), torch.inference_mode(False):
        drop_bound_forward(module)
        module.requires_grad_before = module.weight.requires_grad
        del module.weight
        object.__setattr__(module, "__class__", SemiStructuredLinear)
        for name, tensor in zip(PACKED, packed):
            module.register_buffer(name, tensor, persistent=False)
        module.backend, module.choices = backend.name, tuple(choices)


@torch.no_grad()
def unpack_module(module: SemiStructuredLinear) -> None:
    """Turn a `SemiStructuredLinear` back, in place, into the nn.Linear that it was."""
    with without_hook(module), torch.inference_mode(False):
        weight, bias = nn.Parameter(module.unpacked(), module.requires_grad_before), module.bias
        drop_bound_forward(module)
        for name in (*PACKED, "bias"):
            delattr(module, name)
        for name in HELD:
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", nn.Linear)
        module.register_parameter("weight", weight)  # first, as nn.Linear has it
        module.register_parameter("bias", bias)
