"""Adapters of fine-tuning (LoRA and its kin) beside a model's own weights: told by PEFT's types, and by name."""

import sys

from torch import nn

REASON = "adapter beside the layer (PEFT, LoRA)"


def tuner_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that hold weights of adapters: what one of PEFT's layers holds beside the layer that it wraps, and
    whatever is called ``lora_...``, as other libraries do.

    PEFT is not imported here: if nobody has imported it, the model has none of its layers.
    """
    utils = sys.modules.get("peft.tuners.tuners_utils")
    wrapper = getattr(utils, "BaseTunerLayer", None)
    tuners: set[nn.Module] = set()
    for module in model.modules():
        of_peft = wrapper is not None and isinstance(module, wrapper)
        for name, child in module.named_children():
            if name.lower().startswith("lora_") or (of_peft and name != "base_layer"):
                tuners.update(child.modules())
    return tuners
