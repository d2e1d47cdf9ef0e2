"""KL from dense of the embedded model at unstructured patterns, by how the zeros are shared out over the layers.

Calibration on the first 128 windows of 512 tokens, evaluation on the first 100 held-out windows, in float32.
"""

import argparse
import os

import torch
import transformers
from compare_methods import SEQ_LEN, load, windows

import modelopt_sparse as mts
from modelopt_sparse.plan.options import CHOICES

RECIPES = {
    "`sparsegpt`": {"method": "sparsegpt"},
    "`alps`": {"method": "alps"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=128, metavar="N", help="calibration windows (128)")
    parser.add_argument("--heldout", type=int, default=100, metavar="N", help="held-out windows (100)")
    parser.add_argument("--patterns", default="60%,70%", help="60%%,70%%")
    given = parser.parse_args()

    batches, heldout = windows("calibration.txt", given.calibration).split(8), windows("heldout.txt", given.heldout)
    print(
        f"tiny-llama, float32, KL from dense on {len(heldout)} windows of {SEQ_LEN} tokens; {os.cpu_count()}-core CPU, "
        f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    allocations = CHOICES["allocation"]
    print(f"| pattern | recipe | {' | '.join(allocations)} |\n| --- | --- |{' ---: |' * len(allocations)}")
    dense = load()
    for pattern in given.patterns.split(","):
        for name, recipe in RECIPES.items():
            print(f"| {pattern} | {name} |", end="", flush=True)
            for allocation in allocations:
                model = load()
                mts.sparsify(
                    model, pattern=pattern, allocation=allocation, data_loader=batches, progress=False, **recipe
                )
                found = mts.evaluate(model, heldout.flatten(), seq_len=SEQ_LEN, reference=dense, progress=False)
                print(f" {found.kl:.3f} |", end="", flush=True)
            print()


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main()
