"""The KL divergence of logits, against torch's own on whole tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelopt_sparse.model import output
from modelopt_sparse.model.output import kl_divergence

ROWS, COLUMNS = 7, 11


@pytest.fixture(autouse=True)
def _pieces_of_three_rows(monkeypatch):
    """So that the rows are two whole pieces, and a part of one."""
    monkeypatch.setattr(output, "CPU_PIECE", 3 * COLUMNS + 1)


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    p, q = 3 * torch.randn(2, ROWS, COLUMNS, dtype=torch.float64)
    return p.to(dtype), q.to(dtype).requires_grad_()


def plain(p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
    log_p, log_q = ((x.double() / temperature).log_softmax(-1) for x in (p, q))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradient_are_torchs(dtype, temperature):
    p, q = logits(dtype)
    weights = torch.arange(1.0, ROWS + 1)
    found, expected = kl_divergence(p, q, temperature=temperature), plain(p, q, temperature)
    assert (found.dtype, found.shape) == (torch.float64, (ROWS,))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    one, other = (torch.autograd.grad((rows * weights).sum(), q)[0] for rows in (found, expected))
    assert one.dtype == dtype
    torch.testing.assert_close(one, other)


def test_terms_are_summed_up_in_float64(monkeypatch):
    """In float32 the sum of terms of both signs would be off by a part in a million of their size."""
    monkeypatch.setattr(output, "CPU_PIECE", 10**6)
    p = torch.randn(4, 50_000)
    q = p + 1e-3 * torch.randn(4, 50_000)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    terms = (log_p.exp() * (log_p - log_q)).double()
    torch.testing.assert_close(kl_divergence(p, q), terms.sum(-1), rtol=1e-12, atol=0)


def test_p_counts_as_a_constant_and_there_is_no_second_derivative():
    p, q = logits()
    assert kl_divergence(p[:0], q[:0]).shape == (0,)
    p.requires_grad_()
    (slope,) = torch.autograd.grad(kl_divergence(p, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    kl_divergence(p, q).sum().backward()
    assert (p.grad is None, q.grad is None) == (True, False)


def test_autocast_changes_nothing():
    p, q = logits(torch.bfloat16)
    found = kl_divergence(p, q)
    with torch.autocast("cpu", torch.bfloat16):
        within = kl_divergence(p, q)
    assert torch.equal(found, within)
    assert torch.equal(*(torch.autograd.grad(rows.sum(), q)[0] for rows in (found, within)))


def test_impossible_classes_are_no_nan():
    p, q = logits()
    with torch.no_grad():
        p[:, 4] = q[:, 4] = -torch.inf
    found = kl_divergence(p, q)
    left = [c for c in range(COLUMNS) if c != 4]
    torch.testing.assert_close(found, plain(p[:, left], q[:, left]))
    (slope,) = torch.autograd.grad(found.sum(), q)
    assert not slope[:, 4].any()
    assert slope.isfinite().all()


def test_a_row_that_is_not_used_has_no_gradient_whatever_it_holds():
    p, q = logits()
    with torch.no_grad():
        p[2], q[5] = torch.nan, torch.inf
    used = torch.tensor([i not in (2, 5) for i in range(ROWS)])
    (slope,) = torch.autograd.grad(kl_divergence(p, q).where(used, 0).sum(), q)
    assert not slope[~used].any()
    torch.testing.assert_close(slope, *torch.autograd.grad(plain(p[used], q[used]).sum(), q))


def test_only_the_inputs_are_saved():
    p, q = logits(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        kl_divergence(p, q)
    assert sorted(saved) == sorted([p.data_ptr(), q.data_ptr()])


def test_no_more_than_a_piece_is_converted():
    """To the largest tensor of float32 or float64 that an operation makes."""
    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func(*args, **(kwargs or {})))
            return made[-1]

    p, q = logits(torch.bfloat16)
    with Watching():
        kl_divergence(p, q).sum().backward()
    tensors = [x for x in made if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)]
    assert max(x.numel() for x in tensors) == 3 * COLUMNS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # dynamo, of any
def test_it_compiles_as_one_graph():
    p, q = logits()
    compiled = torch.compile(lambda p, q: kl_divergence(p, q).sum(), backend="aot_eager", fullgraph=True)
    found, expected = compiled(p, q), plain(p, q).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, q)[0] for x in (found, expected)))
