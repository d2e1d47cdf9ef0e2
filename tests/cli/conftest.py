"""A small model, and what the command line makes of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import modelopt_sparse as mts
from tests.helpers import TESTBED, tiny_llama

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a small Llama that has everything that travels with a model, and texts."""
    root = tmp_path_factory.mktemp("cli")
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=0, bos_token_id=0)
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=0, bos_token_id=0)
    model.save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    text = (TESTBED / "calibration.txt").read_text(encoding="utf-8")
    (root / "text.txt").write_text(text[:6000], encoding="utf-8")
    (root / "held.txt").write_text(text[6000:9000], encoding="utf-8")
    documents = [text[9000:9500], text[9500:12000]]
    (root / "text.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in documents))
    (root / "only-config").mkdir()
    shutil.copy(root / "llama" / "config.json", root / "only-config")
    return root


@pytest.fixture(scope="module")
def sparse(work) -> Path:
    """The folder of a model made 2:4 by magnitude."""
    model = AutoModelForCausalLM.from_pretrained(work / "llama")
    mts.sparsify(model, "magnitude", pattern="2:4")
    mts.save(model, work / "sparse", companions=[AutoTokenizer.from_pretrained(work / "llama")])
    return work / "sparse"


def by_the_api(work: Path, method: str = "sparsegpt", text: str = "text.txt", **options) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(work / "llama", dtype="auto")
    if method != "magnitude":
        options |= {"data": work / text, "tokenizer": AutoTokenizer.from_pretrained(work / "llama")}
    return mts.sparsify(model, method, options)
