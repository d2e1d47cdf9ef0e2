"""Memory that runs out in a solve: smaller pieces give the same, and where there are none the error says what to do."""

import weakref

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.model.devices import is_out_of_memory
from tests.helpers import Snapshot, assert_bits, assert_same_masks, refused, tiny_llama, token_batches
from tests.models.expert_models import MODELS, VOCAB
from tests.oracles.layer_problem import problem
from tests.solving.test_failures import at_the_third_mask, stops_after

tiny_mixtral = MODELS["mixtral"]  # gate_up_proj [4, 48, 32]
EXPERTS = {"pattern": "2:4", "data_loader": token_batches(vocab=VOCAB), "min_tokens": 8}
EXPERTS["include"] = "*.gate_up_proj"

FAILURES = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ..."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
}


class Scarce(mts.Method):
    """A method in a memory that holds ``room`` weights at a time, and ``prepared`` numbers of a Gram matrix to prepare
    with."""

    def __init__(self, inner: mts.Method, room: int, prepared: int = 2**30, failure: str = "cuda") -> None:
        self.inner, self.room, self.prepared, self.failure = inner, room, prepared, failure
        for key in ("name", "needs", "options", "scope", "updates", "rows_independent"):
            setattr(self, key, getattr(inner, key))
        self.tried: list[tuple[int, ...]] = []

    def prepare(self, stats, options):
        if stats is not None and stats.gram is not None and stats.gram.numel() > self.prepared:
            raise FAILURES[self.failure]()
        return self.inner.prepare(stats, options)

    def solve(self, weight, state, pattern, options):
        self.tried.append(tuple(weight.shape))
        if weight.numel() > self.room:
            raise FAILURES[self.failure]()
        return self.inner.solve(weight, state, pattern, options)


def compared(make, method: Scarce, **options) -> tuple[mts.Report, mts.Report]:
    """The reports of a model that was solved whole and of one that was solved in pieces; their masks are equal."""
    whole, pieces = make(), make()
    mts.sparsify(whole, method.inner, **options)
    mts.sparsify(pieces, method, **options)
    assert dict(mts.named_masks(whole))
    assert_same_masks(pieces, whole)
    for (name, one), (_, other) in zip(whole.named_parameters(), pieces.named_parameters()):
        if method.updates or options.get("polish"):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert_bits(other, one)
    a, b = mts.report(whole), mts.report(pieces)
    for one, other in zip(a.layers, b.layers):
        assert (one.name, one.recipe, one.zeros, one.size) == (other.name, other.recipe, other.zeros, other.size)
        assert other.error == pytest.approx(one.error, rel=1e-4, abs=1e-9)
        assert [step.step for step in one.steps] == [step.step for step in other.steps]
    return a, b


def test_what_is_taken_for_no_memory():
    """Also what torch really raises for an allocation that no machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert all(map(is_out_of_memory, [caught.value, *(make() for make in FAILURES.values())]))
    others = [RuntimeError("no product of these shapes"), ValueError("DefaultCPUAllocator: "), OSError()]
    assert not any(map(is_out_of_memory, others))


# rows -----------------------------------------------------------------------------------------------------------------


BY_ROWS = [
    ("magnitude", "cuda", {"pattern": "2:4"}),
    ("magnitude", "cpu", {"pattern": "50% per row"}),
    ("wanda", "python", {"pattern": 0.5}),
    ("sparsegpt", "cuda", {"pattern": "2:4"}),
    ("sparsegpt", "cpu", {"pattern": "60% per row"}),
    ("sparsegpt", "python", {"pattern": "2:4", "polish": 5}),
]


@pytest.mark.parametrize(("name", "failure", "options"), BY_ROWS, ids=str)
def test_rows_at_a_time_give_what_all_of_them_give(name, options, failure):
    """A k_proj of 16 x 32 fits, a q_proj of 32 x 32 in two pieces, a down_proj of 32 x 64 in four."""
    method = Scarce(METHODS[name], 512, failure=failure)
    layers = ["*.q_proj", "*.k_proj", "*.down_proj"]
    _, report = compared(tiny_llama, method, data_loader=token_batches(), include=layers, **options)
    rows = {"q_proj": 16, "down_proj": 8}
    for layer in report.layers:
        expected = rows.get(layer.name.rpartition(".")[2])
        assert layer.notes == ([f"solved {expected} rows at a time, because memory ran out"] if expected else [])
    solved = [shape for shape in method.tried if shape[0] * shape[1] <= 512]
    assert sum(a * b for a, b in solved) == sum(layer.size for layer in report.layers)


def test_layers_of_one_shape_start_where_the_one_before_it_ended():
    method = Scarce(METHODS["wanda"], 512)
    mts.sparsify(tiny_llama(), method, data_loader=token_batches(), include="*.down_proj")
    assert method.tried == [(32, 64), (16, 64), *[(8, 64)] * 4, *[(8, 64)] * 4]


def test_layers_of_another_pattern_do_not():
    """The pieces of an N:M layer are none for one whose weights are compared all over the matrix."""
    method = Scarce(METHODS["sparsegpt"], 1024)
    rules = {"*.0.mlp.down_proj": {"pattern": "2:4"}, "*.1.mlp.down_proj": {"pattern": "50% per matrix"}}
    with pytest.raises(MemoryError, match=r"1\.mlp\.down_proj' \[32, 64\]: out of memory while it was solved"):
        mts.sparsify(tiny_llama(), method, data_loader=token_batches(), include="*.down_proj", rules=rules)
    assert method.tried == [(32, 64), (16, 64), (16, 64), (32, 64)]


def test_rows_of_each_matrix_of_a_stack():
    """A grouped convolution has a matrix for each of its groups, and the pieces are rows of all of them."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(16, 24, 3, groups=2), nn.ReLU(), nn.Conv2d(24, 8, 1))

    data = [torch.randn(4, 16, 6, 6)]
    method = Scarce(METHODS["sparsegpt"], 2 * 3 * 72)
    _, report = compared(make, method, data_loader=data, pattern="2:4", include="0")
    assert method.tried == [(2, 12, 72), (2, 6, 72), *[(2, 3, 72)] * 4]
    assert report.layers[0].notes == ["solved 3 rows at a time, because memory ran out"]


def test_a_piece_of_a_layer_with_a_mask_of_ones_own_has_a_piece_of_the_mask():
    name = "model.layers.0.mlp.up_proj"
    mask = torch.arange(64).view(-1, 1) % 4 != torch.arange(32) % 4
    mask &= torch.arange(64).view(-1, 1) % 4 != (torch.arange(32) + 1) % 4
    (target,) = mts.make_plan(tiny_llama(), masks={f"{name}.weight": mask}, pattern="2:4").layers
    part = target.method.part((..., slice(3, 9), slice(None)))
    assert torch.equal(part.mask, mask[3:9])


@pytest.mark.parametrize(
    "pattern", [mts.NM(2, 4), mts.NM(1, 8), mts.Unstructured(0.5, "row"), mts.Unstructured(0.3, "row")], ids=str
)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_that_rows_are_independent_where_they_are(name, pattern):
    """Those that do not say so do give other masks to some rows alone."""
    method = METHODS[name]
    options = dict(method.options)
    weight, stats = problem(0)
    state = method.prepare(stats, options)
    whole = method.solve(weight, state, pattern, options)
    parts = [method.solve(part, state, pattern, options) for part in weight.split(7)]
    same = torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    assert same == method.rows_independent
    if same:
        torch.testing.assert_close(torch.cat([part.weight for part in parts]), whole.weight, rtol=1e-5, atol=1e-6)


# experts --------------------------------------------------------------------------------------------------------------


TWO, ONE = [(4, 48, 32), *[(2, 48, 32)] * 4], [(1, 48, 32)] * 8  # of each of two layers
LIMIT = 3 * 4 * (5 * 32**2 + 10 * 48 * 32)  # three experts
AT_A_TIME = {  # method, the numbers that memory holds, and to prepare with, memory_limit -> what a note says, and tries
    **{(name, 2 * 48 * 32, 2**30, None): ("2 experts", TWO) for name in ("magnitude", "wanda", "sparsegpt", "alps")},
    ("sparsegpt", 12 * 32, 2**30, None): ("one expert at a time, 12 rows", [*TWO[:2], ONE[0]]),
    ("sparsegpt", 2**30, 32 * 32, None): ("one expert", ONE),
    ("sparsegpt", 48 * 32, 2**30, LIMIT): ("one expert", [(3, 48, 32), (2, 48, 32), *ONE]),
}


@pytest.mark.parametrize("case", AT_A_TIME)
def test_fewer_experts_at_a_time_give_what_all_of_them_give(case):
    """Of four experts, gate_up_proj [4, 48, 32]."""
    name, room, prepared, limit = case
    note, tried = AT_A_TIME[case]
    method = Scarce(METHODS[name], room, prepared)
    _, report = compared(tiny_mixtral, method, memory_limit=limit, **EXPERTS)
    for layer in report.layers:
        assert f"solved {note} at a time, because memory ran out" in layer.notes
    assert method.tried[: len(tried)] == tried
    assert len(method.tried) == len(tried) or "rows" in note


# no smaller pieces ----------------------------------------------------------------------------------------------------


NO_MEMORY = "layer 'model.layers.0.{} [{}]: out of memory while it was solved"
Q, GATE, DOWN = (
    NO_MEMORY.format(*of)
    for of in (("self_attn.q_proj'", "32, 32"), ("mlp.gate_proj'", "64, 32"), ("mlp.down_proj'", "32, 64"))
)
WITHOUT_GRAM = "a method without a Gram matrix (wanda, magnitude)"
# method, the numbers that memory holds -> words of the error, layers that are done by then, what was tried first
TOO_LARGE = {
    ("alps", 600): ([Q, "device="], 0, [(32, 32), (32, 32)], {}),  # the second is that of the second call
    ("ria", 600): ([Q, "device="], 0, [(32, 32), (32, 32)], {}),
    ("sparsegpt", 600): ([Q, "device="], 0, [(32, 32), (32, 32)], {"pattern": 0.5}),
    ("magnitude", 600): ([Q, "device="], 0, [(32, 32), (32, 32)], {"pattern": 0.5}),
    # not even the smallest piece
    ("sparsegpt", 20): ([Q, WITHOUT_GRAM, "device= with more memory"], 0, [(32 // 2**i, 32) for i in range(6)], {}),
    ("alps", 64 * 32 - 1): ([GATE], 4, [(32, 32)], {}),  # layers before it stay sparse
    ("alps", 100): (["out of memory while it was solved", "memory_limit= for experts"], 0, [(4, 48, 32)], EXPERTS),
    ("sparsegpt", 2**30): ([DOWN, WITHOUT_GRAM], 6, [(32, 32)], {}),  # of a preparation there are none
}


@pytest.mark.parametrize(
    ("name", "room", "failure"), [*((*case, "cuda") for case in TOO_LARGE), ("sparsegpt", 20, "python")]
)
def test_what_has_no_smaller_pieces_is_an_error(name, room, failure):
    parts, done, tried, options = TOO_LARGE[name, room]
    method = Scarce(METHODS[name], room, prepared=32 * 32 if room == 2**30 else 2**30, failure=failure)
    model = tiny_mixtral() if options is EXPERTS else tiny_llama()
    before = Snapshot(model)
    options = {"data_loader": token_batches(), **options}
    with pytest.raises(MemoryError) as caught:
        mts.sparsify(model, method, **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert isinstance(caught.value.__cause__, (MemoryError, RuntimeError))
    assert len(dict(mts.named_masks(model))) == done
    if not done:
        now = Snapshot(model).look
        assert all(now[key] == value for key, value in before.look.items() if key[0] in ("class", "tensor"))
    method.room = method.prepared = 2**30  # and a second call works
    mts.sparsify(model, method, **options)
    assert method.tried[: len(tried)] == tried


def scarce() -> None:
    raise FAILURES["cpu"]()


def test_no_memory_for_a_mask_leaves_the_layer_as_it_was(monkeypatch):
    at_the_third_mask(monkeypatch, scarce)
    said = stops_after(2, "magnitude", error=MemoryError)
    assert "v_proj' [16, 32]: out of memory while its solution was written into" in said


def test_an_error_of_another_kind_is_left_as_it_is():
    class Wrong(Scarce):
        def solve(self, weight, state, pattern, options):
            self.tried.append(tuple(weight.shape))
            raise RuntimeError("no product of these shapes")

    method = Wrong(METHODS["magnitude"], 1)
    refused(mts.sparsify, tiny_llama(), method, match="no product of these shapes", error=RuntimeError)
    assert len(method.tried) == 1


def test_what_the_smaller_pieces_replace_is_freed():
    """What a failed attempt held is gone when the next one begins: the weight, and for experts their state."""
    alive: list[weakref.ref] = []

    class Watching(Scarce):
        def prepare(self, stats, options):
            assert not [ref for ref in alive if ref() is not None]
            state = super().prepare(stats, options)
            alive.append(weakref.ref(state.upper))
            return state

        def solve(self, weight, state, pattern, options):
            held = torch.empty_like(weight)
            alive.append(weakref.ref(held))
            return super().solve(weight, state, pattern, options)

    method = Watching(METHODS["sparsegpt"], 48 * 32)
    mts.sparsify(tiny_mixtral(), method, **{**EXPERTS, "include": "*.0.*.gate_up_proj"})
    assert [shape[0] for shape in method.tried] == [4, 2, 1, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
def test_a_gpu_that_runs_out_of_memory(name):
    """For real: the process may have 1,280 MiB of the device, and solving this layer of 256 MiB takes more."""
    total = torch.cuda.get_device_properties(0).total_memory

    def solved() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        torch.manual_seed(0)
        layer = nn.Linear(1024, 65536, bias=False)
        model = nn.Sequential(layer)
        mts.sparsify(model, name, data_loader=[torch.randn(64, 1024)], include="0", pattern="2:4", device="cuda")
        mask = dict(mts.named_masks(model))["0.weight"]
        return mask, layer.weight.detach(), mts.report(model).layers[0].notes

    whole, values, notes = solved()
    assert notes == []
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1280 * 2**20 / total)
    try:
        mask, pieces, notes = solved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(notes) == 1
    assert notes[0].endswith(" rows at a time, because memory ran out")
    assert torch.equal(mask, whole)
    torch.testing.assert_close(pieces, values, rtol=1e-4, atol=1e-6)


PLACES = [
    ("model.embed_tokens", "LlamaForCausalLM outside of its blocks"),
    ("model.layers.0.mlp", r"block 'model\.layers\.0'"),
    ("model.layers.1.mlp", r"block 'model\.layers\.1'"),
    ("lm_head", "LlamaForCausalLM outside of its blocks"),
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("at", "where"), PLACES)
def test_a_forward_that_runs_out_of_memory_says_where_and_what_to_do(at, where, failure):
    """On the CPU that is a RuntimeError, which was a traceback on the command line."""
    model = tiny_llama()

    def fail(module: nn.Module, args: tuple) -> None:
        raise FAILURES[failure]()

    with model.get_submodule(at).register_forward_pre_hook(fail):
        message = rf"^no memory for a batch of 2 in {where}: batch_size=1, or spill=True where the"
        refused(mts.sparsify, model, "wanda", match=message, error=MemoryError, data_loader=token_batches())
