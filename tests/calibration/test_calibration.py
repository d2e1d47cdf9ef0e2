"""Calibration: data in every form, padding, and the walk, against plain hooks on the whole model."""

import copy
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import modelopt_sparse as mts
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.recorder import Recorder
from modelopt_sparse.methods import METHODS
from modelopt_sparse.model.nested import flat_tensors
from tests.helpers import TESTBED, assert_same_state, state_of, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES, ragged
from tests.oracles.brute_force import (
    Real,
    Recording,
    Seen,
    all_rows,
    assert_stats,
    brute_force,
    make_sparse,
    matrices_of,
)

pytestmark = pytest.mark.core

LAYERS = ["model.layers.0", "model.layers.1"]
STAGES = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
STAGES += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]


def collected(model: nn.Module, within: list[str] = LAYERS, **options) -> dict[str, mts.Stats]:
    """The statistics that each layer of the model is solved with; the model is sparse afterwards."""
    dense = {name: matrix.clone() for name, matrix in matrices_of(model, within).items()}
    method = Recording()
    mts.sparsify(model, method, progress=False, **options)
    return method.by_layer(dense)


def assert_same(found: dict[str, mts.Stats], expected: dict[str, mts.Stats]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tokens == expected[name].tokens, name
        assert torch.equal(found[name].gram, expected[name].gram), name


class Snapshot:
    """A model as it is now, to say later that it was left alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dense = copy.deepcopy(model.state_dict())
        self.parameters = dict(model.named_parameters())
        self.flags = self.look()

    def look(self) -> list:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        modules = list(self.model.modules())
        configs = [module.config for module in modules if hasattr(module, "config")]
        return [
            [(type(module), module.training, [len(getattr(module, kind)) for kind in hooks]) for module in modules],
            [getattr(config, "use_cache", None) for config in configs],
            [parameter.requires_grad for parameter in self.model.parameters()],
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ]

    def assert_untouched(self) -> None:
        assert self.look() == self.flags
        self.assert_same_weights("")
        assert not hasattr(self.model, "sparsity_report")

    def assert_same_weights(self, prefix: str) -> None:
        for name, parameter in self.model.named_parameters():
            assert parameter is self.parameters[name]
            if name.startswith(prefix):
                torch.testing.assert_close(parameter, self.dense[name], rtol=0, atol=0, equal_nan=True)


def refused(model: nn.Module, match: str, *, error: type[Exception] = ValueError, method="sparsegpt", **options) -> str:
    """Sparsify raises, and the model is as it was -> the message."""
    snapshot = Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        mts.sparsify(model, method, progress=False, **options)
    snapshot.assert_untouched()
    return str(caught.value)


# data in every form -------------------------------------------------------------------------------------------------


def _loader(*tensors: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


def _run_all(batches: list[Tensor]) -> Callable[[nn.Module], None]:
    def loop(model: nn.Module) -> None:
        for batch in batches:
            model(input_ids=batch)

    return loop


def _run_in_inference_mode(batches: list[Tensor]) -> Callable[[nn.Module], None]:
    return torch.inference_mode()(_run_all(batches))


FORMS = {
    "tensors": lambda x: {"data_loader": x},
    "one-element tuples": lambda x: {"data_loader": [(batch,) for batch in x]},
    "tuples with labels": lambda x: {"data_loader": [(batch, torch.ones(2)) for batch in x]},
    "TensorDataset, which gives lists": lambda x: {"data_loader": _loader(torch.cat(x))},
    "TensorDataset with labels": lambda x: {"data_loader": _loader(torch.cat(x), torch.ones(6))},
    "dicts": lambda x: {"data_loader": [{"input_ids": batch} for batch in x]},
    "BatchEncodings": lambda x: {"data_loader": [BatchEncoding({"input_ids": batch}) for batch in x]},
    "dicts with a full mask": lambda x: {
        "data_loader": [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in x]
    },
    "generator": lambda x: {"data_loader": (batch for batch in x)},
    "tuples with keywords last": lambda x: {"data_loader": [(batch, {"use_cache": False}) for batch in x]},
    "collect_func, tensors": lambda x: {"data_loader": x, "collect_func": lambda batch: batch},
    "collect_func, dicts": lambda x: {"data_loader": x, "collect_func": lambda batch: {"input_ids": batch}},
    "collect_func, all positional": lambda x: {
        "data_loader": x,
        "collect_func": lambda batch: (batch, torch.ones_like(batch)),  # Llama's second argument is attention_mask
    },
    "collect_func, keywords last": lambda x: {
        "data_loader": [{"ids": batch, "label": 1} for batch in x],
        "collect_func": lambda batch: (batch["ids"], {"use_cache": False}),
    },
    "forward_loop": lambda x: {"forward_loop": _run_all(x)},
    "forward_loop in inference mode": lambda x: {"forward_loop": _run_in_inference_mode(x)},
}


@pytest.fixture(scope="module")
def from_tensors() -> dict[str, mts.Stats]:
    return collected(tiny_llama(), data_loader=token_batches())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_statistics(form, from_tensors):
    assert_same(collected(tiny_llama(), **FORMS[form](token_batches())), from_tensors)


def test_statistics_are_sums_so_the_cut_into_batches_does_not_matter(from_tensors):
    in_one = collected(tiny_llama(), data_loader=[torch.cat(token_batches())], sequential="none")
    in_three = collected(tiny_llama(), data_loader=token_batches(), sequential="none")
    for name, stats in in_three.items():
        assert stats.tokens == in_one[name].tokens == 3 * 2 * 16
        torch.testing.assert_close(stats.gram, in_one[name].gram, rtol=1e-5, atol=1e-4)


def test_max_batches_stops_early_and_draws_no_more():
    drawn = []
    batches = (drawn.append(1) or batch for batch in token_batches(5))
    found = collected(tiny_llama(), data_loader=batches, max_batches=2)
    assert_same(found, collected(tiny_llama(), data_loader=token_batches(5)[:2]))
    assert len(drawn) == 2


def test_the_report_names_the_data():
    """Calls are counted, and other data gives another fingerprint."""
    reports = []
    for seed in (1, 1, 2):
        model = tiny_llama()
        mts.sparsify(model, "wanda", data_loader=token_batches(seed=seed), progress=False)
        reports.append(mts.report(model).calibration)
    assert reports[0]["calls"] == 3
    assert reports[0] == reports[1]
    assert reports[0]["sha256"] != reports[2]["sha256"]


# text ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")


@pytest.fixture(scope="module")
def text() -> str:
    return (TESTBED / "heldout.txt").read_text(encoding="utf-8")[:1500]


def text_llama(tokenizer) -> LlamaForCausalLM:
    return tiny_llama(vocab_size=len(tokenizer))


def test_text_is_cut_into_windows_without_special_tokens(tokenizer, text):
    """All windows of 16 tokens, in order, as if the user had cut them; what is left over is dropped."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    assert 10 < len(windows) < 128
    assert len(windows) * 16 < len(ids)
    with pytest.warns(UserWarning, match=f"the text gives {len(windows)} windows of 16 tokens, not the 128 asked for"):
        found = collected(text_llama(tokenizer), data=text, tokenizer=tokenizer, seq_len=16, batch_size=4)
    assert_same(found, collected(text_llama(tokenizer), data_loader=list(windows.split(4))))


def test_text_files_give_what_their_text_gives(tokenizer, text, tmp_path):
    """A .txt file is one document, a .jsonl file has one per line; documents are joined by the end-of-text token."""
    options = {"tokenizer": tokenizer, "seq_len": 16, "num_samples": 5}
    documents = [text[:700], text[700:]]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": document, "source": "x"}) + "\n" for document in documents]
    (tmp_path / "a.jsonl").write_text("".join(lines) + "\n", encoding="utf-8")
    expected = collected(text_llama(tokenizer), data=text, **options)
    assert_same(collected(text_llama(tokenizer), data=tmp_path / "a.txt", **options), expected)
    assert_same(collected(text_llama(tokenizer), data=[text], **options), expected)

    joined = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in documents]
    ids = torch.tensor([*joined[0], tokenizer.eos_token_id, *joined[1]])
    model = text_llama(tokenizer)
    windows = list(ids[: len(ids) // 16 * 16].view(-1, 16).split(1))
    expected = collected(model, data_loader=windows)
    options["num_samples"] = len(windows)
    for data in (documents, tmp_path / "a.jsonl"):
        assert_same(collected(text_llama(tokenizer), data=data, batch_size=1, **options), expected)


def test_windows_are_drawn_by_seed_and_without_replacement(tokenizer, text):
    """As many windows as asked for, each one once; the same seed draws the same ones."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = {tuple(window.tolist()) for window in ids[: len(ids) // 16 * 16].view(-1, 16)}
    drawn = {}
    for seed in (0, 0, 1):
        model, seen = text_llama(tokenizer), []
        model.model.embed_tokens.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        options = {"data": text, "tokenizer": tokenizer, "seq_len": 16, "num_samples": 6, "seed": seed}
        mts.sparsify(model, "wanda", progress=False, **options)
        rows = [tuple(row.tolist()) for row in seen[0]]
        assert len(rows) == len(set(rows)) == 6
        assert windows.issuperset(rows)
        assert drawn.setdefault(seed, rows) == rows
    assert drawn[0] != drawn[1]


def test_a_text_shorter_than_a_window_is_one_short_window(tokenizer):
    with pytest.warns(UserWarning, match="the text gives 1 windows"):
        found = collected(text_llama(tokenizer), data="a short text", tokenizer=tokenizer)
    length = len(tokenizer("a short text", add_special_tokens=False)["input_ids"])
    assert {stats.tokens for stats in found.values()} == {length}


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ("", ValueError, "data holds no text"),
        ([], ValueError, "data holds no text"),
        (
            "texts/mine.txt",
            ValueError,
            "looks like a file: give Path",
        ),
        (
            [[1, 2, 3]],
            TypeError,
            "data is text: a string, a list of strings or a Path; token tensors go into data_loader",
        ),
    ],
)
def test_text_that_is_none(tokenizer, data, error, match):
    refused(text_llama(tokenizer), match, error=error, data=data, tokenizer=tokenizer)


def test_a_missing_text_file_is_named(tokenizer, tmp_path):
    path = tmp_path / "missing.txt"
    refused(text_llama(tokenizer), "missing.txt' is not a file: give a .txt or .jsonl", data=path, tokenizer=tokenizer)


@pytest.mark.parametrize("line", ['{"body": "x"}', "no json", "[1]"])
def test_a_line_without_text_is_named(tokenizer, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    message = 'bad.jsonl\' line 2: every line must be a JSON object with a "text" key'
    refused(text_llama(tokenizer), message, data=path, tokenizer=tokenizer)


# data that does not do ----------------------------------------------------------------------------------------------


def _used_up() -> object:
    batches = (batch for batch in token_batches())
    list(batches)
    return batches


@pytest.mark.parametrize("loader", [[], _used_up()], ids=["empty", "used up"])
def test_no_batches(loader):
    refused(tiny_llama(), "data_loader gives no batch: it is empty, or a generator .* used up", data_loader=loader)


@pytest.mark.parametrize("batch", [7, "text", None, []])
def test_a_batch_of_a_wrong_type_is_named(batch):
    kind = type(batch).__name__
    refused(tiny_llama(), f"a calibration batch is a {kind}: give tensors", error=TypeError, data_loader=[batch])


def test_a_list_from_collect_func_is_no_arguments():
    options = {"data_loader": token_batches(), "collect_func": lambda batch: [batch]}
    refused(tiny_llama(), "a calibration batch is a list", error=TypeError, **options)


def test_a_forward_loop_that_never_calls_the_model():
    refused(tiny_llama(), "forward_loop did not call the model; it must run model", forward_loop=lambda model: None)
    run_inner = lambda model: model.model(token_batches()[0])  # noqa: E731 - not the model that was given
    refused(tiny_llama(), "forward_loop did not call the model", forward_loop=run_inner)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.zeros(2, 8)},  # RuntimeError: no integers
        {"input_ids": torch.full((2, 8), 999)},  # IndexError: no such token
        {"tokens": torch.zeros(2, 8, dtype=torch.long)},  # ValueError: neither input_ids nor inputs_embeds
    ],
    ids=["floats", "unknown tokens", "wrong name"],
)
def test_a_batch_the_model_cannot_take(batch):
    """The error names the model, the batch with its shapes, and what to give instead."""
    message = refused(
        tiny_llama(),
        "LlamaForCausalLM cannot take calibration batch 1",
        data_loader=[{"input_ids": token_batches()[0]}, batch],
    )
    assert str(list(next(iter(batch.values())).shape)) in message
    assert "Give batches that model(**batch) or model(batch) takes, or a collect_func" in message


def test_images_of_a_wrong_size():
    model = ViTForImageClassification(
        ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16)
    )
    refused(model, "ViTForImageClassification cannot take calibration batch 0", data_loader=[torch.zeros(1, 3, 8, 8)])


class Stacked(nn.Module):
    """Residual blocks on vectors: [..., 16] -> [..., 16]. Subclasses say how the blocks are run."""

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([(block or Block)() for _ in range(blocks)])
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


STACKED = ["blocks.0", "blocks.1", "blocks.2"]


def vectors(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5 + index, 16, generator=generator) for index in range(count)]


Steps = list[list[str]]


def stepwise(model: nn.Module, sparse: nn.Module, batches: list, steps: Steps, real: Real = all_rows) -> Seen:
    """What each step's modules are given in a dense model whose earlier steps have the weights of the sparse one.

    The model is changed on the way.
    """
    expected = Seen()
    for step in steps:
        seen = brute_force(model, batches, step, real)
        expected.grams.update(seen.grams)
        expected.tokens.update(seen.tokens)
        make_sparse(model, sparse, step)
    return expected


def assert_calibrated(model: nn.Module, within: list[str], batches: list, sequential: str) -> nn.Module:
    """Sparsify the model; its statistics must be those of the whole model, with "block" half sparse: whatever stands
    before a block in the list ``within``."""
    dense = copy.deepcopy(model).eval()
    found = collected(model, within, data_loader=batches, sequential=sequential, min_tokens=1)
    steps = [within] if sequential == "none" else [[path] for path in within]
    assert_stats(found, stepwise(dense, model, batches, steps))
    return model


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


def test_a_layer_that_sees_no_data_is_named():
    message = refused(Stacked(block=Unused), "3 layers saw no calibration data", data_loader=vectors())
    assert "blocks.0.spare, blocks.1.spare, blocks.2.spare" in message
    assert "give data that reaches them, or exclude them" in message
    mts.sparsify(Stacked(block=Unused), "wanda", data_loader=vectors(), exclude="*.spare", progress=False)


def test_a_layer_that_needs_no_data_may_see_none():
    model = Stacked(block=Unused)
    rules = {"*.spare": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", data_loader=vectors(), rules=rules, progress=False)
    assert len(mts.verify(model, "2:4").layers) == 9


class Routed(Block):
    """One expert of two for each row, by the sign of its first entry; the second may be given nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        second = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[~second] = self.experts[0](x[~second])
        y[second] = self.experts[1](x[second])
        return super().forward(x + y)


def rows_of_experts(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """What the experts of the last block are given when the whole model runs, as plain hooks see it."""
    seen: dict[nn.Module, list[Tensor]] = {expert: [] for expert in model.blocks[-1].experts}
    hooks = [e.register_forward_pre_hook(lambda module, args: seen[module].append(args[0].double())) for e in seen]
    with torch.no_grad():
        for x in batches:
            model(x)
    for hook in hooks:
        hook.remove()
    return [torch.cat(rows) for rows in seen.values()]


@pytest.mark.parametrize("how", ["pool", "weight_only"])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@pytest.mark.parametrize("positive", [0, 3])
def test_an_expert_in_a_list_that_is_given_few_rows_or_none(how, sequential, positive):
    """It is filled up like a fused one, and the report says so; an empty input's zeros would prune by position."""
    model = Stacked(blocks=1, block=Routed)
    model.stem = nn.Identity()
    batches = [-x.abs() for x in vectors()]
    batches[0][:positive, 0] *= -1
    first, second = rows_of_experts(model, batches)
    assert len(second) == positive
    experts = ["blocks.0.experts.0", "blocks.0.experts.1"]
    found = collected(model, ["blocks.0"], data_loader=batches, min_tokens=8, experts=how, sequential=sequential)
    pool = first.T @ first + second.T @ second
    average = pool / (len(first) + len(second))
    expected = second.T @ second + (8 - positive) * average
    if how == "weight_only":
        expected = 8 * average.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    assert torch.allclose(found[experts[0]].gram.double(), first.T @ first, rtol=1e-5)
    assert torch.allclose(found[experts[1]].gram.double(), expected, rtol=1e-4, atol=1e-5)
    assert [found[name].tokens for name in experts] == [len(first), positive]
    notes = {layer.name: layer.notes for layer in mts.report(model).layers}
    done = {
        "pool": "were filled up to 8 from the tokens of all experts",
        "weight_only": "were solved by their weights alone",
    }
    assert notes[experts[1]] == [f"experts with fewer than 8 tokens {done[how]}: this one ({positive})"]
    assert notes[experts[0]] == []


def test_experts_none_of_which_is_given_rows_saw_no_data():
    class Idle(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return Block.forward(self, x)

    refused(
        Stacked(blocks=1, block=Idle),
        "2 layers saw no calibration data: blocks.0.experts.0, blocks.0.experts.1;",
        data_loader=vectors(),
    )


def test_all_tokens_of_experts_in_a_list_cannot_be_told():
    message = "layer 'blocks.0.experts.0': Linear is given nothing but the rows that are routed to it"
    refused(Stacked(blocks=1, block=Routed), message, data_loader=vectors(), experts="all_tokens")


def test_experts_that_are_given_some_rows_each():
    assert_calibrated(Stacked(block=Routed), STACKED, vectors(), "block")


def losing_rows() -> tuple[nn.Module, Tensor]:
    """A model of two blocks and its only batch: expert 1 of block 1 is given a row until block 0 is pruned."""
    model = Stacked(blocks=2, block=Routed)
    model.stem = nn.Identity()
    with torch.no_grad():
        # block 0 adds 3 - 1 to the first entry; the 3 comes by a weight that is pruned, as others are larger
        for parameter in model.blocks[0].parameters():
            parameter.zero_()
        model.blocks[0].up.bias[0] = 3.0
        model.blocks[0].down.weight[0, :4] = torch.tensor([1.0, 2.0, 2.0, 2.0])
        model.blocks[0].down.bias[0] = -1.0
    x = vectors()[0]
    x[:, 0] = torch.tensor([-9.0, -0.1, -0.1, -0.1, 0.1])  # both experts of each block see rows in the dense model
    return model, x


def test_an_expert_that_loses_its_rows_when_the_layers_before_it_are_pruned():
    """Those of its fellow stand in for them."""
    model, x = losing_rows()
    dense = model.blocks[1].experts[1].weight.detach().clone()
    rules = {"blocks.0.*": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", rules=rules, data_loader=[x], min_tokens=2, progress=False)
    first, second = rows_of_experts(model, [x])
    assert (len(first), len(second)) == (5, 0)
    expected = mts.NM(2, 4).mask(dense.double().abs() * first.square().sum(0).sqrt())
    assert torch.equal(model.blocks[1].experts[1].weight != 0, expected)


def test_an_expert_that_loses_its_rows_and_whose_fellow_is_not_looked_at():
    """An error that names the layer, not zeros; what is done by then stays sparse."""
    model, x = losing_rows()
    options = {"rules": {"blocks.0.*": {"method": "magnitude"}}, "exclude": "blocks.1.experts.0", "progress": False}
    with pytest.raises(ValueError, match=r"layer 'blocks.1.experts.1' saw no calibration data, now that the layers"):
        mts.sparsify(model, "wanda", data_loader=[x], **options)
    assert [name.split(".")[1] for name, _ in mts.named_masks(model)] == ["0"] * 4


class Between(Stacked):
    """Adds something between the blocks, so that none gets just what the one before it gave."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x + 0.5)
        return self.head(x)


class WrittenBetween(Stacked):
    """Adds something to what a block gave, in place, and not to the last row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x[:-1] += 0.5
            x = block(x)
        return self.head(x)


class Twice(Stacked):
    """Runs through its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Writing(Block):
    """Writes its result to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.up(x).relu()))


class WritingFirst(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Writing()


class WritingLater(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Writing()


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.9 ** self.state["depth"])


class Counting(Stacked):
    """The blocks read a state that the model writes between them."""

    def __init__(self) -> None:
        super().__init__(block=Scaled)
        self.state = {"depth": 0}
        for block in self.blocks:
            block.state = self.state

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for depth, block in enumerate(self.blocks):
            self.state["depth"] = depth
            x = block(x)
        return self.head(x)


class FromIterator(Block):
    def forward(self, x: Tensor, factors) -> Tensor:
        return super().forward(x * next(factors))


class Iterating(Stacked):
    """The blocks take their turn at an iterator."""

    def __init__(self) -> None:
        super().__init__(block=FromIterator)

    def forward(self, x: Tensor) -> Tensor:
        x, factors = self.stem(x), iter([1.0, 0.8, 0.6])
        for block in self.blocks:
            x = block(x, factors)
        return self.head(x)


class Popping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factors.pop())


class Exhausting(Stacked):
    """The blocks take their turn at a list that the model fills, and that is empty when they are run again."""

    def __init__(self) -> None:
        super().__init__(block=Popping)
        self.factors: list[float] = []
        for block in self.blocks:
            block.factors = self.factors

    def forward(self, x: Tensor) -> Tensor:
        self.factors[:] = [0.6, 0.8, 1.0]
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:stack 'blocks' is calibrated through the whole model")
def test_a_loop_may_be_in_inference_mode_for_a_part_of_the_data():
    """Statistics are ordinary tensors, which methods may go on with as they like."""

    def loop(model: nn.Module) -> None:
        first, *others = vectors()
        with torch.inference_mode():
            model(first)
        for batch in others:
            model(batch)

    found = collected(Between(), STACKED, forward_loop=loop, sequential="none")
    assert_stats(found, brute_force(Between(), vectors(), STACKED))
    assert not any(stats.gram.is_inference() or stats.square_sums.is_inference() for stats in found.values())


class Normed(Stacked):
    """A norm stands between the blocks, which is no block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.LayerNorm(16))
        self.blocks.insert(3, nn.LayerNorm(16))


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_what_stands_between_blocks_is_run_as_well(sequential):
    with pytest.warns(UserWarning, match="block 'blocks.2' does not take the output of the block before it"):
        assert_calibrated(Normed(), ["blocks.0", "blocks.2", "blocks.4"], vectors(), sequential)


WHOLE = {
    Between: "does not take the output of the block before it",
    WrittenBetween: "does not take the output of the block before it",
    Twice: "blocks are not called once each, in order",
    WritingFirst: "blocks write to their inputs",
    WritingLater: "blocks write to their inputs",
    Counting: "blocks run one by one do not give the model's own output",
    Iterating: "block 'blocks.0' is given a list_iterator, which may change as blocks run",
    Exhausting: r"block 'blocks.0' cannot be run by itself \(pop from empty list\)",
}


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_blocks_that_cannot_be_chained_are_calibrated_through_the_whole_model(kind, sequential):
    """Sparsify says so, and what it costs, in a warning and in the report; the statistics are right all the same."""
    model = kind()
    cost = "3 runs of the model over the data, one for each block, instead of two"
    with pytest.warns(UserWarning, match=f"stack 'blocks' is calibrated .* because .*{WHOLE[kind]}.*{cost}"):
        assert_calibrated(model, STACKED, vectors(), sequential)
    assert any(WHOLE[kind].split(r" \(")[0] in note for note in mts.report(model).notes)


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_blocks_that_can_be_chained_give_the_same_statistics_without_a_note(sequential):
    model = assert_calibrated(Stacked(), STACKED, vectors(), sequential)
    assert mts.report(model).notes == []


# padding ------------------------------------------------------------------------------------------------------------


def padded(side: str = "right") -> list[dict[str, Tensor]]:
    batches = []
    for seed, (rows, length) in enumerate(((3, 12), (2, 9))):
        ids, mask = ragged(rows, length, side, seed)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def test_padding_leaves_the_statistics_of_the_texts_alone():
    """A causal model sees nothing of padding on the right, so each text by itself gives the same sums."""
    alone = [ids[real.bool()][None] for batch in padded() for ids, real in zip(*batch.values())]
    expected = collected(tiny_llama(), data_loader=alone, sequential="none")
    for name, stats in collected(tiny_llama(), data_loader=padded(), sequential="none").items():
        assert stats.tokens == expected[name].tokens == sum(int(batch["attention_mask"].sum()) for batch in padded())
        torch.testing.assert_close(stats.gram, expected[name].gram, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int32])
def test_the_mask_may_have_any_dtype(mask_dtype):
    batches = [{**batch, "attention_mask": batch["attention_mask"].to(mask_dtype)} for batch in padded("left")]
    found = collected(tiny_llama(), data_loader=batches, sequential="none")
    real = lambda batch, name: batch["attention_mask"].bool()  # noqa: E731
    assert_stats(found, brute_force(tiny_llama(), padded("left"), LAYERS, real))


def test_a_mask_that_is_given_by_position_counts_as_well():
    batches = [tuple(batch.values()) for batch in padded()]  # Llama's second argument is attention_mask
    found = collected(tiny_llama(), data_loader=batches, collect_func=lambda batch: batch)
    assert_same(found, collected(tiny_llama(), data_loader=padded()))


def test_a_forward_loop_has_padding_too():
    found = collected(tiny_llama(), forward_loop=lambda model: [model(**batch) for batch in padded()])
    assert_same(found, collected(tiny_llama(), data_loader=padded()))


def test_count_padding_lets_padding_in():
    """Every row counts, and the report says that they did."""
    model = tiny_llama()
    found = collected(model, data_loader=padded(), sequential="none", count_padding=True)
    assert_stats(found, brute_force(tiny_llama(), padded(), LAYERS))
    assert {stats.tokens for stats in found.values()} == {3 * 12 + 2 * 9}
    assert mts.report(model).settings["count_padding"] is True


def causal(batch: dict[str, Tensor]) -> Tensor:
    length = batch["input_ids"].shape[1]
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def test_a_mask_that_does_not_say_which_tokens_are_padding():
    """Ready-made attention masks are refused, unless the user says that no token is padding."""
    batches = [{**batch, "attention_mask": causal(batch)} for batch in padded()]
    match = r"attention_mask has shape \[1, 1, 12, 12\], which does not say which tokens are padding: .* count_padding"
    refused(tiny_llama(), match, data_loader=batches)
    found = collected(tiny_llama(), data_loader=batches, sequential="none", count_padding=True)
    assert_stats(found, brute_force(tiny_llama(), batches, LAYERS))


def test_a_mask_that_is_no_tensor():
    """Gemma 3 takes one ready-made mask for each type of layer."""
    model = ARCHITECTURES["gemma3"].build()
    batches = [
        {"input_ids": b["input_ids"], "attention_mask": {"full_attention": causal(b), "sliding_attention": causal(b)}}
        for b in padded()
    ]
    refused(model, "attention_mask is a dict, which does not say which tokens are padding", data_loader=batches)
    mts.sparsify(model, data_loader=batches, count_padding=True, progress=False)


class Prefixed(Stacked):
    """Puts a learned token before each sequence."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        prefix = torch.ones(x.shape[0], 1, 16)
        return super().forward(torch.cat([prefix, x], 1))


def test_rows_that_cannot_be_matched_are_an_error_that_names_the_layer():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"x": torch.randn(2, 4, 16), "attention_mask": mask}
    match = (
        r"layer 'blocks.0.up' gets an input of shape \[2, 5, 16\], and the token mask has shape \[2, 4\]: which of "
        "its rows are padding cannot be told; give batches without padding, or set count_padding=True"
    )
    assert "cannot take calibration batch" not in refused(Prefixed(), match, data_loader=[batch])
    found = collected(Prefixed(), STACKED, data_loader=[batch], sequential="none", count_padding=True)
    assert_stats(found, brute_force(Prefixed(), [batch], STACKED))
    batch["attention_mask"] = torch.ones(2, 4)  # without padding there is nothing to match
    assert {stats.tokens for stats in collected(Prefixed(), STACKED, data_loader=[batch]).values()} == {10}


class Convolving(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mix(x.mT).mT)


class ConvolvingModel(Stacked):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_padding_of_a_convolution_cannot_be_told_even_when_the_shapes_agree():
    """Its input is [batch, channels, positions], and 16 channels look like 16 tokens."""
    mask = torch.arange(16) < torch.tensor([[16], [9]])
    batch = {"x": torch.randn(2, 16, 16), "attention_mask": mask}
    refused(ConvolvingModel(block=Convolving), r"layer 'blocks.0.mix' gets .* \[2, 16, 16\]", data_loader=[batch])
    mts.sparsify(ConvolvingModel(block=Convolving), data_loader=[batch], exclude="*.mix", progress=False)


def test_cross_attention_takes_the_mask_of_the_encoder_even_when_both_are_equally_long():
    """Keys and values are of encoder tokens, all else in the decoder of its own."""
    model = ARCHITECTURES["t5"].build()
    blocks = ARCHITECTURES["t5"].block_names(model)
    ids, mask = ragged(2, 9, "right", 0)
    decoder_mask = mask.flip(0).clone()
    decoder_mask[0, -1] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": decoder_mask}
    for name, stats in collected(model, blocks, data_loader=[batch]).items():
        of_encoder = name.startswith("encoder") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        assert stats.tokens == (mask if of_encoder else decoder_mask).sum(), name


def test_labels_say_which_decoder_tokens_are_padding():
    """Without decoder_attention_mask: -100 is what the loss ignores."""
    model = ARCHITECTURES["t5"].build()
    labels = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])
    batch = {"input_ids": ragged(2, 9, "right", 0)[0], "labels": labels}
    found = collected(model, ARCHITECTURES["t5"].block_names(model), data_loader=[batch])
    assert found["decoder.block.0.layer.0.SelfAttention.q"].tokens == 5
    assert found["decoder.block.0.layer.1.EncDecAttention.k"].tokens == 2 * 9


def _sequence_first() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)  # layers start as copies of one
    return model


@pytest.mark.parametrize("length", [7, 3], ids=["longer than the batch", "as long as the batch"])
def test_tokens_may_come_before_the_batch(length):
    """torch's default: inputs [sequence, batch, width] with masks [batch, sequence]."""
    _, mask = ragged(3, length, "right", 0)
    batch = {"src": torch.randn(length, 3, 16), "src_key_padding_mask": mask == 0}
    blocks = ["layers.0", "layers.1"]
    found = collected(_sequence_first(), blocks, data_loader=[batch], sequential="none")
    expected = brute_force(_sequence_first(), [batch], blocks, lambda batch, name: mask.bool().T)
    assert_stats(found, expected)


def test_two_padding_masks_that_differ():
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    tokens, mask = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    batch = {"src": tokens, "tgt": tokens, "src_key_padding_mask": mask, "tgt_key_padding_mask": mask.flip(0)}
    refused(model, "src_key_padding_mask and tgt_key_padding_mask differ", data_loader=[batch])


class CrossBlock(nn.Module):
    """Reads memory, which has padding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.up(self.attention(x, memory, memory, need_weights=False)[0])


class CrossModel(Stacked):
    def __init__(self) -> None:
        super().__init__(block=CrossBlock)

    def forward(self, x: Tensor, memory: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


class EncoderDecoder(CrossModel):
    """Memory is what an encoder gives, and its mask is the encoder's, as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.encoder = nn.ModuleList([Block(), Block()])

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def forward(self, x, memory, attention_mask=None, decoder_attention_mask=None) -> Tensor:
        for block in self.encoder:
            memory = block(memory)
        return super().forward(x, memory)


def test_queries_and_keys_of_one_attention_with_two_masks():
    """nn.MultiheadAttention's one weight meets both; each mask fits, but they are two."""
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    x = torch.randn(2, 4, 16)
    batch = {"x": x, "memory": x + 1, "attention_mask": mask, "decoder_attention_mask": mask.flip(0)}
    match = r"layer 'blocks.0.attention.in_proj_weight' gets .* the token mask of its queries is another one: which"
    refused(EncoderDecoder(), match, data_loader=[batch])
    batch["decoder_attention_mask"] = mask
    mts.sparsify(EncoderDecoder(), data_loader=[batch], progress=False)


def test_keys_that_are_longer_than_the_queries_match_no_mask_of_theirs():
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    batch = {"x": torch.randn(2, 4, 16), "memory": torch.randn(2, 6, 16), "attention_mask": mask}
    refused(CrossModel(), r"layer 'blocks.0.attention.in_proj_weight' gets .* \[2, 6, 16\]", data_loader=[batch])


# the walk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_what_is_sparse_when_a_layer_is_collected(sequential, side):
    """ "none": nothing; "block": the blocks before; "stage": the stages before it in its own block as well."""
    dense, model = tiny_llama(), tiny_llama()
    found = collected(model, data_loader=padded(side), sequential=sequential)
    steps: dict[str, Steps] = {
        "none": [LAYERS],
        "block": [[block] for block in LAYERS],
        "stage": [[f"{block}.{layer}" for layer in stage] for block in LAYERS for stage in STAGES],
    }
    real = lambda batch, name: batch["attention_mask"].bool()  # noqa: E731
    assert_stats(found, stepwise(dense, model, padded(side), steps[sequential], real))


def test_the_three_kinds_of_sequential_differ_where_they_should():
    """So that the test above can fail: first in o_proj for stages, in the second block for blocks."""
    by_block, by_stage, dense = (
        collected(tiny_llama(), data_loader=token_batches(), sequential=sequential)
        for sequential in ("block", "stage", "none")
    )

    def same(one: dict[str, mts.Stats], other: dict[str, mts.Stats]) -> list[str]:
        return [name for name in one if torch.allclose(one[name].gram, other[name].gram, rtol=1e-3)]

    assert same(by_block, dense) == [name for name in by_block if name.startswith(LAYERS[0])]
    assert same(by_stage, dense) == [f"{LAYERS[0]}.{layer}" for layer in STAGES[0]]
    assert same(by_stage, by_block) == [f"{block}.{layer}" for block in LAYERS for layer in STAGES[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_float32_or_better(dtype):
    """Half-precision inputs are summed as they are, in float32; float64 ones stay what they are."""
    found = collected(tiny_llama().to(dtype), data_loader=token_batches(), sequential="none")
    assert_stats(found, brute_force(tiny_llama().to(dtype), token_batches(), LAYERS))
    assert {stats.gram.dtype for stats in found.values()} == {torch.promote_types(dtype, torch.float32)}


def test_autocast_in_the_loop_is_what_the_statistics_are_of():
    """Blocks that are run again by themselves would run without it."""

    def loop(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for batch in token_batches():
                model(batch)

    expected = brute_force(tiny_llama(), [None], LAYERS, call=lambda model, batch: loop(model))
    with pytest.warns(UserWarning, match="blocks run one by one do not give the model's own output"):
        found = collected(tiny_llama(), forward_loop=loop, sequential="none")
    assert_stats(found, expected)


def test_a_users_own_autocast_is_refused():
    """It would round the solvers' products."""
    model = tiny_llama()
    before = state_of(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"leave it, and give autocast="):
        mts.sparsify(model, data_loader=token_batches())
    assert_same_state(model, before)


def test_layers_of_one_stage_share_their_statistics():
    found = collected(tiny_llama(), data_loader=token_batches(), sequential="stage")
    for block in LAYERS:
        for stage in STAGES:
            assert len({id(found[f"{block}.{layer}"]) for layer in stage}) == 1
    assert len({id(stats) for stats in found.values()}) == 8


def test_only_one_blocks_statistics_are_alive_at_a_time():
    """While a block, or with "stage" a stage, is collected, nothing is left of what was collected before it."""
    alive: list[weakref.ref] = []
    leftover = []

    class Watching(Recording):
        def prepare(self, stats, options):
            alive.append(weakref.ref(stats.gram))
            return stats

        def solve(self, weight, state, pattern, options):
            solution = super().solve(weight, state, pattern, options)
            self.seen.clear()
            return solution

    model = tiny_llama(num_hidden_layers=3)
    for block in model.model.layers:
        block.mlp.down_proj.register_forward_pre_hook(
            lambda *_: leftover.append(sum(reference() is not None for reference in alive))
        )
    for sequential in ("block", "stage", "none"):
        alive.clear()
        leftover.clear()
        mts.sparsify(model, Watching(), data_loader=token_batches(), sequential=sequential, progress=False)
        assert len(alive) == 12
        assert max(leftover) == 0, sequential


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_only_one_blocks_inputs_are_alive_in_the_dense_run(sequential):
    """The first batch goes through the whole model, however deep it is; each block's inputs go with it. The layers see
    what they share all the same."""
    inputs: list[list[weakref.ref]] = []
    leftover: list[int] = []

    def begin(*_) -> None:
        leftover.append(sum(reference() is not None for block in inputs for reference in block))
        inputs.append([])

    model = tiny_llama(num_hidden_layers=4)
    for block in model.model.layers:
        block.mlp.gate_proj.register_forward_pre_hook(begin)
        for layer in (block.mlp.gate_proj, block.mlp.down_proj):
            layer.register_forward_pre_hook(lambda _, args: inputs[-1].append(weakref.ref(args[0])))
    mts.sparsify(model, data_loader=token_batches(1), sequential=sequential, progress=False)
    assert len(leftover) >= 4
    assert max(leftover) == 0


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_methods_may_be_mixed_within_a_block(sequential):
    """A magnitude rule takes its layer out of the statistics' hands, and leaves those of the others alone."""
    dense, model, method = tiny_llama(), tiny_llama(), Recording()
    rules = {"*.v_proj": {"method": "magnitude"}, "model.layers.1.mlp.*": None}
    options = {"data_loader": token_batches(), "sequential": sequential, "progress": False}
    mts.sparsify(model, method, rules=rules, **options)
    found = method.by_layer(matrices_of(dense, LAYERS))
    recipes = {layer.name: layer.recipe for layer in mts.report(model).layers}
    assert {name for name, recipe in recipes.items() if recipe == "magnitude"} == {
        f"{block}.self_attn.v_proj" for block in LAYERS
    }
    assert found.keys() == {name for name, recipe in recipes.items() if recipe == "recording"}
    assert len(recipes) == 14 - 3
    by_magnitude = mts.sparsify(tiny_llama(), "magnitude").state_dict()
    for block in LAYERS:
        name = f"{block}.self_attn.v_proj.weight"
        assert torch.equal(model.get_parameter(name), by_magnitude[name])
    # Recording prunes by magnitude too: the statistics are those of a run in which all layers record
    everywhere = collected(tiny_llama(), data_loader=token_batches(), sequential=sequential, exclude="*.1.mlp.*")
    assert_same(found, {name: everywhere[name] for name in found})


def test_a_method_that_needs_square_sums_gets_no_gram_matrix():
    class Sums(Recording):
        needs = "square_sums"

        def by_layer(self, dense):
            return {name: stats for name, stats in super().by_layer(dense).items() if stats.gram is None}

    method = Sums()
    mts.sparsify(tiny_llama(), method, data_loader=padded(), sequential="none", progress=False)
    found = method.by_layer(matrices_of(tiny_llama(), LAYERS))
    real = lambda batch, name: batch["attention_mask"].bool()  # noqa: E731
    expected = brute_force(tiny_llama(), padded(), LAYERS, real)
    assert found.keys() == expected.grams.keys()
    for name, stats in found.items():
        torch.testing.assert_close(stats.square_sums, expected.grams[name].diagonal().float(), rtol=1e-5, atol=1e-5)


# what fails, and what is left -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    refused(model, r"layer 'model.layers.1.mlp.up_proj': its weight holds NaN or inf", data_loader=token_batches())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite(value):
    """The first layer that gets them is named; only batches that run into them are at fault."""
    model = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + value if output.shape[1] == 9 else output
    )
    batches = [*token_batches(1), *token_batches(1, length=9)]
    message = refused(
        model, r"layer 'model.layers.1.self_attn.q_proj': its input holds NaN or inf", data_loader=batches
    )
    assert "check the data" in message
    mts.sparsify(model, data_loader=batches[:1], progress=False)


class NanAtPadding(Stacked):
    """What stands at padding is NaN, as in attention over nothing."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x.masked_fill(attention_mask[..., None] == 0, float("nan")))


def test_padding_may_hold_nan():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    batch = {"x": torch.randn(2, 4, 16), "attention_mask": mask}
    found = collected(NanAtPadding(), STACKED, data_loader=[batch], sequential="none")
    expected = brute_force(NanAtPadding(), [batch], STACKED, lambda batch, name: mask.bool())
    assert_stats(found, expected)


def test_activations_that_overflow_once_the_layers_before_are_sparse():
    """A huge weight that a larger one kept in check: the layer behind is named, what is done stays sparse."""
    model = Stacked(blocks=2)
    with torch.no_grad():
        model.blocks[0].down.weight.zero_()
        model.blocks[0].down.weight[0, :4] = torch.tensor([-3e38, -3e38, 1e38, 0.0])
        model.blocks[0].up.weight.zero_()
        model.blocks[0].up.bias[:4] = torch.tensor([0.5, 0.5, 3.0, 0.0])
        model.blocks[0].down.bias.zero_()
    match = r"layer 'blocks.1.up': its input holds NaN or inf on the calibration data, now that the layers before it"
    mask_first = {"blocks.0.down": {"method": KeepLast(), "pattern": "1:4"}, "blocks.0.up": None}
    with pytest.raises(ValueError, match=match):
        mts.sparsify(model, Recording(), rules=mask_first, data_loader=vectors(), progress=False)
    assert [name for name, _ in mts.named_masks(model)] == ["blocks.0.down.weight"]


class KeepLast(mts.Method):
    """Keeps the third of every four weights, larger than life."""

    name = "keep last"

    def solve(self, weight, state, pattern, options) -> mts.Solution:
        mask = (torch.arange(weight.shape[-1]) % 4 == 2).expand(weight.shape).clone()
        return mts.Solution((weight * 3).masked_fill(~mask, 0), mask, 0.0)


class Pressed(Recording):
    """Ctrl-C in the solver, at the given layer."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def solve(self, weight, state, pattern, options):
        if len(self.seen) == self.at:
            raise KeyboardInterrupt
        return super().solve(weight, state, pattern, options)


def assert_half_done(model: nn.Module, snapshot: Snapshot, blocks_done: int, within: list[str]) -> None:
    """Flags and hooks as before, the first blocks sparse and valid, the others as they were."""
    modules_now, modules_then = snapshot.look()[0], snapshot.flags[0]
    assert [entry[1:] for entry in modules_now] == [entry[1:] for entry in modules_then]
    assert snapshot.look()[1:] == snapshot.flags[1:]
    for path in within[blocks_done:]:
        snapshot.assert_same_weights(f"{path}.")
        assert not any(name.startswith(path) for name, _ in mts.named_masks(model))
    for path in within[:blocks_done]:
        assert sum(name.startswith(path) for name, _ in mts.named_masks(model)) == len(matrices_of(model, [path]))
    if blocks_done:
        assert len(mts.verify(model, "2:4").layers) == len(matrices_of(model, within[:blocks_done]))


@pytest.mark.parametrize("sequential", ["block", "stage"])
def test_ctrl_c_in_the_solver(sequential):
    """In block 1: block 0 is sparse, block 1 is as it was, nothing else is left, and a second call works."""
    model = tiny_llama().train()
    snapshot = Snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        mts.sparsify(model, Pressed(7), data_loader=token_batches(), sequential=sequential, progress=False)
    assert_half_done(model, snapshot, 1, LAYERS)
    assert len(mts.report(model).layers) == 7
    mts.sparsify(model, data_loader=token_batches(), sequential=sequential, progress=False)
    assert len(mts.verify(model, "2:4").layers) == 14


def test_ctrl_c_in_the_solver_with_dense_inputs():
    model = tiny_llama()
    snapshot = Snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        mts.sparsify(model, Pressed(7), data_loader=token_batches(), sequential="none", progress=False)
    assert_half_done(model, snapshot, 1, LAYERS)


@pytest.mark.parametrize("kind", [Stacked, Between], ids=["chained", "whole model"])
@pytest.mark.filterwarnings("ignore:stack 'blocks' is calibrated through the whole model")
def test_ctrl_c_in_any_forward(kind):
    """Whichever call of a block it interrupts: blocks are sparse or untouched, from first to last, and nothing else
    is left."""
    calls, limit = 0, 0

    def press(*_) -> None:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise KeyboardInterrupt

    done = set()
    finished = False
    while not finished:
        model = kind()
        for block in model.blocks:
            block.register_forward_hook(press)
        snapshot = Snapshot(model)
        calls, limit = 0, limit + 1
        try:
            mts.sparsify(model, Recording(), data_loader=vectors(2), progress=False)
            finished = True
        except KeyboardInterrupt:
            blocks_done = len({name.split(".")[1] for name, _ in mts.named_masks(model)})
            assert_half_done(model, snapshot, blocks_done, STACKED)
            done.add(blocks_done)
    assert limit > 12
    assert done == {0, 1, 2}


def test_an_error_in_the_solver_names_the_layer():
    class Failing(Recording):
        def solve(self, weight, state, pattern, options):
            if len(self.seen) == 8:
                raise ValueError("no solution")
            return super().solve(weight, state, pattern, options)

    model = tiny_llama()
    snapshot = Snapshot(model)
    with pytest.raises(ValueError, match=r"layer 'model.layers.1.self_attn.k_proj': no solution"):
        mts.sparsify(model, Failing(), data_loader=token_batches(), progress=False)
    assert len(list(mts.named_masks(model))) == 8
    assert [entry[1:] for entry in snapshot.look()[0]] == [entry[1:] for entry in snapshot.flags[0]]


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_two_runs_are_bit_identical(sequential):
    runs = [tiny_llama(), tiny_llama()]
    for model in runs:
        mts.sparsify(model, data_loader=padded(), sequential=sequential, progress=False)
    one, other = (model.state_dict() for model in runs)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_a_model_in_training_mode_is_calibrated_in_evaluation_mode():
    """Dropout is off, and each module has its own flag afterwards."""
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    assert config.resid_pdrop > 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    blocks = ["transformer.h.0", "transformer.h.1"]
    expected = collected(copy.deepcopy(model), blocks, data_loader=token_batches())
    model.train()
    model.transformer.h[0].attn.eval()
    flags = [module.training for module in model.modules()]
    assert_same(collected(model, blocks, data_loader=token_batches()), expected)
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_whatever_gradient_mode_the_caller_is_in(mode, from_tensors):
    model = tiny_llama()
    with mode():
        assert_same(collected(model, data_loader=token_batches()), from_tensors)
    assert len(mts.verify(model, "2:4").layers) == 14
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_random_numbers_are_left_alone():
    """Calibration draws none from the global generator."""
    model, data = tiny_llama(), token_batches()
    state = torch.random.get_rng_state()
    mts.sparsify(model, data_loader=data, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state)


# layers and blocks out of the ordinary ------------------------------------------------------------------------------


class TwinBlock(Block):
    """Two modules that hold one Parameter, and see two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.second(self.first(x).relu()))


def added(expected: Seen, name: str, twin: str) -> None:
    """What ``twin`` sees counts for ``name``."""
    expected.grams[name] = expected.grams[name] + expected.grams.pop(twin)
    expected.tokens[name] += expected.tokens.pop(twin)


def without(dense: dict[str, Tensor], *twins: str) -> dict[str, Tensor]:
    return {name: matrix for name, matrix in dense.items() if name not in twins}


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_twins_in_one_block_see_the_inputs_of_both(sequential):
    """One layer, one mask on both modules, the sum of both inputs."""
    dense, model, method = Stacked(block=TwinBlock), Stacked(block=TwinBlock), Recording()
    mts.sparsify(model, method, data_loader=vectors(), sequential=sequential, progress=False)
    twins = [f"{path}.second" for path in STACKED]
    found = method.by_layer(without(matrices_of(dense, STACKED), *twins))
    stages = [["first", "second"], ["up"], ["down"]]
    steps: dict[str, Steps] = {
        "none": [STACKED],
        "block": [[path] for path in STACKED],
        "stage": [[f"{path}.{layer}" for layer in stage] for path in STACKED for stage in stages],
    }
    expected = stepwise(dense, model, vectors(), steps[sequential])
    for path in STACKED:
        added(expected, f"{path}.first", f"{path}.second")
    assert_stats(found, expected)
    for block in model.blocks:
        assert block.first.weight is block.second.weight
        assert torch.equal(block.first.weight_mask, block.second.weight_mask)
    assert len(mts.report(model).layers) == 9


class TwinsAcross(Stacked):
    """Blocks 0 and 2 share the weight of ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_twins_in_two_blocks_see_the_inputs_of_both(sequential):
    """A weight that several blocks use is solved with what all of them give it."""
    dense, model, method = TwinsAcross(), TwinsAcross(), Recording()
    mts.sparsify(model, method, data_loader=vectors(), sequential=sequential, progress=False)
    found = method.by_layer(without(matrices_of(dense, STACKED), "blocks.2.up"))
    twins = ["blocks.0.up", "blocks.2.up"]
    rest = ["blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.down"]
    steps: dict[str, Steps] = {
        "none": [twins + rest],
        "block": [twins, rest[:1], rest[1:3], rest[3:]],  # the first layer to be called is the first to be solved
        "stage": [twins, *([layer] for layer in rest)],
    }
    expected = stepwise(dense, model, vectors(), steps[sequential])
    added(expected, *twins)
    assert_stats(found, expected)


class Again(Block):
    """Calls one layer twice, with two inputs, of which the first is another layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(x) + self.mix(x)
        return super().forward(self.mix(y.relu()))


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_a_layer_that_is_called_twice_sees_both_inputs(sequential):
    """And shares its statistics with nobody who saw only one of them."""
    assert_calibrated(Stacked(block=Again), STACKED, vectors(), sequential)


class SameTwice(Block):
    """Both layers are called twice; but one of them with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        return super().forward(self.mix(x) + self.mix(y) + self.other(x) + self.other(x))


class Sometimes(Block):
    """Layers share an input in large batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x if len(x) > 5 else x * 2
        return super().forward(self.mix(x) + self.other(y))


class WrittenBetween(Block):
    """The second layer gets the tensor of the first one, with something else in it by then."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        z = self.mix(y)
        return super().forward(self.other(y.add_(z)) + z)


@pytest.mark.parametrize("block", [SameTwice, Sometimes, WrittenBetween])
@pytest.mark.parametrize("sequential", ["block", "none"])
def test_layers_that_share_some_of_their_inputs_share_no_statistics(block, sequential):
    assert_calibrated(Stacked(block=block), STACKED, vectors(), sequential)


@pytest.mark.filterwarnings("ignore:stack 'blocks' is calibrated through the whole model")
def test_sharing_that_changes_in_the_whole_model():
    assert_calibrated(Between(block=Sometimes), STACKED, vectors(), "block")


def test_a_tensor_that_was_written_to_is_another_stage():
    """What is written depends on the first layer, which must be sparse when the second one is collected."""
    dense, model, method = Stacked(block=WrittenBetween), Stacked(block=WrittenBetween), Recording()
    mts.sparsify(model, method, data_loader=vectors(), sequential="stage", progress=False)
    steps = [[f"{path}.{layer}"] for path in STACKED for layer in ("mix", "other", "up", "down")]
    assert_stats(method.by_layer(matrices_of(dense, STACKED)), stepwise(dense, model, vectors(), steps))


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_block_without_targets_is_run_through(left_out, sequential):
    """Leaving a whole block dense changes nothing in what the blocks behind it are given."""
    dense, model, method = Stacked(), Stacked(), Recording()
    path = STACKED[left_out]
    options = {"data_loader": vectors(), "sequential": sequential, "exclude": f"{path}.*", "progress": False}
    mts.sparsify(model, method, **options)
    rest = [other for other in STACKED if other != path]
    found = method.by_layer(matrices_of(dense, rest))
    Snapshot(dense).assert_same_weights(path)
    steps: dict[str, Steps] = {
        "none": [rest],
        "block": [[other] for other in rest],
        "stage": [[f"{other}.{layer}"] for other in rest for layer in ("up", "down")],
    }
    assert_stats(found, stepwise(dense, model, vectors(), steps[sequential]))


@pytest.mark.parametrize("sequential", ["block", "stage", "none"])
def test_the_stem_and_the_head_when_they_are_asked_for(sequential):
    """A stem is solved before the blocks see its sparse output, a head after all blocks; "none": on dense inputs."""
    dense, model, method = Stacked(), Stacked(), Recording()
    everything = ["stem", *STACKED, "head"]
    options = {"data_loader": vectors(), "sequential": sequential, "include": "*", "progress": False}
    mts.sparsify(model, method, **options)
    found = method.by_layer(matrices_of(dense, everything))
    assert len(found) == 8
    steps: dict[str, Steps] = {
        "none": [everything],
        "block": [[path] for path in everything],
        "stage": [["stem"], *([f"{path}.{layer}"] for path in STACKED for layer in ("up", "down")), ["head"]],
    }
    assert_stats(found, stepwise(dense, model, vectors(), steps[sequential]))


def test_one_layer_alone_outside_of_the_blocks():
    """An untied lm_head that is named in full is calibrated on what the dense blocks give it."""
    dense, model = tiny_llama(tie_word_embeddings=False), tiny_llama(tie_word_embeddings=False)
    found = collected(model, ["lm_head"], data_loader=padded(), include="lm_head")
    real = lambda batch, name: batch["attention_mask"].bool()  # noqa: E731
    assert_stats(found, brute_force(dense, padded(), ["lm_head"], real))
    assert [name for name, _ in mts.named_masks(model)] == ["lm_head.weight"]


def test_a_stem_convolution_alone():
    architecture = ARCHITECTURES["resnet_basic"]
    dense, batches = architecture.build(), architecture.batches("right")
    stem = next(name for name, module in dense.named_modules() if isinstance(module, nn.Conv2d))
    found = collected(architecture.build(), [stem], data_loader=batches, include=stem, pattern=0.5)
    assert_stats(found, brute_force(dense, batches, [stem]))


@pytest.mark.parametrize("use_cache", [False, True])
def test_generation_as_the_forward_loop(use_cache):
    """Blocks that fill a cache cannot be run again from a record."""
    ids = token_batches(1)[0][:, :5]

    def loop(model: nn.Module) -> None:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    expected = brute_force(tiny_llama(), [None], LAYERS, call=lambda model, batch: loop(model))
    with pytest.warns(UserWarning, match="is given a DynamicCache, which may change") if use_cache else nullcontext():
        found = collected(tiny_llama(), forward_loop=loop, sequential="none")
    assert_stats(found, expected)


class Nested(nn.Module):
    """Two stacks, one after the other, of which the second reads the first one's result in every block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = nn.ModuleList([Reader(), Reader()])  # module order is not the order of the calls
        self.early = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.early:
            memory = block(memory)
        for block in self.late:
            x = block(x, memory)
        return x


class Reader(Block):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x + self.read(memory))


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_stacks_are_taken_in_the_order_of_their_calls(sequential):
    assert_calibrated(Nested(), ["early.0", "early.1", "late.0", "late.1"], vectors(), sequential)


class Interleaved(nn.Module):
    """Two stacks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.ModuleList([Block(), Block()])
        self.other = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.one, self.other):
            x = other(one(x))
        return x


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_stacks_that_take_turns(sequential):
    with pytest.warns(UserWarning, match="does not take the output of the block before it"):
        assert_calibrated(Interleaved(), ["one.0", "one.1", "other.0", "other.1"], vectors(), sequential)


# what it costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequential", "begun", "ended", "last"),
    [("block", 4 + 4, 1 + 4, 1), ("stage", 4 * 4 + 4, 4 * 1 + 4, 4), ("none", 4, 4, 4)],
)
def test_how_often_a_block_runs(sequential, begun, ended, last):
    """The first batch in a dense run and for the self-check; then each of them once, or once for each stage, to collect
    (to the end in the first batch alone), and once to go on. Nothing is behind the last block. In "none" the run that
    collects goes on."""
    model = tiny_llama(num_hidden_layers=3)
    beginnings: list[int] = []
    ends: list[int] = []
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: beginnings.append(index))
        block.register_forward_hook(lambda *_, index=index: ends.append(index))
    mts.sparsify(model, data_loader=token_batches(4), sequential=sequential, progress=False)
    assert beginnings.count(1) == 2 + begun
    assert [ends.count(index) for index in range(3)] == [2 + ended, 2 + ended, 2 + last]


def test_later_stacks_are_recorded_without_what_is_behind_them():
    """What is behind the decoder runs for every batch that is not like an earlier one, in the dense run alone."""
    architecture = ARCHITECTURES["t5"]
    model, calls = architecture.build(), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    mts.sparsify(model, data_loader=architecture.batches("right") * 2, progress=False)
    assert len(calls) == 3


def test_a_layer_that_only_a_later_batch_reaches_is_calibrated():
    """The first batch reaches one expert alone; the others are like it, and would not be run as a whole."""
    model = Stacked(block=Routed)
    model.stem = nn.Identity()
    x = vectors()[0].abs()
    found = collected(model, STACKED, data_loader=[-x, torch.cat([x[:2], -x[2:]])])
    assert found["blocks.0.experts.0"].tokens == 2 * len(x) - 2
    assert found["blocks.0.experts.1"].tokens == 2


def test_each_distinct_tensor_is_recorded_once():
    """Masks and rotary tables are the same in every block and every batch of one length."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0

    def count_stored(batches: list[Tensor]) -> int:
        model = tiny_llama(num_hidden_layers=3)
        recorder = Recorder(mts.make_plan(model, "magnitude").stacks[0])
        recorder.start()
        with torch.no_grad():
            for batch in batches:
                recorder.begin(TokenMasks())
                model(batch, attention_mask=mask, use_cache=False)
        recorder.stop()
        assert recorder.problem is None
        assert len(recorder.records) == len(batches)
        return len({x.data_ptr() for record in recorder.records for call in record.calls for x in flat_tensors(call)})

    one = count_stored(token_batches(1))
    assert 1 + 3 <= one <= 1 + 5  # hidden states; mask, cosines, sines, and positions in one or two forms
    assert count_stored(token_batches(6)) == one + 5  # each further batch has other hidden states


def test_one_attention_called_on_itself_and_on_another_sequence_sums_both():
    """nn.MultiheadAttention used as self-attention and as cross-attention: q sees both queries, k and v their own."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, y, cross_first):
            calls = [(x, x, x), (y, x, x)]
            return [self.attention(*call, need_weights=False)[0] for call in (calls[::-1] if cross_first else calls)]

    x, y = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
    gram_x, gram_y = flat_x.T @ flat_x, flat_y.T @ flat_y
    expected = torch.stack([gram_x + gram_y, 2 * gram_x, 2 * gram_x])
    for cross_first in (False, True):
        grams = []

        class Watching(type(METHODS["sparsegpt"])):
            def prepare(self, stats, options):
                grams.append(stats.gram)  # noqa: B023 - one list for each pass of the loop
                return super().prepare(stats, options)

        mts.sparsify(Both().eval(), Watching(), data_loader=[(x, y, cross_first, {})], progress=False)
        torch.testing.assert_close(grams[0], expected)
