"""Calls of the model that are run again: what they leave as it was, what they keep, and what they refuse."""

import gc
import inspect
import re
import traceback
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.calibration import calls as calls_module
from modelopt_sparse.calibration.rerun import Needed, Unknown
from modelopt_sparse.calibration.trial import fingerprint_of, same_fingerprint
from modelopt_sparse.model.devices import buffers_kept
from tests.calibration.collecting import assert_calibrated, collected, thread_state
from tests.helpers import Snapshot, assert_same_masks, assert_same_state, state_of, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import STACKED, Block, Stacked, vectors
from tests.models.tiny import tiny_t5
from tests.oracles.brute_force import assert_stats, brute_force, matrices_of

OPTIONS = {"min_tokens": 1, "progress": False}


# what is left as it was -----------------------------------------------------------------------------------------------


class Failing(Stacked):
    """Raises in the n-th run of one of its modules, by a count that is none of its attributes."""

    def __init__(self, at: int, error: BaseException, module: str) -> None:
        super().__init__()
        self.at, self.error = at, error
        self.get_submodule(module).register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        COUNT[0] += 1
        if COUNT[0] == self.at:
            raise self.error


COUNT = [0]


def assert_half_done(model: nn.Module, before: Snapshot, blocks_done: int, within: list[str]) -> None:
    """Flags and hooks as before, the first blocks sparse and valid, the others as they were."""
    now = Snapshot(model).look
    done, rest = within[:blocks_done], within[blocks_done:]
    for (kind, name), value in before.look.items():
        if kind in ("switches", "flags", "parameter") or name.startswith(tuple(f"{path}." for path in rest)):
            assert now[kind, name] == value, (kind, name)
    masks = [name for name, _ in mts.named_masks(model)]
    assert not any(name.startswith(path) for name in masks for path in rest)
    for path in done:
        assert sum(name.startswith(path) for name in masks) == len(matrices_of(model, [path]))
    if done:
        assert len(mts.verify(model, "2:4").layers) == len(matrices_of(model, done))


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
@pytest.mark.parametrize("module", ["stem", "blocks.0", "blocks.2.down"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_whatever_run_fails_nothing_is_left(module, error):
    """In the dense run, in the rehearsal, when a block's inputs are collected, in reconstruction: blocks are sparse or
    untouched, from first to last."""
    options = {"data_loader": vectors(), "reconstruct": 1, **OPTIONS}
    COUNT[0] = 0
    mts.sparsify(Failing(0, error, module), **options)
    runs, done = COUNT[0], []
    for at in range(1, runs + 1, runs // 8):
        COUNT[0] = 0
        model, before = Failing(at, error, module), thread_state()
        snapshot = Snapshot(model)
        with suppress(ValueError, RuntimeError, KeyboardInterrupt):
            mts.sparsify(model, **options)
        done.append(len({name.split(".")[1] for name, _ in mts.named_masks(model)}))
        assert_half_done(model, snapshot, done[-1], STACKED)
        assert not any("forward" in vars(block) for block in model.blocks)
        assert thread_state() == before
        assert mts.report(mts.sparsify(model, **options)).sparsity == 0.5
    assert {0, 2, 3} <= {*done}


def test_an_error_between_blocks_shows_the_batch_and_the_users_line():
    class Between(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                assert x.abs().max() < self.limit, "too large"
            return self.head(x)

    model, batches = Between(), [batch[:5] for batch in vectors()]
    model.limit = 1e4
    batches[2][0] = 1e5  # neither in the dense run nor in the rehearsal
    with pytest.raises(ValueError, match=re.escape("Between cannot take calibration batch 2, {0: 'torch.float32")) as e:
        mts.sparsify(model, data_loader=batches, **OPTIONS)
    assert "too large" in str(e.value)
    assert 'assert x.abs().max() < self.limit, "too large"' in "".join(traceback.format_exception(e.value))


def set_flags(default: torch.dtype, autocast: torch.dtype) -> None:
    torch.set_default_dtype(default)
    torch.set_autocast_dtype("cpu", autocast)


class Setting(Stacked):
    """Sets around its blocks what it sets back after them: an attribute, a list, an attribute of an object, a buffer,
    and flags of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.states, self.config = 1.0, [], SimpleNamespace(depth=0)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        before, scale, self.gain, self.scale = self.gain, self.scale, 2.0, self.scale * 0.5
        self.states.append(len(x))
        self.register_buffer("late", x[:0])
        self.config.depth += 1
        set_flags(torch.float64, torch.float16)
        x = super().forward(x * self.gain * self.scale * self.config.depth * len(self.states))
        set_flags(torch.float32, torch.bfloat16)
        self.config.depth -= 1
        self.gain, self.scale = before, scale
        self.states.clear()
        del self.late
        return x


def test_what_a_call_sets_around_its_blocks_is_put_back():
    model = assert_calibrated(Setting(), STACKED, vectors(), "block")
    assert (model.gain, model.states, model.config.depth, "late" in model._buffers) == (1.0, [], 0, False)
    assert (torch.get_default_dtype(), torch.get_autocast_dtype("cpu")) == (torch.float32, torch.bfloat16)
    assert torch.equal(model.scale, torch.ones(16))
    assert not any("whole model" in note for note in mts.report(model).notes)


def test_a_batch_that_the_model_writes_to_is_as_it_was():
    class Writing(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    for options in ({"data_loader": vectors()}, {"forward_loop": lambda model: [model(x.clone()) for x in vectors()]}):
        found = collected(Writing(), STACKED, sequential="none", **options)
        assert_stats(found, brute_force(Stacked(), [x * 2 for x in vectors()], STACKED))


@pytest.mark.parametrize("cache", [lambda: None, DynamicCache], ids=["of its own", "in the batch"])
def test_each_run_of_a_call_gets_the_cache_that_it_began_with(cache):
    def sparse(**more):
        batches = [{"input_ids": ids, **more, **({name: cache()} if more else {})} for ids in token_batches(3)]
        return mts.sparsify(tiny_llama(), "wanda", data_loader=batches, progress=False)

    known = inspect.signature(LlamaForCausalLM.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    assert_same_masks(sparse(), sparse(use_cache=True))


# random numbers -------------------------------------------------------------------------------------------------------


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_random_numbers_are_those_of_a_whole_call():
    """Drawn before the blocks, in them and between them; a block that answers has drawn its own."""

    class Drawing(Stacked):
        kind = Noisy

        def call(self, block: nn.Module, x: Tensor, place: int) -> Tensor:
            return block(x) + 0.1 * torch.randn_like(x)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    def call(model: nn.Module, batch: Tensor) -> None:
        torch.manual_seed(next(n for n, x in enumerate(data) if x is batch))
        model(batch)

    data, model = vectors(), Drawing()
    found = collected(model, STACKED, data_loader=vectors(), sequential="none", min_tokens=1)
    assert_stats(found, brute_force(Drawing(), data, STACKED, call=call))
    assert not any("whole model" in note for note in mts.report(model).notes)


# what blocks put out, and is not kept ---------------------------------------------------------------------------------


@torch.library.custom_op("modelopt_sparse_tests::count", mutates_args=())
def count(x: Tensor) -> int:
    return int(x.count_nonzero())


def unknown(x: Tensor, place: int = 0) -> Unknown:
    def need():
        raise Needed

    return Unknown(x.to("meta"), x.device, {(place, 0)}, need)


LOOKS = [
    lambda x: x.sum().item(),
    lambda x: bool(x.any()),
    lambda x: torch.zeros(3, 4).add_(x),
    lambda x: torch.zeros(3, 4).index_put_((torch.tensor([0]),), x[:1]),
    lambda x: torch.ones(3, 4)[x > 0],
    lambda x: torch.where(x > 0)[0],
    lambda x: x.nonzero(),
    lambda x: torch.equal(x, torch.ones(3, 4)),
    lambda x: torch.nan_to_num(x).tolist(),
    lambda x: x.unique(),
    lambda x: torch.ones(3, 4).masked_fill_(x > 0, 1),
    lambda x: torch.ops.modelopt_sparse_tests.count(x),
]


@pytest.mark.parametrize("looks", LOOKS, ids=range(12))
def test_whatever_looks_at_a_value_that_is_not_known_is_refused(looks):
    with pytest.raises((Needed, RuntimeError)), torch.no_grad():  # of an error, runs make `Needed` as well
        looks(unknown(torch.ones(3, 4)))


def test_what_is_computed_from_it_is_not_known_and_says_from_what():
    x, y = unknown(torch.ones(3, 4), 1), unknown(torch.ones(3, 4), 2)
    with torch.no_grad():
        z = torch.cat([x, torch.ones(3, 4)]).softmax(-1) @ torch.ones(4, 5)
        assert isinstance(z, Unknown)
        assert (z.shape, z.dtype, z.device.type, z.sources) == ((6, 5), torch.float32, "cpu", {(1, 0)})
        assert x[torch.tensor([True, False, True])].shape == (2, 4)  # a known index tells the shape
        assert (x + y).sources == {(1, 0), (2, 0)}
        x[:, 1].add_(y[:, 0])  # the view's base holds it
        assert x.sources == {(1, 0), (2, 0)}
        assert nn.LayerNorm(4)(x.to(torch.bfloat16).float()).dtype == torch.float32


class Skips(Stacked):
    """The last block reads what the first one put out. Batches of more than six rows look at values of one of both."""

    class Block(Block):
        def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
            return super().forward(x if skipped is None else x + skipped)

    def __init__(self, looks_at: int | None) -> None:
        super().__init__(block=self.Block)
        self.looks_at = looks_at

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.stem(x))
        x = self.blocks[1](first)
        if self.looks_at is not None and len(x) > 6 and (first, x)[self.looks_at].mean() > 100:
            return x
        return self.head(self.blocks[2](x, first))


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("looks_at", [0, 1])
def test_what_later_blocks_need_is_kept(looks_at, sequential):
    model = assert_calibrated(Skips(looks_at), STACKED, vectors(4), sequential)
    assert not any("whole model" in note for note in mts.report(model).notes)


def test_a_block_is_tuned_by_no_output_that_is_not_known():
    """A call that looks at values keeps the newest outputs alone; what older ones go into is computed anew."""
    options = {"data_loader": vectors(4), "reconstruct": 2, "progress": False}
    plain, looking = (mts.sparsify(Skips(looks_at), "wanda", **options) for looks_at in (None, 1))
    assert_same_state(looking, state_of(plain))


@pytest.mark.parametrize(("build", "most"), [(tiny_llama, 1), (tiny_t5, 3)], ids=["llama", "t5"])
def test_no_more_is_held_than_what_is_needed(build, most, monkeypatch):
    """Of a Llama the last hidden state of each call; of a T5 also the encoder's, and a position bias."""
    copies, alive, copied = [], [], calls_module.copied

    def counting(x, run):
        held = copied(x, run)
        copies.append(weakref.ref(held))
        return held

    def look(*_):
        gc.collect()
        alive.append(sum(ref() is not None for ref in copies))

    monkeypatch.setattr(calls_module, "copied", counting)
    model, data = build(num_hidden_layers=4) if build is tiny_llama else build(), token_batches(5)
    batches = data if build is tiny_llama else [{"input_ids": x, "decoder_input_ids": x} for x in data]
    for module in model.modules():
        if type(module).__name__ in ("LlamaMLP", "T5LayerFF"):
            module.register_forward_hook(look)
    mts.sparsify(model, "wanda", data_loader=batches, progress=False)
    assert max(alive) <= most * len(data)
    assert not any(ref() is not None for ref in copies)


# what is found out before anything is changed ------------------------------------------------------------------------


class Probing(Stacked):
    """What a block leaves in an object is the input of a layer in the next one, of which nothing comes out."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + 0 * self.probe(self.left.value)
            self.left.value = y[:1].detach()
            return y

    def __init__(self) -> None:
        super().__init__(block=self.Block)
        self.left = SimpleNamespace()
        for block in self.blocks:
            block.left = self.left

    def forward(self, x: Tensor) -> Tensor:
        self.left.value = x[:1]
        return super().forward(x)


def test_layers_inputs_are_compared_not_only_what_blocks_put_out():
    with pytest.warns(UserWarning, match="blocks that answer in the place of computing do not give the model's own"):
        found = collected(Probing(), STACKED, data_loader=vectors(), sequential="none", min_tokens=1)
    assert_stats(found, brute_force(Probing(), vectors(), STACKED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_without_exact_bits_other_values_are_told_from_roundings(dtype: torch.dtype):
    """As on devices where sums are added in any order."""
    x = (torch.randn(3, 16, 24, dtype=torch.complex128 if dtype.is_complex else torch.float64) * 8).to(dtype)
    rounding = 0 if dtype == torch.int64 else torch.finfo(dtype).eps
    slightly = (x * (1 + rounding * torch.randn(x.shape).sign())).to(dtype)
    changed = {
        "sign": -x, "order": x.flip(1), "scale": (x * (1.25 if dtype == torch.int64 else 1.03)).to(dtype),
        "a row": torch.cat([x[:1] * 2, x[1:]]), "shape": x.reshape(16, 3, 24),
        "inf": x * torch.inf if rounding else x + 1,
    }  # fmt: skip
    prints = fingerprint_of((x, {"mask": x[0]}), exact=False)
    assert same_fingerprint(fingerprint_of((slightly, {"mask": x[0]}), exact=False), prints)
    for name, y in changed.items():
        assert not same_fingerprint(fingerprint_of((y, {"mask": x[0]}), exact=False), prints), name


GLOBAL = {"scale": 1.0}


def test_what_nothing_can_put_back_is_an_error():
    """A flag in a module of the user's own, which a call that is stopped leaves set."""

    class Flagging(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            x = x * GLOBAL["scale"]
            GLOBAL["scale"] = 3.0
            x = super().forward(x)
            GLOBAL["scale"] = 1.0
            return x

    try:
        with pytest.warns(UserWarning, match="do not give"), pytest.raises(ValueError, match="load it anew"):
            mts.sparsify(Flagging(), "wanda", data_loader=vectors(), **OPTIONS)
    finally:
        GLOBAL["scale"] = 1.0


# what values decide, and what a call leaves to the next one -----------------------------------------------------------


class Deciding(Stacked):
    """Each block also says something that depends on values: whether to go on, as a number or in an object, or by how
    many rows it drops."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x, over = block(x)
            if len(x) < 4 or bool(over.any if isinstance(over, SimpleNamespace) else over):
                break
        return self.head(x)

    class Saying(Block):
        def __init__(self, says: str) -> None:
            super().__init__()
            self.says = says

        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            y = super().forward(x)
            over = y.mean() > 0.3
            if self.says == "rows":
                return y[y[:, 0] < y[:, 0].mean()] if over else y, None
            return y, {"bool": bool(over), "float": float(over), "object": SimpleNamespace(any=over)}[self.says]


def deciding(says: str) -> tuple[nn.Module, list[Tensor]]:
    """A model, and a batch that goes another way than the others."""
    model = Deciding(block=partial(Deciding.Saying, says))
    torch.manual_seed(0)
    likely, unlikely = torch.randn(6, 16) + 4 * model.stem.weight.sum(0).sign(), torch.randn(6, 16)
    return model, [likely, unlikely, unlikely + 0.1, unlikely[:4]]


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("says", ["bool", "float", "object"])
def test_what_one_calls_values_decide_holds_for_no_other(says: str, sequential: str):
    model, batches = deciding(says)
    unkept = pytest.warns(UserWarning, match="the output of a Saying cannot be kept: nested, sparse or in an object")
    with unkept if (says, sequential) == ("object", "none") else nullcontext():
        assert_calibrated(model, STACKED, batches, sequential)


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_a_call_whose_values_change_shapes_that_decide_is_an_error_that_names_it(sequential: str):
    """Only the sparse model comes back to a finished block. No statistic is left out in silence."""
    model, batches = deciding("rows")
    with pytest.raises(ValueError, match=r"calibration batch 1 comes back to block 'blocks.1', which is sparse by now"):
        mts.sparsify(model, "wanda", data_loader=batches, sequential=sequential, **OPTIONS)


def test_no_block_is_tuned_towards_what_cannot_be_kept():
    model, batches = deciding("object")
    with pytest.warns(UserWarning, match=r"cannot be kept.*its blocks are not reconstructed"):
        mts.sparsify(model, "wanda", data_loader=batches, reconstruct=1, **OPTIONS)
    assert not mts.report(model).blocks


class Sharing(Stacked):
    """The first block's values are read by all later ones."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            value = self.up(x)
            if self.first:
                self.shared["value"] = value
            return x + self.down((value + self.shared["value"]).relu())

    def __init__(self) -> None:
        super().__init__(block=self.Block)
        shared = {}
        for place, block in enumerate(self.blocks):
            block.first, block.shared = place == 0, shared


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("looped", [False, True])
def test_one_call_alone_shows_what_it_takes_over_from_the_call_before(rows: int, looped: bool):
    (x,) = (batch[:rows] for batch in vectors(1))
    data = {"forward_loop": lambda model: model(x)} if looped else {"data_loader": [x]}
    with pytest.warns(UserWarning, match="do not give the model's own output"):
        assert_calibrated(Sharing(), STACKED, [x], "block", **{"data_loader": None, **data})


@contextmanager
def switched(model: nn.Module):
    model.gain = 3.0
    yield
    model.gain = 1.0


SETTINGS = {
    "an attribute": switched,
    "a hook": lambda model: model.stem.register_forward_hook(lambda module, args, output: output * 3),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("kind", SETTINGS)
def test_what_a_loop_changes_around_its_calls_or_between_them_counts(kind, calls_before):
    def loop(model: nn.Module) -> None:
        for _ in range(calls_before):
            model(vectors()[0])
        with SETTINGS[kind](model):
            model(vectors()[0])

    class Gaining(Stacked):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.gain)

    expected = brute_force(Gaining(), [None], STACKED, call=lambda model, _: loop(model))
    with pytest.warns(UserWarning, match="calibrated through the whole model"):
        found = collected(Gaining(), STACKED, forward_loop=loop, sequential="none", min_tokens=1)
    assert_stats({name: found[name] for name in expected.grams}, expected)


BUFFERS = {  # what a forward does with its buffers
    "counts": lambda model, x: model.count.add_(1),
    "another tensor": lambda model, x: setattr(model, "mean", 0.9 * model.mean + x.mean()),
    "data": lambda model, x: model.mean.data.copy_(x.mean()),
    "a bool": lambda model, x: model.seen.fill_(True),
}


@pytest.mark.parametrize("how", BUFFERS)
@pytest.mark.parametrize("options", [OPTIONS, {"budget": "30% zeros", "progress": False}])
def test_buffers_that_a_forward_writes_to_are_as_they_were(how, options):
    """Also after data that is refused."""

    class Writes(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            BUFFERS[how](self, x)
            return super().forward(x)

    for data in (vectors(), [*vectors(), torch.full((4, 16), torch.nan)]):
        model = Writes()
        for name, x in (("count", torch.tensor(0)), ("mean", torch.tensor(0.0)), ("seen", torch.tensor(False))):
            model.register_buffer(name, x)
        before = dict(model.named_buffers())
        with nullcontext() if len(data) == 3 else pytest.raises(ValueError, match="NaN"):
            mts.sparsify(model, "wanda", data_loader=data, **options)
        assert all(model.get_buffer(name) is x and not x.any() for name, x in before.items())


def test_a_buffer_that_a_forward_with_gradients_writes_to_requires_none():
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    with buffers_kept(model):
        model.mean.copy_(model.weight.mean(0))
        assert model.mean.requires_grad
    assert not model.mean.requires_grad
    assert not model.mean.any()


# loops that call parts of a model -------------------------------------------------------------------------------------


whisper = ARCHITECTURES["whisper"].build
PARTS = [f"model.{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(2)]


def generating(model: nn.Module) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        model.generate(torch.randn(2, 8, 22), max_new_tokens=6, min_new_tokens=6, do_sample=False)


def by_parts(model: nn.Module) -> None:
    """As applications do: the encoder once, then the decoder token by token. The model is never called."""
    torch.manual_seed(1)
    for _ in range(2):
        states = model.model.encoder(torch.randn(2, 8, 22)).last_hidden_state
        ids, cache = torch.full((2, 1), 3), None
        for _ in range(3):
            output = model.model.decoder(ids, encoder_hidden_states=states, past_key_values=cache, use_cache=True)
            cache, ids = output.past_key_values, output.last_hidden_state.argmax(-1)[:, -1:]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("loop", [generating, by_parts])
def test_a_loop_may_call_parts_of_the_model(loop, sequential):
    expected = brute_force(whisper(), [None], PARTS[:1], call=lambda model, _: loop(model))
    with pytest.warns(UserWarning, match=r"WhisperForConditionalGeneration is calibrated through the whole model"):
        found = collected(whisper(), PARTS, forward_loop=loop, sequential=sequential, min_tokens=1)
    assert found.keys() == {name for name in found if name.startswith("model.")}
    assert_stats({name: found[name] for name in expected.grams}, expected)
