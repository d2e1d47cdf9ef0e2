"""Fixtures that several files use."""

import pytest

from tests.runtime.unpacking import Unpacking, installed


@pytest.fixture
def backend(monkeypatch) -> Unpacking:
    return installed(monkeypatch)
