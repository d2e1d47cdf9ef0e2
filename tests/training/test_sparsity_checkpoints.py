"""SparsityCallback in Hugging Face's Trainer: stop and resume, the best checkpoint, and checkpoints that do not fit."""

import functools
import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainingArguments

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.checkpoint.save import add_masks
from modelopt_sparse.model.masking import named_masks
from tests.helpers import assert_bits, assert_same_state, plain_from_pretrained, state_of, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.training.cases import masks_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Trainer warns of its own options
ROWS = torch.cat(token_batches(8))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]
ALGORITHMS = {
    "static": lambda: training.Static(0.5, include="blocks"),
    "gmp": lambda: training.GMP(training.Cubic(0.0, 0.5, 0, 6), include="blocks", update=2),
    "set": lambda: training.SET(0.5, scope="row", include="blocks", update=2),
    "rigl": lambda: training.RigL(0.5, scope="row", include="blocks", update=2),
    "2:4": lambda: training.RigL(pattern="2:4", include="blocks", update=2),
}


def trainer(folder, model, sparsity, steps=6, callback=None, data=DATA, **options):
    settings = {"max_steps": steps, "per_device_train_batch_size": 4, "save_steps": 3, "save_strategy": "steps"}
    settings |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", **options}
    arguments, callbacks = TrainingArguments(str(folder), **settings), [callback or training.SparsityCallback(sparsity)]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=DATA[:4], callbacks=callbacks)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """name of an algorithm -> (the folder of a run to its end, with checkpoints in the middle; its end)."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("trainer")
        model = tiny_llama()
        trainer(folder, model, ALGORITHMS[name]()).train()
        return folder, state_of(model)

    return run


@pytest.mark.parametrize(("name", "applied"), [*((name, False) for name in ALGORITHMS), ("rigl", True)])
def test_stop_and_resume_on_a_freshly_built_model(finished, name, applied, tmp_path):
    """The callback applies the algorithm to the model, unless the user has done so before."""
    folder, wanted = finished(name)
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    model, sparsity = tiny_llama(), ALGORITHMS[name]()
    if applied:
        sparsity.apply(model)
    trainer(tmp_path, model, sparsity).train(resume_from_checkpoint=True)
    assert sparsity.step == 6
    assert_same_state(model, wanted)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_checkpoints_load_with_masks_and_without(finished, name):
    folder, wanted = finished(name)
    model = mts.load(folder / "checkpoint-6")
    masks = dict(named_masks(model))
    for parameter, mask in masks.items():
        assert torch.equal(mask, wanted[f"{parameter}_mask"][1])
    assert mts.report(model).settings["training"]["step"] == 6
    mts.verify(folder / "checkpoint-6")
    plain = plain_from_pretrained(folder / "checkpoint-6")
    for parameter in masks:
        assert torch.equal(plain.get_parameter(parameter), wanted[parameter][1])


def test_the_best_checkpoint_comes_back_with_its_masks(tmp_path, monkeypatch):
    model, sparsity = tiny_llama(), ALGORITHMS["rigl"]()
    losses = iter([1.0, 2.0, 3.0])  # the first evaluation is the best

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    judged = trainer(tmp_path, model, sparsity, **options)

    def evaluate(*args, **kwargs):
        metrics = {"eval_loss": next(losses)}
        judged.control = judged.callback_handler.on_evaluate(judged.args, judged.state, judged.control, metrics)
        return metrics

    monkeypatch.setattr(judged, "evaluate", evaluate)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* were written to pruned places")
        judged.train()
    best, last = (mts.load(tmp_path / f"checkpoint-{step}") for step in (2, 6))
    assert_same_state(model, state_of(best))
    assert any(not torch.equal(mask, dict(named_masks(last))[name]) for name, mask in named_masks(best))


def set_at(level):
    return training.SET(level, scope="row", update=2)


@pytest.mark.parametrize("member", ["wide", "parallel", "factorized", "doped"])
def test_sparse_ift_resumes_saves_reports_and_exports(member, tmp_path):
    """A model that the same call has rewritten takes the checkpoint, and goes on to the bits of a run that did not
    stop."""
    whole, again = (training.sparse_ift(tiny_llama(), 0.5, member, rule=set_at) for _ in range(2))
    trainer(tmp_path, whole.model, whole.sparsity).train()
    wanted = state_of(whole.model)
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer(tmp_path, again.model, again.sparsity).train(resume_from_checkpoint=True)
    assert_same_state(again.model, wanted)
    masked = {name.removesuffix(".weight") for name, _ in named_masks(again.model)}
    assert {layer.name for layer in mts.verify(again.model).layers} == masked
    assert {layer.recipe for layer in mts.report(again.model).layers} == {"set"}
    mts.save(again.model, tmp_path / "saved")
    restored = training.sparse_ift(tiny_llama(), 0.5, member).model
    assert_same_state(mts.restore(restored, tmp_path / "saved"), wanted)
    if member == "wide":
        assert_same_state(mts.load(tmp_path / "saved"), wanted)
    else:
        with pytest.raises(ValueError, match="of the model is not in the folder"):
            mts.load(tmp_path / "saved")
    logits = again.model.eval()(input_ids=ROWS[:2]).logits
    assert_bits(restored.eval()(input_ids=ROWS[:2]).logits, logits)
    mts.export(again.model)
    assert not list(named_masks(again.model))
    assert_bits(again.model(input_ids=ROWS[:2]).logits, logits)


def test_plain_modules_whose_checkpoints_hold_masks_themselves(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.inner, self.head = nn.Embedding(97, 16), nn.Linear(16, 16), nn.Linear(16, 97)

        def forward(self, input_ids, labels):
            logits = self.head(self.inner(self.embed(input_ids)).relu())
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def train(resume=True):
        trainer(tmp_path, model := Plain(), training.RigL(0.5, include="inner.weight", update=2)).train(resume)
        return model

    model = train(resume=False)
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert_same_state(train(), state_of(model))

    shutil.rmtree(tmp_path / "checkpoint-6")
    file = tmp_path / "checkpoint-3" / "model.safetensors"
    weights = load_file(file)
    weights["inner.weight_mask"] = ~weights["inner.weight_mask"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="checkpoint-3"):
        train()
    add_masks(model, tmp_path / "checkpoint-3")  # hashes are right now, and the masks those of the end
    with pytest.raises(ValueError, match=r"(?s)checkpoint-3.*'inner\.weight_mask' is not the same in the weight files"):
        train()


# checkpoints that do not fit ----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(finished, tmp_path):
    folder, _ = finished("rigl")
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    return tmp_path


def resume(folder, sparsity=None, **options):
    sparsity = sparsity or ALGORITHMS["rigl"]()
    trainer(folder, tiny_llama(), sparsity, **options).train(resume_from_checkpoint=True)


def copied(*names):
    """What puts these files of another checkpoint into one."""

    def change(folder, other):
        for name in names:
            shutil.copy(other / name, folder / name)

    return change


MASKS = ("sparsity.json", "sparsity_masks.safetensors")
MISFITS = {
    "no masks": (lambda at, _: (at / "sparsity.json").unlink(), "rigl", r"holds no masks .sparsity\.json.*resume_from"),
    "masks of another one": (copied(*MASKS), "rigl", r"cannot be restored.*its hash differs"),
    "weights of another one": (copied("model.safetensors"), "rigl", r"cannot be restored.*its hash differs"),
    "another algorithm": (copied(), "set", "is of another algorithm, or was trained with other options"),
}


@pytest.mark.parametrize(("change", "algorithm", "match"), MISFITS.values(), ids=list(MISFITS))
def test_checkpoints_that_do_not_fit_stop(checkpoint, finished, change, algorithm, match):
    change(checkpoint / "checkpoint-3", finished("rigl")[0] / "checkpoint-6")
    with pytest.raises(ValueError, match=f"checkpoint-3' {match}"):
        resume(checkpoint, ALGORITHMS[algorithm]())


def test_a_folder_of_another_step_stops(checkpoint):
    state_file = checkpoint / "checkpoint-3" / "trainer_state.json"
    content = json.loads(state_file.read_text())
    content["global_step"] = 2
    state_file.write_text(json.dumps(content))
    callback = training.SparsityCallback(ALGORITHMS["rigl"](), resume_from=checkpoint / "checkpoint-3")
    with pytest.raises(ValueError, match=r"checkpoint-3' holds masks of step 3, and weights of step 2"):
        resume(checkpoint, callback=callback)


def test_checkpoints_that_hold_adapters_alone_are_refused_before_training(tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="unlike those of FSDP, DeepSpeed and PEFT: write the loop yourself"):
        trainer(tmp_path, model, ALGORITHMS["rigl"]()).train()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_elsewhere_is_named(checkpoint, tmp_path):
    sparsity = ALGORITHMS["rigl"]()
    folder = checkpoint / "checkpoint-3"
    callback = training.SparsityCallback(sparsity, resume_from=folder)
    trainer(tmp_path / "new", tiny_llama(), sparsity, callback=callback).train(resume_from_checkpoint=str(folder))
    assert sparsity.step == 6


def test_a_checkpoint_elsewhere_that_is_not_named_is_not_mistaken(checkpoint, tmp_path):
    """For that of the same step of another run, which lies where this one writes to."""
    trainer(tmp_path / "other", tiny_llama(initializer_range=0.1), ALGORITHMS["rigl"]()).train()
    match = "Trainer has loaded another 'model.embed_tokens.weight' than that of '.*other/checkpoint-3': name the"
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path / "other", tiny_llama(), ALGORITHMS["rigl"]()).train(str(checkpoint / "checkpoint-3"))


def test_a_second_train_with_the_same_callback_goes_on(tmp_path):
    model, sparsity = tiny_llama(), ALGORITHMS["rigl"]()
    trained = trainer(tmp_path, model, sparsity)
    trained.train()
    first, masks = sparsity.step, masks_of(model)
    trained.train()
    assert sparsity.step == 2 * first
    assert not all(torch.equal(mask, masks[name]) for name, mask in mts.named_masks(model))
    mts.verify(model)
    wanted = state_of(model)
    shutil.rmtree(tmp_path / "checkpoint-6")
    again, resumed = ALGORITHMS["rigl"](), tiny_llama()
    trainer(tmp_path, resumed, again).train(resume_from_checkpoint=True)  # of the second train(), at our step 9
    assert again.step == 2 * first
    assert_same_state(resumed, wanted)


def test_a_mask_on_a_parameter_of_the_model_itself(tmp_path):
    """CLIP has ``logit_scale`` beside its two towers."""
    clip = ARCHITECTURES["clip"]
    model, batch = clip.build(), clip.batches("right")[0]
    rows = [dict(zip(batch, row)) for row in zip(*batch.values())]
    sparsity = training.Static(0.5)
    sparsity.apply(model)
    loader = trainer(tmp_path / "run", model, sparsity, data=rows).get_train_dataloader()
    assert next(iter(loader)).keys() == batch.keys()
    mts.save(model, tmp_path / "saved")
    assert mts.load(tmp_path / "saved").logit_scale == model.logit_scale
