"""Methods and qualities on models of plain PyTorch that nobody tuned them on: divergence from the dense model at 2:4.

    python examples/benchmarks/plain_models.py mlp encoder unet lists gpt2

Each model is trained here for --steps, on data that are drawn without end:
mlp: four linear layers, 256 wide, that learn two functions of 32 numbers.
encoder: nn.TransformerEncoder, 128 wide with 4 layers, that tells which of five characters is the most frequent.
unet: convolutions down and up with group norms and skips, that take noise, whose strength they are told, from gratings.
lists: a vision transformer, 128 wide, whose 4 blocks are lists of an attention and an MLP; it tells directions.
gpt2: transformers' GPT-2, 128 wide with 4 blocks, on the characters of the testbed's text.

Calibration has 256 rows (mlp: 2,048), and as many others are held out. The divergence is the squared error of the
output in parts of its variance, of gpt2 KL.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_model import DIRECTIONS, gratings
from transformers import GPT2Config, GPT2LMHeadModel

import modelopt_sparse as mts

TESTBED = Path(__file__).parents[1] / "testbed"
RUNS: dict[str, dict[str, Any]] = {method: {"method": method} for method in ("sparsegpt", "alps")}
RUNS |= {quality: {"quality": quality} for quality in ("fast", "balanced", "best", "max")}
WIDTH = 128
Batch = dict[str, Tensor]


# models ---------------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, WIDTH), nn.Parameter(0.02 * torch.randn(64, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids) + self.positions[: ids.shape[1]]).mean(1))


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        one, two, four = width, 2 * width, 4 * width
        self.strength = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, four))
        self.begin, self.end = nn.Conv2d(3, one, 3, padding=1), nn.Conv2d(two, 3, 3, padding=1)
        self.down = nn.ModuleList([self.step(one, two, 2), self.step(two, four, 2), self.step(four, four, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * four, two, 4, 2, 1), nn.ConvTranspose2d(four, one, 4, 2, 1)])

    @staticmethod
    def step(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        norm = nn.GroupNorm(8, inputs)
        return nn.Sequential(norm, nn.SiLU(), nn.Conv2d(inputs, outputs, 3, stride, 1), nn.SiLU(),
                             nn.Conv2d(outputs, outputs, 3, 1, 1))  # fmt: skip

    def forward(self, image: Tensor, strength: Tensor) -> Tensor:
        full = self.begin(image)
        half = self.down[0](full)
        quarter = self.down[1](half)
        deepest = self.down[2](quarter + self.strength(strength[:, None])[:, :, None, None])
        x = F.silu(self.up[0](torch.cat([deepest, quarter], 1)))
        return self.end(torch.cat([F.silu(self.up[1](torch.cat([x, half], 1))), full], 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def over_channels() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(0.02 * torch.randn(64, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), over_channels()]) for _ in range(4))
        self.head = nn.Linear(WIDTH, DIRECTIONS)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        for attention, channels in self.layers:
            x = x + attention(x)
            x = x + channels(x)
        return self.head(x.mean(1))


# data, by seed --------------------------------------------------------------------------------------------------------


def text(name: str) -> Tensor:
    """The characters of one of the testbed's texts as numbers below 128."""
    return torch.tensor([min(ord(character), 127) for character in (TESTBED / name).read_text(encoding="utf-8")])


TEXTS = {name: text(f"{name}.txt") for name in ("calibration", "heldout")}
FREQUENT = torch.tensor([ord(character) for character in "etaoi"])


def windows(rows: int, length: int, seed: int, name: str = "calibration") -> Tensor:
    starts = torch.randint(len(TEXTS[name]) - length, (rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([TEXTS[name][start : start + length] for start in starts.tolist()])


def numbers(rows: int, seed: int) -> tuple[Batch, Tensor]:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
    z = x @ torch.randn(32, 6, generator=torch.Generator().manual_seed(99)) / 5
    first, second = z[:, 0] * z[:, 1] + 2 * z[:, 2].sin(), z[:, 3].abs() - z[:, 4] * z[:, 5]
    return {"input": x}, torch.stack([first, second], 1)


def counted(rows: int, seed: int, name: str = "calibration") -> tuple[Batch, Tensor]:
    ids = windows(rows, 48, seed, name)
    return {"ids": ids}, (ids[:, :, None] == FREQUENT).sum(1).argmax(1)


def noisy(rows: int, seed: int) -> tuple[Batch, Tensor]:
    images, _ = gratings(rows, seed)
    generator = torch.Generator().manual_seed(seed)
    strength = torch.rand(rows, generator=generator)
    noise = torch.randn(images.shape, generator=generator) * strength[:, None, None, None]
    return {"image": images + noise, "strength": strength}, images


def pictures(rows: int, seed: int) -> tuple[Batch, Tensor]:
    images, classes = gratings(rows, seed)
    return {"image": images}, classes


def characters(rows: int, seed: int, name: str = "calibration") -> tuple[Batch, Tensor]:
    ids = windows(rows, 128, seed, name)
    return {"input_ids": ids}, ids


def causal_loss(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def numbers_model() -> nn.Module:
    sizes = (32, 256, 256, 256)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 2))


GPT2 = {"vocab_size": 128, "n_positions": 128, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "eos_token_id": 0}
GPT2 |= {"bos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
Loss = Callable[[Any, Tensor], Tensor]
# kind -> (model, its data, loss, rows of a step of training)
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Batch, Tensor]], Loss, int]] = {
    "mlp": (numbers_model, numbers, F.mse_loss, 256),
    "encoder": (lambda: Encoder(128), counted, F.cross_entropy, 64),
    "unet": (UNet, noisy, F.mse_loss, 32),
    "lists": (Lists, pictures, F.cross_entropy, 64),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), characters, causal_loss, 16),
}


def trained(kind: str, steps: int) -> nn.Module:
    build, data, loss_of, rows = KINDS[kind]
    torch.manual_seed(0)
    model, loss = build().train(), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        batch, wanted = data(rows, step)
        loss = loss_of(model(**batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{kind}: {steps} steps of {rows} rows, last loss {loss.item():.4f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--runs", default=",".join(RUNS), help="which methods and qualities, with commas between")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pattern", default="2:4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind in arguments.kinds:
        _, data, _, _ = KINDS[kind]
        dense, rows = trained(kind, arguments.steps), 128 if kind == "mlp" else 16
        elsewhere = {"name": "heldout"} if kind in ("encoder", "gpt2") else {}
        calibration = [data(rows, 10**6 + number)[0] for number in range(16)]
        held_out = [data(rows, 10**7 + number, **elsewhere)[0] for number in range(16)]
        for run in arguments.runs.split(","):
            model, began = copy.deepcopy(dense), time.process_time()
            mts.sparsify(model, pattern=arguments.pattern, data_loader=calibration, progress=False, **RUNS[run])
            seconds = time.process_time() - began
            evaluation = mts.evaluate(model, held_out, reference=dense, progress=False)
            print(f"  {run:10} {evaluation.divergence} {evaluation.kl:.3g}  {seconds:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
