"""What the tests of calibration have in common: a run whose statistics are looked at, and batches with padding."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.models.architectures import texts
from tests.oracles.brute_force import Recording, Steps, assert_stats, matrices_of, stepwise

LAYERS = ["model.layers.0", "model.layers.1"]
STAGES = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
STAGES += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]


def collected(model: nn.Module, within: list[str] = LAYERS, **options) -> dict[str, mts.Stats]:
    """The statistics that each layer of the model is solved with; the model is sparse afterwards."""
    dense = {name: matrix.clone() for name, matrix in matrices_of(model, within).items()}
    method = Recording()
    mts.sparsify(model, method, progress=False, **options)
    return method.by_layer(dense)


def thread_state() -> tuple:
    """What torch keeps for the thread."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, *modes


def assert_same(found: dict[str, mts.Stats], expected: dict[str, mts.Stats]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tokens == expected[name].tokens, name
        assert torch.equal(found[name].gram, expected[name].gram), name


def steps_of(sequential: str, within: list[str], stages: Iterable[list[str]] = ()) -> Steps:
    """What is sparse together before the next one is collected. ``stages``: the layers of each module in ``within``."""
    return {
        "none": [within],
        "block": [[path] for path in within],
        "stage": [[f"{path}.{layer}" for layer in stage] for path in within for stage in stages],
    }[sequential]


def assert_calibrated(
    model: nn.Module, within: list[str], batches: list, sequential: str, steps: Steps | None = None, **options: Any
) -> nn.Module:
    """Sparsify the model; its statistics must be those of the whole model after the ``steps`` before, without these
    with "block" half sparse: whatever stands before a block in the list ``within``."""
    dense, method = copy.deepcopy(model).eval(), Recording()
    options = {"data_loader": batches, "sequential": sequential, "min_tokens": 1, "progress": False, **options}
    mts.sparsify(model, method, **options)
    observed = method.by_layer(matrices_of(dense, within))
    assert_stats(observed, stepwise(dense, model, batches, steps or steps_of(sequential, within)))
    return model


def padded(side: str = "right") -> list[dict[str, Tensor]]:
    return texts(side, ((3, 12), (2, 9)))
