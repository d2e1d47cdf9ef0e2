"""Streaming runs that were stopped: what is reused, what is refused, and targets that exist. Kills: test_faults.py."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertForMaskedLM

import modelopt_sparse as mts
from modelopt_sparse.budget import choose as budget
from modelopt_sparse.checkpoint import stream
from modelopt_sparse.methods.scores import Wanda
from tests.checkpoint.folders import change_config, change_tensors, files_of
from tests.checkpoint.streams import Stopping, assert_same_folders, saved, streamed
from tests.faults.faulty import flip, truncate
from tests.helpers import assert_same_masks, refused, tiny_llama, token_batches
from tests.interruptions import interrupted


@pytest.fixture
def source(tmp_path) -> Path:
    """A Llama of three blocks."""
    return saved(tmp_path / "dense", lambda: tiny_llama(num_hidden_layers=3))


# wrong arguments ------------------------------------------------------------------------------------------------------


BEFORE_ANYTHING: list[tuple[dict[str, Any], str]] = [
    ({"data_loader": None}, "needs calibration data"),
    ({"data_loader": []}, "data_loader gives no batch"),
    ({"pattern": "2-4"}, "pattern '2-4' is not known"),
    ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn: give one of torch.float16, torch.bfloat16, torch.fl"),
    ({"dtype": "float8_e5m2"}, "dtype='float8_e5m2': give one of torch.float16"),
    ({"dampin": 1}, "option 'dampin' is not known"),
    ({"distill": True}, "distill runs the whole model, .*: leave it out, or load the model"),
    ({"data_loader": None, "forward_loop": print}, "forward_loop runs the whole model, .* give data_loader= or data="),
]
LATER: list[tuple[dict[str, Any], str]] = [  # the model itself says so, or transformers
    ({"data_loader": [torch.full((2, 8), 5000)]}, "cannot take calibration batch 0"),
    ({"dtype": "int4"}, "int4"),
]


@pytest.mark.parametrize(("wrong", "text"), BEFORE_ANYTHING + LATER, ids=lambda value: str(value)[:40])
def test_wrong_arguments_leave_nothing_behind(source, tmp_path, monkeypatch, wrong, text):
    """And what can be known before is said before any of the source's weights are read, and before anything is written.
    The corrected call then runs."""
    target, given = tmp_path / "new" / "er" / "sparse", {"method": "wanda", "data_loader": token_batches(2)}

    def too_early(*_args, **_kwargs):
        raise AssertionError

    with monkeypatch.context() as patch:
        if (wrong, text) in BEFORE_ANYTHING:
            patch.setattr(stream, "SourceFiles", too_early)
            patch.setattr(stream, "WorkFolder", too_early)
        errors = (ValueError, TypeError, AttributeError, OSError)
        refused(streamed, source, target, **{**given, **wrong}, match=text, error=errors)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert len(streamed(source, target, **given).layers) == 21


def test_a_run_that_is_interrupted_before_its_first_block_is_done_leaves_nothing(source, tmp_path):
    target, data = tmp_path / "new" / "sparse", token_batches(2)
    refused(streamed, source, target, Stopping(3), data_loader=data, error=KeyboardInterrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_generator_is_read_once(stopped):
    """After a run that was stopped at its end as well, whose data is compared."""
    source, target, given = stopped
    with interrupted(stream, "_finish"):
        streamed(source, target, **given)
    given["data_loader"] = iter(token_batches(3, seed=5))
    assert len(streamed(source, target, overwrite=True, **given).layers) == 21


def test_a_dtype_is_the_same_by_its_name(source, tmp_path):
    given: dict[str, Any] = {"data_loader": token_batches(2), "method": Stopping(10)}
    refused(streamed, source, tmp_path / "sparse", dtype="bfloat16", **given, error=KeyboardInterrupt)
    report = streamed(source, tmp_path / "sparse", dtype=torch.bfloat16, **given)
    assert "1 of 3 blocks were reused from a stopped run" in report.notes


# stopped, and started with something else -----------------------------------------------------------------------------


@pytest.fixture
def stopped(source, tmp_path) -> tuple[Path, Path, dict[str, Any]]:
    """A source, a target of which one of three blocks is done, and the arguments of the run that was stopped."""
    given: dict[str, Any] = {"method": Stopping(10), "data_loader": token_batches(3)}
    refused(streamed, source, tmp_path / "sparse", **given, error=KeyboardInterrupt)
    assert not (tmp_path / "sparse").exists()
    refused(mts.verify, tmp_path / "sparse", match="is not a folder")  # nothing can take what is there for a model
    names = ("config.json", "model.safetensors.index.json")
    assert not any((tmp_path / "sparse.partial" / name).exists() for name in names)
    return source, tmp_path / "sparse", given


def text_of(name: str, text: str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_text(text)


def with_weights(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path], object]:
    name = "model.layers.1.mlp.up_proj.weight"
    return lambda source: change_tensors(source / "model.safetensors", lambda weights: change(weights, name))


SOMETHING_ELSE = [
    ({"pattern": "1:4"}, ["layer model.layers.0.self_attn.q_proj: stopping 2:4 there, stopping 1:4 now"]),
    ({"seed": 7}, ["seed: 0 there, 7 now"]),
    ({"exclude": "*.up_proj"}, ["layer model.layers.0.mlp.up_proj: stopping 2:4 there, None now"]),
    ({"sequential": "none"}, ["sequential: block there, none now"]),
    ({"enforce": False}, ["enforce: True there, False now"]),
    ({"reconstruct": 2}, ["stopping 2:4 there, stopping+reconstruct 2:4 now", "and 17 more"]),
    ({"dtype": torch.bfloat16}, ["dtype: auto there, torch.bfloat16 now"]),
    ({"method": "wanda"}, ["stopping 2:4 there, wanda 2:4 now"]),
    ({"data_loader": token_batches(3, seed=5)}, ["calibration data: ", " there, "]),
    (with_weights(lambda weights, name: weights[name][0, 0].add_(1)), ["source file model.safetensors: ", " there, "]),
    (lambda source: change_config(source, rms_norm_eps=1e-3), ["source file config.json: "]),
    (text_of("modeling.py", "SCALE = 2"), ["source file modeling.py: None there, "]),
]


@pytest.mark.parametrize(("changes", "parts"), SOMETHING_ELSE, ids=[parts[0][:40] for _, parts in SOMETHING_ELSE])
def test_started_with_something_else_it_refuses_and_says_what_differs(stopped, changes, parts):
    source, target, given = stopped
    before = files_of(target.with_name("sparse.partial"))
    again = dict(given) if callable(changes) else {**given, **changes}
    if callable(changes):
        changes(source)
    parts = ["holds a run that was started with something else", *parts, "give another target, or overwrite=True"]
    refused(streamed, source, target, **again, parts=parts)
    assert files_of(target.with_name("sparse.partial")) == before
    streamed(source, target, overwrite=True, **again)
    fresh = streamed(source, target.with_name("fresh"), **again)
    assert_same_folders(target, target.with_name("fresh"))
    assert mts.report(target).notes == fresh.notes
    assert not any("reused" in note for note in fresh.notes)


@pytest.mark.parametrize("overwrite", [False, True])
def test_started_again_it_goes_on(stopped, overwrite):
    source, target, given = stopped
    given["method"].left = 0
    report = streamed(source, target, overwrite=overwrite, **given)
    assert given["method"].left == -14  # two blocks
    assert report.notes == ["1 of 3 blocks were reused from a stopped run"]
    fresh = streamed(source, target.with_name("fresh"), **given)
    assert [layer.name for layer in report.layers] == [layer.name for layer in fresh.layers]
    assert_same_folders(target, target.with_name("fresh"))


class Broken(Stopping):
    """The same method as far as its name tells, which fails at once."""

    name = "stopping"

    def solve(self, *args):
        raise ValueError("cannot be solved")


def test_what_fails_after_a_reused_block_that_was_permuted_is_the_error_that_shows(source, tmp_path):
    """The reused block is permuted again for what it puts out; there is no way back to its dense weights, which are
    not in memory any more."""
    target, options = tmp_path / "sparse", {"data_loader": token_batches(3), "permute": True}
    refused(streamed, source, target, Stopping(10), **options, error=KeyboardInterrupt)
    cannot = r"^layer 'model.layers.1.self_attn.q_proj': cannot be solved$"
    refused(streamed, source, target, Broken(0), **options, match=cannot)
    report = streamed(source, target, Stopping(0), **options)
    assert report.notes[-1] == "1 of 3 blocks were reused from a stopped run"
    assert any(layer.recipe.startswith("permute+") for layer in report.layers)


@pytest.mark.parametrize(("owner", "name"), [(stream, "_finish"), (stream.WorkFolder, "put_in_place")])
def test_data_is_compared_after_the_last_block_as_well(stopped, owner, name):
    """A run that was stopped while it finished, or when it only had to be moved, solves nothing again, and still takes
    no other data."""
    source, target, given = stopped
    with interrupted(owner, name):
        streamed(source, target, **given)
    refused(streamed, source, target, **{**given, "data_loader": token_batches(3, seed=5)}, match="calibration data: ")
    left = given["method"].left
    report = streamed(source, target, **given)
    assert given["method"].left == left
    assert len(report.layers) == 21
    streamed(source, target.with_name("fresh"), **given)
    assert_same_folders(target, target.with_name("fresh"))


SHARD = "folder/model-00002-of-00004.safetensors"
NO_JSON = "/sparse.partial/{}' cannot be read: JSONDecodeError"


DAMAGED = [
    *((SHARD, damage, f"is damaged: '{SHARD}' is not as block") for damage in (truncate, flip, Path.unlink)),
    *((name, truncate, NO_JSON.format(name)) for name in ("started.json", "block-00000.json")),
    ("block-00000.json", lambda file: file.write_text("{}"), "is damaged: .*missing 5 required"),
    ("report.json", lambda file: file.write_text("{"), NO_JSON.format("report.json")),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGED)
def test_a_stopped_run_that_is_damaged_is_refused(stopped, name, damage, words):
    source, target, given = stopped
    damage(target.with_name("sparse.partial") / name)
    refused(streamed, source, target, **given, match=f"{words}.*overwrite=True")
    report = streamed(source, target, overwrite=True, **given)
    assert (len(report.layers), report.notes) == (21, [])


def test_other_versions_are_refused(stopped):
    source, target, given = stopped
    started = target.with_name("sparse.partial") / "started.json"
    started.write_text(started.read_text().replace(f'"{torch.__version__}"', '"2.0.0"'))
    now = torch.__version__.split("+")[0]
    refused(streamed, source, target, **given, match=rf"version of torch: 2\.0\.0 there, {now}")


@pytest.mark.parametrize("beside", [(), ("lock", "started.json")])
def test_what_stands_in_the_way_is_left_alone(source, tmp_path, beside):
    """Also beside files of a run of which no block is done."""
    partial = tmp_path / "sparse.partial"
    partial.mkdir()
    for name in ("thesis.txt", *beside):
        (partial / name).write_text("{}")
    for overwrite in (False, True):
        there = "something else is there"
        refused(streamed, source, tmp_path / "sparse", "magnitude", overwrite=overwrite, match=there)
    assert {path.name for path in partial.iterdir()} == {"thesis.txt", *beside}


# a target that exists -------------------------------------------------------------------------------------------------


def test_overwrite_replaces_a_model_and_leaves_other_files(source, tmp_path):
    old = saved(tmp_path / "sparse", lambda: tiny_llama(num_hidden_layers=4), max_shard_size=20_000)
    (old / "notes.txt").write_text("mine")
    before = files_of(old)
    refused(streamed, source, old, "magnitude", match="exists and is not empty: give another path, or overwrite=True")
    assert files_of(old) == before
    streamed(source, old, "magnitude", overwrite=True)
    streamed(source, tmp_path / "fresh", "magnitude")
    assert_same_folders(old, tmp_path / "fresh")
    assert (old / "notes.txt").read_text() == "mine"
    assert {path.name for path in old.iterdir()} - {"notes.txt"} == {p.name for p in (tmp_path / "fresh").iterdir()}


def test_a_link_to_where_nothing_is_yet_stays_one(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "sparse")
    streamed(source, tmp_path / "link", "magnitude")
    assert (tmp_path / "link").is_symlink()
    assert_same_folders(tmp_path / "sparse", tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "link", "sparse"]


def test_a_target_that_came_into_being_meanwhile_is_kept(source, tmp_path):
    target = tmp_path / "sparse"

    class Rival(Wanda):
        name = "rival"

        def solve(self, weight, state, pattern, options):
            target.mkdir(exist_ok=True)
            (target / "config.json").write_text("{}")
            return super().solve(weight, state, pattern, options)

    data = token_batches(2)
    refused(streamed, source, target, Rival(), data_loader=data, match="has come into being since the start")
    assert (target / "config.json").read_text() == "{}"
    shutil.rmtree(target)
    report = streamed(source, target, Rival(), data_loader=data)
    assert len(report.layers) == len(mts.verify(target, "2:4").layers) == 21


def test_a_run_that_goes_on_keeps_the_plan_of_its_budget(source, tmp_path, monkeypatch):
    """Nothing is measured again; what it ends in is what a run ends in that was not stopped."""
    given: dict[str, Any] = {"data_loader": token_batches(3), "budget": "50% zeros"}
    method = Stopping(10)
    refused(streamed, source, tmp_path / "sparse", method, **given, error=KeyboardInterrupt)
    kept = json.loads((tmp_path / "sparse.partial" / "budget.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(budget, "tabled", None)
        report = streamed(source, tmp_path / "sparse", method, **given)
    assert report.settings["budget"] == kept
    assert len({layer.pattern for layer in report.layers}) > 2
    streamed(source, tmp_path / "whole", Stopping(10**6), **given)
    assert_same_folders(tmp_path / "sparse", tmp_path / "whole")
    assert mts.report(tmp_path / "sparse").settings["budget"]["layers"] == kept["layers"]
    # other data: the plan is not taken over
    refused(streamed, source, tmp_path / "third", Stopping(10), **given, error=KeyboardInterrupt)
    given["data_loader"] = token_batches(3, seed=7)
    refused(streamed, source, tmp_path / "third", method, **given, match="calibration data")
    report = streamed(source, tmp_path / "third", method, overwrite=True, **given)
    assert report.settings["budget"]["tried"] != kept["tried"]


# what cannot be streamed ----------------------------------------------------------------------------------------------


def test_an_output_head_takes_a_run_of_its_own_and_is_refused(tmp_path):
    source = saved(tmp_path / "dense", lambda: tiny_llama(tie_word_embeddings=False, vocab_size=96))
    wrong = r"layer 'lm_head' is not in one block.*exclude it, or load the model"
    options = {"include": ["lm_head"], "data_loader": token_batches(2)}
    refused(streamed, source, tmp_path / "sparse", "wanda", **options, match=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_a_module_that_stands_in_two_blocks_is_refused(source, tmp_path, monkeypatch, method):
    empty_model = stream.empty_model

    def shared(*args, **kwargs):
        model: Any = empty_model(*args, **kwargs)
        model.model.layers[2].mlp = model.model.layers[0].mlp
        return model

    monkeypatch.setattr(stream, "empty_model", shared)
    wrong = r"layer 'model\.layers\.0\.mlp\.gate_proj' is not in one block: exclude it"
    refused(streamed, source, tmp_path / "sparse", method, data_loader=token_batches(2), match=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def in_two_files(source: Path) -> None:
    """One tensor is in both, and other values in the one that the index names."""
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights, source / "model-1.safetensors", metadata={"format": "pt"})
    save_file({name: weights[name] + 1}, source / "model-2.safetensors", metadata={"format": "pt"})
    (source / "model.safetensors").unlink()
    places = {**dict.fromkeys(weights, "model-1.safetensors"), name: "model-2.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


BAD_SOURCES = [
    (in_two_files, r"'model.layers.1.mlp.up_proj.weight' is in 'model-2.safetensors' and in another file"),
    (lambda source: (source / "config.json").unlink(), r"holds no config\.json"),
    (
        text_of("config.json", '{"model_type": "llama"}'),
        "names no model class that transformers knows: give one, such as 'architectures'",
    ),
    (text_of("generation_config.json", "{"), r"generation_config\.json' is not a valid"),
    (with_weights(lambda w, name: w.pop(name)), "not hold a whole LlamaForCausalLM: 'model.layers.1.mlp.up_proj"),
    (
        with_weights(lambda weights, name: weights[name][3].fill_(float("inf"))),
        r"layer 'model.layers.1.mlp.up_proj': its weight holds NaN or inf",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD_SOURCES)
def test_sources_that_are_refused(source, tmp_path, change, text):
    change(source)
    refused(streamed, source, tmp_path / "sparse", "magnitude", match=text, error=(ValueError, OSError))
    assert not (tmp_path / "sparse").exists()


def test_a_stack_that_cannot_be_chained_is_refused(tmp_path):
    """ALBERT calls one block several times, which has to stay dense with sequential="none"."""
    sizes = {"vocab_size": 97, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    config = AlbertConfig(**sizes, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
    source = saved(tmp_path / "dense", lambda: AlbertForMaskedLM(config))
    options = {"data_loader": token_batches(2)}
    more_than_once = r"AlbertForMaskedLM is .*calls come to its blocks more than once, .*: streaming would"
    refused(streamed, source, tmp_path / "sparse", "wanda", sequential="none", **options, match=more_than_once)
    assert not (tmp_path / "sparse").exists()
    streamed(source, tmp_path / "sparse", "wanda", **options)
    expected = mts.sparsify(AlbertForMaskedLM.from_pretrained(source), "wanda", **options)
    assert_same_masks(mts.load(tmp_path / "sparse"), expected)


@pytest.mark.parametrize("broken", ["a copy", "the end"])
def test_what_lay_beside_the_source_is_copied_anew(tmp_path, monkeypatch, broken):
    """By a run that goes on from one that was stopped while it copied, or after."""
    source, target = saved(tmp_path / "dense", tiny_llama), tmp_path / "sparse"
    (source / "tokenizer.json").write_text("0123456789")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("a use of tools")

    def half(path: Path, copy: Path) -> None:
        copy.write_bytes(path.read_bytes()[:5])
        raise OSError(errno.ENOSPC, "full")

    def stopped(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(*((shutil, "copyfile", half) if broken == "a copy" else (stream, "write_description", stopped)))
        refused(streamed, source, target, "magnitude", pattern="2:4", match="the disk is full", error=OSError)
    report = streamed(source, target, "magnitude", pattern="2:4")
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
        assert any(name in note for note in report.notes)
