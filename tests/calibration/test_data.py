"""Calibration data in every form."""

from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import BatchEncoding

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import Call, digest_of
from modelopt_sparse.model.devices import map_batch
from tests.calibration.collecting import assert_same, collected
from tests.helpers import refused, tiny_llama, token_batches
from tests.oracles.brute_force import assert_stats, brute_force

pytestmark = pytest.mark.core


def _loader(*tensors: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


def _run_all(batches: list[Tensor], model: nn.Module) -> None:
    for batch in batches:
        model(input_ids=batch)


class Held(Dataset):
    """It has a length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)


class Endless(Held):
    """Its length alone says where it ends."""

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index % len(self)]


class Sized(Held, IterableDataset):
    """It has no entries by number."""

    def __iter__(self):
        return iter(self.batches)


IDS = torch.arange(3, 15).view(2, 6)
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
    "a Dataset": lambda x: {"data_loader": Endless(x)},
    "an IterableDataset with a length": lambda x: {"data_loader": Sized(x)},
    "generator": lambda x: {"data_loader": (batch for batch in x)},
    "tuples with keywords last": lambda x: {"data_loader": [(batch, {"use_cache": False}) for batch in x]},
    "collect_func, tensors": lambda x: {"data_loader": x, "collect_func": lambda batch: batch},
    "forward_loop": lambda x: {"forward_loop": partial(_run_all, x)},
    "forward_loop in inference mode": lambda x: {"forward_loop": torch.inference_mode()(partial(_run_all, x))},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_statistics(form, from_tensors):
    assert_same(collected(tiny_llama(), **FORMS[form](token_batches())), from_tensors)


LEFT_OUT = {  # batches of which the model takes the first entry -> whether another one may be an input
    "a label for each sample": ([(IDS, torch.ones(2))], False),
    "masks beside ids": ([(IDS, torch.ones(2, 6), torch.ones(2))], True),
    "samples in a list": ([[IDS[:1], IDS[1:]]], True),
    "two views and a label": ([([IDS, IDS], torch.ones(2))], True),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_entries_of_batches_that_may_be_inputs_are_noted_where_they_are_left_out(case):
    batches, noted = LEFT_OUT[case]
    model = mts.sparsify(tiny_llama(), "wanda", data_loader=batches * 2, progress=False)
    assert sum("first entry of each batch alone" in note for note in mts.report(model).notes) == noted


def test_max_batches_stops_early_and_draws_no_more():
    drawn = []
    batches = (drawn.append(1) or batch for batch in token_batches(5))
    found = collected(tiny_llama(), data_loader=batches, max_batches=2)
    assert_same(found, collected(tiny_llama(), data_loader=token_batches(5)[:2]))
    assert len(drawn) == 2


# what a batch holds ---------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Takes its input out of whatever it is given."""

    def __init__(self, take=lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take = take
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2)])

    def forward(self, batch) -> Tensor:
        x = self.take(batch)
        for block in self.blocks:
            x = x + block(x)
        return x


@dataclass(slots=True)
class Record:
    x: Tensor
    name: str = "a"


def rows(batches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (torch.rand(16, generator=generator).mul(3).exp() for _ in range(batches))
    return [torch.randn(9, 16, generator=generator) * size for size in sizes]


def of_dense(batches: list, take=lambda x: x, **options) -> dict[str, mts.Stats]:
    return collected(Dense(take), ["blocks.0", "blocks.1"], data_loader=batches, sequential="none", **options)


KINDS = {
    "a mapping": (lambda x: {"features": {"x": x}}, lambda batch: batch["features"]["x"]),
    "a tuple": (lambda x: (1, (x, "y")), lambda batch: batch[1][0]),
    "a dataclass": (Record, lambda batch: batch.x),
    "an object": (lambda x: SimpleNamespace(x=x), lambda batch: batch.x),
    "a BatchEncoding": (lambda x: BatchEncoding({"x": x}), lambda batch: batch.x),
    "objects in a list": (lambda x: [*map(Record, x)], lambda batch: torch.stack([each.x for each in batch])),
}


def of_array(x: Tensor) -> SimpleNamespace:
    return SimpleNamespace(x=x.numpy())


ARRAYS = {"an array": (Tensor.numpy, torch.tensor), "an array in an object": (of_array, lambda x: torch.tensor(x.x))}


@pytest.mark.parametrize("kind", ["a tensor", "numpy", "collect_func", *ARRAYS, *[*KINDS][:5]])
def test_a_batch_is_what_it_was_when_it_was_given(kind):
    """A loader may fill the same memory again for each batch."""
    make, take = (KINDS | ARRAYS).get(kind, (lambda x: x, lambda x: x))
    buffer = torch.empty(9, 16)
    shared = torch.from_numpy(buffer.numpy()) if kind == "numpy" else buffer
    given = make(shared)

    def fill(x: Tensor) -> tuple:
        buffer.copy_(x)
        return (given,)

    options = {"collect_func": fill} if kind == "collect_func" else {"collect_func": lambda batch: batch}
    batches = rows() if kind == "collect_func" else (fill(x) for x in rows())
    assert_same(of_dense(batches, take, **options), of_dense(rows()))
    loop = {"forward_loop": lambda model: [model(*fill(x)) for x in rows()], "sequential": "none"}
    assert_same(collected(Dense(take), ["blocks.0", "blocks.1"], **loop), of_dense(rows()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_is_of_what_objects_hold(kind):
    make, take = KINDS[kind]
    prints = []
    for batches in (rows(), rows(), rows()[::-1]):
        model = Dense(take)
        data = [(make(x),) for x in batches]
        mts.sparsify(model, "wanda", data_loader=data, collect_func=lambda batch: batch, progress=False)
        prints.append(mts.report(model).calibration)
    assert prints[0] == prints[1] != prints[2]
    assert prints[0]["calls"] == 4


def test_what_a_constant_in_an_object_says_is_in_the_fingerprint():
    prints = [digest_of([Call((Record(torch.ones(2), name),), {})]) for name in ("a", "a", "b")]
    assert prints[0] == prints[1] != prints[2]
    assert digest_of([Call(((torch.ones(2), Lock()),), {})]) == "unknown"


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_objects_move_as_well(kind):
    """To another device in a run; here to another dtype. What the user holds stays as it is."""
    make, take = KINDS[kind]
    batch = make(torch.ones(3, 4))
    moved = map_batch(lambda x: x.double(), batch)
    assert type(moved) is type(batch)
    assert (take(moved).dtype, take(batch).dtype) == (torch.float64, torch.float32)
    assert take(map_batch(lambda x: x, batch)) is take(batch) or kind == "objects in a list"


def nested(x: Tensor, layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc, nested])
@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors)")
def test_sparse_and_nested_batches(convert):
    """The statistics are those of the same rows in a plain tensor; and quality goes by them."""
    data, plain = [convert(x) for x in rows()], Dense().blocks[0]
    found = collected(Dense().blocks[0], [""], data_loader=data)
    assert_stats(found, brute_force(plain, rows(), [""]))
    mts.sparsify(plain, pattern="2:4", quality="balanced", data_loader=data, progress=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_is_refused():
    data = [nested(x, torch.strided) for x in rows()]
    refused(mts.sparsify, Dense(), match="make it with layout=torch.jagged", data_loader=data, error=TypeError)


COLLECTED = {
    "(batch,)": lambda batch: (batch,),
    "[batch]": lambda batch: [batch],
    "(batch, {})": lambda batch: (batch, {}),
    "keywords last": lambda batch: (batch, {"factor": 1.0}),
    "a list with keywords last": lambda batch: [batch, {"factor": 1.0}],
    "positional, with a mapping last": lambda batch: (batch, 1.0, {"any": "thing"}),
    "positional, a mapping alone": lambda batch: (batch, 1.0),
    "by name": lambda batch: {"features": batch},
}


@pytest.mark.parametrize("form", COLLECTED)
def test_what_collect_func_returns_is_what_the_model_gets(form):
    """A last mapping is keywords where the model names all of its keys."""

    class Features(Dense):
        def forward(self, features, factor=1.0, notes=None) -> Tensor:
            return super().forward(features["x"] * factor)

    data = [{"x": x} for x in rows()]
    options = {"data_loader": data, "collect_func": COLLECTED[form], "sequential": "none"}
    assert_same(collected(Features(), ["blocks.0", "blocks.1"], **options), of_dense(rows()))
