"""Calibration on text: windows, files, and text that does not do."""

import json

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import load_calls
from modelopt_sparse.model.hf import default_seq_len
from tests.calibration.collecting import assert_same, collected
from tests.helpers import TESTBED, refused, tiny_llama
from tests.models.expert_models import build

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def text() -> str:
    return (TESTBED / "heldout.txt").read_text(encoding="utf-8")[:1500]


def text_llama(tokenizer) -> hf.LlamaForCausalLM:
    return tiny_llama(vocab_size=len(tokenizer))


def batches_of(model: nn.Module, tokenizer, data, **options) -> list[Tensor]:
    config = mts.SparsifyConfig(data=data, tokenizer=tokenizer, **options)
    return [call.kwargs["input_ids"] for call in load_calls(config, model, [])]


def test_text_is_cut_into_windows_without_special_tokens(tokenizer, text):
    """All windows of 16 tokens, in order, as if the user had cut them; what is left over is dropped."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    assert 10 < len(windows) < 128
    assert len(windows) * 16 < len(ids)
    with pytest.warns(UserWarning, match=f"the text gives {len(windows)} windows of 16 tokens, not the 128 asked for"):
        found = collected(text_llama(tokenizer), data=[text], tokenizer=tokenizer, seq_len=16, batch_size=4)
    assert_same(found, collected(text_llama(tokenizer), data_loader=list(windows.split(4))))


def test_text_files_give_what_their_text_gives(tokenizer, text, tmp_path):
    """A .txt file is one document, a .jsonl file has one per line; documents are joined by the end-of-text token. Of
    the characters that end lines in Unicode JSON text may hold all but two. Some editors begin files with a mark."""
    text = text.replace("def ", "d\u2028\x85f ")
    model, documents = text_llama(tokenizer), [text[:700], text[700:]]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    lines = [json.dumps({"text": document, "source": "x"}, ensure_ascii=False) + "\n" for document in documents]
    (tmp_path / "a.jsonl").write_text("".join(lines) + "\n", encoding="utf-8-sig")
    joined = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in documents]
    of_documents = [*joined[0], tokenizer.eos_token_id, *joined[1]]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    for data, ids in (
        ([text], whole),
        (tmp_path / "a.txt", whole),
        (documents, of_documents),
        (tmp_path / "a.jsonl", of_documents),
    ):
        batches = batches_of(model, tokenizer, data, seq_len=16, num_samples=len(ids) // 16)
        assert torch.cat(batches).flatten().tolist() == ids[: len(ids) // 16 * 16]


def test_windows_are_drawn_by_seed_and_without_replacement(tokenizer, text):
    """As many windows as asked for, each one once; the same seed draws the same ones."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = {tuple(window.tolist()) for window in ids[: len(ids) // 16 * 16].view(-1, 16)}
    drawn = {}
    for seed in (0, 0, 1):
        batches = batches_of(text_llama(tokenizer), tokenizer, [text], seq_len=16, num_samples=6, seed=seed)
        rows = [tuple(row.tolist()) for row in torch.cat(batches)]
        assert len(rows) == len(set(rows)) == 6
        assert windows.issuperset(rows)
        assert drawn.setdefault(seed, rows) == rows
    assert drawn[0] != drawn[1]


def test_a_text_shorter_than_a_window_is_one_short_window(tokenizer):
    with pytest.warns(UserWarning, match="the text gives 1 windows"):
        found = collected(text_llama(tokenizer), data=["a short text"], tokenizer=tokenizer)
    length = len(tokenizer("a short text", add_special_tokens=False)["input_ids"])
    assert {stats.tokens for stats in found.values()} == {length}


NO_SET = "is no data set's name: give a Path for a file, and a list for text"
NO_LINE = 'bad.jsonl\' line 2: every line must be a JSON object with a "text" key'
BAD_LINES = ['{"body": "x"}', "no json", "[1]", '{"text": 5}', "[" * 100_000, '{"a": ' * 100_000]
# data, or the name of a file and what it holds -> words of the error
BAD = [
    ([""], "data holds no text"),
    ([], "data holds no text"),
    ("", f"data='' {NO_SET}"),
    ("README.md", "data='README.md' is no data set's name"),
    ("import os\n" * 50, NO_SET),
    ([[1, 2, 3]], "give token tensors as data_loader, and images with processor="),
    (("missing.txt", b""), "missing.txt' is not a file: give a .txt or .jsonl"),
    *((("bad.jsonl", f'{{"text": "fine"}}\n{line}\n'.encode()), NO_LINE) for line in BAD_LINES),
    *(((f"weights{kind}", b"ab\xff\xfe\x00" * 9), f"weights{kind}.*UTF-8.*byte 2") for kind in (".txt", ".jsonl")),
]


@pytest.mark.parametrize(("data", "words"), BAD, ids=lambda value: str(value)[:30])
def test_text_that_is_none(tokenizer, tmp_path, data, words):
    if isinstance(data, tuple):
        path = tmp_path / data[0]
        if data[1]:
            path.write_bytes(data[1])
        data = path
    wrong_type = "set's name" in words or "tensors" in words
    options = {"data": data, "tokenizer": tokenizer, "error": TypeError if wrong_type else ValueError}
    refused(mts.sparsify, text_llama(tokenizer), match=words, **options)


def test_more_tokens_than_the_model_takes_are_refused(tokenizer, text):
    """The maximum stands in the config, or in that of the text model inside it; without one any number will do."""
    options = {"data": [text], "tokenizer": tokenizer, "num_samples": 2}
    model = text_llama(tokenizer)
    refused(mts.sparsify, model, **options, seq_len=65, parts=["seq_len=65", "at most 64 tokens"])
    refused(mts.make_plan, model, "magnitude", seq_len=392_708, parts=["at most 64 tokens"])
    mts.make_plan(model, "magnitude", seq_len=64)

    class Outer(hf.PreTrainedConfig):
        sub_configs = {"text_config": hf.LlamaConfig}

        def __init__(self, text_config=None, **more) -> None:
            self.text_config = text_config
            super().__init__(**more)

    model.config = Outer(text_config=model.config)
    refused(mts.make_plan, model, "magnitude", seq_len=65, parts=["at most 64 tokens"])
    assert default_seq_len(model) == 64
    del model.config
    mts.make_plan(model, "magnitude", seq_len=65)
    assert default_seq_len(model) == 2048


def calls_of(model: nn.Module, tokenizer, text: str, **options) -> list[int]:
    """How many windows each batch has."""
    return [len(batch) for batch in batches_of(model, tokenizer, [text], **options)]


def test_of_two_text_models_the_decoder_says_how_many_tokens_are_taken():
    model = nn.Linear(4, 4)
    parts = {"text_encoder": hf.T5Config(), "audio_encoder": hf.EncodecConfig()}
    parts["decoder"] = hf.MusicgenDecoderConfig(max_position_embeddings=77)
    model.config = hf.MusicgenConfig(**{name: part.to_dict() for name, part in parts.items()})
    assert default_seq_len(model) == 77


@pytest.mark.parametrize(("kind", "taken"), [("Bert", 40), ("Roberta", 38), ("Esm", 35), ("MPNet", 38), ("OPT", 40)])
def test_windows_end_with_the_positions_of_a_model(tokenizer, text, kind, taken):
    """Where padding has a position, others begin behind it; a window of the default length runs, and none is longer."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 40, "pad_token_id": 4 if kind == "Esm" else 1}
    model = build(f"{kind}Model", f"{kind}Config", num_hidden_layers=1, **sizes)()
    assert default_seq_len(model) == taken
    mts.sparsify(model, "wanda", data=[text], tokenizer=tokenizer, num_samples=2)
    refused(mts.make_plan, model, "magnitude", seq_len=taken + 1, parts=[f"at most {taken} tokens"])


def test_batches_on_the_cpu_have_about_2048_tokens(tokenizer, text):
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=4096)
    long = text * 40
    assert calls_of(model, tokenizer, long, seq_len=512, num_samples=10) == [4, 4, 2]
    assert calls_of(model, tokenizer, long, seq_len=3000, num_samples=3) == [1, 1, 1]
    assert calls_of(model, tokenizer, long, seq_len=512, num_samples=10, batch_size=7) == [7, 3]
    assert calls_of(model, tokenizer, long, seq_len=512, num_samples=10, device="cuda") == [8, 2]


def test_a_batch_is_left_to_judge_by(tokenizer, text):
    """As many samples as one batch would take: the defect of quality="balanced"."""
    model = text_llama(tokenizer)
    tuned = {"seq_len": 16, "reconstruct": 1}
    assert calls_of(model, tokenizer, text, num_samples=8, **tuned) == [1] * 8
    assert calls_of(model, tokenizer, text, num_samples=2, **tuned) == [1, 1]
    assert calls_of(model, tokenizer, text * 20, num_samples=128, **tuned) == [4] * 32
    assert calls_of(model, tokenizer, text, num_samples=8, batch_size=8, **tuned) == [1] * 8
    mts.sparsify(model, quality="balanced", data=[text], tokenizer=tokenizer, seq_len=16, num_samples=8)
    assert len(mts.report(model).blocks) == 2


def test_a_vocabulary_that_does_not_fit_the_model(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [f"token id {max(ids)}", "has 97 tokens", "give its own tokenizer"]
    data = {"data": [text], "tokenizer": tokenizer, "num_samples": 1, "seq_len": 16}
    refused(mts.sparsify, tiny_llama(), "wanda", parts=parts, **data)
    with pytest.raises(ValueError, match=f"token id {max(ids)}, .* has 97 tokens"):
        mts.evaluate(tiny_llama(), torch.tensor(ids), seq_len=16, progress=False)
