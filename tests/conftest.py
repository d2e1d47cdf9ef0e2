"""What all tests share: no network beyond this machine, few threads, no progress bars of other libraries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import transformers

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads(request):
    """Every test starts from the same random state, so that its order in the suite does not matter.

    Matrices this small are fastest on one thread: on a busy machine two of them wait for each other.
    """
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1)
