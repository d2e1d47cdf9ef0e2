"""What goes wrong, and what is left of the model then; and models that are made sparse more than once."""

import signal

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.solving import solve as one_block
from tests import helpers
from tests.helpers import assert_bits, assert_same_state, refused, run_python, state_of, tiny_llama, token_batches
from tests.models.stacked import Iterating, vectors
from tests.plan.test_planner import ALL as NAMES

# models that cannot be made sparse ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_weights_that_are_not_finite_are_named(method, value):
    """A layer that is left out may hold them."""
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[5, 7] = value
    data = {} if method == "magnitude" else {"data_loader": token_batches()}
    parts = ["layer 'model.layers.1.mlp.up_proj'", "NaN or inf", "repair", "exclude"]
    refused(mts.sparsify, model, method, parts=parts, **data)
    mts.sparsify(model, "magnitude", exclude="*layers.1.mlp.up_proj")
    assert len(mts.report(model).layers) == 13


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = tiny_llama()
    match = r"q_proj\.weight' is on the meta device and has no values: load the model first"
    refused(mts.sparsify, model, "magnitude", match=match)
    assert len(mts.make_plan(model, "magnitude").layers) == 14


def test_what_cannot_carry_a_mask_is_refused_before_any_work():
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight_mask = "of another library"
    refused(mts.sparsify, model, "magnitude", parts=["1.mlp.down_proj.weight'", "has an attribute 'weight_mask'"])
    mts.sparsify(model, "magnitude", enforce=False)


def test_a_sharded_weight_is_refused_by_name(tmp_path):
    """One process is enough to make a DTensor."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(model[1].weight.detach(), mesh))
        with pytest.raises(ValueError, match=r"layer '1' is sharded over processes .* sparsify the model first"):
            mts.sparsify(model, "magnitude")
        assert type(model[0]) is nn.Linear
        assert model[0].weight.count_nonzero() == 64
    finally:
        torch.distributed.destroy_process_group()


# methods that misbehave ---------------------------------------------------------------------------------------------


class Misbehaving(mts.Method):
    """Magnitude whose solution of the third layer is spoilt."""

    name = "mine"

    def __init__(self, spoil) -> None:
        self.spoil, self.calls = spoil, 0

    def solve(self, weight, state, pattern, options):
        self.calls += 1
        solution = Magnitude().solve(weight, state, pattern, options)
        return self.spoil(solution, weight) if self.calls == 3 else solution


def _replaced(weight=lambda w: w, mask=lambda m: m):
    return lambda solution, _: mts.Solution(weight(solution.weight), mask(solution.mask), 0.0)


def _one_more(mask: Tensor) -> Tensor:
    return mask.index_put(tuple((~mask).nonzero()[:1].T), torch.tensor(True))


def _with_nan(weight: Tensor) -> Tensor:
    return weight.index_put(tuple(weight.nonzero()[:1].T), torch.tensor(torch.nan))


SPOILT = [
    (_replaced(weight=lambda w: w[:-1]), "weight is torch.float32 [15, 32], not torch.float32 [16, 32]"),
    (_replaced(weight=lambda w: w.double()), "weight is torch.float64 [16, 32], not torch.float32 [16, 32]"),
    (_replaced(weight=lambda w: w.mT), "weight is torch.float32 [32, 16], not torch.float32 [16, 32]"),
    (_replaced(weight=_with_nan), "weight holds NaN or inf"),
    (_replaced(weight=lambda w: w + 1e-30), "weight is not zero where the mask is False"),
    (_replaced(mask=lambda m: m[:-1]), "mask is torch.bool [15, 32], not torch.bool [16, 32]"),
    (_replaced(mask=lambda m: m.float()), "mask is torch.float32 [16, 32], not torch.bool [16, 32]"),
    (_replaced(mask=_one_more), "mask breaks pattern 2:4 in 1 places"),
    (_replaced(mask=lambda m: m & False, weight=lambda w: w * 0), "mask breaks pattern 2:4 in 128 places"),
    (lambda solution, _: None, "it is a NoneType, not a modelopt_sparse.Solution"),
    (lambda solution, _: solution.mask, "it is a Tensor, not a modelopt_sparse.Solution"),
    (
        lambda solution, weight: mts.Solution(weight.mul_(solution.mask), solution.mask, 0.0),
        "it was written to the dense weight, which the steps after it need: clone that first",
    ),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
def test_a_bad_solution_is_refused_and_the_layers_before_it_stand(spoil, reason):
    said = stops_after(2, Misbehaving(spoil), error=ValueError)
    assert said == f"layer '{NAMES[2]}': method 'mine' gave a bad solution: {reason}"


class Unprepared(Misbehaving):
    def prepare(self, stats, options):
        raise ValueError("singular")


def test_a_method_that_fails_is_named_with_its_layer():
    """What it writes to the weight that it is given does not reach the model."""

    def fail(solution, weight):
        weight.zero_()
        raise ValueError("no idea what to do")

    assert stops_after(2, Misbehaving(fail), error=ValueError) == f"layer '{NAMES[2]}': no idea what to do"
    refused(mts.sparsify, tiny_llama(), Unprepared(None), parts=[f"layer '{NAMES[0]}': singular"])


def test_a_method_without_a_name_or_an_error_of_its_own(tmp_path):
    """It goes by its class; an error that it does not know is left empty, as NaN is no JSON, a tensor is a number."""

    class Unmeasured(mts.Method):
        error = float("nan")

        def solve(self, weight, state, pattern, options):
            mask = pattern.mask(weight.abs())
            return mts.Solution(weight.masked_fill(~mask, 0), mask, self.error)

    for Unmeasured.error in (None, float("nan")):
        report = mts.report(mts.sparsify(tiny_llama(), Unmeasured()))
        assert {(layer.recipe, layer.error) for layer in report.layers} == {("Unmeasured", None)}
    assert "NaN" not in report.to_json()
    assert "nan" not in str(report)
    assert "Error:" not in str(report)
    Unmeasured.error = torch.tensor(0.25)
    mts.save(mts.sparsify(tiny_llama(), Unmeasured()), tmp_path)
    assert {layer.error for layer in mts.report(tmp_path).layers} == {0.25}


# stopped in the middle ----------------------------------------------------------------------------------------------


def assert_stopped_after(model: nn.Module, before: dict, count: int) -> None:
    """The first layers are sparse and in the report, everything else is what it was."""
    assert [layer.name for layer in mts.report(model).layers] == NAMES[:count]
    assert [name for name, _ in mts.named_masks(model)] == [f"{name}.weight" for name in NAMES[:count]]
    for name, mask in mts.named_masks(model):
        weight = model.get_parameter(name)
        assert mask.view(-1, 4).sum(-1).eq(2).all()
        assert_bits(weight[~mask], torch.zeros(int((~mask).sum())))
        assert weight[mask].any()
    for key, (cls, tensor) in state_of(model).items():
        if key.rpartition(".")[0] not in NAMES[:count]:
            assert cls is before[key][0]
            assert_bits(tensor, before[key][1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def stops_after(count: int, method: mts.Method | str, *, error: type[BaseException]) -> str:
    """With this method sparsify raises an error, when ``count`` layers are done -> its message."""
    model = tiny_llama()
    before = state_of(model)
    with pytest.raises(error) as caught:
        mts.sparsify(model, method)
    assert_stopped_after(model, before, count)
    return str(caught.value)


class Stopping(mts.Method):
    """Magnitude that is interrupted at one of its calls, once."""

    name = "stopping"

    def __init__(self, at: int, needs: str, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.needs = needs  # type: ignore[misc]

    def solve(self, weight, state, pattern, options):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return Magnitude().solve(weight, state, pattern, options)


ERRORS = [KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError]
WAYS = [(way, error) for way in (None, "block") for error in ERRORS]


@pytest.mark.parametrize(("sequential", "error"), [*WAYS, ("stage", KeyboardInterrupt), ("none", KeyboardInterrupt)])
@pytest.mark.parametrize("at", [1, 6, 14])
def test_interrupted_while_solving(sequential, at, error):
    """Without data, and with data in each way."""
    data = {"data_loader": token_batches(), "sequential": sequential} if sequential else {}
    model = tiny_llama().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = state_of(model)
    method = Stopping(at, "gram" if data else "nothing", error)
    raised = error if error is KeyboardInterrupt else MemoryError  # which names the layer
    with pytest.raises(raised):
        mts.sparsify(model, method, **data)
    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache is True
    if at == 1:
        assert_same_state(model, before)
        refused(mts.report, model, match="carries no report")
    else:
        assert_stopped_after(model, before, at - 1)
        report = mts.report(model)
        assert report.notes[-1] == f"stopped by {raised.__name__} after {at - 1} of 14 layers of the plan"
        pruned, every = report.weights
        assert pruned < every == sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    mts.sparsify(model, method, **data)  # and a second call works
    assert len(mts.verify(model, "2:4").layers) == 14
    assert sorted(layer.name for layer in mts.report(model).layers) == sorted(NAMES)
    note = f"{at - 1} of the layers carry masks, whose zeros stay and count (replace=True drops the masks)"
    assert mts.report(model).notes == ([] if at == 1 else [note])


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@pytest.mark.parametrize(("at", "finished"), [(1, 0), (7, 0), (10, 7)])
def test_interrupted_while_the_model_runs(sequential, at, finished):
    """In the dense run, in the rehearsal, and while the second block's inputs are collected."""
    model, calls = tiny_llama().train(), []
    before, options = state_of(model), {"data_loader": token_batches(), "sequential": sequential}

    def press(*_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    with model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(press):
        if not finished:
            refused(mts.sparsify, model, "wanda", error=KeyboardInterrupt, **options)
            return
        with pytest.raises(KeyboardInterrupt):
            mts.sparsify(model, "wanda", **options)
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is True
    done = len(mts.report(model).layers)
    assert finished <= done < 14  # with "stage", the second block's attention as well
    assert_stopped_after(model, before, done)


def test_interrupted_while_data_is_read():
    def batches():
        yield token_batches()[0]
        raise KeyboardInterrupt

    refused(mts.sparsify, tiny_llama().train(), "wanda", error=KeyboardInterrupt, data_loader=batches())


def test_interrupted_while_held_solutions_wait():
    """sequential="none" through the whole model solves everything before it attaches anything."""

    options = {"data_loader": vectors(), "sequential": "none", "min_tokens": 1}
    with pytest.warns(UserWarning, match="calibrated through the whole model"):
        refused(mts.sparsify, Iterating(), Stopping(4, "gram"), error=KeyboardInterrupt, **options)


def at_the_third_mask(monkeypatch, act) -> None:
    original, seen = one_block.set_mask, []

    def spy(*args):
        seen.append(args[1])
        if len(seen) == 3:
            act()
        original(*args)

    monkeypatch.setattr(one_block, "set_mask", spy)


def test_ctrl_c_while_a_layer_is_written_waits_until_it_is_whole(monkeypatch):
    at_the_third_mask(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        stops_after(3, "magnitude", error=KeyboardInterrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_a_handler_that_python_did_not_install_is_left_alone(monkeypatch):
    """Of one that C code has installed Python knows nothing, and cannot put it back."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *handler: pytest.fail("it was replaced"))
    mts.sparsify(tiny_llama(), "magnitude")


CTRL_C = """
import signal, sys
import modelopt_sparse.checkpoint.folder, modelopt_sparse.methods.scores as magnitude
def pressing(function):
    def pressed(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)
    return pressed
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
where = sys.argv.pop(1)
if where == "solve":
    magnitude.masked_solution = pressing(magnitude.masked_solution)
else:
    modelopt_sparse.checkpoint.folder.size_and_hash = pressing(modelopt_sparse.checkpoint.folder.size_and_hash)
from modelopt_sparse.cli.commands import main
main()
"""


@pytest.mark.parametrize("where", ["solve", "save"])
def test_ctrl_c_in_the_command_line_leaves_no_folder_and_exits_130(tmp_path, where):
    command = ["sparsify", helpers.TESTBED / "tiny-llama", "--method", "magnitude", "--out", tmp_path / "deep" / "out"]
    done = run_python("-c", CTRL_C, where, *command)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "modelopt-sparse: interrupted", "")
    assert list(tmp_path.iterdir()) == []


# more than once -----------------------------------------------------------------------------------------------------


def test_sparsify_twice_with_other_layers_merges_the_reports():
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="50%", include="*self_attn*")
    first = mts.report(model)
    mts.sparsify(model, "wanda", pattern="2:4", include="*mlp*", data_loader=token_batches(), sequential="none")
    report = mts.report(model)
    recipes = {True: ("magnitude", "50% per matrix"), False: ("wanda", "2:4")}
    found = [(layer.name, (layer.recipe, layer.pattern)) for layer in report.layers]
    assert sorted(found) == sorted((name, recipes["self_attn" in name]) for name in NAMES)
    assert [item.name for item in report.skipped] == ["model.embed_tokens"]
    assert all(layer.notes == [] for layer in report.layers)
    assert (report.settings["sequential"], report.calibration["calls"]) == ("none", 3)
    (earlier,) = report.earlier
    assert earlier["layers"] == [layer.name for layer in first.layers]
    assert (earlier["settings"]["sequential"], earlier["calibration"]) == ("block", {})
    mts.verify(model)  # each layer holds the pattern of its own run


def test_sparsify_again_replaces_masks_and_says_what_its_error_counts_from():
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")
    report = mts.report(mts.sparsify(model, "magnitude", pattern="1:4", include="*mlp*"))
    mts.verify(model)
    for layer in report.layers:
        again = "mlp" in layer.name
        assert layer.pattern == ("1:4" if again else "2:4")
        assert layer.notes == (["pruned before (magnitude 2:4): the error adds to that"] if again else [])
    again = mts.make_plan(model, "magnitude", replace=True)
    assert {layer.type for layer in (*report.layers, *again.layers)} == {"Linear"}
    assert len(report.layers) == 14
    assert [run["layers"] for run in report.earlier] == [[name for name in NAMES if "self_attn" in name]]
    mts.sparsify(model, "magnitude", pattern="1:8")
    assert mts.report(model).earlier == []
    assert len(mts.report(model).layers) == 14


class Grown(mts.Method):
    """Keeps what was pruned."""

    def solve(self, weight, state, pattern, options):
        mask = mts.NM(2, 4).mask(-weight.abs())
        return mts.Solution(torch.where(mask, 2.0, 0.0), mask, 0.0)


@pytest.mark.parametrize("enforce", [True, False])
def test_weights_may_come_back_when_a_mask_is_replaced(enforce):
    """The new mask rules, also where the second run leaves none: the old one would prune its solution."""
    model = mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")
    old = {name: mask.clone() for name, mask in mts.named_masks(model)}
    mts.sparsify(model, Grown(), pattern="2:4", enforce=enforce, replace=True)
    for name, mask in mts.named_masks(model):
        assert torch.equal(mask, ~old[name])
    x = torch.randn(3, 32)
    expected = x @ torch.where(~old["model.layers.0.mlp.up_proj.weight"], 2.0, 0.0).T
    torch.testing.assert_close(model.model.layers[0].mlp.up_proj(x), expected)


def test_reports_of_interrupted_runs_merge():
    model = tiny_llama()
    with pytest.raises(KeyboardInterrupt):
        mts.sparsify(model, Stopping(4, "nothing"), include="*layers.0*")
    report = mts.report(mts.sparsify(model, "magnitude", include="*layers.1*"))
    assert [layer.name for layer in report.layers] == NAMES[:3] + NAMES[7:]
    assert {item.name for item in report.skipped} == {*NAMES[3:7], "model.embed_tokens"}
    assert report.notes == []
    assert "note: stopped by KeyboardInterrupt after 3 of 7 layers of the plan" in str(report)


# export -------------------------------------------------------------------------------------------------------------


def test_export_twice_is_harmless_and_a_dense_model_comes_back_as_it_is():
    for model in (mts.export(mts.sparsify(tiny_llama(), "magnitude", pattern="2:4")), tiny_llama()):
        before = state_of(model)
        assert_same_state(mts.export(model), before)


# numbers at the limits ------------------------------------------------------------------------------------------------


LARGEST = [(2.0**40, ""), (2.0**41, r"2.2e\+12, and more than 2\^40")]  # weight in a layer -> words of the error
LARGEST += [(2.0**-50, ""), (2.0**-80, r"8\.27e-25, and"), (0.0, "")]


@pytest.mark.parametrize(("largest", "words"), LARGEST)
def test_weights_whose_squares_may_overflow_or_all_underflow_are_refused(largest, words):
    """They had infinite scores, or ties decided on their masks, and errors that were reported as 0. All of them may be
    zero."""
    model = nn.Sequential(nn.Linear(32, 48))
    model[0].weight.data *= -largest / model[0].weight.abs().max()
    data = {"data_loader": [torch.randn(256, 32)], "progress": False}
    if words:
        refused(mts.sparsify, model, "wanda", match=f"layer '0': its weight holds {words}", **data)
    else:
        mts.sparsify(model, "wanda", **data)
        assert (mts.report(model).layers[0].error == 0) == (largest == 0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_weights_stay_dense():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 0), nn.Linear(0, 8), nn.Linear(8, 8))
    mts.sparsify(model, "magnitude", progress=False)
    assert [layer.name for layer in mts.report(model).layers] == ["0", "3"]
    assert "1,2 x2 (no weights)" in str(mts.report(model))


class Hungry(Magnitude):
    name = "hungry"
    options = {"appetite": 1.0}


def test_options_that_are_nan_are_refused_and_json_has_no_infinity():
    model = nn.Sequential(nn.Linear(16, 8))
    refused(mts.sparsify, model, Hungry(), match="hungry: appetite=nan: NaN is no value", appetite=float("nan"))
    plan = mts.make_plan(model, Hungry(), appetite=float("inf"))
    assert '"appetite": null' in plan.to_json()
