"""Text that the dense model writes itself: more calibration data where the user's is short.

What is tuned on little data fits that data better than any other. A language model's own text, sampled at temperature
1, has the statistics that the model has learned (used for quantization by LLM-QAT, arXiv 2305.17888).
"""

import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import Call, text_windows
from modelopt_sparse.calibration.modes import calibrating
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.checks import refuse_no_model
from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.hf import default_seq_len, writes_text
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.plan.config import OWN_WINDOWS, SELF, SparsifyConfig

BATCH = 32  # windows that are written at a time: what they are depends on it, if only in the last bits
PROMPT = 32  # tokens at most


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
    text, or with data="self" with the beginning-of-text token alone. ``data``, ``tokenizer``, ``num_samples``,
    ``seq_len`` and ``seed`` are as for `sparsify`. Tokens are drawn at temperature 1 from all of the vocabulary, where
    the model is; an end-of-text token is text like any other.
    `sparsify_checkpoint` takes the file as ``data``; for `sparsify` there is ``self_data=``, which needs no file.

    Raises ValueError for a model that writes no text, with no file written.

    >>> mts.write_text(model, "own.jsonl", data=Path("text.txt"), tokenizer=tokenizer)
    """
    refuse_no_model(model)
    config = SparsifyConfig(data=data, tokenizer=tokenizer, num_samples=num_samples, seq_len=seq_len, seed=seed)
    network, path = unwrapped(model), Path(file)
    refuse_to_write(network, "write_text")
    with calibrating(network):
        if config.writes_its_data:
            length = seq_len or default_seq_len(network)
            written = write_windows(network, [begin_of_text(network)], windows, length, seed, prompt=1)
        else:
            rows = rows_of([Call((), batch) for batch in text_windows(config, network)])
            written = write_windows(network, rows, windows, max(map(len, rows)), seed)
    if problem := monotonous(written):
        warnings.warn(problem, stacklevel=2)
    lines = (json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in written)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def own_calls(
    model: nn.Module, calls: Sequence[Call], held_back: int, config: SparsifyConfig, processes: Processes
) -> tuple[list[Call], str | None]:
    """The windows that ``config.self_data`` asks for, in batches as large as the user's; and what is worth a warning.

    ``calls``: the user's data, of which the last ``held_back`` give no prompts: they judge. Any number of processes has
    the same text: batch b is written by process b mod n, and sent to all.
    """
    refuse_to_write(model, f"self_data={config.self_data}")
    rows = rows_of(calls)
    prompting = rows_of(calls[: len(calls) - held_back]) or rows
    windows = OWN_WINDOWS * len(rows) if config.self_data == "auto" else int(config.self_data)
    first = len(rows) if config.writes_its_data else 0  # those before have been written
    written = write_windows(model, prompting, windows, max(map(len, rows)), config.seed, processes, first=first)
    size = max(len(ids) for ids in map(_tokens_of, calls) if ids is not None)
    return [Call((), {"input_ids": batch}) for batch in written.split(size)], monotonous(written)


def calls_from_nothing(model: nn.Module, config: SparsifyConfig, processes: Processes) -> tuple[list[Call], str | None]:
    """The calibration data that ``data="self"`` stands for; and what is worth a warning.

    Each of ``num_samples`` windows begins with the model's beginning-of-text token.
    """
    refuse_to_write(model, f"data={SELF!r}")
    length = config.seq_len or default_seq_len(model)
    written = write_windows(model, [begin_of_text(model)], config.num_samples, length, config.seed, processes, prompt=1)
    size = config.windows_per_batch(len(written), length, config.device or input_device(model))
    return [Call((), {"input_ids": batch}) for batch in written.split(size)], monotonous(written)


def begin_of_text(model: nn.Module) -> Tensor:
    """The token [1] that texts begin with, or the one that ends them where models are trained without the former."""
    configs = [getattr(model, "generation_config", None), model.config.get_text_config()]  # type: ignore[union-attr,operator]  # of transformers
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            token = getattr(config, name, None)
            if token is not None:
                return torch.tensor([token[0] if isinstance(token, list) else token])
    raise ValueError(
        f"data={SELF!r}: the config of this {type(model).__name__} names no bos_token_id and no eos_token_id to begin "
        "with: set model.generation_config.bos_token_id, or give text"
    )


def why_none_is_written(calls: Sequence[Call], run: Run) -> str | None:
    """Why ``self_data="auto"`` asks for no text of the model's own; None if it asks for some."""
    if not writes_text(run.model):
        return f"a {type(run.model).__name__} is no causal language model"
    if not run.storage.resident:
        return "each token takes a pass over all weights, which lie on disk (write_text writes it to a file, as data)"
    if not run.config.split_data:
        return "split_data=False says that each process has data of its own"
    if any(_tokens_of(call) is None for call in calls):
        return "there are batches without input_ids [windows, tokens]"
    return None


def refuse_to_write(model: nn.Module, what: str) -> None:
    """Raise ValueError for a model that is no causal language model of transformers; ``what`` asked for text."""
    if not writes_text(model):
        raise ValueError(
            f"{what}: a {type(model).__name__} writes no text, which takes a causal language model of transformers: "
            "give more calibration data instead"
        )


def rows_of(calls: Sequence[Call]) -> list[Tensor]:
    """The user's token rows, padding left out. Raises ValueError if a batch holds no token ids."""
    rows = []
    for call in calls:
        ids, mask = _tokens_of(call), call.kwargs.get("attention_mask")
        if ids is None:
            raise ValueError(
                "own text begins with tokens of the calibration data, and a batch of it holds none as input_ids "
                "[windows, tokens]: give text or token batches, or leave self_data out"
            )
        rows += list(ids) if mask is None else [row[own.bool()] for row, own in zip(ids, mask)]
    return rows


def _tokens_of(call: Call) -> Tensor | None:
    ids = call.kwargs.get("input_ids", call.args[0] if call.args else None)
    return ids if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2 else None


def write_windows(
    model: nn.Module,
    rows: Sequence[Tensor],
    count: int,
    length: int,
    seed: int,
    processes: Processes | None = None,
    *,
    prompt: int | None = None,
    first: int = 0,
) -> Tensor:
    """``count`` windows [count, length] of token ids, on the CPU. Window i depends on (seed, i), and not on how many
    others there are, but for what batches do to the last bits of logits.

    prompt: how many tokens of a row a window begins with. first: the number of the first window.
    """
    size = min(PROMPT, max(1, length // 4)) if prompt is None else prompt
    long_enough = [row.cpu() for row in rows if len(row) >= size]
    if not long_enough:
        raise ValueError(f"own text begins with {size} tokens of the calibration data, and no row of it is so long")
    rank, ranks = (0, 1) if processes is None else (processes.rank, processes.size)
    own: dict[int, Tensor] = {}
    for number, begin in enumerate(range(0, count, BATCH)):
        if number % ranks == rank:
            draws = [_Draws(seed, first + i, length) for i in range(begin, min(begin + BATCH, count))]
            prompts = torch.stack([draw.prompt(long_enough, size) for draw in draws])
            own[number] = _continued(model, prompts, torch.stack([draw.uniforms for draw in draws]))
    of_ranks = [own] if processes is None else processes.all_gather("text that the model writes", own)
    return torch.cat([batch for _, batch in sorted(pair for written in of_ranks for pair in written.items())])


class _Draws:
    """All random numbers of one window: where its prompt begins, and one in [0, 1) for each token."""

    def __init__(self, seed: int, number: int, length: int) -> None:
        random = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        self._place = torch.rand(2, generator=random, dtype=torch.float64).tolist()
        self.uniforms = torch.rand(length, generator=random, dtype=torch.float64)

    def prompt(self, rows: Sequence[Tensor], size: int) -> Tensor:
        row = rows[int(self._place[0] * len(rows))]
        begin = int(self._place[1] * (len(row) - size + 1))
        return row[begin : begin + size]


def _continued(model: nn.Module, prompts: Tensor, uniforms: Tensor) -> Tensor:
    """Prompts [n, p] continued to the length of ``uniforms`` [n, length], token by token.

    With a KV cache each token is run once; a model without one runs all of them again for each new one.
    """
    device, past = input_device(model), None
    ids, uniforms = prompts.to(device), uniforms.to(device)
    has_cache = "past_key_values" in inspect.signature(model.forward).parameters
    while (length := ids.shape[1]) < uniforms.shape[1]:
        if has_cache:
            output = model(input_ids=ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
            past = output.past_key_values
        else:
            output = model(input_ids=ids)
        ids = torch.cat([ids, drawn(output.logits[:, -1], uniforms[:, length])[:, None]], dim=1)
    return ids.cpu()


def drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row of logits [n, vocabulary], by inverting the cumulative distribution at uniforms [n]."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    if not torch.isfinite(cumulative).all():
        raise ValueError("the dense model's logits are not finite, so that it cannot write text: repair the checkpoint")
    chosen = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


def monotonous(windows: Tensor) -> str | None:
    """What to say if most windows go on with one token alone."""
    written = windows[:, min(PROMPT, max(1, windows.shape[1] // 4)) :]
    same = int((written == written[:, :1]).all(1).sum()) if written.shape[1] > 1 else 0
    if same * 2 <= len(windows):
        return None
    return f"{same} of {len(windows)} texts that the model wrote repeat one token: they teach nothing, give real text"
