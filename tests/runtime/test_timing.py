"""The rule that decides between the packed and the dense form, and the timings that it goes by."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.runtime import convert
from modelopt_sparse.runtime import kernels as backends
from modelopt_sparse.runtime import timing as tune
from modelopt_sparse.runtime.convert import Settings
from modelopt_sparse.runtime.kernels import SemiStructuredLinear, algorithm_for
from modelopt_sparse.runtime.timing import Timing, eager_seconds
from tests.helpers import refused
from tests.runtime.stopwatch import FAST, OTHER, TABLE, Stopwatch
from tests.runtime.unpacking import Unpacking, chain, packed_by, place_for, pruned, reasons

SPEEDUPS = [((1.0501, 1.0501), ""), ((1.6, 1.049), "64"), ((0.5, 1.9), "1"), ((0.5, 0.9), "1, 64")]


@pytest.mark.parametrize(("speedups", "lost"), SPEEDUPS)
def test_the_rule(backend, blas, speedups, lost):
    """2:4 must win at every count; a layer where it does not stays as it is, and that is no error."""
    dense = {(tokens, library): 1e-6 for tokens in (1, 64) for library in ("cublas", "cublaslt")}
    sparse = {(tokens, backends.DEFAULT): 1e-6 / speedup for tokens, speedup in zip((1, 64), speedups)}
    layer = pruned(32, 64)
    weight, model = layer.weight, chain(layer)
    packed_by(backend, model, Stopwatch(sparse, dense), tune=(64, 1), strict=True)
    assert reasons(model) == ({"0": f"2:4 is not 1.05 times as fast at {lost} tokens"} if lost else {})
    report = mts.semi_structured_report(model)
    assert [timed.speedup for timed in report.layers[0].timings] == pytest.approx(speedups)
    assert (report.bytes == report.dense_bytes) == bool(lost)
    if lost:
        assert layer.weight is weight
        packed_by(backend, model, Stopwatch(sparse, dense), tune=(64, 1), min_speedup=0.4)
        assert type(layer) is SemiStructuredLinear


def test_other_counts_go_with_the_named_one_below_them():
    choices = (8, *backends.DEFAULT, 64, *FAST, 2048, *OTHER)
    for algorithm, counts in ((backends.DEFAULT, (1, 7, 8, 63)), (FAST, (64, 2047)), (OTHER, (2048, 10**6))):
        assert {algorithm_for(count, choices) for count in counts} == {algorithm}


def test_both_sides_are_searched_and_the_best_of_each_decides(backend, blas, monkeypatch):
    monkeypatch.setattr(Unpacking, "search", lambda *_: [backends.DEFAULT, FAST])
    stopwatch = Stopwatch(**TABLE)
    model, before = chain(pruned(32, 64)), torch.get_rng_state()
    packed_by(backend, model, stopwatch, tune=(64, 1))
    assert torch.equal(torch.get_rng_state(), before)
    sides = [("dense", "cublas"), ("dense", "cublaslt"), ("sparse", backends.DEFAULT), ("sparse", FAST)]
    assert stopwatch.asked == [(side, tokens, how) for tokens in (1, 64) for side, how in sides]
    assert blas == ["heuristic", *["cublas", "heuristic", "cublaslt", "heuristic"] * 2]
    (layer,) = mts.semi_structured_report(model).layers
    timings = Timing(1, 10e-6, "cublas", 8e-6, FAST), Timing(64, 8e-6, "cublaslt", 5e-6, backends.DEFAULT)
    assert layer.timings == timings
    assert model[0].choices == (1, *FAST, 64, *backends.DEFAULT)
    backend.calls.clear()
    for tokens in (3, 70):
        model[0](torch.zeros(tokens, 64, dtype=torch.bfloat16))
    assert backend.calls == [((8, 64), FAST), ((72, 64), backends.DEFAULT)]


def test_the_library_for_dense_products_is_restored_after_an_error(backend, blas):
    def failing(calls):
        raise KeyboardInterrupt

    model = chain(pruned(32, 64))
    refused(packed_by, backend, model, failing, tune=1, error=KeyboardInterrupt)
    assert (blas[-1], type(model[0])) == ("heuristic", nn.Linear)


def test_layers_of_one_shape_are_timed_once(backend, blas, monkeypatch):
    stopwatch = Stopwatch(**TABLE)
    model = chain(pruned(32, 64), pruned(32, 64, seed=1), pruned(32, 64, bias=False))
    packed_by(backend, model, stopwatch, tune=(1, 64))
    assert len(stopwatch.asked) == 2 * 2 * 3  # a bias is another shape
    first, second, _ = mts.semi_structured_report(model).layers
    assert first.timings == second.timings


def test_each_side_goes_through_twice_the_cache(backend, blas):
    """4,096 bytes dense and 2,304 packed: 20,000 bytes of cache take 10 and 18 copies."""
    stopwatch = Stopwatch(**TABLE)
    place = replace(place_for(backend, stopwatch), cache_bytes=20_000)
    convert.convert(chain(pruned(32, 64)), Settings.of({"tune": 1}), lambda device: place)
    assert stopwatch.sets == [10, 10, 18]


def test_wall_time_is_that_of_one_call(monkeypatch):
    """The mean over calls that take 0.1 and 0.2 s, also where a busy machine adds to each."""
    monkeypatch.setattr(tune, "TIMED_SECONDS", 0.02)
    assert 0.149 < eager_seconds([partial(time.sleep, seconds) for seconds in (0.1, 0.2)]) < 0.29
