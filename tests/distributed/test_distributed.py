"""Several processes (gloo, on the CPU) make one model sparse: the same bits in all of them, and what one process makes
but for roundings.

The scenarios are in ranks.py; see conftest.py for who runs them.
"""

import math
import re

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

import modelopt_sparse as mts
from tests.distributed import ranks
from tests.helpers import TESTBED, assert_alike, assert_equal, tiny_llama, trained_model

GROUPS = {"two": 2, "four": 4}


SCENARIOS = [(group, scenario) for group in GROUPS for scenario in (ranks.methods, ranks.experts)]
SCENARIOS += [("two", scenario) for scenario in (ranks.modes, ranks.architectures, ranks.more_options)]
NAMES = [f"{group}-{scenario.__name__}" for group, scenario in SCENARIOS]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first test waits for all groups of processes


# working together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "scenario"), SCENARIOS, ids=NAMES)
def test_all_ranks_make_the_same_bits_and_what_one_process_makes(results, group, scenario):
    """But for roundings: perplexity to 0.1 %; calibrated with the same data."""
    (alone,), (together, *others) = results("alone", scenario), results(group, scenario)
    assert together.keys() <= alone.keys()
    for name, several in together.items():
        for other in others:
            assert_equal(several["state"], other[name]["state"])
            assert several["report"]["calibration"] == other[name]["report"]["calibration"]
            assert several["report"]["layers"] == other[name]["report"]["layers"]
        one = alone[name]
        assert_alike(one["state"], several["state"])
        if scenario is not ranks.architectures:
            assert math.exp(several["loss"]) == pytest.approx(math.exp(one["loss"]), rel=1e-3), name
        if name not in ("own data", "loop"):  # one process's data is another thing than several processes' shares
            assert one["report"]["calibration"] == several["report"]["calibration"], name
        for layer, other in zip(one["report"]["layers"], several["report"]["layers"], strict=True):
            for key in ("name", "recipe", "zeros", "tokens", "expert_tokens", "notes"):
                assert layer[key] == other[key], (name, key)
            assert other["error"] == pytest.approx(layer["error"], rel=1e-3)


@pytest.mark.parametrize("group", GROUPS)
def test_gram_matrices_are_those_of_one_process(results, group):
    (alone,), together = results("alone", ranks.gram_matrices), results(group, ranks.gram_matrices)
    for name, (tokens, gram) in alone.items():
        assert tokens > 0
        for of_rank in together:
            assert of_rank[name][0] == tokens
            assert float((of_rank[name][1] - gram).norm() / gram.norm()) <= 1e-6, name
            assert torch.equal(of_rank[name][1], together[0][name][1])
    assert len(alone) == 3 * 2 * 4  # models, blocks, inputs of each


ASSERTING = [("two", ranks.losses_from_a_file), *((group, ranks.added_up) for group in ("alone", *GROUPS))]


@pytest.mark.parametrize(("group", "scenario"), ASSERTING, ids=lambda value: getattr(value, "__name__", value))
def test_what_processes_assert_for_themselves(results, group, scenario):
    assert all(found == {} for found in results(group, scenario))


def test_data_of_each_process_is_the_same_as_one_that_is_split(results):
    (found, *_) = results("two", ranks.more_options)
    (split, *_) = results("two", ranks.methods)
    assert_equal(found["own data"]["state"], split["sparsegpt"]["state"])
    assert found["own data"]["report"]["calibration"]["calls"] == 6


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scenario", [ranks.sharing, ranks.choosing])
def test_layers_that_processes_do_not_see_alike(results, group, scenario):
    (alone,), (first, *others) = results("alone", scenario), results(group, scenario)
    assert_alike(alone, first)
    for other in others:
        assert_equal(first, other)


def test_processes_that_work_by_themselves(results):
    """distributed=False: each of them has its own method and data, and none waits for another."""
    for rank, (method, found) in enumerate(zip(("wanda", "sparsegpt"), results("two", ranks.by_themselves))):
        expected = ranks.sparse("llama", method, data_loader=ranks.BATCHES["llama"][rank:])
        assert found["report"]["calibration"] == expected["report"]["calibration"]
        assert_alike(expected["state"], found["state"])


@pytest.mark.parametrize("group", GROUPS)
def test_a_folder_that_all_processes_write_at_once_is_whole_and_rank_0_writes_transformers(results, folder, group):
    first, *others = results(group, ranks.saved)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    mts.restore(model, folder / f"saved-{GROUPS[group]}")
    assert len(mts.verify(model, "2:4").layers) == 2
    assert not list(folder.glob(".*"))  # nothing is left beside it
    assert first["error"] == "nothing was raised"
    alone = hasattr(PreTrainedModel, "should_save_on_this_rank")  # the first releases of transformers 5 write in all
    for rank, other in enumerate(others if alone else (), start=1):
        assert other["error"].startswith("ValueError: transformers writes in rank 0 alone,")
        assert f"and this is rank {rank}: save there" in other["error"]
    target = folder / f"llama-{GROUPS[group]}"
    assert len(mts.verify(target, "2:4").layers) == 14
    mts.restore(tiny_llama(), target)


def test_the_command_line_of_several_processes_writes_what_one_process_makes(results, folder):
    """In the environment that torchrun makes. One process prints and writes; nothing is left of the others."""
    first, second = results("launched", ranks.command_line)
    assert first["code"] == second["code"] == 0
    assert first["out"].count("Written to") == first["out"].count("layers pruned") == 1
    assert second["out"] == ""
    for found, speaker in ((first, "modelopt-sparse: warning: "), (second, "modelopt-sparse: rank 1: warning: ")):
        assert [line.startswith(f"{speaker}layer") for line in found["err"].splitlines()] == [True]
        assert not found["left"]  # its process group
    out = folder / "launched"
    assert [path.name for path in out.iterdir()] == ["sparse"]
    text = {"data": TESTBED / "calibration.txt", "tokenizer": AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")}
    expected = trained_model(torch.bfloat16)
    options = {"num_samples": 5, "seq_len": 32, "batch_size": 1, "include": "*.layers.0.*", "float32_products": False}
    mts.sparsify(expected, "sparsegpt", {**text, **options}, progress=False)
    assert_alike(ranks.state(expected), ranks.state(mts.load(out / "sparse")))
    report = mts.report(out / "sparse")
    assert report.settings["processes"] == 2
    assert report.calibration == mts.report(expected).calibration


def test_an_error_of_one_process_ends_the_command_in_all(results):
    """Exit code 2 where it is raised, 3 in the others."""
    first, second = results("launched to fail", ranks.command_that_fails)
    assert (first["code"], second["code"]) == (2, 3)
    assert first["err"].splitlines()[-1] == "modelopt-sparse: the disk is full"
    assert second["err"].splitlines()[-1] == "modelopt-sparse: rank 1: rank 0 stopped: OSError: the disk is full"
    assert first["out"] == second["out"] == ""


# streaming ------------------------------------------------------------------------------------------------------------

STREAMING = {"streaming": 2, "streaming in three": 3}
DIED = "RankError: another process of this run died, left or did not come in time, as rank "


STREAMED = [("streaming", name) for name in ranks.STREAMED]
STREAMED += [("streaming in three", name) for name in ranks.OF_THREE]


@pytest.mark.parametrize(("group", "name"), STREAMED)
def test_streaming_by_any_number_of_processes_writes_what_one_does(results, folder, group, name):
    """But for roundings; five batches go evenly into neither two nor three."""
    (alone,), (first, *others) = results("streaming alone", ranks.streamed), results(group, ranks.streamed)
    one, several = alone[name], first[name]
    assert several["files"].keys() == one["files"].keys()
    assert len(several["files"]) >= 4
    assert several["settings"] == {**one["settings"], "processes": STREAMING[group]}
    for layer, other in zip(one["layers"], several["layers"], strict=True):
        assert layer["tokens"] == other["tokens"]
        assert other["error"] == pytest.approx(layer["error"], rel=0.02)
    if "permute" not in ranks.STREAMED[name][2]:  # a rounding may lead to another order of channels
        assert_alike(*(ranks.state(mts.load(folder / f"streamed-{size}" / name)) for size in (1, STREAMING[group])))
    for found in others:
        assert found[name] == several


def test_as_many_processes_make_the_same_bits_again(results, folder):
    """Two that stream, and two that have the model in memory."""
    (found, *_) = results("two", ranks.experts)
    model = mts.load(folder / "streamed-2" / "names that differ on disk")
    assert_equal(ranks.state(model), found["sparsegpt"]["state"])


@pytest.mark.parametrize("group", STREAMING)
def test_several_processes_go_on_with_what_one_began(results, group):
    (alone,), (first, *others) = results("streaming alone", ranks.streamed_on), results(group, ranks.streamed_on)
    assert first["error"] == "ArithmeticError: this layer is too hard"
    assert alone["notes"] == ["1 of 2 blocks were reused from a stopped run"]
    for found in (first, *others):
        assert found["files"] == alone["files"]  # magnitude sums nothing up
        assert found["notes"] == ["1 of 2 blocks were reused from a stopped run of 1 process"]


def test_shrink_by_two_processes_chooses_what_one_does(results):
    """In memory and streamed."""
    (alone,), (first, *others) = results("streaming alone", ranks.smaller), results("streaming", ranks.smaller)
    for found in (first, *others):
        assert found["unlike"].startswith("ValueError: how it is chosen what goes is not the same in all processes")
    for name in ranks.SMALLER:
        assert first[name]["choice"][0] == alone[name]["choice"][0]  # what is kept
        for other in others:
            assert_equal(other[name]["state"], first[name]["state"])
            assert other[name]["choice"] == first[name]["choice"]
        assert_alike(alone[name]["state"], first[name]["state"])
    for found in (alone, first, *others):
        for name in ("tuned", "experts"):
            assert_equal(found[name]["streamed"], found[name]["state"])
    assert len(alone["tuned"]["choice"][0]["blocks"]["model.layers"]) == 1
    assert all(len(errors) == 2 for errors in alone["experts"]["choice"][2].values())  # refitted


NOT_THE_SAME = "is not the same in all processes: rank 0 has"
NOT_THERE = "ValueError: '.*refused-1.partial' of rank 0 is not there for rank 1: put it"
WRONG_FOR_ONE = {  # what both say, or rank 0 and rank 1
    "source": rf"ValueError: the size of 'config.json' {NOT_THE_SAME} \d+, rank 1 has",
    "byte": r"ValueError: the SHA-256 of 'model.safetensors' is not the same in all.* has \w+, rank 1 has \w+; copy",
    "copies": "nothing was raised",
    "devices": "nothing was raised",
    "alone": (
        "nothing was raised",
        "ValueError: transformers writes in rank 0 alone, and this is rank 1: stream there",
    ),
    "kind of device": f"ValueError: device {NOT_THE_SAME} cpu, rank 1 has meta; give",
    "version": f"ValueError: version of torch {NOT_THE_SAME} .*, rank 1 has 2.5.0; give",
    "option": f"ValueError: layer model.layers.0.self_attn.q_proj {NOT_THE_SAME} .*give all of",
    "data": f"ValueError: the SHA-256 of the calibration data {NOT_THE_SAME} .*split_data=False",
    "target": (f"RankError: rank 1 stopped: {NOT_THERE}", f"{NOT_THERE} where all processes see it"),
}


@pytest.mark.parametrize("what", WRONG_FOR_ONE)
def test_what_is_wrong_for_one_process_stops_streaming_in_all(results, what):
    said = WRONG_FOR_ONE[what]
    errors = said if isinstance(said, tuple) else (said, said)
    for found, error in zip(results("streaming", ranks.streaming_refused), errors, strict=True):
        assert re.match(error, found["errors"][what]), found["errors"][what]
        assert found["left"] == []


# errors ---------------------------------------------------------------------------------------------------------------

STOPPED = "RankError: rank 1 stopped: "
SAME, OF_Q = "is not the same in all processes", "ValueError: layer '?model.layers.0.self_attn.q_proj'?"
FAILING = {  # what fails or does not go together: what rank 1 says and what the others say, or what all say
    "typo": ("ValueError: option 'patern' is not known", f"{STOPPED}ValueError: option 'patern'"),
    "batch": ("ValueError: LlamaForCausalLM cannot take calibration batch 1,", f"{STOPPED}ValueError"),
    "solve": ("ArithmeticError: this layer is too hard", f"{STOPPED}ArithmeticError: this layer is"),
    "write": ("RankError: rank 0 stopped: OSError: the disk is full", "(OSError|RankError: rank 0 stopped: OSError)"),
    "loop": ("OSError: this process's data is gone", f"{STOPPED}OSError: this process's data"),
    "weights": f"ValueError: parameter 'model.layers.1.mlp.up_proj.weight' {SAME}: rank 0 ",
    "data": f"ValueError: the SHA-256 of the calibration data {SAME}.*split_data=False",
    "pattern": f"{OF_Q} {SAME}:",
    "rule": rf"{OF_Q} .*rank 0 has \w+ 2:8.*, rank 1 has \w+ 1:4.*; give",
    "not finite": f"{OF_Q}: its input holds NaN or inf",
    "few batches": r"ValueError: \d processes share out the calibration batches, and there are only \d: give smaller",
    "shards": rf"{OF_Q} is sharded over processes \(DTensor\): sparsify",
}
# each for two processes, and some for four
FAILURES = [(group, what) for group in GROUPS for what in FAILING if group == "two" or what in ranks.ALSO_OF_FOUR]


@pytest.mark.parametrize(("group", "what"), FAILURES)
def test_a_process_that_fails_stops_the_others_with_its_error(results, group, what):
    """At once, and a call that follows works: `failing` makes one. What does not go together is refused in all."""
    said = FAILING[what]
    own, others = said if isinstance(said, tuple) else (said, said)
    for rank, found in enumerate(results(group, ranks.failures)):
        assert re.match(own if rank == 1 else others, found[what]["error"]), found[what]["error"]
        assert found[what].get("seconds", 0) < 10
        assert found[what].get("same", True) or what == "solve"


@pytest.mark.parametrize("group", GROUPS)
def test_layers_that_were_finished_before_a_failure_are_sparse_in_all_processes(results, group):
    first, *others = [found["solve"] for found in results(group, ranks.failures)]
    for other in others:
        assert_equal(first["state"], other["state"])
    assert len(first["masks"]) == 7  # the first block's


@pytest.mark.parametrize("scenario", [ranks.killed, ranks.interrupted])
def test_a_process_that_is_killed_or_interrupted_stops_the_others(results, scenario):
    first, lost, *others = results(scenario.__name__, scenario)
    assert lost is None if scenario is ranks.killed else lost["error"].startswith("KeyboardInterrupt")
    for rank, of_rank in {0: first, **dict(enumerate(others, start=2))}.items():
        assert of_rank["error"].startswith(f"{DIED}{rank}")
        assert of_rank["seconds"] < 10


def test_a_process_that_does_not_come_is_not_waited_for_forever(results):
    assert all(found["error"].startswith(DIED) for found in results("two", ranks.late))
