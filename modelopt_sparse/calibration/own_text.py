"""Text that the dense model writes itself: more calibration data where the user's is short.

What is tuned on little data fits that data better than any other. A language model's own text, sampled at temperature
1, has the statistics that the model has learned (used for quantization by LLM-QAT, arXiv 2305.17888). A causal model
continues the user's text; a masked one draws the tokens of the user's rows anew. For any other that takes tokens, rows
are joined from two of the user's.
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from modelopt_sparse.calibration.data import Call, batch_rows, chat_prompts, is_label, text_windows
from modelopt_sparse.calibration.padding import PaddingOfCall
from modelopt_sparse.checks import check_whole, grouped
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import flat_tensors, input_device, is_out_of_memory, map_tensors
from modelopt_sparse.model.find import model_inside
from modelopt_sparse.model.hf import adds_text, cache_name, default_seq_len, redraws_text, text_config_of, writes_text
from modelopt_sparse.model.output import drawn
from modelopt_sparse.plan.options import OWN_BATCH, OWN_WINDOWS, SELF, SparsifyConfig
from modelopt_sparse.reports.text import refuse_no_folder, write_whole
from modelopt_sparse.run import Run, calibrating

# token by token -------------------------------------------------------------------------------------------------------


PROMPT = 32  # tokens at most of a text's beginning that is cut out of another text


@dataclass(frozen=True)
class Prompts:
    """What texts begin with.

    rows: tokens of the user's text. cut: how many of them a text begins with, from a random place; None: a whole row.
    ends: tokens that end a text; without any it has all of its length.
    first: the number of the first text; those before have been written.
    """

    rows: Sequence[Tensor]
    cut: int | None
    ends: tuple[int, ...] = ()
    first: int = 0

    @classmethod
    def cuts(cls, rows: Sequence[Tensor], length: int, first: int = 0) -> "Prompts":
        """Cuts of min(32, length / 4) tokens. Raises ValueError if no row is so long."""
        size = min(PROMPT, max(1, length // 4))
        long_enough = [row.cpu() for row in rows if len(row) >= size]
        if not long_enough:
            raise ValueError(f"own text begins with {size} tokens of the calibration data, and no row of it is so long")
        return cls(long_enough, size, first=first)


def write_windows(
    model: nn.Module, prompts: Prompts, count: int, length: int, seed: int, processes: Processes
) -> list[Tensor]:
    """``count`` texts of at most ``length`` token ids, on the CPU. Text i depends on (seed, i), and not on how many
    others there are, but for what batches do to the last bits of logits."""

    def batch(begin: int) -> list[Tensor]:
        numbers = range(begin, min(begin + OWN_BATCH, count))
        draws = [draw(prompts, seed, prompts.first + number, length) for number in numbers]
        return _continued(model, [x for x, _ in draws], torch.stack([x for _, x in draws]), prompts.ends)

    batches = processes.dealt_out("text that the model writes", batch, range(0, count, OWN_BATCH))
    return [text for texts in batches for text in texts]


def draw(prompts: Prompts, seed: int, number: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw what is random in text ``number``: (the tokens that it begins with, for each token a number in [0, 1))."""
    random = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    row_place, begin_place = torch.rand(2, generator=random, dtype=torch.float64, device="cpu").tolist()
    uniforms = torch.rand(length, generator=random, dtype=torch.float64, device="cpu")
    row = prompts.rows[int(row_place * len(prompts.rows))]
    if prompts.cut is not None:
        begin = int(begin_place * (len(row) - prompts.cut + 1))
        row = row[begin : begin + prompts.cut]
    return row, uniforms


def _continued(model: nn.Module, prompts: Sequence[Tensor], uniforms: Tensor, ends: Sequence[int]) -> list[Tensor]:
    """Prompts continued to the length of ``uniforms`` [n, length], or to the first of ``ends``, token by token.

    With a KV cache each token is run once; a model without one runs all of them again for each new one. Prompts begin
    at the same place, and a longer one is read on while shorter ones are continued, so that nothing is padded.
    """
    device = input_device(model)
    ids = torch.zeros(uniforms.shape, dtype=torch.long, device="cpu")
    for row, prompt in zip(ids, prompts):
        row[: len(prompt)] = prompt
    begun = torch.tensor([len(prompt) for prompt in prompts], device=device)
    sizes, last = torch.full_like(begun, ids.shape[1]), torch.tensor(ends, dtype=torch.long, device=device)
    ids, uniforms = ids.to(device), uniforms.to(device)
    name = cache_name(model)
    read, cache = 0, {} if name is None else {name: None, "use_cache": True}
    for position in range(int(begun.min()), ids.shape[1]):
        output = _asked(model, input_ids=ids[:, read:position], **cache)
        if name is not None and (held := getattr(output, name, None)) is not None:
            read, cache[name] = position, held
        going_on = (begun <= position) & (position < sizes)
        ids[:, position] = torch.where(going_on, drawn(output.logits[:, -1], uniforms[:, position]), ids[:, position])
        sizes = torch.where(going_on & torch.isin(ids[:, position], last), position + 1, sizes)
        if (sizes <= position + 1).all():
            break
    return [row[:size] for row, size in zip(ids.cpu(), sizes.tolist())]


def _asked(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the model puts out. Raises ValueError with its own error for one that is not called so."""
    try:
        return model(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f"this {type(model).__name__} cannot write text: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}: leave self_data out, or give self_data=0") from error


# rows drawn anew ------------------------------------------------------------------------------------------------------


SWEEPS, SHARE = 4, 0.4  # how often tokens are drawn anew, and what share of a row's at a time


def rewritten(model: nn.Module, calls: Sequence[Call], count: int, seed: int, processes: Processes) -> list[Call]:
    """Steps with at least ``count`` texts of a masked language model: the user's in turn, with other tokens.

    In each sweep tokens drawn from all of the user's stand in for a random SHARE of a row's, which are then drawn from
    what the model predicts in their places (Gibbs sampling, Wang and Cho 2019, arXiv 1902.04094; with those in place
    of a mask token, which need not be known). A row's first and last token, which mark its ends, and padding stay.
    Text i depends on (seed, i), as those of `write_windows`.
    """
    device = input_device(model)
    pool = torch.cat(token_rows(model, calls)).to(device)
    sources = _in_turn(calls, count)

    def drawn_anew(number: int) -> Tensor:
        call, first = sources[number]
        args, kwargs = map_tensors(lambda x: x.to(device, copy=True), (call.args, call.kwargs))
        ids, randoms = call_tokens(Call(args, kwargs)), []
        for text in range(first, first + len(ids)):
            random = torch.Generator().manual_seed((seed * 1_000_003 + text) % 2**63)
            randoms.append(torch.rand(ids.shape[1], SWEEPS, 3, generator=random, dtype=torch.float64, device="cpu"))
        real = real_tokens(model, call)
        place = (torch.ones_like(ids) if real is None else real.to(device)).cumsum(-1)
        inside = (place > 1) & (place < place[:, -1:])
        for chances, places, uniforms in torch.stack(randoms).to(device).permute(2, 3, 0, 1):
            chosen = inside & (chances < SHARE)
            ids[chosen] = pool[(places[chosen] * len(pool)).long()].to(ids.dtype)
            logits = _asked(model, *args, **{**kwargs, "return_dict": True}).logits
            ids[chosen] = drawn(logits[chosen], uniforms[chosen]).to(ids.dtype)
        return ids.cpu()

    written = processes.dealt_out("text that the model writes", drawn_anew, range(len(sources)))
    return [with_tokens(call, ids) for (call, _), ids in zip(sources, written)]


def _in_turn(calls: Sequence[Call], count: int) -> list[tuple[Call, int]]:
    """The user's calls in turn, in steps before theirs: as many whole steps as have ``count`` rows -> each with the
    number of its first row."""
    steps = 1 + max(call.step or 0 for call in calls)
    sources, rows = list[tuple[Call, int]](), 0
    while rows < count or calls[len(sources) % len(calls)].row > 0:  # whole steps, as in `in_steps`
        turn, place = divmod(len(sources), len(calls))
        call = calls[place]
        sources.append((replace(call, step=None if call.step is None else call.step - steps * (turn + 1)), rows))
        rows += batch_rows(call.args, call.kwargs)
    return sources


# rows joined from two -------------------------------------------------------------------------------------------------


def joined(calls: Sequence[Call], held_back: int, times: int, seed: int) -> list[Call]:
    """So many ``times`` the user's rows, each of which goes on, from a random place, as another of equal length does.

    None where calls hold anything but rows of whole numbers (tokens, masks), one for each sample, and a label for each,
    which stays, or a row that no other is as long as. The last ``held_back`` calls, which judge, are not taken from.
    Row i depends on (seed, i).
    """
    count = times * sum(batch_rows(call.args, call.kwargs) for call in calls)
    users = calls[: len(calls) - held_back] or calls
    calls = [
        replace(call, kwargs={name: x for name, x in call.kwargs.items() if not is_label(name, x)}) for call in users
    ]
    tensors = [flat_tensors((call.args, call.kwargs)) for call in calls]
    plain = all(x.dim() == 2 and x.layout == torch.strided and not x.is_floating_point() for x in chain(*tensors))
    if not plain or any(len({len(x) for x in of_call}) != 1 for of_call in tensors):
        return []
    lengths = [tuple(x.shape[1] for x in of_call) for of_call in tensors]
    alike = grouped(
        ((call, row) for call, of_call in enumerate(tensors) for row in range(len(of_call[0]))),
        lambda place: lengths[place[0]],
    )
    if any(len(rows) < 2 for rows in alike.values()):
        return []
    made = []
    for number, (source, first) in enumerate(_in_turn(calls, count)):
        place = number % len(calls)
        rows, joined_rows = alike[lengths[place]], []
        begin = rows.index((place, 0))
        for row, parts in enumerate(zip(*tensors[place])):
            random = torch.Generator().manual_seed((seed * 1_000_003 + first + row) % 2**63)
            cut, chance = torch.rand(2, generator=random, dtype=torch.float64, device="cpu").tolist()
            # any row but itself
            other_call, other_row = rows[(begin + row + 1 + int(chance * (len(rows) - 1))) % len(rows)]
            ends = [x[other_row] for x in tensors[other_call]]
            cuts = [math.ceil(cut * len(x)) for x in parts]
            joined_rows.append([torch.cat([a[:size], b[size:]]) for a, b, size in zip(parts, ends, cuts)])
        columns = map(torch.stack, zip(*joined_rows))
        args, kwargs = map_tensors(lambda _, columns=columns: next(columns), (source.args, source.kwargs))
        made.append(replace(source, args=args, kwargs={**users[place].kwargs, **kwargs}))
    return made


# batches --------------------------------------------------------------------------------------------------------------


def _in_batches(texts: list[Tensor], size: int) -> list[Call]:
    """Calls with ``size`` texts each. Where these are not equally long, what is behind their ends is masked."""
    calls = []
    for begin in range(0, len(texts), size):
        batch = texts[begin : begin + size]
        call = {"input_ids": pad_sequence(batch, batch_first=True)}
        if len(set(map(len, batch))) > 1:
            call["attention_mask"] = pad_sequence([torch.ones_like(text) for text in batch], batch_first=True)
        calls.append(Call((), call))
    return calls


def monotonous(texts: Sequence[Tensor]) -> str | None:
    """The warning to give if the second half of most texts is one token alone; else None."""
    halves = [text[len(text) // 2 :] for text in texts]
    same = sum(len(half) > 1 and bool((half == half[0]).all()) for half in halves)
    if same * 2 <= len(texts):
        return None
    return f"{same} of {len(texts)} texts that the model wrote repeat one token: they teach nothing, give real text"


# windows, answers to chats, files -------------------------------------------------------------------------------------


def write_text(
    model: nn.Module,
    file: str | Path,
    *,
    data: Any,
    tokenizer: Any,
    windows: int = 384,
    num_samples: int = 128,
    seq_len: int | None = None,
    seed: int = 0,
) -> Path:
    """Let a causal language model write text, to a .jsonl file with a "text" key in each line -> its path.

    ``windows`` texts of ``seq_len`` tokens, which begin with random cuts of min(32, seq_len / 4) tokens of the user's
    text, or with data="self" with the beginning-of-text token alone; an end-of-text token is text like any other. Where
    the data is chats, texts are chats up to what the user says last, with the model's answer. ``data``, ``tokenizer``,
    ``num_samples``, ``seq_len`` and ``seed`` are as for `sparsify`. Tokens are drawn at temperature 1 from all of the
    vocabulary, where the model is. `sparsify_checkpoint` takes the file as ``data``; for `sparsify` there is
    ``self_data=``, which needs no file.

    Raises ValueError for a model that writes no text, with no file written.

    >>> mts.write_text(model, "own.jsonl", data=Path("text.txt"), tokenizer=tokenizer)
    """
    network, path = model_inside(model), Path(file)
    config = SparsifyConfig(data=data, tokenizer=tokenizer, num_samples=num_samples, seq_len=seq_len, seed=seed)
    check_whole("windows", windows)
    refuse_no_folder(path)
    refuse_to_write(network, "write_text")
    with calibrating(network):
        if config.writes_its_data:
            prompts, length = Prompts([begin_of_text(network)], 1), seq_len or default_seq_len(network)
        else:
            prompts, length = _prompts([Call((), batch) for batch in text_windows(config, network)], 0, config, network)
        written = write_windows(network, prompts, windows, length, seed, Processes())
    if problem := monotonous(written):
        warnings.warn(problem, stacklevel=2)
    write_whole(path, "".join(json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in written))
    return path


def own_calls(
    model: nn.Module, calls: Sequence[Call], held_back: int, config: SparsifyConfig, processes: Processes
) -> list[Call]:
    """The windows that ``config.self_data`` asks for, in steps as large as the user's.

    ``calls``: the user's data, of which the last ``held_back`` give no prompts: they judge. Any number of processes has
    the same text: batch b is written by process b mod n, and sent to all. A masked model fills whole steps.
    """
    refuse_to_write(model, f"self_data={config.self_data}", adds=True)
    windows = config.self_data
    if isinstance(windows, str):
        windows = OWN_WINDOWS[windows] * len(token_rows(model, calls))
    if not writes_text(model):
        return rewritten(model, calls[: len(calls) - held_back] or calls, windows, config.seed, processes)
    prompts, length = _prompts(calls, held_back, config, model)
    written = write_windows(model, prompts, windows, length, config.seed, processes)
    sizes = Counter[object]()
    for number, call in enumerate(calls):
        sizes[(number,) if call.step is None else call.step] += len(call_tokens(call))
    return _in_batches(written, max(sizes.values()))


def _prompts(calls: Sequence[Call], held_back: int, config: SparsifyConfig, model: nn.Module) -> tuple[Prompts, int]:
    """Choose what texts begin with, and the most tokens they may have: the user's chats up to the model's turn, or else
    cuts of the user's tokens; not of what the last ``held_back`` calls judge by."""
    rows = token_rows(model, calls)
    length = max(map(len, rows))
    judges = len(token_rows(model, calls[len(calls) - held_back :])) if held_back else 0
    if config.holds_text and not config.writes_its_data and (turns := chat_prompts(config, model, len(rows), judges)):
        short = [turn for turn in turns if len(turn) <= length * 3 // 4]
        if not short:
            raise ValueError(f"no chat leaves a quarter of {length} tokens to own text: give a larger seq_len")
        # the tokens that end an answer: those of the model, and the tokenizer's end of text
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = {*(eos if isinstance(eos, list) else [eos]), config.tokenizer.eos_token_id} - {None}
        return Prompts(short, None, tuple(ends)), length
    first = len(rows) if config.writes_its_data else 0  # those before have been written
    return Prompts.cuts(rows[: len(rows) - judges] or rows, length, first), length


def calls_from_nothing(model: nn.Module, config: SparsifyConfig, processes: Processes) -> list[Call]:
    """The calibration data that ``data="self"`` stands for.

    Each of ``num_samples`` windows begins with the model's beginning-of-text token.
    """
    refuse_to_write(model, f"data={SELF!r}")
    length = config.seq_len or default_seq_len(model)
    prompts = Prompts([begin_of_text(model)], 1)
    written = write_windows(model, prompts, config.num_samples, length, config.seed, processes)
    size = config.windows_per_batch(config.num_samples, length, config.device or input_device(model))
    return _in_batches(written, size)[: config.max_batches]


def begin_of_text(model: nn.Module) -> Tensor:
    """The token [1] that texts begin with, or the one that ends them where models are trained without the former."""
    configs = [getattr(model, "generation_config", None), text_config_of(model)]
    tokens = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id") for config in configs)
    if (token := next((token for token in tokens if token is not None), None)) is None:
        raise ValueError(f"data={SELF!r}: no token is known to begin with: set model.generation_config.bos_token_id")
    return torch.tensor([token[0] if isinstance(token, list) else token], device="cpu")


def why_no_text(calls: Sequence[Call] | None, run: Run) -> str | None:
    """Why a `self_data` that is a word asks for no text of the model's own; "" where that goes without saying; None if
    it asks for some. ``calls``: of the user's data; None for a forward_loop."""
    if run.config.self_data == "masked" and not redraws_text(run.model):
        return ""
    if calls is None:
        return "a forward_loop calls it, and no prompts are known"
    if not adds_text(run.model):
        return f"a {type(run.model).__name__} is no causal or masked language model"
    if not run.storage.resident:
        file = " (write_text writes it to a file, as data)" if writes_text(run.model) else ""
        return f"each token takes a pass over all weights, which lie on disk{file}"
    if not run.config.split_data:
        return "split_data=False says that each process has data of its own"
    if any(_tokens_of(call) is None for call in calls):
        return "there are batches without input_ids [windows, tokens]"
    return None


def refuse_to_write(model: nn.Module, request: str, *, adds: bool = False) -> None:
    """Raise ValueError for a model that is no causal language model of transformers, nor, if it only ``adds`` text to
    the user's, a masked one. ``request``: what asked for text."""
    if not (adds_text(model) if adds else writes_text(model)):
        kind = "causal or masked" if adds else "causal"
        raise ValueError(f"{request}: a {type(model).__name__} is no {kind} language model: give more calibration data")


def token_rows(model: nn.Module, calls: Sequence[Call]) -> list[Tensor]:
    """The user's token rows, padding left out. Raises ValueError if a batch holds no token ids."""
    rows = []
    for call in calls:
        ids, real = call_tokens(call), real_tokens(model, call)
        rows += list(ids) if real is None else [row[row_real] for row, row_real in zip(ids, real)]
    return rows


def real_tokens(model: nn.Module, call: Call) -> Tensor | None:
    """Which tokens of a batch are no padding [rows, tokens]; None: all, or its mask does not say so."""
    masks = PaddingOfCall(model)
    masks.tell(model, call.args, call.kwargs)
    real = masks.told.get((model, "decoder"))
    return real if isinstance(real, Tensor) else None


def call_tokens(call: Call) -> Tensor:
    """The token ids [rows, tokens] of a batch. Raises ValueError if it holds none."""
    if (ids := _tokens_of(call)) is None:
        raise ValueError("own text begins with input_ids [windows, tokens], a batch has none: give token batches")
    return ids


def with_tokens(call: Call, ids: Tensor) -> Call:
    """The call with other token ids, and all else that it has."""
    if "input_ids" in call.kwargs:
        return replace(call, kwargs={**call.kwargs, "input_ids": ids})
    return replace(call, args=(ids, *call.args[1:]))


def _tokens_of(call: Call) -> Tensor | None:
    ids = call.kwargs.get("input_ids", call.args[0] if call.args else None)
    return ids if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2 else None
