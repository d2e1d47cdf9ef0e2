"""Spellings of a configuration, what is wrong with others, and the command line; the same of Sparse-IFT."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from modelopt_sparse import training
from modelopt_sparse.checks import read_yaml
from modelopt_sparse.model.masking import named_masks
from tests.helpers import TESTBED, refused, tiny_llama
from tests.training.cases import applied, take_step


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"fc1": nn.Linear(8, 8), "fc2": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})


def test_the_present_spelling():
    options: dict[str, Any] = {"balance_out_groups": 4, "init_method": "topk"}
    options |= {"update": {"freq": 100, "start": 10, "stop": 3584}}
    config = {"algorithm": "RigL", "sparsity": 0.9, "param_filter": ["fc1.*"], **options}
    config |= {"drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 3584}}
    same = training.RigL(0.9, include="fc1.*", drop_fraction=training.Cosine(0.3, 3584), **options)
    assert training.configure(config).describe() == same.describe()


SET = {"algorithm": "set", "sparsity": 0.5}
GMP = {"algorithm": "gmp"}
LINEAR = {"type": "linear", "init": 0, "slope": 0.01}


OLD_SPELLINGS = [
    ({"type": "set", "sparsity": 0.5}, SET),
    ({"algorithm": "static", "schedule": 0.5}, {"algorithm": "static", "sparsity": 0.5}),
    ({**SET, "schedule": {"freq": 10}}, {**SET, "update": {"freq": 10}}),
    ({**SET, "update": 10}, {**SET, "update": {"freq": 10}}),
    ({**GMP, "sparsity_schedule": [[0, 0], [9, 0.5]]}, {**GMP, "sparsity": [0, 0.5], "update": {"steps": [0, 9]}}),
    ({**GMP, "schedule": LINEAR}, {"algorithm": "GMP", "sparsity": LINEAR}),
    ({"sparsity": {"sparsity": 0.5}, "model": {"x": 1}}, {"sparsity": 0.5}),
    (0.5, {"algorithm": "static", "sparsity": 0.5, "include": "default"}),
    ({"sparsity": 0.5, "add_summaries": True}, {"sparsity": 0.5}),
]


@pytest.mark.parametrize(("old", "new"), OLD_SPELLINGS)
def test_old_spellings(old, new):
    one, two = training.configure(old), training.configure(new)
    assert type(one) is type(two)
    assert one.describe() == two.describe()


def test_lists_become_groups_and_the_first_match_counts():
    second = {"param_filter": "fc1.*", "algorithm": "set", "sparsity": 0.75}
    sparsity = training.configure([{"param_filter": "fc1.bias", "sparsity": None}, second, {"sparsity": 0.5}])
    rows = {row.name: (row.algorithm, row.zeros / row.size) for row in sparsity.plan(model()).rows}
    assert rows == {"fc1.weight": ("SET", 0.75), "fc2.weight": ("Static", 0.5)}
    assert sparsity[0] is None


FILES = [
    ("algorithm: rigl\nsparsity: 0.9\nupdate: {freq: 9}", {"algorithm": "RigL", "sparsity": "Constant(value=0.9)"}),
    ("sparsity: 0.3\ninit_method: topk\nseed: 1234\n", {"init_method": "topk", "seed": 1234}),
    ("algorithm: gmp\nsparsity: {type: cubic, init: 0, final: 0.5, start: 0, stop: 9}\n", {"algorithm": "GMP"}),
    ("algorithm: gmp\nsparsity: [0.0, 0.9]\n", {"algorithm": "GMP"}),
    ("model: {hidden: 8}\noptimizer: {lr: 1}\nsparsity: 0.5\n", {"algorithm": "Static"}),
    ("model: {hidden: 8}\nsparsity: {type: set, sparsity: 0.5}\nseed: 3\n", {"algorithm": "SET", "seed": 0}),
    ("sparsity: {algorithm: set, sparsity: 0.5}\n", {"algorithm": "SET"}),
]


@pytest.mark.parametrize(("text", "described"), FILES)
def test_files_and_mappings_are_read_by_one_rule(text, described, tmp_path):
    """A level or a schedule with options beside it is the whole section."""
    (tmp_path / "recipe.yaml").write_text(text)
    for config in (tmp_path / "recipe.yaml", read_yaml(text, "it")):
        found = training.configure(config).describe()
        assert {key: found[key] for key in described} == described


REFUSED = [
    ({"sparsity": 1}, "sparsity: sparsity=1.0: must be a number in"),
    (1, "1 is neither a level such as 0.9, a mapping, nor a list"),
    ({"algorithm": "rigel", "sparsity": 0.5}, "algorithm 'rigel' is not known, did you mean 'rigl'"),
    ({"sparsity": 0.5, "drop_fraction": 0.3}, "Static: option 'drop_fraction' is not known; allowed are"),
    ({"sparsity": 0.5, "ini_method": "topk"}, "option 'ini_method' is not known, did you mean 'init_method'"),
    ({"type": "set", **SET}, "type is another word for algorithm here"),
    ({"sparsity": 0.5, "schedule": 0.5}, "schedule is another word for sparsity here"),
    ({"sparsity": 0.5, "param_name_patterns": "("}, "holds no regular expression"),
    ({"sparsity": 0.5, "param_name_patterns": 3}, "give regular expressions, or a mapping"),
    ({"sparsity": 0.5, "param_name_patterns": "a", "param_filter": "b"}, "give one of param_name_patterns and"),
    ({"param_name_patterns": {"ffn": 0.5}}, r"param_name_patterns\['ffn'\] is 0.5, and must be a mapping"),
    ({"param_name_patterns": {"f": {"sparsity": 0, "x": 1}}}, r"patterns\['f'\]: Static: option 'x' is not known"),
    ({"sparsity_schedule": [1, 2]}, "must be a list of .step, level."),
    *(({"sparsity_schedule": [[2, 0.6], [step, 0.2]]}, "of steps that increase") for step in (0, 2)),
    ({"sparsity_schedule": [[0, 0.5]], "update": 3}, "give sparsity_schedule, or sparsity and update"),
    ([], "this Group is empty"),
    ([0.5], r"sparsity\[0\] is 0.5, and must be a mapping"),
    ({"init_method": "topk"}, "Static needs a level"),
    ({"sparsity": 0.5, "add_summaries": "yes"}, "sparsity: add_summaries='yes': must be True or False"),
    ({**SET, "drop_min_balance": 4}, "allowed are balance_in_groups, balance_out_groups,"),
    (Path("none.yaml"), "cannot be read as YAML"),
    ("model: {}\n", "holds no section 'sparsity', so nothing is trained sparse"),
    ("sparsity: [\n", "is not YAML"),
    ("sparsity: 5\n", "sparsity=5.0: must be a number in"),
    ("algorithm: rigl\nsparsity: 0.9\nseeed: 3\n", "RigL: option 'seeed' is not known"),
    ("sparsity: 0.9\nmodel: {}\nseed: 3\n", "Static: option 'model' is not known"),
    ("sparsity:\n  seed: 1\n  sparsity: 0.5\n  seed: 2\n", r"'seed' stands twice\s.*line 4, column 3"),
]


@pytest.mark.parametrize(("config", "match"), REFUSED)
def test_what_is_refused(config, match, tmp_path):
    """A text is that of a file."""
    if isinstance(config, str):
        (tmp_path / "recipe.yaml").write_text(config)
        config = tmp_path / "recipe.yaml"
    refused(training.configure, config, match=match)


# the command line ---------------------------------------------------------------------------------------------------


def test_plan_of_a_training_recipe(run, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sparsity:\n  algorithm: rigl\n  pattern: 2:4\n  update: {freq: 100}\n")
    command = ("plan", tmp_path / "model", "--training", recipe)
    done, plan = run(*command), training.configure(recipe).plan(tiny_llama())
    assert (done.code, done.out) == (0, f"{plan}\n")
    assert len(json.loads(run(*command, "--json").out)["rows"]) == 14
    recipe.write_text("sparsity:\n  algorithm: rigel\n")
    for flags, words in (((), "did you mean 'rigl'"), (("--pattern", "2:4"), "--training")):
        run(*command, *flags).wrong(words)


def test_the_last_class_of_a_name_counts():
    """As in a notebook, where a cell with a class is run again."""
    first, second = (type("Redefined", (training.Static,), {}) for _ in range(2))
    assert type(training.configure({"algorithm": "redefined", "sparsity": 0.5})) is second, first


# Sparse-IFT --------------------------------------------------------------------------------------------------------

MODEL = TESTBED / "tiny-llama"
RISING = {"algorithm": "gmp", "schedule": {"type": "Cubic", "init": 0.0, "start": 0, "stop": 6}, "update": 2}
MOVING = {"algorithm": "set", "scope": "row", "update": {"freq": 10}}


SECTIONS = [
    ({"sparsity": 0.5}, {}),
    ({"sparsity": 0.75, "member": "wide", "iso": "model", "multiple": 16}, {"iso": "model", "multiple": 16}),
    ({"sparsity": 0.5, "member": "parallel", "activation": "GELU"}, {"activation": nn.GELU}),
    ({"sparsity": 0.5, "member": "factorized", "activation": None}, {"activation": None}),
    ({"sparsity": 0.5, "member": "doped", "include": "*.q_proj"}, {"include": "*.q_proj"}),
]


@pytest.mark.parametrize(("section", "options"), SECTIONS, ids=str)
@pytest.mark.parametrize("rule", [None, MOVING, RISING], ids=["static", "set", "gmp"])
def test_a_recipe_is_the_call(tmp_path, section, options, rule):
    path, beside = tmp_path / "recipe.yaml", {} if rule is None else {"sparsity": rule}
    path.write_text(yaml.safe_dump({"sparse_ift": section, "model": {"any": "thing"}, **beside}))
    ift = training.configure_sparse_ift(path, tiny_llama())
    options = {**options, "rule": functools.partial(training.SET, scope="row") if rule is MOVING else training.Static}
    theirs = training.sparse_ift(tiny_llama(), section["sparsity"], section.get("member", "wide"), **options)
    assert (ift.plan, str(ift.model)) == (theirs.plan, str(theirs.model))
    kind = training.Static if rule is None else {"set": training.SET, "gmp": training.GMP}[rule["algorithm"]]
    assert {type(ift.sparsity[i]) for i in range(len(ift.sparsity))} == {kind}


def test_a_gradual_rule_ends_at_the_level_of_each_layer():
    model = tiny_llama()
    ift = training.configure_sparse_ift({"sparse_ift": {"sparsity": 0.5, "member": "doped"}, "sparsity": RISING}, model)
    optimizer = applied(ift.sparsity, model, lr=0.0)
    assert all(mask.all() for _, mask in named_masks(model))
    for _ in range(7):
        take_step(model(input_ids=torch.arange(8)[None]).logits.sum(), optimizer)
    zeros = {name.removesuffix(".sparse.weight"): int((~mask).sum()) for name, mask in named_masks(model)}
    assert zeros == {layer.name: layer.new_weights - layer.live for layer in ift.plan.layers}


NO_RECIPES = [
    ({"sparsity": 0.5}, "holds no section 'sparse_ift'"),
    ({"sparse_ift": 0.5}, "that is a mapping such as"),
    ({"sparse_ift": {"member": "wide"}}, "sparsity=None: must be a number"),
    ({"sparse_ift": {"sparsity": 0.5, "membre": "wide"}}, "option 'membre' is not known, did you mean 'member'"),
    ({"sparse_ift": {"sparsity": "much"}}, r"must be a number in \[0, 1\)"),
    ({"sparse_ift": {"sparsity": 0.5, "activation": "Relu"}}, "a class of torch.nn such as ReLU"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": 0.5}, "must be a mapping beside sparse_ift"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**MOVING, "sparsity": 0.5}}, "leave sparsity out"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**MOVING, "param_filter": "*"}}, "leave param_filter out"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**MOVING, "updates": 3}}, "option 'updates' is not known"),
]


@pytest.mark.parametrize(("content", "match"), NO_RECIPES)
def test_what_sparse_ift_refuses(content, match):
    refused(lambda model: training.configure_sparse_ift(content, model), tiny_llama(), match=match)


def test_a_recipe_that_changes_layers_is_not_for_configure(tmp_path):
    (tmp_path / "recipe.yaml").write_text("sparse_ift: {sparsity: 0.5}\nsparsity: {algorithm: set}\n")
    refused(training.configure, tmp_path / "recipe.yaml", match=r"call training\.configure_sparse_ift")


# the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, RISING])
@pytest.mark.parametrize("iso", ["layers", "model"])
def test_a_config_and_a_recipe_are_written(run, tmp_path, rule, iso):
    flags = ["--iso", iso]
    if rule is not None:
        (tmp_path / "rule.yaml").write_text(yaml.safe_dump({"sparsity": rule}))
        flags += ["--recipe", tmp_path / "rule.yaml"]
    said = run("sparse-ift", MODEL, "--sparsity", 0.5, "--out", tmp_path / "wide", *flags).well()
    assert said.endswith("config.json, recipe.yaml.\n")
    assert {path.name for path in (tmp_path / "wide").iterdir()} == {"config.json", "recipe.yaml"}
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    ift = training.sparse_ift(dense, 0.5, iso=iso)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "wide"))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in ift.model.named_parameters()}
    plan = training.configure(tmp_path / "wide" / "recipe.yaml").plan(model)
    assert {row.name for row in plan.rows} == {layer.name for layer in ift.plan.layers}
    if rule is None:
        assert {row.name: row.size - row.zeros for row in plan.rows} == {x.name: x.live for x in ift.plan.layers}
    globs = read_yaml((tmp_path / "wide" / "recipe.yaml").read_text(), "it")["sparsity"][0]["param_filter"]
    assert len(globs) == 7, "one glob for each kind of layer, not a name for each layer"


def test_members_are_put_in_by_their_recipe(run, tmp_path):
    flags = ("--sparsity", 0.5, "--member", "doped", "--include", "*.q_proj", "--json")
    said = run("sparse-ift", MODEL, "--out", tmp_path / "doped", *flags).well()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "doped"))
    ift = training.configure_sparse_ift(tmp_path / "doped" / "recipe.yaml", model)
    assert {layer.name for layer in ift.plan.layers} == {f"model.layers.{i}.self_attn.q_proj" for i in range(6)}
    assert json.loads(said) == json.loads(ift.plan.to_json())


WRONG = {
    "--sparsity 1": "must be a number in [0, 1)",
    "--sparsity 0.6 --member parallel": "levels that work are 0.5 and 0.666667",
    "--sparsity 0.5 --recipe nothing.yaml": "cannot be read as YAML",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(run, tmp_path, flags):
    done = run("sparse-ift", MODEL, "--out", tmp_path / "new", *flags.split())
    done.wrong(WRONG[flags])
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_is_written_to_only_on_request(run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    command = ("sparse-ift", MODEL, "--sparsity", 0.5, "--out", tmp_path)
    run(*command).wrong("exists and is not empty")
    assert (run(*command, "--overwrite").code, (tmp_path / "mine.txt").read_text()) == (0, "mine")
