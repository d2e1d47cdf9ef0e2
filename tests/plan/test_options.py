"""Every option is checked before any work, and the message says what is allowed and what to do."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.plan.options import Reconstruct, SparsifyConfig
from modelopt_sparse.plan.planner import resolve_method
from tests.helpers import refused


def make(config=None, method="sparsegpt", **more) -> SparsifyConfig:
    return SparsifyConfig.make(resolve_method(method)[0], config, **more)


# what is accepted -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_2_4_in_place_and_enforced():
    config = make()
    assert (config.pattern, config.sequential, config.enforce) == (NM(2, 4), "block", True)
    assert (config.include, config.exclude, config.rules, config.options) == (None, (), (), {})
    assert (config.num_samples, config.seq_len, config.batch_size, config.seed) == (128, None, None, 0)


def test_a_mapping_and_keywords_are_the_same_and_keywords_win():
    assert make({"pattern": "50%", "exclude": "*q*"}) == make(pattern="50%", exclude="*q*")
    assert make({"pattern": "50%"}, pattern="1:4").pattern == NM(1, 4)
    assert make({"damping": 0.1}, damping=0.2).options == {"damping": 0.2}


def test_numbers_may_be_those_of_numpy():
    config = make(pattern=np.float32(0.5), num_samples=np.int64(8))
    assert config.pattern == Unstructured(0.5)
    assert type(config.num_samples) is int


def test_a_config_made_before_can_be_changed_by_keywords():
    first = make(pattern="1:4", damping=0.1, exclude=["*q*"])
    second = make(first, damping=0.2, seed=3)
    assert (second.pattern, second.exclude, second.seed) == (NM(1, 4), ("*q*",), 3)
    assert (second.options, first.options) == ({"damping": 0.2}, {"damping": 0.1})


def test_an_option_that_replace_passes_on_is_none_that_the_user_gave():
    budget = replace(SparsifyConfig(), budget="30% zeros")
    assert budget.choices == SparsifyConfig(budget="30% zeros").choices  # those of a pattern that nobody named
    assert replace(SparsifyConfig(pattern="1:4"), budget="30% zeros").choices == (None, NM(1, 4))
    assert make(replace(SparsifyConfig(permute=True), seed=3), quality="best").permute


def test_the_mapping_of_the_caller_is_left_as_it_is():
    given = {"pattern": "1:4", "damping": 0.1, "rules": {"*q*": None}, "max_iter_data_loader": 2, "data_loader": [1]}
    before = {**given, "rules": dict(given["rules"])}
    make(given)
    assert given == before


def test_text_of_the_models_own_needs_no_name_that_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").mkdir()
    assert make(data="self").writes_its_data


def test_a_config_takes_values_as_sparsify_does():
    options = {"polish": True, "reconstruct": 2, "pattern": "1:4", "device": "cpu", "memory_limit": "1KB"}
    config = make(SparsifyConfig(**options, exclude="*.o_proj", options={"damping": 0.1}))
    assert config.options == {"damping": 0.1}
    assert (config.polish, config.memory_limit) == (30, 1000)
    assert (config.reconstruct, config.pattern) == (Reconstruct(epochs=2), NM(1, 4))
    assert (config.device, config.exclude) == (torch.device("cpu"), ("*.o_proj",))
    refused(SparsifyConfig, polish=-1, match="polish=-1: must be a whole number of at least 0")
    refused(SparsifyConfig, update="yes", match="update='yes': must be True or False")


# of other libraries -> what to do here
INSTEAD = {"dataset": "give data=", "ignore": "give exclude=", "targets": "give include=", "sparsity": "give pattern="}
INSTEAD |= {"mask_structure": "give pattern=", "calib_size": "give max_batches", "row_block_size": "leave it out"}
INSTEAD |= dict.fromkeys(("checkpoint", "score_func", "loss_func", "deployment"), "leave it out")
INSTEAD |= dict.fromkeys(("constraints", "effective_bits", "target_size"), "give budget=")

# what is refused ------------------------------------------------------------------------------------------------------


TEXT = {"data": ["text"], "tokenizer": print}
ALONE = "collect_func turns batches of data_loader into inputs; give data_loader as well"
LOOP = "max_batches counts batches of data_loader or text; a forward_loop ends where it ends"
REFUSED = [
    ({"pattern": "three of four"}, "pattern 'three of four' is not known: write '2:4'"),
    ({"sequential": "blocks"}, "sequential='blocks': allowed are 'block', 'stage', 'none'"),
    ({"max_batches": 0}, "max_batches=0: must be a positive whole number"),
    ({"num_samples": 12.5}, "num_samples=12.5: must be a positive whole number"),
    ({"seq_len": -1}, "seq_len=-1: must be a positive whole number"),
    ({"batch_size": "8"}, "batch_size='8': must be a positive whole number"),
    ({"seed": "zero"}, "seed='zero': must be a whole number"),
    ({"polish": 0.5}, "polish=0.5: must be a whole number of at least 0"),
    ({"hardware_only": 1}, "hardware_only=1: must be True or False"),
    ({"count_padding": "yes"}, "count_padding='yes': must be True or False"),
    ({"autocast": "int8"}, "autocast='int8': allowed are 'bfloat16', 'float16', None"),
    ({"enforce": "false"}, "enforce='false': must be True or False"),
    ({"progress": "off"}, "progress='off': must be True or False"),
    ({"device": "gpu"}, "device 'gpu' is not known: .*cuda"),
    ({"data_loader": [], **TEXT}, "data_loader and data are given: calibration takes one source of data, keep one"),
    ({"data_loader": [], "forward_loop": print}, "data_loader and forward_loop are given"),
    ({"data": ["text"]}, "data is text and needs tokenizer=, for example AutoTokenizer.from_pretrained"),
    ({"max_batches": 2, "forward_loop": print}, LOOP),
    ({"collect_func": len}, ALONE),
    ({"data_loader": 5}, "data_loader is a int: give an iterable of batches"),
    ({"data_loader": {"input_ids": torch.ones(2, 8)}}, "data_loader is a dict: give an iterable of batches"),
    ({"forward_loop": "loop"}, "forward_loop is a str: it must be callable"),
    ({**TEXT, "tokenizer": "name"}, "tokenizer is a str: it must be callable"),
    ({"data": [1], "processor": "name"}, "processor is a str: it must be callable"),
    ({"collect_func": 3, "data_loader": []}, "collect_func is a int: it must be callable"),
    ({"include": 5}, "include=5: give a glob of layer names, or a list of them"),
    ({"exclude": [nn.Linear]}, "exclude=.*Linear.*: give a glob of layer names, or a list of them"),
    ("2:4", "config is a str: give a mapping, a SparsifyConfig or None"),
    *(({name: None}, f"option '{name}' is not known: {instead}") for name, instead in INSTEAD.items()),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[row[1][:50] for row in REFUSED])
def test_a_bad_value_is_an_error_that_says_what_is_allowed(given, words):
    wrong_type = any(part in words for part in (" is a ", "give a glob"))
    refused(make, given, match=words, error=TypeError if wrong_type else ValueError)


NEAREST = [
    ("sparsegpt", "patern", "pattern"),
    ("sparsegpt", "dampening", "damping"),
    ("sparsegpt", "blocksize", "block_size"),
    ("ria", "alpa", "alpha"),
    ("wanda", "dataloader", "data_loader"),
    ("wanda", "damping", ""),  # of another method
]


@pytest.mark.parametrize(("method", "key", "nearest"), NEAREST)
def test_an_unknown_option_is_an_error_that_names_the_nearest_known_one(method, key, nearest):
    near = f", did you mean {nearest!r}?" if nearest else ""
    message = re.escape(f"option {key!r} is not known{near}; allowed are ")
    refused(make, {key: 1}, method=method, match=f"{message}.*{nearest}.*sequential")
    refused(make, method=method, **{key: 1}, match=message)
