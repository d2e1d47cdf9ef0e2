"""Channel permutation: the order against brute force, the model's function, and what is left as it was."""

import copy
import itertools
from contextlib import ExitStack

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import modelopt_sparse as mts
from modelopt_sparse.accuracy.permute import channel_order, kept_fraction, permute, possible_permutations
from modelopt_sparse.calibration.calls import AtBlock
from modelopt_sparse.calibration.dense import blocks_in_call_order
from modelopt_sparse.run import calibrating
from tests.helpers import assert_bits, assert_same_state, calibrated_run, refused, state_of, tiny_llama, token_batches
from tests.interruptions import interrupted
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import Block, Stacked, vectors
from tests.solving.test_failures import Stopping

# without fused experts, a block that is none by itself, convolutions
FOLDABLE = sorted(set(ARCHITECTURES) - {"mixtral", "albert", "resnet_basic", "resnet_bottleneck"})


def scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator) * torch.rand(columns, generator=generator).mul(3).exp()


def kept_by_loops(score: Tensor, n: int, m: int) -> float:
    kept = sum(sum(sorted(row[g : g + m], reverse=True)[:n]) for row in score.tolist() for g in range(0, len(row), m))
    return kept / float(score.double().sum())


@torch.no_grad()
def first_output(model: nn.Module, batch: object) -> Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, Tensor) else output[0]


# orders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (3, 4)])
def test_an_order_is_a_permutation_that_no_swap_of_two_improves(n, m):
    score = scores(6, 24)
    order = channel_order(score, n, m)
    assert sorted(order.tolist()) == list(range(24))
    best = kept_by_loops(score[:, order], n, m)
    assert best > kept_by_loops(score, n, m)
    for i, j in itertools.combinations(range(24), 2):
        swapped = order.clone()
        swapped[[i, j]] = order[[j, i]]
        assert kept_by_loops(score[:, swapped], n, m) <= best * (1 + 1e-4)


def test_the_best_of_all_orders_of_eight_channels():
    """2:4 of eight columns: 35 ways to make two groups."""
    for seed in range(5):
        score = scores(5, 8, seed)
        groups = [(0, *rest) for rest in itertools.combinations(range(1, 8), 3)]
        orders = [[*group, *(i for i in range(8) if i not in group)] for group in groups]
        best = max(kept_by_loops(score[:, order], 2, 4) for order in orders)
        assert kept_by_loops(score[:, channel_order(score, 2, 4)], 2, 4) >= 0.995 * best


def test_channels_that_matter_alike_are_parted():
    """Eight strong channels side by side: 2:4 keeps all of them only if no three share a group."""
    score = torch.full((3, 16), 0.01)
    score[:, :8] = 1
    assert kept_fraction(score[:, channel_order(score, 2, 4)], 2, 4) == pytest.approx(24 / float(score.sum()), rel=1e-2)


def test_wide_layers_are_refined_in_parts():
    score = scores(4, 64)
    order = channel_order(score, 2, 4, block=16)
    assert sorted(order.tolist()) == list(range(64))
    assert kept_by_loops(score[:, order], 2, 4) > 1.02 * kept_by_loops(score, 2, 4)
    assert kept_fraction(score, 2, 4) == pytest.approx(kept_by_loops(score, 2, 4))


# models -------------------------------------------------------------------------------------------------------------


def permuted_alone(model: nn.Module, batches, **options) -> list[str]:
    """Permute every block of a model and solve nothing -> the layers whose columns moved."""
    run, data = calibrated_run(model, "wanda", data_loader=batches, permute=True, **options)
    names = []
    with calibrating(model):
        for block in blocks_in_call_order(run, data):
            undo = ExitStack()  # nothing is taken back
            names += permute(block, block.inputs(), run, undo)
            block.inputs().advance()
    return names


@pytest.mark.parametrize("kind", ["shared", "pruned"])
def test_a_bias_that_another_block_has_or_that_is_no_parameter_stays_in_order(kind):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
    if kind == "shared":
        blocks[1][0].bias = blocks[0][0].bias
    else:
        prune.identity(blocks[0][0], "bias")
    bias, data = blocks[0][0].bias.detach().clone(), [torch.randn(32, 16) for _ in range(6)]
    model = nn.Sequential(*blocks)
    mts.sparsify(model, "magnitude", pattern="2:4", permute=True, data_loader=data, progress=False)
    assert torch.equal(blocks[0][0].bias, bias)
    recipes = {layer.name: layer.recipe for layer in mts.report(model).layers}
    assert [recipes[name].startswith("permute") for name in ("0.2", "1.2")] == [False, kind == "pruned"]


@pytest.mark.parametrize("name", FOLDABLE)
def test_the_model_computes_the_same(name):
    """The MLP of every block, whatever the names: gate and up in one matrix, [in, out] weights, biases; and value heads
    that are wider than a group."""
    architecture = ARCHITECTURES[name]
    model, dense = architecture.build(), architecture.build()
    batches = architecture.batches("left")
    names = permuted_alone(model, batches)
    found = [sum(layer.startswith(block) for layer in names) for block in architecture.block_names(model)]
    if name == "swin":  # two MLPs in each; value heads where this transformers says how wide they are
        assert all(2 <= number <= 4 for number in found)
    else:
        assert found == {"sequential": [2], "qwen3": [2, 2]}.get(name, [1] * len(found))
    for layer in names:
        moved, before = model.get_submodule(layer).weight, dense.get_submodule(layer).weight
        assert not torch.equal(moved, before)
        assert torch.equal(moved.flatten().sort().values, before.flatten().sort().values)
    expected = first_output(dense, batches[0])
    torch.testing.assert_close(first_output(model, batches[0]), expected, rtol=1e-3, atol=1e-4)


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
OF_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_inner": 64, "rotary_dim": 4}
OF_T5 = {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "num_layers": 1}
OF_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 8}
# type of a model -> options of its config, and the layers that take values and hidden channels
LAYOUTS = {
    "bert": ({}, "attention.output.dense", "output.dense"),  # the size of heads stands beside the producer
    "t5": (OF_T5, "0.SelfAttention.o", "1.DenseReluDense.wo"),
    "gpt2": (OF_GPT, "attn.c_proj", "mlp.c_proj"),  # queries, keys, values in one matrix
    "phi3": ({"num_key_value_heads": 2, "pad_token_id": 0}, "self_attn.o_proj", "mlp.down_proj"),
    "falcon": ({"multi_query": True}, "self_attention.dense", "mlp.dense_4h_to_h"),  # attention and MLP side by side
    "gpt_neox": ({}, "attention.dense", "mlp.dense_4h_to_h"),  # those of each head together
    "falcon, grouped": (OF_FALCON, "self_attention.dense", "mlp.dense_4h_to_h"),
    "deepseek_v3": ({**LATENT, "first_k_dense_replace": 1}, "self_attn.o_proj", "mlp.down_proj"),
    "gptj": (OF_GPT, "attn.out_proj", "mlp.fc_out"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_hidden_channels_are_looked_for_in_all_layouts(name):
    """Norms are far from 1, so that an order which passes through one would show."""
    options, *takers = LAYOUTS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.partition(",")[0]](**{**SIZES, **options})
    model = (hf.T5EncoderModel(config) if name == "t5" else hf.AutoModel.from_config(config)).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** (0.5 * (parameter.dim() > 1))
    dense, batches = copy.deepcopy(model), [torch.randint(1, 64, (4, 12)) for _ in range(2)]
    names = permuted_alone(model, batches)
    assert len(names) == 2
    assert all(name.endswith(taker) for name, taker in zip(names, takers))
    torch.testing.assert_close(first_output(model, batches[0]), first_output(dense, batches[0]), rtol=1e-4, atol=1e-5)


def test_no_order_is_looked_for_where_layers_share_an_input():
    """o_proj makes as many channels as gate_proj and up_proj take; each would have to take the other's order."""
    run, data = calibrated_run(tiny_llama(), "wanda", data_loader=token_batches(), permute=True)
    with calibrating(run.model):
        block = blocks_in_call_order(run, data)[0]
        takers = {x.consumer.name.rpartition(".")[2] for x in possible_permutations(run.model, block.by_input())}
    assert takers == {"o_proj", "down_proj"}


def order_of(moved: Tensor, before: Tensor) -> list[int]:
    """Which row each row was before."""
    return [next(j for j, old in enumerate(before) if torch.equal(new, old)) for new in moved]


def test_rows_columns_and_biases_move_alike():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    first, last = (module.weight.detach().clone() for module in (model[0], model[2]))
    bias = model[0].bias.detach().clone()
    assert permuted_alone(model, [torch.randn(32, 8) for _ in range(2)], include=["0", "2"]) == ["2"]
    order = order_of(model[2].weight.T, last.T)
    assert order != list(range(16))
    assert_bits(model[0].weight.detach(), first[order])
    assert_bits(model[0].bias.detach(), bias[order])


def test_channels_stay_in_their_value_heads():
    """Four query heads on two value heads of eight channels: both takers of a value head move as it does."""
    model, dense = tiny_llama(), tiny_llama()
    assert "model.layers.0.self_attn.o_proj" in permuted_alone(model, token_batches())
    moved, before = (each.model.layers[0].self_attn for each in (model, dense))
    rows = order_of(moved.v_proj.weight, before.v_proj.weight)
    columns = order_of(moved.o_proj.weight.T, before.o_proj.weight.T)
    assert rows != list(range(16))
    inside = [[j % 8 for j in rows[k : k + 8]] for k in (0, 8)]
    assert columns == [head * 8 + j for head in range(4) for j in inside[head // 2]]
    assert rows == [head * 8 + j for head in range(2) for j in inside[head]]


def test_less_error_and_a_recipe_that_says_so():
    plain, better = tiny_llama(), tiny_llama()
    data = {"data_loader": token_batches(), "sequential": "none"}
    mts.sparsify(plain, "wanda", **data)
    mts.sparsify(better, "wanda", permute=True, **data)
    before = {layer.name: layer for layer in mts.report(plain).layers}
    for layer in mts.report(better).layers:
        if "down_proj" in layer.name or "o_proj" in layer.name:
            assert layer.recipe == "permute+wanda"
            assert layer.error < 0.98 * before[layer.name].error
            assert any(note.startswith("channels reordered: the pattern keeps") for note in layer.notes)
        else:
            assert layer.recipe == "wanda"
            assert layer.error == pytest.approx(before[layer.name].error, rel=1e-3)
    mts.verify(better, "2:4")


def test_with_reconstruction_and_any_sequence():
    for sequential in ("block", "stage"):
        options = {"data_loader": token_batches(4), "permute": True, "reconstruct": 1, "sequential": sequential}
        model = mts.sparsify(tiny_llama(), "magnitude", **options)
        recipes = {layer.recipe for layer in mts.report(model).layers}
        assert recipes == {"magnitude+reconstruct", "permute+magnitude+reconstruct"}


class Scaled(Block):
    """A block with a factor for each hidden channel, which is not reordered with them."""

    ends = (0.5, 2)

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(*self.ends, 32))

    def forward(self, x):
        return x + self.down(self.up(x).relu() * self.factor)


class HardlyScaled(Scaled):
    """A factor near 1: another order changes little, and much more than rounding does."""

    ends = (0.99, 1.01)


class Unreached(Block):
    """A block whose output does not depend on its layers."""

    def forward(self, x):
        return x + 0 * self.down(self.up(x))


class Shares(Block):
    """A block whose hidden channels are read by the blocks behind it, as values are in Gemma 3n."""

    def forward(self, x, shared):
        shared["hidden"] = hidden = self.up(x).relu() + shared.get("hidden", 0)
        return x + self.down(hidden)


class SharesBeside(Block):
    def forward(self, x, shared):
        hidden = self.up(x).relu() + shared.get("hidden", 0)
        return x + self.down(hidden), {"hidden": hidden}


class SharesImaginary(Block):
    """What later blocks may read is the imaginary part."""

    def forward(self, x, shared):
        hidden = self.up(x).relu()
        return x + self.down(hidden), {"hidden": torch.complex(torch.ones_like(hidden), hidden)}


class Sharing(Stacked):
    def forward(self, x):
        x, shared = self.stem(x), {}
        for block in self.blocks:
            output = block(x, shared)
            x, shared = output if isinstance(output, tuple) else (output, shared)
        return self.head(x)


class TakenBeside(Block):
    """Another layer takes the hidden channels of calls with ``rows`` rows."""

    rows = 7

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(32, 16)

    def forward(self, x):
        hidden = self.up(x).relu()
        return x + self.down(hidden) + (self.more(hidden) if len(x) == self.rows else 0)


class TakenByNone(TakenBeside):
    rows = 99


class Routed(nn.Module):
    """Two experts in a list, between which a router chooses by what attention puts out. A batch may reach one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.gate = nn.Linear(16, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        x = x + self.o(x.cumsum(0))
        best = self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (best == number).any():
                x = x.index_put((best == number,), x[best == number] + expert(x[best == number]))
        return x


def masked() -> nn.Module:
    return mts.sparsify(tiny_llama(), "magnitude", include=["*up_proj", "*o_proj"])


TWO = {"include": ["*up", "*down"]}
STAY = {  # model, data, options
    "scaled": (lambda: Stacked(block=Scaled), vectors(), {}),
    "hardly scaled": (lambda: Stacked(block=HardlyScaled), vectors(), {}),
    "written to what later blocks read": (lambda: Sharing(block=Shares), vectors(), {}),
    "put out beside the first tensor": (lambda: Sharing(block=SharesBeside), vectors(), {}),
    "put out as imaginary parts": (lambda: Sharing(block=SharesImaginary), vectors(), {}),
    "taken by another layer in a later call": (lambda: Stacked(block=TakenBeside), vectors(), TWO),
    "taken by another layer in no call": (lambda: Stacked(block=TakenByNone), vectors(), TWO),
    "not reached": (lambda: Stacked(block=Unreached), vectors(), {}),
    "makers that are left out of the plan": (tiny_llama, token_batches(), {"exclude": ["*gate_proj", "*v_proj"]}),
    "layers that carry masks": (masked, token_batches(), {}),
}


@pytest.mark.parametrize("case", STAY)
def test_what_would_compute_something_else_or_shows_nothing_stays(case):
    build, data, options = STAY[case]
    model = build()
    before = state_of(model)
    assert permuted_alone(model, data, **options) == []
    assert_same_state(model, before)


def test_a_layer_that_no_row_comes_to_is_named():
    model = mts.sparsify(Stacked(block=TakenByNone), "wanda", permute=True, data_loader=vectors(), min_tokens=1, **TWO)
    (note,) = [note for note in mts.report(model).notes if "order of its channels" in note]
    assert note.startswith("'blocks.0.down' keeps the order of its channels: none of 32 rows comes to 'more'")


def test_experts_in_a_list_are_permuted_one_by_one():
    """Orders that would route tokens otherwise are not kept, and experts that the first batch leaves out are tried."""
    torch.manual_seed(0)
    model = nn.Sequential(Routed(), Routed())
    dense, batches = copy.deepcopy(model), [torch.randn(rows, 16) for rows in (1, 6, 9)]
    names = permuted_alone(model, batches, min_tokens=1)
    assert sorted(names) == [f"{block}.experts.{expert}.2" for block in (0, 1) for expert in (0, 1)]
    x = torch.randn(64, 16)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


def test_a_block_of_which_nothing_was_solved_is_put_back():
    model, dense = tiny_llama(), tiny_llama()
    stopping = Stopping(8, "square_sums", RuntimeError)  # at the first layer of the second block
    with pytest.raises(RuntimeError):
        mts.sparsify(model, stopping, data_loader=token_batches(), permute=True)
    assert_same_state(model.model.layers[1], state_of(dense.model.layers[1]))
    assert mts.report(model).layers[6].recipe == "permute+stopping"


@pytest.mark.parametrize("call", [2, 3])
def test_an_interruption_while_an_order_is_tried_leaves_the_old_one(call):
    """The first run of the block is the dense one, the second has its columns reordered alone, the third has both."""
    model = tiny_llama()
    before = state_of(model)
    with interrupted(AtBlock, "outputs_of", call):
        mts.sparsify(model, "wanda", data_loader=token_batches(), permute=True, progress=False)
    assert_same_state(model, before)


def test_patterns_without_groups_are_refused():
    refused(mts.make_plan, tiny_llama(), "wanda", match="permute is for N:M patterns", pattern=0.5, permute=True)
    refused(mts.make_plan, tiny_llama(), "wanda", match="permute='yes': must be True or False", permute="yes")
    given = {"pattern": 0.5, "permute": True, "quality": "balanced", "budget": None}
    refused(mts.make_plan, tiny_llama(), match="permute is for N:M patterns", **given)
    config = mts.SparsifyConfig(permute=True, quality="balanced", rules={"*": {"pattern": 0.5}})
    refused(mts.make_plan, tiny_llama(), "wanda", config, match="permute is for N:M patterns")
    # set by quality, for the pattern that no layer has by the rules
    plan = mts.make_plan(tiny_llama(), quality="balanced", rules={"*": {"pattern": 0.5}})
    assert {str(layer.pattern) for layer in plan.layers} == {"50% per matrix"}


def test_a_model_in_which_nothing_can_be_permuted_says_so():
    """Neither where there is nothing to reorder, nor where there is no gain."""
    model = nn.Sequential(nn.Linear(16, 8))
    mts.sparsify(model, "wanda", permute=True, data_loader=[torch.randn(64, 16)], progress=False)
    assert "permute: no layer has channels that can be reordered, or gains by it" in mts.report(model).notes
