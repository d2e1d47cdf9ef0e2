"""One run of NVIDIA ModelOpt's weight sparsity: --method sparse_magnitude or sparsegpt, 2:4 only. See worker.py."""

import modelopt.torch.sparsity as mts  # pyright: ignore[reportMissingImports] - in an environment of its own
import worker


def sparsify(model, batches, options):
    config = {"data_loader": batches, "collect_func": lambda batch: batch}
    config = config if options.method == "sparsegpt" else {}  # sparse_magnitude takes no data
    rules = {"nn.Linear": {"*": {}, f"*{options.skip}*": None}}  # its default is to skip lm_head
    model = mts.sparsify(model, [(options.method, rules)], {**config, "pattern": f"{options.pattern} sparsity"})
    return mts.export(model)  # until then state_dict() has the dense weights


if __name__ == "__main__":
    worker.main(sparsify)
