"""The inputs of the command line: options from flags, --set and YAML; wrong input; models by name and with own code."""

import json
import shutil
import sys
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.cli import inputs as cli_input
from tests.cli.conftest import by_the_api
from tests.helpers import assert_same_masks, assert_same_state, state_of

pytestmark = pytest.mark.core

# options ------------------------------------------------------------------------------------------------------------

EVERY_OPTION: dict[str, Any] = {"method": "wanda", "pattern": "1:4", "num_samples": 4, "seq_len": 16, "batch_size": 3}
EVERY_OPTION |= {"seed": 5, "sequential": "stage", "include": ["*mlp*", "*self_attn*"]}
EVERY_OPTION |= {"exclude": ["*gate*", "*.k_proj"], "device": "cpu"}
EVERY_FLAG = [
    f"--{key.replace('_', '-')}={each}"
    for key, value in {**EVERY_OPTION, "dtype": "float32"}.items()
    for each in (value if isinstance(value, list) else [value])
]


def sparsified(run, work, out, *arguments) -> None:
    done = run("sparsify", work / "llama", "--out", out, *arguments)
    assert done.code == 0, done.err


@pytest.mark.parametrize("how", ["flags", "config", "set"])
def test_every_option_reaches_the_api(run, work, tmp_path, how):
    (tmp_path / "options.yaml").write_text(yaml.dump(EVERY_OPTION))
    given = {
        "flags": EVERY_FLAG,
        "config": ["--config", tmp_path / "options.yaml"],
        "set": [part for key, value in EVERY_OPTION.items() for part in ("--set", f"{key}={json.dumps(value)}")],
    }[how]
    sparsified(run, work, tmp_path / "out", "--data", work / "text.txt", *given)
    expected = by_the_api(work, **EVERY_OPTION)
    assert_same_state(mts.load(tmp_path / "out"), state_of(expected))
    found, made = mts.report(tmp_path / "out"), mts.report(expected)
    assert (len(found.layers), found.settings, found.calibration) == (5, made.settings, made.calibration)


WITHOUT_A_FLAG = [
    (["--set", "damping=1e-1", "--set", "block_size=8"], "sparsegpt", {"damping": 0.1, "block_size": 8}),
    (["--set=hessian_damp=0.3", "--set=max_iter_data_loader=1"], "sparsegpt", {"damping": 0.3, "max_batches": 1}),
    (["--pattern", "2:4 sparsity", "--method", "sparse_magnitude"], "magnitude", {"pattern": "2:4"}),
    (
        ["--set", 'rules={"*down_proj": null, "*up_proj": {pattern: 1:4}}', "--method", "magnitude"],
        "magnitude",
        {"rules": {"*down_proj": None, "*up_proj": {"pattern": "1:4"}}},
    ),
    (["--set", "enforce=false", "--method", "magnitude"], "magnitude", {"enforce": False}),
]


@pytest.mark.parametrize(("given", "method", "options"), WITHOUT_A_FLAG)
def test_options_without_a_flag(run, work, tmp_path, given, method, options):
    data = [] if method == "magnitude" else ["--data", work / "text.txt", "--num-samples", "6", "--seq-len", "32"]
    sampling = {} if method == "magnitude" else {"num_samples": 6, "seq_len": 32}
    sparsified(run, work, tmp_path / "out", *given, *data)
    assert_same_state(mts.load(tmp_path / "out"), state_of(by_the_api(work, method, **sampling, **options)))


def test_flags_win_over_set_which_wins_over_the_file(run, work, tmp_path):
    (tmp_path / "options.yaml").write_text("method: magnitude\npattern: 1:4\nexclude: ['*k_proj', '*q_proj']\n")
    plan = ("plan", work / "llama", "--json", "--config", tmp_path / "options.yaml")
    for flags, found in {
        "": [("magnitude", "1:4")] * 5,
        "--set pattern=2:8 --set exclude=null": [("magnitude", "2:8")] * 7,
        "--set pattern=2:8 --pattern 4:8 --method wanda": [("wanda", "4:8")] * 5,
    }.items():
        layers = json.loads(run(*plan, *flags.split()).out)["layers"]
        assert [(layer["method"], layer["pattern"]) for layer in layers] == found, flags


def test_data_may_stand_in_the_file_and_may_be_jsonl(run, work, tmp_path):
    text = work / "text.jsonl"
    (tmp_path / "options.yaml").write_text(f"data: {text}\nnum_samples: 4\nseq_len: 32\n")
    sparsified(run, work, tmp_path / "out", "--config", tmp_path / "options.yaml")
    expected = by_the_api(work, text="text.jsonl", num_samples=4, seq_len=32)
    assert_same_state(mts.load(tmp_path / "out"), state_of(expected))


@pytest.mark.parametrize("name", cli_input.PYTHON_ONLY)
def test_options_that_are_python_objects_are_refused(run, work, name):
    words = f"modelopt-sparse: option '{name}' is a Python object; on the command line use --data FILE\n"
    run("plan", work / "llama", "--set", f"{name}=x").wrong(words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(run, work, tmp_path, dtype):
    out = tmp_path / "out"
    assert run("sparsify", work / "llama", "--method=magnitude", "--out", out, "--dtype", dtype).code == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {getattr(torch, dtype)}
    assert len(mts.verify(out, "2:4").layers) == 7


# wrong input --------------------------------------------------------------------------------------------------------


TEN = ", ".join(["*a{}"] * 10)
ANCHORS = "include:\n- &a0 [x, x]\n" + "".join(f"- &a{i + 1} [{TEN.replace('{}', str(i))}]\n" for i in range(4))


WRONG_INPUT = [
    ("plan {llama} --pattern 2-4", "pattern '2-4' is not known: write '2:4'"),
    ("plan {llama} --set pattern", "--set 'pattern': write KEY=VALUE"),
    ("plan {llama} --set =3", "--set '=3': write KEY=VALUE"),
    ("plan {llama} --set [=3", "option '[' is not known"),
    ("plan {llama} --set exclude=[", "--set 'exclude=[' is not YAML: while parsing a flow node"),
    ("plan {llama} --dtype int4", "--dtype int4: allowed are auto, float32, bfloat16, float16"),
    ("sparsify {llama} --out x --device nonsense", "--device nonsense: Expected one of cpu, cuda"),
    ("plan {llama} --config nowhere.yaml", "--config 'nowhere.yaml' cannot be read as YAML: [Errno 2] No such"),
    ("plan {llama} --config {bytes}", "bytes.yaml' cannot be read as YAML: 'utf-8' codec can't decode byte 0x80"),
    ("plan {llama} --config {unknown}", "option 'dampin' is not known, did you mean 'damping'?"),
    ("plan {llama} --config {list}", "must hold a mapping of options"),
    ("plan {llama} --config {broken}", "broken.yaml' is not YAML: mapping values are not allowed here"),
    ("plan {llama} --data nowhere.txt", "data 'nowhere.txt' is not a file: give a .txt or .jsonl file"),
    ("plan nowhere/", "'nowhere/' is neither a folder nor a model that the hub gives"),
    ("plan no/where", "'no/where' is neither a folder nor a model that the hub gives"),
    ("plan {root}", "holds no config.json: it is not a folder of a transformers model"),
    ("plan {llama}/config.json", "config.json' is neither a folder nor a model that the hub gives"),
    ("sparsify {llama} --out {root}/never", "method 'sparsegpt' needs calibration text: give --data FILE"),
    ("sparsify {llama} --out x --method magnitude --budget 9%zeros", "--budget '9% zeros' needs calibration text"),
    ("sparsify {llama} --out {root}/never --method magnitude --stream --eval x", "--eval holds the whole model"),
    ("sparsify {llama} --out {root}/never --method magnitude --spill", "--spill goes with --stream"),
    ("eval {llama} --reference no/where --data {text}", "'no/where' is neither a folder"),
    ("eval {llama} --data {text} --seq-len 0", "--seq-len 0"),
    ("eval {llama} --data=", "the name of the data is empty: give a file, a folder or a data set"),
    ("eval {llama} --data {text} --device=", "--device : Device string must not be empty"),
    ("plan {llama} --config {anchors}", "['x', 'x']"),
    ("finalize --input {text} --output nodir/x", "--output: there is no folder 'nodir': make it first"),
    ("report {llama}", "holds no sparsity.json"),
    *(
        (f"speed {{sparse}} --tokens={count}", f"--tokens {count}: {wrong} is not a number of tokens; write for")
        for count, wrong in {"1,,64": "''", "1;64": "'1;64'", "-1": "'-1'", "many": "'many'"}.items()
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_INPUT)
def test_wrong_input_is_one_clear_line_and_exit_code_2(run, work, sparse, arguments, message):
    places = {"root": work, "llama": work / "llama", "text": work / "text.txt", "sparse": sparse}
    for name, content in {"unknown": "dampin: 1\n", "list": "- 1\n", "broken": "a\nb: c\n", "anchors": ANCHORS}.items():
        places[name] = work / f"{name}.yaml"
        places[name].write_text(content)
    places["bytes"] = work / "bytes.yaml"
    places["bytes"].write_bytes(b"\x80\x04pickled")
    done = run(*arguments.format(**places).split())
    done.wrong(message)
    assert len(done.err.splitlines()) == 1
    assert len(done.err) < 11_000
    assert not (work / "never").exists()


USAGE = {
    "plan {llama} --metod wanda": "No such option",
    "plan": "Missing argument 'MODEL'",
    "sparsify {llama}": "Missing option '--out'",
    "plan {llama} --num-samples many": "Invalid value for '--num-samples'",
    "prune {llama}": "No such command 'prune'",
    "plan {llama} extra": "unexpected extra argument",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_wrong_arguments_show_the_usage_and_exit_with_2(run, work, arguments):
    done = run(*arguments.format(llama=work / "llama").split())
    assert (done.code, done.out, done.err[:7]) == (2, "", "Usage: ")
    assert USAGE[arguments] in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_a_folder_with_broken_weights_is_no_traceback(run, work, tmp_path):
    shutil.copytree(work / "llama", tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"junk")
    run("eval", tmp_path / "llama", "--data", work / "held.txt", "--seq-len", 32).wrong()


@pytest.mark.parametrize("verb", ["sparsify", "shrink", "eval", "sparsify --stream"])
def test_weights_that_are_missing_or_do_not_fit_are_not_made_up(run, work, tmp_path, verb):
    """What is there beside the model's may stay."""
    folder, name, text = tmp_path / "llama", "model.layers.0.mlp.up_proj.weight", work / "text.txt"
    shutil.copytree(work / "llama", folder)
    state = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}  # not the file
    missing = {key: tensor for key, tensor in state.items() if key != name}
    save_file(missing | {"extra": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    more: tuple[Any, ...] = () if verb == "eval" else ("--out", tmp_path / "out")
    more += ("--method", "magnitude") if "sparsify" in verb else ("--data", text, "--seq-len", 32)
    done = run(*verb.split(), folder, *more, *(["--mlp", "25%"] if verb == "shrink" else []))
    done.wrong(f"does not hold a whole LlamaForCausalLM: '{name}' of the model is not in the folder")
    assert not (tmp_path / "out").exists()
    save_file(state | {name: state[name][:3]}, folder / "model.safetensors", metadata={"format": "pt"})
    done = run("eval", folder, "--data", text, "--seq-len", 32)
    done.wrong(f"'{name}' has shape [3, 32] in the folder and [64, 32] in the model")
    save_file(state | {"extra": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("eval", folder, "--data", text, "--seq-len", 32).code == 0


UNREADABLE = [("tokenizer.json", "tokenizer"), ("preprocessor_config.json", "processor"), (None, "")]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "what"), UNREADABLE)
def test_a_tokenizer_or_processor_that_cannot_be_read_is_not_left_behind_in_silence(run, work, tmp_path, name, what):
    for file in (work / "llama").iterdir():
        if name or ("token" not in file.name and file.suffix != ".jinja"):
            shutil.copy(file, tmp_path)
    if name:
        (tmp_path / name).write_text("{")
    done = run("sparsify", tmp_path, "--method", "magnitude", "--out", tmp_path / "out", "--quiet")
    assert done.code == 0
    said = f"modelopt-sparse: warning: its {what} is left behind, for it cannot be loaded here: "
    assert [line.startswith(said) for line in done.err.splitlines()] == [True] * bool(name)


# models -------------------------------------------------------------------------------------------------------------


def test_the_revision_is_asked_of_the_hub(run, monkeypatch):
    asked = []

    def has_file(name, file, revision):
        asked.append((name, file, revision))
        raise OSError("there is no revision 'v7'")

    monkeypatch.setattr(cli_input, "has_file", has_file)
    for arguments in (["plan"], ["sparsify", "--out", "never"], ["eval", "--data", __file__]):
        nowhere = "'some/model' is neither a folder nor a model that the hub gives: there is no revision 'v7'"
        run(*arguments, "some/model", "--revision", "v7").wrong(nowhere)
    assert asked == [("some/model", "config.json", "v7")] * 3


def test_a_sparse_model_of_the_hub_comes_with_its_masks(sparse, monkeypatch):
    """From the folder that it is downloaded to."""
    files, local = cli_input.has_file, cli_input.local_folder
    monkeypatch.setattr(cli_input, "has_file", lambda name, file, revision: files(sparse, file))
    monkeypatch.setattr(cli_input, "local_folder", lambda name, revision: local(sparse, revision))
    assert_same_masks(cli_input.NamedModel("some/model", "auto", "v7", False).load(masks=True), mts.load(sparse))


CODE = """
from transformers import PreTrainedModel, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput
from torch import nn

class OwnConfig(PreTrainedConfig):
    model_type = "own"
    def __init__(self, width=16, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(config.width, 8), nn.Linear(8, config.width)) for _ in "ab")
        self.post_init()
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=x)
"""


def test_models_with_their_own_code_need_a_flag(run, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = tmp_path / "own"
    source.mkdir()
    (source / "own.py").write_text(CODE)
    config = {"model_type": "own", "architectures": ["OwnModel"], "width": 16}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps(config))
    run("plan", source).wrong("--trust-remote-code")
    done = run("plan", source, "--trust-remote-code")
    assert done.code == 0, done.err
    assert "4 layers with 512 of 512" in done.out

    own = transformers.AutoConfig.from_pretrained(source, trust_remote_code=True)
    AutoModelForCausalLM.from_config(own, trust_remote_code=True).save_pretrained(source)
    # nothing is outside of its blocks; transformers 5.0.0 leaves such a model without hooks, and it is refused
    streams = [] if transformers.__version__ == "5.0.0" else [("--stream",), ("--stream", "--packed")]
    for how in ((), *streams):
        out = tmp_path / "-".join(("out", *how))
        done = run("sparsify", source, "--method", "magnitude", "--out", out, "--trust-remote-code", *how)
        assert done.code == 0, done.err
        assert (run("verify", out).code, run("verify", out, "--trust-remote-code").code) == (2, 0)
        loaded = mts.load(out, trust_remote_code=True)
        assert (type(loaded).__name__, len(dict(mts.named_masks(loaded)))) == ("OwnModel", 4)
