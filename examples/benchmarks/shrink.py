"""What a smaller model loses: channels or experts off by several choices, refit and repaired, and a block off.

    python examples/benchmarks/shrink.py                       # about an hour on one busy core
    python examples/benchmarks/shrink.py --model models/opt --sizes 25% 50% --rows norm "gram, refit"
    python examples/benchmarks/shrink.py --model models/softmax --sizes "25% experts" "50% experts"  # train_mixtures.py

Perplexity and KL(dense || smaller) are those of the first 100 windows of 512 tokens of the held-out text; each draw has
128 windows of the calibration text of its own. CPU seconds are those of the process. "minitron" is ModelOpt's score,
computed here: the mean of |x| over each window, squared, summed up. Torch-Pruning's rows see no data, and need
`pip install --no-deps torch-pruning==1.6.1`. "its example" takes the same share of heads and of the hidden size too, as
its example for language models does: on the embedded model that did not end in ten minutes.
"""

import argparse
import copy
import platform
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from measure import cut
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
REPAIR = {"reconstruct": {"epochs": 4, "metric": "fisher"}, "distill": 4}
ROWS: dict[str, dict[str, Any]] = {
    "minitron": {"criterion": "minitron", "refit": False},
    "norm": {"criterion": "norm", "refit": False},
    "norm, refit": {"criterion": "norm"},
    "gram": {"refit": False},
    "gram, refit": {},
    "gram, refit, repaired": REPAIR,
}
PEERS = {"Torch-Pruning, MLP": {"mlp_alone": True}, "Torch-Pruning, its example": {"mlp_alone": False}}
CHANNELS: dict[str, dict[str, Any]] = {"25%": {"mlp": 0.25}, "50%": {"mlp": 0.5}, "block": {"blocks": 1}}
EXPERTS: dict[str, dict[str, Any]] = {"25% experts": {"experts": 0.25}, "50% experts": {"experts": 0.5}}
SIZES = {**CHANNELS, **EXPERTS}
TITLES = {"25%": "25 % of the channels", "50%": "50 % of the channels", "block": "1 block"}
CRITERIA = ("reap", "reap_sum", "frequency", "gate", "activation", "output", "random")
OF_EXPERTS: dict[str, dict[str, Any]] = {
    **{criterion: {"criterion": criterion} for criterion in CRITERIA},
    **{f"{each}, repaired": {"criterion": each, "reconstruct": 4} for each in ("reap", "output", "random")},
}
BASES = ("norm", "as is", "reap")  # the rows that others are shares of
BLOCK: dict[str, dict[str, Any]] = {"as is": {}, "reconstructed": {"reconstruct": REPAIR["reconstruct"]}}


def at_random(dense: Any, asked: dict[str, Any], draw: int) -> dict[str, Any]:
    """Options of `shrink` for experts drawn at random."""
    generator = torch.Generator().manual_seed(draw)
    kept = {}
    for name, parameter in dense.named_parameters():
        if name.endswith(".experts.down_proj"):
            stay = len(parameter) - int(len(parameter) * asked["experts"])
            kept[name] = sorted(torch.randperm(len(parameter), generator=generator)[:stay].tolist())
    return {"kept": {"experts": kept}, "experts": None, "criterion": None}


def torch_pruning(model: Any, share: float, *, mlp_alone: bool) -> None:
    """What Torch-Pruning makes of a model, in place, with the options of its example for language models."""
    import torch_pruning as tp

    model.config.use_cache = False  # it traces outputs
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    config = model.config
    counts = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    counts["v_proj"] = counts["k_proj"]
    heads = {each: counts[end] for name, each in linears.items() if (end := name.rpartition(".")[2]) in counts}
    of_mlp = ("gate_proj", "up_proj", "fc1")
    rest = [each for name, each in linears.items() if not name.endswith(of_mlp)]
    more: dict[str, Any] = {"ignored_layers": rest if mlp_alone else [model.lm_head]}
    if not mlp_alone:
        more |= {"num_heads": heads, "prune_num_heads": True, "prune_head_dims": False, "head_pruning_ratio": share}
    pruner = tp.pruner.BasePruner(
        model,
        torch.zeros(1, 8, dtype=torch.long),
        tp.importance.GroupMagnitudeImportance(p=2, group_reduction="mean"),
        pruning_ratio=share,
        round_to=4,
        output_transform=lambda output: output.logits,
        **more,
    )
    for group in pruner.step(interactive=True):
        group.prune()
    for attention in (each for name, each in model.named_modules() if name.endswith("self_attn") and not mlp_alone):
        attention.num_heads = attention.q_proj.out_features // attention.head_dim
        attention.num_key_value_groups = attention.q_proj.out_features // attention.k_proj.out_features
    config.use_cache = True


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of calibration windows (%(default)s)")
    parser.add_argument("--calibration", type=int, default=128, help="windows of 512 tokens in a draw (%(default)s)")
    parser.add_argument("--heldout", type=int, default=100, help="windows of 512 tokens (%(default)s)")
    parser.add_argument("--model", type=Path, default=TESTBED / "tiny-llama", help="folder (the testbed's)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(CHANNELS), help="what goes (all but experts)")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *PEERS], default=list(ROWS), help="ways (all of ours)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    windows = cut(tokenizer, (TESTBED / "calibration.txt").read_text(encoding="utf-8")).split(options.calibration)
    heldout = cut(tokenizer, (TESTBED / "heldout.txt").read_text(encoding="utf-8"), options.heldout)
    dense = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.processor() or platform.machine()}, {options.threads} threads, {options.draws} draws\n\n"
        "| off | by | KL | share | perplexity | parameters | CPU seconds |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    ways = {size: {way: {**ROWS, **PEERS}[way] for way in options.rows} for size in options.sizes}
    ways |= {size: BLOCK if size == "block" else OF_EXPERTS for size in {"block", *EXPERTS} & {*options.sizes}}
    runs = [(size, way, {**SIZES[size], **more}) for size, of_size in ways.items() for way, more in of_size.items()]
    base: dict[str, float] = {}
    found: list[Any] = []
    for size, way, asked in runs:
        found, seconds = [], []
        for draw in range(options.draws):
            model, began = copy.deepcopy(dense), time.process_time()
            how = {**asked, **at_random(dense, asked, draw)} if asked.get("criterion") == "random" else asked
            if way in PEERS:
                torch_pruning(model, asked["mlp"], mlp_alone=asked["mlp_alone"])
            else:
                mts.shrink(model, data_loader=list(windows[draw].split(8)), progress=False, **how)
            seconds.append(time.process_time() - began)
            found.append(
                mts.evaluate(model, heldout.flatten(), seq_len=heldout.shape[1], reference=dense, progress=False)
            )
        kl = mean(each.kl for each in found)
        if way in BASES:
            base[size] = kl
        share = f"{kl / base[size]:.2f}" if size in base else ""
        spread = f"{kl:.3f} ({min(each.kl for each in found):.3f} to {max(each.kl for each in found):.3f})"
        perplexity, left = mean(each.perplexity for each in found), size_of(model) / size_of(dense)
        cells = TITLES.get(size, size), way, spread, share, f"{perplexity:.3f}", f"{left:.1%}", f"{mean(seconds):.0f}"
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nThe dense model has a perplexity of {found[0].reference_perplexity:.3f}.")


if __name__ == "__main__":
    main()
