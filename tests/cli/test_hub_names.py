"""Models by their names on the hub, and models with code of their own."""

import json
import sys

import pytest
import transformers
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.cli import inputs as cli_input

pytestmark = pytest.mark.core


def test_the_revision_is_asked_of_the_hub(run, monkeypatch):
    asked = []

    def has_file(name, file, revision):
        asked.append((name, file, revision))
        raise OSError("there is no revision 'v7'")

    monkeypatch.setattr(cli_input, "has_file", has_file)
    for arguments in (["plan"], ["sparsify", "--out", "never"], ["eval", "--data", __file__]):
        done = run(*arguments, "some/model", "--revision", "v7")
        assert done.code == 2
        assert "'some/model' is neither a folder nor a model that the hub gives: there is no revision 'v7'" in done.err
    assert asked == [("some/model", "config.json", "v7")] * 3


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
    source, out = tmp_path / "own", tmp_path / "out"
    source.mkdir()
    (source / "own.py").write_text(CODE)
    config = {"model_type": "own", "architectures": ["OwnModel"], "width": 16}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps(config))
    done = run("plan", source)
    assert done.code == 2
    assert "trust_remote_code" in done.err
    done = run("plan", source, "--trust-remote-code")
    assert done.code == 0, done.err
    assert "4 layers with 512 of 512" in done.out

    model = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(source, trust_remote_code=True), trust_remote_code=True
    )
    model.save_pretrained(source)
    done = run("sparsify", source, "--method", "magnitude", "--out", out, "--trust-remote-code")
    assert done.code == 0, done.err
    assert run("verify", out).code == 2
    assert run("verify", out, "--trust-remote-code").code == 0
    loaded = mts.load(out, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
    assert len(dict(mts.named_masks(loaded))) == 4
