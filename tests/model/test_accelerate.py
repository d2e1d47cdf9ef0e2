"""Models with accelerate's hooks, on the CPU: the hooks run as they would for a GPU."""

import copy
import json
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate import hooks as accelerate_hooks
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.model.devices import remove_hooks, stored
from tests.helpers import assert_same_masks, plain_from_pretrained, refused, tiny_llama, token_batches
from tests.model.sparse_modules import written_on_purpose
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import Stacked, vectors
from tests.oracles.brute_force import Recording, assert_stats, brute_force, matrices_of

pytestmark = [pytest.mark.core, written_on_purpose]

LAYERS = ["model.layers.0", "model.layers.1"]
CPU = torch.device("cpu")


def offloaded(model: nn.Module) -> nn.Module:
    """Weights on meta between calls; they come from a map on the CPU."""
    return cpu_offload(model, execution_device=CPU)


def partly_offloaded(model: nn.Module) -> nn.Module:
    """Only the first block is offloaded, as by a device_map that did not fit."""
    cpu_offload(model.get_submodule(LAYERS[0]), execution_device=CPU)
    return model


def aligned(model: nn.Module) -> nn.Module:
    """Hooks that move inputs and leave the weights where they are, as a device_map over two GPUs has them."""
    return dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def every_module_aligned(model: nn.Module) -> nn.Module:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


def hooked_twice(model: nn.Module) -> nn.Module:
    """A hook of the user's beside accelerate's, in one SequentialHook."""
    offloaded(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            add_hook_to_module(module, accelerate_hooks.ModelHook(), append=True)
    return model


HOOKED = [offloaded, partly_offloaded, aligned, every_module_aligned, hooked_twice]
every_kind = pytest.mark.parametrize("hook", HOOKED, ids=lambda hook: hook.__name__)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, wherever they are."""
    found = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}"] = stored(module, name)
    return found


def hooks_of(model: nn.Module) -> dict[str, object]:
    return {path: getattr(module, "_hf_hook", None) for path, module in model.named_modules()}


@every_kind
@pytest.mark.parametrize(
    "options", [{"sequential": "block"}, {"sequential": "stage"}, {"sequential": "none"}, {"device": "cpu"}], ids=str
)
def test_weights_and_masks_are_those_of_the_model_without_hooks(hook, options):
    """Also with the device named where everything is."""
    options = {"data_loader": token_batches(), "progress": False, **options}
    expected = mts.sparsify(tiny_llama(), **options)
    model = hook(tiny_llama())
    hooks, devices = hooks_of(model), {name: p.device for name, p in model.named_parameters()}
    mts.sparsify(model, **options)
    assert hooks_of(model) == hooks  # the same objects
    assert {name: p.device for name, p in model.named_parameters()} == devices
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(values(model), values(expected), rtol=0, atol=0)
    assert_same_masks(model, expected)
    assert len(mts.verify(model, "2:4").layers) == 14


def test_a_mask_without_values_is_refused():
    """The parameter is on meta between calls, and has values."""
    model, mask = offloaded(tiny_llama()), torch.ones(64, 32, dtype=torch.bool, device="meta")
    refused(mts.set_mask, model, "model.layers.0.mlp.up_proj.weight", mask, match=r"on meta: give .* with values")
    assert not [*mts.named_masks(model)]


def test_statistics_of_an_offloaded_encoder_decoder():
    """Later stacks are recorded on their own; accelerate's hooks let no run end early."""
    architecture, method = ARCHITECTURES["t5"], Recording()
    dense, batches = architecture.build(), architecture.batches("left")
    blocks = architecture.block_names(dense)
    model = offloaded(architecture.build())
    mts.sparsify(model, method, data_loader=batches, sequential="none", progress=False)
    expected = brute_force(dense, batches, blocks, architecture.real)
    assert_stats(method.by_layer(matrices_of(dense, blocks)), expected)
    assert all(parameter.is_meta for parameter in model.parameters())


def write_under_masks(model: nn.Module) -> None:
    """By way of the hook's weights map, where there is one."""
    masked = [module for module in model.modules() if hasattr(module, "weight_mask")]
    for module in masked:
        stored(module, "weight")[~module.weight_mask] = 7.0
    assert len(masked) == 14


@every_kind
@torch.no_grad()
def test_forwards_are_masked(hook):
    """Whatever is written under the masks; also once the hooks are taken off, and where they come after the masks."""
    (model, plain), (ids,) = (hook(tiny_llama()), tiny_llama()), token_batches(1)
    for each in (model, plain):
        mts.sparsify(each, data_loader=token_batches(), progress=False)
    expected = plain(ids).logits
    assert torch.equal(model(ids).logits, expected)
    for gradients in (False, True):
        write_under_masks(model)
        with torch.set_grad_enabled(gradients):
            assert torch.equal(model(ids).logits, expected)
    accelerate_hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(ids).logits, expected)
    for each in (model, hook(plain)):
        write_under_masks(each)
        assert torch.equal(each(ids).logits, expected)


def test_what_accelerator_save_model_writes(tmp_path):
    """docs/training.md says so: masks among the weights, which plain from_pretrained does not expect."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(mts.sparsify(tiny_llama(), "magnitude"))
    accelerator.save_model(model, tmp_path / "theirs")
    assert len([name for name in load_file(tmp_path / "theirs" / "model.safetensors") if name.endswith("_mask")]) == 14
    mts.save(accelerator.unwrap_model(model), tmp_path / "ours")
    accelerator.unwrap_model(model).save_pretrained(tmp_path / "plain")
    for name in ("ours", "plain"):
        plain_from_pretrained(tmp_path / name)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # transformers, of any CPU
@every_kind
@torch.no_grad()
def test_a_second_run_replaces_the_masks_that_are_saved_and_export_gives_plain_modules_that_still_run(hook, tmp_path):
    model = hook(tiny_llama())
    types = [type(module) for module in model.modules()]
    for pattern in ("2:4", "1:4"):
        with torch.enable_grad():
            mts.sparsify(model, data_loader=token_batches(), pattern=pattern, progress=False)
        assert len(mts.verify(model, pattern).layers) == 14
    mts.save(model, tmp_path / "sparse")
    found = dict(plain_from_pretrained(tmp_path / "sparse").named_parameters())
    assert found.keys() == dict(tiny_llama().named_parameters()).keys()
    assert all(torch.equal(weight, values(model)[name]) for name, weight in found.items())
    assert_same_masks(mts.load(tmp_path / "sparse"), model)
    (ids,), hooks = token_batches(1), hooks_of(model)
    expected = model(ids).logits
    mts.export(model)
    assert ([type(module) for module in model.modules()], hooks_of(model)) == (types, hooks)
    assert torch.equal(model(ids).logits, expected)


def test_modules_end_by_themselves_once_their_hooks_are_removed():
    """Accelerate puts back a forward that is bound to its module."""
    model = tiny_llama()
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    assert remove_hooks(model) == {}
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


class Gated(nn.Module):
    """A block with a parameter of its own beside its layers: it is on its device while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(16))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(self.up(x).relu())


class Press:
    """A forward hook that presses Ctrl-C in its call number ``at``."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", range(1, 40, 6))
def test_ctrl_c_leaves_nothing_on_the_device(at):
    """Wherever a forward is interrupted, all weights are offloaded again, and a second call works."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    x = torch.randn(8, 16)
    expected = mts.sparsify(copy.deepcopy(model), data_loader=[x, -x], progress=False)
    offloaded(model)
    press = Press(at)
    handles = [module.register_forward_hook(press) for module in model.modules() if isinstance(module, nn.Linear)]
    try:
        mts.sparsify(model, data_loader=[x, -x], progress=False)
    except KeyboardInterrupt:
        assert at <= press.calls
    assert all(parameter.is_meta for parameter in model.parameters())
    for handle in handles:
        handle.remove()
    if press.calls < at:  # it was over before
        torch.testing.assert_close(values(model), values(expected), rtol=0, atol=0)
    mts.sparsify(model, data_loader=[x, -x], progress=False)
    assert len(mts.verify(model, "2:4").layers) == 4


# what cannot be changed ---------------------------------------------------------------------------------------------


def assert_refused(model: nn.Module, match: str, **options) -> None:
    """Sparsify raises before any work: no mask, no report, the hooks in place."""
    hooks = hooks_of(model)
    refused(mts.sparsify, model, data_loader=token_batches(), progress=False, **options, match=match)
    assert hooks_of(model) == hooks


def test_the_layer_that_is_on_disk_is_named_not_one_that_is_in_memory(tmp_path):
    """In a device_map with a disk entry, and layers that are no targets may well be there."""
    model = tiny_llama(tie_word_embeddings=False)
    device_map = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    assert_refused(model, "'model.layers.1.self_attn.q_proj.weight' is offloaded to disk")
    mts.sparsify(model, data_loader=token_batches(), include="model.layers.0.*", progress=False)
    assert len(mts.verify(model, "2:4").layers) == 7
    index = json.loads((tmp_path / "index.json").read_text())
    assert not any(name.startswith("model.layers.0") for name in index)


def test_layers_on_the_cpu_of_a_model_that_is_partly_on_disk(tmp_path):
    """One map may hold both: what is in memory can be changed."""
    model, (ids,) = tiny_llama(), token_batches(1)
    state = tiny_llama().state_dict()
    on_disk = {name: value for name, value in state.items() if name.startswith(LAYERS[1])}
    offload_state_dict(tmp_path, on_disk)
    in_memory = {name: value for name, value in state.items() if name not in on_disk}
    weights = OffloadedWeightsLoader(state_dict=in_memory, save_folder=tmp_path)
    accelerate_hooks.attach_align_device_hook(model, CPU, offload=True, weights_map=weights)
    assert_refused(model, "'model.layers.1.self_attn.q_proj.weight' is offloaded to disk")
    options = {"data_loader": token_batches(), "exclude": "model.layers.1.*", "progress": False}
    found, expected = (mts.sparsify(each, **options)(ids).logits for each in (model, tiny_llama()))
    assert torch.equal(found, expected)


def test_offloaded_buffers_are_refused_where_they_would_be_masks():
    """As the error says: enforce=False writes zeros and needs no buffer."""
    model = cpu_offload(tiny_llama(), CPU, offload_buffers=True)
    match = "'model.layers.0.self_attn.q_proj.weight' would lose its mask: use enforce=False, or offload_buffers=False"
    assert_refused(model, match)
    mts.sparsify(model, data_loader=token_batches(), enforce=False, progress=False)
    assert len(mts.verify(model, "2:4").layers) == 14


# device= ------------------------------------------------------------------------------------------------------------


# "cpu:0" is another device than "cpu" to torch, and moving there makes copies: all that a GPU would do but speed
ELSEWHERE = "cpu:0"


class Journey:
    """Which blocks are away from home, and what each was moved for."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.away: set[int] = set()
        self.most = 0
        self.trips = [0] * len(blocks)
        for index, block in enumerate(blocks):
            block.to = lambda device, index=index, block=block: self.move(index, block, str(device))

    def move(self, index: int, block: nn.Module, device: str) -> nn.Module:
        if device == ELSEWHERE and index not in self.away:
            self.trips[index] += 1
        (self.away.add if device == ELSEWHERE else self.away.discard)(index)
        self.most = max(self.most, len(self.away))
        return type(block).to(block, device)


@pytest.mark.parametrize("count", [3, 6])
def test_one_block_is_on_the_device_at_a_time(count):
    """It stays there while all batches go through it, however many, and no block is left behind."""
    model = tiny_llama(num_hidden_layers=3)
    journey = Journey(model.model.layers)
    mts.sparsify(model, data_loader=token_batches(count), device=ELSEWHERE, progress=False)
    assert journey.most == 1
    assert not journey.away
    # in the dense run; for one of the batches, and another beside it, in two whole runs; in the check; for its turn
    assert journey.trips == [7, 7, 7]


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 8, 10])
def test_ctrl_c_brings_the_blocks_back(at):
    model, press = tiny_llama(num_hidden_layers=3), Press(at)
    journey = Journey(model.model.layers)
    for layer in model.model.layers[1:]:
        layer.mlp.gate_proj.register_forward_hook(press)
    with pytest.raises(KeyboardInterrupt):
        mts.sparsify(model, data_loader=token_batches(3), device=ELSEWHERE, progress=False)
    assert not journey.away
    assert all(len(module._forward_pre_hooks) == 0 for module in model.modules())


@pytest.mark.parametrize("options", [{"reconstruct": True}, {"quality": "balanced"}])
def test_offloaded_blocks_are_not_reconstructed(options):
    model = partly_offloaded(tiny_llama())
    before = copy.deepcopy(values(model))
    with pytest.raises(ValueError, match=r"accelerate offloads 'model\.layers\.0\.self_attn\.q_proj': .*device="):
        mts.sparsify(model, "sparsegpt", data_loader=token_batches(), progress=False, **options)
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


def embedding_offloaded(model: nn.Module) -> nn.Module:
    cpu_offload(model.get_submodule("model.embed_tokens"), execution_device=CPU)
    return model


@pytest.mark.parametrize("placed", [aligned, embedding_offloaded])
def test_blocks_that_stay_on_their_devices_are_reconstructed(placed):
    expected, found = tiny_llama(tie_word_embeddings=False), placed(tiny_llama(tie_word_embeddings=False))
    for model in (expected, found):
        mts.sparsify(model, "sparsegpt", data_loader=token_batches(), progress=False, reconstruct={"epochs": 2})
    for (name, one), other in zip(values(found).items(), values(expected).values(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    assert [block.epoch for block in mts.report(found).blocks] == [block.epoch for block in mts.report(expected).blocks]


def test_ties_of_an_offloaded_model_are_seen():
    """`cpu_offload` gives each holder of a weight a placeholder of its own."""

    def tied():
        model = tiny_llama(tie_word_embeddings=True)
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    options: dict[str, Any] = {"include": ["*_proj", "lm_head"], "data_loader": token_batches(), "progress": False}
    with pytest.raises(ValueError, match=r"'lm_head' matches no prunable layer.*tied: also held by"):
        mts.make_plan(cpu_offload(tied(), execution_device=CPU), **options)
    options |= {"include": ["*_proj"]}
    model, plain = (mts.sparsify(x, **options) for x in (cpu_offload(tied(), torch.device("cpu")), tied()))
    assert [layer.name for layer in mts.report(model).layers] == [layer.name for layer in mts.report(plain).layers]
    assert_same_masks(model, plain)


class Scaled(Stacked):
    """Holds a weight itself, around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_what_the_model_itself_holds_is_offloaded_again_after_calls_that_are_stopped():
    model = cpu_offload(Scaled(), execution_device=CPU)
    mts.sparsify(model, "wanda", data_loader=vectors(), progress=False)
    assert model.scale.is_meta
