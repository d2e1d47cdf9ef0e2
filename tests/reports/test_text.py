"""Tables that fold: nothing is lost, what deviates is seen, and it fits the terminal."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.checkpoint.verify import Verification, Verified
from modelopt_sparse.reports.text import Column, counted, fold, folded_names, paragraph, rows_of, table
from tests.helpers import tiny_llama, token_batches
from tests.reports.pages import assert_golden, full_report, shrunk_report

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


@cache
def llama_8b() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**LLAMA_8B, num_key_value_heads=8, vocab_size=128256))


@cache
def mixtral() -> MixtralForCausalLM:
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=32))


def unfolded(label: str, among: Iterable[str]) -> set[str]:
    """The oracle: the names that a folded name means, by looking at each part of each of them."""

    def means(said: str, part: str) -> bool:
        if said == part:
            return True
        if not part.isdigit() or str(int(part)) != part:
            return False
        if said == "*":
            return True
        runs = [run.split("-") for run in said.split(",")] if re.fullmatch(r"(0|[1-9]\d*)([,-][1-9]\d*)*", said) else []
        return any(int(run[0]) <= int(part) <= int(run[-1]) for run in runs)

    pairs = {name: zip_longest(label.split("."), name.split("."), fillvalue="") for name in among}
    return {name for name in pairs if all(means(*pair) for pair in pairs[name])}


def assert_fits(text: str, width: int = 100) -> None:
    assert max(map(len, text.splitlines())) <= width, max(text.splitlines(), key=len)


# names ----------------------------------------------------------------------------------------------------------------

parts = st.sampled_from(["layers", "mlp", "0", "1", "2", "3", "4", "7", "11", "01", "fc1"])
some_names = st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), unique=True, max_size=25)


@settings(max_examples=100, deadline=None)
@given(some_names, some_names, st.randoms(use_true_random=False))
def test_unfolding_gives_back_every_name_once(names, more, chance):
    everything = {*names, *more}
    more = sorted(everything - {*names})
    keys = [chance.choice("aab") for _ in names]
    rows = fold(names, keys, more)
    for label, indices in rows:
        assert unfolded(label, everything) == {names[index] for index in indices}
        assert len({keys[index] for index in indices}) == 1
    assert sorted(index for _, indices in rows for index in indices) == list(range(len(names)))
    firsts = [min(indices) for _, indices in rows]
    assert firsts == sorted(firsts)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_whole_stack_is_one_row_and_a_deviating_layer_another(blocks, experts, chance):
    names = [f"h.{block}.experts.{expert}.w" for block in range(blocks) for expert in range(experts)]
    ((label, indices),) = fold(names, [0] * len(names))
    assert len(indices) == len(names)
    assert label == f"h.{'*' if blocks > 1 else 0}.experts.{'*' if experts > 1 else 0}.w"
    odd = chance.randrange(len(names))
    rows = fold(names, [index == odd for index in range(len(names))])
    assert (names[odd], [odd]) in rows
    assert len(rows) <= 4


FOLDED = [
    (["a.0.q", "a.1.q", "a.0.k", "a.1.k"], [], ["a.*.q x2", "a.*.k x2"]),
    ([f"a.{i}.q" for i in (0, 1, 2, 3, 7, 9, 10)], ["a.4.q"], ["a.0-3,7,9,10.q x7"]),
    (["0", "2", "4"], [], ["0,2,4 x3"]),
    (["a.3.q"], ["a.4.q"], ["a.3.q"]),
    (["features.0.conv.1", "features.0.conv.2"], [], ["features.0.conv.* x2"]),
    (["a.0.e.0", "a.0.e.1", "a.1.e.0"], ["a.1.e.1"], ["a.0.e.* x2", "a.1.e.0"]),
    (["a.01.q", "a.1.q"], [], ["a.01.q", "a.1.q"]),
    ([], ["a"], []),
]


@pytest.mark.parametrize(("names", "among", "folded"), FOLDED)
def test_names(names: list[str], among: list[str], folded: list[str]):
    assert folded_names(names, among) == folded


# cells ----------------------------------------------------------------------------------------------------------------


def test_cells_of_a_folded_row():
    names = [f"h.{i}.up" for i in range(6)]
    notes = ["", "", *(f"row 7: {i} of 64 (1) dead" for i in (5, 12, 7)), "layer h.5.up: odd"]
    columns = [
        Column("recipe", ["wanda"] * 5 + ["ria"]),
        Column("pattern", ["2:4", "2:4", "4:8", "4:8", "4:8", "4:8"], "levels"),
        Column("error", ["0.5 -> 0.25", "0.10 -> 0.7", "0.01%", "1e-05%", "1,234%", "3"], "range"),
        Column("same", ["x"] * 6),
        Column("empty", [""] * 6),
        Column("notes", notes, "range", below=True),
    ]
    lines = rows_of("layer", names, columns).splitlines()
    assert lines[:2] == ["In every row: same x.", ""]
    assert lines[2].split() == ["layer", "recipe", "pattern", "error", "notes"]
    assert [re.split(" {2,}", line) for line in lines[4:7]] == [
        ["h.0,1.up", "x2", "wanda", "2:4", "0.10..0.5 -> 0.25..0.7"],
        ["h.2-4.up", "x3", "wanda", "4:8", "1e-05..1,234%", "[1]"],
        ["h.5.up", "ria", "4:8", "3", "[2]"],
    ]
    assert lines[7:] == ["", "[1] row 7: 5..12 of 64 (1) dead", "[2] layer h.5.up: odd"]


NO_NUMBERS = [("2:4", "2:8"), ("2:4", "4:4"), ("a.3.b", "a.4.b"), ("fp8 v2", "fp8 v3"), ("torch 2.1.0", "torch 3.1.0")]


@pytest.mark.parametrize("cells", NO_NUMBERS)
def test_patterns_names_and_versions_are_no_numbers(cells):
    assert len(rows_of("layer", ["h.0", "h.1"], [Column("x", cells, "range")]).splitlines()) == 4, "they do not fold"


@pytest.mark.parametrize("levels", [4, 5])
def test_many_levels_are_a_range_and_few_are_rows(levels):
    names = [*(f"h.{i}.up" for i in range(10)), "head"]
    column = Column("pattern", [*(f"{50 + i % levels}.5% per row" for i in range(10)), "2:4"], "levels")
    lines = rows_of("layer", names, [column]).splitlines()[2:-1]
    assert len(lines) == (4 if levels == 4 else 1)
    assert lines[0].endswith("50.5% per row" if levels == 4 else "50.5..54.5% per row")


cells = st.text("ab.,+ 01", max_size=150)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=4))
def test_a_table_fits_and_loses_no_letter(rows):
    rows = [tuple(cell.strip() for cell in row) for row in rows]
    head = ("a", "b", "c")
    text = table(head, rows, 100)
    names, *others = zip(*rows)
    widths = [max(map(len, names))]
    for each in others:
        words = [word for cell in each for word in re.split("[ ,+]", cell)]
        widths.append(min(max(map(len, each)), max(14, 3 + max(map(len, words)))))
    assert max(map(len, text.splitlines())) <= max(100, sum(widths) + 4), "names and words are not broken"
    for name in filter(None, names):
        assert any(line.startswith(name) for line in text.splitlines()[2:])

    def letters(words: Iterable[str]) -> Counter[str]:
        return Counter("".join(words).replace(" ", "").replace("-", ""))

    assert letters(text.splitlines()) == letters([*head, *(cell for row in rows for cell in row)])
    if max(sum(map(len, row)) for row in rows) < 30:
        assert text == table(head, rows)


def test_a_long_cell_goes_on_where_it_can_be_broken():
    text = table(("layer", "why"), [("model.layers.0,2,4.self_attn.q_proj", "because " * 12 + "it is.")], 60)
    first = "model.layers.0,2,4.self_attn.q_proj  because because because"
    others = [f"{'':39}{end}" for end in (*["because because"] * 4, "because it is.")]
    assert text.splitlines()[2:] == [first, *others]
    name, word = "model.layers.0,2,4.a + b.self_attn.q_proj", "w" * 30
    lines = table(("layer", "why"), [(name, f"because {word}")], 60).splitlines()[2:]
    assert lines == [f"{name}  because", f"{'':{len(name)}}    {word}"]


def test_columns_of_fourteen_letters_are_not_narrowed():
    assert table(("fourteenletter", "why"), [("a", "b")], 10) == table(("fourteenletter", "why"), [("a", "b")])


def test_what_occurs_is_counted():
    assert (counted(["2:4"] * 3), counted(["a", "b", "b"]), counted([])) == ("2:4", "b x2; a x1", "")
    assert counted("abcde") == "a x1; b x1; c x1; and 2 more"


# what is printed ------------------------------------------------------------------------------------------------------


RULES = {"model.layers.0.*": None, "*.layers.[57].*k_proj": {"method": "wanda"}, "*s.3.*q_proj": {"pattern": "30%"}}


@cache
def reported() -> mts.Report:
    """Of a run with a layer that deviates, with figures that are not measured."""
    model = tiny_llama(num_hidden_layers=4)
    rules = {"*.2.*up_proj": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", data_loader=token_batches(2), rules=rules, reconstruct=1, progress=False)
    report = mts.report(model)
    report.layers = [replace(each, error=0.01 * i, seconds=0.25, steps=[]) for i, each in enumerate(report.layers)]
    figures = {"error_before": 0.5, "error_after": 0.125, "epoch": 1, "seconds": 1.5}
    report.blocks = [replace(each, **figures) for each in report.blocks]
    return report


def planned(model: PreTrainedModel, method: str, **options) -> mts.Plan:
    """Without notes, which tell how much memory this machine has."""
    return replace(mts.make_plan(model, method, **options), notes=())


def verified() -> Verification:
    """Of twelve layers one breaks its pattern."""
    problems = ["1 group holds 3" if i == 5 else "" for i in range(12)]
    return Verification(tuple(Verified(f"h.{i}.up", "2:4", 8, 16, problem) for i, problem in enumerate(problems)))


PRINTED = {  # what is printed, and how many layers it has
    "plan": (lambda: planned(llama_8b(), "sparsegpt"), 224),
    "plan-with-rules": (lambda: planned(llama_8b(), "alps", rules=RULES), 217),
    "plan-of-a-mixture": (lambda: planned(mixtral(), "alps", rules=RULES), 186),
    "report": (reported, 28),
    "full-report": (full_report, 6),
    "report-of-a-smaller-model": (shrunk_report, 2),
    "verification": (verified, 12),
    "training-plan": (lambda: training.SET(0.9, include="default").plan(llama_8b()), 224),
    "plan-of-sparse-ift": (lambda: training.sparse_ift(tiny_llama(num_hidden_layers=3), 0.75).plan, 21),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_the_golden_text(name):
    build, layers = PRINTED[name]
    printed = build()
    assert_fits(str(printed), 112)  # names are not broken
    assert_golden(name, str(printed))
    assert len(printed.text(all_rows=True).splitlines()) > layers >= len(re.findall(r" x\d", str(printed)))


def test_a_paragraph_fits_and_breaks_no_name():
    text = paragraph("stays dense: " + ", ".join(f"model.layers.{i}.block_sparse_moe.gate" for i in range(9)))
    assert_fits(text)
    assert all(f"model.layers.{i}.block_sparse_moe.gate" in text for i in range(9))
