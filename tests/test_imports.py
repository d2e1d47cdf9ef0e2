"""What is imported when, in processes of their own: the first answer of the command line waits for no torch."""

import inspect
from typing import Any

import pytest
import typer

import modelopt_sparse as mts
from modelopt_sparse.cli import commands, names, run
from modelopt_sparse.methods import METHODS
from modelopt_sparse.plan.options import QUALITIES
from modelopt_sparse.training.sparse_ift.transform import MEMBERS
from tests.helpers import run_python

pytestmark = pytest.mark.core

HEAVY = ("torch", "transformers", "accelerate", "safetensors", "numpy", "yaml", "tqdm", "huggingface_hub", "tokenizers")
COMMAND = """
import atexit, sys
atexit.register(lambda: print("\\n" + " ".join(sys.modules), file=sys.stderr))
from modelopt_sparse.cli.commands import main
main()
"""
PROGRAM = """
import sys
{}
print(" ".join(sys.modules))
"""


def heavy(modules: str) -> set[str]:
    """The heavy packages among the modules."""
    return {name.partition(".")[0] for name in modules.split()} & set(HEAVY)


def imported(program: str) -> set[str]:
    """The modules that a program has imported at its end."""
    done = run_python("-c", PROGRAM.format(program))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


# the command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--help", "Exit codes: 0 done"),
        ("--version", f"modelopt-sparse {mts.__version__}"),
        ("sparsify --help", "Make MODEL sparse"),
        ("sparse-ift --help", "wide, parallel"),
    ],
)
def test_texts_need_no_torch(arguments, shown):
    done = run_python("-c", COMMAND, *arguments.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert heavy(done.stderr.splitlines()[-1]) == set()
    assert "modelopt_sparse.cli.commands" in done.stderr


@pytest.mark.parametrize(("typed", "offered"), [("sp", "sparsify"), ("sparsify --qual", "--quality")])
def test_completion_needs_no_torch(typed, offered):
    words = f"modelopt-sparse {typed}"
    done = run_python(
        "-c",
        "import sys\nsys.argv = ['modelopt-sparse']\n" + COMMAND,
        _MODELOPT_SPARSE_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(words.count(" ")),
    )
    assert offered in done.stdout.split()
    assert heavy(done.stderr.splitlines()[-1]) == set()


def test_wrong_arguments_are_told_without_torch():
    done = run_python("-c", COMMAND, "plan")
    assert done.returncode == names.WRONG_INPUT
    assert "Missing argument 'MODEL'" in done.stderr
    assert heavy(done.stderr.splitlines()[-1]) == set()


def test_the_version_is_the_only_line():
    done = run_python("-m", "modelopt_sparse", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"modelopt-sparse {mts.__version__}\n", "")


def test_names_in_help_texts_are_the_real_ones():
    assert list(names.METHODS) == list(METHODS)
    assert list(names.QUALITIES) == list(QUALITIES)
    assert names.MEMBERS == MEMBERS


def test_every_command_runs_a_function_that_takes_its_options():
    """With the arguments by name: those that are declared, no other, and none of them twice."""
    root: Any = typer.main.get_command(commands.app)
    for command in root.commands.values():
        declared = inspect.signature(command.callback).parameters.keys() - {"context"}
        function = inspect.signature(getattr(run, command.callback.__name__))
        function.bind(**dict.fromkeys(declared))
        by_name = {name for name, each in function.parameters.items() if each.kind is each.KEYWORD_ONLY}
        flags = declared - by_name
        assert by_name <= declared
        assert flags <= {"method", *mts.SparsifyConfig.names()}, f"{command.name} drops an option"


# the library ----------------------------------------------------------------------------------------------------------


def test_the_package_alone_imports_nothing():
    assert (
        heavy(" ".join(imported("import modelopt_sparse; modelopt_sparse.__version__; dir(modelopt_sparse)"))) == set()
    )


def test_masks_need_no_transformers():
    program = (
        "import modelopt_sparse as mts, torch\n"
        "layer = torch.nn.Sequential(torch.nn.Linear(8, 4))\n"
        "mts.set_mask(layer, '0.weight', torch.rand(4, 8) > 0.5)\n"
        "assert len(dict(mts.named_masks(layer))) == 1\n"
        "mts.attach_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer)"
    )
    modules = imported(program)
    assert "torch" in modules
    assert heavy(" ".join(modules)) & {"transformers", "tokenizers"} == set()


def test_sparsify_imports_no_checkpoints_no_runtime_no_training_and_no_tokenizers():
    before = imported("import torch; from transformers import PreTrainedModel")
    more = (
        imported("import torch; from transformers import PreTrainedModel\nfrom modelopt_sparse import sparsify")
        - before
    )
    rooms = {name.split(".")[1] for name in more if name.startswith("modelopt_sparse.")}
    assert "solving" in rooms
    assert rooms & {"checkpoint", "runtime", "training", "cli"} == set()
    assert [name for name in more if name.startswith(("transformers.models.", "tokenizers"))] == []


def test_training_comes_with_the_package():
    imported("import modelopt_sparse as mts; mts.training.RigL; mts.training.cost")
