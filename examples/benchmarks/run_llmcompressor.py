"""One run of llm-compressor's pruning: --method wanda or sparsegpt. See worker.py."""

import torch
import worker
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports] - in an environment of its own
from llmcompressor.modifiers.pruning import (  # pyright: ignore[reportMissingImports]
    SparseGPTModifier,
    WandaPruningModifier,
)
from torch.utils.data import DataLoader

MODIFIERS = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}


def sparsify(model, batches, options):
    if ":" in options.pattern:
        kept, of = map(int, options.pattern.split(":"))
        structure, sparsity = f"{of - kept}:{of}", 1 - kept / of  # its N of N:M counts the pruned ones
    else:
        structure, sparsity = "0:0", float(options.pattern.rstrip("%")) / 100
    # "lm_head" alone would not match: the name that it looks at ends with a dot
    recipe = MODIFIERS[options.method](
        sparsity=sparsity, mask_structure=structure, targets=["Linear"], ignore=["re:.*lm_head"]
    )
    data = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in batches]
    loader = DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType] - a list will do
    return oneshot(model=model, dataset=loader, recipe=recipe)


if __name__ == "__main__":
    worker.main(sparsify)
