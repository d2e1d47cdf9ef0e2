"""Calibration statistics the slow way: plain forward pre-hooks on the whole model, in float64.

Knows nothing of how the package finds blocks, shares inputs or matches padding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts

MATRICES = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)
Real = Callable[[Any, str], Tensor | None]  # (batch, layer name) -> which rows of its input are tokens; None = all
Steps = list[list[str]]


def modules_in(model: nn.Module, within: list[str]) -> Iterator[tuple[str, Any]]:
    """Each module inside of the blocks, with its name."""
    for block in within:
        for inner, module in model.get_submodule(block).named_modules():
            yield f"{block}.{inner}".strip("."), module


def matrices_of(model: nn.Module, within: list[str]) -> dict[str, Tensor]:
    """Layer name -> weight as [..., R, C], input channels innermost, of everything inside the blocks."""
    found = {}
    for name, module in modules_in(model, within):
        if is_fused(module):
            found[f"{name}.gate_up_proj"] = module.get_parameter("gate_up_proj").detach()
            found[f"{name}.down_proj"] = module.get_parameter("down_proj").detach()
        elif isinstance(module, nn.MultiheadAttention):
            found[f"{name}.in_proj_weight"] = torch.stack(module.in_proj_weight.detach().chunk(3))
        elif isinstance(module, Conv1D):
            found[name] = module.weight.detach().T
        elif isinstance(module, nn.Conv2d):
            found[name] = module.weight.detach().permute(0, 2, 3, 1).flatten(1)
        elif isinstance(module, MATRICES):
            found[name] = module.weight.detach()
    return found


def is_fused(module: nn.Module) -> bool:
    """Whether it is a mixture's experts [E, R, C], called with hidden states [T, C] and the experts of each token."""
    return type(module).__name__.removeprefix("Sparse") == "MixtralExperts"


def input_rows(module: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """What meets the weight in one call, as rows [T, C] in float64, without padding."""
    if isinstance(module, nn.Conv2d):
        kernel = math.prod(module.kernel_size)
        patches = F.unfold(x.double(), module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.unflatten(1, (-1, kernel)).permute(0, 3, 2, 1).flatten(2).flatten(0, 1)
    rows = x.double().flatten(0, -2)
    return rows if real is None else rows[real.flatten()]


def attention_result(module: nn.MultiheadAttention, x: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, with queries of x and keys and values of memory, all heads side by side: what
    out_proj is given."""
    if not module.batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k, v = map(F.linear, (x, memory, memory), weights, biases)
    q, k, v = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if padding is not None:  # bool, or what nn.TransformerEncoder makes of it: -inf where it was True
        scores = scores.masked_fill((padding != 0)[:, None, None], float("-inf"))
    result = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return result if module.batch_first else result.transpose(0, 1)


@dataclass
class Seen:
    """What the layers of a model are given over all batches: Gram matrices and row counts by layer name, and which
    tensors, so that layers with one input can be told."""

    grams: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[tuple]] = field(default_factory=dict)


def all_rows(batch: Any, name: str) -> Tensor | None:
    del batch, name
    return None


def call_model(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**batch)
    else:
        model(batch)


@torch.no_grad()
def inputs_of(model: nn.Module, names: list[str], batches: Iterable[Any]) -> dict[str, Tensor]:
    """All rows [T, C] that these layers are given when the whole model runs over the batches, in float64."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0].double().flatten(0, -2))
        )
        for name, rows in seen.items()
    ]
    for batch in batches:
        call_model(model, batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


@torch.no_grad()
def brute_force(
    model: nn.Module,
    batches: Iterable[Any],
    within: list[str],
    real: Real = all_rows,
    call: Callable[[nn.Module, Any], None] = call_model,
) -> Seen:
    """What every layer inside the modules ``within`` is given when the whole model runs over the batches."""
    seen = Seen()
    held: list[Tensor] = []  # so that no id is used twice
    batch: Any = None

    def add(name: str, module: nn.Module, x: Tensor) -> None:
        rows = input_rows(module, x, real(batch, name))
        seen.grams[name] = seen.grams.get(name, 0) + rows.T @ rows
        seen.tokens[name] = seen.tokens.get(name, 0) + len(rows)
        window = [getattr(module, key, None) for key in ("kernel_size", "stride")]
        seen.inputs.setdefault(name, []).append((id(x), *window))
        held.append(x)

    def add_experts(name: str, module: Any, hidden: Tensor, index: Tensor) -> None:
        rows = real(batch, name)
        kept = range(len(hidden)) if rows is None else rows.flatten().nonzero().flatten().tolist()
        for param in ("gate_up_proj", "down_proj"):
            key = f"{name}.{param}"
            width = module.get_parameter(param).shape[-1]
            gram = seen.grams.setdefault(key, torch.zeros(module.num_experts, width, width, dtype=torch.float64))
            for token in kept:
                for expert in index[token].tolist():
                    x = hidden[token].double()
                    if param == "down_proj":
                        gate, up = (module.gate_up_proj[expert].double() @ x).chunk(2)
                        x = F.silu(gate) * up
                    gram[expert] += x[:, None] * x
            seen.tokens[key] = seen.tokens.get(key, 0) + len(kept) * index.shape[-1]
            seen.inputs.setdefault(key, []).append((param, id(hidden)))
        held.append(hidden)

    def hook_for(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if is_fused(module):
                add_experts(name, module, *args[:2])
            elif isinstance(module, nn.MultiheadAttention):
                add(f"{name}.in_proj_weight", module, x)
                add(f"{name}.out_proj", module, attention_result(module, x, args[1], kwargs.get("key_padding_mask")))
            else:
                add(name, module, x)

        return hook

    handles = []
    for name, module in modules_in(model, within):
        if isinstance(module, (*MATRICES, nn.MultiheadAttention)) or is_fused(module):
            handles.append(module.register_forward_pre_hook(hook_for(name), with_kwargs=True))
    with slow_attention():
        for batch in batches:
            call(model, batch)
    for handle in handles:
        handle.remove()
    return seen


def assert_stats(found: Mapping[str, mts.Stats], expected: Seen, tolerance: float = 1e-5) -> None:
    """Gram matrices to ``tolerance`` of their largest entry, token counts exactly, for exactly these layers."""
    assert found.keys() == expected.grams.keys()
    for layer, gram in expected.grams.items():
        actual = found[layer].gram
        assert actual is not None
        error = (actual - gram).abs().max() / gram.abs().max()
        assert error <= tolerance, (layer, float(error))
        assert found[layer].tokens == expected.tokens[layer], layer


def make_sparse(model: nn.Module, sparse: nn.Module, within: list[str]) -> None:
    """Give the modules ``within`` of a dense model the weights that they have in the finished sparse one."""
    final = sparse.state_dict()
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{path}.".removeprefix(".")) for path in within):
            parameter.data.copy_(final[name])


def stepwise(model: nn.Module, sparse: nn.Module, batches: list, steps: Steps, real: Real = all_rows) -> Seen:
    """What each step's modules are given in a dense model whose earlier steps have the weights of the sparse one.

    The model is changed on the way.
    """
    expected = Seen()
    for step in steps:
        seen = brute_force(model, batches, step, real)
        expected.grams.update(seen.grams)
        expected.tokens.update(seen.tokens)
        make_sparse(model, sparse, step)
    return expected


@contextmanager
def slow_attention() -> Iterator[None]:
    """nn.TransformerEncoder's fused path reads its layers' weights without calling them."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Recording(mts.Method):
    """Magnitude, keeping the statistics that it was given beside the dense weight, by which the layer is known."""

    name = "recording"
    needs = "gram"

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, mts.Stats]] = []

    def prepare(self, stats, options):
        return stats  # as they were summed up

    def solve(self, weight, state, pattern, options) -> mts.Solution:
        self.seen.append((weight.clone(), state))
        mask = pattern.mask(weight.abs())
        return mts.Solution(weight.masked_fill(~mask, 0), mask, 0.0)

    def by_layer(self, dense: Mapping[str, Tensor]) -> dict[str, mts.Stats]:
        found = {}
        for weight, stats in self.seen:
            names = [name for name, matrix in dense.items() if torch.equal(matrix, weight)]
            assert len(names) == 1
            assert names[0] not in found
            found[names[0]] = stats
        return found
