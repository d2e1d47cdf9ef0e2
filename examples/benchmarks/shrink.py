"""What a smaller model loses: channels or experts off by several choices, refit and repaired, and a block off.

    python examples/benchmarks/shrink.py                       # about an hour on one busy core
    python examples/benchmarks/shrink.py --model models/opt --sizes 25% 50% --rows norm "gram, refit"
    python examples/benchmarks/shrink.py --model models/softmax --sizes "25% experts" "50% experts"  # train_mixtures.py

Perplexity and KL(dense || smaller) are those of the first 100 windows of 512 tokens of the held-out text; each draw has
128 windows of the calibration text of its own. With experts, "C++" is KL on text of another domain, "own" on text that
the dense model has written. CPU seconds are those of the process.

"minitron" is ModelOpt's score, computed here: the mean of |x| over each window, squared, summed up. The rows of
Torch-Pruning see no data, and need `pip install --no-deps torch-pruning==1.6.1`. "its example" takes the same share of
heads and of the hidden size too, as its example for language models does: on the embedded model that did not end in ten
minutes. llm-compressor's REAP runs in an environment of its own, which is made in the folder ``--work``; without that
it is left out. "REAP's code" is the score as its released code computes it, whatever the router.
"""

import argparse
import copy
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from measure import cpp_headers, cut
from tools import Tools
from torch import Tensor, nn
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
LLM_COMPRESSOR, REAPS_CODE = "llm-compressor's REAP", "REAP's code"
MORE = 32  # windows of C++, and of the model's own text
PEERS = {"Torch-Pruning, MLP": {"mlp_alone": True}, "Torch-Pruning, its example": {"mlp_alone": False}}
CHANNELS: dict[str, dict[str, Any]] = {"25%": {"mlp": 0.25}, "50%": {"mlp": 0.5}, "block": {"blocks": 1}}
EXPERTS: dict[str, dict[str, Any]] = {"25% experts": {"experts": 0.25}, "50% experts": {"experts": 0.5}}
SIZES = {**CHANNELS, **EXPERTS}
TITLES = {"25%": "25 % of the channels", "50%": "50 % of the channels", "block": "1 block"}
CRITERIA = ("reap", "reap_sum", "frequency", "random")
OF_EXPERTS: dict[str, dict[str, Any]] = {
    **{criterion: {"criterion": criterion, "refit": False} for criterion in (*CRITERIA, REAPS_CODE, LLM_COMPRESSOR)},
    **{f"{each}, refit": {"criterion": each} for each in ("reap", "reap_sum", "random")},
    **{f"{each}, repaired": {"criterion": each, "reconstruct": 4} for each in ("reap", "reap_sum", "random")},
}
BASES = ("norm", "as is", "reap")  # the rows that others are shares of
BLOCK: dict[str, dict[str, Any]] = {"as is": {}, "reconstructed": {"reconstruct": REPAIR["reconstruct"]}}


def mixtures(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def kept_by(scores: dict[str, Tensor], share: float) -> dict[str, Any]:
    """Options of `shrink` that keep the experts with the largest of these scores [E] of each mixture."""
    counts = {name: len(each) - int(len(each) * share) for name, each in scores.items()}
    kept = {f"{name}.down_proj": sorted(each.topk(counts[name]).indices.tolist()) for name, each in scores.items()}
    return {"kept": {"experts": kept}, "experts": None, "criterion": None}


def at_random(dense: Any, draw: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return {name: torch.rand(len(each.down_proj), generator=generator) for name, each in mixtures(dense).items()}


@torch.no_grad()
def by_reaps_code(dense: Any, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """REAP's scores [E] as its released code has them: the gates are a softmax over the k largest logits."""
    sums: dict[str, Tensor] = {name: torch.zeros(2, len(each.down_proj)) for name, each in mixtures(dense).items()}

    def see(name: str, module: Any, args: tuple[Tensor, ...]) -> None:
        hidden, chosen, _ = args
        logits = nn.functional.linear(hidden, dense.get_submodule(name.replace(".experts", ".gate")).weight)
        largest, index = logits.topk(chosen.shape[-1])
        for expert in range(logits.shape[1]):
            token, place = (index == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(hidden[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
            norms = nn.functional.linear(module.act_fn(gate) * up, module.down_proj[expert]).norm(dim=-1)
            gates = largest.softmax(-1)[token, place]  # of these k alone: the same as divided by their sum
            sums[name][:, expert] += torch.stack([(norms * gates).sum(), torch.tensor(float(len(token)))])

    hooks = [each.register_forward_pre_hook(partial(see, name)) for name, each in mixtures(dense).items()]
    for batch in batches:
        dense(batch)
    for hook in hooks:
        hook.remove()
    return {name: total / count.clamp_min(1) for name, (total, count) in sums.items()}


def torch_pruning(model: Any, share: float, *, mlp_alone: bool) -> None:
    """What Torch-Pruning makes of a model, in place, with the options of its example for language models."""
    import torch_pruning as tp

    model.config.use_cache = False  # it traces outputs
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    config = model.config
    counts = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    counts["v_proj"] = counts["k_proj"]
    heads = {each: counts[end] for name, each in linears.items() if (end := name.rpartition(".")[2]) in counts}
    of_mlp = ("gate_proj", "up_proj", "fc1", "intermediate.dense")
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
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *PEERS, *OF_EXPERTS], help="ways (all of ours)")
    parser.add_argument("--work", type=Path, help="a folder for llm-compressor, which is left out without it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    windows = cut(tokenizer, (TESTBED / "calibration.txt").read_text(encoding="utf-8")).split(options.calibration)
    heldout = cut(tokenizer, (TESTBED / "heldout.txt").read_text(encoding="utf-8"), options.heldout)
    dense = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    texts = {"heldout": heldout}
    if {*EXPERTS} & {*options.sizes}:
        with tempfile.TemporaryDirectory() as folder:
            file = mts.write_text(
                dense, f"{folder}/own.jsonl", data="self", tokenizer=tokenizer, windows=MORE, seq_len=512
            )
            texts["own"] = cut(tokenizer, "".join(json.loads(line)["text"] for line in file.read_text().splitlines()))
        texts["C++"] = cut(tokenizer, cpp_headers(MORE), MORE)

    def evaluated(model: Any, text: Tensor) -> Any:
        return mts.evaluate(model, text.flatten(), seq_len=text.shape[1], reference=dense, progress=False)

    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.processor() or platform.machine()}, {options.threads} threads, {options.draws} draws\n\n"
        f"| off | by | KL | share |{''.join(f' {name} |' for name in list(texts)[1:])} perplexity | parameters | "
        f"CPU seconds |\n| --- | --- |{' ---: |' * (len(texts) + 4)}"
    )
    of_sizes = {**dict.fromkeys(options.sizes, ROWS), "block": BLOCK, **dict.fromkeys(EXPERTS, OF_EXPERTS)}
    asked_for = {way: {**ROWS, **PEERS, **OF_EXPERTS}[way] for way in options.rows or ()}
    ways = {size: (size != "block" and asked_for) or of_sizes[size] for size in options.sizes}
    runs = [(size, way, {**SIZES[size], **more}) for size, of_size in ways.items() for way, more in of_size.items()]
    runs = [run for run in runs if options.work is not None or run[1] != LLM_COMPRESSOR]
    base: dict[str, float] = {}
    found: list[Any] = []
    for size, way, asked in runs:
        found, seconds = [], []
        for draw in range(options.draws):
            model, began = copy.deepcopy(dense), time.process_time()
            batches, how, criterion = list(windows[draw].split(8)), dict(asked), asked.get("criterion")
            if criterion == "random":
                how |= kept_by(at_random(dense, draw), asked["experts"])
            if criterion == REAPS_CODE:
                how |= kept_by(by_reaps_code(dense, batches), asked["experts"])
            if way in PEERS:
                torch_pruning(model, asked["mlp"], mlp_alone=asked["mlp_alone"])
            elif criterion == LLM_COMPRESSOR:
                place, percent = options.work / "reap", f"{asked['experts']:.0%}"
                arguments = ("llmcompressor", options.model.resolve(), windows[draw], place.resolve())
                cost = Tools(options.work, options.threads).run(*arguments, "--method", "reap", "--pattern", percent)
                model, began = AutoModelForCausalLM.from_pretrained(place), time.process_time() - cost["cpu_seconds"]
            else:
                mts.shrink(model, data_loader=batches, progress=False, **how)
            seconds.append(time.process_time() - began)
            found.append([evaluated(model, text) for text in texts.values()])
        kls = [mean(of_draw[place].kl for of_draw in found) for place in range(len(texts))]
        of_heldout = [of_draw[0] for of_draw in found]
        if way in BASES:
            base[size] = kls[0]
        share = f"{kls[0] / base[size]:.2f}" if size in base else ""
        spread = (
            f"{kls[0]:.3f} ({min(each.kl for each in of_heldout):.3f} to {max(each.kl for each in of_heldout):.3f})"
        )
        perplexity, left = mean(each.perplexity for each in of_heldout), size_of(model) / size_of(dense)
        cells = TITLES.get(size, size), way, spread, share, *(f"{kl:.3f}" for kl in kls[1:])
        cells = *cells, f"{perplexity:.3f}", f"{left:.1%}", f"{mean(seconds):.0f}"
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nThe dense model has a perplexity of {found[0][0].reference_perplexity:.3f}.")


if __name__ == "__main__":
    main()
