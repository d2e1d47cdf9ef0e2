"""An image classifier at 2:4: trained, pruned in one call, fine-tuned while its masks hold.

    python examples/vision.py
    python examples/vision.py --model cnn

The images are waves in noise, made by a formula (`gratings`), so that nothing has to be downloaded. The classifier
tells 16 directions apart. The table has its accuracy on images that nothing has seen. docs/vision.md is about this.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

import modelopt_sparse as mts

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from train_model import DIRECTIONS, IMAGE, gratings

BATCH_SIZE = 64


def vit(width: int) -> nn.Module:
    """A vision transformer of four blocks; an image is 16 patches."""
    config = ViTConfig(
        image_size=IMAGE, patch_size=8, hidden_size=width, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=4 * width, num_labels=DIRECTIONS,
    )  # fmt: skip
    return ViTForImageClassification(config)


class CNN(nn.Module):
    """Convolutions, each with its batch norm, and a linear classifier, as torchvision's models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        features: list[nn.Module] = []
        for before, after, stride in [(3, width, 1), (width, width, 2), (width, wide, 2), (wide, wide, 2)]:
            features += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(wide, DIRECTIONS)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


MODELS = {"vit": (vit, 64, 600), "cnn": (CNN, 32, 300)}  # with their widths, and steps of training


def logits(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits


def train(model: nn.Module, images: Tensor, classes: Tensor, steps: int, rate: float) -> float:
    """Steps of AdamW on random batches; the rate rises over 50, then falls to 0 as a cosine. Returns CPU seconds."""
    began = time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    warm_up = min(50, steps // 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - warm_up, 1)),
        ],
        [warm_up],
    )
    model.train()
    for _ in tqdm(range(steps), unit="step", disable=None):
        chosen = torch.randint(len(images), (BATCH_SIZE,))
        nn.functional.cross_entropy(logits(model, images[chosen]), classes[chosen]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    return time.process_time() - began


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    right = [(logits(model, x).argmax(-1) == y).sum() for x, y in zip(images.split(256), classes.split(256))]
    return float(sum(right)) / len(images)


@torch.no_grad()
def with_new_batch_norms(model: nn.Module, images: Tensor) -> nn.Module:
    """A copy whose batch norms have seen these images: what they normalize has changed with the weights before them."""
    model = copy.deepcopy(model).train()
    for batch in images.split(BATCH_SIZE):
        logits(model, batch)
    return model.eval()


def zeros(model: nn.Module) -> float:
    """The share of zeros in the weights of all pruned layers, counted in the weights themselves."""
    weights = [model.get_parameter(name) for name, _ in mts.named_masks(model)]
    return sum(int((weight == 0).sum()) for weight in weights) / max(sum(weight.numel() for weight in weights), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit")
    parser.add_argument("--width", type=int, help="channels (vit: 64, cnn: 32)")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["magnitude", "wanda", "sparsegpt"])
    parser.add_argument("--steps", type=int, help="of training (vit: 600, cnn: 300)")
    parser.add_argument("--fine-tune", type=int, default=150, metavar="STEPS", help="after the last of the methods")
    parser.add_argument("--images", type=int, default=8192, help="to train on")
    parser.add_argument("--calibration", type=int, default=512, metavar="IMAGES", help="the first of these")
    parser.add_argument("--held-out", type=int, default=2048, metavar="IMAGES")
    parser.add_argument("--out", type=Path, help="folder to save the sparse model in")
    options = parser.parse_args()

    torch.manual_seed(0)
    make, width, steps = MODELS[options.model]
    dense = make(options.width or width)
    images, classes = gratings(options.images, seed=1)
    held_out = gratings(options.held_out, seed=2)
    print("| model | accuracy | zeros in pruned layers | CPU seconds |\n| --- | ---: | ---: | ---: |")

    def row(name: str, model: nn.Module, seconds: float) -> None:
        print(f"| {name} | {accuracy(model, *held_out):.2%} | {zeros(model):.2%} | {seconds:.0f} |", flush=True)

    row("dense", dense, train(dense, images, classes, options.steps or steps, 1e-3))

    model = dense
    for method in options.methods:
        model = copy.deepcopy(dense)
        calibration = images[: options.calibration]
        data = {} if method == "magnitude" else {"data_loader": calibration.split(BATCH_SIZE)}
        began = time.process_time()
        mts.sparsify(model, method, pattern="2:4", progress=False, **data)
        row(f"2:4 by {method}", model, time.process_time() - began)
        if options.model == "cnn":
            began = time.process_time()
            renewed = with_new_batch_norms(model, calibration)
            row(f"{method}, batch norms renewed", renewed, time.process_time() - began)

    # masks hold by themselves; the same steps for the dense model, to see what training longer would bring
    row(f"the last, {options.fine_tune} steps later", model, train(model, images, classes, options.fine_tune, 3e-4))
    row(f"dense, {options.fine_tune} steps later", dense, train(dense, images, classes, options.fine_tune, 3e-4))

    print(f"\n{mts.verify(model, '2:4')}")
    print(
        f"\n{options.model}, {len(held_out[0])} held-out images; {os.cpu_count()}-core CPU, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    if options.out:
        mts.save(model, options.out)


if __name__ == "__main__":
    main()
