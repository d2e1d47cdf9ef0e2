"""Layers and blocks out of the ordinary: shared weights and inputs, stems, heads, several stacks."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.calibration.collecting import LAYERS, assert_calibrated, collected, padded, steps_of
from tests.helpers import tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.odd_blocks import ModuleAcross, Sometimes, TwinBlock, TwinsAcross, WrittenBetween
from tests.models.stacked import STACKED, PastHooks, Stacked, vectors
from tests.oracles.brute_force import Recording, Steps, assert_stats, brute_force, matrices_of, stepwise


def assert_twins_add_up(build: Callable[[], Stacked], twins: dict[str, str], sequential: str, steps: Steps) -> Stacked:
    """Sparsify the model; what a twin sees counts for the layer that it is the twin of (``twins``: twin -> layer)."""
    dense, model, method = build(), build(), Recording()
    mts.sparsify(model, method, data_loader=vectors(), sequential=sequential, progress=False)
    found = method.by_layer({name: x for name, x in matrices_of(dense, STACKED).items() if name not in twins})
    expected = stepwise(dense, model, vectors(), steps)
    for twin, name in twins.items():
        gram, tokens = expected.grams.pop(twin), expected.tokens.pop(twin)
        if dense.get_submodule(twin) is not dense.get_submodule(name):  # one module is seen under both names
            expected.grams[name] = expected.grams[name] + gram
            expected.tokens[name] += tokens
    assert_stats(found, expected)
    return model


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_twins_in_one_block_see_the_inputs_of_both(sequential):
    """One layer, one mask on both modules, the sum of both inputs."""
    twins = {f"{path}.second": f"{path}.first" for path in STACKED}
    steps = steps_of(sequential, STACKED, [["first", "second"], ["up"], ["down"]])
    model = assert_twins_add_up(lambda: Stacked(block=TwinBlock), twins, sequential, steps)
    for block in model.blocks:
        assert block.first.weight is block.second.weight
        assert torch.equal(block.first.weight_mask, block.second.weight_mask)
    assert len(mts.report(model).layers) == 9


@pytest.mark.parametrize("build", [TwinsAcross, ModuleAcross])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_twins_in_two_blocks_see_the_inputs_of_both(sequential, build):
    """A weight that several blocks use is solved with what all of them give it."""
    twins = ["blocks.0.up", "blocks.2.up"]
    rest = ["blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.down"]
    steps: dict[str, Steps] = {
        "none": [twins + rest],
        "block": [twins, rest[:1], rest[1:3], rest[3:]],  # the first layer to be called is the first to be solved
        "stage": [twins, *([layer] for layer in rest)],
    }
    assert_twins_add_up(build, {"blocks.2.up": "blocks.0.up"}, sequential, steps[sequential])


@pytest.mark.parametrize("options", [{}, {"reconstruct": 1, "permute": True}])
def test_blocks_whose_hooks_see_nothing(options):
    """They are calibrated through the whole model, and neither permuted nor tuned, as SqueezeBert's; also where layers
    share their input at some times only."""
    with pytest.warns(UserWarning, match="the model calls the forward of a Sometimes past its hooks"):
        assert_calibrated(PastHooks(block=Sometimes), STACKED, vectors(), "block", **options)


def test_a_tensor_that_was_written_to_is_another_stage():
    """What is written depends on the first layer, which must be sparse when the second one is collected."""
    steps = steps_of("stage", STACKED, [["mix"], ["other"], ["up"], ["down"]])
    assert_calibrated(Stacked(block=WrittenBetween), STACKED, vectors(), "stage", steps)


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_block_without_targets_is_run_through(left_out, sequential):
    """Leaving a whole block dense changes nothing in what the blocks behind it are given."""
    path, model = STACKED[left_out], Stacked()
    rest = [other for other in STACKED if other != path]
    steps = steps_of(sequential, rest, [["up"], ["down"]])
    assert_calibrated(model, rest, vectors(), sequential, steps, exclude=f"{path}.*")
    for name, parameter in Stacked().get_submodule(path).named_parameters(prefix=path):
        assert torch.equal(model.get_parameter(name), parameter)


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_the_stem_and_the_head_when_they_are_asked_for(sequential):
    """A stem is solved before the blocks see its sparse output, a head after all blocks; "none": on dense inputs."""
    everything = ["stem", *STACKED, "head"]
    steps = steps_of(sequential, everything)
    if sequential == "stage":
        steps = [["stem"], *steps_of("stage", STACKED, [["up"], ["down"]]), ["head"]]
    model = assert_calibrated(Stacked(), everything, vectors(), sequential, steps, include="*")
    assert len(mts.report(model).layers) == 8


def test_one_layer_alone_outside_of_the_blocks():
    """An untied lm_head that is named in full is calibrated on what the dense blocks give it."""
    dense, model = tiny_llama(tie_word_embeddings=False), tiny_llama(tie_word_embeddings=False)
    found = collected(model, ["lm_head"], data_loader=padded(), include="lm_head")
    assert_stats(found, brute_force(dense, padded(), ["lm_head"], lambda batch, name: batch["attention_mask"].bool()))
    assert [name for name, _ in mts.named_masks(model)] == ["lm_head.weight"]


def test_a_stem_convolution_alone():
    architecture = ARCHITECTURES["resnet_basic"]
    dense, batches = architecture.build(), architecture.batches("right")
    stem = next(name for name, module in dense.named_modules() if isinstance(module, nn.Conv2d))
    found = collected(architecture.build(), [stem], data_loader=batches, include=stem, pattern=0.5)
    assert_stats(found, brute_force(dense, batches, [stem]))


@pytest.mark.parametrize("use_cache", [False, True])
def test_generation_as_the_forward_loop(use_cache):
    """Calls that fill a cache cannot be made again."""
    ids = token_batches(1)[0][:, :5]

    def loop(model: nn.Module) -> None:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    expected = brute_force(tiny_llama(), [None], LAYERS, call=lambda model, batch: loop(model))
    with pytest.warns(UserWarning, match="is calibrated through the whole model") if use_cache else nullcontext():
        found = collected(tiny_llama(), forward_loop=loop, sequential="none")
    assert_stats(found, expected)
