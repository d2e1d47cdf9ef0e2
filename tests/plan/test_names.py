"""Names: rules for the layers that a glob matches, and ModelOpt's names for options."""

import re

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.plan.options import RENAMED, Rule, SparsifyConfig, check_globs, parse_rules
from modelopt_sparse.plan.planner import resolve, resolve_method
from tests.helpers import refused
from tests.plan.test_options import make

# globs ----------------------------------------------------------------------------------------------------------------


def test_globs_match_whole_names_by_case():
    check_globs(["*.q_proj", "b.?"], ["a.q_proj", "b.k"], "layer of this Llama")
    check_globs([], [], "layer")
    message = "'*.Q_proj' matches no layer of this Llama; names look like a.q_proj"
    refused(check_globs, ["a.*", "*.Q_proj"], ["a.q_proj", "b.k"], "layer of this Llama", match=re.escape(message))
    refused(check_globs, ["q_proj"], [], "layer", match=r"'q_proj' matches no layer; names look like \(there is none\)")
    message = "'head' matches no layer, only weights that stay dense: output head; names look like b"
    refused(check_globs, ["head"], ["b"], "layer", {"head": "output head", "bed": "embedding"}, match=f"{message}$")


# rules ----------------------------------------------------------------------------------------------------------------


def test_rules_are_a_mapping_or_a_list_of_pairs_or_rules():
    expected = (Rule("*q_proj", None), Rule("*", {"pattern": "1:4"}))
    assert parse_rules({"*q_proj": None, "*": {"pattern": "1:4"}}) == expected
    assert parse_rules([("*q_proj", None), ["*", {"pattern": "1:4"}]]) == expected
    assert parse_rules(expected) == expected
    assert make(rules=None).rules == ()


@pytest.mark.parametrize("rules", [["*q_proj"], [("*q_proj",)], {"*": "1:4"}, {3: None}, "*q", [{"*q_proj": None}], 3])
def test_a_rule_that_is_no_glob_with_options_is_refused(rules):
    with pytest.raises(TypeError, match=r"rule (?!Rule).*: a rule is a glob of layer names with a mapping"):
        make(rules=rules)


def test_a_rule_matches_names_by_case_and_types_by_their_bases():
    class Special(nn.Linear):
        pass

    assert Rule("model.*.q_proj", {}).matches("model.layers.0.q_proj", nn.Linear(1, 1))
    assert not Rule("*Q_proj", {}).matches("model.layers.0.q_proj", nn.Linear(1, 1))
    assert Rule("*", {}, "Linear").matches("x", Special(1, 1))
    assert not Rule("*", {}, "Conv2d").matches("x", Special(1, 1))


# ModelOpt -------------------------------------------------------------------------------------------------------------


def test_the_keys_of_modelopt_are_translated():
    given = {"pattern": "2:4 sparsity", "data_loader": [1], "collect_func": len, "max_iter_data_loader": 3}
    config = make({**given, "hessian_damp": 0.1, "col_block_size": 64, "verbose": False, "device": "cpu"})
    assert (config.pattern, config.max_batches, config.progress) == (mts.NM(2, 4), 3, False)
    assert config.options == {"damping": 0.1, "block_size": 64}
    assert set(RENAMED) == {"max_iter_data_loader", "hessian_damp", "col_block_size", "verbose"}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_option_under_both_names_is_refused(old, new):
    refused(make, {old: 1, new: 1}, match=f"options '{old}' and '{new}' mean the same; give one")


def test_class_rules_of_modelopt_turn_around_because_there_the_last_match_wins():
    rules = parse_rules({"nn.Linear": {"*": {}, "*lm_head*": None}, "nn.Conv2d": None})
    linear = Rule("*lm_head*", None, "Linear"), Rule("*", {}, "Linear"), Rule("*", None, "Linear")
    assert rules == (*linear, Rule("*", None, "Conv2d"), Rule("*", None, "Conv2d"))
    assert parse_rules({"nn.Linear": {}})[0] == Rule("*", {}, "Linear")


@pytest.mark.parametrize("entry", ["sparsegpt", ("sparsegpt", {}), ["sparsegpt", None]])
def test_a_mode_list_names_one_method(entry):
    assert resolve_method([entry]) == (METHODS["sparsegpt"], ())


@pytest.mark.parametrize("config", [{"pattern": "1:4"}, SparsifyConfig(pattern="1:4")])
def test_a_mode_list_brings_its_class_rules_along(config):
    mode = [("sparse_magnitude", {"nn.Linear": {"*": {}, "*q_proj*": None}})]
    method, config = resolve(mode, config, {})
    assert method is METHODS["magnitude"]
    assert config.rules == parse_rules(mode[0][1])
    assert config.pattern == mts.NM(1, 4)


BAD_LISTS = [
    ([], "a mode list names one method, this one has 0"),
    (["magnitude", "sparsegpt"], "a mode list names one method, this one has 2"),
    (["nothing"], "method 'nothing' is not known"),
    ([("sparsegpt", {"*lm_head*": None})], r"such as 'nn.Linear', and '\*lm_head\*' is none: give rules of globs"),
    ([("sparsegpt", {"nn.Linaer": {}})], "such as 'nn.Linear', and 'nn.Linaer' is none"),
    ([("sparsegpt", {"Linear": {}})], "such as 'nn.Linear', and 'Linear' is none"),
    ([("sparsegpt", {}, {})], "mode list entry .* give a name, or a name with class rules"),
    ([("sparsegpt", ["nn.Linear"])], "mode list entry .* give a name, or a name with class rules"),
    ([5], "mode list entry 5: give a name"),
    ([("sparsegpt", {"nn.Linear": False})], "class rule 'nn.Linear': False must be a mapping of globs, or None"),
    ([("sparsegpt", {"nn.Linear": {"pattern": "1:4"}})], "a rule is a glob of layer names with a mapping"),
]


@pytest.mark.parametrize(("mode", "words"), BAD_LISTS)
def test_a_bad_mode_list_is_refused(mode, words):
    wrong_type = any(part in words for part in ("entry", "class rule '", "a rule is"))
    refused(resolve_method, mode, match=words, error=TypeError if wrong_type else ValueError)


def test_classes_and_globs_do_not_mix_in_one_mapping():
    refused(make, rules={"nn.Linear": {}, "*q_proj": None}, match=r"and '\*q_proj' is none: give rules of globs alone")


@pytest.mark.parametrize("where", ["config", "keyword"])
def test_rules_in_the_mode_list_and_beside_it_are_refused(where):
    mode, rules = [("sparsegpt", {"nn.Linear": {}})], {"*q*": None}
    with pytest.raises(ValueError, match="rules are given both in the mode list and as an option; keep one"):
        resolve(mode, {"rules": rules}, {}) if where == "config" else resolve(mode, None, {"rules": rules})


def test_what_has_no_adapter_is_named_with_the_library_that_it_is_of():
    """And what takes it instead; a class of torch keeps its short name."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    namesake, torch_own = nn.Sequential(Linear()), nn.Sequential(nn.LSTM(4, 4))
    for model, name in ((namesake, f"{Linear.__module__}.Linear.weight"), (torch_own, "for LSTM.weight_ih_l0")):
        with pytest.raises(ValueError, match=rf"no adapter .*{re.escape(name)}.*mts\.set_mask.* take any parameter"):
            mts.make_plan(model, "magnitude")
    mask = {"0.weight_hh_l0": torch.ones(16, 4, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"belongs to no prunable parameter .*: mts\.set_mask"):
        mts.make_plan(nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)), masks=mask)


SHARED = [
    ({"exclude": "1.*"}, None),
    ({"exclude": "1.0"}, None),
    ({"rules": {"1.0": None}}, None),
    ({"rules": {"1.*": {"pattern": "1:4"}}}, "1:4"),
    ({"include": "1.0"}, "2:4"),
]


@pytest.mark.parametrize(("options", "pruned"), SHARED)
def test_a_weight_that_layers_share_goes_by_all_of_their_names(options, pruned):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    model[1][0].weight = model[0][0].weight
    found = {layer.name: str(layer.pattern) for layer in mts.make_plan(model, "magnitude", **options).layers}
    assert found.get("0.0") == pruned
