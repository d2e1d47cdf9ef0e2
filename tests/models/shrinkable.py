"""Tiny models of the classes that `shrink` is tried on, by name; and two that know their blocks' places or channels."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB, BLOCKS, WIDTH = 97, 4, 48
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": WIDTH, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": BLOCKS, "n_head": 4, "n_positions": 64}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_shared_experts": 2, "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
ENCODERS = {"is_decoder": False}
PLAIN = (
    *("Llama", "Arcee", "Mistral", "Nemotron", "Glm", "Glm4", "Ernie4_5", "SeedOss", "Qwen2", "Granite", "Cohere"),
    *("Cohere2", "SmolLM3", "Starcoder2", "Apertus", "Exaone4", "Phi", "Phi3", "Olmo2", "Olmo3", "StableLm", "GPTNeoX"),
)
# class -> its own settings
CLASSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    **{name: {"head_dim": 8} for name in ("Gemma", "Gemma2", "Qwen3", "Helium", "HunYuanDenseV1")},
    "Gemma3Text/Gemma3ForCausalLM": {"head_dim": 8},
    "Ministral": {"head_dim": 8},
    "Falcon": {"ffn_hidden_size": WIDTH, "num_kv_heads": 2, "new_decoder_architecture": True},
    "Lfm2": {"block_auto_adjust_ff_dim": False},
    "OPT": {"ffn_dim": WIDTH, "word_embed_proj_dim": 32},
    "GPT2/GPT2LMHeadModel": GPT,
    "GPTJ": {**GPT, "rotary_dim": 4},
    "Bert/BertForMaskedLM": ENCODERS,
    "Roberta/RobertaForMaskedLM": ENCODERS,
    "ModernBert/ModernBertForMaskedLM": {"global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert/DistilBertForMaskedLM": {"dim": 32, "hidden_dim": WIDTH, "n_heads": 4, "n_layers": BLOCKS},
    "ViT/ViTForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 5},
    "Beit/BeitForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 5},
    "Dinov2/Dinov2ForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 5, "mlp_ratio": 2},
    "Bloom": {"n_layer": BLOCKS, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": BLOCKS, "n_heads": 4, "max_seq_len": 64},
    "Mixtral": MIXTURE,
    "Qwen3Moe": {**MIXTURE, "head_dim": 8},
    "GptOss": {**MIXTURE, "head_dim": 8},
    "DeepseekV3": {**MIXTURE, **DEEPSEEK},
    "Jamba": {
        "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8,
    },
    "T5/T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 8, "d_ff": WIDTH, "num_layers": 3, "num_decoder_layers": BLOCKS, "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip
# class -> why no width can be taken off of all of its MLPs, as messages say it
NO_WIDTH = {
    **dict.fromkeys(("Bloom", "Mpt", "Dinov2/Dinov2ForImageClassification"), "has no width"),
    **dict.fromkeys(("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "Jamba"), "holds experts"),
}  # fmt: skip


def shrinkable(name: str, **more: Any) -> PreTrainedModel:
    """A model of a class in CLASSES or ODD, with random weights."""
    if name in ODD:
        torch.manual_seed(0)
        return ODD[name](LlamaConfig(**BASE)).eval()
    config, _, kind = name.partition("/")
    settings = CLASSES[name] if "T5" in name else {**BASE, **CLASSES[name]}
    if "T5" in name:
        settings = {"vocab_size": VOCAB, "pad_token_id": 0, **settings}
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**{**settings, **more})
    model = getattr(transformers, kind or f"{config}ForCausalLM")(made).eval()
    for parameter in model.parameters():  # so that norms and biases matter
        if parameter.dim() < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def calls(model: PreTrainedModel, count: int = 3) -> Iterator[dict[str, torch.Tensor]]:
    """Batches that the model takes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        if "pixel_values" in model.main_input_name:
            yield {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
            continue
        ids = torch.randint(3, VOCAB, (2, 16), generator=generator)
        batch = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.randint(3, VOCAB, (2, 16), generator=generator)
        yield batch


class InterleavedMLP(nn.Module):
    """Gate and up of a channel follow each other, as in gpt-oss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=True)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(nn.functional.silu(both[..., ::2]) * both[..., 1::2])


class InterleavedLlama(LlamaForCausalLM):
    kind: type[nn.Module] = InterleavedMLP

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.kind(config)


class SplitMLP(InterleavedMLP):
    """Gate and up have their sizes in a list of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self._sizes = [config.intermediate_size] * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).split(self._sizes, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class SplitLlama(InterleavedLlama):
    kind = SplitMLP


class ScaledMLP(nn.Module):
    """What an MLP puts out, scaled."""

    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class ScaledByPlace(LlamaForCausalLM):
    """Its blocks know how far up they are."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for place, layer in enumerate(self.model.layers):
            layer.mlp = ScaledMLP(layer.mlp, 1.0 / (1 + place))


class NormedMLP(InterleavedMLP):
    """A norm sees all of its channels."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.norm(gate * up))


class NormedLlama(InterleavedLlama):
    kind = NormedMLP


class SoftmaxMLP(InterleavedMLP):
    """What one channel puts out depends on all of them, and no weight says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gate.softmax(-1) * up)


class SoftmaxLlama(InterleavedLlama):
    kind = SoftmaxMLP


class CountingLlama(LlamaForCausalLM):
    """Its blocks count how many have run before them in a call, so that none runs without the others."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        ran: list[int] = []
        self.register_forward_pre_hook(lambda *_: ran.clear())
        for layer in self.model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, args: ran.append(1) or (args[0] * len(ran) ** -0.1,))


class NumberedLlama(LlamaForCausalLM):
    """It asks for its last block by number."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.model.layers[3]
        return super().forward(*args, **kwargs)


KINDS = InterleavedLlama, SplitLlama, ScaledByPlace, NormedLlama, SoftmaxLlama, CountingLlama, NumberedLlama
ODD = {kind.__name__: kind for kind in KINDS}
