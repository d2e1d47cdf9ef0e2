"""What masks cost at run time: dense modules beside sparse ones, torch.nn.utils.prune, and an optimizer hook.

    python examples/benchmarks/masks.py                        # all tables, about 15 minutes on two cores
    python examples/benchmarks/masks.py --only linear --rounds 5

The contenders of a row take turns, round by round, after one round that is not counted. A row gives the dense module's
median time, and for each contender the median over the rounds of its time divided by the dense one's in the same round.
All tables in Markdown. Only the public API is used, so an older version can be measured with the same file
(PYTHONPATH=OTHER_CHECKOUT).

``hook`` is what apex's ASP does: gradients times the mask before each optimizer step, weights times the mask after it.
In a forward it does nothing, so it stands only in the training tables.
"""

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts

TESTBED = Path(__file__).resolve().parents[1] / "testbed" / "tiny-llama"
SIZES, TOKENS, BATCHES = (64, 256, 512, 1024, 2048, 4096), (1, 128), (1, 32, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = {
    "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=1e-4, fused=True),
}
Contenders = dict[str, Callable[[], object]]


# what is compared -----------------------------------------------------------------------------------------------------


def layers_of(module: nn.Module) -> dict[str, nn.Linear]:
    """The Linear layers that are made sparse: all but a language model's head."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear) and child is not head}


def half(weight: Tensor) -> Tensor:
    """A 2:4 mask by magnitude."""
    return mts.NM(2, 4).mask(weight.detach().float().abs()).to(weight.device)


def ours(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for name, layer in layers_of(module).items():
        mts.set_mask(module, f"{name}.weight".removeprefix("."), half(layer.weight))
    return module


def pruned(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for layer in layers_of(module).values():
        prune.custom_from_mask(layer, "weight", half(layer.weight))
    return module


def hooked(module: nn.Module, make_optimizer: Callable) -> tuple[nn.Module, torch.optim.Optimizer]:
    """apex's ASP: its masks are bool tensors, and its optimizer multiplies by them."""
    module = copy.deepcopy(module)
    optimizer = make_optimizer(module.parameters())
    masks = {layer.weight: half(layer.weight) for layer in layers_of(module).values()}

    @torch.no_grad()
    def mask_gradients(*_: object) -> None:
        for weight, mask in masks.items():
            if weight.grad is not None:
                weight.grad.mul_(mask)

    @torch.no_grad()
    def mask_weights(*_: object) -> None:
        for weight, mask in masks.items():
            weight.mul_(mask)

    mask_weights()
    optimizer.register_step_pre_hook(mask_gradients)
    optimizer.register_step_post_hook(mask_weights)
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]) -> Callable:
    def run() -> None:
        loss(module).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


# the tables -----------------------------------------------------------------------------------------------------------


def linear(options: argparse.Namespace) -> Iterator[tuple[str, Contenders]]:
    for name, dtype in DTYPES.items():
        for size in SIZES:
            for tokens in TOKENS:
                dense = nn.Linear(size, size, device=options.device, dtype=dtype)
                x = torch.randn(tokens, size, device=options.device, dtype=dtype)
                modules = {"dense": dense, "ours": ours(dense), "prune": pruned(dense)}
                yield (
                    f"Linear {size} x {size}, {tokens} tokens, {name}",
                    {key: lambda module=module, x=x: module(x) for key, module in modules.items()},
                )


def generate(options: argparse.Namespace) -> Iterator[tuple[str, Contenders]]:
    """64 tokens of the testbed, greedily, with a KV cache."""
    model = AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32).to(options.device).eval()
    ids = torch.arange(16, device=options.device)[None] + 5
    arguments = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    modules = {"dense": model, "ours": ours(model), "prune": pruned(model)}
    yield (
        "testbed, generate, 64 tokens",
        {key: lambda module=module: module.generate(ids, **arguments) for key, module in modules.items()},
    )


def mlp(options: argparse.Namespace, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    return nn.Sequential(*layers).to(options.device, dtype)


def training(options: argparse.Namespace) -> Iterator[tuple[str, Contenders]]:
    for name, dtype in DTYPES.items():
        for title, make_optimizer in OPTIMIZERS.items():
            for batch in BATCHES:
                dense = mlp(options, dtype)
                x, y = torch.randn(2, batch, 1024, device=options.device, dtype=dtype)

                def loss(module: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
                    return F.mse_loss(module(x[:, :1024]), y)

                contenders = {
                    key: step(module, make_optimizer(module.parameters()), loss)
                    for key, module in (("dense", dense), ("ours", ours(dense)), ("prune", pruned(dense)))
                }
                contenders["hook"] = step(*hooked(dense, make_optimizer), loss)
                yield f"MLP, {title}, batch {batch}, {name}", contenders


def testbed(options: argparse.Namespace) -> Iterator[tuple[str, Contenders]]:
    model = AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32).to(options.device).train()
    ids = torch.randint(5, 2000, (4, 128), device=options.device)

    def loss(module: nn.Module) -> Tensor:
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    make_optimizer = OPTIMIZERS["AdamW, fused"]
    modules = {"dense": copy.deepcopy(model), "ours": ours(model), "prune": pruned(model)}
    contenders = {key: step(module, make_optimizer(module.parameters()), loss) for key, module in modules.items()}
    contenders["hook"] = step(*hooked(model, make_optimizer), loss)
    yield "testbed, 4 x 128 tokens, AdamW, fused", contenders


def compiled(options: argparse.Namespace) -> Iterator[tuple[str, Contenders]]:
    dense = mlp(options)
    modules = {"dense": dense, "ours": ours(dense)}
    fast = {key: torch.compile(module, fullgraph=True) for key, module in modules.items()}
    for batch in BATCHES:
        x = torch.randn(batch, 1024, device=options.device)

        def infer(module: Callable, x: Tensor = x) -> None:
            with torch.no_grad():
                module(x)

        yield (
            f"MLP, compiled, forward, batch {batch}",
            {key: lambda module=module, infer=infer: infer(module) for key, module in fast.items()},
        )
        contenders = {}
        for key, module in fast.items():
            optimizer = OPTIMIZERS["SGD, momentum"](modules[key].parameters())
            contenders[key] = step(module, optimizer, lambda module, x=x: module(x).square().mean())
        yield f"MLP, compiled, SGD step, batch {batch}", contenders


TABLES = {"linear": linear, "generate": generate, "training": training, "testbed": testbed, "compiled": compiled}
WITHOUT_GRADIENTS = ("linear", "generate")


# timing ---------------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], calls: int, options: argparse.Namespace) -> float:
    clock = time.process_time if options.cpu_time else time.perf_counter
    start = clock()
    for _ in range(calls):
        run()
    if options.device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / calls


def in_turns(contenders: Contenders, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The dense contender's median seconds a call, and the others' median ratios to it."""
    for run in contenders.values():
        run()  # not counted: compiling, first allocations
    once = max(seconds(contenders["dense"], 3, options), 1e-7)
    calls = max(1, min(2000, round(0.01 / once)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds):
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(seconds(contenders[name], calls, options))
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["dense"])) for name in times if name != "dense"
    }
    return statistics.median(times["dense"]), ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (%(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of all threads, for a busy machine")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="tables (all)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = (
        torch.cuda.get_device_name() if options.device.type == "cuda" else platform.processor() or platform.machine()
    )
    print(f"torch {torch.__version__}, {where}, {options.threads} threads, {options.rounds} rounds\n")
    for table in options.only:
        columns = ("ours", "prune") if table in WITHOUT_GRADIENTS else ("ours", "prune", "hook")
        print(f"| {table} | dense, microseconds | {' | '.join(columns)} |\n| --- |{' ---: |' * (len(columns) + 1)}")
        with torch.no_grad() if table in WITHOUT_GRADIENTS else nullcontext():
            for title, contenders in TABLES[table](options):
                dense, ratios = in_turns(contenders, options)
                cells = [f"{ratios[name]:.3f}" if name in ratios else "" for name in columns]
                print(f"| {title} | {dense * 1e6:,.1f} | {' | '.join(cells)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
