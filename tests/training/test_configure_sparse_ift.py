"""Sparse-IFT from YAML and from the command line."""

import functools
import json

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

MODEL = TESTBED / "tiny-llama"
GMP = {"algorithm": "gmp", "schedule": {"type": "Cubic", "init": 0.0, "start": 0, "stop": 6}, "update": 2}
SET = {"algorithm": "set", "scope": "row", "update": {"freq": 10}}


SECTIONS = [
    ({"sparsity": 0.5}, {}),
    ({"sparsity": 0.75, "member": "wide", "iso": "model", "multiple": 16}, {"iso": "model", "multiple": 16}),
    ({"sparsity": 0.5, "member": "parallel", "activation": "GELU"}, {"activation": nn.GELU}),
    ({"sparsity": 0.5, "member": "factorized", "activation": None}, {"activation": None}),
    ({"sparsity": 0.5, "member": "doped", "include": "*.q_proj"}, {"include": "*.q_proj"}),
]


@pytest.mark.parametrize(("section", "options"), SECTIONS, ids=str)
@pytest.mark.parametrize("rule", [None, SET, GMP], ids=["static", "set", "gmp"])
def test_a_recipe_is_the_call(tmp_path, section, options, rule):
    path, beside = tmp_path / "recipe.yaml", {} if rule is None else {"sparsity": rule}
    path.write_text(yaml.safe_dump({"sparse_ift": section, "model": {"any": "thing"}, **beside}))
    ift = training.configure_sparse_ift(path, tiny_llama())
    options = {**options, "rule": functools.partial(training.SET, scope="row") if rule is SET else training.Static}
    theirs = training.sparse_ift(tiny_llama(), section["sparsity"], section.get("member", "wide"), **options)
    assert (ift.plan, str(ift.model)) == (theirs.plan, str(theirs.model))
    kind = training.Static if rule is None else {"set": training.SET, "gmp": training.GMP}[rule["algorithm"]]
    assert {type(ift.sparsity[i]) for i in range(len(ift.sparsity))} == {kind}


def test_a_gradual_rule_ends_at_the_level_of_each_layer():
    model = tiny_llama()
    ift = training.configure_sparse_ift({"sparse_ift": {"sparsity": 0.5, "member": "doped"}, "sparsity": GMP}, model)
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
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**SET, "sparsity": 0.5}}, "leave sparsity out"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**SET, "param_filter": "*"}}, "leave param_filter out"),
    ({"sparse_ift": {"sparsity": 0.5}, "sparsity": {**SET, "updates": 3}}, "option 'updates' is not known"),
]


@pytest.mark.parametrize(("content", "match"), NO_RECIPES)
def test_what_is_refused(content, match):
    refused(lambda model: training.configure_sparse_ift(content, model), tiny_llama(), match=match)


def test_a_recipe_that_changes_layers_is_not_for_configure(tmp_path):
    (tmp_path / "recipe.yaml").write_text("sparse_ift: {sparsity: 0.5}\nsparsity: {algorithm: set}\n")
    with pytest.raises(ValueError, match=r"call training\.configure_sparse_ift"):
        training.configure(tmp_path / "recipe.yaml")


# the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, GMP])
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
