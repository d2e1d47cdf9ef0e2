"""Tiny models of several architectures, beside `tiny_llama`, with random weights of a size that makes layers matter."""

from typing import Any

import torch
import transformers as hf

VOCAB = 97


class TwoOutputs(hf.LlamaModel):
    """Which of them counts is not known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["pooled"] = output.last_hidden_state.mean(1)  # type: ignore[index]  # a model's output takes any name
        return output


def _tiny(kind: Any, config: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(config(vocab_size=VOCAB, **settings)).eval()


def tiny_gpt2(**changes: Any) -> hf.GPT2LMHeadModel:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return _tiny(hf.GPT2LMHeadModel, hf.GPT2Config, **{**settings, **changes})


WIDE: dict[str, Any] = {"hidden_size": 32, "initializer_range": 0.2, "num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_mixtral(**changes: Any) -> hf.MixtralForCausalLM:
    """Its experts are one fused parameter in memory and split by expert on disk."""
    settings = {**WIDE, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    return _tiny(hf.MixtralForCausalLM, hf.MixtralConfig, **{**settings, **changes})


def tiny_qwen() -> hf.Qwen3ForCausalLM:
    settings = {**WIDE, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8, "tie_word_embeddings": False}
    return _tiny(hf.Qwen3ForCausalLM, hf.Qwen3Config, **settings)


def tiny_yolos() -> hf.YolosForObjectDetection:
    """Position embeddings are added between its blocks; they are zero at first."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = hf.YolosConfig(image_size=[32, 32], patch_size=8, num_detection_tokens=4, **sizes)
    model = hf.YolosForObjectDetection(config)
    for name, parameter in model.named_parameters():
        if name.endswith("position_embeddings"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def masked_bert() -> hf.BertForMaskedLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return _tiny(hf.BertForMaskedLM, hf.BertConfig, **sizes)


def tiny_t5() -> hf.T5ForConditionalGeneration:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return _tiny(hf.T5ForConditionalGeneration, hf.T5Config, **sizes)
