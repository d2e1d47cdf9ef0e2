"""Training on two processes (gloo, on the CPU): zeros hold, and the weights become those of one process.

ranks.py runs the scenarios in one pair of processes. Some leave their results in files, for a comparison with one
process; others assert for themselves.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import modelopt_sparse as mts
from modelopt_sparse import training
from tests.helpers import tiny_llama, token_batches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WORLD = 2
STEPS = 8
MASKED = ("0.weight", "2.in_proj_weight", "2.out_proj.weight", "4.weight")
Loss = Callable[[nn.Module], Tensor]
FULL = StateDictOptions(full_state_dict=True, strict=True)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x, x, x, need_weights=False)[0]


def dense_model() -> nn.Sequential:
    """Attention without biases: that of the keys has no gradient but rounding, which AdamW would blow up."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), SelfAttention(16, 2, bias=False, batch_first=True), nn.Tanh(), nn.Linear(16, 8)
    )


def put_masks(model: nn.Module) -> None:
    for seed, name in enumerate(MASKED):
        shape = model.get_parameter(name).shape
        order = torch.randperm(shape.numel(), generator=torch.Generator().manual_seed(seed))
        mts.set_mask(model, name, (order % 2 == 0).view(shape))


def sparse_model() -> nn.Sequential:
    model = dense_model()
    put_masks(model)
    return model


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1))
    return x, x.flip(-1)


def share(batch: Tensor) -> Tensor:
    """This process's part of a batch; all of it where there is one process."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def everywhere(loss: float) -> float:
    """The mean over the processes."""
    if not dist.is_initialized():
        return loss
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): full(parameter) for name, parameter in model.named_parameters()}


def lost_zeros(model: nn.Module) -> list[str]:
    """The masked parameters that are not exactly +0.0 at rest, looked at without a forward or a state dict."""
    found = values(model)
    lost = []
    for name, mask in mts.named_masks(model):
        pruned = found[name.removeprefix("module.")][~full(mask)]
        if pruned.count_nonzero() or torch.signbit(pruned).any():
            lost.append(name)
    return lost


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)


def loss_of(model: nn.Module) -> Tensor:
    x, target = data()
    return F.mse_loss(model(share(x)), share(target))


def train(model: nn.Module, optimizer: Optimizer, steps: int = STEPS, loss_of: Loss = loss_of) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(everywhere(loss.item()))
    return losses


def trained(model: nn.Module, loss_of: Loss = loss_of) -> dict[str, Any]:
    losses = train(model, adamw(model.parameters()), loss_of=loss_of)
    return {"losses": losses, "lost": lost_zeros(model), "values": values(model)}


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for child in model:
        if list(child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


# scenarios: run in both processes, give back what rank 0 hands to the tests -----------------------------------------


def ddp() -> dict[str, Any]:
    return trained(DistributedDataParallel(sparse_model()))


def ddp_two_forwards_before_one_backward() -> dict[str, Any]:
    model = DistributedDataParallel(sparse_model())
    x, target = (share(part) for part in data())
    loss = sum(F.mse_loss(model(x[half::2]), target[half::2]) for half in range(2)) / 2
    loss.backward()
    return {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}


def fsdp() -> dict[str, Any]:
    model = sharded(sparse_model())
    whole = model[0].weight.numel()
    found = {"shard": model[0].weight.to_local().numel() / whole, **trained(model)}
    return {**found, "state": copy.deepcopy(get_model_state_dict(model, options=FULL))}


def sparse_llama() -> nn.Module:
    return mts.sparsify(tiny_llama(tie_word_embeddings=False), "magnitude", progress=False).train()


def loss_of_llama(model: nn.Module) -> Tensor:
    tokens = share(token_batches(1, batch=4)[0])
    return model(input_ids=tokens, labels=tokens).loss


def fsdp_of_a_llama(folder: Path) -> dict[str, Any]:
    model: Any = sparse_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = trained(model, loss_of_llama)
    state = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "llama", state_dict=state)
    return found


def fsdp_in_mixed_precision() -> dict[str, Any]:
    return trained(sharded(sparse_model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


def fsdp_with_masks_set_after_sharding() -> dict[str, Any]:
    model = sharded(dense_model())
    put_masks(model)
    return trained(model)


def attach_optimizer_holds_zeros_of_sharded_weights_and_of_momentum_older_than_the_masks() -> None:
    for attached in (False, True):
        model = sharded(dense_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        train(model, optimizer, 2)
        put_masks(model)
        if attached:
            mts.attach_optimizer(optimizer, model)
        losses = train(model, optimizer)
        # before a weight is asked for, which zeroes it
        assert set(lost_zeros(model)) == (set() if attached else set(MASKED))
    assert falls(losses)
    for name, mask in mts.named_masks(model):
        assert not full(optimizer.state[model.get_parameter(name)]["momentum_buffer"])[~mask].any()


@torch.no_grad()
def drift(model: nn.Module) -> None:
    """Move all weights that have masks, those that are kept as well."""
    for name, _ in mts.named_masks(model):
        model.get_parameter(name).add_(1.0)


def assert_output_of_masked(output: Tensor, drifted: dict[str, Tensor]) -> None:
    """It is what the dense model gives with these values, and with the zeros of `sparse_model`."""
    plain = dense_model()
    plain.load_state_dict(masked(drifted, dict(mts.named_masks(sparse_model()))))
    torch.testing.assert_close(full(output), plain(data()[0]).detach())


def forward_ignores_and_state_dict_repairs_drift_in_sharded_weights() -> None:
    model = sharded(sparse_model())
    x, _ = data()
    drift(model)
    drifted = values(model)
    assert set(lost_zeros(model)) == set(MASKED)
    assert_output_of_masked(model(x), drifted)
    with torch.no_grad():
        assert_output_of_masked(model(x), drifted)
    model.reshard()
    assert lost_zeros(model) == []  # FSDP asks for each weight before its first forward
    drift(model)
    model.state_dict()
    assert lost_zeros(model) == []


@torch.no_grad()
def forwards_without_gradients_see_each_all_gather() -> None:
    """After a forward the gathered Parameters stay in place; later all-gathers fill them without counting it up."""
    model = fully_shard(sparse_model())
    x, _ = data()
    model(x)
    assert not isinstance(model[0].weight, DTensor)
    mts.set_mask(model, "0.weight", dict(mts.named_masks(model))["0.weight"])
    mts.apply_masks(model)
    model.train().eval()
    model(x)
    for _ in range(2):
        model.reshard()
        drift(model)
        drifted = values(model)
        assert_output_of_masked(model(x), drifted)


def strict_load_of_a_full_state_dict_into_shards() -> None:
    """A dense one leaves the module its masks, a sparse one brings its own; zeros are restored either way."""
    source = sparse_model()
    mts.set_mask(source, "0.weight", ~source[0].weight_mask)
    for of_masks in (sparse_model(), source):
        torch.manual_seed(7)
        state = {
            key: torch.randn(value.shape) if value.is_floating_point() else value
            for key, value in source.state_dict().items()
            if of_masks is source or not key.endswith("_mask")
        }
        given, masks = copy.deepcopy(state), dict(mts.named_masks(of_masks))
        model = sharded(sparse_model())
        set_model_state_dict(model, state, options=FULL)
        assert lost_zeros(model) == []
        torch.testing.assert_close(dict(mts.named_masks(model)), masks)
        torch.testing.assert_close(values(model), masked(given, masks), rtol=0, atol=0)


def export_of_sharded_modules_bakes_zeros_and_leaves_them_sharded() -> None:
    model = sharded(sparse_model())
    masks = {name: mask.clone() for name, mask in mts.named_masks(model)}
    drift(model)
    mts.export(model)
    assert not any(values(model)[name][~mask].any() for name, mask in masks.items())
    assert all(isinstance(model[index], FSDPModule) for index in (0, 2, 4))
    assert list(mts.named_masks(model)) == []
    assert falls(train(model, adamw(model.parameters())))
    assert all(values(model)[name][~mask].any() for name, mask in masks.items())  # no longer enforced


def tensor_parallel_training_gives_the_weights_of_one_process() -> None:
    """Tensor parallelism makes the masks DTensors too, over a part of the mesh that the weights are sharded over."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    for name, shape in (("0.weight", (16, 8)), ("2.weight", (8, 16))):
        mts.set_mask(model, name, (order % 2 == 0).view(shape))
    single = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for child in (model[0], model[2], model):
        fully_shard(child, mesh=mesh["data"])
    x, target = data()  # the whole batch in both processes
    found, expected = (trained(each, lambda each: F.mse_loss(each(x), target)) for each in (model, single))
    assert_trained(found, expected, rel=1e-4)
    torch.testing.assert_close(found["values"], expected["values"], rtol=1e-3, atol=1e-4)
    drift(model)
    model.state_dict()
    assert lost_zeros(model) == []


# masks that move: in float64, where rounding cannot flip a near tie -------------------------------------------------


def rigl() -> training.RigL:
    return training.RigL(0.75, include=list(MASKED), update=2, drop_fraction=0.5)


ALGORITHMS: dict[str, Callable[[], training.SparsityAlgorithm]] = {
    "rigl": rigl,
    "set": lambda: training.SET(0.75, include=list(MASKED), update=2, drop_fraction=0.5),
    "gmp": lambda: training.GMP(training.Cubic(0.0, 0.75, 0, 5), include=list(MASKED), update=2),
    "static": lambda: training.Static(0.75, include=list(MASKED)),
}


def train_sparse(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        F.mse_loss(model(share(x)), share(x.flip(-1))).backward()
        optimizer.step()


def outcome(model: nn.Module) -> dict[str, Any]:
    masks = {name: full(mask) for name, mask in mts.named_masks(model)}
    return {"masks": masks, "values": values(model), "lost": lost_zeros(model)}


def by_rigl(model: nn.Module, wrap: Callable[[Any], nn.Module] = lambda model: model) -> dict[str, Any]:
    """The outcome of six steps of a model that is wrapped when its masks are there."""
    sparsity = rigl()
    sparsity.apply(model)
    before = {name: full(mask) for name, mask in mts.named_masks(model)}
    wrapped = wrap(model)
    optimizer = adamw(wrapped.parameters())
    sparsity.apply(optimizer)
    train_sparse(wrapped, optimizer, 6)
    return {"before": before, **outcome(model)}


def rigl_in_processes() -> dict[str, Any]:
    """Under DDP, and with weights that are sharded after their masks are set and before."""
    found = {wrap.__name__: by_rigl(dense_model().double(), wrap) for wrap in (DistributedDataParallel, sharded)}
    return {**found, "sharded before": by_rigl(sharded(dense_model().double()))}


def a_distributed_checkpoint_resumes_to_the_same_bits(folder: Path) -> None:
    """Stopped after three steps, and resumed from a distributed checkpoint into a new model."""

    def started(build: Callable) -> tuple[nn.Module, Optimizer, training.SparsityAlgorithm]:
        model, sparsity = dense_model().double(), build()
        sparsity.apply(model)
        optimizer = adamw(sharded(model).parameters())
        sparsity.apply(optimizer)
        return model, optimizer, sparsity

    def state() -> dict[str, Any]:
        states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        return {**states, "sparsity": sparsity.state_dict()}

    for name, build in ALGORITHMS.items():
        model, optimizer, sparsity = started(build)
        train_sparse(model, optimizer, 3)
        dcp.save(state(), checkpoint_id=folder / f"dcp-{name}")
        train_sparse(model, optimizer, 3, start=3)
        whole = outcome(model)

        model, optimizer, sparsity = started(build)
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder / f"dcp-{name}")
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        sparsity.load_state_dict(loaded["sparsity"])
        train_sparse(model, optimizer, 3, start=3)
        resumed = outcome(model)
        assert resumed["lost"] == []
        for what in ("masks", "values"):
            torch.testing.assert_close(resumed[what], whole[what], rtol=0, atol=0)


def ranks_whose_masks_differ_stop() -> None:
    def drifted(model: nn.Sequential) -> nn.Module:
        with torch.no_grad():
            model[0].weight.add_(float(dist.get_rank()))
        return model

    with pytest.raises(RuntimeError, match=f"is not the same in rank {1 - dist.get_rank()} as here, at step 2"):
        by_rigl(dense_model().double(), drifted)  # gradients are not reduced


ASSERTING: tuple[Callable[..., None], ...] = (
    attach_optimizer_holds_zeros_of_sharded_weights_and_of_momentum_older_than_the_masks,
    forward_ignores_and_state_dict_repairs_drift_in_sharded_weights,
    forwards_without_gradients_see_each_all_gather,
    strict_load_of_a_full_state_dict_into_shards,
    export_of_sharded_modules_bakes_zeros_and_leaves_them_sharded,
    tensor_parallel_training_gives_the_weights_of_one_process,
    a_distributed_checkpoint_resumes_to_the_same_bits,
    ranks_whose_masks_differ_stop,
)
SCENARIOS: tuple[Callable[..., dict[str, Any] | None], ...] = (
    ddp,
    ddp_two_forwards_before_one_backward,
    fsdp,
    fsdp_of_a_llama,
    fsdp_in_mixed_precision,
    fsdp_with_masks_set_after_sharding,
    rigl_in_processes,
    *ASSERTING,
)


@pytest.fixture(scope="module")
def found_by(results) -> Callable[[Callable], dict[str, Any]]:
    """What rank 0 found in a scenario."""
    return lambda scenario: results("training", scenario)[0]


def falls(losses: list[float]) -> bool:
    return losses[-1] < 0.8 * losses[0]


def assert_trained(found: dict[str, Any], single: dict[str, Any], rel: float) -> None:
    """Zeros are there, and the loss falls as in one process."""
    assert found["lost"] == []
    assert falls(found["losses"])
    assert found["losses"] == pytest.approx(single["losses"], rel=rel)


def masked(values: dict[str, Tensor], masks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.masked_fill(~masks[n], 0) if n in masks else v for n, v in values.items() if "_mask" not in n}


@pytest.mark.parametrize("scenario", [ddp, fsdp, fsdp_with_masks_set_after_sharding])
def test_training_gives_the_weights_of_one_process(found_by, scenario: Callable):
    found, single = found_by(scenario), trained(sparse_model())
    assert_trained(found, single, rel=1e-4)
    torch.testing.assert_close(found["values"], single["values"], rtol=1e-3, atol=1e-4)
    for name, before in dense_model().named_parameters():
        assert not torch.equal(found["values"][name], before), name


def test_two_forwards_before_one_backward_under_ddp(found_by):
    """DDP broadcasts buffers, masks among them, before each forward: what the first graph saved must stay valid."""
    found = found_by(ddp_two_forwards_before_one_backward)
    model = sparse_model()
    x, target = data()
    F.mse_loss(model(x), target).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_full_state_dict_of_sharded_weights_is_sparse_and_loads_into_one_process(found_by):
    found = found_by(fsdp)
    assert found["shard"] == 1 / WORLD
    state, model = found["state"], sparse_model()
    assert state.keys() == model.state_dict().keys()
    for name, mask in mts.named_masks(model):
        assert torch.equal(state[f"{name}_mask"], mask)
        assert not state[name][~mask].any()
        assert state[name][mask].all()
    model.load_state_dict(state, strict=True)
    torch.testing.assert_close(values(model), found["values"])


def test_sharded_llama_trains_and_saves_a_plain_folder(found_by, folder: Path):
    found = found_by(fsdp_of_a_llama)
    assert_trained(found, trained(sparse_llama(), loss_of_llama), rel=1e-3)
    saved = load_file(folder / "llama" / "model.safetensors")
    assert not [key for key in saved if "mask" in key]
    assert len(mts.verify(folder / "llama", "2:4").layers) == 14
    for name, weight in saved.items():
        assert torch.equal(weight, found["values"][name])


def test_mixed_precision_shards_train(found_by):
    assert_trained(found_by(fsdp_in_mixed_precision), trained(sparse_model()), rel=0.05)


@pytest.mark.parametrize("scenario", ASSERTING, ids=lambda scenario: scenario.__name__)
def test_what_processes_assert_for_themselves(results, scenario: Callable):
    assert results("training", scenario) == [{}] * WORLD


@pytest.mark.parametrize("how", ["DistributedDataParallel", "sharded", "sharded before"])
def test_rigl_grows_by_the_gradient_of_all_processes(found_by, how: str):
    found, single = found_by(rigl_in_processes)[how], by_rigl(dense_model().double())
    assert found["lost"] == []
    assert found["masks"].keys() == single["masks"].keys() == set(MASKED)
    for name, mask in single["masks"].items():
        assert torch.equal(found["masks"][name], mask), name
        assert not torch.equal(mask, single["before"][name])
    torch.testing.assert_close(found["values"], single["values"])
