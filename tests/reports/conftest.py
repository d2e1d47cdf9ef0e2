"""Fixtures that several files use."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches
from tests.reports.pages import large_report


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    """A model with every step, whose report knows what it costs as a whole."""
    model, dense = tiny_llama(), tiny_llama()
    options = {"data_loader": token_batches(4), "progress": False, "polish": 3, "reconstruct": 1}
    mts.sparsify(model, "sparsegpt", pattern="2:4", **options)
    tokens = torch.cat(token_batches(seed=2)).flatten()
    mts.report(model).evaluation = mts.evaluate(model, tokens, seq_len=16, reference=dense, progress=False)
    return model


@pytest.fixture(scope="session")
def page(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "llama.html"
    assert mts.report(llama).to_html(path, title="llama", masks=dict(mts.named_masks(llama))) == path
    return path


@pytest.fixture(scope="session")
def rows() -> mts.Report:
    """20,000 layers."""
    return large_report()


@pytest.fixture(scope="session")
def large(rows, tmp_path_factory) -> Path:
    """Their page."""
    return rows.to_html(tmp_path_factory.mktemp("large") / "large.html")
