"""What a plan shows: a row for each layer, the reason for each weight that stays dense, and the same as JSON."""

import json
import re

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import modelopt_sparse as mts
from tests.plan.test_planner import untied

pytestmark = pytest.mark.core


# what it shows --------------------------------------------------------------------------------------------------------


def test_hardware_columns_say_which_runtime_takes_the_shape():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(16, 8), nn.Linear(12, 8), Conv1D(32, 64))
    fits = [[*item.hardware.items()] for item in mts.make_plan(model, "magnitude").layers]
    takers = [3, 2, 1, 0, 3]  # the last one is [32, 64] as a matrix
    assert fits == [[("asp", n > 0), ("cusparselt", n > 1), ("cutlass", n > 2)] for n in takers]


def test_the_printed_plan_names_every_layer_and_every_reason():
    plan = mts.make_plan(untied(), "sparsegpt", exclude="*.q_proj", rules={"*.k_proj": {"pattern": "50%"}})
    lines = plan.text(all_rows=True).splitlines()
    for item in plan.layers:
        (line,) = (line for line in lines if line.startswith(item.name))
        cells = re.split(" {2,}", line)
        assert cells[:2] == [item.name, item.type]
        assert cells[3:5] == [item.method.name, str(item.pattern)]
        assert cells[5] == (", ".join(name for name, fits in item.hardware.items() if fits) or "none")
    for item in plan.skipped:
        assert any(line.startswith(item.name) and line.endswith(item.reason) for line in lines)


def test_the_json_holds_the_plan():
    plan = mts.make_plan(untied(), "sparsegpt", exclude="*.q_proj")
    data = json.loads(plan.to_json())
    assert data == plan.as_dict()
    where = {"name": "model.layers.0.self_attn.k_proj", "type": "Linear", "shape": [16, 32], "block": "model.layers.0"}
    what = {"method": "sparsegpt", "recipe": "sparsegpt", "pattern": "2:4"}
    what |= {"options": {"damping": 0.01, "block_size": 128}}
    what |= {"hardware": {"asp": True, "cusparselt": True, "cutlass": False}}
    assert data["layers"][0] == where | what
    assert {"name": "lm_head", "type": "Linear", "shape": [97, 32], "reason": "output head"} in data["skipped"]
    assert set(data["memory_bytes"]) == {"statistics_of_one_block", "solver_workspace", "masks"}


def test_an_option_that_json_has_no_value_for_is_shown_as_text():
    class Own(mts.Method):
        options = {"dtype": torch.float32}

        def solve(self, weight, state, pattern, options):
            raise AssertionError("a plan solves nothing")

    (layer, *_) = json.loads(mts.make_plan(untied(), Own()).to_json())["layers"]
    assert layer["options"] == {"dtype": "torch.float32"}


def test_shapes_are_those_of_the_matrices():
    layers = [nn.Linear(8, 4), Conv1D(4, 8), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 3, groups=2)]
    plan = mts.make_plan(nn.Sequential(*layers, nn.MultiheadAttention(8, 2)), "magnitude")
    shapes = [(item.name, item.shape) for item in plan.layers]
    assert shapes[:4] == [("0", (4, 8)), ("1", (4, 8)), ("2", (4, 72)), ("3", (2, 2, 36))]
    assert shapes[4:] == [("4.in_proj_weight", (3, 8, 8)), ("4.out_proj", (8, 8))]
