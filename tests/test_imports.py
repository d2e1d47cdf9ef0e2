"""What is imported when, in processes of their own: the first answer of the command line waits for no torch."""

import pytest

import modelopt_sparse as mts
from modelopt_sparse.cli import commands
from modelopt_sparse.methods import METHODS
from modelopt_sparse.plan.options import QUALITIES
from modelopt_sparse.training.iso_flop.transform import MEMBERS
from tests.helpers import run_python

pytestmark = pytest.mark.core

HEAVY = ("torch", "transformers", "accelerate", "safetensors", "numpy", "yaml", "tqdm", "huggingface_hub", "tokenizers")
COMMAND = """
import atexit, sys
atexit.register(lambda: print("\\n" + " ".join(sys.modules), file=sys.stderr))
from modelopt_sparse.cli.commands import main
main()
"""


def heavy(modules: str) -> set[str]:
    """The heavy packages among the modules."""
    return {name.partition(".")[0] for name in modules.split()} & set(HEAVY)


# the command line -----------------------------------------------------------------------------------------------------


TEXTS = [
    ("--help", 0, "Exit codes: 0 done"),
    ("--version", 0, f"modelopt-sparse {mts.__version__}"),
    ("sparsify --help", 0, "Make MODEL sparse"),
    ("sparse-ift --help", 0, "wide, parallel"),
    ("plan", commands.WRONG_INPUT, "Missing argument 'MODEL'"),
]


@pytest.mark.parametrize(("arguments", "code", "shown"), TEXTS)
def test_texts_need_no_torch(arguments, code, shown):
    done = run_python("-c", COMMAND, *arguments.split())
    assert done.returncode == code, done.stderr
    assert shown in done.stdout + done.stderr
    assert heavy(done.stderr.splitlines()[-1]) == set()
    assert "modelopt_sparse.cli.commands" in done.stderr
    if arguments == "--version":
        assert done.stdout == f"{shown}\n"


@pytest.mark.parametrize(("typed", "offered"), [("sp", "sparsify"), ("sparsify --qual", "--quality")])
def test_completion_needs_no_torch(typed, offered):
    words = f"modelopt-sparse {typed}"
    asked = {"_MODELOPT_SPARSE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = run_python("-c", "import sys\nsys.argv = ['modelopt-sparse']\n" + COMMAND, **asked)
    assert offered in done.stdout.split()
    assert heavy(done.stderr.splitlines()[-1]) == set()


def test_names_in_help_texts_are_the_real_ones():
    assert list(commands.METHODS) == list(METHODS)
    assert list(commands.QUALITIES) == list(QUALITIES)
    assert commands.MEMBERS == MEMBERS


# the library ----------------------------------------------------------------------------------------------------------

# in one process, one after the other, as torch alone takes seconds to import
LIBRARY = """
import sys

def show():
    print(" ".join(sys.modules))

import modelopt_sparse as mts
mts.__version__, dir(mts)
show()
import torch
layer = torch.nn.Sequential(torch.nn.Linear(8, 4))
mts.set_mask(layer, "0.weight", torch.rand(4, 8) > 0.5)
assert len(dict(mts.named_masks(layer))) == 1
mts.attach_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
show()
from transformers import PreTrainedModel
show()
from modelopt_sparse import sparsify
show()
mts.training.RigL, mts.training.cost
"""


def test_the_library_imports_what_is_used():
    done = run_python("-c", LIBRARY)
    assert done.returncode == 0, done.stderr
    alone, masks, transformers, sparsify = done.stdout.splitlines()
    assert heavy(alone) == set()
    assert "torch" in heavy(masks)
    assert heavy(masks) & {"transformers", "tokenizers"} == set()
    more = set(sparsify.split()) - set(transformers.split())
    rooms = {name.split(".")[1] for name in sparsify.split() if name.startswith("modelopt_sparse.")}
    assert "solving" in rooms
    assert rooms & {"checkpoint", "runtime", "training", "cli"} == set()
    assert [name for name in more if name.startswith(("transformers.models.", "tokenizers"))] == []
