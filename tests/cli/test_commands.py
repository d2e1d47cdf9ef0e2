"""The commands, run in this process except where a process of its own is the point."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import save as checkpoint
from modelopt_sparse.checkpoint.workfolder import BlockRecord, WorkFolder
from modelopt_sparse.cli import commands as cli
from modelopt_sparse.runtime.convert import Settings
from tests.checkpoint.folders import files_of
from tests.cli.conftest import TEMPLATE, by_the_api
from tests.helpers import assert_same_state, run_python, state_of, tiny_llama
from tests.runtime.unpacking import installed, place_for, sparse_llama

pytestmark = pytest.mark.core


def evaluated(work: Path, folder: Path) -> mts.Evaluation:
    """The model of a folder beside the dense one, by the API."""
    tokenizer = AutoTokenizer.from_pretrained(work / "llama")
    tokens = torch.tensor(tokenizer((work / "held.txt").read_text(), add_special_tokens=False)["input_ids"])
    model, dense = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, work / "llama"))
    return mts.evaluate(model, tokens, seq_len=32, reference=dense, progress=False)


# sparsify -----------------------------------------------------------------------------------------------------------


def test_sparsify_writes_a_folder_with_everything_that_belongs_to_the_model(run, work, tmp_path):
    out = tmp_path / "new" / "out"
    data = ("--data", work / "text.txt", "--num-samples", 8, "--seq-len", 32)
    said = run("sparsify", work / "llama", "--out", out, *data, "--eval", work / "held.txt", "--no-progress").well()
    for part in ("model.layers.0.mlp.up_proj", "7 layers pruned, 50.00% zeros", f"Written to {out}: load it with tran"):
        assert part in said

    model = AutoModelForCausalLM.from_pretrained(out)
    assert_same_state(mts.load(out), state_of(by_the_api(work, num_samples=8, seq_len=32)))
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (out, work / "llama"))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("import os\n")["input_ids"] == original("import os\n")["input_ids"]
    assert model.generation_config.max_new_tokens == 7
    assert json.loads((out / "config.json").read_text()) == json.loads((work / "llama" / "config.json").read_text())

    expected = evaluated(work, out)
    assert f"dense {expected.reference_perplexity:.3f}, sparse {expected.perplexity:.3f}; " in said
    kl = f"KL from dense {expected.kl:.4f} nats per token; {expected.windows} windows of 32 tokens"
    assert kl in " ".join(said.split())
    assert mts.report(out).evaluation == expected


def test_a_sparse_folder_comes_with_its_masks(run, work, sparse, tmp_path):
    """Their zeros stay and count, and its report stands; replace=true drops both of the layers that are pruned."""
    again = ("sparsify", sparse, "--out", tmp_path / "out", "--method", "magnitude", "--no-progress")
    run(*again, "--pattern", "25%").wrong("50.00% zeros in the present mask, and pattern 25% per matrix has fewer")
    assert not (tmp_path / "out").exists()
    done = run(*again, "--pattern", "1:4", "--include", "*.up_proj")
    assert (done.code, "pruned before (magnitude 2:4)" in done.out) == (0, True)
    masks, before = (dict(mts.named_masks(mts.load(folder))) for folder in (tmp_path / "out", sparse))
    assert masks.keys() == before.keys()
    for name, mask in masks.items():
        assert int(mask.sum()) * (4 if "up_proj" in name else 2) == mask.numel()
        assert not (mask & ~before[name]).any()
    run(*again, "--overwrite", "--pattern", "25%", "--include", "*.up_proj", "--set", "replace=true").well()
    masks = dict(mts.named_masks(mts.load(tmp_path / "out")))
    assert masks.keys() == before.keys()
    for name, mask in masks.items():
        assert mask.float().mean() == 0.75 if "up_proj" in name else torch.equal(mask, before[name])
    said = run(*again, "--overwrite", "--pattern", "25%", "--set", "replace=true").out
    assert "7 layers pruned, 25.00% zeros" in said
    text = ("--data", work / "text.txt", "--num-samples", 4, "--seq-len", 32)
    budget = ("budget", sparse, "--method", "magnitude", "--budget", "60% zeros", *text)
    assert "carries a mask whose zeros stay, against a budget" in run(*budget).err
    assert run(*budget, "--set", "replace=true").code == 0
    done = run("shrink", sparse, "--mlp", "25%", "--out", tmp_path / "smaller", *text)
    done.wrong("this LlamaForCausalLM is sparse: shrink it first")


def test_streaming_writes_the_same_model(run, work, tmp_path):
    data = ("--data", work / "text.txt", "--num-samples", 8, "--seq-len", 32, "--no-progress")
    run("sparsify", work / "llama", "--out", tmp_path / "whole", *data).well()
    command = ("sparsify", work / "llama", "--out", tmp_path / "out", *data, "--stream")
    said = run(*command, "--spill").well()
    written = f"Written to {tmp_path / 'out'}: load it with transformers"
    assert all(part in said for part in ("7 layers pruned, 50.00% zeros", written, "note: copied from the source: "))
    assert_same_state(mts.load(tmp_path / "out"), state_of(mts.load(tmp_path / "whole")))
    run(*command).wrong("exists and is not empty: give another path, or --overwrite")
    assert run(*command, "--overwrite").code == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_packed_folders(run, work, sparse, tmp_path, stream):
    """Written, read by the other commands, and made plain again."""
    command = ("sparsify", work / "llama", "--out", tmp_path / "out", "--method", "magnitude", "--packed", *stream)
    said = run(*command, "--no-progress").well()
    (saving,) = re.findall(r"Weights and masks: [\d,]+ bytes, packed [\d,]+ \((\d+)\.\d%\)", said)
    assert int(saving) < 100
    assert re.search(r"model\.layers\.0\.mlp\.up_proj\.weight +8,192 +4,352 +53\.1%", said)
    assert f"Written to {tmp_path / 'out'}: load it with modelopt_sparse.load; unpack makes it plain." in said
    assert_same_state(mts.load(tmp_path / "out"), state_of(mts.load(sparse)))

    for name, more in (("verify", ()), ("report", ()), ("plan", ()), ("eval", ("--data", work / "held.txt"))):
        plain, packed = (run(name, folder, *more).well() for folder in (sparse, tmp_path / "out"))
        assert packed == plain or name in ("report", "eval"), name

    said = run("unpack", tmp_path / "out", "--out", tmp_path / "plain").well()
    assert said.startswith(f"Written to {tmp_path / 'plain'}.\n")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), state_of(mts.export(mts.load(sparse))))
    said = run("pack", tmp_path / "plain", "--out", tmp_path / "again", "--all").well()
    assert "model.layers.0.mlp.up_proj.weight" in said
    assert f"Written to {tmp_path / 'again'}." in said
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    nothing = f"modelopt-sparse: '{tmp_path / 'plain'}' is not packed: there is nothing to do\n"
    assert run("unpack", tmp_path / "plain", "--out", tmp_path / "x").err == nothing
    assert run("pack", tmp_path / "plain", "--out", tmp_path / "x", "--quiet").out == ""


NEVER_WRITTEN = {
    "link": "is the folder that the weights come from, which would be lost: give another path",
    "..": "is the current directory or a folder above it, and a model is written to a folder of its own: give",
    "model.pth": "looks like a pickle file",
    "notes.txt": "is a file: give another path",
}


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize("out", NEVER_WRITTEN)
def test_what_is_never_written_to_is_refused_before_work(run, work, tmp_path, monkeypatch, out, stream):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copytree(work / "llama", "dense")
    Path("link").symlink_to("dense")
    Path("notes.txt").write_text("mine")
    before = sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    done = run("sparsify", "dense", "--out", out, "--overwrite", "--method", "magnitude", *stream)
    done.wrong(NEVER_WRITTEN[out])
    assert len(done.err.splitlines()) == 1
    assert sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")) == before


def test_the_plan_is_checked_before_weights_are_read(run, work, tmp_path):
    """With config.json and no weights, what is wrong with the options is what is reported."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(work / "llama" / name, work / "only-config")
    command = ("sparsify", work / "only-config", "--out", tmp_path / "out")
    data = ("--data", work / "text.txt")
    assert "'*fc1*' matches no prunable layer" in run(*command, *data, "--include", "*fc1*").err
    assert "option 'dampin' is not known, did you mean 'damping'?" in run(*command, *data, "--set", "dampin=1").err
    assert "method 'sparsegpt' needs calibration text: give --data FILE" in run(*command).err
    assert "data 'nowhere.txt' is not a file" in run(*command, "--data", "nowhere.txt").err
    assert "model.safetensors" in run(*command, *data).err  # only then
    assert list(tmp_path.iterdir()) == []


def test_data_that_the_model_writes(run, work, tmp_path):
    own = ("--data", "self", "--num-samples", 6, "--seq-len", 32, "--no-progress")
    done = run("sparsify", work / "llama", "--out", tmp_path / "out", "--method", "wanda", *own)
    assert (done.code, "the dense model wrote 6 windows of text itself" in done.out) == (0, True)
    assert mts.verify(tmp_path / "out", "2:4").layers


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(run, work, tmp_path):
    command = ("sparsify", work / "llama", "--out", tmp_path / "out", "--data", work / "held.txt", "--seq-len", "64")
    done = run(*command)
    (line,) = done.err.splitlines()
    assert (done.code, line.startswith("modelopt-sparse: warning: the text gives ")) == (0, True)


def test_bars_of_other_libraries_are_hidden_unless_asked_for(run, work, tmp_path):
    enabled = transformers.utils.logging.is_progress_bar_enabled
    command = ("eval", work / "llama", "--data", work / "held.txt", "--seq-len", "64")
    try:
        transformers.utils.logging.enable_progress_bar()
        assert run(*command, "--no-progress").err == ""
        assert not enabled()
        assert "evaluate" in run(*command, "--progress").err
        assert enabled()
        assert run("plan", work / "llama").err == ""
        assert not enabled()
    finally:
        transformers.utils.logging.disable_progress_bar()


# the other commands -------------------------------------------------------------------------------------------------


def test_the_plan_of_shrink_needs_no_weights_and_sees_every_size(run, work):
    for options, sizes in {
        "--mlp 50%": {"mlp": 0.5},
        "--to intermediate_size=40": {"to": {"intermediate_size": 40}},
        "--budget 97%params": {"budget": "97% params"},
        "--mlp 50% --set tensor_parallel=2": {"mlp": 0.5, "tensor_parallel": 2},
        "--mlp 50% --set multiple_of=3": {"mlp": 0.5, "multiple_of": 3},
        "--mlp 50% --set mlp=3": {"mlp": 0.5},
    }.items():
        said = run("shrink", work / "only-config", "--plan", "--json", *options.split()).well()
        model = tiny_llama(vocab_size=2048, num_hidden_layers=1)
        assert json.loads(said) == json.loads(mts.plan_shrink(model, **sizes).to_json()), options


def test_shrink_writes_what_the_api_makes(run, work, tmp_path):
    asked = ("--mlp", 24, "--data", work / "text.txt", "--num-samples", 8, "--seq-len", 64, "--no-progress")
    for name, more in {"smaller": (), "streamed": ("--stream", "--spill")}.items():
        assert "Written to" in run("shrink", work / "llama", "--out", tmp_path / name, *asked, *more).well()
    model = AutoModelForCausalLM.from_pretrained(work / "llama", dtype="auto")
    text = {"data": work / "text.txt", "tokenizer": AutoTokenizer.from_pretrained(work / "llama")}
    mts.shrink(model, mlp=24, num_samples=8, seq_len=64, **text)
    for name in ("smaller", "streamed"):
        smaller = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert smaller.config.intermediate_size == model.config.intermediate_size
        assert_same_state(smaller, state_of(model))
        assert AutoTokenizer.from_pretrained(tmp_path / name)("a b") == text["tokenizer"]("a b")
    assert "give --mlp 0.25 (a quarter" in run("shrink", work / "llama").err
    assert run("shrink", work / "llama", "--mlp", "25%").err.endswith("(or --plan, to see the sizes)\n")
    assert run("shrink", work / "llama", "--mlp", "25%", "--spill").err.endswith("--spill goes with --stream\n")
    for flags in ("--mlp 0 --blocks 1", "--mlp 25% --blocks 0"):
        assert " 0: give what goes" in run("shrink", work / "llama", *flags.split(), "--plan").err


def test_plan_estimates_memory_in_the_dtype_of_the_run_also_on_a_device_of_another_machine(run, work):
    command = ("plan", work / "llama", "--json", "--data", work / "text.txt", "--num-samples", 4, "--seq-len", 32)
    assert json.loads(run(*command).out)["memory_bytes"]["cached_activations"] == 4 * 32 * 32 * 4
    found = json.loads(run(*command, "--dtype", "bfloat16", "--device", "cuda:63").out)
    assert found["memory_bytes"]["cached_activations"] == 4 * 32 * 32 * 2
    assert set(found["streamed_memory_bytes"]) == {"host", "cuda:63"}


def test_eval(run, work, sparse):
    expected = evaluated(work, sparse)
    command = ("eval", sparse, "--data", work / "held.txt", "--seq-len", 32)
    assert run(*command, "--reference", work / "llama").out == f"{expected}\n"
    found = json.loads(run(*command, "--reference", work / "llama", "--json").out)
    assert found == pytest.approx(expected.as_dict())
    assert run(*command).out.startswith(f"perplexity {expected.perplexity:.3f} (of the dense model: not known")
    found = json.loads(run(*command, "--json", "--batch-size", 3).out)
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    assert found["reference_perplexity"] is found["kl"] is None
    # flags are strings, and a number of them is an index
    squared = (*command, "--reference", work / "llama", "--json", "--divergence", "squared")
    by_name, by_index = (json.loads(run(*squared, "--output", output).out) for output in ("logits", "0"))
    assert by_name == by_index
    assert (by_name["divergence"], by_name["perplexity"], by_name["seq_len"]) == ("squared", None, None)
    assert by_name["kl"] > 0


def test_verify_exit_codes(run, work, sparse, tmp_path):
    hold = "All 7 layers hold their pattern: 2:4. 4,608 of 9,216 weights are zero."
    assert hold in run("verify", sparse, "--pattern", "2:4").well()
    assert run("verify", sparse).code == 0
    assert [layer["problem"] for layer in json.loads(run("verify", sparse, "--json").out)] == [""] * 7
    done = run("verify", sparse, "--pattern", "1:4")
    assert done.code == 1
    assert done.err.startswith("modelopt-sparse: 7 of 7 layers do not hold their pattern: model.layers.0.self_attn.")
    assert "7 of 7 layers do not hold their pattern: 1:4." in done.out
    done = run("verify", sparse, "--pattern", "1:4", "--json")
    assert done.code == 1
    assert all("more nonzeros than 1:4" in layer["problem"] for layer in json.loads(done.out))
    assert run("verify", work / "llama", "--pattern", "2:4").code == 1
    mts.export(mts.load(sparse)).save_pretrained(tmp_path / "plain")  # which has no report
    assert run("verify", tmp_path / "plain", "--pattern", "2:4").code == 0
    for wrong in ([tmp_path / "plain"], ["nowhere"], [work / "llama"], [sparse, "--pattern", "2-4"], [work]):
        run("verify", *wrong).wrong()


def test_all_has_a_row_for_each_layer(run, work, sparse):
    """And JSON is the same with it."""
    planned = mts.make_plan(tiny_llama(vocab_size=2048, num_hidden_layers=1), pattern="50%", exclude="*gate*")
    commands = {
        ("plan", work / "only-config", "--pattern", "50%", "--exclude", "*gate*"): planned,
        ("report", sparse): mts.report(sparse),
        ("verify", sparse): mts.verify(sparse),
    }
    for command, value in commands.items():
        assert run(*command).out == f"{value}\n" != f"{value.text(all_rows=True)}\n"
        assert run(*command, "--all").out == f"{value.text(all_rows=True)}\n"
        assert run(*command, "--all", "--json") == run(*command, "--json")
        if command[0] != "verify":
            assert json.loads(run(*command, "--json").out) == value.as_dict()


def test_quiet_prints_nothing_but_what_went_wrong(run, work, sparse, tmp_path):
    command = ("sparsify", work / "llama", "--method", "magnitude", "--out", tmp_path / "out", "--quiet")
    assert run(*command).well() == ""
    assert mts.verify(tmp_path / "out")
    run(*command).wrong("is not empty")
    assert json.loads(run(*command, "--overwrite", "--json").out)["report"]["layers"]
    assert run("verify", sparse, "--quiet").well() == ""
    broken = run("verify", sparse, "--pattern", "1:4", "--quiet")
    assert (broken.code, broken.out) == (1, "")
    assert "7 of 7 layers do not hold their pattern" in broken.err


def test_sparsify_with_json_prints_json_alone(run, work, tmp_path):
    command = ("sparsify", work / "llama", "--method", "magnitude", "--out", tmp_path / "out", "--json")
    found = json.loads(run(*command, "--eval", work / "held.txt", "--seq-len", 32).well())
    assert found.keys() == {"out", "evaluation", "report"}
    assert (found["report"], found["evaluation"]["seq_len"]) == (mts.report(tmp_path / "out").as_dict(), 32)
    assert found["evaluation"]["kl"] > 0
    assert json.loads(run(*command, "--overwrite").out)["evaluation"] is None


# speed --------------------------------------------------------------------------------------------------------------


def test_speed_needs_a_gpu_and_says_so_in_one_line(run, sparse, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none_here = "semi_structured packs layers for a CUDA device and there is none here: load the model dense"
    done = run("speed", sparse, "--tokens", "1,64")
    assert (done.code, done.out, done.err) == (2, "", f"modelopt-sparse: {none_here}\n")


def test_speed_shows_the_report_of_what_it_was_asked_to_time(run, tmp_path, monkeypatch):
    """On the CPU, with a stand-in for the kernels and for the clock: dense takes 3 us, 2:4 takes 2."""
    mts.save(sparse_llama(), tmp_path / "sparse")
    backend = installed(monkeypatch)
    asked = []

    def loading_place(device_map, options):
        asked.append((device_map, options))
        place = place_for(backend, lambda calls: 3e-6 if calls[0].func is torch.nn.functional.linear else 2e-6)
        return Settings.of(options), place

    monkeypatch.setattr(checkpoint, "loading_place", loading_place)
    command = ("speed", tmp_path / "sparse", "--tokens", "1, 64", "--device", "cuda:1")
    said = run(*command).well()
    assert all(part in said for part in ("us at 1     us at 64", "3.0 -> 2.0", "14 of 15 layers run 2:4 on a CPU"))
    assert len(json.loads(run(*command, "--json").out)["layers"]) == 15
    assert asked == [("cuda:1", {"tune": (1, 64)})] * 2


# help, and processes ------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_exit_code(run):
    """All flags stand in docs/cli-reference.md: test_docs.py."""
    root: Any = typer.main.get_command(cli.app)
    assert {flag for p in root.params for flag in p.opts} == {"--version", "--install-completion", "--show-completion"}
    said = run("--help").well()
    for part in (*root.commands, "Exit codes: 0", "1 verify", "2 wrong", "3 another process", "130 Ctrl-C"):
        assert part in " ".join(said.split())
    assert "..." not in said.replace("[ARGS]...", "")  # the commands' first sentences fit
    assert all("--" in run(command, "--help").well() for command in root.commands)


def test_the_module_runs_like_the_command_and_asks_the_hub_once():
    """Without HF_HUB_OFFLINE and without a hub to reach: one line, no retries."""
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run_python("-m", "modelopt_sparse", "plan", "no/where", **nobody)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("modelopt-sparse: 'no/where' is neither a folder nor a model that the hub gives")


@pytest.mark.parametrize(("world", "rank", "speaker"), [(None, "1", ""), ("2", "0", ""), ("2", "1", "rank 1: ")])
def test_a_message_names_the_rank_that_it_comes_from(monkeypatch, capsys, world, rank, speaker):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world) if world else monkeypatch.delenv("WORLD_SIZE", raising=False)
    cli.complain("two\n  lines")
    assert capsys.readouterr().err == f"modelopt-sparse: {speaker}two lines\n"


def raising(error: BaseException) -> Callable[..., None]:
    def call(*_args: object, **_options: object) -> None:
        raise error

    return call


ENDS: list[tuple[BaseException, int, str]] = [
    (ValueError("seq_len=4096: takes at most 64"), 2, "--seq-len 4096: takes at most 64"),
    (ValueError("pattern=, or batch_size=1 and num_samples=2"), 2, "--pattern, or --batch-size 1 and --num-samples 2"),
    (ValueError("or overwrite=True, spill=True"), 2, "or --overwrite, --spill"),
    (ValueError("say how far it is: give reference="), 2, "say how far it is: give --reference"),
    (ValueError("polish=3 and my_seed=3 are no flags here"), 2, "polish=3 and my_seed=3 are no flags here"),
    (ValueError("--set 'pattern=[': no YAML"), 2, "--set 'pattern=[': no YAML"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (mts.RankError("rank 1 stopped"), 3, "rank 1 stopped"),
    (torch.OutOfMemoryError("no\nmemory"), 2, "no memory"),
    (SafetensorError("junk"), 2, "junk"),
    (MemoryError("full"), 2, "full"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS)
def test_what_ends_a_command_is_one_line_and_an_exit_code(run, work, monkeypatch, error, code, line):
    """A message names options as the command line does."""
    monkeypatch.setattr(mts, "make_plan", raising(error))
    done = run("plan", work / "llama")
    assert (done.code, done.out, done.err.strip()) == (code, "", f"modelopt-sparse: {line}")


INTERRUPTED = [("sparsify", ("--quiet",), " of 4"), ("shrink", ("--blocks", "1", "--no-progress"), "")]


@pytest.mark.parametrize(("verb", "more", "of"), INTERRUPTED)
def test_ctrl_c_while_streaming_says_how_many_blocks_are_kept(run, work, tmp_path, monkeypatch, verb, more, of):
    """The same command goes on with them, and ends in what a run in one go writes."""
    shutil.copytree(work / "llama", tmp_path / "deep")
    tiny_llama(vocab_size=2048, num_hidden_layers=4).save_pretrained(tmp_path / "deep")
    data = ("--data", work / "text.txt", "--num-samples", 8, "--seq-len", 32, "--stream", *more)
    command = (verb, tmp_path / "deep", "--out", tmp_path / "out", *data)
    finish = WorkFolder.finish_block

    def press(folder: WorkFolder, index: int, record: BlockRecord) -> None:
        if index == 2:
            raise KeyboardInterrupt
        finish(folder, index, record)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "finish_block", press)
        done = run(*command)
    assert done.code == 130
    kept = f"modelopt-sparse: 2{of} blocks are kept in '{tmp_path / 'out.partial'}': the same command goes on\n"
    assert done.err.startswith(kept)
    assert done.err.endswith("interrupted\n")
    assert run(*command).code == 0
    assert "2 of 4 blocks were reused from a stopped run" in mts.report(tmp_path / "out").notes
    assert run(verb, tmp_path / "deep", "--out", tmp_path / "whole", *data).code == 0
    assert_same_state(mts.load(tmp_path / "out"), state_of(mts.load(tmp_path / "whole")))


def test_mistakes_of_our_own_keep_their_traceback(run, work, monkeypatch):
    monkeypatch.setattr(mts, "make_plan", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("plan", work / "llama")
