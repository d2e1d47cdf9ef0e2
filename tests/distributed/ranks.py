"""What processes of a group do in test_distributed.py and test_distributed_training.py.

As a program, `python -m tests.distributed.ranks FOLDER [GROUP...]`, it runs the scenarios in one process, in two and in
four, which leave what they found in FOLDER; hanging ones are killed. The processes are forked from one that has
imported everything, which makes them cheap.
"""

import hashlib
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import modelopt_sparse as mts
from modelopt_sparse import distributed
from modelopt_sparse.accuracy.tuning import BatchNumbers, TunedWeights
from modelopt_sparse.calibration.dense import blocks_in_call_order
from modelopt_sparse.calibration.stats import collect
from modelopt_sparse.distributed import RankError
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.methods.sparsegpt import SparseGPT
from modelopt_sparse.plan.plan import library_versions
from modelopt_sparse.run import calibrating
from tests.distributed.test_distributed_training import SCENARIOS as TRAINING
from tests.faults.faulty import FAULTS, flip, run_command
from tests.helpers import TESTBED, calibrated_run, free_port, tiny_llama, token_batches
from tests.models import expert_models
from tests.models.architectures import ARCHITECTURES, VOCAB
from tests.models.changing import Choosing, Sharing

LIMIT = 240.0  # seconds for each group; about 40 on a quiet machine
Found = dict[str, Any]


BATCHES = {"llama": token_batches(6), "mixtral": token_batches(6, vocab=expert_models.VOCAB)}
BATCHES["phi3"] = token_batches(6, vocab=VOCAB)
HELD_OUT = {name: torch.cat(token_batches(4, vocab=53, seed=7)) for name in BATCHES}
MIXTRAL, PHI3 = expert_models.MODELS["mixtral"], ARCHITECTURES["phi3"].build
MODELS: dict[str, Callable[[], nn.Module]] = {"llama": tiny_llama, "mixtral": MIXTRAL, "phi3": PHI3}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def result(name: str, model: nn.Module) -> Found:
    with torch.no_grad():
        loss = float(model(HELD_OUT[name], labels=HELD_OUT[name]).loss)
    return {"state": state(model), "loss": loss, "report": mts.report(model).as_dict()}


def sparse(name: str, method: Any, **options: Any) -> Found:
    name, _, dtype = name.partition(" in ")
    model = MODELS[name]().to(getattr(torch, dtype or "float32"))
    mts.sparsify(model, method, **{"data_loader": BATCHES[name], "progress": False, "min_tokens": 8, **options})
    return result(name, model)


def too_hard() -> None:
    raise ArithmeticError("this layer is too hard")


def pressed_ctrl_c() -> None:
    raise KeyboardInterrupt


class Failing(Magnitude):
    """Magnitude in which something happens in one process before the first of its layers in the second block."""

    name = "failing"

    def __init__(self, *, where: int | None, then: Callable[[], object] = too_hard) -> None:
        self.where, self.then = where, then
        self.weights = [*tiny_llama().get_submodule("model.layers.1").parameters()]

    def solve(self, weight, state, pattern, options):
        if rank() == self.where and any(torch.equal(weight, of_second) for of_second in self.weights):
            self.where = None
            self.then()
        return super().solve(weight, state, pattern, options)


# scenarios: run in every process of a group, give back what the tests look at ----------------------------------------


def methods() -> Found:
    chosen = ("magnitude", "wanda", "sparsegpt") if size() < 4 else ("sparsegpt",)
    return {method: sparse("llama", method) for method in chosen}


def modes() -> Found:
    return {mode: sparse("llama", "sparsegpt", sequential=mode) for mode in ("stage", "none")}


def experts() -> Found:
    if size() == 4:  # as many as there are experts
        return {"sparsegpt": sparse("mixtral", "sparsegpt")}
    return {
        "sparsegpt": sparse("mixtral", "sparsegpt"),
        "wanda": sparse("mixtral", "wanda", pattern=0.5),
        "magnitude": sparse("mixtral", "magnitude"),
        **{how: sparse("mixtral", "sparsegpt", experts=how, **FEW_AT_A_TIME) for how in ("pool", "weight_only")},
        "few at a time, in bfloat16": sparse("mixtral in bfloat16", "sparsegpt", **FEW_AT_A_TIME),
        "all tokens": sparse("mixtral", "sparsegpt", experts="all_tokens", min_tokens=90),
        "all tokens, few at a time": sparse("mixtral", "sparsegpt", experts="all_tokens", **FEW_AT_A_TIME),
    }


BEST = {"epochs": 1, "masks": "move", "metric": "fisher"}
FEW_AT_A_TIME: dict[str, Any] = {"memory_limit": 100_000, "min_tokens": 90}  # most experts have few tokens


def architectures() -> Found:
    """A decoder behind an encoder; blocks that cannot be run one by one; layers outside of the blocks. With padding."""
    found = {}
    for name in ("t5", "albert"):
        model = ARCHITECTURES[name].build()
        batches = ARCHITECTURES[name].batches("right")
        options: dict[str, Any] = {"sequential": "stage", "progress": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what calibration through the whole model costs
            mts.sparsify(model, "sparsegpt", pattern="2:4", data_loader=batches, **options)
        found[name] = {"state": state(model), "report": mts.report(model).as_dict()}
    return found


def loop(model: nn.Module) -> None:
    """This process's share of the batches."""
    for batch in BATCHES["llama"][rank() :: size()]:
        model(batch)


def more_options() -> Found:
    own = BATCHES["llama"][rank() :: size()]
    budget: dict[str, Any] = {"budget": "50% zeros", "choices": ["dense", "2:4", "40%", "60%"]}
    return {
        "five batches": sparse("llama", "sparsegpt", max_batches=5),
        "own data": sparse("llama", "sparsegpt", data_loader=own, split_data=False),
        "everything": sparse("llama", "sparsegpt", permute=True, polish=4, reconstruct=1),
        "budget": sparse("llama", "wanda", **budget),
        "budget of experts": sparse("mixtral", "wanda", **budget, **FEW_AT_A_TIME),
        "loop": sparse("llama", "sparsegpt", data_loader=None, forward_loop=loop),
        "best": sparse("llama", "sparsegpt", self_data=12, reconstruct=BEST, distill=1),
    }


def losses_from_a_file(folder: Path) -> None:
    """All processes know what was measured. The batch that judges is the second process's."""
    options = {"budget": "50% zeros", "choices": ["dense", "2:4"], "losses": folder / "losses.json", "progress": False}
    batches = [torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    model: nn.Module = nn.Identity()
    for _ in range(2):  # the first run writes the file
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        mts.sparsify(model, "wanda", data_loader=batches, include=["0", "2"], **options)
    settings = mts.report(model).settings
    assert settings["divergence"] == settings["budget"]["divergence"] == "squared"


def by_themselves() -> Found:
    """Each process for itself, with its own data and its own method."""
    own = ("wanda", "sparsegpt")[rank() % 2]
    return sparse("llama", own, distributed=False, data_loader=BATCHES["llama"][rank() :])


def gram_matrices() -> Found:
    found: Found = {}
    for name, make in MODELS.items():
        model = make()
        run, data = calibrated_run(model, "sparsegpt", data_loader=BATCHES[name], min_tokens=1)
        with run.processes, calibrating(model):
            for block in blocks_in_call_order(run, data):
                for shared in collect(block.layer_plans, block.inputs(), run):
                    found[f"{name} {shared.layer_plans[0].name}"] = (shared.stats.tokens, shared.stats.gram)
                block.inputs().advance()
            run.processes.barrier()
    return found


def sharing() -> Found:
    """Layers that share an input in one process only: all of them collect again, each layer by itself."""
    batches = torch.randn(6, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    batches[:, 0, 0, 0] = 1
    batches[3, 0, 0, 0] = -1  # one batch of one process
    return state(mts.sparsify(Sharing(), "sparsegpt", data_loader=list(batches), progress=False))


def choosing() -> Found:
    """Layers that some processes never come to (of two the second one, to the first and the last) are solved in the
    order in which one process comes to them, with the tokens of those that do."""
    batches = torch.randn(4, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    for batch, chosen in zip(batches, (2, 1, 0, 1)):
        batch[0, 0, 0] = chosen
    model = mts.sparsify(Choosing(), "sparsegpt", data_loader=list(batches), progress=False)
    found = [(layer.name, layer.tokens) for layer in mts.report(model).layers]
    assert found == [(f"blocks.{i}.choices.{j}", 24 if j == 1 else 12) for i in (0, 1) for j in (2, 1, 0)]
    return state(model)


ROWS = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))  # of four units of a step
REACHED = (range(4), (0,), ())  # the units that have a gradient of each weight


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(2, 3, generator=generator)) for _ in REACHED]


def added_up() -> None:
    """A step takes the gradients of all rows, those that autograd makes of the rows at once, the same in all processes;
    None where no row has one. Sums are of what each process has: of all, of the last alone, and of one axis in the
    first process and two in the others."""
    weights = parameters()
    tuned = TunedWeights(dict.fromkeys(weights), {}, 0.1)
    with distributed.Processes.of(None) as processes:
        batches = BatchNumbers.of(processes, [*[0] * (len(ROWS) // size()), 1], 0)

        def gradients_of(number: int) -> list[Tensor | None]:
            for weight, units in zip(weights, REACHED):
                if number in units:
                    (ROWS[number] @ weight.T).square().sum().backward()
            return [weight.pop_gradient() for weight in tuned.members]

        (numbers,) = batches.steps
        gradients = batches.summed_gradients(numbers, gradients_of, tuned)
        axes = (3,) if rank() == 0 else (2, 3)
        own = {"of all": torch.full((2, 3), 2.0 ** rank()), "of fewer axes": torch.ones(axes)}
        own |= {"of the last": torch.arange(3.0)} if rank() == size() - 1 else {}
        sums = processes.sum_by_key("sums", own, torch.device("cpu"))
        for gradient in processes.all_gather("gradients", gradients):
            for one, other in zip(gradient, gradients):
                assert one is other is None or torch.equal(one, other)
        processes.barrier()
    for gradient, weight, units in zip(gradients, parameters(), REACHED):
        if not units:
            assert gradient is None
            continue
        (ROWS[[*units]] @ weight.T).square().sum().backward()
        torch.testing.assert_close(gradient, weight.grad)
    assert torch.equal(sums["of all"], torch.full((2, 3), 2.0 ** size() - 1))
    assert torch.equal(sums["of the last"], torch.arange(3.0))
    assert torch.equal(sums["of fewer axes"], torch.full((2, 3) if size() > 1 else (3,), float(size())))


def saved(folder: Path) -> Found:
    torch.manual_seed(0)
    model = mts.sparsify(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)), "magnitude", include="*", progress=False)
    for _ in range(4):  # the first time it is a new folder
        mts.save(model, folder / f"saved-{size()}", overwrite=True)
    sparse_llama = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    return {"error": error_of(lambda: mts.save(sparse_llama, folder / f"llama-{size()}"))}


OF_LAYER_0 = "--num-samples 5 --set include=['*.layers.0.*'] --set float32_products=false"
STREAMED_BY_COMMAND = "--stream --num-samples 13 --dtype float32 --no-progress"  # a rounding of bfloat16 would grow


def sparsify_command(out: Path, flags: str) -> list[str]:
    """The arguments of `modelopt-sparse`."""
    flags = f"--method sparsegpt --seq-len 32 --batch-size 1 {flags}"
    data = ["--data", TESTBED / "calibration.txt", "--out", out]
    return ["sparsify", *map(str, [TESTBED / "tiny-llama", *flags.split(), *data])]


def started(out: Path, flags: str) -> Found:
    """`modelopt-sparse sparsify` in a process that torchrun has started."""
    code, said = run_command(sparsify_command(out, flags))
    return {"code": code, **said, "left": dist.is_initialized()}


def command_line(folder: Path) -> Found:
    return started(folder / "launched" / "sparse", f"{OF_LAYER_0} --no-progress")


def command_that_streams(folder: Path) -> Found:
    return started(folder / "launched-to-stream", STREAMED_BY_COMMAND)


def command_that_fails(folder: Path) -> Found:
    """In rank 0, which writes."""

    def on_a_full_disk(*_args: Any, **_options: Any) -> None:
        raise OSError("the disk is full")

    setattr(mts, "save", on_a_full_disk)  # noqa: B010  # this process ends after it
    return started(folder / "launched" / "sparse", f"{OF_LAYER_0} --overwrite --no-progress")


# streaming -----------------------------------------------------------------------------------------------------------


class Slow(SparseGPT):
    """SparseGPT that takes its time in the second process, which then has fewer layers to solve in the next block."""

    name = "slow"

    def solve(self, weight, state, pattern, options):
        time.sleep(0.05 if rank() == 1 else 0)
        return super().solve(weight, state, pattern, options)


EVERYTHING: dict[str, Any] = {"permute": True, "polish": 4, "reconstruct": 1}
STREAMED: dict[str, tuple[str, Any, dict[str, Any]]] = {  # name -> model, method, options
    "everything, spilled": ("llama", "sparsegpt", {**EVERYTHING, "spill": True}),
    "stage, five batches": ("llama", "sparsegpt", {"sequential": "stage", "max_batches": 5, "pattern": 0.5}),
    "none": ("llama", "wanda", {"sequential": "none"}),
    "names that differ on disk": ("mixtral", "sparsegpt", {}),
    "a slow process": ("llama", Slow(), {}),
    "no shared inputs": ("phi3", None, {"quality": "balanced", "reconstruct": {"masks": "move", "epochs": 1}}),
    "not calibrated": ("llama", "magnitude", {}),
    "few at a time": ("mixtral", "sparsegpt", FEW_AT_A_TIME),
    "packed": ("mixtral", "sparsegpt", {"packed": True}),
}


def source(folder: Path, name: str) -> Path:
    """A dense folder, of the same weights for any number of processes."""
    path = folder / f"dense-{name}-{size()}"
    if rank() == 0 and not path.exists():
        model: Any = MODELS[name]()
        model.save_pretrained(path.with_suffix(".made"))
        path.with_suffix(".made").rename(path)
    if size() > 1:
        dist.barrier()
    return path


def stream(folder: Path, target: Path, name: str, method: Any, **options: Any) -> Found:
    """What `sparsify_checkpoint` returns, and the SHA-256 of each file that does not tell times."""
    given = {"data_loader": BATCHES[name], "min_tokens": 8, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of experts with few tokens
        report = mts.sparsify_checkpoint(source(folder, name), target, method, **given)
    files = [path for path in sorted(target.iterdir()) if path.name != "sparsity.json"]
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    layers = [{**vars(layer), "steps": [step.error for step in layer.steps], "seconds": 0} for layer in report.layers]
    return {"files": hashes, "layers": layers, "notes": report.notes, "settings": report.settings}


OF_THREE = ("everything, spilled", "stage, five batches", "names that differ on disk", "not calibrated")


def streamed(folder: Path) -> Found:
    found = {}
    for name, (model, method, options) in STREAMED.items():
        if size() == 3 and name not in OF_THREE:
            continue
        found[name] = stream(folder, folder / f"streamed-{size()}" / name, model, method, **options)
    return found


def streamed_on(folder: Path) -> Found:
    """All go on with what one process began, in the second block."""
    target = folder / f"streamed-on-{size()}"
    dense, error = source(folder, "llama"), ""
    if rank() == 0:
        began = {"data_loader": BATCHES["llama"], "min_tokens": 8, "progress": False}
        method = Failing(where=0)
        error = error_of(lambda: mts.sparsify_checkpoint(dense, target, method, distributed=False, **began))
    if size() > 1:
        dist.barrier()
    return {"error": error, **stream(folder, target, "llama", Failing(where=None))}


STREAMS = {"blocks_by": "influence"}
SMALLER: dict[str, tuple[str, dict[str, Any]]] = {
    "by kl": ("llama", {"mlp": 0.25, "blocks": 1}),
    "tuned": ("llama", {"mlp": 24, "blocks": 1, "reconstruct": {"epochs": 1, "metric": "fisher"}, **STREAMS}),
    "experts": ("mixtral", {"experts": 1, **STREAMS}),
}


def smaller(folder: Path) -> Found:
    """In memory, and what is streamed: states, choices, and the SHA-256 of the streamed weights."""
    found: Found = {}
    for name, (kind, options) in SMALLER.items():
        given = {"data_loader": BATCHES[kind], "progress": False, **options}
        model, target = MODELS[kind](), folder / f"smaller-{size()}" / name
        shrunk = mts.report(mts.shrink(model, **given)).shrunk
        choice = shrunk.kept, shrunk.scores, shrunk.errors, shrunk.tried, shrunk.kl
        found[name] = {"state": state(model), "choice": choice}
        if "blocks_by" in options:
            mts.shrink_checkpoint(source(folder, kind), target, **given)
            weights = sorted(target.glob("*.safetensors"))
            found[name]["files"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
            found[name]["streamed"] = state(mts.load(target))
    criterion = "gram" if rank() == 0 else "norm"
    unlike = {"data_loader": BATCHES["llama"], "progress": False, "criterion": criterion}
    found["unlike"] = error_of(lambda: mts.shrink(tiny_llama(), mlp=24, **unlike))
    return found


def streaming_refused(folder: Path) -> Found:
    """What is wrong for one process is an error in all, and nothing is left."""
    other, dense = rank() == 1, source(folder, "llama")
    own, changed = folder / f"dense-of-rank-{rank()}", folder / f"changed-of-rank-{rank()}"
    copy = shutil.copytree(dense, folder / f"copy-of-rank-{rank()}")
    shutil.copytree(dense, changed)
    shutil.copytree(dense, own)
    if other:
        flip(str(changed / "model.safetensors"))
        with (own / "config.json").open("a") as file:
            file.write(" ")
    versions = {**library_versions(), **({"torch": "2.5.0"} if other else {})}
    target = folder / "streamed-refused"

    def run(place: Path = dense, out: Path = target, **options: Any) -> str:
        given = {"data_loader": BATCHES["llama"], "progress": False, **options}
        return error_of(lambda: mts.sparsify_checkpoint(place, out, "wanda", **given))

    cases = {
        "source": run(own),
        "byte": run(changed),
        "copies": run(copy, folder / "streamed-of-copies"),
        "devices": run(out=folder / "streamed-on-devices", device=f"cpu:{rank()}"),
        "option": run(pattern="2:4" if other else "1:4"),
        "data": run(data_loader=BATCHES["llama"][:: -1 if other else 1]),
        "target": run(out=folder / f"streamed-refused-{rank()}"),
        "kind of device": run(device="meta" if other else "cpu"),
        "alone": run(out=folder / f"streamed-alone-{rank()}", distributed=False),
    }
    with patch("modelopt_sparse.plan.plan.library_versions", lambda: versions):
        cases["version"] = run()
    return {"errors": cases, "left": sorted(path.name for path in folder.glob("streamed-refused*"))}


# failures ------------------------------------------------------------------------------------------------------------


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failing(model: nn.Module | None = None, method: Any = "wanda", **options: Any) -> Found:
    """What is raised, and whether the model is as it was; a call that works follows, or the processes have lost each
    other."""
    model = tiny_llama() if model is None else model
    before = state(model)
    given = {"data_loader": BATCHES["llama"], "progress": False, **options}
    began = time.monotonic()
    text = error_of(lambda: mts.sparsify(model, method, **given))
    seconds = time.monotonic() - began
    masks = [name for name, _ in mts.named_masks(model)]
    same = all(torch.equal(value, before[name]) for name, value in state(model).items() if name in before)
    mts.sparsify(tiny_llama(), "magnitude", progress=False)
    return {"error": text, "masks": masks, "same": same and not masks, "seconds": seconds, "state": state(model)}


ALSO_OF_FOUR = ("weights", "batch", "solve")


def failures() -> Found:
    other = rank() == 1
    changed = tiny_llama()
    with torch.no_grad():
        changed.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 3] += 1e-6 if other else 0
    shuffled = BATCHES["llama"] if not other else BATCHES["llama"][::-1]
    generators = [torch.Generator().manual_seed(seed) for seed in range(6)]
    holed: list[Any] = [{"inputs_embeds": torch.randn(1, 8, 32, generator=generator)} for generator in generators]
    holed[1]["inputs_embeds"][0, 3, 3] = float("nan")  # the second process's first batch
    too_large = [batch.clone() for batch in BATCHES["llama"]]
    too_large[1][0, 0] = 97  # no such token
    cases: dict[str, Callable[[], Found]] = {
        "weights": lambda: failing(changed),
        "data": lambda: failing(data_loader=shuffled),
        "pattern": lambda: failing(pattern="2:4" if other else "1:4"),
        "rule": lambda: failing(rules={"*.0.*": {"pattern": "1:4"} if other else {"pattern": "2:8"}}),
        "typo": lambda: failing(patern=2) if other else failing(),
        "not finite": lambda: failing(data_loader=holed),
        "batch": lambda: failing(data_loader=too_large),
        "few batches": lambda: failing(max_batches=size() - 1),
        "solve": lambda: failing(method=Failing(where=1)),
        "loop": lambda: failing(data_loader=None, forward_loop=loop_that_fails),
        "write": lambda: {"error": error_of(failing_to_write)},
    }
    found = {name: run() for name, run in cases.items() if size() == 2 or name in ALSO_OF_FOUR}
    if size() > 2:
        return found
    shards = tiny_llama()
    for layer in shards.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(shards)
    found["shards"] = {"error": error_of(lambda: mts.sparsify(shards, "magnitude", progress=False))}
    return found


def failing_to_write() -> None:
    with distributed.while_others_wait(None) as writes:
        if writes:
            raise OSError("the disk is full")


def loop_that_fails(model: nn.Module) -> None:
    loop(model)
    if rank() == 1:
        raise OSError("this process's data is gone")


def interrupted() -> Found:
    """Ctrl-C in one process."""
    return lost(Failing(where=1, then=pressed_ctrl_c))


def late() -> Found:
    """One process does not come in time."""
    distributed.TIMEOUT = timedelta(seconds=2)
    method = Failing(where=1, then=lambda: time.sleep(4))
    return {"error": error_of(lambda: mts.sparsify(tiny_llama(), method, progress=False))}


def killed() -> Found:
    return lost(Failing(where=1, then=FAULTS["kill"]))


def lost(method: Any) -> Found:
    """What is raised in the processes that are left, and when."""
    model, said = tiny_llama(), "nothing was raised"
    began = time.monotonic()
    try:
        mts.sparsify(model, method, progress=False)
    except (RankError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    return {"error": said, "seconds": time.monotonic() - began}


# the groups ----------------------------------------------------------------------------------------------------------

BASIC = (choosing, methods, experts, added_up, gram_matrices, sharing)
WORKING = (*BASIC, architectures, modes, more_options)
GROUPS: dict[str, tuple[int, tuple[Callable[..., Found | None], ...]]] = {
    "alone": (1, WORKING),
    "two": (2, (*WORKING, by_themselves, losses_from_a_file, saved, failures, late)),
    "four": (4, (*BASIC, saved, failures)),
    "interrupted": (2, (interrupted,)),
    "killed": (4, (killed,)),
    "streaming": (2, (streamed, streamed_on, streaming_refused, smaller)),
    "streaming in three": (3, (streamed, streamed_on)),
    "streaming alone": (1, (streamed, streamed_on, smaller)),
    "launched": (2, (command_line,)),
    "launched to fail": (2, (command_that_fails,)),
    "launched to stream": (2, (command_that_streams,)),
    "training": (2, TRAINING),
}


def work(number: int, group: str, folder: Path) -> None:
    count, scenarios = GROUPS[group]
    torch.set_num_threads(1)
    if group.startswith("launched"):  # the command line makes a group of its own
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    elif count > 1:
        if group == "streaming":  # torch, too, compares what is done; of three it would miss sends between the others
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        store = dist.FileStore(str(folder / f"{group}.store"), count)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count)
    found: Found = {}
    for scenario in scenarios:
        began = time.monotonic()
        try:
            found[scenario.__name__] = (scenario(folder) if scenario.__code__.co_argcount else scenario()) or {}
        except BaseException:
            found[scenario.__name__] = traceback.format_exc()
        found[f"{scenario.__name__} took"] = time.monotonic() - began
    torch.save(found, folder / f"{group}-{number}.pt")
    os._exit(0)  # after a failure, nobody may wait at the end


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[2:] or list(GROUPS)
    for group in chosen:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        how: dict[str, Any] = {"nprocs": GROUPS[group][0], "join": False, "start_method": "fork"}
        started: Any = mp.start_processes(work, (group, folder), **how)
        end = time.monotonic() + LIMIT
        for process in started.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                print(f"{group}: a process hangs", file=sys.stderr)
                process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
