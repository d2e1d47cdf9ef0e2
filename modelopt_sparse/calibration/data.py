"""Calibration data in every form that users have it, as calls of the model."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.padding import PaddingOfCall
from modelopt_sparse.model.devices import (
    dense_rows,
    flat_tensors,
    input_device,
    leaves_of,
    map_batch,
    map_tensors,
    parts_of,
    parts_within,
)
from modelopt_sparse.model.hf import default_seq_len, refuse_unknown_tokens, takes
from modelopt_sparse.plan.options import HELD_BACK, LEAST_STEPS, STEP_TOKENS, SparsifyConfig
from modelopt_sparse.reports.text import first_few

# calls ----------------------------------------------------------------------------------------------------------------


IMAGES_PER_BATCH = 8  # of a batch, if nobody says how many
DRAWN_FROM = 8  # of data without a length, so many times the windows asked for are read
PATCHES = 128  # tokens that an image counts as where steps are cut


@dataclass(frozen=True)
class Call:
    """One call of the model: ``model(*args, **kwargs)``.

    step: the number of the step of the optimizer that it is a part of, negative if the model has written it; None: it
      is one by itself. row: where in that step its rows begin.
    batch: the number of the user's batch that it comes from; None where calls are not put into steps.
    labels: those that the model is not called with, which still tell what is padding.
    """

    args: tuple
    kwargs: dict[str, Any]
    step: int | None = None
    row: int = 0
    batch: int | None = None
    labels: Any = None


def batch_rows(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """The size of a call's batch: that of its first tensor."""
    sizes = [len(x) for x in flat_tensors((args, kwargs)) if x.dim()]
    return sizes[0] if sizes else 1


def validation_count(steps: int, one_of: int = HELD_BACK) -> int:
    """Number of steps of the user's data, the last ones, that only judge where blocks are tuned."""
    return max(1, steps // one_of)


LEFT_OUT = (
    "the model is called with the first entry of each batch alone, and others hold tensors of several dimensions: if "
    "these are masks or inputs, give mappings or a collect_func"
)


def load_calls(config: SparsifyConfig, model: nn.Module, notes: list[str]) -> list[Call]:
    """The calls that data_loader or text stand for, on the CPU or wherever the user's tensors are; in steps where some
    of them tune or choose. ``notes``: get what is left out of batches.

    Tensors and arrays are copied as soon as a batch is there: a loader may fill the same memory again. While the user
    holds the batches as well, they take twice the memory.
    """
    if config.processor is not None:
        batches: Iterable[Any] = _processed(config)
    elif config.data is not None:
        batches = text_windows(config, model)
    else:
        assert config.data_loader is not None
        batches = config.data_loader
        if isinstance(batches, Sized) and not isinstance(batches, Iterable):  # an index past its end may be no error
            batches = map(batches.__getitem__, range(len(batches)))
    take = config.collect_func or (lambda batch: batch)
    as_calls = (_as_call(take(batch), config, model, notes) for batch in islice(batches, config.max_batches))
    calls = [Call(*copied(call.args, call.kwargs)) for call in as_calls]
    if not calls:
        raise ValueError("data_loader gives no batch, as a generator that is used up does: give a list or a DataLoader")
    calls = in_steps(calls, None if config.holds_text else config.seed) if config.in_steps else calls
    real = [call for call in calls if config.count_padding or not _is_padding(call, model)]
    if not real:
        raise ValueError("all tokens of the data are padding, as its masks say: give data with others")
    notes += [f"batches of nothing but padding are left out: {len(calls) - len(real)}"] * (len(real) < len(calls))
    return real


def _is_padding(call: Call, model: nn.Module) -> bool:
    masks = PaddingOfCall(model)
    masks.tell(model, call.args, call.kwargs)
    return masks.of_all()


def in_steps(calls: Sequence[Call], seed: int | None) -> list[Call]:
    """Batches as parts of steps of the optimizer, in an order drawn by ``seed`` (None: as they are); the last ones
    judge.

    A step has as many rows whatever the user's batches are: about STEP_TOKENS tokens, and fewer where there would be
    fewer than LEAST_STEPS of them. Batches are cut where a step begins, as far as that is certain to be right (see
    `split`), and small ones are put together.
    """
    sizes = [batch_rows(call.args, call.kwargs) for call in calls]
    tokens = sum(size * _tokens_of_row(call) for size, call in zip(sizes, calls))
    step_rows = max(1, min(STEP_TOKENS * sum(sizes) // max(tokens, 1), sum(sizes) // LEAST_STEPS))
    made: list[Call] = []
    for batch, (call, start) in enumerate(zip(calls, accumulate(sizes, initial=0))):
        made += [
            replace(part, step=(start + part.row) // step_rows, row=(start + part.row) % step_rows, batch=batch)
            for part in split(call, step_rows, step_rows - start % step_rows)
        ]
    steps = [*dict.fromkeys(part.step for part in made)]
    positions = dict(zip(steps, range(len(steps))))
    if seed is not None:
        drawn = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed), device="cpu")
        positions = dict(zip(steps, drawn.tolist()))
    made = [replace(part, step=positions[part.step]) for part in made]
    return sorted(made, key=lambda part: part.step or 0)


def _tokens_of_row(call: Call) -> int:
    """The most tokens that a row of a batch has; an image, or what is not known, counts as PATCHES."""
    sizes = [1]
    for x in flat_tensors((call.args, call.kwargs)):
        if x.is_nested or x.dim() > 3:
            sizes.append(PATCHES)
        elif x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point()):
            sizes.append(x.shape[1])
    return max(sizes)


def split_steps(calls: Sequence[Call], count: int, first: int = 0) -> list[Call]:
    """Split each call into as many as ``count`` parts, one for each process. A call that is of no step yet is one by
    itself; these count from ``first``."""
    return [
        replace(part, step=step if call.step is None else call.step, row=call.row + part.row, batch=call.batch)
        for step, call in enumerate(calls, first)
        for part in split(call, -(-batch_rows(call.args, call.kwargs) // count))
    ]


def split(call: Call, rows: int, first: int | None = None) -> list[Call]:
    """Split a batch into parts of ``rows`` rows, the ``first`` part of so many, if it is nothing but tokens, or images
    with a number for each, labels, and constants. Any other stays whole, for which of its tensors and lists have a row
    for each sample is not known. `row` of a part counts from the beginning of the batch."""
    values = [value for value in (*call.args, *call.kwargs.values()) if not isinstance(value, CONSTANTS)]
    named = [(name, x) for name, x in parts_within((call.args, call.kwargs)) if isinstance(x, Tensor)]
    tensors = [x for _, x in named]
    dims = [x.dim() for name, x in named if not x.is_floating_point() and not is_label(name, x)]
    images = [x for name, x in named if x.is_floating_point() and not is_label(name, x)]
    known = all(dim == 2 for dim in dims) if not images else all(dim == 1 for dim in dims)
    plain = all(x.layout == torch.strided and not x.is_nested for x in tensors) and len(images) < 2
    plain &= all(isinstance(leaf, Tensor) for leaf in leaves_of(values))
    if not (plain and known and all(x.dim() > 3 for x in images)) or len({len(x) for x in tensors}) != 1:
        return [replace(call, row=0)]
    rows = max(1, rows)
    begins = [0, *range(first or rows, len(tensors[0]), rows)]
    ends = [*begins[1:], len(tensors[0])]
    return [
        Call(*map_tensors(lambda x, a=a, b=b: x[a:b], (call.args, call.kwargs)), row=a) for a, b in zip(begins, ends)
    ]


def is_label(name: str, x: Any) -> bool:
    """Whether an argument is a label of each sample, which says nothing of what the model puts out."""
    return name == "labels" and isinstance(x, Tensor) and x.dim() == 1


def held_back(calls: Sequence[Call]) -> int:
    """Number of the user's calls, the last ones, that only judge where blocks are tuned."""
    steps = [-1 - number if call.step is None else call.step for number, call in enumerate(calls)]
    judges = [*dict.fromkeys(steps)][-validation_count(len(set(steps))) :]
    return sum(step in judges for step in steps)


def copied(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a call that nobody else writes to."""
    return map_batch(_copied, (args, kwargs), (Tensor, np.ndarray))


def _copied(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.copy()
    if x.is_nested and x.layout == torch.strided:
        raise TypeError("a calibration batch holds a nested tensor that has no shape: make it with layout=torch.jagged")
    return x.detach().clone().requires_grad_(x.requires_grad)


def _as_call(batch: Any, config: SparsifyConfig, model: nn.Module, notes: list[str]) -> Call:
    """ModelOpt's convention: a mapping is keywords, a tuple is positional with a last mapping as keywords.

    Of what ``collect_func`` returns a last mapping is keywords only if ``model.forward`` names all of its keys. Without
    one a loader's (input, label) tuple or list gives its first element.
    """
    if isinstance(batch, Mapping):
        if batch and all(isinstance(value, (str, list)) for value in batch.values()) and not flat_tensors(batch):
            problem = f"data_loader gives rows of lists and text ({first_few([*map(str, batch)])}), no tensors"
            raise TypeError(f"{problem}: wrap it in a DataLoader with transformers' default_data_collator, or another")
        return Call((), dict(batch))
    if isinstance(batch, Tensor):
        return Call((batch,), {})
    if isinstance(batch, (tuple, list)) and batch:
        *args, last = batch
        free = config.collect_func is None
        if isinstance(last, Mapping) and (free or (args and all(takes(model, key) for key in last))):
            return Call(tuple(args), dict(last))
        if not free:
            return Call(tuple(batch), {})
        left_out = any(x.dim() > 1 for x in flat_tensors(batch[1:]))
        notes += [LEFT_OUT] if left_out and LEFT_OUT not in notes else []
        return _as_call(batch[0], config, model, notes)
    raise TypeError(f"a calibration batch is a {type(batch).__name__}: give tensors, tuples, mappings, or collect_func")


def source_of(config: SparsifyConfig) -> str:
    """Name of the data's source, for the report. Of a path the last part: the report may be published."""
    data = config.data_loader if config.data is None else config.data
    if config.forward_loop is not None:
        return "forward_loop"
    if isinstance(data, (str, Path)):
        return Path(data).name if isinstance(data, Path) else data
    return f"{'data_loader' if config.data is None else 'data'}: a {type(data).__name__}"


def text_windows(config: SparsifyConfig, model: nn.Module) -> list[dict[str, Tensor]]:
    """Text -> batches of ``num_samples`` windows of ``seq_len`` tokens, drawn without replacement by ``seed``.

    Windows do not overlap, and no batch needs padding. What the tokens are: see `tokens_of`. Of data without a length
    they are drawn from its beginning, which holds DRAWN_FROM times as many.
    """
    assert config.data is not None
    seq_len = config.seq_len or default_seq_len(model)
    tokens = tokens_of(_enough(config, seq_len), config.tokenizer)
    if tokens.numel() == 0:
        raise ValueError("data holds no text: calibration needs at least one token")
    seq_len = min(seq_len, len(tokens))
    windows = tokens.unfold(0, seq_len, seq_len)
    refuse_unknown_tokens(model, tokens)
    if len(windows) < config.num_samples:
        asked = f"not the {config.num_samples} asked for; all are used"
        warnings.warn(f"the text gives {len(windows)} windows of {seq_len} tokens, {asked}", stacklevel=2)
    chosen = windows[_drawn(len(windows), config)]
    size = config.windows_per_batch(len(chosen), seq_len, config.device or input_device(model))
    return [{"input_ids": batch} for batch in chosen.split(size)]


def _enough(config: SparsifyConfig, seq_len: int) -> Any:
    """The data; of a stream, which may have no end, its first documents."""
    if not is_stream(config.data):
        return config.data
    documents, missing = [], DRAWN_FROM * config.num_samples * seq_len
    for document in documents_of(config.data):
        documents.append(document)
        missing -= len(tokens_of([document], config.tokenizer))
        if missing <= 0:
            break
    return documents


def _drawn(rows: int, config: SparsifyConfig) -> Tensor:
    """Draw rows without replacement by the seed -> their indices, ascending."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(config.seed), device="cpu")
    return order[: config.num_samples].sort().values


def chat_prompts(config: SparsifyConfig, model: nn.Module, windows: int, judges: int) -> list[Tensor]:
    """The user's chats up to the last user turn and to where the template lets the model begin, as tokens [n]. Without
    those that reach into the last ``judges`` of the ``windows`` that they gave; none if the data holds other text."""
    seq_len = config.seq_len or default_seq_len(model)
    documents = list(documents_of(_enough(config, seq_len)))
    if any(isinstance(document, str) for document in documents):
        return []
    sizes = [len(tokens_of([chat], config.tokenizer)) for chat in documents]
    drawn = _drawn(max(1, sum(sizes) // seq_len), config)[:windows]
    limit = int(drawn[-judges]) * seq_len if judges else sum(sizes)
    before = [chat for chat, end in zip(documents, accumulate(sizes)) if end <= limit] or documents
    prompts = []
    for chat in before:
        if turns := [number for number, message in enumerate(chat) if message["role"] == "user"]:
            text = _chat_text(chat[: turns[-1] + 1], config.tokenizer, add_generation_prompt=True)
            ids = config.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            prompts.append(torch.tensor(ids, dtype=torch.long, device="cpu"))
    return prompts


CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def digest_of(calls: Iterable[Call]) -> str:
    """The SHA-256 of calibration data: of every tensor of these calls of the model, and of constants in objects among
    their arguments; "unknown" if an object holds something else."""
    digest = hashlib.sha256()
    for leaf in (leaf for call in calls for leaf in leaves_of((call.args, call.kwargs))):
        for _, part in parts_within([leaf]):
            if isinstance(part, Tensor):
                x = dense_rows(part.detach())
                digest.update(f"{x.dtype}{list(x.shape)}".encode())
                digest.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            elif isinstance(part, CONSTANTS):
                digest.update(b"" if part is leaf else repr(part).encode())
            elif not parts_of(part) and not isinstance(part, (list, tuple, dict, type, ref)):
                return "unknown"
    return digest.hexdigest()


# texts, chats and images ----------------------------------------------------------------------------------------------
# A `Path` is a file or a folder, a list holds texts, chats or images, and a bare string is the name of a data set.


MISSING = 'data sets are read by the library datasets, which is not installed: pip install "modelopt-sparse[datasets]"'
WIKITEXT2 = "wikitext2"
TABLES = (".parquet", ".csv", ".json")  # files that hold a data set each
FILE_KINDS = (".txt", ".jsonl", *TABLES)  # files of a folder with a data set: all of one kind
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
        is_text = isinstance(row, str)
        ids += between if is_text and ids else []
        # verbose=False: a whole file is longer than any model takes, and is cut into windows afterwards
        options = {"add_special_tokens": special_tokens and is_text and number == 0, "verbose": False}
        ids += tokenizer(row if is_text else _chat_text(row, tokenizer), **options)["input_ids"]
    return torch.tensor(ids, dtype=torch.long, device="cpu")


def documents_of(data: Any, split: str = "train") -> Iterable[Any]:
    """The texts (str) and chats (lists of messages) of data; of a stream each as it is asked for. Raises ValueError and
    TypeError for what is neither.

    A `.txt` file is one text, a `.jsonl` file has one in each line, a data set one in each row of its column `text`, or
    `messages`, or of its only column.
    """
    if isinstance(data, Path) and data.is_file() and data.suffix.lower() not in TABLES:
        return _in_file(data)
    if isinstance(data, (str, Path)):
        data = open_dataset(data, split)
    if isinstance(data, Mapping):
        raise TypeError(f"data is a mapping of {first_few(list(map(str, data)))}: give one, as data=data['train']")
    if isinstance(data, (bytes, bytearray)) or not isinstance(data, Iterable):
        raise TypeError(f"data is a {type(data).__name__}: give a Path, a data set or its name, or a list of texts")
    documents = map(_document, _column(data, (*TEXT, *CHAT)) if is_dataset(data) else data, count())
    return documents if is_stream(data) else list(documents)


def _document(row: Any, number: int) -> Any:
    if isinstance(row, Mapping) and not row.keys() & {"text", "messages"}:
        keys = first_few([*map(str, row)])
        raise TypeError(f"row {number} of data has no 'text' or 'messages', but {keys}: give a list of texts")
    row = row.get("text", row.get("messages")) if isinstance(row, Mapping) else row
    if not isinstance(row, str) and not _is_chat(row):
        problem = f"data is strings or chats (lists of messages with a role), and row {number} a {type(row).__name__}"
        raise TypeError(f"{problem}: give token tensors as data_loader, and images with processor=")
    return row.encode(errors="replace").decode() if isinstance(row, str) else row  # halves of emojis


def is_stream(data: Any) -> bool:
    """Whether data comes row by row, of which nobody knows how many there are."""
    return not isinstance(data, (str, Path, Sized))


def open_dataset(data: str | Path, split: str = "train") -> Any:
    """Load the data set of this name, or in this folder; of "wikitext2" the text as the literature joins it, [text].

    ``split``: of a name that says none. Raises ValueError if it cannot be loaded.
    """
    table = isinstance(data, Path) and data.is_file() and data.suffix.lower() in TABLES
    saved = isinstance(data, Path) and (data / "state.json").is_file()  # by the library datasets
    if isinstance(data, Path) and not table:
        kinds = [] if saved else sorted({file.suffix for file in data.glob("*")} & {*FILE_KINDS})
        if len(kinds) > 1:
            raise ValueError(f"data {str(data)!r} holds files of several kinds ({', '.join(kinds)}): give one of them")
        if not data.is_dir():
            allowed = "a .txt or .jsonl file, a table (.csv, .parquet, .json), or a folder with a data set"
            raise ValueError(f"data {str(data)!r} is not a file: give {allowed}")
    try:
        from datasets import exceptions, load_dataset, load_from_disk  # an extra: only when a data set is read
    except ImportError:
        raise ValueError(f"data {str(data)!r}: {MISSING}") from None
    name, config, part = [*str(data).split(":", 2), "", ""][:3] if isinstance(data, str) else (str(data), "", "")
    try:
        if name == WIKITEXT2:
            return ["\n\n".join(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=part or split)["text"])]
        if table:
            return load_dataset(Path(data).suffix[1:].lower(), data_files=str(data), split="train")
        if saved:
            return load_from_disk(str(data))
        return load_dataset(name, config or None, split=part or split)
    except (OSError, ValueError, RuntimeError, exceptions.DatasetsError) as error:
        raise ValueError(f"data {str(data)!r} cannot be loaded as a data set: {error.__cause__ or error}") from None


def is_dataset(data: Any) -> bool:
    """Whether this is a table of the library datasets, which need not be installed to ask."""
    return hasattr(data, "column_names") and hasattr(data, "features")


def _processed(config: SparsifyConfig) -> Iterator[Mapping[str, Any]]:
    """Run the processor on images in batches, or on chats with images one by one. Raises ValueError for text."""
    data, processor, size = config.data, config.processor, config.batch_size or IMAGES_PER_BATCH
    if isinstance(data, (str, Path)):
        data = open_dataset(data)
    columns = _columns(data) if is_dataset(data) else []
    chat = next((name for name in CHAT if name in columns), None)
    images = data if chat or not columns else _column(data, IMAGE)
    if is_stream(data) or not columns:
        images = list(islice(images, DRAWN_FROM * config.num_samples if is_stream(data) else None))
    if not columns and any(isinstance(row, str) or _is_chat(row) for row in images):
        raise ValueError("data holds text, and processor= is for images: give tokenizer= in its place")
    order = _drawn(len(images), config).tolist()
    if chat is None:
        for begin in range(0, len(order), size):
            yield processor(images=[images[i] for i in order[begin : begin + size]], return_tensors="pt")
        return
    pictures = next((name for name in IMAGE if name in columns), None)
    for row in (images[i] for i in order):
        shown = [] if pictures is None or row[pictures] is None else row[pictures]
        shown = shown if isinstance(shown, list) else [shown]
        text = processor.apply_chat_template(_without_nones(row[chat]), tokenize=False)
        yield processor(text=[text], **({"images": shown} if shown else {}), return_tensors="pt")


def _columns(data: Any) -> list[str]:
    """Names; a data set that is streamed may know them from its rows alone."""
    return list(data.column_names or next(iter(data), {}))


def _column(data: Any, names: Sequence[str]) -> Any:
    """The column of a data set that has one of these names, or its only one."""
    columns = _columns(data)
    wanted = [name for name in names if name in columns] or (columns if len(columns) == 1 else [])
    if not wanted:
        problem = f"the data set has no column {' or '.join(names)}"
        raise ValueError(f"{problem}: give one, data_set['name'], of {first_few(columns)}")
    return (row[wanted[0]] for row in data) if is_stream(data) else data[wanted[0]]


def _in_file(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without the mark of some editors
    except UnicodeDecodeError as error:
        raise ValueError(f"data {str(path)!r} is no text in UTF-8 (byte {error.start}): give a .txt file") from None
    if path.suffix.lower() != ".jsonl":
        return [text]
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold what else `splitlines` breaks at
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            content = row.get("text", row.get("messages"))
        except (ValueError, AttributeError, RecursionError):  # a RecursionError: nested too deeply to be read
            content = None
        if not isinstance(content, str) and not _is_chat(content):
            wanted = 'a JSON object with a "text" key that holds a string, or a "messages" key that holds a chat'
            raise ValueError(f"{str(path)!r} line {number}: every line must be {wanted}")
        rows.append(_document(content, number))
    return rows


def _is_chat(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(isinstance(turn, Mapping) and "role" in turn for turn in row)


def _chat_text(chat: Sequence[Mapping[str, Any]], tokenizer: Any, **options: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("data holds chats, and the tokenizer has no chat template: give that of the chat model")
    try:
        return tokenizer.apply_chat_template(_without_nones(chat), tokenize=False, **options)
    except Exception as error:  # of the template
        roles = first_few([str(turn["role"]) for turn in chat])
        raise ValueError(f"the chat template does not take a chat of {roles}: {error}: leave such chats out") from error


def _without_nones(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A data set fills keys that a message does not have with None, which templates take for a value."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(entry) for key, entry in value.items() if entry is not None}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    return [plain(message) for message in chat]
