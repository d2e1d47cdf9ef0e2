"""Calibration on text: windows, files, and text that does not do."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import modelopt_sparse as mts
from tests.calibration.collecting import assert_same, collected
from tests.helpers import TESTBED, refused, tiny_llama

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")


@pytest.fixture(scope="module")
def text() -> str:
    return (TESTBED / "heldout.txt").read_text(encoding="utf-8")[:1500]


def text_llama(tokenizer) -> LlamaForCausalLM:
    return tiny_llama(vocab_size=len(tokenizer))


def test_text_is_cut_into_windows_without_special_tokens(tokenizer, text):
    """All windows of 16 tokens, in order, as if the user had cut them; what is left over is dropped."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    assert 10 < len(windows) < 128
    assert len(windows) * 16 < len(ids)
    with pytest.warns(UserWarning, match=f"the text gives {len(windows)} windows of 16 tokens, not the 128 asked for"):
        found = collected(text_llama(tokenizer), data=text, tokenizer=tokenizer, seq_len=16, batch_size=4)
    assert_same(found, collected(text_llama(tokenizer), data_loader=list(windows.split(4))))


def test_text_files_give_what_their_text_gives(tokenizer, text, tmp_path):
    """A .txt file is one document, a .jsonl file has one per line; documents are joined by the end-of-text token."""
    options = {"tokenizer": tokenizer, "seq_len": 16, "num_samples": 5}
    documents = [text[:700], text[700:]]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": document, "source": "x"}) + "\n" for document in documents]
    (tmp_path / "a.jsonl").write_text("".join(lines) + "\n", encoding="utf-8")
    expected = collected(text_llama(tokenizer), data=text, **options)
    assert_same(collected(text_llama(tokenizer), data=tmp_path / "a.txt", **options), expected)
    assert_same(collected(text_llama(tokenizer), data=[text], **options), expected)

    joined = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in documents]
    ids = torch.tensor([*joined[0], tokenizer.eos_token_id, *joined[1]])
    model = text_llama(tokenizer)
    windows = list(ids[: len(ids) // 16 * 16].view(-1, 16).split(1))
    expected = collected(model, data_loader=windows)
    options["num_samples"] = len(windows)
    for data in (documents, tmp_path / "a.jsonl"):
        assert_same(collected(text_llama(tokenizer), data=data, batch_size=1, **options), expected)


def test_windows_are_drawn_by_seed_and_without_replacement(tokenizer, text):
    """As many windows as asked for, each one once; the same seed draws the same ones."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = {tuple(window.tolist()) for window in ids[: len(ids) // 16 * 16].view(-1, 16)}
    drawn = {}
    for seed in (0, 0, 1):
        model, seen = text_llama(tokenizer), []
        model.model.embed_tokens.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        options = {"data": text, "tokenizer": tokenizer, "seq_len": 16, "num_samples": 6, "seed": seed}
        mts.sparsify(model, "wanda", progress=False, **options)
        rows = [tuple(row.tolist()) for row in seen[0]]
        assert len(rows) == len(set(rows)) == 6
        assert windows.issuperset(rows)
        assert drawn.setdefault(seed, rows) == rows
    assert drawn[0] != drawn[1]


def test_a_text_shorter_than_a_window_is_one_short_window(tokenizer):
    with pytest.warns(UserWarning, match="the text gives 1 windows"):
        found = collected(text_llama(tokenizer), data="a short text", tokenizer=tokenizer)
    length = len(tokenizer("a short text", add_special_tokens=False)["input_ids"])
    assert {stats.tokens for stats in found.values()} == {length}


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ("", ValueError, "data holds no text"),
        ([], ValueError, "data holds no text"),
        (
            "texts/mine.txt",
            ValueError,
            "looks like a file: give Path",
        ),
        (
            [[1, 2, 3]],
            TypeError,
            "data is text: a string, a list of strings or a Path; token tensors go into data_loader",
        ),
    ],
)
def test_text_that_is_none(tokenizer, data, error, match):
    refused(mts.sparsify, text_llama(tokenizer), match=match, error=error, data=data, tokenizer=tokenizer)


def test_a_missing_text_file_is_named(tokenizer, tmp_path):
    path = tmp_path / "missing.txt"
    refused(
        mts.sparsify,
        text_llama(tokenizer),
        match="missing.txt' is not a file: give a .txt or .jsonl",
        data=path,
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize("line", ['{"body": "x"}', "no json", "[1]"])
def test_a_line_without_text_is_named(tokenizer, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    message = 'bad.jsonl\' line 2: every line must be a JSON object with a "text" key'
    refused(mts.sparsify, text_llama(tokenizer), match=message, data=path, tokenizer=tokenizer)
