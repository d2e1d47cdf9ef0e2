"""Inputs times a packed weight: the choice of its form by the number of tokens, and the operators for torch.compile.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modelopt_sparse.runtime.backends import ALIGNMENT, BACKENDS, DEFAULT, Algorithm
from modelopt_sparse.runtime.quantize import SUMS, quantize_rows, rescaled


class Choice(NamedTuple):
    """How inputs of at least ``tokens`` rows, and fewer than the next choice has, are multiplied.

    ``sparse``: by the packed weight, with ``algorithm``; otherwise by the dense weight.
    """

    tokens: int
    sparse: bool
    algorithm: Algorithm = DEFAULT


ALWAYS_SPARSE = (Choice(0, True),)


def choice_for(tokens: int, choices: Sequence[Choice]) -> Choice:
    """The last of the choices (sorted by token count) whose count is at most ``tokens``; the first if there is none."""
    return next((choice for choice in reversed(choices) if choice.tokens <= tokens), choices[0])


def multiply(
    x: Tensor,
    packed: Tensor,
    metadata: Tensor | None,
    scales: Tensor | None,
    dense: Tensor | None,
    bias: Tensor | None,
    rows: int,
    backend: str,
    choices: Sequence[Choice],
) -> Tensor:
    """x W^T + bias as [T, R] for x [T, C]: by the packed weight, or by the dense one where a choice says so.

    In a compiled graph only the product itself is an opaque operator, so that torch.compile can fuse the rounding of x
    to 8 bits with other operations.
    """
    if torch.compiler.is_compiling():
        opaque = torch.ops.modelopt_sparse.product_24
        run = functools.partial(opaque, rows=rows, backend=backend, choices=as_numbers(choices))
    else:
        run = functools.partial(product, rows=rows, backend=backend, choices=choices)
    if scales is None:
        return run(x, packed, metadata, dense, bias)
    codes, of_tokens = quantize_rows(x, packed.dtype)
    return rescaled(run(codes, packed, metadata, None, None), of_tokens, scales, bias, x.dtype)


def product(
    x: Tensor,
    packed: Tensor,
    metadata: Tensor | None,
    dense: Tensor | None,
    bias: Tensor | None,
    rows: int,
    backend: str,
    choices: Sequence[Choice],
) -> Tensor:
    """x W^T (+ bias) as [T, R] for x [T, C] in the dtype of the packed weight; of 8-bit codes the unscaled sums."""
    tokens, out_dtype, kernels = x.shape[0], SUMS.get(packed.dtype), BACKENDS[backend]
    if not tokens:
        return x.new_empty(0, rows, dtype=out_dtype)
    choice = choice_for(tokens, choices)
    if not choice.sparse:
        assert dense is not None
        return F.linear(x, dense, bias)
    x = _operand(x, kernels.multiples(packed.dtype).tokens)
    return kernels.multiply(packed, metadata, x, bias, out_dtype, choice.algorithm)[:tokens]


def _operand(x: Tensor, multiple: int) -> Tensor:
    """x as the kernels require it: contiguous, aligned, and padded with rows of zeros to a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    if missing:
        return torch.cat([x, torch.zeros(missing, x.shape[1], dtype=x.dtype, device=x.device)])
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


# the arguments of `product` and of `multiply`, as torch writes them
PRODUCT = (
    "(Tensor x, Tensor packed, Tensor? metadata, Tensor? dense, Tensor? bias, SymInt rows, str backend, "
    "SymInt[] choices) -> Tensor"
)
LINEAR = PRODUCT.replace("Tensor? dense", "Tensor? scales, Tensor? dense")


@functools.cache
def register_operators() -> None:
    """Register `product` and `multiply` as operators, which torch.compile does not trace into.

    One graph then serves any number of tokens. It is done when the first layer is packed, not at import. The backward
    pass of `multiply` is an operator that raises when it runs: a model may be compiled with gradients on, but a
    gradient that leaves this layer out would be wrong.
    """

    def product_24(*operands: Any) -> Tensor:
        *others, choices = operands
        return product(*others, choices=_choices(choices))

    def linear_24(*operands: Any) -> Tensor:
        *others, choices = operands
        return multiply(*others, choices=_choices(choices))

    def no_gradient(gradient: Tensor, shape: Sequence[int]) -> Tensor:
        raise RuntimeError(
            "layers packed 2:4 are for inference and have no backward pass: run under torch.no_grad(), or call "
            "modelopt_sparse.to_dense(model) before training"
        )

    def shapes(ctx, inputs, output):
        x, _, _, _, dense, bias, *_ = inputs
        ctx.shapes = [None if tensor is None else list(tensor.shape) for tensor in (x, dense, bias)]

    def backward(ctx, gradient):
        refuse = torch.ops.modelopt_sparse.no_gradient
        x, dense, bias = (None if shape is None else refuse(gradient, shape) for shape in ctx.shapes)
        return x, None, None, None, dense, bias, None, None, None

    bare = torch.library.custom_op("modelopt_sparse::product_24", product_24, mutates_args=(), schema=PRODUCT)
    bare.register_fake(
        lambda x, packed, metadata, dense, bias, rows, backend, choices: x.new_empty(
            x.shape[0], rows, dtype=SUMS.get(packed.dtype)
        )
    )
    whole = torch.library.custom_op("modelopt_sparse::linear_24", linear_24, mutates_args=(), schema=LINEAR)
    whole.register_fake(
        lambda x, packed, metadata, scales, dense, bias, rows, backend, choices: x.new_empty(x.shape[0], rows)
    )
    refusal = torch.library.custom_op("modelopt_sparse::no_gradient", no_gradient, mutates_args=())
    refusal.register_fake(lambda gradient, shape: gradient.new_empty(shape))
    whole.register_autograd(backward, setup_context=shapes)


def as_numbers(choices: Sequence[Choice]) -> list[int]:
    """Choices as integers, five for each, because an operator takes no tuples."""
    return [number for choice in choices for number in (choice.tokens, int(choice.sparse), *choice.algorithm)]


def _choices(numbers: Sequence[int]) -> list[Choice]:
    """The inverse of `as_numbers`."""
    fives = (numbers[start : start + 5] for start in range(0, len(numbers), 5))
    return [Choice(tokens, bool(sparse), Algorithm(*algorithm)) for tokens, sparse, *algorithm in fives]
