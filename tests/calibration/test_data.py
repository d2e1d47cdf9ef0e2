"""Calibration data in every form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import modelopt_sparse as mts
from tests.calibration.collecting import assert_same, collected
from tests.helpers import tiny_llama, token_batches

pytestmark = pytest.mark.core


def _loader(*tensors: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


def _run_all(batches: list[Tensor]) -> Callable[[nn.Module], None]:
    def loop(model: nn.Module) -> None:
        for batch in batches:
            model(input_ids=batch)

    return loop


def _run_in_inference_mode(batches: list[Tensor]) -> Callable[[nn.Module], None]:
    return torch.inference_mode()(_run_all(batches))


FORMS = {
    "tensors": lambda x: {"data_loader": x},
    "one-element tuples": lambda x: {"data_loader": [(batch,) for batch in x]},
    "tuples with labels": lambda x: {"data_loader": [(batch, torch.ones(2)) for batch in x]},
    "TensorDataset, which gives lists": lambda x: {"data_loader": _loader(torch.cat(x))},
    "TensorDataset with labels": lambda x: {"data_loader": _loader(torch.cat(x), torch.ones(6))},
    "dicts": lambda x: {"data_loader": [{"input_ids": batch} for batch in x]},
    "BatchEncodings": lambda x: {"data_loader": [BatchEncoding({"input_ids": batch}) for batch in x]},
    "dicts with a full mask": lambda x: {
        "data_loader": [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in x]
    },
    "generator": lambda x: {"data_loader": (batch for batch in x)},
    "tuples with keywords last": lambda x: {"data_loader": [(batch, {"use_cache": False}) for batch in x]},
    "collect_func, tensors": lambda x: {"data_loader": x, "collect_func": lambda batch: batch},
    "collect_func, dicts": lambda x: {"data_loader": x, "collect_func": lambda batch: {"input_ids": batch}},
    "collect_func, all positional": lambda x: {
        "data_loader": x,
        "collect_func": lambda batch: (batch, torch.ones_like(batch)),  # Llama's second argument is attention_mask
    },
    "collect_func, keywords last": lambda x: {
        "data_loader": [{"ids": batch, "label": 1} for batch in x],
        "collect_func": lambda batch: (batch["ids"], {"use_cache": False}),
    },
    "forward_loop": lambda x: {"forward_loop": _run_all(x)},
    "forward_loop in inference mode": lambda x: {"forward_loop": _run_in_inference_mode(x)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_statistics(form, from_tensors):
    assert_same(collected(tiny_llama(), **FORMS[form](token_batches())), from_tensors)


def test_statistics_are_sums_so_the_cut_into_batches_does_not_matter(from_tensors):
    in_one = collected(tiny_llama(), data_loader=[torch.cat(token_batches())], sequential="none")
    in_three = collected(tiny_llama(), data_loader=token_batches(), sequential="none")
    for name, stats in in_three.items():
        assert stats.tokens == in_one[name].tokens == 3 * 2 * 16
        torch.testing.assert_close(stats.gram, in_one[name].gram, rtol=1e-5, atol=1e-4)


def test_max_batches_stops_early_and_draws_no_more():
    drawn = []
    batches = (drawn.append(1) or batch for batch in token_batches(5))
    found = collected(tiny_llama(), data_loader=batches, max_batches=2)
    assert_same(found, collected(tiny_llama(), data_loader=token_batches(5)[:2]))
    assert len(drawn) == 2


def test_the_report_names_the_data():
    """Calls are counted, and other data gives another fingerprint."""
    reports = []
    for seed in (1, 1, 2):
        model = tiny_llama()
        mts.sparsify(model, "wanda", data_loader=token_batches(seed=seed), progress=False)
        reports.append(mts.report(model).calibration)
    assert reports[0]["calls"] == 3
    assert reports[0] == reports[1]
    assert reports[0]["sha256"] != reports[2]["sha256"]
