"""A dense language model writes: its own text, token by token, from prompts on."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import Call
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import input_device

BATCH = 32  # texts that are written at a time: what they are depends on it, if only in the last bits
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


@dataclass(frozen=True)
class Written:
    """Texts ``[n, length]`` of token ids, on the CPU, and how many tokens each has; what follows means nothing."""

    ids: Tensor
    sizes: Tensor

    def calls(self, windows: int) -> list[Call]:
        """Batches of so many texts. Where they are not equally long, what is behind their ends is masked."""
        pairs = zip(self.ids.split(windows), self.sizes.split(windows))
        return [Call((), _unpadded(ids[:, : int(sizes.max())], sizes)) for ids, sizes in pairs]

    def rows(self) -> list[Tensor]:
        return [row[:size] for row, size in zip(self.ids, self.sizes.tolist())]


def _unpadded(ids: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    mask = torch.arange(ids.shape[1]) < sizes[:, None]
    return {"input_ids": ids} if mask.all() else {"input_ids": ids, "attention_mask": mask.long()}


def write_windows(
    model: nn.Module, prompts: Prompts, count: int, length: int, seed: int, processes: Processes | None = None
) -> Written:
    """``count`` texts of at most ``length`` tokens. Text i depends on (seed, i), and not on how many others there are,
    but for what batches do to the last bits of logits."""
    rank, ranks = (0, 1) if processes is None else (processes.rank, processes.size)
    own: dict[int, Written] = {}
    for number, begin in enumerate(range(0, count, BATCH)):
        if number % ranks == rank:
            draws = [_Draws(seed, prompts.first + i, length) for i in range(begin, min(begin + BATCH, count))]
            uniforms = torch.stack([draw.uniforms for draw in draws])
            own[number] = _continued(model, [draw.prompt(prompts) for draw in draws], uniforms, prompts.ends)
    of_ranks = [own] if processes is None else processes.all_gather("text that the model writes", own)
    texts = [text for _, text in sorted((pair for written in of_ranks for pair in written.items()), key=itemgetter(0))]
    return Written(torch.cat([text.ids for text in texts]), torch.cat([text.sizes for text in texts]))


class _Draws:
    """All random numbers of one text: where its prompt begins, and one in [0, 1) for each token."""

    def __init__(self, seed: int, number: int, length: int) -> None:
        random = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        self._place = torch.rand(2, generator=random, dtype=torch.float64).tolist()
        self.uniforms = torch.rand(length, generator=random, dtype=torch.float64)

    def prompt(self, prompts: Prompts) -> Tensor:
        row = prompts.rows[int(self._place[0] * len(prompts.rows))]
        if prompts.cut is None:
            return row
        begin = int(self._place[1] * (len(row) - prompts.cut + 1))
        return row[begin : begin + prompts.cut]


def _continued(model: nn.Module, prompts: Sequence[Tensor], uniforms: Tensor, ends: Sequence[int]) -> Written:
    """Prompts continued to the length of ``uniforms`` [n, length], or to the first of ``ends``, token by token.

    With a KV cache each token is run once; a model without one runs all of them again for each new one. Prompts begin
    at the same place, and a longer one is read on while shorter ones are continued, so that nothing is padded.
    """
    device, past = input_device(model), None
    ids = torch.zeros(uniforms.shape, dtype=torch.long)
    for row, prompt in zip(ids, prompts):
        row[: len(prompt)] = prompt
    begun = torch.tensor([len(prompt) for prompt in prompts], device=device)
    sizes, last = torch.full_like(begun, ids.shape[1]), torch.tensor(ends, dtype=torch.long, device=device)
    ids, uniforms = ids.to(device), uniforms.to(device)
    has_cache = "past_key_values" in inspect.signature(model.forward).parameters
    for place in range(int(begun.min()), ids.shape[1]):
        if has_cache:
            new = ids[:, :place] if past is None else ids[:, place - 1 : place]
            output = model(input_ids=new, past_key_values=past, use_cache=True)
            past = output.past_key_values
        else:
            output = model(input_ids=ids[:, :place])
        going_on = (begun <= place) & (place < sizes)
        ids[:, place] = torch.where(going_on, drawn(output.logits[:, -1], uniforms[:, place]), ids[:, place])
        sizes = torch.where(going_on & torch.isin(ids[:, place], last), place + 1, sizes)
        if (sizes <= place + 1).all():
            break
    return Written(ids.cpu(), sizes.cpu())


def drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row of logits [n, vocabulary], by inverting the cumulative distribution at uniforms [n]."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    if not torch.isfinite(cumulative).all():
        raise ValueError("the dense model's logits are not finite, so that it cannot write text: repair the checkpoint")
    chosen = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


def monotonous(texts: Sequence[Tensor]) -> str | None:
    """What to say if the second half of most texts is one token alone."""
    halves = [text[len(text) // 2 :] for text in texts]
    same = sum(len(half) > 1 and bool((half == half[0]).all()) for half in halves)
    if same * 2 <= len(texts):
        return None
    return f"{same} of {len(texts)} texts that the model wrote repeat one token: they teach nothing, give real text"
