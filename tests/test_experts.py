"""Mixtures of experts: every expert's matrix is a layer with statistics from the tokens that are routed to it."""

import copy

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.architectures import texts
from tests.brute_experts import brute_experts, stored_as_matrices
from tests.brute_force import Recording, Seen, make_sparse
from tests.expert_models import MODELS

every_model = pytest.mark.parametrize("name", MODELS)


def fused(model: nn.Module) -> list[str]:
    """The parameters that hold experts' matrices."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


def blocks_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__.endswith("DecoderLayer")]


def by_parameter(method: Recording, model: nn.Module) -> dict[str, mts.Stats]:
    """The statistics that each fused parameter was solved with."""
    found = {}
    for weight, stats in method.seen:
        for name in fused(model):
            if torch.equal(stored_as_matrices(model, name), weight):
                assert name not in found
                found[name] = stats
    return found


def assert_experts(found: dict[str, mts.Stats], expected: Seen, counts: dict[str, list[int]]) -> None:
    """``found`` with min_tokens=1: an expert that got no token has the average of all tokens."""
    assert found.keys() == expected.grams.keys()
    for name, own in expected.grams.items():
        none = torch.tensor(counts[name]) == 0
        gram = torch.where(none[:, None, None], own.sum(0) / sum(counts[name]), own)
        stats = found[name]
        assert stats.gram is not None
        assert stats.counts is not None
        assert stats.counts.tolist() == counts[name], name
        assert stats.tokens == sum(counts[name]), name
        error = (stats.gram - gram).abs().amax((-2, -1)) / gram.abs().amax((-2, -1))
        assert float(error.max()) <= 1e-5, (name, error)
        assert torch.equal(stats.square_sums, stats.gram.diagonal(dim1=-2, dim2=-1))


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_grams_of_the_half_sparse_model(name, side):
    """Those of plain loops over tokens, where the blocks before are sparse; padding does not count."""
    dense, method = MODELS[name](), Recording()
    sparse = mts.sparsify(copy.deepcopy(dense), method, data_loader=texts(side), min_tokens=1, progress=False)
    half_sparse, expected, counts = copy.deepcopy(dense), Seen(), {}
    for block in blocks_of(dense):
        seen, counted = brute_experts(half_sparse, texts(side), [block])
        expected.grams.update(seen.grams)
        counts.update(counted)
        make_sparse(half_sparse, sparse, [block])
    assert_experts(by_parameter(method, dense), expected, counts)
