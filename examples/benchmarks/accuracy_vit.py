"""2:4 of a vision transformer at every quality: the KL divergence of its logits on images that nothing has seen.

    python examples/benchmarks/train_model.py vit --out models/vit
    python examples/benchmarks/accuracy_vit.py --model models/vit

Calibrated on 1,024 images (66,560 tokens) in batches of 16, about as many tokens as a step has of text.
"""

import argparse
import time
from pathlib import Path

import torch
from tools import machine
from train_model import gratings
from transformers import ViTForImageClassification

import modelopt_sparse as mts

BATCH_SIZE = 16
METHODS = ("sparsegpt", "alps", "quality=fast", "quality=balanced", "quality=best", "quality=max")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that train_model.py vit has written")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[0], help="0,1,2")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    parser.add_argument("--calibration", type=int, default=1024, help="images")
    parser.add_argument("--held-out", type=int, default=4096, help="images")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dense = ViTForImageClassification.from_pretrained(options.model).eval()
    images, classes = gratings(options.held_out, seed=2)
    with torch.no_grad():
        taught = dense(pixel_values=images).logits
    print("| method | right | KL | CPU seconds |\n| --- | ---: | ---: | ---: |")
    print(f"| dense | {right(taught, classes)} | 0 | |")
    for method in options.methods:
        divergence, cost, logits = [], [], taught
        for seed in options.seeds:
            model = ViTForImageClassification.from_pretrained(options.model)
            data = [{"pixel_values": x} for x in gratings(options.calibration, seed=100 + seed)[0].split(BATCH_SIZE)]
            chosen = {"quality": method.removeprefix("quality=")} if "=" in method else {"method": method}
            began = time.process_time()
            mts.sparsify(model, pattern="2:4", data_loader=data, progress=False, **chosen)
            cost.append(time.process_time() - began)
            with torch.no_grad():
                logits = model.eval()(pixel_values=images).logits
            divergence.append(float(kl(taught, logits)))
        mean, seconds = (sum(values) / len(values) for values in (divergence, cost))
        print(f"| {method} | {right(logits, classes)} | {mean:.5f} | {seconds:.0f} |", flush=True)
    print(f"\n{machine()}; {options.threads} threads; seeds {options.seeds}")


def kl(taught: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The mean over images of the KL divergence, in nats."""
    p, q = taught.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def right(logits: torch.Tensor, classes: torch.Tensor) -> str:
    return f"{(logits.argmax(-1) == classes).float().mean():.2%}"


if __name__ == "__main__":
    main()
