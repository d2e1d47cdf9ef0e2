"""Training sparse models: zeros hold, and the kept weights really learn.

Every test looks at the parameters themselves, without calling the module or its state dict first: both would repair
what an optimizer broke.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D as HFConv1D

import modelopt_sparse as mts
from tests.helpers import plain_from_pretrained, refused, tiny_llama, token_batches
from tests.model.sparse_modules import drift, lost_zeros, random_mask, written_on_purpose
from tests.training.cases import take_step

# the names that transformers 5.0 has as well; and peft 0.21 asks transformers 5.23 by an old name
OLD_NAMES = ("ignore:.gradient_checkpointing:FutureWarning", "ignore:.is_gradient_checkpointing:FutureWarning")
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings(*OLD_NAMES), written_on_purpose]
STEPS = 20


class EveryLayer(nn.Module):
    """A convolution, an attention, a Conv1D and two Linears in a row: every type of layer that carries masks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = HFConv1D(16, 8)
        nn.init.normal_(self.hidden.weight, std=0.3)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).transpose(1, 2).contiguous()
        x = x + self.attention(x, x, x)[0]
        return self.body(self.hidden(x).tanh())


MASKED = ("conv.weight", "attention.in_proj_weight", "attention.out_proj.weight")
MASKED += ("hidden.weight", "body.0.weight", "body.2.weight")


def sparse_model(names: Iterable[str] = MASKED) -> EveryLayer:
    torch.manual_seed(0)
    model = EveryLayer()
    set_masks(model, names)
    return model


def set_masks(model: nn.Module, names: Iterable[str] = MASKED) -> None:
    for seed, name in enumerate(names):
        mts.set_mask(model, name, random_mask(model.get_parameter(name), seed))


def regression(batch: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs, and a linear function of them that the model can learn."""
    generator = torch.Generator().manual_seed(seed)
    x, mix = torch.randn(batch, 4, 6, generator=generator), torch.randn(4, 4, generator=generator)
    return x, torch.einsum("bct,ck->btk", x, mix)


def mean_square(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), target)


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The trainable parameters of which a fifth or more of the kept entries is what it was before training.

    (A hidden unit whose outgoing weights are all pruned learns nothing.)
    """
    masks = dict(mts.named_masks(model))
    same = {name: (now == before[name])[masks.get(name, ...)] for name, now in values(model).items()}
    return [name for name, p in model.named_parameters() if p.requires_grad and same[name].float().mean() >= 0.2]


def least_moved(model: nn.Module, before: dict[str, Tensor]) -> float:
    """Of a masked parameter, the share of kept entries that are not what they were."""
    now = values(model)
    return min(float((now[name] != before[name])[mask].float().mean()) for name, mask in mts.named_masks(model))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    loss_of: Callable[..., Tensor] = mean_square,
    data: tuple[Tensor, ...] | None = None,
) -> list[float]:
    """Losses of ``steps`` steps on one batch; the last one is after the last step."""
    data = regression() if data is None else data
    losses = []
    for _ in range(steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *data)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        assert not lost_zeros(model), "before the next forward"
    return [*losses, float(loss_of(model, *data).detach())]


def assert_learns(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> list[float]:
    """In training the loss falls, and every parameter moves -> the losses."""
    before = values(model)
    losses = train(model, optimizer, **how)
    assert losses[-1] < 0.85 * losses[0]
    assert not unchanged(model, before)
    return losses


# optimizers that keep zeros by themselves ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD, momentum, decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, amsgrad, L2": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_hold_and_kept_weights_learn_without_any_call(name: str):
    model = sparse_model()
    assert_learns(model, OPTIMIZERS[name](model.parameters()))


def two_micro_batches(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Both graphs alive until one backward pass."""
    return (mean_square(model, x[::2], target[::2]) + mean_square(model, x[1::2], target[1::2])) / 2


def checkpointed(model: EveryLayer, x: Tensor, target: Tensor, use_reentrant: bool = False) -> Tensor:
    x = x.requires_grad_()
    x = checkpoint(model.conv, x, use_reentrant=use_reentrant).transpose(1, 2).contiguous()
    x = x + checkpoint(model.attention, x, x, x, use_reentrant=use_reentrant)[0]
    x = checkpoint(model.hidden, x, use_reentrant=use_reentrant).tanh()
    return F.mse_loss(checkpoint(model.body, x, use_reentrant=use_reentrant), target)


def autocast(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, x, target)


WAYS = {two_micro_batches: 1e-4, checkpointed: 1e-4, partial(checkpointed, use_reentrant=True): 1e-4, autocast: 0.02}


@pytest.mark.parametrize(("loss_of", "tolerance"), WAYS.items())
def test_other_ways_to_run_the_model_train_it_the_same(loss_of: Callable[..., Tensor], tolerance: float):
    expected = train(model := sparse_model(), OPTIMIZERS["AdamW"](model.parameters()))
    losses = assert_learns(model := sparse_model(), OPTIMIZERS["AdamW"](model.parameters()), loss_of=loss_of)
    assert losses == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", ["SGD, momentum, decay", "AdamW", "Adafactor"])
def test_bfloat16_weights_train(name: str):
    model = sparse_model().bfloat16()
    before = values(model)
    x, target = regression()
    losses = train(model, OPTIMIZERS[name](model.parameters()), data=(x.bfloat16(), target))
    assert losses[-1] < 0.9 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert least_moved(model, before) > 0.2  # small updates of large bfloat16 weights round away


def test_frozen_weights_stay_bit_for_bit_and_masked_while_the_rest_learns():
    model, frozen = sparse_model(), ("body.0.weight", "attention.in_proj_weight")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    before = values(model)
    model.get_parameter("body.0.weight").data[~dict(mts.named_masks(model))["body.0.weight"]] = 5.0
    with torch.no_grad():
        drifted = float(mean_square(model, *regression()))
    losses = assert_learns(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))
    assert losses[0] == pytest.approx(drifted)
    for name in frozen:
        assert torch.equal(model.get_parameter(name), before[name])
        assert model.get_parameter(name).grad is None


# attach_optimizer ---------------------------------------------------------------------------------------------------


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    take_step(mean_square(model, *regression()), optimizer)


def state_at_pruned_places(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Tensor]:
    return {
        (name, key): value[~mask]
        for name, mask in mts.named_masks(model)
        for key, value in optimizer.state[model.get_parameter(name)].items()
        if isinstance(value, Tensor) and value.shape == mask.shape
    }


def test_muon_loses_zeros_by_itself_and_keeps_them_when_attached():
    for attached in (False, True):
        model = sparse_model()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.05)
        if not attached:
            one_step(model, optimizer)
            assert set(lost_zeros(model)) == set(MASKED) - {"conv.weight"}
    mts.attach_optimizer(optimizer, model)
    assert_learns(model, optimizer)
    pruned = state_at_pruned_places(model, optimizer)
    assert pruned
    assert not any(value.any() for value in pruned.values())


@pytest.mark.parametrize("name", ["SGD, momentum, decay", "Adam", "AdamW", "AdamW, fused", "RMSprop"])
@pytest.mark.parametrize("attached", [False, True])
def test_a_mask_under_existing_momentum_needs_and_gets_attach_optimizer(name: str, attached: bool):
    model = sparse_model(names=())
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        one_step(model, optimizer)
    set_masks(model)
    assert all(value.any() for value in state_at_pruned_places(model, optimizer).values())
    if not attached:
        one_step(model, optimizer)
        assert set(lost_zeros(model)) == set(MASKED)
        return
    mts.attach_optimizer(optimizer, model)
    pruned = state_at_pruned_places(model, optimizer)
    assert len(pruned) >= len(MASKED)
    assert not any(value.any() for value in pruned.values())  # at once, before any step
    assert_learns(model, optimizer)
    assert not any(value.any() for value in state_at_pruned_places(model, optimizer).values())


def test_attach_optimizer_repairs_weights_at_once_and_leaves_kept_and_coded_state_alone():
    """In 8-bit states 0 is a code, not the value zero."""
    model = sparse_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    one_step(model, optimizer)
    states = {name: optimizer.state[model.get_parameter(name)] for name in MASKED}
    for name, state in states.items():
        state["codes"] = torch.full(model.get_parameter(name).shape, 127, dtype=torch.uint8)
    before = copy.deepcopy(states)
    drift(model)
    mts.attach_optimizer(optimizer, model)
    assert not lost_zeros(model)
    for name, mask in mts.named_masks(model):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[name][key][mask], before[name][key][mask])
    assert all((state["codes"] == 127).all() for state in states.values())


BESIDE = [{"Q": [torch.eye(8)]}, {"projector": object()}, {"preconditioner": torch.eye(3)}]  # SOAP, GaLore, Shampoo


@pytest.mark.parametrize("beside", BESIDE, ids=lambda beside: next(iter(beside)))
def test_moments_beside_matrices_of_another_basis_stay(beside):
    """Not one of their numbers belongs to one weight. Means of rows or columns leave moments what they are."""
    model = sparse_model()
    optimizer, shown = torch.optim.SGD(model.parameters(), lr=0.0), MASKED[0]
    weight, mask = model.get_parameter(shown), dict(mts.named_masks(model))[shown]
    means = {"row": torch.ones(len(weight)), "column": torch.ones(1, *weight.shape[1:])}
    for other, expected in ((beside, torch.ones_like(weight)), (means, mask.to(weight.dtype))):
        optimizer.state[weight] = {"step": 1, "exp_avg": torch.ones_like(weight), **other}
        mts.attach_optimizer(optimizer, model)
        assert torch.equal(optimizer.state[weight]["exp_avg"], expected)


def test_removing_the_handle_ends_the_attachment():
    model = sparse_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = mts.attach_optimizer(optimizer, model)
    one_step(model, optimizer)
    for lost in (set(), set(MASKED)):
        for name in MASKED:
            optimizer.state[model.get_parameter(name)]["momentum_buffer"].fill_(1.0)
        one_step(model, optimizer)
        assert set(lost_zeros(model)) == lost
        handle.remove()


def test_attach_optimizer_refuses_an_optimizer_of_another_model():
    model, optimizer = sparse_model(), torch.optim.AdamW(sparse_model().parameters())
    refused(mts.attach_optimizer, optimizer, model, match=r"this AdamW holds no parameter of the model: build it after")
    assert not optimizer._optimizer_step_post_hooks


def test_attach_optimizer_takes_what_accelerate_prepared():
    model, optimizer = Accelerator(cpu=True).prepare(model := sparse_model(), OPTIMIZERS["Adam"](model.parameters()))
    mts.attach_optimizer(optimizer, model)
    one_step(model, optimizer)
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].fill_(1.0)
    one_step(model, optimizer)
    assert not lost_zeros(model)
    assert not any(value.any() for value in state_at_pruned_places(model, optimizer.optimizer).values())


# transformers' Trainer ----------------------------------------------------------------------------------------------


def sparse_llama(**changes) -> LlamaForCausalLM:
    return mts.sparsify(tiny_llama(**changes), "magnitude", progress=False)


def token_rows(count: int = 16) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for batch in token_batches(count // 2) for row in batch]


def trainer(model: nn.Module, folder: Path, **changes) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 8, "save_steps": 4, "learning_rate": 3e-3, "weight_decay": 0.1, "seed": 3}
    settings |= {"per_device_train_batch_size": 4, "bf16": True, "use_cpu": True, "gradient_checkpointing": True}
    settings |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **{**settings, "report_to": "none", **changes})
    return Trainer(model, arguments, train_dataset=token_rows())


def losses_of(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def mask_keys(folder: Path) -> list[str]:
    return [key for file in folder.glob("*.safetensors") for key in load_file(file) if "mask" in key]


def test_trainer_keeps_zeros_learns_and_resumes_where_it_stopped(tmp_path: Path, capsys):
    model = sparse_llama()
    mts.save(model, tmp_path / "start")
    before = values(model)
    whole = trainer(model, tmp_path / "whole")
    whole.train()
    assert not lost_zeros(model)
    assert len(list(mts.named_masks(model))) == 14
    losses = losses_of(whole)
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert least_moved(model, before) > 0.5

    halfway = tmp_path / "whole" / "checkpoint-4"
    assert mask_keys(halfway) == []
    assert len(mts.verify(plain_from_pretrained(halfway), "2:4").layers) == 14

    restored = mts.restore(tiny_llama(), tmp_path / "start")
    resumed = trainer(restored, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(halfway))
    assert not lost_zeros(restored)
    assert losses_of(resumed) == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(values(restored), values(model), rtol=1e-6, atol=1e-7)


CHANGES = {"itself": lambda model: model, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_save_pretrained_writes_zeros_and_no_masks(change: str, shard: str, tmp_path: Path):
    """Masks are kept out as long as they are there."""
    ignored = tiny_llama()._keys_to_ignore_on_save
    model = CHANGES[change](sparse_llama())
    drift(model)
    (tokens,) = token_batches(1)
    for part, folder in ((model, tmp_path / "whole"), (model.model, tmp_path / "inner")):
        part.save_pretrained(folder, max_shard_size=shard)
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
        assert mask_keys(folder) == []
        read = plain_from_pretrained(folder, type(part))
        assert len(mts.verify(read, "2:4").layers) == 14
        with torch.no_grad():
            assert torch.equal(read(tokens)[0], part(tokens)[0])
    assert set(mts.export(model)._keys_to_ignore_on_save or ()) == set(ignored or ())


# LoRA ---------------------------------------------------------------------------------------------------------------


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_alpha=16))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def trained_adapters() -> tuple[nn.Module, LlamaForCausalLM]:
    """A PEFT model around a sparse base, its adapters trained, and the base as it was."""
    base = sparse_llama()
    untouched = copy.deepcopy(base)
    model = with_adapters(base).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = train(model, optimizer, 10, language_loss, tuple(token_batches(1)))
    assert losses[-1] < 0.9 * losses[0]
    return model.eval(), untouched


def test_adapters_train_on_a_sparse_base_that_stays_as_it_is():
    model, untouched = trained_adapters()
    assert len(dict(mts.named_masks(model))) == 14
    theirs = {name.replace("base_layer.", "").removeprefix("base_model.model."): p for name, p in values(model).items()}
    for name, parameter in untouched.named_parameters():
        assert torch.equal(theirs[name], parameter), name


@pytest.mark.parametrize("enforce", [True, False])
def test_the_report_of_a_model_with_adapters_is_that_of_its_base(enforce: bool, tmp_path: Path):
    """Whoever asks for it leaves it as it is, for the model that is merged again."""
    base = mts.sparsify(tiny_llama(), "magnitude", enforce=enforce)
    before = mts.report(base).as_dict()
    assert before["layers"][0]["error"] is not None
    model = with_adapters(base)
    mts.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"'.*base_layer.weight' is part of an adapter, .*: merge it first"):
        mts.save(model.get_base_model(), tmp_path / "base")
    assert not (tmp_path / "base").exists()
    for read in (model, model.get_base_model(), tmp_path, model.merge_and_unload()):
        assert mts.report(read).as_dict() == before


def test_a_model_that_had_adapters_before_has_the_report_of_its_masks():
    model = mts.sparsify(with_adapters(tiny_llama()), "magnitude")
    report = mts.report(model)
    assert len(dict(mts.named_masks(model))) == len(report.layers) == 14
    assert report.sparsity == 0.5
    assert not any(layer.notes for layer in report.layers)


def merged_by_hand(model: nn.Module) -> dict[str, Tensor]:
    """What the masked layers should hold after the merge: base plus update, zero where the base is pruned."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            base = module.get_base_layer()
            merged = base.weight.detach() + module.get_delta_weight("default").detach()
            found[f"{name}.weight"] = merged.masked_fill(~base.weight_mask, 0)
    assert len(found) == 6
    return found


def plain_with(base: nn.Module, changed: dict[str, Tensor]) -> LlamaForCausalLM:
    plain = tiny_llama()
    plain.load_state_dict({**base.state_dict(), **changed}, strict=False)
    return plain


READINGS: dict[str, Callable[[LlamaForCausalLM, Path], nn.Module]] = {
    "state_dict": lambda model, folder: (model.state_dict(), model)[1],
    "a forward": lambda model, folder: (language_loss(model, token_batches(1)[0]), model)[1],
    "export": lambda model, folder: mts.export(model),
    "save_pretrained": lambda model, folder: plain_from_pretrained(model.save_pretrained(folder) or folder),
    "save": lambda model, folder: mts.load(mts.save(model, folder) or folder),
}


@pytest.mark.parametrize("reading", READINGS)
def test_merged_adapters_are_masked_in_everything_that_is_read_from_the_model(reading: str, tmp_path: Path):
    model, untouched = trained_adapters()
    expected = merged_by_hand(model)
    merged = model.merge_and_unload()
    assert len(lost_zeros(merged)) == 6  # the merge has written over them
    with pytest.raises(ValueError, match=r"6 of 14 layers do not hold their pattern: model\.layers\.0\.self_attn\.q_p"):
        mts.verify(merged, "2:4")  # which looks at the weights themselves

    plain, (tokens,) = plain_with(untouched, expected), token_batches(1)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, plain(tokens).logits)  # whatever lies under the masks
    read = READINGS[reading](merged, tmp_path / "folder")
    assert len(mts.verify(read, "2:4").layers) == 14
    for name, weight in expected.items():
        torch.testing.assert_close(read.get_parameter(name).detach(), weight)
        assert not torch.equal(weight, untouched.get_parameter(name))
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, plain(tokens).logits)


def test_adapters_can_be_merged_and_unmerged_in_place():
    (model, untouched), (tokens,) = trained_adapters(), token_batches(1)
    plain = plain_with(untouched, merged_by_hand(model))
    model.merge_adapter()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    model.unmerge_adapter()
    base = model.unload()
    base.state_dict()
    assert not lost_zeros(base)
    torch.testing.assert_close(values(base), values(untouched), rtol=1e-4, atol=1e-5)


def test_helpers_of_this_file_notice_a_model_that_does_not_learn():
    """The checks above must be able to fail."""
    model = sparse_model()
    before = values(model)
    assert set(unchanged(model, before)) == set(before)
    model.get_parameter("body.0.weight").data.fill_(-0.0)
    assert lost_zeros(model) == ["body.0.weight"]
