"""CPU seconds of a quality by part, on one thread: on the testbed, or on a random Llama of two blocks.

    python examples/benchmarks/quality_profile.py --width 768 balanced fast
    python examples/benchmarks/quality_profile.py balanced best max       # the testbed
    python examples/benchmarks/quality_profile.py --inside 30 balanced    # and the functions that take most

The random model's weights come from t distributions, and its channels differ in size by a factor that does: channels
that all matter alike have no order that is better than others. Python's own profiler tells the parts apart, with the
processor time of this process as its clock. What the table calls passes is all that no other part is: the model's
forwards over the data, Gram matrices, and what a call costs anyhow.
"""

import argparse
import cProfile
import platform
import pstats
import time
from pathlib import Path

import torch
from measure import cut, load
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.reports.report import library_versions

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
PARTS = {  # part -> the end of a file's path and a function in it
    "permute": [("accuracy/permute.py", "permute")],
    "solver": [("solving/solve.py", "solve_layer")],
    "reconstruct": [("accuracy/reconstruct.py", name) for name in ("dense_goals", "reconstruct")],
    "metric": [("accuracy/fisher.py", "with_metrics")],
    "own text": [("calibration/own_text.py", "own_calls")],
    "distill": [("accuracy/distill.py", name) for name in ("of", "distill")],
}


def random_llama(width: int, vocabulary: int) -> LlamaForCausalLM:
    """Two blocks: heads of 64, half as many of keys and values, an MLP of 8 / 3 of the width."""
    torch.manual_seed(0)
    heads, wide = width // 64, width * 8 // 3
    shape = {"hidden_size": width, "intermediate_size": wide, "num_hidden_layers": 2, "vocab_size": vocabulary}
    config = LlamaConfig(
        **shape, num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=1024
    )
    model = LlamaForCausalLM(config).eval()
    heavy = torch.distributions.StudentT(4.0)
    with torch.no_grad():
        for layer in model.model.modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                sizes = (heavy.sample((rows, 1)) / 4).exp() * (heavy.sample((1, columns)) / 4).exp()
                layer.weight.copy_(heavy.sample((rows, columns)) * sizes.clamp(0.1, 10) / columns**0.5 / 2)
    return model


def profile(model: nn.Module, batches: list[Tensor], options: dict[str, str]) -> tuple[float, dict[str, float], object]:
    """CPU seconds in all, those of each part, and all that the profiler has seen."""
    profiler = cProfile.Profile(time.process_time)
    began = time.process_time()
    profiler.enable()
    mts.sparsify(model, data_loader=batches, pattern="2:4", progress=False, **options)
    profiler.disable()
    total = time.process_time() - began
    stats = pstats.Stats(profiler)
    parts = {
        part: sum(
            cumulative
            for (file, _, name), (_, _, _, cumulative, _) in stats.stats.items()  # type: ignore[attr-defined]
            if any(name == function and file.endswith(path) for path, function in functions)
        )
        for part, functions in PARTS.items()
    }
    return total, {**parts, "passes": total - sum(parts.values())}, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qualities", nargs="+", help="fast, balanced, best, max, or the names of methods")
    parser.add_argument("--width", type=int, help="of a random Llama; without it the testbed is profiled")
    parser.add_argument("--windows", type=int, help="of 512 tokens (128 on the testbed, else 16)")
    parser.add_argument("--inside", type=int, default=0, metavar="N", help="also the N functions that take most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / "calibration.txt").read_text(encoding="utf-8")
    count, size = (16, 4) if given.width else (128, 8)
    batches = list(cut(tokenizer, text, given.windows or count).split(size))
    print(f"| CPU seconds | all | {' | '.join([*PARTS, 'passes'])} |")
    print(f"| --- |{' ---: |' * (len(PARTS) + 2)}")
    for quality in given.qualities:
        model = random_llama(given.width, len(tokenizer)) if given.width else load(TESTBED / "tiny-llama")
        named = {"quality": quality} if quality in ("fast", "balanced", "best", "max") else {"method": quality}
        total, parts, stats = profile(model, batches, named)
        where = f"width {given.width}" if given.width else "testbed"
        cells = (f"{seconds:.1f}" for seconds in (total, *parts.values()))
        print(f"| {quality}, {where} | {' | '.join(cells)} |", flush=True)
        if given.inside:
            stats.sort_stats("tottime").print_stats(given.inside)
    versions = ", ".join(" ".join(item) for item in library_versions().items())
    print(f"\n2:4, {sum(map(len, batches))} windows of 512 tokens, one thread; {platform.processor()}; {versions}")


if __name__ == "__main__":
    main()
