"""Which library multiplies float32 matrices on the CPU: the faster one, for as long as it takes, and nobody notices."""

from types import SimpleNamespace

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.solving import cpu_matmul as products
from tests.helpers import tiny_llama, token_batches

SETTING = torch.backends.mkldnn.matmul


@pytest.fixture
def faster(monkeypatch):
    """oneDNN is found to be much faster, and every model worth the question."""
    monkeypatch.setattr(products, "onednn_is_much_faster", lambda threads: True)
    monkeypatch.setattr(products, "WORTH_ASKING", 1)


def watched(model: torch.nn.Module) -> set[str]:
    """Settings under which the model's first block is run from now on."""
    seen: set[str] = set()
    model.model.layers[0].register_forward_pre_hook(lambda block, args: seen.add(SETTING.fp32_precision))
    return seen


def sparse(model: torch.nn.Module, **options) -> torch.nn.Module:
    return mts.sparsify(model, "sparsegpt", data_loader=token_batches(), progress=False, **options)


@pytest.mark.parametrize(
    ("blas", "onednn", "error", "better"),
    [(3.0, 2.0, 1e-7, True), (2.9, 2.0, 1e-7, False), (9.0, 1.0, 2e-6, False), (1.0, 2.0, 1e-7, False)],
)
def test_much_faster_and_as_exact(blas, onednn, error, better):
    assert products.is_better(blas, onednn, error) == better


@pytest.mark.parametrize("cost", [{"none": 2.0, "tf32": 1.0}, {"none": 1.0, "tf32": 2.0}])
def test_both_are_timed_under_their_setting(cost, monkeypatch):
    clock = 0.0

    def tick() -> float:
        nonlocal clock
        clock += cost[SETTING.fp32_precision]
        return clock

    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=tick))
    assert products.onednn_is_much_faster.__wrapped__(1) == (cost["none"] > cost["tf32"])
    assert SETTING.fp32_precision == "none"


def test_the_setting_holds_while_the_model_is_made_sparse(faster):
    model = tiny_llama()
    seen = watched(model)
    sparse(model)
    assert (seen, SETTING.fp32_precision) == ({"tf32"}, "none")
    assert mts.report(model).settings["float32_products"] == "oneDNN"
    expected = sparse(tiny_llama(), deterministic=True)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_an_error_leaves_the_setting_as_it_was(faster):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, args: (args[0] * float("inf"),))
    with pytest.raises(ValueError, match="NaN or inf"):
        sparse(model)
    assert SETTING.fp32_precision == "none"


@pytest.mark.parametrize("owner", [torch.backends, torch.backends.mkldnn, SETTING])
def test_a_user_s_own_precision_is_left_alone(owner, faster):
    model = tiny_llama()
    seen = watched(model)
    owner.fp32_precision = "ieee"
    try:
        sparse(model)
        assert seen == {SETTING.fp32_precision} == {"ieee"}
        assert "float32_products" not in mts.report(model).settings
    finally:
        owner.fp32_precision = "none"


@pytest.mark.parametrize("how", ["small", "deterministic", "bfloat16", "uncalibrated"])
def test_nothing_is_timed_where_it_does_not_matter(how, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_much_faster", lambda threads: pytest.fail("timed"))
    monkeypatch.setattr(products, "WORTH_ASKING", 2**20 if how == "small" else 1)
    model = tiny_llama().to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    if how == "uncalibrated":
        mts.sparsify(model, "magnitude", progress=False)
    else:
        sparse(model, deterministic=how == "deterministic")
