"""Train two small mixtures of experts, on which criteria of experts can be told apart.

    python examples/benchmarks/train_mixtures.py softmax --out models/softmax
    python examples/benchmarks/train_mixtures.py sigmoid --out models/sigmoid

"softmax": Qwen3-MoE's class, 4 of 16 experts, a loss that balances them. "sigmoid": GLM-4's class, 3 of 16 experts and
a shared one, a first block without experts, experts balanced by biases that correct the router's choice.

Both are upcycled: attention, norms and embeddings are the embedded Llama's, and each expert begins as a random part of
the channels of its MLP. Then all of it learns the testbed's calibration text, for ten to twenty minutes on one core.
Experts come to differ, though less than those of a mixture that was trained from nothing on far more text.
"""

import argparse
from pathlib import Path

import torch
from measure import cut
from torch import Tensor, nn
from train_model import TESTBED, train
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, PreTrainedModel, Qwen3MoeConfig

LEARNING_RATE, BATCH_SIZE = 1e-3, 8
EXPERTS, WIDTH = 16, 88
BIAS_STEP = 1e-3  # by which a correction bias moves in a step: DeepSeek-V3 (arXiv 2412.19437), section 4.2


def configuration(router: str):
    sizes = {
        "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 384, "moe_intermediate_size": WIDTH,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if router == "softmax":
        return Qwen3MoeConfig(**sizes, num_experts=EXPERTS, num_experts_per_tok=4, router_aux_loss_coef=0.01)
    return Glm4MoeConfig(**sizes, n_routed_experts=EXPERTS, num_experts_per_tok=3)


@torch.no_grad()
def upcycle(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Copy what both have; give experts parts of the dense MLP's channels, so that a token's experts add up to it."""
    theirs = dense.state_dict()
    for name, value in model.state_dict().items():
        if name in theirs and theirs[name].shape == value.shape:
            value.copy_(theirs[name])
    for name, module in model.named_modules():
        block = name.rpartition(".mlp.")[0]
        if name.endswith(".experts"):
            gate, up, down = (theirs[f"{block}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            for expert in range(EXPERTS):
                chosen = torch.randperm(len(gate))[:WIDTH]
                module.get_parameter("gate_up_proj")[expert] = torch.cat([gate[chosen], up[chosen]])
                module.get_parameter("down_proj")[expert] = down[:, chosen] * (len(gate) / WIDTH)


def balance(router: nn.Module, args: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """A forward hook: raise the correction biases of experts that got fewer tokens than the mean, lower the others."""
    *_, chosen = output
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
    router.get_buffer("e_score_correction_bias").add_(BIAS_STEP * (load.mean() - load).sign())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", choices=("softmax", "sigmoid"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    windows = cut(tokenizer, (TESTBED / "calibration.txt").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(configuration(options.router), dtype=torch.float32)
    upcycle(model, AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=torch.float32))
    model.config.output_router_logits = options.router == "softmax"  # the loss then balances experts
    routers = [
        module for module in model.modules() if "e_score_correction_bias" in dict(module.named_buffers(recurse=False))
    ]
    hooks = [router.register_forward_hook(balance) for router in routers]
    train(
        model,
        lambda chosen: {"input_ids": windows[chosen], "labels": windows[chosen]},
        len(windows),
        BATCH_SIZE,
        options.epochs,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for hook in hooks:
        hook.remove()
    model.config.output_router_logits = False
    model.eval().to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
