"""The examples of the guides that this project started from (000, 001: Python; 002: YAML), with their imports changed,
`cstorch.compile` left out, `optimizer.apply(sparsity)` as `sparsity.apply(optimizer)`, a missing comma, a typo and lost
lines mended."""

import pytest
import torch
from torch import nn

from modelopt_sparse import training as sparse
from modelopt_sparse.model.masking import named_masks
from tests.helpers import assert_same_masks
from tests.training.cases import applied, masks_of, take_step

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:.* takes every parameter:UserWarning")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(25, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


def zeros(model):
    return {name: int((~mask).sum()) / mask.numel() for name, mask in named_masks(model)}


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(8, 25, generator=torch.Generator().manual_seed(step))
        take_step((model(x) - x[:, :10]).square().mean(), optimizer)


# guides 000 and 001 -------------------------------------------------------------------------------------------------


def test_how_to_sparsify_your_model_and_its_optimizer():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Initialize a sparsity algorithm with 30% sparsity
    sparsity = sparse.Static(sparsity=0.3)
    # Apply the sparsity algorithm to the model
    model.apply(sparsity)
    assert zeros(model) == {"fc1.weight": 0.3, "fc1.bias": 0.3, "fc2.weight": 0.3, "fc2.bias": 0.3}
    sparsity.apply(optimizer)
    train(model, optimizer, 3)
    p, name = model.fc1.weight, "momentum_buffer"
    assert not optimizer.state[p][name][~model.fc1.weight_mask].any()

    optimizer.state[p][name].requires_dense = True
    optimizer.state[p][name].fill_(1.0)
    train(model, optimizer, 1)
    assert optimizer.state[p][name].all()
    assert not p[~model.fc1.weight_mask].any()

    sparsity.autoupdate = False


def test_composing_sparsity_algorithms():
    model = Model()
    sparsity = sparse.Group(
        {
            "fc1.*": sparse.Static(sparsity=0.3),
            "fc2.*": sparse.SET(sparsity=0.9, update={"freq": 30}, drop_fraction=0.3),
        }
    )
    model.apply(sparsity)

    assert zeros(model) == {"fc1.weight": 0.3, "fc1.bias": 0.3, "fc2.weight": 0.9, "fc2.bias": 0.9}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sparsity.apply(optimizer)
    before = masks_of(model)
    train(model, optimizer, 29)
    assert_same_masks(model, before)
    train(model, optimizer, 1)
    assert not torch.equal(model.fc2.weight_mask, before["fc2.weight"])
    assert torch.equal(model.fc1.weight_mask, before["fc1.weight"])


class CustomSparsity(sparse.SparsityAlgorithm):
    def __init__(self, shift, **kwargs):
        super().__init__(**kwargs)
        self.shift = shift

    def update(self):
        for sparse_param in self.sparse_params.values():
            p, mask = sparse_param.data, sparse_param.mask
            assert p.shape == mask.shape
            sparse_param.mask = mask.roll(self.shift)


class CustomDynamicSparsity(sparse.DynamicSparsityAlgorithm):
    def __init__(self, smallest=True, **kwargs):
        super().__init__(**kwargs)
        self.smallest = smallest

    def update_mask(self, p, mask, sparsity) -> torch.Tensor:
        score = -p.abs() if self.smallest else p.abs()
        return score >= score.flatten().kthvalue(round(sparsity * p.numel()) + 1).values


def test_writing_custom_sparsity_algorithms():
    model = Model()
    optimizer = applied(CustomSparsity(shift=2, sparsity=0.3), model)
    before = model.fc1.weight_mask.clone()
    train(model, optimizer, 2)
    assert torch.equal(model.fc1.weight_mask, before.roll(4))
    assert not model.fc1.weight[~model.fc1.weight_mask].any()

    model = Model()
    sparsity = CustomDynamicSparsity(smallest=False, sparsity=0.5, update={"freq": 2}, include="*.weight")
    optimizer = applied(sparsity, model)
    before = model.fc1.weight_mask.clone()
    train(model, optimizer, 2)
    assert torch.equal(model.fc1.weight_mask, before), "the live half is the larger half"


def test_a_custom_class_by_its_name():
    sparsity = sparse.configure({"algorithm": "customsparsity", "shift": 3, "sparsity": 0.5, "param_filter": "fc1.*"})
    assert isinstance(sparsity, CustomSparsity)
    assert sparsity.shift == 3
    model = Model()
    model.apply(sparsity)
    assert set(zeros(model)) == {"fc1.weight", "fc1.bias"}


# guide 002 ----------------------------------------------------------------------------------------------------------


def block():
    ffn = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 10))
    layers = {name: nn.Linear(10, 10) for name in ("dense_layer", "linear_layer", "lm_head")}
    return nn.ModuleDict({"embedding": nn.Embedding(10, 10), "norm": nn.LayerNorm(10), "ffn": ffn, **layers})


YAML = {
    "the default": (
        'sparsity:\n  sparsity: 0.3\n  init_method: "random"\n  seed: 1234\n',
        {"ffn.0.weight": 0.3, "ffn.1.weight": 0.3, "dense_layer.weight": 0.3, "linear_layer.weight": 0.3},
    ),
    "a pattern": (
        'sparsity:\n  sparsity: 0.3\n  init_method: "topk"\n  param_name_patterns: "ffn.*weight"\n  seed: 1234\n',
        {"ffn.0.weight": 0.3, "ffn.1.weight": 0.3},
    ),
    "a list": (
        'sparsity:\n  sparsity: 0.9\n  init_method: "topk"\n  param_name_patterns:\n  - "dense_layer.weight"\n'
        '  - "linear_layer.weight"\n  seed: 1234\n',
        {"dense_layer.weight": 0.9, "linear_layer.weight": 0.9},
    ),
    "a mapping": (
        'model:\n  hidden_size: 10\nsparsity:\n  init_method: "topk"\n  seed: 1234\n  param_name_patterns:\n'
        '    "ffn.*weight":\n      sparsity: 0.3\n    "layer.*bias":\n      sparsity: 0.4\noptimizer:\n  lr: 1e-3\n',
        {"ffn.0.weight": 0.3, "ffn.1.weight": 0.3, "dense_layer.bias": 0.4, "linear_layer.bias": 0.4},
    ),
}


@pytest.mark.parametrize(("text", "expected"), YAML.values(), ids=list(YAML))
def test_config_examples(text, expected, tmp_path):
    (tmp_path / "params.yaml").write_text(text)
    models = [block(), block()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        sparsity = sparse.configure(tmp_path / "params.yaml")
        assert {row.name: row.zeros / row.size for row in sparsity.plan(model).rows} == expected
        assert not zeros(model), "the plan touches nothing"
        sparsity.apply(model)
        assert zeros(model) == expected
    for one, two in zip(models[0].state_dict().values(), models[1].state_dict().values()):
        assert torch.equal(one, two)


def test_changing_the_level_after_a_checkpoint():
    """ "iterative magnitude pruning, change the sparsity ... and rerun"; lower: "regrown (and initialized to 0.0)"."""
    model = block()
    sparse.configure({"sparsity": 0.6, "init_method": "topk"}).apply(model)
    checkpoint = sparse.to_sentinel(model.state_dict())
    before = model.linear_layer.weight_mask.clone()
    for level, subset in ((0.8, True), (0.4, False)):
        again = block()
        again.load_state_dict(sparse.from_sentinel(checkpoint), strict=False)
        again.linear_layer.weight.data.copy_(checkpoint["linear_layer.weight"])
        sparse.configure({"sparsity": level, "init_method": "topk"}).apply(again)
        mask = again.linear_layer.weight_mask
        assert int((~mask).sum()) == round(level * 100)
        assert not ((mask & ~before) if subset else (before & ~mask)).any()
        assert not again.linear_layer.weight[~before].any()
