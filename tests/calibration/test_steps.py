"""Steps of the optimizer: whatever the user's batches are, the same rows make the same steps, and judge."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import batch_rows, load_calls
from modelopt_sparse.model.devices import flat_tensors
from tests.helpers import in_steps, tiny_llama
from tests.models.tiny import masked_bert

pytestmark = pytest.mark.core


ROWS = torch.arange(256 * 120).view(256, 120)
IMAGES = torch.arange(64.0).view(64, 1, 1, 1).expand(64, 3, 4, 4)


def with_masks(rows: Tensor) -> dict[str, Tensor]:
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "use_cache": False}


def with_labels(rows: Tensor) -> dict[str, Tensor]:
    return {"rows": rows, "labels": rows.flatten(1)[:, 0]}


STEPS = [  # of how many rows
    *((ROWS, as_call, 8) for as_call in (None, with_masks, with_labels)),
    *((IMAGES, as_call, 2) for as_call in (None, with_labels)),
    *((ROWS[:100], None, 3), (ROWS[:3], None, 1)),
]


@pytest.mark.parametrize("tuned", [{"reconstruct": True}, {"distill": True}])
@pytest.mark.parametrize("sizes", [32, 4, 7, 300])
@pytest.mark.parametrize(("rows", "as_call", "size"), STEPS)
def test_steps_are_the_same_whatever_the_batches(rows, as_call, size, sizes, tuned):
    """About 1,024 tokens each, at least 32, in an order drawn by the seed; an image counts as 128 tokens."""
    batches = rows.split(sizes)
    loader = [batch if as_call is None else as_call(batch) for batch in batches]
    calls = load_calls(mts.SparsifyConfig(data_loader=loader, seed=5, **tuned), tiny_llama(), [])
    steps = {}
    for call in calls:
        steps.setdefault(call.step, []).append(flat_tensors((call.args, call.kwargs))[0])
        assert steps[call.step][-1][0, 0] in batches[call.batch][:, 0]
        if as_call is with_labels:
            assert torch.equal(call.kwargs["labels"], with_labels(call.kwargs["rows"])["labels"])
    wanted = in_steps([rows], seed=5)
    assert [*steps] == [*range(len(wanted))]
    assert {len(step) for step in wanted[:-1]} <= {size, len(rows) % size}
    for step, rows_of_step in zip(wanted, steps.values()):
        assert torch.equal(torch.cat(rows_of_step), step)


WHOLE = {
    "floats": torch.zeros(40, 300),
    "hidden states": torch.zeros(40, 300, 2),
    "positions": {"input_ids": ROWS[:40], "position_ids": torch.zeros(3, 40, 300, dtype=torch.long)},
    "both": {"input_ids": ROWS[:40], "pixel_values": IMAGES[:40]},
    "more images": {"pixel_values": IMAGES[:40], "rows": torch.zeros(39, dtype=torch.long)},
    "fewer labels": {"input_ids": ROWS[:40], "labels": ROWS[0, :39]},
    "lengths": {"input_ids": ROWS[:40], "lengths": ROWS[0, :40]},
    "one row": (ROWS[:40], ROWS[:1], {}),
    "a list": {"input_ids": ROWS[:40], "names": ["a"] * 40},
    "an array": {"input_ids": ROWS[:40], "lengths": np.arange(40)},
    "an object": {"input_ids": ROWS[:40], "more": SimpleNamespace(mask=ROWS[:40])},
}


@pytest.mark.parametrize("what", WHOLE)
def test_what_is_not_known_to_have_a_row_for_each_sample_stays_whole(what):
    calls = load_calls(mts.SparsifyConfig(data_loader=[WHOLE[what]] * 3, reconstruct=True), tiny_llama(), [])
    assert [batch_rows(call.args, call.kwargs) for call in calls] == [40] * 3
    assert sorted(call.batch for call in calls) == [0, 1, 2]


def test_batches_stay_where_nothing_is_tuned():
    (call,) = load_calls(mts.SparsifyConfig(data_loader=[ROWS], polish=True), tiny_llama(), [])
    assert call.step is None
    assert len(call.args[0]) == 256


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_of_text(device):
    config = mts.SparsifyConfig(reconstruct=True)
    sizes = [config.windows_per_batch(128, length, torch.device(device)) for length in (64, 512, 1000, 2048)]
    assert sizes == [4, 2, 1, 1]
    assert config.windows_per_batch(8, 16, torch.device(device)) == 1
    assert mts.SparsifyConfig(distill=True).windows_per_batch(128, 512, torch.device(device)) == 2
    assert mts.SparsifyConfig(reconstruct=True, batch_size=8).windows_per_batch(128, 512, torch.device(device)) == 8


def one_block() -> nn.Module:
    return tiny_llama(num_hidden_layers=1)


DISTILLED = {"method": "wanda", "distill": {"epochs": 1}}
OWN_TEXT = {"method": "wanda", "self_data": 50, "reconstruct": 1}


RUNS = [
    (one_block, {"quality": "balanced"}),
    (one_block, DISTILLED),
    (one_block, {"budget": "50% zeros"}),
    (tiny_llama, {"permute": True}),
    *((each, OWN_TEXT) for each in (one_block, masked_bert)),
]


@pytest.mark.parametrize(("build", "options"), RUNS)
def test_the_same_rows_in_other_batches_give_the_same_result(build, options):
    """Eight of 32 rows, 64 of 4, and some of other sizes."""
    ids = torch.randint(3, 97, (256, 24), generator=torch.Generator().manual_seed(1))
    weights = []
    for sizes in (32, 4, [100, 1, 155]):
        model = mts.sparsify(build().double(), pattern="2:4", data_loader=ids.split(sizes), progress=False, **options)
        weights.append(dict(model.named_parameters()))
    for other in weights[1:]:
        for name, weight in weights[0].items():
            assert torch.equal(weight == 0, other[name] == 0), name
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-7)
