"""What a Llama of 8 billion parameters would take: floating-point operations, counted without running it.

    python examples/benchmarks/flops.py

128 windows of 2,048 tokens, 2:4. A block's forward is counted by torch on the meta device. The rest is counted by hand,
for a layer [R, C]: its Gram matrix takes T C^2 (half of it is computed), a product with a matrix [C, C] 2 R C^2, the
factors of SparseGPT 2 C^3, ALPS about 24 steps of ADMM with 8 inverses, and 13 products of conjugate gradients and
errors. An epoch of tuning takes three forwards (one, and a backward pass). `balanced` takes 4 epochs, and for its
metric one forward and a backward pass, with each block run again, over 32 windows. Not counted: reading and writing,
masks, Adam's steps, layer norms and other elementwise work.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

WINDOWS, LENGTH, BLOCKS = 128, 2048, 32
EPOCHS, FORWARDS_OF_AN_EPOCH, METRIC_WINDOWS = 4, 3, 32
ADMM_STEPS, INVERSES, REFIT = 24, 8, 13


def main() -> None:
    width, heads = 4096, {"num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=width, intermediate_size=14336, num_hidden_layers=1, **heads)
        model = LlamaForCausalLM(config)
        hidden = torch.zeros(1, LENGTH, width)
        rotary = model.model.rotary_emb(hidden, torch.zeros(1, LENGTH, dtype=torch.long))
    block = model.model.layers[0]
    with FlopCounterMode(display=False) as counter:
        block(hidden, position_embeddings=rotary)
    forward = counter.get_total_flops() * WINDOWS * BLOCKS
    shapes = [module.weight.shape for module in block.modules() if isinstance(module, nn.Linear)]
    inputs = [width, width, width, config.intermediate_size]  # of q, k and v; o; gate and up; down
    product = BLOCKS * sum(2 * r * c**2 for r, c in shapes)
    grams = BLOCKS * sum(WINDOWS * LENGTH * c**2 for c in inputs)
    sparsegpt = product + BLOCKS * sum(2 * c**3 for c in inputs)
    alps = (ADMM_STEPS + REFIT) * product + BLOCKS * INVERSES * sum(c**3 for _, c in shapes)
    tuning = (EPOCHS * FORWARDS_OF_AN_EPOCH + (FORWARDS_OF_AN_EPOCH + 1) * METRIC_WINDOWS / WINDOWS) * forward
    print("| PFLOP | in the model's dtype | in float32 |\n| --- | ---: | ---: |")
    print(f"| `sparsegpt` | {(2 * forward + grams) / 1e15:.1f} | {sparsegpt / 1e15:.1f} |")
    print(f"| `alps` | {(2 * forward + grams) / 1e15:.1f} | {alps / 1e15:.1f} |")
    print(f"| `quality='balanced'` | {(3 * forward + grams + tuning) / 1e15:.1f} | {alps / 1e15:.1f} |")


if __name__ == "__main__":
    main()
