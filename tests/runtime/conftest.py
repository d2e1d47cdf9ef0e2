"""Fixtures that several files use."""

import pytest
import torch

from tests.runtime.unpacking import Unpacking, installed


@pytest.fixture
def backend(monkeypatch) -> Unpacking:
    return installed(monkeypatch)


@pytest.fixture
def blas(monkeypatch):
    """What torch's preferred library for dense products was set to; a build without CUDA cannot change the real one."""
    history = ["heuristic"]

    def preferred(name=None):
        if name is not None:
            history.append(name)
        return history[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return history
