"""What all tests share: no network beyond this machine, few threads, no progress bars of other libraries."""

import gc
import os
import runpy
import sys
from collections.abc import Callable, Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

import pytest
import torch

if not torch.cuda.is_available():
    # without a GPU, Triton kernels run in Triton's interpreter, on the CPU; it asks when it is first imported, which
    # transformers does
    os.environ["TRITON_INTERPRET"] = "1"

import transformers

from modelopt_sparse.cli import commands as cli
from modelopt_sparse.model import devices
from tests.helpers import ROOT, Done

transformers.utils.logging.disable_progress_bar()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_this_file_alone():
    """A full collection, which tests and the package ask for, looks through what imports have made no more."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # Hypothesis looks for who refers to what


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads():
    """Every test starts from the same random state, so that its order in the suite does not matter.

    One thread: there is a process for each core, and where there are more threads than cores they wait for each other.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch):
    """Tests do not depend on whether the CPU has products of bfloat16."""
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: True)


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., Done]:
    """`modelopt-sparse ARGUMENTS` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["modelopt-sparse", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        caught = capsys.readouterr()
        return Done(int(ended.value.code or 0), caught.out, caught.err)

    return call


@pytest.fixture
def run_script(monkeypatch, capsys) -> Callable[..., Done]:
    """`python examples/benchmarks/NAME ARGUMENTS` in this process, which has imported everything."""
    folder = ROOT / "examples" / "benchmarks"

    def call(name: str, *arguments: object) -> Done:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            runpy.run_path(str(folder / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        caught = capsys.readouterr()
        return Done(code, caught.out, caught.err) if isinstance(code, int) else Done(1, caught.out, f"{code}\n")

    return call


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
