"""Where loops do more than a step: accumulation, compiled models, GradScaler, clipping, autocast, stop and resume.

In float64, where rounding cannot flip a near tie, RigL's masks are those of one plain loop with one big batch.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks
from tests.helpers import assert_bits, assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.model.sparse_modules import lost_zeros
from tests.training.cases import applied, take_step

INCLUDE = "*weight"


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float64, *, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 24, dtype=dtype), nn.Linear(24, 6, dtype=dtype)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute:
            return self.second(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=False))
        return self.second(self.first(x).tanh())


def data(step, size=16, dtype=torch.float64):
    return torch.randn(size, 12, generator=torch.Generator().manual_seed(step), dtype=dtype)


def loss_of(model, x):
    return (model(x) - x[:, :6].sin()).square().mean()


def rigl(**options):
    return training.RigL(0.75, include=INCLUDE, update=2, seed=3, **options)


def started(model, build=rigl, **options):
    sparsity = build()
    return sparsity, applied(sparsity, model, torch.optim.AdamW, lr=0.05, **options)


def run(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        take_step(loss_of(model, data(step)), optimizer)


def plain(steps=6):
    """What all others are compared with."""
    model = Mlp()
    _, optimizer = started(model)
    run(model, optimizer, steps)
    return model


def assert_same_masks(model, other, *, weights=True):
    masks = dict(named_masks(other))
    start = Mlp()
    rigl().apply(start)
    for name, mask in named_masks(model):
        assert torch.equal(mask, masks[name]), name
        assert not torch.equal(mask, dict(named_masks(start))[name]), "masks have moved"
        if weights:
            torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name))


def in_micro_batches(model, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        for part in data(step).chunk(4):
            (loss_of(model, part) / 4).backward()
        optimizer.step()


def with_a_closure_and_gradients_that_stay(model, optimizer):
    for step in range(6):

        def closure(step=step):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, data(step))
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loop", [in_micro_batches, with_a_closure_and_gradients_that_stay])
def test_loops_that_compute_the_same_make_the_same(loop, recompute):
    """Weights grow by the gradient of the whole batch, whether or not activations are computed again."""
    model = Mlp(recompute=recompute)
    _, optimizer = started(model)
    loop(model, optimizer)
    assert_same_masks(model, plain())


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("attached", [False, True])
def test_steps_may_be_compiled(attached):
    model = Mlp()
    _, optimizer = started(model)
    if attached:
        mts.attach_optimizer(optimizer, model)
    torch._dynamo.reset()
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    run(model, optimizer, 6)
    assert_same_masks(model, plain(), weights=False)  # a compiled AdamW counts its steps in float32


class Calling(torch.optim.AdamW):
    """Its step calls that of its base class, which has hooks of its own as soon as there was one of these."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise MemoryError
        return super().step(closure)


def test_a_step_that_calls_the_one_of_its_base_class_is_one_step():
    """Also after one that has failed."""
    reference, model, sparsity = plain(), Mlp(), rigl()
    optimizer = applied(sparsity, model, Calling, lr=0.05)
    optimizer.fails = True
    refused(run, model, optimizer, 1, error=MemoryError)
    optimizer.fails = False
    optimizer.zero_grad()
    run(model, optimizer, 6)
    assert sparsity.step == 6
    assert_same_masks(model, reference)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
def test_a_compiled_model_has_two_graphs_and_never_a_third():
    """Inductor, through which gradients must come."""
    model = Mlp()
    _, optimizer = started(model)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, example_inputs)

    torch._dynamo.reset()
    run(torch.compile(model, fullgraph=True, backend=backend), optimizer, 6)
    assert len(graphs) == 2
    assert_same_masks(model, plain())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused):
    """Every third step overflows. The others are the steps of a plain loop."""
    model, scaler = Mlp(), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
    sparsity, optimizer = started(model, fused=fused)
    done = 0
    for step in range(9):
        optimizer.zero_grad()
        overflows = step % 3 == 1
        scaler.scale(loss_of(model, data(done)) * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        done += not overflows
        assert sparsity.step == done
        assert not lost_zeros(model)
    assert_same_masks(model, plain(), weights=not fused)


def test_under_autocast():
    model = Mlp(torch.float32)
    _, optimizer = started(model)
    start = model.first.weight_mask.clone()
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, data(step, dtype=torch.float32))
        take_step(loss, optimizer)
    assert not torch.equal(model.first.weight_mask, start)
    assert all(int(mask.sum()) == mask.numel() // 4 for _, mask in named_masks(model))


# the norm that a loop clips -------------------------------------------------------------------------------------------


def clipped_norms(dtype, scale):
    """The norm on a step without an update and on the same one with it; kept gradients are ``scale`` of the pruned."""
    norms = []
    for freq in (2, 1):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False, dtype=dtype)
        applied(training.RigL(0.5, include="weight", update=freq), model)
        mask = dict(named_masks(model))["weight"]
        wanted = torch.where(mask, scale, 1.0).to(dtype) * torch.randn(64, 64).to(dtype)
        (model(torch.eye(64, dtype=dtype)) * wanted.T).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_the_clipped_norm_is_the_same_to_the_bit(dtype, scale):
    assert_bits(*clipped_norms(dtype, scale))


def test_in_float64_the_norm_is_the_same_to_eight_digits_and_with_tiny_kept_gradients_it_is_not():
    """The limit that the docs name: kept gradients that are many orders below the pruned ones."""
    without, with_faint = clipped_norms(torch.float64, 1.0)
    assert abs(without - with_faint) <= 1e-8 * without
    without, with_faint = clipped_norms(torch.float32, 1e-12)
    assert abs(without - with_faint) > 1e-8 * without


# stop and resume ------------------------------------------------------------------------------------------------------

ALGORITHMS = {
    "static": lambda: training.Static(0.75, include=INCLUDE),
    "gmp": lambda: training.GMP(training.Cubic(0.0, 0.75, 1, 8), include=INCLUDE, update=2),
    "ac/dc": lambda: training.GMP([0.0, 0.75], include=INCLUDE, update=2),
    "set": lambda: training.SET(0.75, include=INCLUDE, update=2, drop_fraction=training.Cosine(0.5, 10)),
    "rigl": rigl,
    "group": lambda: training.Group(
        {"first.weight": training.RigL(0.75, update=2), "second.weight": training.SET(0.5, update=3)}
    ),
}


def prepared(name, accelerator):
    model, sparsity = Mlp(), ALGORITHMS[name]()
    sparsity.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(sparsity)
    sparsity.apply(optimizer)
    return model, sparsity, optimizer


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("accelerate", [False, True])
def test_stop_and_resume(name, accelerate, tmp_path):
    """The bits of a run that did not stop. Random numbers of the loop are not what masks depend on."""
    accelerator = Accelerator(cpu=True) if accelerate else None
    parts = prepared(name, accelerator)
    run(parts[0], parts[2], 5)
    if accelerator is None:
        torch.save([each.state_dict() for each in parts], tmp_path / "states")
    else:
        accelerator.save_state(str(tmp_path))
    torch.manual_seed(77)
    accelerator = Accelerator(cpu=True) if accelerate else None
    model, sparsity, optimizer = again = prepared(name, accelerator)
    if accelerator is None:
        for each, state in zip(again, torch.load(tmp_path / "states", weights_only=True)):
            each.load_state_dict(state)
    else:
        accelerator.load_state(str(tmp_path))
    assert sparsity.step == 5
    run(model, optimizer, 5, start=5)
    assert "After 10 steps of training with" in str(sparsity.report())
    whole, _, optimizer = prepared(name, None)
    run(whole, optimizer, 10)
    assert_same_state(model, state_of(whole))


@pytest.mark.parametrize("late", [False, True])
def test_each_of_several_optimizers_goes_on_at_its_own_step(late):
    """``late``: they are applied after the state was loaded."""

    def prepared(state=None):
        model, sparsity = Mlp(), training.SET(0.75, include=INCLUDE, update=2)
        sparsity.apply(model)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.second)]
        for turn in ("load", "apply") if late else ("apply", "load"):
            if turn == "apply":
                list(map(sparsity.apply, optimizers))
            elif state is not None:
                model.load_state_dict(state[0])
                sparsity.load_state_dict(state[1])
        return model, sparsity, optimizers

    model, sparsity, (first, second) = prepared()
    run(model, first, 5)
    state = copy.deepcopy((model.state_dict(), sparsity.state_dict()))
    run(model, second, 4)
    again, resumed, (_, second) = prepared(state)
    assert resumed.state_dict() == state[1]
    run(again, second, 4)
    assert (sparsity.step, resumed.step) == (4, 4)
    assert_same_masks(again, model)


def test_functions_and_sets_are_named_alike_in_every_process():
    """By no address, and in one order."""

    class Ramp:
        def __init__(self, final):
            self.final = final

        def __call__(self, step):
            return self.final

    def ramp(step, final):
        return final

    texts = [str(training.GMP(each).describe()) for each in (partial(ramp, final=0.5), Ramp(0.5))]
    assert all("0x" not in text and "amp" in text and "0.5" in text for text in texts)
    assert training.GMP(Ramp(0.5)).describe() != training.GMP(Ramp(0.7)).describe()
    names = [f"{letter}.weight" for letter in "zyxwvutsabcdefg"]
    described = training.Static(0.5, include={*names}, exclude={*names[:9]}).describe()
    assert described == training.Static(0.5, include=sorted(names), exclude=sorted(names[:9])).describe()


def test_a_state_of_another_algorithm_or_of_other_masks_is_refused():
    model = Mlp()
    sparsity, optimizer = started(model)
    run(model, optimizer, 4)
    state = copy.deepcopy(sparsity.state_dict())
    refused(sparsity.load_state_dict, model.state_dict(), match="it has no 'algorithm': give what state_dict")
    for other, match in (
        (started(Mlp(), ALGORITHMS["set"])[0], "make the algorithm with the options that the state was saved with"),
        (started(Mlp())[0], "2 masks of the model are not those of this state"),
        (rigl(), "apply this RigL to the model, load the model's state dict"),
    ):
        refused(other.load_state_dict, state, match=match)


def test_a_conv_net_trains_channels_last():
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = applied(training.RigL(0.75, include="*.weight", update=1), model)
    for _ in range(3):
        x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
        take_step(F.mse_loss(model(x), x[..., 1:-1, 1:-1]), optimizer)
        assert not lost_zeros(model)
        assert all(int(mask.sum()) == mask.numel() // 4 for _, mask in named_masks(model))


def test_rows_of_a_run_under_masks_that_move_afterwards_say_so():
    model, (tokens, *more) = tiny_llama(), token_batches()
    optimizer = applied(training.RigL(0.8, scope="row", include="blocks", update=1), model)
    mts.sparsify(model, "sparsegpt", pattern="90%", data_loader=more, progress=False)
    take_step(model(input_ids=tokens, labels=tokens).loss, optimizer)
    masks = dict(mts.named_masks(model))
    for row in mts.report(model).layers:
        assert row.zeros == int((~masks[row.parameter]).sum()) < 0.85 * row.size
        assert row.error is None  # it was of SparseGPT's mask
        assert any("its mask was replaced since" in note for note in row.notes)
