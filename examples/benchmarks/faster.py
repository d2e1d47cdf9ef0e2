"""How much faster smaller models run on this CPU, beside zeros that stay in dense kernels, and with 8-bit weights.

    python examples/benchmarks/faster.py --threads 1

A Llama of random weights, made smaller or sparse as `shrink` and `sparsify` make any other: time does not depend on
what the weights are. Calls of all variants take turns, and the least seconds of each count, so that other work on the
machine disturbs them little. int8 is `torch.ao.quantization.quantize_dynamic` of all Linear layers.
"""

import argparse
import copy
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.model.hf import cache_name

PROMPT = 128
SIZES: dict[str, dict[str, Any]] = {
    "a quarter of the channels off": {"mlp": 0.25},
    "half of the channels off": {"mlp": 0.5},
    "a third of the blocks off": {"blocks": [4, 5, 6, 7]},
    "a third of the blocks and half of the channels off": {"blocks": [4, 5, 6, 7], "mlp": 0.5},
}


def dense(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=12,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
    )
    return LlamaForCausalLM(config).eval()


def variants(model: LlamaForCausalLM) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {"dense": model}
    sparse = mts.sparsify(copy.deepcopy(model), "magnitude", pattern="2:4", progress=False)
    made["2:4 zeros in dense kernels"] = mts.export(sparse)
    data = [torch.randint(8192, (2, 64)) for _ in range(2)]
    for title, size in SIZES.items():
        how = {"criterion": "norm", "refit": False} if "mlp" in size else {}
        made[title] = mts.shrink(copy.deepcopy(model), data_loader=data, progress=False, **size, **how).eval()
    for title in ("dense", "half of the channels off"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces another home of this
            quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(made[title]), {nn.Linear}, torch.qint8)
        made[f"{title}, int8"] = quantized
    return made


def calls_of(model: Any) -> dict[str, Callable[[], object]]:
    prompt, cache = torch.randint(8192, (1, PROMPT)), DynamicCache()
    held = {cache_name(model): cache}
    model(input_ids=prompt, **held)

    def token() -> None:
        model(input_ids=prompt[:, :1], **held)
        cache.crop(-1)

    return {"prompt": lambda: model(input_ids=prompt, use_cache=False), "token": token}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="hidden size (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = variants(dense(given.width))
    calls = {title: calls_of(model) for title, model in models.items()}
    least: dict[tuple[str, str], float] = {}
    for _ in range(given.rounds):
        for title, of_model in calls.items():
            for what, call in of_model.items():
                began = time.perf_counter()
                call()
                key = title, what
                least[key] = min(least.get(key, float("inf")), time.perf_counter() - began)
    print(
        f"{given.width} wide, 12 blocks, float32, {given.threads} threads of a {platform.machine()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}\n\n"
        f"| | parameters | ms, {PROMPT} tokens | times | ms, one token | times |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for title in models:
        plain = models[title.removesuffix(", int8")]
        share = sum(p.numel() for p in plain.parameters()) / sum(p.numel() for p in models["dense"].parameters())
        cells = [title, f"{share:.0%}"]
        for what in ("prompt", "token"):
            cells += [f"{1e3 * least[title, what]:.1f}", f"{least['dense', what] / least[title, what]:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
