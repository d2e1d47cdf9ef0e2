"""A tiny model of (nearly) every model type of transformers, all of them built in the same way.

A type's own config class gives the defaults; a table of patterns says how an attribute of a certain name is made small.
The model class is the first that an auto mapping has for the type. Inputs follow from the arguments of its forward.
"""

import copy
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
import transformers.models.auto.modeling_auto as auto
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import modelopt_sparse as mts
from modelopt_sparse.plan.plan import Plan

Batch = dict[str, Tensor]
WIDTH, WIDER, HEADS, HEAD, VOCAB, LENGTH = 64, 128, 4, 16, 128, 12

# (pattern of an attribute's name, its small value); the first that matches the whole name counts. Lists of numbers get
# the value in every place, those in PROPORTIONAL are scaled.
SMALL: tuple[tuple[str, int], ...] = (
    (r"num_pos_feats", WIDTH // 2),
    (r"rotary_dim", HEAD),
    (r"qk_head_dim", 2 * HEAD),
    (r".*vocab_size.*|codebook_size|num_embeddings|.*_?vocab_size", VOCAB),
    (r"(max|n)_?(position_embeddings|positions|source_positions|target_positions|seq_len.*)|max_length|n_ctx", 256),
    (r"num_key_value_heads|.*_num_key_value_heads|multi_query_group_num|num_kv_heads", 2),
    (r"(.*_)?(num_)?(attention_)?n?_?heads|n_head|.*_n_heads|nhead|.*num_heads|.*_attention_heads.*", HEADS),
    (r"(.*_)?head_dim|d_head|dim_head|d_kv|attention_head_size|qk_head_dim|kv_channels|v_head_dim|qk_.*head_dim", HEAD),
    (r".*lora_rank|.*_rank|index_head_dim", 16),
    (
        r"(.*_)?(dff|dim_ff|intermediate_size|ffn_dim|feed_forward.*size|ffn_hidden_size|mlp_dim|d_ff|dim_feedforward|n_inner|"
        r"linear_units|intermediate_dim|inner_dim|d_inner)",
        WIDER,
    ),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|embed_dim|embedding_size|embedding_dim|n_embd|projection_dim|dim|"
        r"output_dim|proj_size|project_dim|projection_size|channels|proj_dim|emb_dim|hidden_sizes?|in_dim|out_dim|"
        r"num_filters|embed_hidden_size|output_size|input_size_|projection_channels|hidden_dimension)",
        WIDTH,
    ),
    (
        r"(.*_)?(num_(hidden_)?layers|layers|n_layers?|depth|num_blocks|num_encoder_layers|num_decoder_layers|"
        r"num_.*_layers|n_block)",
        2,
    ),
    (r"depths|layer_depths|num_block_repeats|blocks_per_stage|stage_num_blocks|stage_numb_of_layers", 2),
    (r"(num|n|moe_num|num_local|n_routed|num_routed)_?experts|n_routed_experts|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok.*|moe_topk|moe_k|top_k_experts|moe_top_k|topk_group|n_group|num_expert_group", 2),
    (r"(.*_)?image_size|input_size|pretrain_image_size|crop_size", 32),
    (r"patch_size", 8),
    (r"window_size", 4),
    (r"num_queries|num_query_tokens|.*n_latents|num_latents|max_keypoints", 8),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DINOV2 = {"model_type": "dinov2", "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS}
DINOV2 |= {"image_size": 32, "patch_size": 8, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
DEPTH = {"backbone_config": DINOV2, "patch_size": 8, "reassemble_hidden_size": WIDTH}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
GEMMA3N = {"intermediate_size": WIDER, "activation_sparsity_pattern": [0.5, 0.0], "num_kv_shared_layers": 0}
GLM = ("glm4v_text", "glm_image_text", "glm_ocr_text")
# what the table above cannot say of single types
OVERRIDES: dict[str, dict[str, Any]] = {
    **{key: {"upsample_groups": 16} for key in ("mimi", "pocket_tts_audio_tokenizer")},
    **{key: {"head_dim": 16} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")},
    "bit": {"num_groups": 8},
    **{key: {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}} for key in GLM},
    **{key: {"num_heads": (2, 2, 2, 2), "image_size": 64, "patch_size": 2} for key in ("swin", "donut-swin")},
    **{key: {"num_heads": (2, 2, 2, 2)} for key in ("swinv2", "maskformer-swin")},
    **dict.fromkeys(("depth_anything", "prompt_depth_anything"), DEPTH),
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False},
    "gemma3n_text": SLIDING | GEMMA3N,
    "step3p5": {"sliding_window": 8},
    "longcat_flash": {"head_dim": 16, "num_layers": 2, "zero_expert_num": 2},
    "mistral_large4_text": {"kv_source_layers": [0, 1], "num_hidden_layers": 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4], "num_hidden_layers": 2},
}

FIXED: dict[str, Any] = {"deepstack_visual_indexes": [0]}
NARROW = 16  # the smallest entry of a list of widths, such as the hidden sizes of stages


def model_types() -> list[str]:
    """The names of all types that an auto mapping has a model for, in alphabetical order."""
    names = [name for name in dir(auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    return sorted({name for mapping in names for name in getattr(auto, mapping)} & set(CONFIG_MAPPING_NAMES))


def tiny_config(model_type: str) -> Any:
    """A type's config with small numbers in the place of its defaults."""
    return _small(CONFIG_MAPPING[model_type])


def _small(config_class: Any) -> Any:
    overrides = OVERRIDES.get(getattr(config_class, "model_type", ""), {})
    default = config_class(**overrides)
    values = {
        name: value
        for name in inspect.signature(config_class.__init__).parameters
        if (value := _read(default, name)) is not None
    }
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, hf.PretrainedConfig):
            changed[name] = _small(type(value))
        elif name == "rope_parameters" or name == "rope_scaling":
            if (rope := _small_rope(value)) is not value:
                changed[name] = rope
        elif name == "layer_types" or name.endswith("layer_types") or name == "layers_block_type":
            if isinstance(value, (list, tuple)):
                changed[name] = _kinds(value)
        elif (small := _small_value(name, value)) != value:
            changed[name] = small
    kinds = [entry for name, entry in changed.items() if name in ("layer_types", "layers_block_type")]
    for count in ("num_hidden_layers", "n_layer", "num_layers"):
        if kinds and count in changed:
            changed[count] = len(kinds[0])
    for name, entry in list(changed.items()):  # lists with an entry for each layer
        if kinds and name.endswith("layer_types") and len(entry) != len(kinds[0]):
            changed[name] = (list(entry) * len(kinds[0]))[: len(kinds[0])]
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):
        changed["num_key_value_heads"] = changed.get("num_attention_heads")
    changed |= _tokens(values) | overrides
    return config_class(**{name: value for name, value in changed.items() if name in values or value is not None})


def _read(config: Any, name: str) -> Any:
    """An attribute of a config, None if it has none of the name, or another one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has a class of its own for it
        return None


def _kinds(layer_types: Any) -> list[Any]:
    """One layer of each kind, two at least."""
    kinds = list(dict.fromkeys(layer_types))
    return kinds if len(kinds) > 1 else kinds * 2


def _small_rope(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    small = {key: _small_rope(entry) for key, entry in value.items()}
    if "mrope_section" in small:
        small["mrope_section"] = [4, 2, 2]
    return small


def _small_value(name: str, value: Any) -> Any:
    if isinstance(value, bool) or name in FIXED:
        return FIXED.get(name, value)
    small = next((small for pattern, small in SMALL if re.fullmatch(pattern, name)), None)
    if small is None:
        return value
    if isinstance(value, int):
        return min(value, small) if value > 0 else value
    if isinstance(value, (list, tuple)) and value and all(type(entry) is int for entry in value):
        if small == WIDTH:
            ratio = max(min(value) / NARROW, 1)
            return type(value)(max(round(entry / ratio / 8) * 8, 8) if entry > 8 else entry for entry in value)
        return type(value)(min(entry, small) for entry in value)
    return value


def _tokens(values: dict[str, Any]) -> dict[str, int]:
    """Tokens with a meaning, one after the other at the end of the vocabulary, if they lie outside of the small one."""
    tokens = {}
    pattern = r".*token_(id|index)|.*_(bos|eos|pad)_id|mask_index"
    for name, value in values.items():
        if re.fullmatch(pattern, name) and isinstance(value, int) and value >= VOCAB - 1:
            tokens[name] = VOCAB - 2 - len(tokens)
    return tokens


# the model ----------------------------------------------------------------------------------------------------------

HEADS_FIRST = (
    *("IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MULTIMODAL_LM", "MASKED_LM"),
    *("IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION"),
    *("DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "PRETRAINING"),
)


def model_classes(config: Any) -> Iterator[type]:
    """The classes that auto mappings have for a config; those whose forward gives the most come first."""
    kind = type(config)
    mappings = [getattr(auto, f"MODEL_FOR_{head}_MAPPING") for head in HEADS_FIRST]
    others = [getattr(auto, name) for name in sorted(dir(auto)) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", name)]
    for mapping in [*mappings, auto.MODEL_MAPPING, *others]:
        if kind in mapping:
            found = mapping[kind]
            yield from found if isinstance(found, (list, tuple)) else (found,)


def tiny_model(model_type: str, **changes: Any) -> nn.Module:
    """A type's model in evaluation mode; ``changes`` of numbers that its config has. Raises what the first of its
    classes raises if none can be built."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    first: Exception | None = None
    for model_class in dict.fromkeys(model_classes(config)):
        try:
            return _built(model_class, config)
        except Exception as error:  # whatever a class says to a config that is not its own
            first = first or error
    raise first or LookupError("no auto mapping has a model for it")


def _built(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    for module in model.modules():
        if getattr(config := getattr(module, "config", None), "use_cache", False):
            config.use_cache = False  # as in calibration
    return model


# its inputs ---------------------------------------------------------------------------------------------------------


def find(config: Any, *names: str) -> Any:
    """The first value of one of these names, in a config or one that it holds."""
    for name in names:
        if isinstance(value := getattr(config, name, None), (int, list, tuple)) and not isinstance(value, bool):
            return value
    for value in vars(config).values():
        if isinstance(value, hf.PretrainedConfig) and (inner := find(value, *names)) is not None:
            return inner
    return None


def _pair(value: Any) -> tuple[int, int]:
    return (value[-2], value[-1]) if isinstance(value, (list, tuple)) else (value, value)


ROWS, LARGEST = 2, 30e6
PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")


def _options(model: nn.Module) -> Iterator[Batch]:
    """Batches that the model may take, the most complete ones first."""
    config: Any = model.config
    names = list(inspect.signature(model.forward).parameters)
    required = {
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    vocab = find(config, "vocab_size") or VOCAB
    text: Batch = {}
    if "input_ids" in names:
        text["input_ids"] = torch.randint(5, min(vocab, VOCAB // 2), (ROWS, LENGTH), generator=random)
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = torch.randint(5, min(vocab, VOCAB // 2), (ROWS, 9), generator=random)
    if "bbox" in names:
        text["bbox"] = torch.tensor([1, 2, 3, 4]).expand(ROWS, LENGTH, 4)
    seen = {name: values for name, values in _others(config, normal).items() if name in names}
    picked = [{**text, **images} for images in _images(config, names, normal)] + [text]
    sounds = [
        {**text, name: value} for name, values in _sounds(config, normal).items() if name in names for value in values
    ]
    extra = ("mm_token_type_ids", "attention_mask", "visual_feats", "visual_pos", "input_features_mask")
    for batch in [*picked, *sounds] if "pixel_values" in names or not sounds else [*sounds, *picked]:
        batch |= {name: seen[name] for name in required - batch.keys() if name in seen}
        if "mm_token_type_ids" not in names:
            yield batch
        if more := {name: seen[name] for name in extra if name in seen and name not in batch}:
            yield {**batch, **more}
        if "decoder_input_ids" in batch:
            yield {name: x for name, x in batch.items() if name != "decoder_input_ids"}


def _images(config: Any, names: list[str], normal: Any) -> Iterator[Batch]:
    channels = find(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels[0] if isinstance(channels, (list, tuple)) else channels
    height, width = _pair(find(config, "image_size", "img_size") or 64)
    frames = find(config, "num_frames", "frames_per_clip") or 2
    patch = find(config, "patch_size") or 8
    patch = patch if isinstance(patch, int) else patch[-1]
    time = find(config, "temporal_patch_size") or 1
    name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
    grids = [one for one in ("image_grid_thw", "grid_thw") if one in names]
    if name not in names:
        if "hidden_states" in names and grids:
            yield {"hidden_states": normal(32, channels * time * patch**2), grids[0]: torch.tensor([[1, 4, 4]] * 2)}
        return
    if grids:
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        for size in dict.fromkeys((channels * time * patch**2, channels * patch**2)):
            yield {"pixel_values": normal(ROWS * 16, size), grids[0]: grid}
    if "spatial_shapes" in names:
        patches = {"pixel_values": normal(ROWS, 16, channels * patch**2)}
        mask = torch.ones(ROWS, 16, dtype=torch.long)
        yield {**patches, "spatial_shapes": torch.tensor([[4, 4]] * ROWS), "pixel_attention_mask": mask}
    square = normal(ROWS, channels, height, width)
    if name == "pixel_values_videos" or (frames and find(config, "tubelet_size")):
        yield {name: normal(ROWS, frames, channels, height, width)}
    yield {name: square}
    for several in (1, 3, frames):
        yield {name: normal(ROWS, several, channels, height, width)}
    for side in (64, 224):
        yield {name: normal(ROWS, channels, side, side)}


def _sounds(config: Any, normal: Any) -> dict[str, list[Tensor]]:
    mels = find(config, "num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", "input_dim") or 80
    mels = mels if isinstance(mels, int) else 80
    long = find(config, "max_source_positions") or 32
    long = 2 * (long if isinstance(long, int) else 32)
    spectra = [normal(ROWS, mels, long), normal(ROWS, long, mels), normal(ROWS, 64, mels), normal(ROWS, mels, 64)]
    return {"input_features": spectra, "input_values": [normal(ROWS, 4000), normal(ROWS, 1, 4800)]}


def _others(config: Any, normal: Any) -> dict[str, Tensor]:
    """Values of arguments that only a few models take."""
    width = find(config, "hidden_size", "d_model") or WIDTH
    ones = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {
        "attention_mask": ones,
        "input_features_mask": torch.ones(ROWS, 64, dtype=torch.long),
        "past_values": normal(ROWS, find(config, "context_length") or 32, find(config, "num_input_channels") or 1),
        "inputs_embeds": normal(ROWS, LENGTH, width),
        "visual_feats": normal(ROWS, 5, find(config, "visual_feat_dim") or 8),
        "visual_pos": normal(ROWS, 5, 4),
        "mm_token_type_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
    }


def batch_of(model: nn.Module) -> Batch:
    """A batch that the model takes. Raises ValueError, with the last error, if there is none."""
    last: Exception | None = None
    for batch in _options(model):
        if not batch:
            continue
        tries = [batch]
        for _ in range(3):
            batch = tries[-1]
            try:
                with torch.no_grad():
                    model(**batch)
                return batch
            except Exception as error:  # whatever a model says to inputs that are not its own
                last = last or error
                counted = re.search(r"tokens:? (\d+).*features:? (\d+)", str(error).replace("\n", " "))
                if counted is None or "input_ids" not in batch:
                    break
                last = error
                tries.append(_with_placeholders(model.config, batch, int(counted[1]), int(counted[2])))
    raise ValueError(f"no batch: {type(last).__name__}: {last}") from last


def _with_placeholders(config: Any, batch: Batch, tokens: int, features: int) -> Batch:
    token = find(config, *PLACEHOLDERS)
    if token is None:
        return batch
    each = max(features // ROWS, 1)
    ids = batch["input_ids"]
    ids = torch.cat([torch.full((ROWS, each), token), ids[:, -LENGTH:]], 1)
    changed = {**batch, "input_ids": ids}
    if "attention_mask" in batch:
        changed["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in batch:
        changed["mm_token_type_ids"] = (ids == token).long()
    return changed


# what becomes of it -------------------------------------------------------------------------------------------------

# why a weight inside of a block may stay dense
KNOWN_REASONS = r"embedding|MoE router|router|output head|tied: .*|.* does not fit|bias of fused experts"


@dataclass
class Outcome:
    """What SparseGPT at 2:4 makes of a type's tiny model.

    unreached: layers that the batch does not reach.
    whole_runs: notes on stacks that are calibrated through the whole model.
    share: of the weights inside of the blocks that could be pruned, how many are.
    """

    model: nn.Module
    unreached: list[str]
    whole_runs: list[str]
    share: float


def sparsified(model: nn.Module, batch: Batch) -> Outcome:
    """A model like ``model``, sparse where ``batch`` reaches it.

    Weights as they are initialized can be so small that next to nothing is left of the inputs in the last layers, or
    zero (gates, scales, code books), as in no trained model: then they are drawn anew.
    """
    try:
        return _sparsified(copy.deepcopy(model), batch)
    except ValueError as error:
        if "cannot be factorized" not in str(error):
            raise
    strengthen(model)
    return _sparsified(model, batch)


def _sparsified(model: nn.Module, batch: Batch) -> Outcome:
    plan = mts.make_plan(model, "sparsegpt", pattern="2:4")
    unreached = _unreached(model, batch, plan)
    options = {"data_loader": [batch], "exclude": unreached, "min_tokens": 1, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mts.sparsify(model, "sparsegpt", pattern="2:4", **options)
    blocks = tuple(f"{name}." if name else "" for stack in plan.stacks for name in stack.names)
    pruned = sum(math.prod(layer.shape) for layer in plan.layers)
    left = sum(
        math.prod(weight.shape)
        for weight in plan.skipped
        if weight.name.startswith(blocks) and not re.fullmatch(KNOWN_REASONS, weight.reason)
    )
    notes = [note for note in mts.report(model).notes if "through the whole model" in note]
    return Outcome(model, unreached, notes, pruned / (pruned + left))


@torch.no_grad()
def strengthen(model: nn.Module) -> None:
    """Draw weights anew so that what comes out of a layer is about as large as what goes in, and also what is zero."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            layer.weight.normal_(0, (2 / layer.weight[0].numel()) ** 0.5)
    for name, x in itertools.chain(model.named_parameters(), model.named_buffers()):
        if x.is_floating_point() and not x.any() and "bias" not in name:
            x.normal_()


@torch.no_grad()
def _unreached(model: nn.Module, batch: Batch, plan: Plan) -> list[str]:
    """The layers whose modules are not called, or with no token; experts in a list count as reached."""
    called: set[nn.Module] = set()

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if all(x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)):
            called.add(module)

    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in model.modules()]
    model(**batch)
    for handle in hooks:
        handle.remove()
    return [
        layer.name
        for layer in plan.layers
        if layer.layer.mixture is None and called.isdisjoint(layer.layer.hooked_modules)
    ]
