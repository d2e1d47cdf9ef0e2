"""Levels that are told while a model trains, and the list of what is sparse, against counts by hand."""

import logging

import pytest
import torch
from torch import nn

from modelopt_sparse import training
from tests.training.cases import applied, take_step


def two_layers():
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))


class Writer(dict):
    """As SummaryWriter of TensorBoard."""

    def add_scalar(self, tag, value, step):
        self[tag, step] = value


def trained(sparsity, steps=5, look=lambda model, step: None):
    model = two_layers()
    optimizer = applied(sparsity, model)
    for step in range(1, steps + 1):
        take_step(model(torch.randn(4, 8)).square().sum(), optimizer)
        look(model, step)


CASES = {
    "static": (lambda: training.Static(0.25, include="0.weight"), {"0.weight": lambda step: 0.25}),
    "rising, moved at every second step": (
        lambda: training.GMP(training.Linear(0.1, 0.1), update=2, include="0.weight"),
        {"0.weight": lambda step: 0.1 + 0.1 * step},
    ),
    "a group": (
        lambda: training.Group({"0.weight": training.SET(0.5), "2.weight": training.Static(0.75)}),
        {"0.weight": lambda step: 0.5, "2.weight": lambda step: 0.75},
    ),
}


@pytest.mark.parametrize(("build", "levels"), CASES.values(), ids=list(CASES))
def test_levels_are_told_after_every_step(build, levels):
    sparsity, writer, by_function, hooked, counted = build(), Writer(), Writer(), [], {}

    def count(model, step):
        for name in levels:
            mask = model.get_buffer(f"{name}_mask").flatten().tolist()
            counted[f"sparsity/{name}/actual", step] = mask.count(False) / len(mask)
            counted[f"sparsity/{name}/target", step] = levels[name](step)

    sparsity.add_summaries(writer)
    sparsity.add_summaries(by_function.add_scalar)
    sparsity.register_target_sparsity_hook(lambda *seen: hooked.append(("target", *seen)))
    sparsity.register_computed_sparsity_hook(lambda *seen: hooked.append(("actual", *seen)))
    trained(sparsity, look=count)
    assert writer == pytest.approx(counted)
    assert by_function == writer

    algorithms = {name: weight.algorithm for name, weight in sparsity.sparse_params.items()}
    order = [(step, name, kind) for step in range(1, 6) for name in levels for kind in ("target", "actual")]
    assert [each[:3] for each in hooked] == [(kind, algorithms[name], name) for _, name, kind in order]
    values = [counted[f"sparsity/{name}/{kind}", step] for step, name, kind in order]
    assert [each[-1] for each in hooked] == pytest.approx(values)


def test_a_removed_hook_hears_no_more_and_a_writer_that_is_none_is_refused():
    told, sparsity = [], training.Static(0.25, include="0.weight")
    handle = sparsity.register_target_sparsity_hook(lambda *seen: told.append(seen))
    trained(sparsity, steps=4, look=lambda model, step: handle.remove() if step == 2 else None)
    assert told == [(sparsity, "0.weight", 0.25)] * 2
    with pytest.raises(TypeError, match="add_summaries takes a SummaryWriter or a function"):
        training.Static(0.5).add_summaries("runs")


def test_add_summaries_of_a_file_goes_to_logging(caplog):
    told = {"param_filter": "0.weight", "sparsity": 0.25, "add_summaries": True}
    quiet = {"param_filter": "2.weight", "sparsity": 0.5, "add_summaries": False}
    with caplog.at_level(logging.INFO, "modelopt_sparse.training"):
        trained(training.configure([told, quiet]), steps=2)
    lines = [f"step {step}: sparsity/0.weight/{kind} 0.25" for step in (1, 2) for kind in ("target", "actual")]
    assert caplog.messages == lines


def test_the_list_of_what_is_sparse_is_logged_as_debug(caplog):
    with caplog.at_level(logging.DEBUG, "modelopt_sparse.training"):
        training.configure({"sparsity": 0.25, "param_name_patterns": "0"}).apply(two_layers())
    assert caplog.messages == [
        "sparse: 0.weight, static, 20 of 80 zeros",
        "sparse: 0.bias, static, 2 of 10 zeros",
        *(f"dense: 2.{name} (no glob matches its name)" for name in ("weight", "bias")),
    ]


def test_between_updates_a_list_of_levels_stays_at_the_last_one():
    model = nn.Linear(10, 10, bias=False)
    sparsity, seen = training.GMP([0.0, 0.9], update=2), []
    optimizer = applied(sparsity, model)
    sparsity.add_summaries(lambda tag, value, step: seen.append(value))
    for _ in range(6):
        take_step(model(torch.randn(3, 10)).sum(), optimizer)
    assert seen[::2] == seen[1::2] == [0.0, 0.9, 0.9, 0.0, 0.0, 0.9]  # targets, actual levels
