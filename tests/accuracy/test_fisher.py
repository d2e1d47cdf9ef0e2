"""The Fisher metric against gradients written out token by token, and what it changes in reconstruction."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.accuracy import distill
from modelopt_sparse.accuracy import fisher as recompute
from modelopt_sparse.accuracy.fisher import PLAIN, metric, with_metrics
from modelopt_sparse.plan.options import Reconstruct
from modelopt_sparse.run import InMemory, calibrating
from tests import helpers
from tests.accuracy.tuned import BATCHES, relative, seen_by, tuned_model
from tests.helpers import Snapshot, assert_same_state, in_steps, refused, state_of, tiny_llama, token_batches
from tests.models.stacked import Block, Stacked, vectors
from tests.models.tiny import TwoOutputs

FISHER = {"epochs": 2, "metric": "fisher"}


sparsified = partial(tuned_model, reconstruct=FISHER)


def data_of(model, batches, **options):
    return helpers.calibrated_run(model, "wanda", data_loader=batches, reconstruct=FISHER, **options)[1]


def metrics_of(model, batches):
    with calibrating(model):
        return with_metrics(data_of(model, batches)).metrics


def test_only_the_first_rows_of_the_users_data_are_looked_at():
    model, batches = tiny_llama().eval(), token_batches(20)
    with calibrating(model):
        data = data_of(model, batches)
        assert len(data.calls) == 40
        whole = with_metrics(data).metrics
        first = with_metrics(data.only(range(32))).metrics
        own = data_of(model, batches, self_data=8)
        assert own.written > 0
        beside = with_metrics(own).metrics
    for block in model.model.layers:
        assert torch.equal(whole[block], first[block])
        assert torch.equal(beside[block], first[block])


def test_a_direction_that_nothing_depends_on_counts_as_the_plain_share():
    fisher = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
    squared = metric(fisher) @ metric(fisher)
    wanted = torch.diag((1 - PLAIN) * torch.tensor([2.25, 0.75, 0.0]) + PLAIN)
    torch.testing.assert_close(squared, wanted)
    torch.testing.assert_close(metric(torch.zeros(3, 3)), torch.eye(3))


def test_errors_are_measured_in_the_metric():
    """Of the first block, before and after, by plain hooks on the finished model and on one without reconstruction."""
    model, dense, plain = sparsified(), tiny_llama().eval(), sparsified(reconstruct=None)
    root = metrics_of(dense, token_batches(BATCHES))[dense.model.layers[0]].double()
    held_back = in_steps(token_batches(BATCHES))[-1]
    goal, before, after = (seen_by(each, "model.layers.0", held_back)[1] for each in (dense, plain, model))
    block = mts.report(model).blocks[0]
    for error, output in ((block.error_before, before), (block.error_after, after)):
        assert error == pytest.approx(relative(output @ root, goal @ root), rel=1e-4)
    assert block.error_after < block.error_before
    plainly = mts.report(sparsified(reconstruct=2)).blocks[0]
    assert plainly.error_before != pytest.approx(block.error_before, rel=1e-3)


def test_the_model_is_left_as_it_was_and_reruns_have_the_same_bits():
    model = tiny_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = Snapshot(model)
    metrics_of(model, token_batches(2))
    assert Snapshot(model).look == before.look
    assert all(p.grad is None for p in model.parameters())
    assert_same_state(sparsified(), state_of(sparsified()))


def test_what_is_refused():
    match = r"metric='fisher': the output is a BaseModelOutput.* with no logits but 'last_hidden_state' .*, 'pooled'"
    refused(sparsified, TwoOutputs(tiny_llama().config), match=match)
    refused(sparsified, tiny_llama(), reconstruct={"metric": "fish"}, parts=["metric='fish': allowed are 'plain'"])
    refused(mts.SparsifyConfig, forward_loop=print, reconstruct=FISHER, match="forward_loop does so in its own way")
    assert Reconstruct().metric == "plain"


def test_auto_says_where_errors_are_plain():
    def errors(report):
        return [(block.error_before, block.error_after) for block in report.blocks]

    plain, auto = ({"epochs": 2, "metric": metric} for metric in ("plain", "auto"))
    note = "reconstruct's metric is the plain squared error: "

    def loop(model):
        for batch in in_steps(token_batches(BATCHES)):
            model(batch)

    looped = mts.sparsify(tiny_llama(), "wanda", forward_loop=loop, reconstruct=auto, progress=False)
    assert note + "a forward_loop calls the model in its own way" in mts.report(looped).notes
    assert errors(mts.report(looped)) == errors(mts.report(sparsified(reconstruct=plain)))
    model = sparsified(TwoOutputs(tiny_llama().config), reconstruct=auto)
    assert any(each.startswith(f"{note}the output is a BaseModelOutput") for each in mts.report(model).notes)


def test_the_backward_pass_holds_one_block(monkeypatch):
    """Blocks run again in it, each when the one behind it is done."""
    order = []
    monkeypatch.setattr(InMemory, "load", lambda self, block: order.append(block))
    model = tiny_llama(num_hidden_layers=4)
    metrics_of(model, token_batches(1))
    blocks = list(model.model.layers)
    assert order == [*blocks, *reversed(blocks[1:])] * 2, "nothing before the first block's output asks for gradients"


class Dropping(Block):
    """Has dropout in evaluation mode, too."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


def test_a_block_that_runs_again_draws_the_same_random_numbers(monkeypatch):
    """Also those of the backward pass of distillation, which leaves the caller's alone."""
    ours, plain = (Stacked(block=Dropping) for _ in range(2))
    random = torch.get_rng_state()
    sparsified(ours, data_loader=vectors(8), reconstruct=None, distill=1)
    assert torch.equal(torch.get_rng_state(), random)
    monkeypatch.setattr(distill, "blocks_recomputed", lambda run: nullcontext())
    sparsified(plain, data_loader=vectors(8), reconstruct=None, distill=1)
    for name, x in ours.state_dict().items():
        torch.testing.assert_close(x, plain.state_dict()[name])


class Moving(nn.Linear):
    """Notes where it is to go, and stays."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.moves = []

    def to(self, device):
        self.moves.append(str(device))
        return self


def test_blocks_may_write_to_their_inputs():
    class Apart(Block):
        def forward(self, x):
            return super().forward(x.relu())

    class InPlace(Block):
        def forward(self, x):
            return super().forward(x.relu_())

    options = {"pattern": "2:4", "reconstruct": FISHER, "distill": 1, "data_loader": vectors(64), "progress": False}
    first, second = (mts.sparsify(Stacked(block=kind), "wanda", **options) for kind in (Apart, InPlace))
    assert mts.report(second).distillation.kl_after < mts.report(second).distillation.kl_before
    assert_same_state(first, state_of(second))


@pytest.mark.parametrize("device", ["meta", None])
def test_with_device_a_block_stays_there_until_the_next_one_runs(device):
    """For its own backward pass, in which it runs once more."""
    model = nn.Sequential(Moving(2, 2), Moving(2, 2))
    plan, config = SimpleNamespace(blocks=[*model]), mts.SparsifyConfig(device=device)
    with recompute.blocks_recomputed(SimpleNamespace(model=model, plan=plan, config=config, storage=InMemory())):
        output = model(torch.ones(1, 2))
        seen = [[*block.moves] for block in model]
        output.sum().backward()
        seen += [[*block.moves] for block in model]
    seen.append(model[0].moves)
    there, back = ["meta"], ["meta", "cpu"]
    expected = [back, there, [*back, "meta"], [*back, *back], [*back, *back]]
    assert seen == (expected if device else [[]] * 5)


def test_the_plan_counts_the_metrics():
    plan = mts.make_plan(tiny_llama(), "wanda", reconstruct=FISHER)
    assert plan.memory["fisher_metrics"] == plan.streamed["host"]["fisher_metrics"] == 2 * 4 * 32**2
    assert "fisher_metrics" not in mts.make_plan(tiny_llama(), "wanda", reconstruct=2).memory
