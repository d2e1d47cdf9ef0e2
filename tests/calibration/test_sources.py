"""Calibration data of every kind: data sets and their columns, names, folders, chats, images."""

import copy
import itertools
import json
import sys

import pytest
import torch
import transformers
from torch import Tensor

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import Call, chat_prompts, documents_of, load_calls, open_dataset, tokens_of
from modelopt_sparse.plan.options import SparsifyConfig, is_data_set
from tests.helpers import refused, tiny_llama

datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")
Dataset = datasets.Dataset
Image = pytest.importorskip("PIL.Image", reason="the extra datasets is not installed")

TEXTS = ["to be or not to be", "that is the question", "whether it is nobler"]
CHAT = [{"role": "user", "content": "who is there"}, {"role": "assistant", "content": "nay answer me"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['tone'] is defined %}!{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def chatting(tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def calls_of(**options) -> list[Call]:
    return load_calls(SparsifyConfig(**options), torch.nn.Linear(1, 1), [])


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


TABLE = Dataset.from_dict({"line": TEXTS, "author": ["a", "b", "c"]})


@pytest.mark.parametrize(
    "data", [TEXTS, TABLE.rename_column("line", "text"), TABLE.select_columns("line"), TABLE["line"]]
)
def test_a_data_set_is_its_texts(tokenizer, data):
    """The column text, the only column, and a column by itself."""
    expected = ids_of(tokenizer, TEXTS[0])
    for text in TEXTS[1:]:
        expected += [tokenizer.eos_token_id, *ids_of(tokenizer, text)]
    assert tokens_of(data, tokenizer).tolist() == expected


SPLITS = {name: Dataset.from_dict({"text": TEXTS}) for name in ("train", "test")}
OTHER_KEYS = [{"prompt": "a", "answer": "b"}]
NO_DATA = [
    (TABLE, ValueError, r"has no column .* data_set\['name'\]"),
    # load_dataset without a split gives one: its keys are strings, and no documents
    (SPLITS, TypeError, r"data is a mapping of train; test: give one, as data=data\['train'\]"),
    (5, TypeError, "data is a int: give a Path, a data set or its name"),
    (["a text", None], TypeError, "strings or chats .*, and row 1 a NoneType: give token tensors as data_loader"),
    (b"bytes", TypeError, "data is a bytes: give a Path, a data set or its name"),
    (OTHER_KEYS, TypeError, "row 0 of data has no 'text' or 'messages', but prompt; answer: give"),
]


@pytest.mark.parametrize(("data", "error", "words"), NO_DATA)
def test_what_is_no_data(data, error, words):
    refused(documents_of, data, match=words, error=error)


def test_a_folder_with_files_of_several_kinds_is_refused(tmp_path):
    for name in ("a.csv", "b.jsonl", "README.md"):
        (tmp_path / name).write_text("text\n")
    refused(documents_of, tmp_path, match=r"holds files of several kinds \(.csv, .jsonl\): give one of them")


WRITERS = {  # what is read, and how it is written
    "saved": lambda table, path: table.save_to_disk(path),
    "folder": lambda table, path: table.to_json(path / "train.jsonl"),
    "rows.json": lambda table, path: table.to_json(path, lines=False),
    "rows.csv": lambda table, path: table.to_csv(path),
    "rows.parquet": lambda table, path: table.to_parquet(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_with_a_data_set_or_a_file_that_is_one(tmp_path, monkeypatch, name):
    """A .csv was one text, its head and its commas included."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    table = Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3]})
    WRITERS[name](table, tmp_path / name)
    assert documents_of(tmp_path / name) == TEXTS


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What `load_dataset` is asked for: a path, a configuration and a split; it gives TEXTS."""
    seen, data = [], Dataset.from_dict({"text": TEXTS})
    monkeypatch.setattr("datasets.load_dataset", lambda path, config, split: seen.append((path, config, split)) or data)
    return seen


NAMES = {
    "org/set": ("org/set", None, "train"),
    "org/set:en": ("org/set", "en", "train"),
    "org/set::validation": ("org/set", None, "validation"),
    "org/set:en:train[:1000]": ("org/set", "en", "train[:1000]"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_asked_for_with_config_and_split(tokenizer, asked, name):
    assert torch.equal(tokens_of(name, tokenizer), tokens_of(TEXTS, tokenizer))
    assert asked == [NAMES[name]]


def test_wikitext2_is_joined_as_papers_join_it(tokenizer, asked):
    """Rows by blank lines, as one text; the tokenizer's own tokens once, at its beginning, if they are asked for."""
    joined = "\n\n".join(TEXTS)
    assert tokens_of("wikitext2", tokenizer, split="test").tolist() == ids_of(tokenizer, joined)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]

    class Special:
        eos_token_id = 0

        def __call__(self, text, add_special_tokens, verbose):
            return {"input_ids": [*([77] if add_special_tokens else []), *ids_of(tokenizer, text)]}

    assert tokens_of("wikitext2", Special(), special_tokens=True).tolist() == [77, *ids_of(tokenizer, joined)]
    expected = [77, *ids_of(tokenizer, "a"), 0, *ids_of(tokenizer, "b")]
    assert tokens_of(["a", "b"], Special(), special_tokens=True).tolist() == expected


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("text")
    assert all(map(is_data_set, ("wikitext2", "org/set", "org/set:en:train[:10%]", "org/a.b-c")))
    others = ("here", "calib.txt", "rows.jsonl", "two words", "", "/abs/path", "./x", "a/b/c", "line\n", "../x")
    assert not any(map(is_data_set, others))
    with pytest.raises(TypeError, match=r"'two words' is no data set's name: give a Path for a file"):
        SparsifyConfig(data="two words", tokenizer=print)


def test_files_that_cannot_be_read_and_odd_text(chatting, tmp_path):
    """Half of an emoji, which JSON may hold, is a question mark; endings may be in capitals."""
    broken, odd = tmp_path / "broken.JSON", tmp_path / "odd.JSONL"
    broken.write_text('{"text": "a"')
    odd.write_text('{"text": "a \\ud83d b"}\n')
    refused(open_dataset, broken, match=r"broken.JSON' cannot be loaded as a data set: JSON parse error")
    assert documents_of(odd) == documents_of(["a \ud83d b"]) == ["a ? b"]
    tokenizer = copy.copy(chatting)
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    words = "the chat template does not take a chat of system; user: no system"
    chat = [{"role": role, "content": "x"} for role in ("system", "user")]
    refused(tokens_of, [chat], tokenizer, match=words)


def test_a_data_set_that_cannot_be_had(tokenizer, tmp_path, monkeypatch):
    def load_dataset(*_args, **_options):
        raise FileNotFoundError("no such set")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    refused(tokens_of, "org/set", tokenizer, match="data 'org/set' cannot be loaded as a data set: no such set")
    refused(tokens_of, tmp_path / "nowhere", tokenizer, match="is not a file: give a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(tokens_of, "org/set", tokenizer, match=r'not installed: pip install "modelopt-sparse\[datasets\]"')


# chats ----------------------------------------------------------------------------------------------------------------


def test_chats_go_through_the_template(chatting, tokenizer, tmp_path):
    """With the template's own tokens, and none between; keys that a data set filled with None are not there."""
    rendered = "<user>who is there\n<assistant>nay answer me\n"
    toned = [{"role": "user", "content": "stand", "tone": "loud"}]
    expected = [*ids_of(chatting, rendered), *ids_of(chatting, "<user>stand!\n")]
    data = Dataset.from_dict({"messages": [CHAT, toned], "id": [1, 2]})
    assert data[0]["messages"][0].get("tone", None) is None
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (CHAT, toned)))
    for form in ([CHAT, toned], data, data["messages"], tmp_path / "chats.jsonl"):
        assert tokens_of(form, chatting).tolist() == expected
    refused(tokens_of, [CHAT], tokenizer, match="has no chat template: give that of the chat model")


# images ---------------------------------------------------------------------------------------------------------------


def pictures(count: int = 6) -> list:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 12, 12, 3), generator=random, dtype=torch.uint8)
    return [Image.fromarray(each.numpy()) for each in pixels]


@pytest.mark.parametrize("form", ["list", "data set"])
def test_images_go_through_the_processor(form):
    images = pictures()
    data = images if form == "list" else Dataset.from_dict({"image": images, "label": list(range(6))})
    processor = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    calls = calls_of(data=data, processor=processor, num_samples=5, batch_size=2, seed=3)
    chosen = torch.randperm(6, generator=torch.Generator().manual_seed(3))[:5].sort().values.tolist()
    expected = processor(images=[images[i] for i in chosen], return_tensors="pt")["pixel_values"]
    assert [len(call.kwargs["pixel_values"]) for call in calls] == [2, 2, 1]
    assert torch.equal(torch.cat([call.kwargs["pixel_values"] for call in calls]), expected)


def test_chats_with_images_go_through_the_processor_one_by_one():
    class Processor:
        def apply_chat_template(self, chat, tokenize):
            assert tokenize is False
            return "".join(part.get("text", "<image>") for message in chat for part in message["content"])

        def __call__(self, text, return_tensors, images=()):
            assert return_tensors == "pt"
            return {"input_ids": torch.tensor([[len(text[0]), len(images)]])}

    images = pictures(3)
    parts = [[{"type": "image"}, {"type": "text", "text": "x" * n}] for n in range(1, 4)]
    chats = [[{"role": "user", "content": each}] for each in parts]
    data = Dataset.from_dict({"messages": chats, "images": [[image] for image in images]})
    calls = calls_of(data=data, processor=Processor())
    assert [call.kwargs["input_ids"].tolist() for call in calls] == [[[len("<image>") + n, 1]] for n in range(1, 4)]


def test_a_processor_goes_with_data_of_images_and_without_a_tokenizer():
    for options in ({}, {"data": ["x"], "tokenizer": print}):
        refused(SparsifyConfig, processor=print, **options, match="processor= makes the model's inputs of images")
    for data in (["a text"], [CHAT]):
        refused(calls_of, data=data, processor=print, match="processor= is for images: give tokenizer= in its place")


# forms of rows and files ----------------------------------------------------------------------------------------------


def test_rows_are_taken_as_those_of_a_jsonl_file(chatting):
    rows = [{"text": TEXTS[0], "more": 1}, {"messages": CHAT}]
    assert documents_of(rows) == [TEXTS[0], CHAT]
    assert tokens_of(rows, chatting).tolist() == tokens_of([TEXTS[0], CHAT], chatting).tolist()


def test_rows_in_place_of_batches_are_told_to_be_collated(tokenizer):
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
    with pytest.raises(TypeError, match=r"rows of lists .*input_ids.*: wrap it in a DataLoader"):
        mts.sparsify(tiny_llama(), "wanda", data_loader=rows, progress=False)


def test_the_report_names_the_source_of_its_data(tokenizer, tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(" ".join(TEXTS * 40))
    text = {"tokenizer": tokenizer, "seq_len": 8, "num_samples": 4}
    batches = [torch.randint(0, 97, (2, 16))]
    cases = [
        ({"data": path, **text}, "some.txt"),
        ({"data": TEXTS * 40, **text}, "data: a list"),
        ({"data_loader": batches}, "data_loader: a list"),
        ({"forward_loop": lambda model: model(batches[0])}, "forward_loop"),
    ]
    for options, source in cases:
        model = tiny_llama(vocab_size=len(tokenizer)) if "data" in options else tiny_llama()
        calibration = mts.report(mts.sparsify(model, "wanda", progress=False, **options)).calibration
        assert (calibration["source"], len(calibration["sha256"])) == (source, 64)


# streams: data without a length ---------------------------------------------------------------------------------------


def streamed(rows, column: str = "text", **others):
    """As streamed JSON: the columns are not known before the first row."""
    return datasets.IterableDataset.from_generator(lambda: ({column: row, **others} for row in rows()))


class Texts:
    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        return self.rows()


STREAMS = {
    "a generator": lambda rows: rows(),
    "an iterable": Texts,
    "a data set": lambda rows: streamed(rows, url="u"),
    "a data set of chats": lambda rows: streamed(rows, "messages", url="u"),
    "a data set with one column": lambda rows: streamed(rows, "content"),
}


def windows_of(data, tokenizer, **options) -> list[Tensor]:
    calls = calls_of(data=data, tokenizer=tokenizer, num_samples=3, seq_len=4, **options)
    return [call.kwargs["input_ids"] for call in calls]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_ends_is_read_as_a_list_is(chatting, kind):
    rows = [CHAT] * 3 if kind == "a data set of chats" else TEXTS
    expected = windows_of(rows, chatting)
    assert all(map(torch.equal, windows_of(STREAMS[kind](lambda: iter(rows)), chatting), expected))


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_without_an_end_is_read_as_far_as_it_is_needed(chatting, kind):
    """Windows are drawn from eight times as many tokens as they have."""
    row, read = (CHAT if kind == "a data set of chats" else TEXTS[0]), []
    data = STREAMS[kind](lambda: (read.append(1) or row for _ in itertools.count()))
    expected = len(ids_of(chatting, row)) if isinstance(row, str) else len(tokens_of([row], chatting))
    assert sum(map(len, windows_of(data, chatting))) == 3
    assert len(read) <= -(-8 * 3 * 4 // expected) + 1  # a data set is asked for its first row


def test_a_run_that_reads_chats_twice_reads_the_same(chatting):
    """The model answers the chats that the windows were drawn from, and no others."""
    config = SparsifyConfig(data=itertools.cycle([CHAT]), tokenizer=chatting, num_samples=3, seq_len=4, self_data=2)
    load_calls(config, torch.nn.Linear(1, 1), [])
    prompts = chat_prompts(config, torch.nn.Linear(1, 1), 3, 0)
    assert len(prompts) == -(-8 * 3 * 4 // len(tokens_of([CHAT], chatting)))


def test_the_column_of_a_stream_has_to_be_known(tokenizer):
    rows = streamed(lambda: itertools.repeat("x"), "a", b="y")
    refused(windows_of, rows, tokenizer, match=r"no column text or messages .* of a; b")


def test_a_stream_of_images():
    def processor(images, return_tensors):
        return {"pixel_values": torch.tensor([image.getpixel((0, 0))[0] for image in images])}

    for data in (itertools.cycle(pictures()), streamed(lambda: itertools.cycle(pictures()), "image", label=0)):
        calls = calls_of(data=data, processor=processor, num_samples=4, batch_size=2)
        assert [len(call.kwargs["pixel_values"]) for call in calls] == [2, 2]
