"""Held-out perplexity and KL from dense of the embedded model at 2:4, by every method and quality.

The protocol is that of examples/testbed/README.md (run k = 0): calibration on the first 128 windows of 512 tokens,
evaluation on all full windows of the held-out text, in float32.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.plan.options import QUALITIES

TESTBED = Path(__file__).parent / "testbed"
SEQ_LEN = 512


def windows(file: str, count: int | None) -> torch.Tensor:
    """The first ``count`` windows [n, SEQ_LEN] of a text, tokenized whole, or all of them."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / file).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids[: len(ids) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)[:count]


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=128, metavar="N", help="calibration windows (128)")
    parser.add_argument("--heldout", type=int, metavar="N", help="held-out windows (all 399)")
    given = parser.parse_args()

    batches = windows("calibration.txt", given.calibration).split(8)
    heldout = windows("heldout.txt", given.heldout)
    print(
        f"tiny-llama at 2:4, float32, perplexity on {len(heldout)} windows of {SEQ_LEN} tokens; "
        f"{os.cpu_count()}-core CPU, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print("| method | perplexity | KL | seconds |\n| --- | ---: | ---: | ---: |")
    dense = load()
    found = mts.evaluate(dense, heldout.flatten(), seq_len=SEQ_LEN, progress=False)
    print(f"| dense | {found.perplexity:.2f} | 0 | |", flush=True)
    rows = {f"`{method}`": {"method": method} for method in METHODS}
    rows |= {f'`quality="{quality}"`': {"quality": quality} for quality in QUALITIES}
    for name, how in rows.items():
        model = load()
        began = time.perf_counter()
        data = {} if how == {"method": "magnitude"} else {"data_loader": batches}
        mts.sparsify(model, pattern="2:4", progress=False, **how, **data)
        seconds = time.perf_counter() - began
        found = mts.evaluate(model, heldout.flatten(), seq_len=SEQ_LEN, reference=dense, progress=False)
        print(f"| {name} | {found.perplexity:.2f} | {found.kl:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main()
