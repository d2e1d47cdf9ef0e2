"""Every option is checked before any work, and the message says what is allowed and what to do."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.plan.names import REFUSED, RENAMED, Rule, parse_rules
from modelopt_sparse.plan.options import Reconstruct, SparsifyConfig
from modelopt_sparse.plan.planner import resolve_method

SPARSEGPT = METHODS["sparsegpt"]


def make(config=None, method="sparsegpt", **more) -> SparsifyConfig:
    found, config = resolve_method(method, config)
    return SparsifyConfig.make(found, config, **more)


# what is accepted ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_2_4_in_place_and_enforced():
    config = make()
    assert config.pattern == NM(2, 4)
    assert config.sequential == "block"
    assert config.enforce is True
    assert config.include is None
    assert (config.exclude, config.rules, config.options) == ((), (), {})
    assert (config.num_samples, config.seq_len, config.batch_size, config.seed) == (128, None, None, 0)


def test_a_mapping_and_keywords_are_the_same_and_keywords_win():
    assert make({"pattern": "50%", "exclude": "*q*"}) == make(pattern="50%", exclude="*q*")
    assert make({"pattern": "50%"}, pattern="1:4").pattern == NM(1, 4)
    assert make({"damping": 0.1}, damping=0.2).options == {"damping": 0.2}


def test_a_config_made_before_can_be_changed_by_keywords():
    first = make(pattern="1:4", damping=0.1, exclude=["*q*"])
    second = make(first, damping=0.2, seed=3)
    assert (second.pattern, second.exclude, second.seed) == (NM(1, 4), ("*q*",), 3)
    assert second.options == {"damping": 0.2}
    assert first.options == {"damping": 0.1}


def test_a_config_built_by_hand_is_parsed_when_it_is_used():
    config = make(SparsifyConfig(pattern="50%", include="*up_proj", options={"damping": 0.1}))  # type: ignore[arg-type]
    assert config.pattern == Unstructured(0.5)
    assert config.include == ("*up_proj",)
    assert config.options == {"damping": 0.1}


def test_the_mapping_of_the_caller_is_left_as_it_is():
    given = {"pattern": "1:4", "damping": 0.1, "rules": {"*q*": None}, "max_iter_data_loader": 2, "data_loader": [1]}
    before = {**given, "rules": dict(given["rules"])}
    make(given)
    assert given == before


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_globs_are_one_string_or_several(key):
    assert getattr(make({key: "*q_proj"}), key) == ("*q_proj",)
    assert getattr(make({key: ["*q_proj", "*k_proj"]}), key) == ("*q_proj", "*k_proj")
    assert getattr(make({key: None}), key) == {"include": None, "exclude": ()}[key]


def test_a_device_is_parsed():
    assert make(device="cpu").device == torch.device("cpu")


@pytest.mark.parametrize("loader", [[1], (1,), iter([1]), DataLoader([1])], ids=lambda loader: type(loader).__name__)
def test_any_iterable_is_a_data_loader(loader):
    assert make(data_loader=loader).data_loader is loader


# what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": "three of four"}, "pattern 'three of four' is not known: write '2:4'"),
        ({"pattern": None}, "pattern None is not known"),
        ({"sequential": "blocks"}, "sequential='blocks': allowed are 'block', 'stage', 'none'"),
        ({"sequential": None}, "sequential=None: allowed are 'block', 'stage', 'none'"),
        ({"max_batches": 0}, "max_batches=0: must be a positive whole number"),
        ({"max_batches": True}, "max_batches=True: must be a positive whole number"),
        ({"num_samples": 12.5}, "num_samples=12.5: must be a positive whole number"),
        ({"seq_len": -1}, "seq_len=-1: must be a positive whole number"),
        ({"batch_size": "8"}, "batch_size='8': must be a positive whole number"),
        ({"seed": "zero"}, "seed='zero': must be a whole number"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"hardware_only": 1}, "hardware_only=1: must be True or False"),
        ({"count_padding": "yes"}, "count_padding='yes': must be True or False"),
        ({"autocast": "int8"}, "autocast='int8': allowed are 'bfloat16', 'float16', None"),
        ({"autocast": True}, "autocast=True: allowed are"),
        ({"enforce": "false"}, "enforce='false': must be True or False"),
        ({"enforce": None}, "enforce=None: must be True or False"),
        ({"progress": "off"}, "progress='off': must be True or False"),
        ({"device": "gpu"}, "device 'gpu' is not known: .*cuda"),
        (
            {"data_loader": [], "data": ["text"], "tokenizer": object()},
            "data_loader and data are given: calibration takes one source of data, keep one",
        ),
        ({"data_loader": [], "forward_loop": print}, "data_loader and forward_loop are given"),
        ({"data": ["text"]}, "data is text and needs tokenizer=, for example AutoTokenizer.from_pretrained"),
        ({"data": Path("corpus.txt")}, "data is text and needs tokenizer="),
        (
            {"max_batches": 2, "forward_loop": print},
            "max_batches counts batches of data_loader or text; a forward_loop ends where it ends",
        ),
        ({"collect_func": len}, "collect_func turns batches of data_loader into inputs; give data_loader as well"),
        (
            {"collect_func": len, "forward_loop": print},
            "collect_func turns batches of data_loader into inputs; give data_loader as well",
        ),
    ],
)
def test_a_bad_value_is_an_error_that_says_what_is_allowed(given, message):
    with pytest.raises(ValueError, match=message):
        make(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_loader": 5}, "data_loader is a int: give a list of batches, a DataLoader or another iterable"),
        ({"forward_loop": "loop"}, "forward_loop is a str: it must be callable"),
        ({"collect_func": 3, "data_loader": []}, "collect_func is a int: it must be callable"),
        ({"include": 5}, "include=5: give a glob of layer names, or a list of them"),
        ({"exclude": [nn.Linear]}, "exclude=.*Linear.*: give a glob of layer names, or a list of them"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_says_what_to_give(given, message):
    with pytest.raises(TypeError, match=message):
        make(given)


def test_a_config_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="config is a str: give a mapping, a SparsifyConfig or None"):
        make("2:4")


@pytest.mark.parametrize(
    ("method", "key", "nearest"),
    [
        ("sparsegpt", "patern", "pattern"),
        ("sparsegpt", "dampening", "damping"),
        ("sparsegpt", "blocksize", "block_size"),
        ("ria", "alpa", "alpha"),
        ("wanda", "dataloader", "data_loader"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_nearest_known_one(method, key, nearest):
    message = re.escape(f"option {key!r} is not known, did you mean {nearest!r}?; allowed are ")
    with pytest.raises(ValueError, match=f"{message}.*{nearest}.*sequential"):
        make({key: 1}, method=method)
    with pytest.raises(ValueError, match=message):
        make(method=method, **{key: 1})


def test_an_option_of_another_method_is_unknown():
    with pytest.raises(ValueError, match="option 'damping' is not known"):
        make({"damping": 0.1}, method="wanda")


# ModelOpt ------------------------------------------------------------------------------------------------------------


def test_the_keys_of_modelopt_are_translated():
    config = make(
        {
            "pattern": "2:4 sparsity",
            "data_loader": [1],
            "collect_func": len,
            "max_iter_data_loader": 3,
            "hessian_damp": 0.1,
            "col_block_size": 64,
            "verbose": False,
            "device": "cpu",
        }
    )
    assert config.pattern == NM(2, 4)
    assert config.max_batches == 3
    assert config.progress is False
    assert config.options == {"damping": 0.1, "block_size": 64}
    assert set(RENAMED) == {"max_iter_data_loader", "hessian_damp", "col_block_size", "verbose"}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_option_under_both_names_is_refused(old, new):
    with pytest.raises(ValueError, match=f"options '{old}' and '{new}' mean the same; give one"):
        make({old: 1, new: 1})


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("calib_size", "use max_batches, or num_samples with text"),
        ("row_block_size", "rows are independent and need no blocks; leave it out"),
        ("checkpoint", "leave it out"),
        ("score_func", "leave it out"),
        ("loss_func", "leave it out"),
        ("deployment", "leave it out"),
    ],
)
def test_keys_of_modelopt_without_a_counterpart_are_refused_with_what_to_do(key, instead):
    assert key in REFUSED
    with pytest.raises(ValueError, match=f"option '{key}' is not taken over from ModelOpt: .*{instead}"):
        make({key: None})


# methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_by_its_name(name):
    assert resolve_method(name, None) == (METHODS[name], None)


def test_modelopt_s_name_of_magnitude_is_an_alias():
    assert resolve_method("sparse_magnitude", None)[0] is METHODS["magnitude"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparsgpt", "method 'sparsgpt' is not known, did you mean 'sparsegpt'.; allowed are magnitude, wanda, ria"),
        ("xyz", "method 'xyz' is not known; allowed are magnitude, wanda, ria"),
    ],
)
def test_an_unknown_method_is_an_error_that_names_the_known_ones(name, message):
    with pytest.raises(ValueError, match=message):
        resolve_method(name, None)


def test_a_method_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match=r"method is a int: give a name \(magnitude, .*\) or a Method object"):
        resolve_method(2, None)


class Own(Method):
    name = "own"
    needs = "everything"

    def solve(self, weight, state, pattern, options):
        raise NotImplementedError


def test_a_method_of_the_user_must_need_something_that_there_is():
    message = "method 'own': needs='everything'; allowed are nothing, square_sums, gram"
    with pytest.raises(ValueError, match=message):
        resolve_method(Own(), None)


# rules ---------------------------------------------------------------------------------------------------------------


def test_rules_are_a_mapping_or_a_list_of_pairs_or_rules():
    expected = (Rule("*q_proj", None), Rule("*", {"pattern": "1:4"}))
    assert parse_rules({"*q_proj": None, "*": {"pattern": "1:4"}}) == expected
    assert parse_rules([("*q_proj", None), ["*", {"pattern": "1:4"}]]) == expected
    assert parse_rules(expected) == expected
    assert make(rules=None).rules == ()


@pytest.mark.parametrize("rules", [["*q_proj"], [("*q_proj",)], {"*": "1:4"}, {3: None}, "*q", [{"*q_proj": None}]])
def test_a_rule_that_is_no_glob_with_options_is_refused(rules):
    with pytest.raises(TypeError, match="a rule is a glob of layer names with a mapping of options, or with None"):
        make(rules=rules)


def test_a_rule_matches_names_by_case_and_types_by_their_bases():
    class Special(nn.Linear):
        pass

    assert Rule("model.*.q_proj", {}).matches("model.layers.0.q_proj", nn.Linear(1, 1))
    assert not Rule("*Q_proj", {}).matches("model.layers.0.q_proj", nn.Linear(1, 1))
    assert Rule("*", {}, "Linear").matches("x", Special(1, 1))
    assert not Rule("*", {}, "Conv2d").matches("x", Special(1, 1))


def test_class_rules_of_modelopt_turn_around_because_there_the_last_match_wins():
    rules = parse_rules({"nn.Linear": {"*": {}, "*lm_head*": None}, "nn.Conv2d": None})
    assert rules == (
        Rule("*lm_head*", None, "Linear"),
        Rule("*", {}, "Linear"),
        Rule("*", None, "Linear"),
        Rule("*", None, "Conv2d"),
        Rule("*", None, "Conv2d"),
    )
    assert parse_rules({"nn.Linear": {}})[0] == Rule("*", {}, "Linear")


@pytest.mark.parametrize("entry", ["sparsegpt", ("sparsegpt", {}), ["sparsegpt", None]])
def test_a_mode_list_names_one_method(entry):
    assert resolve_method([entry], {"pattern": "1:4"}) == (SPARSEGPT, {"pattern": "1:4"})


def test_a_mode_list_brings_its_class_rules_along():
    mode = [("sparse_magnitude", {"nn.Linear": {"*": {}, "*q_proj*": None}})]
    config = make({"pattern": "1:4"}, method=mode)
    assert config.rules == parse_rules(mode[0][1])
    assert config.pattern == NM(1, 4)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ([], "a mode list names one method, this one has 0"),
        (["magnitude", "sparsegpt"], "a mode list names one method, this one has 2"),
        (["nothing"], "method 'nothing' is not known"),
        (
            [("sparsegpt", {"*lm_head*": None})],
            r"such as 'nn.Linear', and '\*lm_head\*' is none: give globs .* as rules",
        ),
        ([("sparsegpt", {"nn.Linaer": {}})], "such as 'nn.Linear', and 'nn.Linaer' is none"),
        ([("sparsegpt", {"Linear": {}})], "such as 'nn.Linear', and 'Linear' is none"),
    ],
)
def test_a_bad_mode_list_is_refused(mode, message):
    with pytest.raises(ValueError, match=message):
        resolve_method(mode, None)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ([("sparsegpt", {}, {})], "mode list entry .* give a name, or a name with class rules"),
        ([("sparsegpt", ["nn.Linear"])], "mode list entry .* give a name, or a name with class rules"),
        ([5], "mode list entry 5: give a name"),
        ([("sparsegpt", {"nn.Linear": False})], "class rule 'nn.Linear': False must be a mapping of globs, or None"),
        ([("sparsegpt", {"nn.Linear": {"pattern": "1:4"}})], "a rule is a glob of layer names with a mapping"),
    ],
)
def test_a_mode_list_of_the_wrong_shape_is_refused(mode, message):
    with pytest.raises(TypeError, match=message):
        resolve_method(mode, None)


def test_classes_and_globs_do_not_mix_in_one_mapping():
    with pytest.raises(ValueError, match=r"and '\*q_proj' is none: give globs of layer names as rules=\{...\} without"):
        make(rules={"nn.Linear": {}, "*q_proj": None})


@pytest.mark.parametrize("where", ["config", "keyword"])
def test_rules_in_the_mode_list_and_beside_it_are_refused(where):
    mode, rules = [("sparsegpt", {"nn.Linear": {}})], {"*q*": None}
    with pytest.raises(ValueError, match="rules are given both in the mode list and as an option; keep one"):
        make({"rules": rules}, method=mode) if where == "config" else make(method=mode, rules=rules)


def test_class_rules_do_not_go_with_a_finished_config():
    with pytest.raises(TypeError, match="goes with a mapping as config, not with a SparsifyConfig"):
        resolve_method([("sparsegpt", {"nn.Linear": {}})], SparsifyConfig())


def test_numbers_that_only_look_like_fractions_are_refused_as_patterns():
    with pytest.raises(ValueError, match=re.escape("pattern Fraction(1, 2) is not known")):
        make(pattern=Fraction(1, 2))


def test_a_config_takes_values_as_sparsify_does():
    config = SparsifyConfig(
        polish=True, refine=False, reconstruct=2, pattern="1:4", device="cpu", memory_limit="1KB", exclude="*.o_proj"
    )
    assert (config.polish, config.refine, config.memory_limit) == (30, 0, 1000)
    assert (config.reconstruct, config.pattern) == (Reconstruct(epochs=2), NM(1, 4))
    assert (config.device, config.exclude) == (torch.device("cpu"), ("*.o_proj",))
    with pytest.raises(ValueError, match="polish=-1: must be True, False or a positive whole number"):
        SparsifyConfig(polish=-1)
    with pytest.raises(ValueError, match="update='yes': must be True or False"):
        SparsifyConfig(update="yes")  # type: ignore[arg-type]
