"""A mask holds wherever a weight is read, also by modules that never call the one that holds it."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modelopt_sparse as mts
from modelopt_sparse import training
from tests.helpers import assert_same_masks
from tests.model.sparse_modules import is_plus_zero, lost_zeros, random_mask
from tests.models.tricky import Parts
from tests.training.cases import applied, masks_of, take_step

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


# in which a parent reads the weights of two children
READS = {
    "F.linear": lambda self, x: F.linear(F.linear(x, self.experts[0].weight).tanh(), self.experts[1].weight),
    "matmul": lambda self, x: (x @ self.experts[0].weight.T).tanh() @ self.experts[1].weight.T,
    "stacked": lambda self, x: torch.einsum("tc,erc->tr", x, torch.stack([e.weight for e in self.experts])).tanh(),
    "called and read": lambda m, x: F.linear(m.experts[0](x).tanh(), m.experts[1].weight + m.experts[0].weight),
    "called": lambda self, x: self.experts[1](self.experts[0](x).tanh()),
}
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
}


def sparse(read: str) -> Parts:
    torch.manual_seed(0)
    model = Parts(READS[read], experts=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]))
    for index, name in enumerate(["experts.0.weight", "experts.1.weight"]):
        mts.set_mask(model, name, random_mask(model.get_parameter(name), seed=index))
    return model


def trained(
    model: nn.Module, call: Callable[[Tensor], Tensor], make: Callable, masks: dict[str, Tensor]
) -> list[Tensor]:
    """The weights after four steps of two batches each. ``masks``: cut gradients by hand."""
    optimizer = make(model.parameters())
    for _ in range(4):
        for batch in X.chunk(2):
            call(batch).square().mean().backward()
        for name, mask in masks.items():
            model.get_parameter(name).grad[~mask] = 0
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


WAYS = {
    "plain": lambda model: model,
    "checkpointed": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("read", READS)
def test_training_is_that_of_a_dense_model_whose_gradients_are_cut(read: str, name: str, way: str):
    model = sparse(read)
    dense, masks = mts.export(copy.deepcopy(model)), dict(mts.named_masks(model))
    found = trained(model, WAYS[way](model), OPTIMIZERS[name], {})
    torch.testing.assert_close(found, trained(dense, dense, OPTIMIZERS[name], masks))
    assert not lost_zeros(model)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy], ids=["itself", "deepcopy"])
@pytest.mark.parametrize("read", READS)
def test_what_was_written_is_gone_for_the_next_reader(read: str, copied: Callable, gradients: bool):
    model = copied(sparse(read))
    expected = model(X).detach()
    for name, mask in mts.named_masks(model):
        model.get_parameter(name).data[~mask] = 3.0
    with torch.set_grad_enabled(gradients), pytest.warns(UserWarning, match="values, up to 3, were written"):
        assert torch.equal(model(X), expected)
    model(X).sum().backward()
    assert all(is_plus_zero(model.get_parameter(name).grad[~mask]) for name, mask in mts.named_masks(model))


@pytest.mark.parametrize("later", [False, True])
def test_autograd_grad_is_cut_as_well_also_of_a_weight_that_is_trained_later(later: bool):
    model = copy.deepcopy(sparse("F.linear").requires_grad_(not later)).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(X).sum(), [model.experts[0].weight])
    assert is_plus_zero(gradient[~model.experts[0].weight_mask])
    assert gradient[model.experts[0].weight_mask].any()


# what masks throw away ------------------------------------------------------------------------------------------------


def warnings_of(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if "pruned places" in str(each.message)]


def test_one_warning_for_each_weight_says_how_many_and_how_large():
    """Also of whole numbers."""
    model, mask = nn.Sequential(nn.Linear(8, 8)), torch.rand(8, 8) > 0.5
    model[0].codes = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    for name in ("0.weight", "0.codes"):
        mts.set_mask(model, name, mask)
    model[0].weight.data.fill_(-0.25)
    (said,) = warnings_of(lambda: (model(X), model[0].weight.data.fill_(1.0), model(X)))
    assert said.startswith(f"{int((~mask).sum())} values, up to 0.25, were written to pruned places of '0.weight'")
    (told,) = warnings_of(lambda: (model[0].codes.data.fill_(3), model[0].codes))
    assert told.startswith(f"{int((~mask).sum())} values, up to 3, were written to pruned places of '0.codes'")


@pytest.mark.parametrize("attached", [False, True])
def test_momentum_that_is_older_than_the_mask_is_told_unless_attached(attached: bool):
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_step(model(X).sum(), optimizer)
    mts.set_mask(model, "0.weight", torch.rand(8, 8) > 0.5)
    if attached:
        mts.attach_optimizer(optimizer, model)

    def train() -> None:
        for _ in range(3):
            take_step(model(X).sum(), optimizer)

    assert len(warnings_of(train)) == (not attached)


@pytest.mark.parametrize("change", ["kept weights", "a new mask", "training"])
def test_what_loses_nothing_says_nothing(change: str):
    model = nn.Sequential(nn.Linear(8, 8))
    mts.set_mask(model, "0.weight", mask := torch.rand(8, 8) > 0.5)

    def run() -> None:
        if change == "kept weights":
            model[0].weight.data[mask] += 1
        elif change == "a new mask":
            mts.set_mask(model, "0.weight", mask.roll(1, 0))
        else:
            trained(model, model, OPTIMIZERS["AdamW"], {})
        model(X)
        model.eval().state_dict()

    assert warnings_of(run) == []


KINDS = {True: 0, "gaussian": 0, "orthogonal": 0, "pissa": 2, "olora": 2}  # -> how many weights lose values


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lora_that_write_to_the_base_weight_are_told(kind: str | bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    mts.sparsify(model, "magnitude", pattern="2:4")
    x = torch.randn(4, 32)
    before = model(x)
    after: list[Tensor] = []
    config = LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=kind)
    assert len(warnings_of(lambda: after.append(get_peft_model(model, config)(x)))) == KINDS[kind]
    assert torch.allclose(after[0], before, atol=1e-5) == (KINDS[kind] == 0)


# LoRA on attention ----------------------------------------------------------------------------------------------------


def test_lora_on_attention_wraps_trains_and_merges_to_the_mask():
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True))
    mts.sparsify(model, "magnitude", pattern="2:4", include=["0.self_attn.*"])
    masks, x = masks_of(model), torch.randn(2, 3, 32)
    before = model(x)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["self_attn"]))
    torch.testing.assert_close(lora(x), before)
    optimizer = torch.optim.SGD(lora.parameters(), lr=0.1)
    for _ in range(2):
        take_step(lora(x).square().mean(), optimizer)
    merged = lora.merge_and_unload()
    assert len(warnings_of(lambda: merged(x))) == 2
    assert_same_masks(merged, masks)
    assert not lost_zeros(merged)
    mts.verify(merged, "2:4")


# sparse gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["set_mask", "Static", "SET", "GMP"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_of_embeddings_are_cut(kind: type, door: str):
    torch.manual_seed(0)
    model = nn.Sequential(kind(20, 8, sparse=True))
    if door == "set_mask":
        mts.set_mask(model, "0.weight", torch.rand(20, 8) > 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        level = training.Cubic(0.5, 0.8, 0, 9) if door == "GMP" else 0.5
        optimizer = applied(getattr(training, door)(level, include=["0.weight"]), model)
    mask = model[0].weight_mask.clone()
    dense = copy.deepcopy(model[0].weight.detach())
    model(torch.tensor([[1, 2, 2], [3, 4, 1]])).sum().backward()
    gradient = model[0].weight.grad
    assert gradient.is_sparse
    assert is_plus_zero(gradient.to_dense()[~mask])
    assert gradient.to_dense()[1:5][mask[1:5]].all()
    optimizer.step()
    mask &= model[0].weight_mask
    assert torch.allclose(model[0].weight[mask], (dense - 0.1 * gradient.to_dense())[mask])
