"""What users have as calibration data, as one row of tokens or as inputs that a processor makes.

A `Path` is a file or a folder, a list holds texts, chats or images, and a bare string is the name of a data set.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.reports.text import first_few

MISSING = 'data sets are read by the library datasets, which is not installed: pip install "modelopt-sparse[datasets]"'
WIKITEXT2 = "wikitext2"
TEXT, CHAT, IMAGE = ("text",), ("messages", "conversations"), ("image", "images", "img")  # names of columns


def tokens_of(data: Any, tokenizer: Any, *, split: str = "train", special_tokens: bool = False) -> Tensor:
    """Texts and chats -> one 1-D tensor of token ids, with the end-of-text token between two texts.

    split: of a data set whose name says none. special_tokens: let the tokenizer put its own before the first text, as
    papers do; chats have those of their template.
    """
    rows = documents_of(data, split)
    ids: list[int] = []
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for number, row in enumerate(rows):
        if isinstance(row, str):
            # verbose=False: a whole file is longer than any model takes, and is cut into windows afterwards
            own = tokenizer(row, add_special_tokens=special_tokens and number == 0, verbose=False)["input_ids"]
            ids += (between if ids else []) + own
        else:
            ids += tokenizer(_chat_text(row, tokenizer), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def prompt_of(chat: Sequence[Mapping[str, Any]], tokenizer: Any) -> Tensor | None:
    """A chat up to its last user turn and to where the template lets the model begin, as tokens [n]; None if no user
    says anything in it."""
    turns = [number for number, message in enumerate(chat) if message["role"] == "user"]
    if not turns:
        return None
    text = _chat_text(chat[: turns[-1] + 1], tokenizer, add_generation_prompt=True)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


def documents_of(data: Any, split: str = "train") -> list[Any]:
    """The texts (str) and chats (lists of messages) of data. Raises ValueError and TypeError for what is neither.

    A `.txt` file is one text, a `.jsonl` file has one in each line, a data set one in each row of its column `text`, or
    `messages`, or of its only column.
    """
    if isinstance(data, Path) and data.is_file():
        return _in_file(data)
    if isinstance(data, (str, Path)):
        data = opened(data, split)
    if isinstance(data, Mapping):
        names = first_few(list(map(str, data)))
        raise TypeError(f"data is a mapping of {names}: give one of them, as data=data['train']")
    rows = list(_column(data, (*TEXT, *CHAT)) if is_dataset(data) else data)
    for row in rows:
        if not isinstance(row, str) and not _is_chat(row):
            raise TypeError(
                f"data is text: strings, or chats (lists of messages with a role), and no {type(row).__name__}; token "
                "tensors go into data_loader, and images need processor="
            )
    return rows


def opened(data: str | Path, split: str = "train") -> Any:
    """The data set of this name, or in this folder; of "wikitext2" its text as the literature joins it, [text].

    ``split``: of a name that says none. Raises ValueError if it cannot be had.
    """
    if isinstance(data, Path) and not data.is_dir():
        raise ValueError(
            f"data {str(data)!r} is not a file: give a .txt or .jsonl file, a folder with a data set, or a list of "
            "texts"
        )
    try:
        from datasets import load_dataset, load_from_disk  # an extra: only when a data set is read
    except ImportError:
        raise ValueError(f"data {str(data)!r}: {MISSING}") from None
    name, config, part = [*str(data).split(":", 2), "", ""][:3] if isinstance(data, str) else (str(data), "", "")
    try:
        if name == WIKITEXT2:
            return ["\n\n".join(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=part or split)["text"])]
        if isinstance(data, Path) and (data / "state.json").is_file():
            return load_from_disk(str(data))
        return load_dataset(name, config or None, split=part or split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"data {str(data)!r} cannot be had as a data set: {error}") from None


def is_dataset(data: Any) -> bool:
    """Whether this is a table of the library datasets, which need not be installed to ask."""
    return hasattr(data, "column_names") and hasattr(data, "features")


def processed(data: Any, processor: Any, count: int, size: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """What a processor makes of images in batches of ``size``, or of chats with images one by one.

    ``count`` rows are drawn without replacement by ``seed``. Raises ValueError for data without images or chats.
    """
    if isinstance(data, (str, Path)):
        data = opened(data)
    if not is_dataset(data):
        data = list(data)
        if any(isinstance(row, str) or _is_chat(row) for row in data):
            raise ValueError("data holds text, and processor= is for images: give tokenizer= in its place")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].sort().values.tolist()
    chats = is_dataset(data) and set(data.column_names) & set(CHAT)
    if not is_dataset(data) or not chats:
        images: Callable[[int], Any] = data.__getitem__
        if is_dataset(data):
            images = _column(data, IMAGE).__getitem__
        for begin in range(0, len(order), size):
            yield processor(images=[images(i) for i in order[begin : begin + size]], return_tensors="pt")
        return
    chat = next(name for name in CHAT if name in data.column_names)
    pictures = next((name for name in IMAGE if name in data.column_names), None)
    for row in (data[i] for i in order):
        shown = [] if pictures is None or row[pictures] is None else row[pictures]
        shown = shown if isinstance(shown, list) else [shown]
        text = processor.apply_chat_template(_without_nones(row[chat]), tokenize=False)
        yield processor(text=[text], **({"images": shown} if shown else {}), return_tensors="pt")


def _column(data: Any, names: Sequence[str]) -> Any:
    """The column of a data set that has one of these names, or its only one."""
    for name in names:
        if name in data.column_names:
            return data[name]
    if len(data.column_names) == 1:
        return data[data.column_names[0]]
    raise ValueError(
        f"the data set has the columns {first_few(list(data.column_names))}, and none called {' or '.join(names)}: "
        "give one of them, as data=data_set['name']"
    )


def _in_file(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data {str(path)!r} is no text in UTF-8 (byte {error.start}): give a .txt or .jsonl file"
        ) from None
    if path.suffix != ".jsonl":
        return [text]
    lines = enumerate(text.splitlines(), start=1)
    return [_in_line(line, f"{str(path)!r} line {number}") for number, line in lines if line.strip()]


def _in_line(line: str, where: str) -> Any:
    try:
        row = json.loads(line)
        content = row.get("text", row.get("messages"))
    except (ValueError, AttributeError, RecursionError):  # a RecursionError: nested too deeply to be read
        content = None
    if not isinstance(content, str) and not _is_chat(content):
        raise ValueError(
            f'{where}: every line must be a JSON object with a "text" key that holds a string, or a "messages" key '
            "that holds a chat"
        )
    return content


def _is_chat(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(isinstance(each, Mapping) and "role" in each for each in row)


def _chat_text(chat: Sequence[Mapping[str, Any]], tokenizer: Any, **options: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"data holds chats, and the tokenizer ({type(tokenizer).__name__}) has no chat template: give that of the "
            "chat model, or set tokenizer.chat_template"
        )
    return tokenizer.apply_chat_template(_without_nones(chat), tokenize=False, **options)


def _without_nones(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A data set fills keys that a message does not have with None, which templates take for a value."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items() if each is not None}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return [plain(message) for message in chat]
