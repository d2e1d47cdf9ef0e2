"""One run of modelopt_sparse: --method NAME or quality=LEVEL, each with data=self behind it or not, or reconstruct with
--masks-of FOLDER. See worker.py."""

import torch
import worker
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts

OWN_DATA = " data=self"  # behind a method: as many windows as the others get, written by the model


def sparsify(model, batches, options):
    method = options.method.removesuffix(OWN_DATA)
    data = {"data_loader": batches}
    if method != options.method:
        count, length = torch.cat(batches).shape
        data = {"data": "self", "num_samples": count, "seq_len": length}
    given = {**data, "pattern": options.pattern, "progress": False}
    given |= {"autocast": options.autocast, "sequential": options.sequential}
    if options.masks_of is not None:
        masks = nonzeros(options.masks_of, mts.make_plan(model, "magnitude", pattern=options.pattern))
        mts.sparsify(model, masks=masks, polish=True, reconstruct=True, **given)
    elif method.startswith("quality="):
        mts.sparsify(model, quality=method.removeprefix("quality="), **given)
    else:
        mts.sparsify(model, method, **given)
    return mts.export(model)


def nonzeros(folder, plan):
    """Masks of the plan's layers, by parameter name: True where the sparse model in ``folder`` is not zero."""
    sparse = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [target.layer.parameter_name for target in plan.layers]
    return {name: sparse.get_parameter(name) != 0 for name in names}


if __name__ == "__main__":
    worker.main(sparsify)
