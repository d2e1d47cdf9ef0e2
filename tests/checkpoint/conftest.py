"""Folders that several files read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import modelopt_sparse as mts
from tests.checkpoint.folders import sparse


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a sparse model, saved once."""
    root = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            mts.save(sparse(name), root / name)
        return root / name

    return folder


@pytest.fixture
def broken(saved, tmp_path) -> Callable[[str], Path]:
    """A copy of that folder, to be damaged."""

    def folder(name: str) -> Path:
        return shutil.copytree(saved(name), tmp_path / name)

    return folder
