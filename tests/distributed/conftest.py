"""One subprocess runs all scenarios of this folder, in groups of processes that it forks; tests read what they left."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import ranks
from tests.helpers import run_python


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where the processes have left what they found. Where pytest itself runs in several, the first to come starts
    them, and the others wait."""
    shared = "PYTEST_XDIST_TESTRUNUID" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if shared else base) / "ranks"
    printed = folder / "printed.txt"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + 3000
        while not printed.exists():
            assert time.monotonic() < end, "the processes were started elsewhere, and do not end"
            time.sleep(0.2)
    else:
        ran = run_python("-m", "tests.distributed.ranks", folder, timeout=3000, HF_HUB_OFFLINE="1")
        (folder / "printing.txt").write_text(f"exit code {ran.returncode}\n{ran.stderr}")
        (folder / "printing.txt").rename(printed)
    assert printed.read_text().startswith("exit code 0\n")
    assert "hangs" not in printed.read_text()
    return folder


@pytest.fixture(scope="session")
def results(folder):
    """(group, scenario) -> what each rank of the group found; None for one that died."""
    loaded: dict[str, list[Any]] = {}

    def of(group: str, scenario: Callable[..., Any]) -> list[Any]:
        if group not in loaded:
            paths = [folder / f"{group}-{rank}.pt" for rank in range(ranks.GROUPS[group][0])]
            loaded[group] = [torch.load(path, weights_only=False) if path.exists() else None for path in paths]
        found = [None if of_rank is None else of_rank[scenario.__name__] for of_rank in loaded[group]]
        broken = [text for text in found if isinstance(text, str)]
        assert not broken, broken[0]
        return found

    return of
