"""2:4 against dense on this GPU: each layer shape of an 8B Llama, and a random model of its shape end to end.

    python examples/benchmarks/semi_structured.py

prints two tables and writes OUT.md and OUT.json. README.md beside this file says what is measured. Needs a CUDA device.
"""

import argparse
import datetime
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import modelopt_sparse as mts
from modelopt_sparse.model.hf import cache_name
from modelopt_sparse.reports.report import library_versions
from modelopt_sparse.runtime.timing import Timer, eager_seconds

HERE = Path(__file__).resolve().parent
SHAPES = {  # of Llama-3-8B: rows x columns
    "q_proj, o_proj": (4096, 4096),
    "k_proj, v_proj": (1024, 4096),
    "gate_proj, up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
BATCHES = (1, 16, 64, 256)
ANY = 1e-9  # a min_speedup that packs whatever can be packed
Pack = Callable[..., Any]


class Failed(Exception):
    """A measurement that could not be made here; the text is one line."""


# one layer ----------------------------------------------------------------------------------------------------------


def sparse_linear(rows: int, columns: int, device: str) -> nn.Linear:
    """A bfloat16 Linear [rows, columns] whose weight is 2:4."""
    layer = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.masked_fill_(~mts.NM(2, 4).mask(layer.weight.abs()), 0)
    return layer


def measure_layer(name: str, given: argparse.Namespace, pack: Pack) -> list[dict[str, Any]]:
    """Seconds of one shape at each token count, dense and 2:4, in bfloat16. Raises Failed if the layer cannot be
    packed."""
    rows, columns = SHAPES[name]
    layer = sparse_linear(rows, columns, given.device)
    try:
        pack(layer, tune=given.tokens, min_speedup=ANY)
    except ValueError as error:
        raise Failed(one_line(error)) from error
    (entry,) = mts.semi_structured_report(layer).layers
    if not entry.timings:
        raise Failed(entry.reason)
    return [
        {
            "layer": name,
            "shape": f"{rows} x {columns}",
            "tokens": timing.tokens,
            "dense": timing.dense,
            "dense_library": timing.dense_library,
            "sparse": timing.sparse,
            "algorithm": list(timing.algorithm),
            "speedup": timing.speedup,
            "bytes": entry.bytes,
            "dense_bytes": entry.dense_bytes,
        }
        for timing in entry.timings
    ]


# the model ----------------------------------------------------------------------------------------------------------


def random_llama(layers: int, device: str, **changes: Any) -> Any:
    """A Llama-3-8B of random weights with so many decoder layers, bfloat16, its block layers 2:4, in plain modules."""
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
    }
    config = LlamaConfig(**{**shape, "num_hidden_layers": layers, **changes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    return mts.sparsify(model, "magnitude", pattern="2:4", enforce=False, progress=False)


def prefill(model: Any, tokens: int) -> Callable[[], Any]:
    """A call that takes one prompt of so many tokens and gives the logits of its last one."""
    ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)
    return lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, batch: int, context: int) -> Callable[[], Any]:
    """A call that takes the next token of each of ``batch`` sequences after ``context`` tokens, again and again."""
    ids = torch.ones(batch, context, dtype=torch.long, device=model.device)
    name = cache_name(model)
    cache = {name: getattr(model(input_ids=ids, use_cache=True, logits_to_keep=1), name)}
    one = ids[:, :1]

    def call() -> Tensor:
        logits = model(input_ids=one, **cache, use_cache=True, logits_to_keep=1).logits
        cache[name].crop(-1)
        return logits

    return call


def variants(given: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Ways to run the model -> options of to_semi_structured; None is dense."""
    counts = tuple(sorted({*given.tokens, *given.batches}))
    found: dict[str, dict[str, Any] | None] = {"dense": None, "2:4": {"tune": None}}
    found["2:4 where faster"] = {"tune": counts}
    return found


def measure_model(model: Any, given: argparse.Namespace, pack: Pack, timer: Timer) -> dict[str, Any]:
    """Seconds of a prompt and of a decoding step, and the bytes of all weights, for each way to run the model; a text
    where it failed."""
    found: dict[str, Any] = {}
    for name, options in variants(given).items():
        progress(name)
        try:
            if options is not None:
                pack(model, **options)
                _refuse_dense(model, options)
            found[name] = timed_model(model, given, timer)
        except (ValueError, RuntimeError) as error:  # what this GPU, or its memory, does not take
            found[name] = one_line(error)
        mts.to_dense(model)
        gc.collect()
    return found


def _refuse_dense(model: Any, options: dict[str, Any]) -> None:
    report = mts.semi_structured_report(model)
    if not report.packed and options["tune"] is None:
        raise ValueError(f"no layer was packed: {next(layer.reason for layer in report.layers)}")


def timed_model(model: Any, given: argparse.Namespace, timer: Timer) -> dict[str, Any]:
    seconds = {}
    with torch.inference_mode():
        for tokens in given.tokens:
            seconds[f"prompt of {tokens}"] = timer([prefill(model, tokens)])
        for batch in given.batches:
            seconds[f"step of {batch} x 1 after {given.context}"] = timer([decode(model, batch, given.context)])
    report = getattr(model, "semi_structured_report", None)
    held = sum(parameter.nbytes for parameter in model.parameters())
    if report is not None:
        held = report.bytes + sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() < 2)
    return {"seconds": seconds, "bytes": held}


# tables -------------------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def layer_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| layer | shape | tokens | dense us | 2:4 us | dense / 2:4 |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for row in rows:
        start = f"| {row['layer']} | {row['shape']} |"
        if "failed" in row:
            lines.append(f"{start} failed: {row['failed'].replace('|', '/')} | | | |")
            continue
        figures = f"{row['dense'] * 1e6:.1f} | {row['sparse'] * 1e6:.1f} | {row['speedup']:.2f}"
        lines.append(f"{start} {row['tokens']} | {figures} |")
    return "\n".join(lines)


def model_table(found: dict[str, Any]) -> str:
    made = {name: one for name, one in found.items() if isinstance(one, dict)}
    lines = [f"| ms | {' | '.join(found)} |", "| --- |" + " ---: |" * len(found)]
    works = list(next(iter(made.values()))["seconds"]) if made else []
    for work in works:
        cells = [f"{made[name]['seconds'][work] * 1e3:.2f}" if name in made else "-" for name in found]
        lines.append(f"| {work} | {' | '.join(cells)} |")
    sizes = [f"{made[name]['bytes'] / 2**30:.2f}" if name in made else "-" for name in found]
    lines.append(f"| GiB of weights | {' | '.join(sizes)} |")
    lines += ["", *(f"- {name} failed: {one}" for name, one in found.items() if not isinstance(one, dict))]
    return "\n".join(lines).rstrip()


def text(results: dict[str, Any]) -> str:
    parts = [layer_table(results["layers"])] if results["layers"] else []
    if results["model"]:
        parts.append(f"Llama-3-8B of {results['settings']['layers']} decoder layers, random weights:")
        parts.append(model_table(results["model"]))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts.append(f"- {results['device']}\n- {versions}\n- {results['date']}")
    return "\n\n".join(parts) + "\n"


# the run ------------------------------------------------------------------------------------------------------------


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def counts(given: str) -> tuple[int, ...]:
    found = tuple(sorted({int(count) for count in given.split(",")}))
    if found[0] < 1:
        raise ValueError(given)
    return found


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=counts, default=TOKENS, help="rows of a layer's input, tokens of a prompt")
    parser.add_argument("--batches", type=counts, default=BATCHES, help="sequences of a decoding step")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decoding step")
    parser.add_argument("--layers", type=int, default=32, help="decoder layers of the model; 0 leaves it out")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "semi_structured", help="writes OUT.md, OUT.json"
    )
    return parser.parse_args(given)


def measure(given: argparse.Namespace, pack: Pack, timer: Timer, **changes: Any) -> dict[str, Any]:
    """All results: rows of layers, the model's times, and what they were made with."""
    rows: list[dict[str, Any]] = []
    for name, (height, width) in SHAPES.items():
        progress(name)
        try:
            rows += measure_layer(name, given, pack)
        except Failed as error:
            rows.append({"layer": name, "shape": f"{height} x {width}", "failed": str(error)})
    model = None
    if given.layers:
        progress("model")
        llama = random_llama(given.layers, given.device, **changes)
        model = measure_model(llama, given, pack, timer)
    return {
        "device": torch.cuda.get_device_name(given.device) if torch.cuda.is_available() else given.device,
        "versions": {
            **library_versions(),
            "CUDA": str(torch.version.cuda),
            "cuSPARSELt": str(torch.backends.cusparselt.version()),
        },
        "date": datetime.date.today().isoformat(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "layers": rows,
        "model": model,
    }


def main() -> None:
    given = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("semi_structured.py: 2:4 kernels run on CUDA devices (Ampere or later) and there is none here")
    torch.cuda.set_device(given.device)  # the timer goes by the current device
    results = measure(given, mts.to_semi_structured, eager_seconds)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(text(results), encoding="utf-8")
    print(text(results), end="")


if __name__ == "__main__":
    main()
