"""Train a small model of another family than the testbed's, to check figures on a model nothing was tuned on.

    python examples/benchmarks/train_model.py opt --out models/opt

Language models learn the testbed's calibration text in ten to fifteen minutes on one core, with the testbed's
tokenizer. "opt": learned positions, LayerNorm, biases, ReLU. "qwen3": normalized queries and keys, output head of its
own. "neox": parallel attention and MLP, fused queries, keys and values, partial rotary positions. "vit": no language
model; it learns to tell gratings by their direction, from images made by a formula (`gratings`).
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from measure import cut
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen3Config,
    ViTConfig,
    ViTForImageClassification,
)

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
BATCH_SIZE = 8
PEAK, WARM_UP = 2e-3, 50  # learning rate, steps
VOCABULARY = 2048
DIRECTIONS, IMAGE, IMAGES_OF_A_STEP = 16, 32, 64


def configuration(family: str):
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 0}
    if family == "opt":
        shape = {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 5, "ffn_dim": 640}
        return OPTConfig(**sizes, **shape, word_embed_proj_dim=160, dropout=0.0, pad_token_id=None)
    if family == "qwen3":
        shape = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 32}
        return Qwen3Config(**sizes, **shape, num_key_value_heads=4, intermediate_size=512, tie_word_embeddings=False)
    shape = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 768}
    return GPTNeoXConfig(**sizes, **shape, rotary_pct=0.25)


def gratings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 32, 32] of sine waves in noise, and the classes of their directions [count]."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(DIRECTIONS, (count,), generator=random)
    angle = (classes + 0.2 * torch.randn(count, generator=random)) * math.pi / DIRECTIONS
    waves = 2 + 3 * torch.rand(count, generator=random)  # across the image
    phase = 2 * math.pi * torch.rand(count, generator=random)
    y, x = torch.meshgrid(*[torch.linspace(0, 1, IMAGE)] * 2, indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    wave = (2 * math.pi * waves[:, None, None] * along + phase[:, None, None]).sin()
    colour = torch.randn(count, 3, 1, 1, generator=random)
    return colour * wave[:, None] + torch.randn(count, 3, IMAGE, IMAGE, generator=random), classes


def train_vit(out: Path, epochs: int, count: int) -> None:
    config = ViTConfig(
        image_size=IMAGE, patch_size=4, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512, num_labels=DIRECTIONS,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    images, classes = gratings(count, seed=1)
    train(
        model,
        lambda chosen: {"pixel_values": images[chosen], "labels": classes[chosen]},
        len(images),
        IMAGES_OF_A_STEP,
        epochs,
        torch.optim.AdamW(model.parameters(), lr=PEAK / 2, betas=(0.9, 0.95), weight_decay=0.05),
    )
    model.eval().save_pretrained(out)


def train(
    model: PreTrainedModel,
    batch_of: Callable[[Tensor], dict[str, Tensor]],
    samples: int,
    size: int,
    epochs: int,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Epochs over shuffled samples in whole batches of a size; the rate rises shortly, then falls to 0 as a cosine."""
    steps = epochs * (samples // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    with tqdm(total=steps, desc=model.config.model_type, unit="step") as bar:
        for _ in range(epochs):
            for chosen in torch.randperm(samples)[: samples // size * size].split(size):
                loss = model(**batch_of(chosen)).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                bar.set_postfix(loss=f"{loss.item():.2f}")
                bar.update()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("opt", "qwen3", "neox", "vit"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=8192, help="that a vit learns from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    if options.family == "vit":
        train_vit(options.out, options.epochs, options.images)
        return
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    windows = cut(tokenizer, (TESTBED / "calibration.txt").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(configuration(options.family))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    train(
        model,
        lambda chosen: {"input_ids": windows[chosen], "labels": windows[chosen]},
        len(windows),
        BATCH_SIZE,
        options.epochs,
        optimizer,
    )
    model.eval().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
