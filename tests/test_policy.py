"""Rules that the whole package keeps, read from its source and from a fresh import."""

import ast
import gc
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.patterns import NM, Unstructured
from tests import measures
from tests.helpers import run_python, tiny_llama, token_batches

PACKAGE = Path(mts.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in SOURCES]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports: "torch.nn", "torch.Tensor", "modelopt_sparse.methods.patterns.NM"."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """ "torch.nn.Linear" of the expression that reads it, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# the public names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["modelopt_sparse", "modelopt_sparse.training"])
def test_the_public_names_are_those_of_the_stub(package):
    """What type checkers see is what there is: each name once, documented and defined in the module that is named."""
    module = importlib.import_module(package)
    folder = Path(str(module.__file__)).parent
    imported = [node for node in tree(folder / "__init__.pyi").body if isinstance(node, ast.ImportFrom)]
    assert {node.level for node in imported} == {1}
    names = [alias for node in imported for alias in node.names]
    assert [alias.asname for alias in names] == [alias.name for alias in names]  # "as" makes it public for checkers
    homes = {alias.name: f"{package}.{node.module}" for node in imported if node.module for alias in node.names}
    assert sorted(homes) == sorted({*module.__all__} - {"__version__"})
    for name, home in homes.items():
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(home), name)
        assert getattr(value, "__module__", home) == home, f"{name} is defined elsewhere"
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), f"{name} has the docstring that dataclass made"
    modules = {path.stem for path in folder.iterdir()}
    assert not modules & set(homes)  # once imported, it would stand in the place of the name
    assert {name for name in vars(module) if not name.startswith("_")} - modules - {"lazy_loader"} <= set(homes)


# layers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=lambda path: path.name)
def test_methods_see_no_module(path):
    """Nothing of torch.nn, and nothing of the package but methods and checks of values; patterns not even these."""
    for name in imports(path):
        assert not within(name, "torch.nn", "transformers", "accelerate"), name
        if within(name, "modelopt_sparse"):
            assert within(name, "modelopt_sparse.methods", "modelopt_sparse.checks"), name
            assert path.name != "patterns.py", name
    read = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert not {name for name in read if within(name, "torch.nn", "nn")}


OWNERS = {"torch.distributed": "distributed.py", "accelerate.hooks": "model/devices.py"}
OWNERS |= {"triton": "methods/sweep_triton.py"}


@pytest.mark.parametrize("package", OWNERS)
def test_only_one_file_imports(package):
    users = {
        name
        for path, name in zip(SOURCES, NAMES)
        if any(within(item, package) for item in imports(path))
        or any(within(dotted(node), package) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))
    }
    assert users == {OWNERS[package]}


def test_third_party_imports_are_declared():
    declared = {"torch", "transformers", "accelerate", "safetensors", "tqdm", "psutil", "numpy", "yaml"}
    declared |= {"typer", "lazy_loader", "jinja2"}
    declared |= {"triton"}  # torch brings it along where it is used
    declared |= {"plotly", "datasets"}  # of extras
    used = {name.partition(".")[0] for path in SOURCES for name in imports(path)}
    assert used - declared - set(sys.stdlib_module_names) - {"modelopt_sparse"} == set()


# what no file may do ------------------------------------------------------------------------------------------------


PICKLES = ("pickle", "dill", "cloudpickle", "joblib", "marshal", "torch.load", "torch.save", "torch.hub", "numpy.load")
BUILT_IN = {"print", "eval", "exec", "compile", "__import__", "breakpoint", "input"}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_what_no_file_may_do(path):
    """Pickles are code of strangers, and what is printed is in the way; no bare except, and nothing is swallowed."""
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert ast.get_docstring(tree(path))
    assert not [name for name in imports(path) if name.endswith(".*") or within(name, *PICKLES)]
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Attribute) or not within(dotted(node), "np.load", *PICKLES), node.lineno
        if isinstance(node, ast.Call):
            assert dotted(node.func) not in BUILT_IN, node.lineno
        elif isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            broad = dotted(node.type) in ("Exception", "BaseException")
            assert raises or not broad, f"line {node.lineno}: swallows {dotted(node.type)}"


FRESH_IMPORT = """
import importlib, json, logging, signal, sys, warnings
import torch
modules = [importlib.import_module(name) for name in ("torch.nn", "torch.nn.functional")]
import accelerate.hooks, accelerate.optimizer, safetensors.torch, yaml
import transformers.modeling_utils, transformers.pytorch_utils
classes = [
    torch.nn.Module, torch.nn.Linear, torch.nn.Conv2d, torch.nn.MultiheadAttention, torch.nn.Parameter, torch.Tensor,
    torch.optim.Optimizer, transformers.PreTrainedModel, transformers.pytorch_utils.Conv1D, yaml.SafeLoader,
    accelerate.hooks.AlignDevicesHook, accelerate.optimizer.AcceleratedOptimizer,
]

def look():
    content = {
        f"{thing}.{name}": id(value) for thing in (*classes, *modules)
        for name, value in vars(thing).items() if callable(value) or isinstance(value, property)
    }
    return content | {
        "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(), "cuda tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn tf32": torch.backends.cudnn.allow_tf32, "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(), "seed": torch.initial_seed(),
        "random": int(torch.get_rng_state().sum()), "device": str(torch.get_default_device()),
        "filters": len(warnings.filters), "sigint": str(signal.getsignal(signal.SIGINT)), "hook": str(sys.excepthook),
        "bars": transformers.utils.logging.is_progress_bar_enabled(), "verbosity": transformers.logging.get_verbosity(),
        "logging": [str(handler) for handler in logging.getLogger().handlers],
        "yaml": {str(k): len(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()},
    }

def differences(before, after):
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in {**before, **after} if before.get(k) != after.get(k)]

before = look()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
found = {"import": differences(before, look())}
import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from tests.helpers import tiny_llama, token_batches
for method in METHODS:
    model, data = tiny_llama(), token_batches()
    before = look()
    mts.export(mts.sparsify(model, method, data_loader=data))
    found[method] = differences(before, look())
print(json.dumps(found))
"""


def test_importing_every_module_and_every_method_patch_nothing_and_set_nothing():
    parts = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in NAMES]
    left_out = {"__init__", "__main__"}
    if importlib.util.find_spec("triton") is None:
        left_out.add("methods.sweep_triton")  # imported only where Triton is installed
    names = [f"modelopt_sparse.{part}" for part in parts if part not in left_out]
    done = run_python("-W", "error::DeprecationWarning:modelopt_sparse", "-c", FRESH_IMPORT, json.dumps(names))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"import": [], **{method: [] for method in METHODS}}


# words --------------------------------------------------------------------------------------------------------------

# names that say nothing of what they hold, or that mean several things
RIDDLES = {"target", "item", "given", "found", "their", "keep", "kept"}
RIDDLES |= {"own", "each", "other", "said", "there", "how", "more", "what"}
# where one of them stands all the same, and why
ALLOWED = {
    ("checkpoint/stream.py", "target"): "a public parameter of sparsify_checkpoint: the folder to write",
    ("shrinking/shrink.py", "kept"): "a public option of shrink, and what it reads",
    ("shrinking/sizes.py", "kept"): "the same",
    ("reports/values.py", "kept"): "the section of the report that this option takes",
    ("training/algorithms.py", "other"): "a public parameter of Group.extend",
    ("training/iso_flop/transform.py", "other"): "a public field of IsoPlan, and a key of its JSON",
}


def test_no_parameter_field_or_local_is_a_riddle():
    riddles = set()
    for path, file in zip(SOURCES, NAMES):
        for node in ast.walk(tree(path)):
            stored = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
            names = {getattr(node, field, None) for field in ("arg", "id", "attr")} if stored else set()
            riddles |= {(file, name) for name in names & RIDDLES}
    assert riddles == set(ALLOWED)


def test_one_file_knows_how_accelerate_leaves_its_hooks():
    users = {name for path, name in zip(SOURCES, NAMES) if "_hf_hook" in path.read_text(encoding="utf-8")}
    assert users == {"model/devices.py"}


# sizes --------------------------------------------------------------------------------------------------------------

# functions of more than 60 lines, and why
LONG = {("checkpoint/stream.py", "sparsify_checkpoint"): "half of it is its docstring and its parameters"}


def test_no_function_is_longer_than_a_screen():
    long = set()
    for path, name in zip(SOURCES, NAMES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (node.end_lineno or first) - first >= 60:
                    long.add((name, node.name))
    assert long == set(LONG)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda folder: folder.name)
def test_no_folder_holds_more_than_nine_files(folder):
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 9


def test_how_many_files_a_reader_opens_on_the_way_to_the_mask():
    """Those of functions that are entered between the first block and SparseGPT's first mask, twelve some day."""
    entered, _ = measures.way_to_the_mask(PACKAGE)
    assert len(entered) <= 19, entered
    assert sum(entered.values()) <= 1_811, entered  # lines of these functions


# the order of the rooms ---------------------------------------------------------------------------------------------

# each imports only what stands on a line before its own, and itself
ORDER = (
    ("checks", "distributed"),
    ("methods", "model", "reports"),
    ("plan",),
    ("runtime", "run"),
    ("calibration",),
    ("accuracy",),
    ("solving",),
    ("budget",),
    ("oneshot", "shrinking"),
    ("checkpoint",),
    ("training",),
    ("cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_who_may_import_whom(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for name in imports(path):
        if name in ("modelopt_sparse", "modelopt_sparse.__version__") or not within(name, "modelopt_sparse"):
            continue
        other = name.split(".")[1]
        if (room, name) in PUBLIC_NAMES:
            continue
        assert other == room or FLOOR[other] < FLOOR[room], f"{room} imports {name}"


# the command line is a user of the public names
PUBLIC_NAMES = {("cli", f"modelopt_sparse.{name}") for name in mts.__all__}


def test_nothing_of_training_imports_sparse_ift():
    """A wing: only the command line, above, and its own files know of it."""
    wing = PACKAGE / "training/iso_flop"
    for path in set((PACKAGE / "training").rglob("*.py")) - set(wing.iterdir()):
        assert not any(within(name, "modelopt_sparse.training.iso_flop") for name in imports(path)), path.name


def test_every_room_has_its_floor():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert rooms - {"__init__", "__main__"} == set(FLOOR)


# the straight line --------------------------------------------------------------------------------------------------

WAY = ("sparsify", "prune", "sparsify_block", "solve_layers", "solve_layer", "solve_piece", "solve")  # then the mask


def behind_a_with() -> set[str]:
    """The generator functions that are context managers."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and "contextmanager" in map(dotted, node.decorator_list):
                names.add(node.name)
    return names


def of_package(code: types.CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(PACKAGE)


def looks_at_the_mask(monkeypatch, cls, run) -> tuple[set[tuple[str, ...]], set[str], set[str]]:
    """Whenever a pattern's mask is computed in ``run``: the package's functions on the stack, from `sparsify` inwards;
    their files; and the package's generators that have begun, but for those behind a ``with``."""
    ways, files, generators = set(), set(), set()
    original, contexts, looked = cls.mask, behind_a_with(), []

    def spy(self, score):
        frame, chain = sys._getframe(1), ["mask"]
        while frame is not None:
            if of_package(frame.f_code):
                chain.append(frame.f_code.co_name)
                files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))
            frame = frame.f_back
        ways.add(tuple(reversed(chain)))
        looked.append(self)
        # over all objects of the process, which takes a while: at one layer in the first block, and one in the second
        for thing in gc.get_objects() if len(looked) in (3, 10) else ():
            if type(thing) is types.GeneratorType and of_package(thing.gi_code):
                begun = inspect.getgeneratorstate(thing) in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)
                if begun and thing.gi_code.co_name not in contexts:
                    generators.add(thing.gi_code.co_name)
        return original(self, score)

    monkeypatch.setattr(cls, "mask", spy)
    run()
    return ways, files, generators


MOVING = {"permute": True, "reconstruct": {"epochs": 1, "masks": "move"}}
TUNED = ("reconstruct", "tune", "_take_step", "step", "step", "mask")


WAYS = [
    ("magnitude", {}, {WAY}),
    ("ria", {"pattern": "50%"}, {WAY}),
    *(("wanda", {"sequential": sequential}, {WAY}) for sequential in ("block", "stage", "none")),
    # its sweep over the columns chooses each group; masks that move are chosen again in each step
    ("sparsegpt", MOVING, {(*WAY, "eliminate"), (*WAY[:3], *TUNED)}),
]


@pytest.mark.parametrize(("method", "options", "ways"), WAYS)
def test_the_way_to_the_mask_is_a_straight_line(monkeypatch, method, options, ways):
    """Run, block, layer, method, pattern: calls, not yields; the only generator is the one of solved layers."""
    cls = Unstructured if "pattern" in options else NM

    def run():
        mts.sparsify(tiny_llama(), method, data_loader=token_batches(), **options)

    looked_at, files, generators = looks_at_the_mask(monkeypatch, cls, run)
    assert looked_at == {(*way, "mask") for way in ways}
    assert generators == {"solve_layers"}
    if method != "sparsegpt":
        read = {*files, "methods/patterns.py"}
        assert len(read) <= 6
        assert sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in read) <= 1_400
