"""Train a small language model of another family than the testbed's, to check figures on a model nothing was tuned on.

    python examples/benchmarks/train_model.py opt --out models/opt

It learns the testbed's calibration text in ten to fifteen minutes on one core, with the testbed's tokenizer. "opt":
learned positions, LayerNorm, biases, ReLU. "qwen3": normalized queries and keys, output head of its own. "neox":
parallel attention and MLP, fused queries, keys and values, partial rotary positions.
"""

import argparse
import math
from pathlib import Path

import torch
from measure import cut
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    OPTConfig,
    Qwen3Config,
)

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
BATCH_SIZE = 8
PEAK, WARM_UP = 2e-3, 50  # learning rate, steps
VOCABULARY = 2048


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("opt", "qwen3", "neox"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    windows = cut(tokenizer, (TESTBED / "calibration.txt").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(configuration(options.family))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    steps = options.epochs * (len(windows) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    with tqdm(total=steps, desc=options.family, unit="step") as bar:
        for _ in range(options.epochs):
            order = torch.randperm(len(windows))
            for chosen in order[: len(windows) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
                loss = model(input_ids=windows[chosen], labels=windows[chosen]).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                bar.set_postfix(loss=f"{loss.item():.2f}")
                bar.update()
    model.eval().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
