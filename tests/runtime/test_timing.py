"""The rule that decides between the packed and the dense form, and the timings that it goes by."""

import copy
import json
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
from modelopt_sparse.runtime.kernels import Choice, SemiStructuredLinear, choice_for
from modelopt_sparse.runtime.timing import Timing, TimingCache, decide, eager_seconds
from tests.runtime.stopwatch import FAST, OTHER, TABLE, Stopwatch, timed_place, timing
from tests.runtime.unpacking import Unpacking, chain, pruned, reasons


@pytest.mark.parametrize(
    ("speedups", "keep_both", "chosen"),
    [
        ([1.05, 1.05], False, [True, True]),
        ([1.6, 1.049], False, None),
        ([0.5, 1.9], False, None),
        ([0.5, 0.9], False, None),
        ([0.5, 1.9], True, [False, True]),
        ([1.9, 0.5], True, [True, False]),
        ([0.5, 0.9], True, None),
        ([1.6, 1.7], True, [True, True]),
    ],
)
def test_the_rule(speedups, keep_both, chosen):
    """2:4 must win at every count; where both forms may be kept, at one of them."""
    timings = [timing(64, speedups[1], OTHER), timing(1, speedups[0], FAST)]
    decided = decide(timings, 1.05, keep_both)
    if chosen is None:
        assert decided is None
    else:
        assert decided == (Choice(1, chosen[0], FAST), Choice(64, chosen[1], OTHER))


def test_other_counts_go_with_the_named_one_below_them():
    choices = (Choice(8, False), Choice(64, True, FAST), Choice(2048, True, OTHER))
    found = {count: choice_for(count, choices).tokens for count in (1, 7, 8, 63, 64, 2047, 2048, 10**6)}
    assert found == {1: 8, 7: 8, 8: 8, 63: 8, 64: 64, 2047: 64, 2048: 2048, 10**6: 2048}


def searching(backend: Unpacking, monkeypatch, found=(backends.DEFAULT, FAST)):
    monkeypatch.setattr(Unpacking, "search", lambda self, packed, metadata, x, bias: list(found))


def test_both_sides_are_searched_and_the_best_of_each_decides(backend, blas, monkeypatch):
    searching(backend, monkeypatch)
    stopwatch = Stopwatch(**TABLE)
    model = chain(pruned(32, 64))
    convert.convert(model, Settings.of({"tune": (64, 1)}), lambda device: timed_place(backend, stopwatch))
    sides = [("dense", "cublas"), ("dense", "cublaslt"), ("sparse", backends.DEFAULT), ("sparse", FAST)]
    assert stopwatch.asked == [(side, tokens, how) for tokens in (1, 64) for side, how in sides]
    assert blas == ["heuristic", *["cublas", "heuristic", "cublaslt", "heuristic"] * 2]
    (layer,) = mts.semi_structured_report(model).layers
    assert layer.timings == (
        Timing(1, 10e-6, "cublas", 8e-6, FAST),
        Timing(64, 8e-6, "cublaslt", 5e-6, backends.DEFAULT),
    )
    assert model[0].choices == (Choice(1, True, FAST), Choice(64, True, backends.DEFAULT))
    backend.calls.clear()
    for tokens in (3, 70):
        model[0](torch.zeros(tokens, 64, dtype=torch.bfloat16))
    assert backend.calls == [((8, 64), FAST), ((72, 64), backends.DEFAULT)]


def test_the_library_for_dense_products_is_restored_after_an_error(backend, blas):
    def failing(calls):
        raise KeyboardInterrupt

    model = chain(pruned(32, 64))
    with pytest.raises(KeyboardInterrupt):
        convert.convert(model, Settings.of({"tune": 1}), lambda device: timed_place(backend, failing))
    assert blas[-1] == "heuristic"
    assert type(model[0]) is nn.Linear


def test_layers_where_dense_wins_stay_dense_and_say_where(backend, blas, monkeypatch):
    searching(backend, monkeypatch)
    slow = {**TABLE["sparse"], (1, FAST): 9.9e-6, (1, backends.DEFAULT): 11e-6}
    model = chain(pruned(32, 64))
    weight = model[0].weight
    place = timed_place(backend, Stopwatch(slow, TABLE["dense"]))
    convert.convert(model, Settings.of({"tune": (1, 64), "strict": True}), lambda device: place)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is weight
    report = mts.semi_structured_report(model)
    assert reasons(model) == {"0": "2:4 is not 1.05 times as fast at 1 tokens"}
    assert [round(found.speedup, 3) for found in report.layers[0].timings] == [1.01, 1.6]
    assert report.bytes == report.dense_bytes == 4096
    convert.convert(model, Settings.of({"tune": (1, 64), "min_speedup": 1.0}), lambda device: place)
    assert type(model[0]) is SemiStructuredLinear


def test_both_forms_are_kept_where_each_wins(backend, blas, monkeypatch):
    slow = {**TABLE["sparse"], (1, backends.DEFAULT): 20e-6}
    model = chain(pruned(32, 64))
    weight, before = model[0].weight, copy.deepcopy(model)
    place = timed_place(backend, Stopwatch(slow, TABLE["dense"]))
    convert.convert(model, Settings.of({"tune": (1, 64), "keep_both": True}), lambda device: place)
    (layer,) = mts.semi_structured_report(model).layers
    assert layer.runs == "2:4 and dense"
    assert layer.bytes == 4096 + 2304
    assert model[0].weight is weight
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for run in (model, compiled):
        for tokens, calls in ((3, 0), (63, 0), (64, 1), (100, 1)):
            x = torch.randn(tokens, 64, dtype=torch.bfloat16)
            backend.calls.clear()
            with torch.no_grad():
                torch.testing.assert_close(run(x), before(x), rtol=0.02, atol=0.02)
            assert len(backend.calls) == calls, tokens
    copied = copy.deepcopy(model)
    assert copied[0].weight.data_ptr() != weight.data_ptr()
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    mts.to_dense(model)
    assert model[0].weight is weight


def test_layers_of_one_shape_are_timed_once(backend, blas, monkeypatch):
    stopwatch = Stopwatch(**TABLE)
    model = chain(pruned(32, 64), pruned(32, 64, seed=1), pruned(32, 64, bias=False))
    convert.convert(model, Settings.of({"tune": (1, 64)}), lambda device: timed_place(backend, stopwatch))
    assert len(stopwatch.asked) == 2 * 2 * 3  # a bias is another shape
    first, second, _ = mts.semi_structured_report(model).layers
    assert first.timings == second.timings


def test_timings_are_kept_in_the_file_that_is_named(backend, blas, tmp_path):
    file = tmp_path / "times.json"
    made = []
    for counts, asked in (((1, 64), 6), ((64,), 0), ((1,), 0)):
        stopwatch = Stopwatch(**TABLE)
        model = chain(pruned(32, 64))
        settings = Settings.of({"tune": counts, "cache": file})
        convert.convert(model, settings, lambda device, used=stopwatch: timed_place(backend, used))
        assert len(stopwatch.asked) == asked
        made.append(mts.semi_structured_report(model).layers[0].timings)
    assert made == [made[0], made[0][1:], made[0][:1]]
    (key,) = json.loads(file.read_text())["timings"]
    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    assert key == f"a CPU; {version}; unpacking; eager; bfloat16; 32 x 64 + bias"
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]
    stopwatch = Stopwatch(**TABLE)
    other = replace(timed_place(backend, stopwatch), title="another CPU")
    convert.convert(chain(pruned(32, 64)), Settings.of({"tune": 1, "cache": file}), lambda device: other)
    assert len(stopwatch.asked) == 3
    assert len(json.loads(file.read_text())["timings"]) == 2


NO_TIMINGS = ["", "[]", "{}", '{"format": "other", "format_version": 1, "timings": {}}']


for version in (tune.CACHE_VERSION, tune.CACHE_VERSION + 1):
    NO_TIMINGS.append(json.dumps({"format": tune.CACHE_FORMAT, "format_version": version, "timings": {"k": [{}]}}))


@pytest.mark.parametrize("text", NO_TIMINGS)
def test_a_file_that_holds_no_timings_is_refused(tmp_path, text):
    (tmp_path / "times.json").write_text(text)
    with pytest.raises(ValueError, match=r"times.json' holds no timings .*give another path"):
        TimingCache(tmp_path / "times.json")
    assert (tmp_path / "times.json").read_text() == text


def test_each_side_goes_through_twice_the_cache(backend, blas):
    """4,096 bytes dense and 2,304 packed: 20,000 bytes of cache take 10 and 18 copies."""
    stopwatch = Stopwatch(**TABLE)
    place = replace(timed_place(backend, stopwatch), cache_bytes=20_000)
    convert.convert(chain(pruned(32, 64)), Settings.of({"tune": 1}), lambda device: place)
    assert stopwatch.sets == [10, 10, 18]


def test_timing_changes_no_random_state(backend, blas):
    model = chain(pruned(32, 128))
    before = torch.get_rng_state()
    place = timed_place(backend, Stopwatch(**TABLE))
    convert.convert(model, Settings.of({"tune": (1, 64)}), lambda device: place)
    assert type(model[0]) is SemiStructuredLinear
    assert torch.equal(torch.get_rng_state(), before)


def test_wall_time_is_that_of_one_call(monkeypatch):
    """The mean over calls that take 2 and 4 ms."""
    monkeypatch.setattr(tune, "TIMED_SECONDS", 0.02)
    calls = [partial(time.sleep, seconds) for seconds in (0.002, 0.004)]
    assert eager_seconds(calls) == pytest.approx(0.003, rel=0.5)
