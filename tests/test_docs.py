"""README and docs: every snippet runs, every link leads somewhere, and what they list is what the package has."""

import doctest
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch.utils.data import DataLoader
from transformers import GPTJConfig, GPTJForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.cli import commands as cli
from modelopt_sparse.methods import ALIASES, METHODS
from modelopt_sparse.plan import memory
from modelopt_sparse.plan.options import ELSEWHERE, RENAMED
from tests.helpers import ROOT, TESTBED, Done, free_port, tiny_llama, token_batches, trained_model

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
SET_UP = ["bash examples/run.sh", "bash tests/run.sh"]  # they install things; tested by what they run
WHOLE = ["docs/plan-and-rules.md"]  # pages that name the last of the testbed's six blocks
TUNES = ["docs/accuracy.md"]  # pages whose snippets take more than ten seconds
NEEDS = {  # libraries that are not there with the oldest versions
    "docs/data.md": ["datasets", "PIL"],
    "docs/semi-structured.md": ["lm_eval", "compressed_tensors", "onnxruntime", "onnxscript"],
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _blocks(page: Path) -> list[tuple[str, str, int]]:
    """(language, text, first line) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(found[1], found[2], text[: found.start(2)].count("\n") + 1) for found in BLOCK.finditer(text)]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _table(page: str, head: str) -> list[list[str]]:
    """The rows of the table whose first heading is ``head``."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
    ]
    start = next(i for i, row in enumerate(rows) if row and row[0] == head) + 2
    end = next((i for i in range(start, len(rows)) if not rows[i]), len(rows))
    return rows[start:end]


def _codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _page(page: Path):
    shell = "\n".join(text for language, text, _ in _blocks(page) if language == "sh")
    slow = re.search("modelopt[-_]sparse", shell) or _name(page) in TUNES
    return pytest.param(page, id=_name(page), marks=[pytest.mark.slow] if slow else [])


# snippets ---------------------------------------------------------------------------------------------------------


def _begin_text(testbed: Path, name: str) -> None:
    """Put the beginning of a text of the testbed into another one."""
    (testbed / name).write_text((TESTBED / name).read_text(encoding="utf-8")[:30_000], encoding="utf-8")


@pytest.fixture(scope="module")
def small_examples(tmp_path_factory) -> Path:
    """`examples` with little calibration text, and with the first two blocks of the model's six."""
    examples = tmp_path_factory.mktemp("small") / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__", ".work"))
    _begin_text(examples / "testbed", "calibration.txt")
    model = trained_model(torch.bfloat16)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(examples / "testbed" / "tiny-llama")
    return examples


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory; one thread, as for the shell."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _bash(text: str) -> None:
    command = ["bash", "-euo", "pipefail", "-c", text]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"


def _shell(text: str, run: Callable[..., Done]) -> None:
    """A block of commands. Those of the library run in this process, which has imported everything."""
    for piece in re.split(r"^(?=modelopt-sparse )(.+)$", text.replace("\\\n", ""), flags=re.MULTILINE):
        if piece.startswith("modelopt-sparse "):
            command, _, file = piece.partition(" > ")
            done = run(*shlex.split(command, comments=True)[1:])
            assert done.code == 0, f"{command}\n{done.err}"
            if file:
                Path(file).write_text(done.out, encoding="utf-8")
        elif piece.strip():
            _bash(piece)


def _what_the_guide_takes_for_granted() -> dict[str, object]:
    """A small GPT-J in the folder of the guide's name, and calibration data for it."""
    sizes: dict[str, Any] = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPTJConfig(**sizes, rotary_dim=4, bos_token_id=1, eos_token_id=2)
    GPTJForCausalLM(config).save_pretrained("EleutherAI/gpt-j-6b")
    rows = [{"input_ids": ids} for ids in torch.cat(token_batches())]
    return {"calib_dataloader": DataLoader(rows, batch_size=2)}  # type: ignore[arg-type]


def _as_torchrun_does(monkeypatch) -> None:
    """The environment of a run of one process."""
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # transformers, where it is needed
@pytest.mark.parametrize("page", [_page(page) for page in PAGES])
def test_every_snippet_runs(page, workplace, small_examples, monkeypatch, run):
    """Blocks of a page run in order, Python ones in one namespace; those of README by the commands as installed."""
    for library in NEEDS.get(_name(page), ()):
        if find_spec(library) is None:
            pytest.skip(f"{_name(page)} needs {library}, of the extra test-all")
    (workplace / "examples").symlink_to(ROOT / "examples" if _name(page) in WHOLE else small_examples)
    namespace: dict[str, object] = {"__name__": "docs"}
    if _name(page) == "docs/migrating.md":
        namespace.update(_what_the_guide_takes_for_granted())
    for language, text, line in _blocks(page):
        if language == "python":
            with monkeypatch.context() as patch:
                if "init_process_group" in text:
                    _as_torchrun_does(patch)
                exec(compile("\n" * (line - 1) + text, page, "exec"), namespace)
        elif language == "sh" and text.strip() not in SET_UP:
            if _name(page) == "README.md":
                _bash(text)
            else:
                _shell(text, run)


def test_no_block_escapes():
    """Every fenced block is Python, shell or output, so that none is left out for want of a known language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n```") == 2 * len(_blocks(page)), f"{_name(page)} has a fence that does not pair up"
        for language, _, line in _blocks(page):
            assert language in ("python", "sh", "text"), f"{_name(page)}, line {line}: {language!r}"


# the README's commands --------------------------------------------------------------------------------------------


def test_set_up_commands_are_those_that_ci_runs():
    """The README's two commands stand alone in their blocks, and .ci/run calls the second exactly as written."""
    shell = [text.strip() for language, text, _ in _blocks(ROOT / "README.md") if language == "sh"]
    assert [text for text in shell if "run.sh" in text] == SET_UP
    assert SET_UP[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for command in SET_UP:
        script = (ROOT / command.removeprefix("bash ")).read_text(encoding="utf-8")
        assert "bash .ci/setup .venv" in script


@pytest.mark.slow
def test_first_command_prints_what_readme_shows_and_leaves_a_sparse_folder(tmp_path):
    """In a copy of the tree whose set-up is done and whose texts are short. Every part of the README's sample is in the
    output, up to the numbers, whose digits may break a line."""
    tree = tmp_path / "clone"
    testbed = tree / "examples" / "testbed"
    for folder in (tree / ".ci", tree / ".venv", testbed):
        folder.mkdir(parents=True)
    (tree / ".ci" / "setup").write_text("exit 0\n")
    (tree / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (testbed / "tiny-llama").symlink_to(TESTBED / "tiny-llama")
    for text in ("calibration.txt", "heldout.txt"):
        _begin_text(testbed, text)
    (tree / "examples" / "run.sh").write_bytes((ROOT / "examples" / "run.sh").read_bytes())
    command = ["bash", tree / "examples" / "run.sh"]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "verified: every block layer of out/tiny-llama-2of4 is 2:4"
    assert len(mts.verify(tree / "out" / "tiny-llama-2of4", "2:4").layers) == 42

    def without_numbers(text: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"[\d.]+", "#", text)).strip()

    (sample,) = [text for language, text, _ in _blocks(ROOT / "README.md") if language == "text"]
    for part in sample.split("\n...\n"):
        assert without_numbers(part) in without_numbers(ran.stdout), part


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
def test_page_on_large_models_shows_what_plan_prints(run, monkeypatch):
    """The estimate for a 70B model is what the page's own commands give, to the digit, where memory is no limit."""
    monkeypatch.setattr(memory, "bytes_of", lambda device: (math.inf, math.inf))
    blocks = _blocks(ROOT / "docs" / "large-models.md")[:3]
    (_, written, _), (_, command, _), (_, shown, _) = blocks
    assert [language for language, _, _ in blocks] == ["python", "sh", "text"]
    exec(written, {})
    assert run(*shlex.split(command)[1:]).out == shown


# figures ----------------------------------------------------------------------------------------------------------


def test_readme_figures_are_those_of_the_public_model():
    """README's table has the rows of the file that the benchmark has written, which its picture was drawn from."""
    results = json.loads((ROOT / "docs/images/public_model.json").read_text("utf-8"))
    wanted = {}
    for row in results["rows"]:
        kl, seconds = (sum(run[key] for run in row["runs"]) / len(row["runs"]) for key in ("kl", "cpu_seconds"))
        wanted[row["name"]] = [f"{kl:.4f}", f"{seconds:.0f}"]
    shown = {name.replace("`", ""): cells for name, *cells in _table("README.md", "2:4 by")}
    assert shown == {name: wanted[name] for name in shown}
    assert len(shown) > 5
    assert (ROOT / "docs/images/public_model.svg").is_file()


@pytest.fixture
def printed(run_script) -> Callable[..., str]:
    """What a benchmark prints, which comes to its end."""

    def call(*arguments: object) -> str:
        ran = run_script(*arguments)
        assert ran.code == 0, ran.err
        return ran.out

    return call


def _cells(text: str) -> list[list[str]]:
    """The rows of a table in what is printed."""
    return [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")][2:]


@pytest.mark.slow
def test_the_benchmark_of_smaller_models_prints_their_times(printed):
    rows = _cells(printed("faster.py", "--width", 256, "--rounds", 1))
    shares = {title.strip(): int(share.strip(" %")) for title, share, *_ in rows}
    assert shares["a third of the blocks and half of the channels off"] < shares["half of the channels off"] < 100
    assert all(float(cell) > 0 for _, *cells in rows for cell in cells[1:])


@pytest.mark.slow
def test_the_benchmark_of_budgets_prints_a_table(printed):
    few = ("--samples", 2, "--windows", 1, "--draws", 0, "--recipes", "sparsegpt", "--levels", 50, "--hardware")
    rows = _cells(printed("budget.py", *few))
    assert all(float(cell) > 0 for row in rows for cell in row[3:5])
    assert len(rows) == 3


BENCHMARKS = {"accuracy": "--heldout-windows", "cpu_speed": "--heldout-windows", "accuracy_vit": "--seeds"}
BENCHMARKS |= {"public_model": "--draws"}


@pytest.mark.parametrize("script", BENCHMARKS)
def test_benchmarks_start(printed, script):
    """They take the others' environments or long to run; the options show that they and what they import are whole."""
    assert BENCHMARKS[script] in printed(f"{script}.py", "--help")


@pytest.mark.slow
def test_a_vision_transformer_comes_closer_with_quality(printed, tmp_path):
    """On a few images: trained, pruned and measured by the two scripts."""
    printed("train_model.py", "vit", "--epochs", 1, "--images", 512, "--out", tmp_path)
    few = ("--calibration", 64, "--held-out", 64, "--methods", "wanda,quality=balanced")
    rows = {row[0].strip(): row[2] for row in _cells(printed("accuracy_vit.py", "--model", tmp_path, *few))}
    assert float(rows["quality=balanced"]) < float(rows["wanda"])


@pytest.mark.slow
def test_the_speed_benchmark_times_every_stage(printed, tmp_path):
    """On a tiny model: each stage took time, no more than all of them, and the Gram matrices that it timed are those of
    the model's four inputs per block, whose first is left early."""
    said = printed("solve_speed.py", "--device", "cpu", "--tiny", "--layers", 2, "--out", tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    stages = ["forward", "gram", "factorize", "solve", "polish"]
    assert list(found["seconds"]) == [*stages, "other"]
    assert list(found["floor_seconds"]) == stages
    assert all(found[kind][stage] > 0 for kind in ("seconds", "floor_seconds") for stage in stages)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
    assert found["seconds"]["other"] > 0
    hidden, wide = found["model"]["hidden_size"], found["model"]["intermediate_size"]
    assert found["gram_operations"] == 2 * 2 * found["tokens"] * (3 * hidden**2 + wide**2)
    assert [row.split("|")[1].strip() for row in said.splitlines()[2:9]] == [*stages, "other", "all"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_speed_benchmark_wants_a_gpu(run_script):
    ran = run_script("solve_speed.py")
    assert ran.code == 1
    assert ran.err == "solve_speed.py: no CUDA device; --device cpu --tiny tries the script out on a small model\n"


# links ------------------------------------------------------------------------------------------------------------


def _links(page: Path) -> list[str]:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)]+)\)", text) if not re.match(r"https?:", target)]


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_internal_link_resolves():
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", TESTBED / "README.md"]:
        for link in _links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{_name(page)}: {link}"
            assert not anchor or anchor in _anchors(target), f"{_name(page)}: {link}"


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in _links(page)]
    assert set(DOCS) - reached == set()


# completeness -----------------------------------------------------------------------------------------------------


def test_the_page_of_methods_has_each_with_its_options_and_defaults():
    page = "docs/methods.md"
    assert [_codes(row[0])[0] for row in _table(page, "method")] == list(METHODS)
    assert set(METHODS) <= _anchors(ROOT / page)
    listed = [tuple(row[:3]) for row in _table(page, "option")]
    options = [(name, key, value) for name, method in METHODS.items() for key, value in method.options.items()]
    assert listed == [(f"`{key}`", f"`{name}`", str(value)) for name, key, value in options]


def test_generated_pages_are_those_of_the_options_and_flags():
    """Every option of SparsifyConfig stands in its docstring, and no page is older than what it was made from."""
    for file, made in runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"].items():
        assert (ROOT / "docs" / file).read_text(encoding="utf-8") == made(), "run python docs/generate.py"


def test_every_page_begins_with_what_the_reader_can_do_after_it():
    for page in DOCS:
        assert "\nAfter this page you " in page.read_text(encoding="utf-8")[:400], _name(page)


def test_questions_of_users_are_answered():
    """Every answer in docs_questions.yaml stands on its page, and every page that people write answers some."""
    questions = yaml.safe_load((ROOT / "tests" / "docs_questions.yaml").read_text(encoding="utf-8"))
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    assert set(questions) == {page.name for page in DOCS} - set(generated)
    asked = Counter(entry["question"] for entries in questions.values() for entry in entries)
    assert max(asked.values()) == 1, asked.most_common(1)
    for page, entries in questions.items():
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        for entry in entries:
            assert entry["answer"] in text, f"docs/{page}: {entry['question']}"
            assert 20 <= len(entry["answer"]) <= 90, f"docs/{page}: {entry['answer']}"


def test_every_public_function_is_described():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in mts.__all__:
        if name.islower() and not name.startswith("_"):
            assert f"mts.{name}(" in text, name


def test_glossary_has_every_word_of_the_design():
    words = (
        "mask sparsity N:M score layer block stats plan solve polish reconstruct attach export stage recipe fold config"
    )
    listed = [row[0] for row in _table("docs/glossary.md", "word")]
    assert set(words.split()) <= set(listed)
    assert max(Counter(listed).values()) == 1
    letters = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").rpartition("Letters for shapes")[2]
    assert set("RCGTBSE") <= set(re.findall(r"\b([A-Z])\b", letters))


def test_migration_page_names_all_that_is_translated_or_refused():
    rows = _table("docs/migrating.md", "key of `config`")
    (refused,) = [_codes(row[0]) for row in rows if row[1].startswith("refused")]
    assert len(refused) == len(ELSEWHERE.keys() & refused) == 6
    for old, new in RENAMED.items():
        (row,) = [row for row in rows if f"`{old}`" in row[0]]
        assert f"`{new}`" in row[1]
    names = "\n".join(row[0] for row in _table("docs/migrating.md", "ModelOpt"))
    assert all(f'"{alias}"' in names for alias in ALIASES)


def test_cli_page_has_every_command_and_exit_code():
    root: Any = typer.main.get_command(cli.app)
    listed = [_codes(row[0])[0].split()[0] for row in _table("docs/cli.md", "command")]
    assert sorted(listed) == sorted(root.commands)
    codes = {0, cli.VIOLATION, cli.WRONG_INPUT, cli.RANK_LOST, cli.INTERRUPTED}
    assert {int(row[0]) for row in _table("docs/cli.md", "code")} == codes


def test_format_page_lists_every_key(tmp_path):
    """The table of keys is that of a sparsity.json that save writes."""
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    mts.save(model, tmp_path / "sparse")
    written = json.loads((tmp_path / "sparse" / "sparsity.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert [key for row in _table("docs/format.md", "key") for key in _codes(row[0])] == list(written)
    assert f"Version {written['format_version']}." in text


def test_calibration_page_states_the_passes_of_every_mode():
    """They are counted in tests/calibration/test_cost.py, where a block has four stages."""
    stated = {row[0].split()[0].strip('`"'): row[2] for row in _table("docs/calibration.md", "mode")}
    assert {mode: passes[:5] for mode, passes in stated.items()} == {"block": "2", "stage": "L + 1", "none": "1"}


def test_maps_of_the_package_name_every_folder_and_lead_to_files():
    """CONTRIBUTING's map has one row for each folder; the diagram of a run names each of them too."""
    package = ROOT / "modelopt_sparse"
    folders = {f"{init.parent.name}/" for init in package.glob("*/__init__.py")}
    rows = _table("CONTRIBUTING.md", "in `modelopt_sparse/`")
    assert {row[0].strip("`") for row in rows} == folders | {"oneshot.py", "distributed.py", "checks.py", "run.py"}
    for where, _, start in rows:
        assert (package / where.strip("`") / start.strip("`")).is_file() or not where.endswith("/`"), where
    page = ROOT / "docs" / "how-a-run-works.md"
    (diagram,) = [text for language, text, _ in _blocks(page) if language == "text"]
    assert set(re.findall(r"\b\w+/", diagram)) == folders
    for path in re.findall(r"\b\w+/\w+\.py", page.read_text(encoding="utf-8")):
        assert (package / path).is_file(), path


def test_examples_in_docstrings_run_one_after_the_other(tmp_path, monkeypatch):
    """Those of the five calls that everybody makes."""
    monkeypatch.chdir(tmp_path)
    names = {"mts": mts, "model": tiny_llama(), "batches": token_batches()}
    runner = doctest.DocTestRunner()
    for function in (mts.sparsify, mts.save, mts.verify, mts.load, mts.export):
        examples = doctest.DocTestParser().get_doctest(function.__doc__ or "", names, function.__name__, None, 0)
        assert examples.examples, function.__name__
        runner.run(examples, clear_globs=False)
        names.update(examples.globs)
    assert runner.summarize(verbose=False).failed == 0
