"""Sums of X^T X: the strips against the plain product, which rows go where, and what CUDA makes of half precision."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import modelopt_sparse as mts
from modelopt_sparse.calibration import stats as grams
from modelopt_sparse.calibration.stats import add_product, completed, on_tensor_cores
from tests.helpers import tiny_llama, token_batches


def whole_numbers(*shape: int) -> Tensor:
    """Rows whose products and sums no float32 rounds, so that results are equal to the bit or wrong."""
    return torch.randint(-9, 10, shape).float()


LARGE, STRIP = grams.STRIPS["cpu"][0]
SMALL, NARROW = grams.STRIPS["cpu"][-1]


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize(
    ("columns", "strip"), [(0, None), (SMALL - 1, None), (SMALL + 40, NARROW), (LARGE - 1, NARROW), (LARGE + 40, STRIP)]
)
def test_of_a_large_matrix_the_upper_half_is_computed(columns, strip, lead):
    """On both sides of the numbers of columns from which strips pay; with a shared input added in between."""
    batches = [whole_numbers(*lead, 3, columns), whole_numbers(3, columns), whole_numbers(*lead, 2, columns)]
    total = None
    for rows in batches:
        total = add_product(total, rows)
    parts = slice(NARROW, STRIP), slice(STRIP, None)
    rows_there = [total[..., part, :NARROW].equal(total[..., :NARROW, part].mT) for part in parts]
    assert rows_there == {None: [True, True], NARROW: [False, False], STRIP: [True, False]}[strip]
    first, shared, last = batches
    assert torch.equal(completed(total), first.mT @ first + shared.mT @ shared + last.mT @ last)


def test_sums_for_one_input_and_for_several_become_several():
    shared, own = whole_numbers(9, 4), whole_numbers(3, 5, 4)
    expected = shared.T @ shared + own.mT @ own
    assert torch.equal(add_product(add_product(None, shared), own), expected)
    assert torch.equal(add_product(add_product(None, own), shared), expected)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_only_half_precision_on_cuda_goes_to_tensor_cores(device, dtype):
    assert on_tensor_cores(torch.device(device), dtype) == (device == "cuda" and dtype.itemsize == 2)


def test_float16_stays_out_of_float16_sums(monkeypatch):
    """Squares of 300 exceed what float16 can hold."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=True))
    assert not on_tensor_cores(torch.device("cuda"), torch.float16)
    assert on_tensor_cores(torch.device("cuda"), torch.bfloat16)


# on CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lead", "columns"), [((), 96), ((3,), 96), ((), 77), ((), grams.STRIPS["cuda"][0][0] + 200)])
def test_half_precision_on_cuda_is_summed_in_float32(dtype, lead, columns):
    """Against float64. Sums or a result in half precision would be a hundred times further off."""
    first, second = (torch.randn(*lead, tokens, columns, device="cuda").to(dtype) for tokens in (3000, 700))
    total = completed(add_product(add_product(None, first), second))
    assert total.dtype == torch.float32
    exact = first.double().mT @ first.double() + second.double().mT @ second.double()
    assert (total - exact).abs().max() < 2e-5 * exact.abs().max()
    ((large, strip),) = grams.STRIPS["cuda"]
    if columns >= large:
        assert torch.equal(total[strip:, :strip], total[:strip, strip:].mT)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_adding_a_batch_does_not_wait_for_the_device():
    rows = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    total = add_product(None, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_product(total, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["2:4", "4:8", "50%"])
def test_a_model_on_cuda_is_as_good_as_on_the_cpu(pattern, dtype):
    """Statistics, factorization and kernel together: the same recipe, the pattern, and errors as large as there."""
    found = {}
    for device in ("cpu", "cuda"):
        model = tiny_llama().to(device=torch.device(device), dtype=dtype)
        mts.sparsify(model, "sparsegpt", pattern=pattern, data_loader=token_batches(), progress=False)
        mts.verify(model, pattern)
        found[device] = [layer.error for layer in mts.report(model).layers]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=0.2)
