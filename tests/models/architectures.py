"""Tiny random models of many architectures, with ragged batches: one row each, for test_architectures.py.

Nothing here knows how the package finds blocks, inputs or padding: blocks are named by their class, and which mask an
input's rows go by is written down by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.oracles.brute_force import all_rows

WIDTH, WIDER, HEADS, VOCAB = 16, 32, 4, 53
SIZES = ((2, 11), (3, 7), (1, 5))  # (rows, length) of the batches

Batch = dict[str, Tensor]


def _attention_mask(batch: Batch, name: str) -> Tensor | None:
    del name
    return batch["attention_mask"].bool()


def with_drawn_weights(model: nn.Module, std: float | None = None) -> nn.Module:
    """The model in evaluation mode, with weights of a size that lets every layer matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, std or parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@dataclass(frozen=True)
class Architecture:
    """``blocks``: class names of the blocks, which run in module order. ``real``: (batch, layer name) -> which rows of
    that layer's input are real tokens. ``dense``: parameters inside the blocks that stay dense, by the end of their
    name, and why. ``repeats``: a call comes to a block more than once."""

    make: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    batches: Callable[[str], list[Batch]]
    real: Callable[[Batch, str], Tensor | None] = all_rows
    dense: Mapping[str, str] = field(default_factory=dict)
    repeats: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return with_drawn_weights(self.make())

    def block_names(self, model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if type(module).__name__ in self.blocks]


# batches ------------------------------------------------------------------------------------------------------------


def ragged(rows: int, length: int, side: str, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask with another length in every row (the first is full), padded ``side``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    lengths = torch.tensor([max(length - 3 * row, 2) for row in range(rows)])
    positions = torch.arange(length)
    real = positions < lengths[:, None] if side == "right" else positions >= length - lengths[:, None]
    return ids.masked_fill(~real, 1), real.long()


def texts(side: str, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Batch]:
    pairs = [ragged(rows, length, side, seed) for seed, (rows, length) in enumerate(sizes)]
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]


def pairs(side: str) -> list[Batch]:
    """Encoder and decoder tokens; in the second batch they are equally long, padded differently."""
    batches = []
    for seed, ((rows, length), decoder_length) in enumerate(zip(SIZES, (8, 7, 9))):
        ids, mask = ragged(rows, length, side, seed)
        # other rows than in the encoder are the short ones
        decoder_ids, decoder_mask = (x.flip(0) for x in ragged(rows, decoder_length, side, seed + 10))
        batch = {"input_ids": ids, "attention_mask": mask}
        batches.append({**batch, "decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask})
    return batches


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_images(rows: int, seed: int) -> Tensor:
    return drawn(seed, rows, 3, 16, 16)


def speech(side: str) -> list[Batch]:
    """Whisper takes spectrograms of one length, so that only its decoder has padding."""
    batches = []
    for seed, (rows, length) in enumerate(SIZES):
        ids, mask = ragged(rows, length, side, seed)
        features = drawn(seed, rows, 8, 22)  # 11 positions: as many as the first batch has tokens
        batches.append({"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": mask})
    return batches


def images(side: str) -> list[Batch]:
    del side
    return [{"pixel_values": random_images(rows, seed)} for seed, (rows, _) in enumerate(SIZES)]


def images_and_texts(side: str) -> list[Batch]:
    """One image per text; the second texts are as long as an image has positions, 5."""
    batches = texts(side, ((2, 11), (3, 5), (1, 5)))
    for seed, batch in enumerate(batches):
        batch["input_ids"][:, -1] = VOCAB - 1  # the end-of-text token, which CLIP pools
        batch["pixel_values"] = random_images(len(batch["input_ids"]), seed)
    return batches


def images_in_texts(side: str) -> list[Batch]:
    """Each text holds the four tokens of an image, on the side away from its padding."""
    batches = []
    for seed, (rows, length) in enumerate(((2, 11), (3, 9), (2, 5))):
        ids, mask = ragged(rows, length, side, seed)
        ids = ids.clamp_max(VOCAB - 2)
        image = slice(0, 4) if side == "right" else slice(length - 4, length)
        ids[:, image], mask[:, image] = VOCAB - 1, 1
        batches.append({"input_ids": ids, "attention_mask": mask, "pixel_values": random_images(rows, seed)})
    return batches


def vectors(side: str) -> list[Batch]:
    del side
    generator = torch.Generator().manual_seed(0)
    return [{"input": torch.randn(rows, WIDTH, generator=generator)} for rows in (7, 3)]


def sequences(side: str) -> list[Batch]:
    batches = []
    for seed, (rows, length) in enumerate(SIZES):
        _, mask = ragged(rows, length, side, seed)
        batches.append({"src": drawn(seed, rows, length, WIDTH), "src_key_padding_mask": mask == 0})
    return batches


# which rows are real ------------------------------------------------------------------------------------------------


def _t5_rows(batch: Batch, name: str) -> Tensor:
    from_encoder = name.startswith("encoder.") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    return batch["attention_mask" if from_encoder else "decoder_attention_mask"].bool()


def _whisper_rows(batch: Batch, name: str) -> Tensor | None:
    from_encoder = ".encoder." in name or name.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))
    return None if from_encoder else batch["decoder_attention_mask"].bool()


def _text_rows(batch: Batch, name: str) -> Tensor | None:
    return None if "vision_" in name else batch["attention_mask"].bool()


def _unpadded_rows(batch: Batch, name: str) -> Tensor:
    del name
    return ~batch["src_key_padding_mask"]


# models that are not transformers' ----------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """nn.MultiheadAttention in a residual block, with its own calling convention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = nn.Linear(WIDTH, WIDER)
        self.down = nn.Linear(WIDER, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class AttentionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([AttentionBlock(), AttentionBlock()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.stem(src)
        for block in self.blocks:
            x = block(x, src_key_padding_mask)
        return self.head(x)


class Mixer(nn.Module):
    """A residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class OverPositions(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


class ListsModel(nn.Module):
    """Each member of the stack is a list of two modules, which the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([OverPositions(), Mixer()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        for over_positions, mixer in self.layers:
            src = src + over_positions(src)
            src = src + mixer(src)
        return self.head(src)


def _transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDER, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDER), nn.ReLU(), nn.Linear(WIDER, WIDER), nn.ReLU(), nn.Linear(WIDER, 8))


# the table ----------------------------------------------------------------------------------------------------------

BODY = {"hidden_size": WIDTH, "intermediate_size": WIDER, "num_hidden_layers": 2, "num_attention_heads": HEADS}
ENCODER = {"vocab_size": VOCAB, **BODY, "max_position_embeddings": 32, "pad_token_id": 1}
DECODER = {**ENCODER, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 2}
VISION = {**BODY, "image_size": 16, "patch_size": 8}
GEMMA3 = {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "eos_token_id": 2}
OPT = {key: ENCODER[key] for key in ENCODER if key not in ("intermediate_size", "pad_token_id")}
OPT |= {"ffn_dim": WIDER, "word_embed_proj_dim": WIDTH}
BLOOM = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": WIDER, "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS}
    tokens = {"vocab_size": VOCAB, "decoder_start_token_id": 0, "pad_token_id": 1}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **tokens, feed_forward_proj="gated-gelu"))


def _whisper() -> nn.Module:
    sides = {"layers": 2, "attention_heads": HEADS, "ffn_dim": WIDER}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    sizes |= {"num_mel_bins": 8, "d_model": WIDTH, "max_source_positions": 11, "max_target_positions": 32}
    tokens = {"vocab_size": VOCAB, "pad_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    tokens |= dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 2)
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **tokens))


def _clip() -> nn.Module:
    text = {**ENCODER, "bos_token_id": 2, "eos_token_id": VOCAB - 1}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=dict(VISION), projection_dim=8))


def _llava() -> nn.Module:
    parts = {"vision_config": hf.CLIPVisionConfig(**VISION), "text_config": hf.LlamaConfig(**DECODER)}
    config = hf.LlavaConfig(**parts, image_token_index=VOCAB - 1, image_seq_length=4)
    return hf.LlavaForConditionalGeneration(config)


def _swin() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, num_labels=3))


def _resnet(layer_type: str) -> nn.Module:
    sizes = {"num_channels": 3, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 3}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type=layer_type))


def _texts(
    name: str, head: str = "ForCausalLM", block: str = "DecoderLayer", sizes: Mapping[str, Any] = DECODER, **more: Any
) -> Architecture:
    """A model of texts of transformers, whose classes begin with this name."""

    def make() -> nn.Module:
        config = getattr(hf, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        return getattr(hf, name + head)(config(**sizes, **more))

    return Architecture(make, (name + block,), texts, _attention_mask)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _texts("Llama", tie_word_embeddings=True),
    "mistral": _texts("Mistral", sliding_window=4),
    "qwen3": _texts("Qwen3", head_dim=8),
    "phi3": _texts("Phi3"),
    "gemma3": _texts("Gemma3", **GEMMA3),
    "gpt2": _texts("GPT2", "LMHeadModel", "Block", GPT2),
    "opt": _texts("OPT", sizes=OPT),
    "bloom": _texts("Bloom", block="Block", sizes=BLOOM),
    "gpt_neox": _texts("GPTNeoX", block="Layer", sizes=ENCODER, bos_token_id=2, eos_token_id=2),
    "mixtral": replace(_texts("Mixtral", **EXPERTS), dense={"gate.weight": "router"}),
    "t5": Architecture(
        _t5, ("T5Block",), pairs, _t5_rows, dense={"relative_attention_bias.weight": "an embedding of positions"}
    ),
    "whisper": Architecture(_whisper, ("WhisperEncoderLayer", "WhisperDecoderLayer"), speech, _whisper_rows),
    "bert": _texts("Bert", "ForSequenceClassification", "Layer", ENCODER),
    # both blocks are one module
    "albert": replace(_texts("Albert", "ForMaskedLM", "Layer", ENCODER, embedding_size=8), repeats=True),
    "vit": Architecture(lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)), ("ViTLayer",), images),
    "swin": Architecture(_swin, ("SwinStage",), images, dense={"relative_position_bias_table": "no matrix of a layer"}),
    "clip": Architecture(_clip, ("CLIPEncoderLayer",), images_and_texts, _text_rows),
    "llava": Architecture(_llava, ("CLIPEncoderLayer", "LlamaDecoderLayer"), images_in_texts, _text_rows),
    "resnet_basic": Architecture(lambda: _resnet("basic"), ("ResNetBasicLayer",), images),
    "resnet_bottleneck": Architecture(lambda: _resnet("bottleneck"), ("ResNetBottleNeckLayer",), images),
    "sequential": Architecture(_mlp, ("Sequential",), vectors),
    "transformer_encoder": Architecture(_transformer_encoder, ("TransformerEncoderLayer",), sequences, _unpadded_rows),
    "lists": Architecture(ListsModel, ("OverPositions", "Mixer"), sequences, _unpadded_rows),
    "multihead_attention": Architecture(AttentionModel, ("AttentionBlock",), sequences, _unpadded_rows),
}
