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


def tiny_gpt2(**changes: Any) -> hf.GPT2LMHeadModel:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**settings, "initializer_range": 0.2, **changes})).eval()


def tiny_mixtral(**changes: Any) -> hf.MixtralForCausalLM:
    """Its experts are one fused parameter in memory and split by expert on disk."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**{**settings, **changes})).eval()


def tiny_qwen() -> hf.Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(vocab_size=VOCAB, **sizes, **heads)).eval()


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
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=97, **sizes)).eval()


def tiny_t5() -> hf.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, initializer_factor=1.0, **sizes)).eval()
