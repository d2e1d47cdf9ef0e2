"""torch's two 2:4 libraries behind one contract: the only file that touches torch's private 2:4 functions.

torch's public interface to them are the tensor subclasses of torch.sparse. It is not enough:

- a tensor holds one algorithm for all token counts;
- it takes no fp8, and refuses non-contiguous inputs in `linear`;
- cuSPARSELt's search, and the converters of the CUTLASS format, have no public name.

No class flag of torch is ever set: a backend is chosen by calling its own functions.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

UNPACKED_AT_ONCE = 1024  # columns of the identity matrix that unpacking multiplies with at a time
ALIGNMENT = 16  # bytes: both libraries are told that every operand's address is a multiple of this


class Algorithm(NamedTuple):
    """cuSPARSELt's numbers for one way to multiply. They mean something for one library version, GPU and shape only."""

    alg_id: int = 0
    split_k: int = 1
    split_k_mode: int = -1


DEFAULT = Algorithm()


class Multiples(NamedTuple):
    """The numbers that a weight's rows and columns, and an input's tokens, must be multiples of.

    Inputs are padded to them, weights never.
    """

    rows: int
    columns: int
    tokens: int


class Backend(ABC):
    """How one library packs a 2:4 weight [R, C] and multiplies inputs [T, C] by it. Stateless."""

    name: ClassVar[str]
    tensor_class: ClassVar[type[SparseSemiStructuredTensor]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]  # of the packed weight

    def multiples(self, dtype: torch.dtype) -> Multiples:
        """What shapes must be multiples of, for weights packed as ``dtype``."""
        limits = self.tensor_class._DTYPE_SHAPE_CONSTRAINTS[dtype]
        return Multiples(limits.sparse_min_rows, limits.sparse_min_cols, limits.dense_min_rows)

    @abstractmethod
    def unavailable(self, device: torch.device) -> str:
        """Why this library cannot run on a CUDA device, or ""."""

    @abstractmethod
    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """(values, metadata) of a contiguous weight, whose pattern is not checked here.

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
        out_dtype: torch.dtype | None = None,
        algorithm: Algorithm = DEFAULT,
    ) -> Tensor:
        """x W^T (+ bias) as [T, R], contiguous. x [T, C] is contiguous, and T a multiple of `multiples`' ``tokens``."""

    def search(
        self, packed: Tensor, metadata: Tensor | None, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
    ) -> list[Algorithm]:
        """The algorithms worth timing for this input, the default first."""
        del packed, metadata, x, bias, out_dtype
        return [DEFAULT]

    def as_tensor(self, packed: Tensor, metadata: Tensor | None, shape: torch.Size) -> SparseSemiStructuredTensor:
        """The packed weight as torch's own tensor subclass: it has a shape, dtype and device, and a few operations."""
        with _without_prototype_warning():
            return self.tensor_class(shape, packed, metadata, None, None, None)


class CuSparseLt(Backend):
    """NVIDIA's cuSPARSELt: for compute capability 8.0 and later, and the only library for 9.0 and later."""

    name = "cusparselt"
    tensor_class = SparseSemiStructuredTensorCUSPARSELT
    dtypes = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)

    def unavailable(self, device):
        if not torch.backends.cusparselt.is_available():
            return "this build of torch has no cuSPARSELt"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"compute capability {_dotted(capability)} has no Sparse Tensor Cores, which came with 8.0"
        return ""

    def pack(self, weight):
        with _without_prototype_warning():
            packed = self.tensor_class.from_dense(weight).packed
        assert packed is not None
        return packed, None

    def unpack(self, packed, metadata, columns):
        # the layout is not documented, so the weight is computed as W = (I W^T)^T: every sum has one nonzero term
        parts = []
        out_dtype = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}.get(packed.dtype)
        for start in range(0, columns, UNPACKED_AT_ONCE):
            size = min(UNPACKED_AT_ONCE, columns - start)
            identity = torch.zeros(size, columns, dtype=torch.float16, device=packed.device)
            identity.diagonal(start).fill_(1)
            product = self.multiply(packed, metadata, identity.to(packed.dtype), out_dtype=out_dtype)
            parts.append(product.t().to(packed.dtype))
        return torch.cat(parts, dim=1)

    def multiply(self, packed, metadata, x, bias=None, out_dtype=None, algorithm=DEFAULT):
        return torch._cslt_sparse_mm(
            packed,
            x.t(),
            bias=bias,
            out_dtype=out_dtype,
            transpose_result=True,
            alg_id=algorithm.alg_id,
            split_k=algorithm.split_k,
            split_k_mode=algorithm.split_k_mode,
        )

    def search(self, packed, metadata, x, bias, out_dtype):
        private: Any = torch._C
        bindings: Any = getattr(private, "_cusparselt", None)
        if hasattr(bindings, "mm_search"):
            alg_id, split_k, mode, _ = bindings.mm_search(packed, x.t(), bias, None, out_dtype, True)
            fastest = Algorithm(int(alg_id), int(split_k), int(mode) if split_k != 1 else -1)
        else:  # deprecated where `mm_search` exists, and returns no split-k
            fastest = Algorithm(int(torch._cslt_sparse_mm_search(packed, x.t(), bias, None, out_dtype, True)))
        return [DEFAULT] if fastest == DEFAULT else [DEFAULT, fastest]


class Cutlass(Backend):
    """The CUTLASS kernels inside torch: compute capability 8.x alone. Packing and unpacking run on any device."""

    name = "cutlass"
    tensor_class = SparseSemiStructuredTensorCUTLASS
    dtypes = (torch.float16, torch.bfloat16, torch.int8)  # float32 would be 1:2

    def unavailable(self, device):
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != 8:
            return f"its kernels run on compute capability 8.x, this device has {_dotted(capability)}"
        return ""

    # private functions are imported where they are used: if a later torch moves them, this file can still be imported

    def pack(self, weight):
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

        return sparse_semi_structured_from_dense_cutlass(weight)

    def unpack(self, packed, metadata, columns):
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

        del columns
        return sparse_semi_structured_to_dense_cutlass(packed, metadata)

    def multiply(self, packed, metadata, x, bias=None, out_dtype=None, algorithm=DEFAULT):
        del algorithm
        assert metadata is not None
        if bias is None:
            product = torch._sparse_semi_structured_mm(packed, metadata, x.t(), out_dtype=out_dtype)
        else:
            product = torch._sparse_semi_structured_addmm(bias, packed, metadata, x.t(), out_dtype=out_dtype)
        return product.t().contiguous()


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CuSparseLt(), Cutlass())}


def choose_backend(device: torch.device, asked: str | None = None) -> Backend:
    """The backend named ``asked``, else the first that runs on the device.

    Raises ValueError if there is no such backend, or, with the reasons, if none runs on the device.
    """
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"backend {asked!r} is not known: allowed are {', '.join(BACKENDS)}")
    reasons = {}
    for name in BACKENDS if asked is None else [asked]:
        if not (reason := BACKENDS[name].unavailable(device)):
            return BACKENDS[name]
        reasons[name] = reason
    raise ValueError(
        f"no 2:4 kernels for {device}: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}; "
        "leave the model dense here"
    )


def library_version(backend: Backend) -> str:
    """The library's version. Packed bytes, algorithms and timings are only valid for this one."""
    if backend.name == "cusparselt":
        return f"cuSPARSELt {torch.backends.cusparselt.version()}"
    return f"torch {torch.__version__}"


@contextmanager
def _without_prototype_warning() -> Iterator[None]:
    """Hide the warning of torch's classes that their API is a prototype: all uses of it stand in this file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
        yield


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
