"""Experts in a list, which see the rows that are routed to them."""

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.calibration.collecting import collected
from tests.helpers import refused
from tests.models.stacked import Block, Routed, Stacked, vectors
from tests.oracles.brute_force import inputs_of


@pytest.mark.parametrize("how", ["pool", "weight_only"])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@pytest.mark.parametrize(("positive", "minimum"), [(0, 8), (3, 8), (0, 400)])
def test_an_expert_in_a_list_that_is_given_few_rows_or_none(how, sequential, positive, minimum):
    """It is filled up like a fused one, and the report says so; an empty input's zeros would prune by position."""
    model = Stacked(blocks=1, block=Routed)
    model.stem = nn.Identity()
    batches = [-x.abs() for x in vectors()]
    batches[0][:positive, 0] *= -1
    experts = [f"blocks.0.experts.{i}" for i in range(2)]
    inputs = inputs_of(model, experts, batches)
    counts = {name: len(rows) for name, rows in inputs.items()}
    assert [count < minimum for count in counts.values()] == [minimum > 8, True]
    assert counts[experts[1]] == positive
    found = collected(model, ["blocks.0"], data_loader=batches, min_tokens=minimum, experts=how, sequential=sequential)
    average = sum(rows.T @ rows for rows in inputs.values()) / sum(counts.values())
    notes = {layer.name: layer.notes for layer in mts.report(model).layers}
    done = {
        "pool": f"were filled up to {minimum} from the tokens of all experts",
        "weight_only": "were solved by their weights alone",
    }
    for name, rows in inputs.items():
        expected = rows.T @ rows + max(0, minimum - counts[name]) * average
        if how == "weight_only" and counts[name] < minimum:
            expected = minimum * average.diagonal().mean() * torch.eye(16, dtype=torch.float64)
        assert torch.allclose(found[name].gram.double(), expected, rtol=1e-4, atol=1e-5)
        assert found[name].tokens == counts[name]
        note = f"experts with fewer than {minimum} tokens {done[how]}: this one ({counts[name]})"
        assert notes[name] == ([note] if counts[name] < minimum else [])


def test_experts_none_of_which_is_given_rows_saw_no_data():
    class Idle(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return Block.forward(self, x)

    match = "2 layers saw no calibration data: blocks.0.experts.0; blocks.0.experts.1:"
    refused(mts.sparsify, Stacked(blocks=1, block=Idle), match=match, data_loader=vectors())


def test_all_tokens_of_experts_in_a_list_cannot_be_told():
    message = "layer 'blocks.0.experts.0' is given nothing but the rows that are routed to it"
    refused(mts.sparsify, Stacked(blocks=1, block=Routed), match=message, data_loader=vectors(), experts="all_tokens")


def losing_rows() -> tuple[nn.Module, Tensor]:
    """A model of two blocks and its only batch: expert 1 of block 1 is given a row until block 0 is pruned."""
    model = Stacked(blocks=2, block=Routed)
    model.stem = nn.Identity()
    with torch.no_grad():
        # block 0 adds 3 - 1 to the first entry; the 3 comes by a weight that is pruned, as others are larger
        for parameter in model.blocks[0].parameters():
            parameter.zero_()
        model.blocks[0].up.bias[0] = 3.0
        model.blocks[0].down.weight[0, :4] = torch.tensor([1.0, 2.0, 2.0, 2.0])
        model.blocks[0].down.bias[0] = -1.0
    x = vectors()[0]
    x[:, 0] = torch.tensor([-9.0, -0.1, -0.1, -0.1, 0.1])  # both experts of each block see rows in the dense model
    return model, x


def test_an_expert_that_loses_its_rows_when_the_layers_before_it_are_pruned():
    """Those of its fellow stand in for them."""
    model, x = losing_rows()
    dense = model.blocks[1].experts[1].weight.detach().clone()
    rules = {"blocks.0.*": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", rules=rules, data_loader=[x], min_tokens=2, progress=False)
    first, second = inputs_of(model, [f"blocks.1.experts.{i}" for i in range(2)], [x]).values()
    assert (len(first), len(second)) == (5, 0)
    expected = mts.NM(2, 4).mask(dense.double().abs() * first.square().sum(0).sqrt())
    assert torch.equal(model.blocks[1].experts[1].weight != 0, expected)


def test_an_expert_that_loses_its_rows_and_whose_fellow_is_not_looked_at():
    """An error that names the layer, not zeros; what is done by then stays sparse."""
    model, x = losing_rows()
    options = {"rules": {"blocks.0.*": {"method": "magnitude"}}, "exclude": "blocks.1.experts.0", "progress": False}
    with pytest.raises(ValueError, match=r"layer 'blocks.1.experts.1' saw no calibration data, now that the layers"):
        mts.sparsify(model, "wanda", data_loader=[x], **options)
    assert [name.split(".")[1] for name, _ in mts.named_masks(model)] == ["0"] * 4
