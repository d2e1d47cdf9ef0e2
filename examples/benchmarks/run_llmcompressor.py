"""One run of llm-compressor's pruning: --method wanda or sparsegpt, or reap, which drops experts. See worker.py."""

from collections.abc import Mapping

import torch
import worker
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports] - in an environment of its own
from llmcompressor.modifiers.pruning import (  # pyright: ignore[reportMissingImports]
    SparseGPTModifier,
    WandaPruningModifier,
)
from llmcompressor.modifiers.pruning.reap import REAPPruningModifier  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader

MODIFIERS = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}


def sparsify(model, batches, options):
    if ":" in options.pattern:
        kept, of = map(int, options.pattern.split(":"))
        structure, sparsity = f"{of - kept}:{of}", 1 - kept / of  # its N of N:M counts the pruned ones
    else:
        structure, sparsity = "0:0", float(options.pattern.rstrip("%")) / 100
    data = [
        batch if isinstance(batch, Mapping) else {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        for batch in batches
    ]
    loader = DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType] - a list will do
    if options.method == "reap":
        return oneshot(model=model, dataset=loader, recipe=REAPPruningModifier(sparsity=sparsity))
    # "lm_head" alone would not match: the name that it looks at ends with a dot
    recipe = MODIFIERS[options.method](
        sparsity=sparsity, mask_structure=structure, targets=["Linear"], ignore=[f"re:.*{options.skip}"]
    )
    return oneshot(model=model, dataset=loader, recipe=recipe)


if __name__ == "__main__":
    worker.main(sparsify)
