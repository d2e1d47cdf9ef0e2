"""Seconds per stage of one `sparsify` call on a Llama of random weights, beside what the device's own rates allow.

    python examples/benchmarks/solve_speed.py                       # the shapes of Llama-3-8B, 128 x 2048 tokens
    python examples/benchmarks/solve_speed.py --layers 4 --polish 10
    python examples/benchmarks/solve_speed.py --device cpu --tiny   # a try-out on a small model

Random weights and tokens say nothing about accuracy, and cost what real ones cost. The stages are timed from outside
the library: the method through an object that hands on to it, the blocks through hooks, the matrix multiplications of
Gram matrices through a function mode, polish through the report.
"""

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.reports.report import library_versions

EIGHT_B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WITHOUT_CUDA = "solve_speed.py: no CUDA device; --device cpu --tiny tries the script out on a small model"
SPARSEGPT = METHODS["sparsegpt"]
# what the library sums Gram matrices up with, inside of a block's forward; a Llama block calls none of them
PRODUCTS = {torch.mm, torch.bmm, Tensor.addmm_, Tensor.baddbmm_}
GRAM = {*PRODUCTS, Tensor.add_}


class Clock:
    """Adds up time by stage: on a CUDA device between events on its stream, so that nothing has to wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, stage: str, began: Any) -> None:
        self._spans.append((stage, began, self.now()))

    def seconds(self) -> Counter[str]:
        if self._cuda:
            torch.cuda.synchronize()
        total: Counter[str] = Counter()
        for stage, began, ended in self._spans:
            total[stage] += began.elapsed_time(ended) / 1000 if self._cuda else ended - began
        return total


class TimedSparseGPT(mts.Method):
    """SparseGPT itself, with a clock on its two functions."""

    name, needs, updates = SPARSEGPT.name, SPARSEGPT.needs, SPARSEGPT.updates
    options = SPARSEGPT.options

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def prepare(self, stats, options) -> Any:
        began = self._clock.now()
        state = SPARSEGPT.prepare(stats, options)
        self._clock.add("factorize", began)
        return state

    def solve(self, weight, state, pattern, options) -> mts.Solution:
        began = self._clock.now()
        solution = SPARSEGPT.solve(weight, state, pattern, options)
        self._clock.add("solve", began)
        return solution


class Blocks(TorchFunctionMode):
    """Times every call of the blocks, and in them the multiplications that make Gram matrices, whose operations it
    counts."""

    def __init__(self, blocks: nn.ModuleList, clock: Clock) -> None:
        super().__init__()
        self.gram_operations = 0
        self.calls = 0
        self._clock = clock
        self._began: Any = None
        for block in blocks:
            block.register_forward_pre_hook(self._enter, prepend=True)
            block.register_forward_hook(self._leave, prepend=True, always_call=True)  # also after an early exit

    def _enter(self, block: nn.Module, args: tuple) -> None:
        self._began = self._clock.now()

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        self._clock.add("blocks", self._began)
        self._began = None
        self.calls += 1

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._began is None or func not in GRAM:
            return func(*args, **(kwargs or {}))
        began = self._clock.now()
        result = func(*args, **(kwargs or {}))
        self._clock.add("gram", began)
        if func in PRODUCTS:
            left, right = args[-2:]
            self.gram_operations += 2 * left.numel() * right.shape[-1]
        return result


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of ten runs after two others."""
    spans = []
    for attempt in range(12):
        clock = Clock(device)
        began = clock.now()
        run()
        clock.add("run", began)
        if attempt >= 2:
            spans.append(clock.seconds()["run"])
    return max(min(spans), 1e-9)


def measured_rates(device: torch.device, dtype: torch.dtype, size: int) -> dict[str, float]:
    """Operations and bytes a second of the device, by large matrix multiplications and a large copy."""

    def rate(kind: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        return 2 * size**3 / best_seconds(lambda: a @ b, device)

    source = torch.empty(4 * size * size, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device)
    copied = 2 * source.numel() * source.element_size() / seconds
    return {"model_dtype": rate(dtype), "float32": rate(torch.float32), "copy_bytes": copied}


def floors(config: LlamaConfig, tokens: int, seq_len: int, polish: int, rates: dict[str, float]) -> dict[str, float]:
    """Seconds of each stage's matrix multiplications alone, at the measured rates: the forward pass once, with causal
    attention; of the Gram matrices, of which a block has four, the upper half; Cholesky factorizations; the updates of
    the sweep; one multiplication for each iteration of polish."""
    hidden, wide = config.hidden_size, config.intermediate_size
    assert config.num_key_value_heads is not None
    narrow = hidden * config.num_key_value_heads // config.num_attention_heads
    layers = [(hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden)]  # q, k, v, o as (rows, columns)
    layers += [(wide, hidden), (wide, hidden), (hidden, wide)]
    inputs = [hidden, hidden, hidden, wide]
    updates = sum(rows * columns**2 for rows, columns in layers)
    one_block = {
        "forward": (
            2 * tokens * sum(rows * columns for rows, columns in layers) + 2 * tokens * seq_len * hidden,
            "model_dtype",
        ),
        "gram": (sum(tokens * columns * (columns + 1) for columns in inputs), "model_dtype"),
        "factorize": (sum(columns**3 / 3 for columns in inputs), "float32"),
        "solve": (updates, "float32"),
        "polish": (2 * updates * polish, "float32"),
    }
    return {stage: config.num_hidden_layers * work / rates[kind] for stage, (work, kind) in one_block.items()}


@contextmanager
def peak_memory(device: torch.device, found: dict[str, Any]) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def random_llama(settings: dict[str, Any], layers: int, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(**settings, num_hidden_layers=layers, tie_word_embeddings=False, dtype=dtype)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def random_tokens(vocab: int, samples: int, seq_len: int, batch_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(vocab, (samples, seq_len), generator=generator).split(batch_size))


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = TINY if options.tiny else EIGHT_B
    torch.manual_seed(0)
    if device.type == "cuda":  # what a process does once: libraries, Triton's compiler
        small = random_llama({**TINY, "hidden_size": 256, "intermediate_size": 512}, 1, device, dtype)
        mts.sparsify(
            small,
            pattern=options.pattern,
            polish=options.polish,
            data_loader=random_tokens(TINY["vocab_size"], 4, 64, 2),
            progress=False,
        )
        del small
    rates = measured_rates(device, dtype, 256 if options.tiny else 8192)
    model = random_llama(settings, options.layers, device, dtype)
    batches = random_tokens(settings["vocab_size"], options.samples, options.seq_len, options.batch_size)
    clock, found = Clock(device), {}
    timed = Blocks(model.model.layers, clock)
    with peak_memory(device, found), timed:
        began = time.perf_counter()
        mts.sparsify(
            model,
            TimedSparseGPT(clock),
            pattern=options.pattern,
            polish=options.polish,
            data_loader=batches,
            progress=False,
        )
        spent = clock.seconds()  # waits for the device
        wall = time.perf_counter() - began
    report = mts.report(model)
    assert isinstance(report, mts.Report)
    stages = {
        "forward": spent["blocks"] - spent["gram"],
        "gram": spent["gram"],
        "factorize": spent["factorize"],
        "solve": spent["solve"],
        "polish": sum(step.seconds for layer in report.layers for step in layer.steps if step.step == "polish"),
    }
    stages["other"] = wall - sum(stages.values())
    tokens = sum(batch.numel() for batch in batches)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": library_versions(),
        "options": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "model": {**settings, "num_hidden_layers": options.layers, "dtype": str(dtype)},
        "tokens": tokens,
        "passes": timed.calls / (options.layers * len(batches)),
        "gram_operations": timed.gram_operations,
        "rates": rates,
        "wall_seconds": wall,
        **found,
        "seconds": stages,
        "floor_seconds": floors(model.config, tokens, options.seq_len, options.polish, rates),
    }


def table(found: dict[str, Any]) -> str:
    lines = ["| stage | seconds | floor | times the floor |", "| --- | ---: | ---: | ---: |"]
    for stage, seconds in found["seconds"].items():
        floor = found["floor_seconds"].get(stage, 0.0)
        cells = [f"{floor:.3f}", f"{seconds / floor:.1f}"] if floor else ["-", "-"]
        lines.append(f"| {stage} | {seconds:.3f} | {cells[0]} | {cells[1]} |")
    floor = sum(found["floor_seconds"].values())
    lines.append(f"| all | {found['wall_seconds']:.3f} | {floor:.3f} | {found['wall_seconds'] / floor:.1f} |")
    rates = found["rates"]
    lines += [
        "",
        f"{found['device']}; {found['model']['num_hidden_layers']} blocks, {found['tokens']} tokens, "
        f"{found['passes']:.2f} passes over the blocks begun (the floor: 1)",
        f"measured: {rates['model_dtype'] / 1e12:.3g} TFLOP/s in {found['model']['dtype']}, "
        f"{rates['float32'] / 1e12:.3g} in float32, copies {rates['copy_bytes'] / 1e9:.3g} GB/s",
    ]
    if found["peak_gib"] is not None:
        lines.append(f"peak device memory {found['peak_gib']:.1f} GiB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model on few tokens, to try the script out")
    parser.add_argument("--layers", type=int, help="blocks (32; 2 with --tiny)")
    parser.add_argument("--samples", type=int, help="sequences (128; 4 with --tiny)")
    parser.add_argument("--seq-len", type=int, help="tokens of each (2048; 32 with --tiny)")
    parser.add_argument("--batch-size", type=int, help="sequences in a batch (8; 2 with --tiny)")
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--polish", type=int, default=10, help="iterations, 0 for none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "solve_speed.json")
    options = parser.parse_args()
    defaults = (2, 4, 32, 2) if options.tiny else (32, 128, 2048, 8)
    for name, value in zip(("layers", "samples", "seq_len", "batch_size"), defaults):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(WITHOUT_CUDA)
    found = run(options)
    print(table(found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
