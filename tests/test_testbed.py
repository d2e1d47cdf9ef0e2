"""Published figures on a trained model: examples/testbed/README.md, run k = 0 (ALPS: its ADMM with exact refit)."""

import pytest

import modelopt_sparse as mts
from tests.helpers import trained_model, trained_windows

PUBLISHED = {"magnitude": 20.97, "wanda": 16.57, "sparsegpt": 12.99, "alps": 11.46}
DENSE = 7.830


@pytest.fixture(scope="module")
def perplexities():
    calibration = list(trained_windows("calibration.txt")[:128].split(8))
    heldout = trained_windows("heldout.txt").flatten()
    found = {"dense": mts.evaluate(trained_model(), heldout, seq_len=512, progress=False).perplexity}
    for method in PUBLISHED:
        model = trained_model()
        data = {} if method == "magnitude" else {"data_loader": calibration}
        mts.sparsify(model, method, pattern="2:4", progress=False, **data)
        assert len(mts.verify(model, "2:4").layers) == 42
        found[method] = mts.evaluate(model, heldout, seq_len=512, progress=False).perplexity
    return found


@pytest.mark.slow
@pytest.mark.core
def test_perplexities_agree_with_the_published_ones(perplexities):
    assert perplexities["dense"] == pytest.approx(DENSE, rel=0.002)
    assert perplexities["magnitude"] == pytest.approx(PUBLISHED["magnitude"], rel=0.02)
    assert perplexities["wanda"] == pytest.approx(PUBLISHED["wanda"], rel=0.02)
    assert perplexities["sparsegpt"] <= PUBLISHED["sparsegpt"] * 1.02
    assert perplexities["sparsegpt"] < min(perplexities["magnitude"], perplexities["wanda"])
    assert perplexities["alps"] <= PUBLISHED["alps"]
