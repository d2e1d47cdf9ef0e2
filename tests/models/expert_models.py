"""Tiny random mixtures of experts, for the tests of fused experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.models.architectures import with_drawn_weights

VOCAB, WIDTH, INNER, EXPERTS, CHOSEN = 53, 32, 24, 4, 2
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
COMMON |= {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}


def build(model_class: str, config_class: str, **more: Any) -> Callable[[], nn.Module]:
    """A function that makes the model."""

    def make() -> nn.Module:
        if not hasattr(hf, model_class):
            pytest.skip(f"transformers {hf.__version__} has no {model_class}")
        torch.manual_seed(0)
        model = getattr(hf, model_class)(getattr(hf, config_class)(**{**COMMON, **more}))
        return with_drawn_weights(model, WIDTH**-0.5)

    return make


SHORT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, **SHORT}
MOE = {"moe_intermediate_size": INNER, "num_experts_per_tok": CHOSEN}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
GROUPS = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LLAMA4 = {"num_local_experts": EXPERTS, "intermediate_size_mlp": INNER, "attention_chunk_size": 16, "moe_layers": [1]}
LONGCAT = {"ffn_hidden_size": INNER, "expert_ffn_hidden_size": INNER, "n_routed_experts": EXPERTS, "moe_topk": CHOSEN}
SPARSE = {"n_routed_experts": EXPERTS, "head_dim": 8, "mlp_layer_types": ["sparse", "sparse"]}
WINDOWS = {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
BOUNDS = {"share_expert_dim": INNER, "sliding_window": 4, "swiglu_limits": [0.5, 0.5]}


def causal(name: str, config: str = "", **more: Any) -> Callable[[], nn.Module]:
    return build(f"{name}ForCausalLM", config or f"{name}Config", **more)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": causal("Mixtral", **LOCAL),
    "qwen3_moe": causal("Qwen3Moe", **MOE, num_experts=EXPERTS, head_dim=8),
    "olmoe": causal("Olmoe", num_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "gpt_oss": causal("GptOss", **LOCAL, head_dim=8),
    "llama4": causal("Llama4", "Llama4TextConfig", **LLAMA4, head_dim=8),
    "deepseek_v3": causal("DeepseekV3", **MOE, **GROUPS, **LATENT, first_k_dense_replace=1),
    "glm4_moe": causal("Glm4Moe", **MOE, **GROUPS, first_k_dense_replace=1, head_dim=8),
    "granitemoe": causal("GraniteMoe", **LOCAL),
    "phimoe": causal("Phimoe", **LOCAL),
    "jetmoe": causal("JetMoe", **LOCAL, kv_channels=8),
    "longcat_flash": causal("LongcatFlash", **LATENT, **LONGCAT, num_layers=2, zero_expert_num=2, head_dim=8),
}

# of which transformers has no causal language model with logits, or which hold convolutions beside their experts
STEP3P7 = build("Step3p7TextModel", "Step3p7TextConfig", **MOE, **SPARSE, **BOUNDS)
INKLING = causal("Inkling", "InklingTextConfig", **MOE, **SPARSE, **WINDOWS, n_shared_experts=2)
