"""Which library multiplies float32 matrices on this CPU, while a model is made sparse.

torch leaves these products to its BLAS, which in its x86 builds is MKL. It can leave them to oneDNN instead. Which is
the faster one depends on the CPU and cannot be told without asking, so both are timed, once for each number of threads.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan

SIZE, ROUNDS = 512, 5  # of the matrices that are multiplied, and how often: 0.02 s in all on two cores
WORTH_ASKING = 2**20  # weights to prune, from which on it is worth that
MUCH_FASTER = 1.5  # what is little faster may be the slower one in the next run, whose last bits would be others
ERROR = 1e-6  # relative to the product: float32 leaves a quarter of it, TF32, which the setting allows, 300 times it
ONEDNN = "tf32"  # as torch's setting calls it: on a CPU without instructions for TF32, oneDNN computes in float32


@contextmanager
def fastest_products(model: nn.Module, plan: Plan, config: SparsifyConfig) -> Iterator[bool]:
    """While entered, oneDNN multiplies the float32 matrices on the CPU if it is much faster there and as exact; gives
    whether it does. The setting is torch's, of the whole process; it is as before afterwards.

    Nothing is timed or set for small models, where the model or ``device`` is not on the CPU, where the user has set a
    precision of products, or with ``deterministic``.
    """
    chosen = _matters(model, plan, config) and _untouched() and onednn_is_much_faster(torch.get_num_threads())
    if not chosen:
        yield False
        return
    with _by_onednn():
        yield True


@cache
def onednn_is_much_faster(threads: int) -> bool:
    """Times both on square matrices, in turns, with as many ``threads`` as torch has."""
    del threads  # torch has them already; what is measured holds for this number
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE, generator=generator)
    blas, onednn, product = [], [], a
    for _ in range(ROUNDS):
        began = time.perf_counter()
        product = a @ b
        blas.append(time.perf_counter() - began)
        with _by_onednn():
            began = time.perf_counter()
            product = a @ b
            onednn.append(time.perf_counter() - began)
    exact = a.double() @ b.double()
    return is_better(min(blas), min(onednn), float((product - exact).norm() / exact.norm()))


def is_better(blas: float, onednn: float, error: float) -> bool:
    """Whether oneDNN is to multiply, by seconds of both and the relative error that it leaves."""
    return blas >= MUCH_FASTER * onednn and error <= ERROR


@contextmanager
def _by_onednn() -> Iterator[None]:
    setting = _setting()
    before = setting.fp32_precision
    try:
        setting.fp32_precision = ONEDNN
        yield
    finally:
        setting.fp32_precision = before


def _setting() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined] - the module gets it as it is imported


def _matters(model: nn.Module, plan: Plan, config: SparsifyConfig) -> bool:
    if config.deterministic or not any(item.calibrated for item in plan.layers):
        return False
    here = config.device is None or config.device.type == "cpu"
    devices = {parameter.device.type for parameter in model.parameters()}
    float32 = sum(item.size for item in plan.layers if item.layer.parameter.dtype == torch.float32)
    return here and devices <= {"cpu", "meta"} and float32 >= WORTH_ASKING


def _untouched() -> bool:
    settings = torch.backends, torch.backends.mkldnn, _setting()
    return torch.backends.mkldnn.is_available() and all(each.fp32_precision == "none" for each in settings)
