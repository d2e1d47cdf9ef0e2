"""The golden folder: files of the first version of the format, which every later version reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.folder import MASKS
from tests.checkpoint.folders import describe
from tests.helpers import assert_bits

pytestmark = pytest.mark.core


GOLDEN, GOLDEN_PACKED = (Path(__file__).parent / name for name in ("golden", "golden_packed"))


class Golden(nn.Module):
    """The model in tests/checkpoint/golden, with the dense weights that it was made from. Never change it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 2)
        self.down = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(torch.tensor([[1.0, 2, 3, 4, 4, 3, 2, 1], [-9.0, 1, 8, 2, 1, -5, 1, 6]]))
            self.up.bias.copy_(torch.tensor([0.5, -0.25]))
            self.down.weight.copy_(torch.tensor([[1.0, 1, 1, 1], [0.0, -2, 0, 3], [7.0, 5, 6, 4]]))


GOLDEN_WEIGHTS = {
    "up.weight": [[0, 0, 3, 4, 4, 3, 0, 0], [-9, 0, 8, 0, 0, -5, 0, 6]],
    "up.bias": [0.5, -0.25],
    "down.weight": [[1, 1, 0, 0], [0, -2, 0, 3], [7, 0, 6, 0]],
}


# up: 00111100 10100101, down: 1100 0101 1010, first entry in the lowest bit
GOLDEN_BYTES = {"up.weight": [0b00111100, 0b10100101], "down.weight": [0b10100011, 0b00000101]}


@pytest.mark.parametrize("folder", [GOLDEN, GOLDEN_PACKED], ids=["plain", "packed"])
def test_a_golden_folder_still_restores_to_the_bit(folder):
    model = Golden()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(99)
    mts.restore(model, folder)
    masks = dict(mts.named_masks(model))
    assert masks.keys() == GOLDEN_BYTES.keys()
    for name, values in GOLDEN_WEIGHTS.items():
        assert_bits(model.get_parameter(name), torch.tensor(values, dtype=torch.float32))
        if name in masks:
            assert torch.equal(masks[name], torch.tensor(values) != 0)
    assert [layer.recipe for layer in mts.report(model).layers] == ["magnitude", "magnitude"]
    assert len(mts.verify(model).layers) == 2


def test_the_golden_folder_holds_these_bytes_of_packed_masks():
    assert {name: packed.tolist() for name, packed in load_file(GOLDEN / MASKS).items()} == GOLDEN_BYTES


@pytest.mark.parametrize("folder", [GOLDEN, GOLDEN_PACKED], ids=["plain", "packed"])
def test_saving_the_golden_model_today_gives_the_golden_files(folder, tmp_path):
    model = mts.sparsify(Golden(), "magnitude", pattern="2:4")
    mts.save(model, tmp_path / "out", packed=folder is GOLDEN_PACKED)
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    ours, theirs = describe(tmp_path / "out"), describe(folder)
    assert ours.keys() == theirs.keys()
    for key in ("format", "format_version", "model_class", "masks", "aliases", "files"):
        assert ours[key] == theirs[key]
    later = ("seconds", "steps", "expert_tokens")  # times differ, and the golden folder is older than the others
    timeless = [{k: v for k, v in layer.items() if k not in later} for layer in ours["report"]["layers"]]
    assert timeless == [{k: v for k, v in layer.items() if k not in later} for layer in theirs["report"]["layers"]]


# packed ---------------------------------------------------------------------------------------------------------------


def test_the_golden_packed_folder_unpacks_to_the_golden_one(tmp_path):
    mts.unpack(GOLDEN_PACKED, tmp_path / "plain")
    for name in ("model.safetensors", MASKS):
        assert (tmp_path / "plain" / name).read_bytes() == (GOLDEN / name).read_bytes()
    assert mts.report(tmp_path / "plain") == mts.report(GOLDEN_PACKED)
