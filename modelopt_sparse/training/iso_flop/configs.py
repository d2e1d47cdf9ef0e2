"""Sparse Wide: the sizes of a wider model of transformers (Sparse-IFT, arXiv 2303.11525)."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from modelopt_sparse.reports.text import nearest


@dataclass(frozen=True)
class Family:
    """Names of the sizes in a config.

    width: of the hidden states. heads: how many attention heads share it. mlp: its width; where the config has None, it
    is four times the width by itself. head_size: where a config has one of its own. rotary: heads have even sizes.
    alike: further sizes that are equal to the width.
    """

    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp: str = "intermediate_size"
    head_size: str | None = None
    rotary: bool = False
    alike: tuple[str, ...] = ()


LLAMA = Family(head_size="head_dim", rotary=True)
BERT = Family()
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3"), LLAMA),
    "gpt_neox": Family(rotary=True),
    "gpt2": Family("n_embd", "n_head", "n_inner"),
    "opt": Family(mlp="ffn_dim", alike=("word_embed_proj_dim",)),
    "t5": Family("d_model", "num_heads", "d_ff", "d_kv"),
    "distilbert": Family("dim", "n_heads", "hidden_dim"),
    **dict.fromkeys(("bert", "roberta", "vit", "deit"), BERT),
}
STAGES = ("resnet", "swin")


def widened(config: PretrainedConfig, factor: float, multiple: int = 1) -> PretrainedConfig:
    """A copy of a config whose hidden states, heads and MLPs are ``factor`` times as wide, rounded up.

    The width is rounded to what its heads need: to a multiple of their number, with even sizes where they are rotary;
    and to ``multiple``, which hardware may want. The MLP grows as the width did. Numbers of layers and heads, the
    vocabulary and all else stay.

    Raises ValueError for a kind of model that is not in FAMILIES or STAGES.
    """
    wide = copy.deepcopy(config)
    if config.model_type in STAGES:
        _widen_stages(wide, factor, multiple)
        return wide
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = sorted([*FAMILIES, *STAGES])
        raise ValueError(
            f"the sizes of {config.model_type!r} are not known{nearest(config.model_type, known)}: Sparse Wide has to "
            f"know which of them are widths. Known are {', '.join(known)}; the other members replace layers anywhere"
        )
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: widths are rounded up to a multiple of it, so it is at least 1")
    width, heads = getattr(config, family.width), getattr(config, family.heads)
    own = getattr(config, family.head_size, None) if family.head_size else None
    if own is None and width % heads:
        near = f"{width // heads * heads} and {rounded_up(width, heads)}"
        raise ValueError(
            f"{family.width}={width} of this {config.model_type!r} is no multiple of {family.heads}={heads}, so that "
            f"no level works: the nearest widths that do are {near}"
        )
    step = multiple if own is not None and own * heads != width else math.lcm(multiple, heads * (1 + family.rotary))
    new = rounded_up(width * factor, step)
    setattr(wide, family.width, new)
    size = new // heads if own is None or own * heads == width else rounded_up(own * factor, 1 + family.rotary)
    if own is not None and family.head_size is not None:
        setattr(wide, family.head_size, size)
    _refuse_sized_rope(config, own or width // heads, size)
    mlp = getattr(config, family.mlp)
    if mlp is not None:
        setattr(wide, family.mlp, rounded_up(mlp * new / width, multiple))
    for name in family.alike:
        if getattr(config, name) == width:
            setattr(wide, name, new)
    return wide


def _refuse_sized_rope(config: PretrainedConfig, old: int, new: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    sized = [name for name, value in rope.items() if isinstance(value, (list, tuple))]
    if sized and old != new:
        raise ValueError(
            f"rope_parameters of this {config.model_type!r} holds a list, {sized[0]!r}, that fits heads of {old}, and "
            f"they would have {new}: the nearest level that works is 0. The other members keep heads as they are"
        )


def _widen_stages(wide: Any, factor: float, multiple: int) -> None:
    """ResNet: the stem's and all stages' widths. Swin: the first stage's, which the others follow."""
    if wide.model_type == "resnet":
        wide.embedding_size = rounded_up(wide.embedding_size * factor, multiple)
        # stages of bottlenecks are divided by four inside
        step = math.lcm(multiple, 4 if wide.layer_type == "bottleneck" else 1)
        wide.hidden_sizes = [rounded_up(size * factor, step) for size in wide.hidden_sizes]
    else:
        wide.embed_dim = rounded_up(wide.embed_dim * factor, _step_of_stages(wide.num_heads, multiple))
        wide.hidden_size = wide.embed_dim * 2 ** (len(wide.depths) - 1)


def _step_of_stages(heads: Sequence[int], multiple: int) -> int:
    """What the first width has to be a multiple of, so that each stage, twice as wide as the last, has its heads."""
    steps = (count // math.gcd(count, 2**stage) for stage, count in enumerate(heads))
    return math.lcm(multiple, *steps)


def rounded_up(size: float, step: int) -> int:
    """The next multiple of ``step``; a size that is one but for rounding stays."""
    return math.ceil(round(size / step, 6)) * step
