"""What all tests share: no network beyond this machine, few threads, no progress bars of other libraries."""

import os
import sys
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

if not torch.cuda.is_available():
    # without a GPU, Triton kernels run in Triton's interpreter, on the CPU; it asks when it is first imported, which
    # transformers does
    os.environ["TRITON_INTERPRET"] = "1"

import transformers

from modelopt_sparse.cli import commands as cli
from tests.helpers import Done

transformers.utils.logging.disable_progress_bar()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads(request):
    """Every test starts from the same random state, so that its order in the suite does not matter.

    Matrices this small are fastest on one thread: on a busy machine two of them wait for each other.
    """
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1)


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
