"""What a short fine-tuning gives back to a 2:4 model, by cross-entropy and by the divergence from the dense model.

    python examples/benchmarks/distill.py                      # about half an hour on one busy core

The testbed is made 2:4 by SparseGPT, and by ALPS with permutation and reconstruction. Then it is trained for 100 steps
of 2,048 tokens (16 windows of 128 of the calibration text, AdamW, learning rate 5e-4 linear to 0), the masks fixed.
Perplexity and KL(dense || sparse) are those of the first 40 windows of 512 tokens of the held-out text, which nothing
is trained on.
"""

import argparse
import copy
import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import cut
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.training import distill

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
SPARSE = {
    "sparsegpt": {"method": "sparsegpt"},
    "reconstructed": {"method": "alps", "permute": True, "reconstruct": 16},
}
# what is trained on what: the sparse model, the name of the loss, and the weights that make it (none: the model's own)
RUNS: list[tuple[str, str, dict[str, float] | None]] = [
    ("sparsegpt", "cross-entropy", None),
    ("sparsegpt", "KL", {"kl": 1.0}),
    ("sparsegpt", "KL and SquareHead", {"kl": 1.0, "square_head": 1.0}),
    ("reconstructed", "KL", {"kl": 1.0}),
]
LENGTH, RATE = 128, 5e-4


def train(
    model: nn.Module, dense: nn.Module, rows: Tensor, options: argparse.Namespace, weights: dict[str, float] | None
) -> None:
    """Train the model in place, on batches of ``rows`` [n, LENGTH] in an order that the seed fixes."""
    steps, batch = options.steps, options.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: steps * batch]
    model.train()
    with distill(model, dense, **weights) if weights else nullcontext():
        for chosen in tqdm(order.split(batch), unit="step"):
            model(input_ids=rows[chosen], labels=rows[chosen], use_cache=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()


def measured(options: argparse.Namespace) -> Iterator[tuple[str, str, Any, float | None, float]]:
    """Of each row the sparse model's name, what it was trained by, its evaluation, the share of the divergence that
    training has left, and the seconds that the row took."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / "calibration.txt").read_text(encoding="utf-8")
    windows = cut(tokenizer, text)
    heldout = cut(tokenizer, (TESTBED / "heldout.txt").read_text(encoding="utf-8"), options.heldout)
    dense = AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=torch.float32).eval()

    def evaluate(model: nn.Module) -> Any:
        return mts.evaluate(model, heldout.flatten(), seq_len=heldout.shape[1], reference=dense, progress=False)

    made: dict[str, tuple[nn.Module, float]] = {}
    for name, loss, weights in RUNS:
        if loss not in options.losses or name not in options.start:
            continue
        start = time.perf_counter()
        if name not in made:
            calibration = list(windows[: options.calibration].split(8))
            model = copy.deepcopy(dense)
            mts.sparsify(model, pattern="2:4", data_loader=calibration, progress=False, **SPARSE[name])
            untrained = evaluate(model)
            made[name] = model, untrained.kl
            yield name, "", untrained, None, time.perf_counter() - start
            start = time.perf_counter()
        model, kl = copy.deepcopy(made[name][0]), made[name][1]
        train(model, dense, windows.view(-1, LENGTH), options, weights)
        mts.verify(model, "2:4")
        trained = evaluate(model)
        yield name, loss, trained, trained.kl / kl, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    losses = list(dict.fromkeys(loss for _, loss, _ in RUNS))
    parser.add_argument("--steps", type=int, default=100, help="of training (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {LENGTH} tokens in a step (%(default)s)")
    parser.add_argument("--calibration", type=int, default=128, help="windows of 512 tokens (%(default)s)")
    parser.add_argument("--heldout", type=int, default=40, help="windows of 512 tokens (%(default)s)")
    parser.add_argument("--start", nargs="+", choices=SPARSE, default=list(SPARSE), help="sparse models (all)")
    parser.add_argument("--losses", nargs="+", choices=losses, default=losses, help="what to train by (all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.processor() or platform.machine()}, {options.threads} threads\n\n"
        "| 2:4 by | trained by | held-out KL | perplexity | share of the KL left | seconds |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |"
    )
    for name, loss, found, left, seconds in measured(options):
        share = "" if left is None else f"{left:.1%}"
        cells = [name, loss, f"{found.kl:.3f}", f"{found.perplexity:.3f}", share, f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        dense = found.reference_perplexity
    print(f"\nThe dense model has a perplexity of {dense:.3f}.")


if __name__ == "__main__":
    main()
