"""How a block is tuned is proved on the calls held back: by the model's output, on two blocks of a stack."""

import itertools
import math
import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse import oneshot
from modelopt_sparse.accuracy import reconstruct
from modelopt_sparse.accuracy.reconstruct import Way
from tests.helpers import assert_same_state, in_steps, judging_outputs, state_of, tiny_llama, token_batches

BATCHES = 9
OPEN = {"epochs": 3, "learning_rate": "auto", "masks": "auto", "metric": "auto"}
WAYS = [Way(*way) for way in itertools.product((0.2, 0.1, 0.4), (False, True), (False, True))]


def sparsified(blocks=1, **options):
    model = tiny_llama(num_hidden_layers=blocks)
    options = {"reconstruct": OPEN, "progress": False, "data_loader": token_batches(BATCHES), **options}
    return mts.sparsify(model, "wanda", **options)


def options_of(way: Way, epochs: int = 3) -> dict:
    masks, metric = ("move" if way.moves else "frozen"), ("fisher" if way.fisher else "plain")
    return {"epochs": epochs, "learning_rate": way.rate, "masks": masks, "metric": metric}


def tried(monkeypatch, way: Way):
    """What a way comes to while it is tried: half of three epochs, and a quarter of the steps is held back."""
    with monkeypatch.context() as patch:
        patch.setattr(reconstruct, "HELD_BACK", reconstruct.HELD_BACK_FOR_OUTPUTS)
        return sparsified(reconstruct=options_of(way, epochs=2))


def divergence(model) -> float:
    """Of the outputs for that quarter, written out."""
    batches = torch.cat(judging_outputs(in_steps(token_batches(BATCHES))))
    with torch.no_grad():
        p, q = (x(batches).logits.double().log_softmax(-1) for x in (tiny_llama(num_hidden_layers=1), model))
    return float((p.exp() * (p - q)).sum(-1).mean())


AS_SOLVED = Way(0.0, False, False)


def nearest(loss: Callable[[Way], float]) -> tuple[Way, list[Way]]:
    """One part after the other, each with the best of those before -> (the best way, all that were tried)."""
    rates = [*(Way(rate, False, False) for rate in (0.2, 0.1, 0.4)), AS_SOLVED]
    best = min(rates, key=loss)
    moves = best._replace(moves=True)
    best = min(best, moves, key=loss)
    fisher = best._replace(fisher=True)
    return min(best, fisher, key=loss), [*rates, moves, fisher]


def test_the_way_with_the_nearest_output_is_taken(monkeypatch):
    """A model of one block, beside one that is made in each way by itself."""

    @cache
    def wanted(way: Way) -> float:
        return divergence(sparsified(reconstruct=None) if way == AS_SOLVED else tried(monkeypatch, way))

    best, ways = nearest(wanted)
    assert best.rate, "the oracle compares ways of tuning"
    model = sparsified()
    (block,) = mts.report(model).blocks
    figures = dict(
        match.groups() for note in block.notes if (match := re.fullmatch(r"(rate .* metric|as solved): (\S+)", note))
    )
    assert [*figures] == [*map(str, ways)]
    for way in ways:
        assert float(figures[str(way)]) == pytest.approx(wanted(way), rel=1e-3)
    assert block.way == str(best)
    assert_same_state(model, state_of(sparsified(reconstruct=options_of(best))))


def test_ways_are_tried_on_the_first_block_and_the_one_in_the_middle(monkeypatch):
    """In the middle beginning with the way of the blocks before it."""
    ways = [Way(0.2, False, False), Way(0.1, False, False), Way(0.4, False, False), AS_SOLVED, Way(0.4, True, False)]
    ways.append(Way(0.4, True, True))
    anew = [ways[-1], Way(0.2, True, True), Way(0.1, True, True), AS_SOLVED._replace(moves=True, fisher=True)]
    anew += [Way(0.1, False, True), Way(0.1, False, False)]
    figures = iter([5.0, 6.0, 4.0, 7.0, 3.0, 2.0, 5.0, 4.0, 3.0, 6.0, 2.0, 2.5])
    monkeypatch.setattr(oneshot, "judge_of", lambda data: lambda: next(figures))
    blocks = mts.report(sparsified(blocks=4)).blocks
    tried = [[note.rpartition(": ")[0] for note in block.notes if note.startswith(("rate", "as"))] for block in blocks]
    assert tried == [[*map(str, ways)], [], [*map(str, anew)], []]
    assert [block.way for block in blocks] == [str(ways[-1])] * 2 + [str(anew[-2])] * 2


@pytest.mark.parametrize("masks", ["frozen", "move", "auto"])
def test_a_stack_whose_output_tuning_makes_worse_is_left_as_solved(monkeypatch, masks):
    figures = iter([2.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0])  # of three rates, and as solved; then that, and the rates
    monkeypatch.setattr(oneshot, "judge_of", lambda data: lambda: next(figures))
    model = sparsified(blocks=2, reconstruct={**OPEN, "masks": masks, "metric": "plain"})
    assert_same_state(model, state_of(sparsified(blocks=2, reconstruct=None)))
    for block in mts.report(model).blocks:
        assert block.error_after == block.error_before
        assert block.epoch == 0
        assert block.way == "as solved"


def test_a_way_whose_output_is_no_number_is_not_taken(monkeypatch):
    figures = iter([math.nan, 2.0, 1.0, 3.0, 1.0])  # of three rates, as solved, and masks that move
    monkeypatch.setattr(oneshot, "judge_of", lambda data: lambda: next(figures))
    (block,) = mts.report(sparsified(reconstruct={**OPEN, "metric": "plain"})).blocks
    assert block.way == str(Way(0.4, False, False))


def test_where_the_output_cannot_be_asked_blocks_have_the_say(monkeypatch):
    def loop(model):
        for batch in in_steps(token_batches(BATCHES)):
            model(batch)

    options = {"epochs": 3, "masks": "auto"}
    model = sparsified(reconstruct=options, data_loader=None, forward_loop=loop)
    why = "how blocks are tuned is chosen by their own errors, not by the model's output: a forward_loop calls it"
    assert any(note.startswith(why) for note in mts.report(model).notes)
    (block,) = mts.report(model).blocks
    ways = [Way(0.2, False, False), Way(0.2, True, False)]
    errors = {way: mts.report(tried(monkeypatch, way)).blocks[0].error_after for way in ways}
    best = min(errors, key=errors.__getitem__)
    assert block.way == str(best)
    (alone,) = mts.report(sparsified(reconstruct=options_of(best))).blocks
    assert block.error_after == pytest.approx(alone.error_after, rel=1e-5)


def test_errors_of_two_metrics_are_not_compared(monkeypatch):
    """Unless the output is asked, the metric that there is stays."""
    monkeypatch.setattr(oneshot, "judge_of", lambda data: None)
    (block,) = mts.report(sparsified()).blocks
    assert block.way.endswith("fisher metric")
    assert sum(" metric: " in note for note in block.notes) == 4


def test_weights_without_masks_are_tried_as_well():
    assert_same_state(mts.export(sparsified()), state_of(sparsified(enforce=False)))


def test_what_leaves_nothing_open_is_not_asked():
    """A method with options of its own is what it was."""
    for way in WAYS[:4]:
        (block,) = mts.report(sparsified(reconstruct=options_of(way))).blocks
        assert block.way == str(way)
        assert not any(note.startswith("taken") for note in block.notes)
