"""A stand-in for the 2:4 kernels, which need a GPU: torch's CUTLASS format, and the product of the unpacked weight."""

from typing import Any

import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.runtime import convert
from modelopt_sparse.runtime import kernels as backends
from modelopt_sparse.runtime.convert import Settings
from modelopt_sparse.runtime.kernels import BACKENDS, Algorithm, Cutlass
from modelopt_sparse.runtime.timing import Place
from tests.helpers import tiny_llama

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]


class Unpacking(Cutlass):
    """The CUTLASS format on any device; its product is float32's with the unpacked weight, and it keeps what it saw."""

    name = "unpacking"

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], Algorithm]] = []

    def unavailable(self, device):
        return ""

    def multiply(self, packed, metadata, x, bias=None, algorithm=backends.DEFAULT):
        assert (x.is_contiguous(), x.data_ptr() % 16, x.dtype) == (True, 0, packed.dtype)
        assert x.shape[0] % self.multiples(packed.dtype).dense_min_rows == 0
        self.calls.append((tuple(x.shape), algorithm))
        product = x.double() @ self.unpack(packed, metadata, 2 * packed.shape[1]).double().t()
        return (product if bias is None else product + bias.double()).to(x.dtype)


def installed(monkeypatch) -> Unpacking:
    """The stand-in among the backends for the length of a test."""
    made = Unpacking()
    monkeypatch.setitem(BACKENDS, made.name, made)
    # a build without CUDA has one library of dense products
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: name)
    torch.compiler.reset()  # it counts how often it compiled a function, whichever test asked for it
    return made


def place_for(backend: backends.Backend, timer=None) -> Place:
    def not_to_be_timed(calls):
        raise AssertionError("nothing was to be timed")

    return Place(CPU, backend, "a CPU", timer or not_to_be_timed, 0)


def packed_by(backend, model: nn.Module, timer=None, **options) -> Any:
    """What to_semi_structured does, on the CPU."""
    place = place_for(backend, timer)
    convert.convert(model, Settings.of({"tune": None, **options}), lambda device: place)
    return model


def chain(*layers: nn.Module) -> Any:
    return nn.Sequential(*layers)


def pruned(rows: int, columns: int, dtype=torch.bfloat16, bias: bool = True, seed: int = 0) -> Any:
    """A Linear [rows, columns] whose weight is 2:4."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        weight = torch.randn(rows, columns, generator=generator)
        layer.weight.copy_(weight.masked_fill(~mts.NM(2, 4).mask(weight.abs()), 0))
    return layer.to(dtype).eval()


def llama(**changes) -> Any:
    """A 2:4 Llama in bfloat16 whose shapes the CUTLASS format takes, output head apart."""
    return mts.export(sparse_llama(**changes))


def sparse_llama(**changes) -> Any:
    """The same with its masks."""
    model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_key_value_heads=4, **changes)
    return mts.sparsify(model.to(torch.bfloat16), "magnitude", progress=False)


def reasons(model: nn.Module) -> dict[str, str]:
    report = mts.semi_structured_report(model)
    return {layer.name: layer.reason for layer in report.layers if layer.runs == "dense"}
