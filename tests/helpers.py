"""Small models and data that several test files use."""

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modelopt_sparse import named_masks
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.distributed import Processes
from modelopt_sparse.plan.planner import plan_for, resolve
from modelopt_sparse.reports.report import Report
from modelopt_sparse.run import InMemory, Run

ROOT = Path(__file__).parent.parent
TESTBED = ROOT / "examples" / "testbed"


def tiny_llama(**changes) -> LlamaForCausalLM:
    """A Llama of random weights: 2 blocks, 32 wide, grouped-query attention, tied embeddings unless changed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, "tie_word_embeddings": True, "initializer_range": 0.2, **changes})
    ).eval()


def in_steps(batches: Sequence[Any], seed: int = 0, *, cut: bool = True) -> list[Any]:
    """Batches (tensors, or mappings of them) as a run that tunes takes them: the rows of tokens or images in steps of
    about 1,024 tokens, at least 32, in an order drawn by the seed; others are not ``cut``. The last one judges (of 32
    and more, one of sixteen)."""
    if isinstance(batches[0], dict):
        of_names = {name: in_steps([batch[name] for batch in batches], seed, cut=cut) for name in batches[0]}
        return [dict(zip(of_names, step)) for step in zip(*of_names.values(), strict=True)]
    rows = torch.cat(list(batches))
    size = max(1, min(1024 // (rows.shape[1] if rows.dim() == 2 else 128), len(rows) // 32))
    steps = rows.split(size) if cut else batches
    order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed))
    return [steps[place] for place in order.argsort().tolist()]


def judging_outputs(steps: Sequence[Any]) -> list[Any]:
    """The steps on which the model's output is judged where something is tuned: the last quarter."""
    return [*steps[-max(1, len(steps) // 4) :]]


def token_batches(count: int = 3, batch: int = 2, length: int = 16, vocab: int = 97, seed: int = 1) -> list[Tensor]:
    """``count`` batches [batch, length] of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (batch, length), generator=generator) for _ in range(count)]


def correlated_inputs(tokens: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs [tokens, columns] whose Gram matrix has a decaying spectrum and a few outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    spectrum = torch.arange(1, columns + 1, dtype=torch.float64) ** -0.7
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) * spectrum @ mix
    x[:, :: max(columns // 4, 1)] *= 5
    return x.to(dtype)


def calibrated_run(model: nn.Module, method: Any, **options: Any) -> tuple[Run, CalibrationData]:
    """What `sparsify` prepares before it looks at the first block, by its own parts."""
    resolved, config = resolve(method, None, {"progress": False, **options})
    plan = plan_for(model, resolved, config)
    run = Run(model, plan, config, InMemory(), Processes.of(config.distributed), Report())
    return run, CalibrationData.load(run)


def trained_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=dtype)


def trained_windows(file: str, length: int = 512) -> Tensor:
    """A testbed text as windows [n, length] of token ids, by the protocol of its README."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / file).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def state_of(model: nn.Module) -> dict[str, tuple[type, Tensor]]:
    """Every parameter and buffer, copied, with the class of the module that holds it."""
    state = {}
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            state[f"{path}.{name}"] = (type(module), tensor.detach().clone())
    return state


def assert_same_state(model: nn.Module, before: dict[str, tuple[type, Tensor]]) -> None:
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, (cls, tensor) in after.items():
        assert cls is before[name][0], name
        assert_bits(tensor, before[name][1])


def assert_same_masks(model: nn.Module, expected: nn.Module | Mapping[str, Tensor]) -> None:
    """``expected``: masks by name, or a model that carries them."""
    masks = dict(named_masks(expected) if isinstance(expected, nn.Module) else expected)
    found = dict(named_masks(model))
    assert found.keys() == masks.keys()
    for name, mask in found.items():
        assert torch.equal(mask, masks[name]), name


def plain_from_pretrained(folder: Path, kind: Any = LlamaForCausalLM) -> nn.Module:
    """Loaded by transformers alone, with nothing missing and nothing left over."""
    model, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model


def assert_bits(a: Tensor, b: Tensor) -> None:
    """Equal to the bit, signs of zeros included."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    as_bytes = [x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    assert torch.equal(*as_bytes)


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert_bits(a[name], b[name])


MASKS_ALIKE, NUMBERS_ALIKE = 0.99, 0.98  # of the places


def assert_alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """States that sums of other roundings lead to: in 99 % of all places masks are equal, and in 98 % numbers differ by
    at most a thousandth of the largest of their tensor. Where a tie falls elsewhere, its row changes."""
    assert one.keys() == other.keys()
    masks: list[Tensor] = []
    numbers: list[Tensor] = []
    for name, a in one.items():
        b = other[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.dtype == torch.bool:
            masks.append((a == b).flatten())
        else:
            numbers.append(((a - b).abs() <= 1e-3 * a.abs().max()).flatten())
    for places, share in ((masks, MASKS_ALIKE), (numbers, NUMBERS_ALIKE)):
        assert not places or float(torch.cat(places).float().mean()) >= share


class Snapshot:
    """A model as it is now, to say later what has changed: ``look`` holds what can be compared, by kind and name."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())  # alive as long as their ids are compared
        self.look: dict[tuple[str, str], object] = {
            ("switches", ""): (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()),
            ("report", ""): id(getattr(model, "sparsity_report", None)),
        }
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        for path, module in model.named_modules():
            use_cache = getattr(getattr(module, "config", None), "use_cache", None)
            self.look["class", path] = type(module)
            self.look["attributes", path] = set(vars(module))
            self.look["flags", path] = (module.training, use_cache, [len(getattr(module, kind)) for kind in hooks])
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                values = tensor.detach().contiguous().flatten()
                as_bytes = None if tensor.is_meta else values.view(torch.uint8).numpy().tobytes()
                about = (tensor.dtype, tensor.shape, tensor.requires_grad)
                self.look["tensor", f"{path}.{name}".strip(".")] = (id(module), about, as_bytes)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.look["parameter", name] = id(parameter)


def refused(
    call: Callable[..., Any],
    *arguments: Any,
    match: str | None = None,
    parts: Sequence[str] = (),
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
    **options: Any,
) -> str:
    """``call(*arguments, **options)`` raises an ``error`` -> the message, which the pattern ``match`` fits, and which
    holds all ``parts``.

    If the first argument is a model, it is as it was, and the message holds every path among the others.
    """
    model = arguments[0] if arguments and isinstance(arguments[0], nn.Module) else None
    before = None if model is None else Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    paths = [str(argument) for argument in arguments if model is not None and isinstance(argument, Path)]
    for part in [*parts, *paths]:
        assert part in message, message
    if model is not None and before is not None:
        after = Snapshot(model)
        changed = [key for key in {**before.look, **after.look} if before.look.get(key) != after.look.get(key)]
        assert not changed, changed
    return message


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_python(*arguments: object, timeout: float = 1500, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new Python process in the project's root, on one thread; its output is captured."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@dataclass(frozen=True)
class Done:
    """What a command ended with."""

    code: int
    out: str
    err: str

    def well(self) -> str:
        """What it printed; it has nothing to complain of."""
        assert (self.code, self.err) == (0, "")
        return self.out

    def wrong(self, *parts: str) -> None:
        """Exit code 2, nothing printed, and these parts in the error."""
        assert (self.code, self.out, self.err[:17]) == (2, "", "modelopt-sparse: ")
        assert all(part in self.err for part in parts), self.err


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are alive, now and at the peak."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and not x.is_meta and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return output

    def _count(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)
