"""What several processes say and how work is dealt out, as far as one process shows it."""

from dataclasses import replace
from typing import Any

import torch

import modelopt_sparse as mts
from modelopt_sparse import distributed
from modelopt_sparse.distributed import Processes, count_processes
from modelopt_sparse.plan.plan import LayerPlan, checksum
from modelopt_sparse.plan.planner import make_plan
from modelopt_sparse.solving.share import assign_owners
from tests.helpers import calibrated_run, refused, tiny_llama, token_batches
from tests.models import expert_models


def test_working_together_without_a_group_is_refused():
    refused(mts.sparsify, tiny_llama(), "magnitude", distributed=True, match="needs a process group: start with torchr")
    refused(mts.sparsify, tiny_llama(), "magnitude", distributed="yes", match="'yes': must be True, False or None")
    refused(count_processes, 0, match="distributed=0: must be True, False or None")
    assert count_processes(None) == count_processes(False) == 1


def test_checksums_tell_bits_and_rows_apart():
    values = torch.randn(5, 7)
    assert checksum(values) == checksum(values.clone())
    assert checksum(values.T) == checksum(values.T.contiguous())
    others = [values[[1, 0, 2, 3, 4]], -values, values + 1e-6, values.view(7, 5), values.double(), values.bfloat16()]
    assert len({checksum(x) for x in [values, *others]}) == 7
    for dtype in (torch.bool, torch.int64, torch.float16, torch.complex64, torch.uint8):
        assert checksum(torch.ones(3, dtype=dtype)) != checksum(torch.zeros(3, dtype=dtype))
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(-2.0))
    assert checksum(torch.empty(0)) != checksum(torch.empty(0, 2))
    assert checksum(torch.empty(2, device="meta")) == "torch.float32 [2]"


def test_one_line_says_which_rank_failed_and_why(monkeypatch):
    def gathered(values: list[Any], own: Any, group: Any) -> None:
        values[:] = [own, *others]

    monkeypatch.setattr(distributed.dist, "all_gather_object", gathered)
    others = [("statistics", None), ("stopped: OSError: the disk is full", None)]
    of_three, of_two = Processes(0, 3, "a group"), Processes(0, 2, "a group")
    stopped = r"^rank 2 stopped: OSError: the disk is full$"
    refused(of_three.all_gather, "statistics", match=stopped, error=distributed.RankError)
    others = [("text", None)]
    unlike = r"the same \(rank 0: statistics; rank 1: text\): make the"
    refused(of_two.all_gather, "statistics", match=unlike, error=distributed.RankError)


Shares = dict[str, dict[range, int]]


# dealing out ----------------------------------------------------------------------------------------------------------


def shares_of(layer_plans: list[LayerPlan], size: int) -> Shares:
    run, _ = calibrated_run(tiny_llama(), "wanda", data_loader=token_batches(1))
    return assign_owners(layer_plans, replace(run, processes=Processes(0, size)))


def test_layers_are_dealt_out_by_cost():
    plan = make_plan(tiny_llama(), "wanda")
    layers = {layer.name.rpartition(".")[2]: layer for layer in plan.layers[:7]}
    for size in (2, 3, 4, 8):
        shares = shares_of([*layers.values()], size)
        owners = {name: owner for name, of_layer in shares.items() for owner in of_layer.values()}
        assert owners.keys() == {layer.name for layer in layers.values()}
        down, gate = (owners[layers[name].name] for name in ("down_proj", "gate_proj"))
        assert down != gate  # the two that cost most
        assert shares == shares_of([*layers.values()], size)
        if size >= 7:
            assert len(set(owners.values())) >= 4
    alone = shares_of([*layers.values()], 1)
    assert {owner for of_layer in alone.values() for owner in of_layer.values()} == {0}


def test_experts_are_dealt_out_in_ranges():
    plan = make_plan(expert_models.MODELS["mixtral"](), "wanda")
    (layer,) = [layer for layer in plan.layers if layer.name == "model.layers.0.mlp.experts.down_proj"]
    shares = shares_of([layer], 3)
    assert [*shares[layer.name]] == [range(2), range(2, 4)]
    assert sorted(shares[layer.name].values()) == [0, 1]
