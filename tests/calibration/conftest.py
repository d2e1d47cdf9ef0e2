"""What several files compare with."""

import pytest
from transformers import AutoTokenizer

import modelopt_sparse as mts
from tests.calibration.collecting import collected
from tests.helpers import TESTBED, tiny_llama, token_batches


@pytest.fixture(scope="module")
def from_tensors() -> dict[str, mts.Stats]:
    return collected(tiny_llama(), data_loader=token_batches())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
