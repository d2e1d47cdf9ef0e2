"""The estimate of a run's memory: against hand computations, and against what solvers hold."""

import psutil
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

import modelopt_sparse as mts
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.alps import Scaled
from modelopt_sparse.model import devices
from modelopt_sparse.plan import memory as planned_memory
from modelopt_sparse.shrinking import importance as choose_channels
from modelopt_sparse.shrinking.sizes import ShrinkRequest, TargetSizes
from tests.helpers import LiveBytes, tiny_llama, token_batches
from tests.models.expert_models import VOCAB, causal
from tests.models.shrinkable import shrinkable
from tests.plan.test_planner import untied

pytestmark = pytest.mark.core


# memory ---------------------------------------------------------------------------------------------------------------


# 32 wide, 2 blocks: q and o 32 x 32, k and v 16 x 32, gate and up 64 x 32, down 32 x 64, and two norms; in bfloat16
MATRICES = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
COLUMNS, ROWS = 6 * 32 + 64, 32 + 16 + 16 + 32 + 64 + 64 + 32
BLOCK = 2 * (MATRICES + 2 * 32)
GRAMS, SOLVER = 4 * (6 * 32 * 32 + 64 * 64), 4 * (10 * 32 * 64 + 4 * 64 * 64)
HELD = {
    "outside_of_the_blocks": 2 * (2 * 97 * 32 + 32 + 2 * 4),  # embedding, head, norm; buffers of 4 rotary frequencies
    "one_block_twice": 2 * BLOCK,
    "activations": 5 * 10 * 32 * 2,
}


def test_memory_figures_agree_with_a_hand_computation():
    """Statistics are float32; the largest workspace: ten numbers per weight of down, four Gram matrices."""
    text = {"data": ["some text"], "tokenizer": print, "num_samples": 5}
    of_layers = {"statistics_of_one_block": GRAMS, "solver_workspace": SOLVER}
    plan = mts.make_plan(untied(), "sparsegpt", text)  # windows of the model's 64 positions
    of_layers["logits_of_one_batch"] = 5 * 64 * 97 * 4
    of_layers["one_batch_in_one_block"] = 5 * 64 * (4 * (ROWS + COLUMNS) + 4 * COLUMNS)
    assert plan.memory == of_layers | {"masks": 2 * MATRICES, "cached_activations": 5 * 64 * 32 * 4}
    halved = mts.make_plan(untied().bfloat16(), "sparsegpt", text, seq_len=10, enforce=False)
    of_layers["logits_of_one_batch"] = 5 * 10 * 97 * 2
    of_layers["one_batch_in_one_block"] = 5 * 10 * (2 * (ROWS + COLUMNS) + 4 * COLUMNS)
    assert halved.memory == of_layers | {"cached_activations": 5 * 10 * 32 * 2}
    tuned = mts.make_plan(untied(), "sparsegpt", text, reconstruct=True)
    assert tuned.memory["cached_activations"] == 3 * 5 * 64 * 32 * 4
    assert mts.make_plan(untied(), "wanda").memory["statistics_of_one_block"] == 4 * (6 * 32 + 64)
    assert mts.make_plan(untied(), "magnitude").memory["statistics_of_one_block"] == 0
    assert "cached_activations" not in mts.make_plan(untied(), "magnitude", text).memory


def test_memory_of_stacked_matrices_layers_outside_of_blocks_and_twins():
    plan = mts.make_plan(nn.MultiheadAttention(8, 2), "sparsegpt")
    assert plan.memory["statistics_of_one_block"] == 4 * (3 * 8 * 8 + 8 * 8)

    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(12, 8), "layers": layers})
    plan = mts.make_plan(model, "sparsegpt", include=["a", "b"])
    assert plan.memory["statistics_of_one_block"] == 4 * 12 * 12  # one at a time

    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert mts.make_plan(tied, "magnitude").memory["masks"] == 2 * 64


def test_memory_of_a_run_that_streams_agrees_with_a_hand_computation():
    data, model = {"num_samples": 5, "seq_len": 10}, untied().bfloat16()
    solving = {"statistics_of_one_block": GRAMS, "workspace": SOLVER}
    held = HELD | {"logits_of_one_batch": 5 * 10 * 97 * 2}
    masked = held | {"masks_of_one_block": MATRICES}
    assert mts.make_plan(model, "sparsegpt", data).streamed == {"host": masked | solving}
    on_gpu = mts.make_plan(model, "sparsegpt", data, device="cuda:1", enforce=False)
    assert on_gpu.streamed == {
        "host": held | {"masks_of_one_block": 0},
        "cuda:1": {"one_block": BLOCK, "masks_of_one_block": 0, **solving},
    }
    assert on_gpu.as_dict()["streamed_memory_bytes"] == on_gpu.streamed


def test_a_large_batch_takes_more_than_the_solver():
    """Each token: inputs and outputs of all layers of a block in bfloat16, and the inputs in float32."""
    model = untied().bfloat16()
    held = mts.make_plan(model, "wanda", num_samples=64, batch_size=16, seq_len=64).streamed["host"]
    assert held["workspace"] == 16 * 64 * (2 * (ROWS + COLUMNS) + 4 * COLUMNS)
    unknown = mts.make_plan(model, "wanda", data_loader=[torch.ones(1, 4, dtype=torch.long)])
    assert "activations" not in unknown.streamed["host"]
    assert unknown.streamed["host"]["workspace"] == unknown.memory["solver_workspace"]


def test_what_blocks_share_is_outside_of_them():
    model = untied()
    model.model.layers[0].mlp.gate_proj = model.model.layers[1].mlp.gate_proj
    plain, tied = (mts.make_plan(x, "magnitude", exclude="*gate_proj").streamed["host"] for x in (untied(), model))
    size = 4 * 64 * 32
    assert tied["outside_of_the_blocks"] - plain["outside_of_the_blocks"] == size
    assert plain["one_block_twice"] - tied["one_block_twice"] == 2 * size


def test_a_model_without_blocks_cannot_be_streamed_and_has_no_estimate():
    assert mts.make_plan(nn.Sequential(nn.Linear(8, 8)), "magnitude").streamed == {}


@pytest.mark.parametrize(
    ("shape", "dtype"), [((512, 128), torch.float32), ((512, 128), torch.bfloat16), ((32, 512), torch.float32)]
)
@pytest.mark.parametrize("pattern", ["2:4", "50% per matrix", "50% per row"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "sparsegpt"])
def test_a_solver_holds_no_more_than_the_plan_says(method, dtype, pattern, shape):
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype))
    item = (plan := mts.make_plan(model, method, pattern=pattern)).layers[0]
    weight = model[0].weight.detach()
    inputs = torch.randn(shape[1] + 8, shape[1])
    gram = inputs.mT @ inputs
    stats = mts.Stats(len(inputs), gram.diagonal().clone(), gram if item.method.needs == "gram" else None)
    with LiveBytes(weight, gram, stats.square_sums) as live:
        item.method.solve(weight, item.method.prepare(stats, item.options), item.pattern, item.options)
    assert 0 < live.peak <= plan.memory["solver_workspace"] + plan.memory["masks"]


# shrink ---------------------------------------------------------------------------------------------------------------


def test_memory_of_a_streamed_shrink_agrees_with_a_hand_computation():
    """MLPs of 64."""
    model, data = untied().bfloat16(), {"num_samples": 5, "seq_len": 10}
    channels = {"statistics_of_one_block": 2 * 4 * 64 * 64, "workspace": 44 * 64 * 64 + 72 * 32 * 64}
    plan, held = mts.plan_shrink(model, mlp=0.25, **data), HELD | {"logits_of_one_batch": 10 * 97 * 2}
    assert plan.streamed == {"host": held | channels}
    assert plan.as_dict()["streamed_memory_bytes"] == plan.streamed
    assert f"in all {sum(plan.streamed['host'].values()) / 2**20:,.1f}" in " ".join(str(plan).split())
    # without channels the largest are a batch of ten tokens, or what tunes the block
    batch = {"workspace": 10 * (2 * (ROWS + COLUMNS) + 4 * COLUMNS)}
    assert mts.plan_shrink(model, blocks=1, **data).streamed == {"host": held | batch}
    tuned = mts.plan_shrink(model, blocks=1, reconstruct=1, **data).streamed["host"]
    assert tuned["workspace"] == 6 * 4 * MATRICES
    assert mts.plan_shrink(model, budget="90% params").streamed == {}


def test_memory_of_experts_that_are_refit_agrees_with_a_hand_computation():
    """Mixtral, 32 wide, 4 experts of 48, of which two work on a token."""
    model, data = shrinkable("Mixtral").bfloat16(), {"num_samples": 8, "seq_len": 16, "batch_size": 1}
    refit, tuned = (
        mts.plan_shrink(model, experts=1, **data, **more).streamed["host"] for more in ({}, {"reconstruct": 1})
    )
    of_token = (2 + 4) * 32 + 20 * 2 + 4 * 48
    assert refit["routed_tokens_of_one_block"] == 8 * 16 * of_token
    assert refit["workspace"] == 2 * 4 * 4 * 32 * 48 + 44 * (32 + 48) ** 2
    assert "routed_tokens_of_one_block" not in tuned


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
@pytest.mark.parametrize("criterion", ["gram", "norm"])
def test_a_choice_of_channels_holds_no_more_than_the_plan_says(criterion, shape):
    rows, columns = shape
    model = tiny_llama(hidden_size=rows, intermediate_size=columns)
    held = mts.plan_shrink(model, mlp=0.25, num_samples=4, seq_len=8).streamed["host"]
    planned = mts.make_plan(model, "magnitude")
    name, *_ = (each.name for each in planned.layers if each.name.endswith("down_proj"))
    sizes = TargetSizes({"intermediate_size": (columns, columns * 3 // 4)})
    group = next(group for of_block in sizes.groups_in(model, planned).values() for group in of_block)
    assert group.consumer.name == name
    fitted, judging = (x.mT @ x for x in torch.randn(2, columns + 8, columns))
    choose = choose_channels._choice  # pyright: ignore[reportPrivateUsage]
    with torch.no_grad(), LiveBytes(*model.parameters(), fitted, judging) as live:
        choose(group, fitted, judging, fitted.diagonal(), ShrinkRequest(criterion=criterion, refit=True))
    assert held["statistics_of_one_block"] == fitted.nbytes + judging.nbytes
    assert held["workspace"] / 2 < live.peak <= held["workspace"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(64, 8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.narrow(self.wide(x).flatten(1))


WIDE_GRAM = 4 * 4096**2


TAKES = [
    ("sparsegpt", 4 * WIDE_GRAM - 1, True),
    ("sparsegpt", 4 * WIDE_GRAM, False),
    ("alps", 4 * WIDE_GRAM - 1, True),
    ("wanda", 1e6, False),
]


@pytest.mark.parametrize(("method", "most", "refused"), TAKES)
def test_a_layer_that_takes_more_than_there_is_is_refused_before_the_data(monkeypatch, method, most, refused):
    monkeypatch.setattr(planned_memory, "bytes_of", lambda device: (most, 1e12))

    def untouched():
        raise AssertionError("the data was read")
        yield

    options = {"pattern": 0.5, "include": ["*"], "progress": False}
    plan = mts.make_plan(Wide(), method, options)
    assert any("wide takes" in note and "exclude" in note for note in plan.notes) == refused
    expected = "wide takes 268,435,456 bytes at once.*'wanda'" if refused else "the data was read"
    with pytest.raises((ValueError, AssertionError), match=expected):
        mts.sparsify(Wide(), method, options, data_loader=untouched())


def test_a_tight_run_is_warned_of_once(monkeypatch):
    options = {"pattern": 0.5, "include": ["*"], "progress": False}
    monkeypatch.setattr(planned_memory, "bytes_of", lambda device: (1e12, 1e3))
    assert any("where 1,000 are free" in note for note in mts.make_plan(Wide(), "magnitude", options).notes)
    with pytest.warns(UserWarning, match=r"at most on cpu, where 1,000 are free: free some") as caught:
        mts.sparsify(Wide(), "magnitude", options)
    assert len(caught) == 1


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "polish"])
def test_what_a_layer_takes_at_once_is_no_more_than_it_really_takes(method):
    stats = mts.Stats(600, torch.ones(512), torch.eye(512))
    with LiveBytes(stats.gram, stats.square_sums) as live:
        Scaled.of(stats, 0.01) if method == "polish" else METHODS[method].prepare(stats, METHODS[method].options)
    assert live.peak >= 3 * 4 * 512**2


def test_what_the_host_has_counts_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000000\n")
    assert devices.bytes_of(torch.device("cpu"))[0] == 1_000_000 + psutil.swap_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("max\n")
    assert devices.bytes_of(torch.device("cpu"))[0] > 2**28


@pytest.mark.parametrize(("metric", "held", "streamed"), [("plain", 0, 0), ("auto", 1, 0), ("fisher", 1, 1)])
def test_auto_holds_fisher_metrics_of_a_model_in_memory_alone(metric, held, streamed):
    plan = mts.make_plan(tiny_llama(), "wanda", data=["a"], tokenizer=print, reconstruct={"metric": metric})
    assert ("fisher_metrics" in plan.memory) == held
    assert [("fisher_metrics" in parts) for parts in plan.streamed.values()] == [streamed]


class Numbers:
    """Reads any text as the same tokens."""

    eos_token_id = bos_token_id = None

    def __call__(self, *_args, **_kwargs):
        return {"input_ids": list(range(3, VOCAB)) * 400}


def mixture(experts: int) -> nn.Module:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_experts": experts}
    return causal("Qwen3Moe", **sizes, num_hidden_layers=1, head_dim=16)()


NUMBERS = {"data": ["x"], "tokenizer": Numbers()}
ROWS_OF_TOKENS = {"data_loader": token_batches(2, 1, 32, VOCAB)}
ALL_TOKENS = {"experts": "all_tokens", "min_tokens": 10**6, "num_samples": 256, "seq_len": 32, "batch_size": 4}
LARGE_BATCHES = {"num_samples": 64, "seq_len": 64, "batch_size": 32}
PEAKS = {  # what the plan counts -> a model, options
    "weights of the plans that a budget tries": (
        lambda: tiny_llama(num_hidden_layers=6, hidden_size=128, intermediate_size=256),
        {**ROWS_OF_TOKENS, "budget": "50% zeros"},
    ),
    "solutions of experts that are solved in turns": (lambda: mixture(64), {**ROWS_OF_TOKENS, "memory_limit": "1MB"}),
    # second matrices: each expert holds rows of its own for every token
    "tokens of experts that see all": (lambda: mixture(8), {**NUMBERS, **ALL_TOKENS, "memory_limit": "1MB"}),
    "a batch in a block": (lambda: tiny_llama(num_hidden_layers=3), {**NUMBERS, **LARGE_BATCHES}),
    "a batch, dense": (lambda: tiny_llama(num_hidden_layers=3), {**NUMBERS, **LARGE_BATCHES, "sequential": "none"}),
}


@pytest.mark.parametrize("case", PEAKS)
def test_a_run_holds_no_more_than_the_plan_says(case):
    build, options = PEAKS[case]
    model, options = build(), {"progress": False, "enforce": False, **options}
    plan = mts.make_plan(model, "sparsegpt", **options)
    with LiveBytes(*(p.detach() for p in model.parameters()), *model.buffers()) as live:
        mts.sparsify(model, "sparsegpt", **options)
    assert live.peak <= sum(plan.memory.values())


def test_plan_counts_what_is_held_while_text_is_written():
    """Keys and values: 2 blocks, 2 heads of 8 channels, 32 windows of 64 tokens."""
    data = {**NUMBERS, "num_samples": 20, "seq_len": 64}
    plan = mts.make_plan(tiny_llama(), "wanda", **data, self_data="auto")
    assert plan.memory["cache_of_own_text"] == 2 * 2 * 2 * 8 * 32 * 64 * 4
    assert "cache_of_own_text" not in mts.make_plan(tiny_llama(), "wanda", **data).memory
    nothing = mts.make_plan(tiny_llama(), "wanda", data="self", num_samples=20, seq_len=64)
    assert nothing.memory["cache_of_own_text"] == 2 * 2 * 2 * 8 * 20 * 64 * 4


@pytest.mark.skipif(not hasattr(PreTrainedConfig, "per_layer_config"), reason="no config has values of single blocks")
def test_keys_and_values_of_blocks_that_differ():
    """As those of Gemma 4 do: here the second of 2 blocks has 2 heads of 16 channels."""
    model = tiny_llama()
    model.config.per_layer_config = {1: {"head_dim": 16}}
    plan = mts.make_plan(model, "wanda", data="self", num_samples=20, seq_len=64)
    assert plan.memory["cache_of_own_text"] == 2 * 2 * (8 + 16) * 20 * 64 * 4
