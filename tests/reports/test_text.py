"""Tables that fold: nothing is lost, what deviates is seen, and it fits the terminal."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.checkpoint.verify import Verification, Verified
from modelopt_sparse.reports.text import NUMBER, Column, counted, fold, folded_names, paragraph, rows_of, table
from tests.helpers import tiny_llama, token_batches

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


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

    def meant(name: str) -> bool:
        pairs = list(zip_longest(label.split("."), name.split("."), fillvalue=""))
        return all(means(*pair) for pair in pairs)

    return {name for name in among if meant(name)}


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


@pytest.mark.parametrize(
    ("names", "among", "folded"),
    [
        (["a.0.q", "a.1.q", "a.0.k", "a.1.k"], [], ["a.*.q x2", "a.*.k x2"]),
        ([f"a.{i}.q" for i in (0, 1, 2, 3, 7, 9, 10)], ["a.4.q"], ["a.0-3,7,9,10.q x7"]),
        (["0", "2", "4"], [], ["0,2,4 x3"]),
        (["a.3.q"], ["a.4.q"], ["a.3.q"]),
        (["features.0.conv.1", "features.0.conv.2"], [], ["features.0.conv.* x2"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0"], ["a.1.e.1"], ["a.0.e.* x2", "a.1.e.0"]),
        (["a.01.q", "a.1.q"], [], ["a.01.q", "a.1.q"]),
        ([], ["a"], []),
    ],
)
def test_names(names: list[str], among: list[str], folded: list[str]):
    assert folded_names(names, among) == folded


# cells ----------------------------------------------------------------------------------------------------------------


def test_cells_of_a_folded_row():
    names = [f"h.{i}.up" for i in range(6)]
    columns = [
        Column("recipe", ["wanda"] * 5 + ["ria"]),
        Column("pattern", ["2:4", "2:4", "4:8", "4:8", "4:8", "4:8"], "levels"),
        Column("error", ["0.5 -> 0.25", "0.10 -> 0.7", "0.0001", "1e-05", "1,234", "3"], "range"),
        Column("same", ["x"] * 6),
        Column("empty", [""] * 6),
        Column(
            "notes", ["", "", "5 of 64 dead", "12 of 64 dead", "7 of 64 dead", "layer h.5.up: odd"], "range", below=True
        ),
    ]
    lines = rows_of("layer", names, columns).splitlines()
    assert lines[:2] == ["In every row: same x.", ""]
    assert lines[2].split() == ["layer", "recipe", "pattern", "error", "notes"]
    assert [re.split(" {2,}", line) for line in lines[4:7]] == [
        ["h.0,1.up", "x2", "wanda", "2:4", "0.10..0.5 -> 0.25..0.7"],
        ["h.2-4.up", "x3", "wanda", "4:8", "1e-05..1,234", "[1]"],
        ["h.5.up", "ria", "4:8", "3", "[2]"],
    ]
    assert lines[7:] == ["", "[1] 5..12 of 64 dead", "[2] layer h.5.up: odd"]


@pytest.mark.parametrize("levels", [4, 5])
def test_many_levels_are_a_range_and_few_are_rows(levels):
    names = [f"h.{i}.up" for i in range(10)]
    column = Column("pattern", [f"{50 + i % levels}.5% per row" for i in range(10)], "levels")
    lines = rows_of("layer", [*names, "head"], [replace(column, cells=[*column.cells, "2:4"])]).splitlines()[2:-1]
    assert len(lines) == (4 if levels == 4 else 1)
    assert lines[0].endswith("50.5% per row" if levels == 4 else "50.5..54.5% per row")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.0123 -> 0.5, 12 of 1,024 (3)", ["0.0123", "0.5", "12", "1,024", "3"]),
        ("2:4 and 4:8", []),
        ("layers.3.mlp fp8 v2", []),
        ("torch 2.13.0", []),
        ("50.00% 1e-05 2.5e+03", ["50.00", "1e-05", "2.5e+03"]),
        ("row 7: 3", ["7", "3"]),
    ],
)
def test_numbers_in_a_cell(text, numbers):
    assert NUMBER.findall(text) == numbers


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
    assert text.splitlines()[2:] == [
        "model.layers.0,2,4.self_attn.q_proj  because because because",
        "                                       because because",
        "                                       because because",
        "                                       because because",
        "                                       because because",
        "                                       because it is.",
    ]
    name, word = "model.layers.0,2,4.a + b.self_attn.q_proj", "w" * 30
    assert table(("layer", "why"), [(name, f"because {word}")], 60).splitlines()[2:] == [
        f"{name}  because",
        f"{'':{len(name)}}    {word}",
    ]


def test_columns_of_fourteen_letters_are_not_narrowed():
    table_of = (("fourteenletter", "why"), [("a", "b")])
    assert table(*table_of, 10) == table(*table_of)


def test_what_occurs_is_counted():
    assert counted(["2:4"] * 3) == "2:4"
    assert counted(["a", "b", "b"]) == "b x2; a x1"
    assert counted("abcde") == "a x1; b x1; c x1; and 2 more"
    assert counted([]) == ""


# what is printed ------------------------------------------------------------------------------------------------------


def rows_in(text: str, head: str) -> dict[str, int]:
    """The rows of a printed table: folded name -> how many layers."""
    (block,) = (block for block in text.split("\n\n") if block.startswith(head))
    rows = [re.match(r"(\S+)(?: +x(\d+) )?", line) for line in block.splitlines()[2:] if not line.startswith(" ")]
    return {row[1]: int(row[2] or 1) for row in rows if row}


def test_the_plan_of_a_large_model_is_read_at_a_glance():
    plan = mts.make_plan(llama_8b(), "sparsegpt")
    text = str(plan)
    assert_fits(text)
    assert len(text.splitlines()) <= 40
    assert text.startswith(
        "224 layers with 6,979,321,856 of 8,029,995,008 matrix weights will be pruned: sparsegpt 2:4.\n"
    )
    rows = rows_in(text, "layer ")
    assert set(rows.values()) == {32}
    assert list(rows)[4] == "model.layers.*.mlp.gate_proj"
    assert len(rows) == 7
    assert len(plan.text(all_rows=True).splitlines()) > 224


def test_the_plan_shows_what_deviates():
    rules = {"model.layers.0.*": None, "*.layers.[57].*k_proj": {"method": "wanda"}, "*s.3.*q_proj": {"pattern": "30%"}}
    for model, count in ((llama_8b(), 217), (mixtral(), 186)):
        plan = mts.make_plan(model, "alps", rules=rules)
        text = str(plan)
        assert_fits(text, 112)  # its names are not broken
        assert plan.text(all_rows=True).count("\n") > 190
        said = " ".join(text.split())
        assert f"{count} layers with" in said
        assert "alps 30% per matrix x1" in said
        assert "damping=0.01 iterations=300" in said
        assert "left dense by rule 'model." in said
    rows = rows_in(str(mts.make_plan(llama_8b(), "alps", rules=rules)), "layer ")
    assert sum(rows.values()) == 217
    assert rows["model.layers.1-4,6,8-31.self_attn.k_proj"] == 29
    assert rows["model.layers.5,7.self_attn.k_proj"] == 2
    assert rows["model.layers.3.self_attn.q_proj"] == 1
    assert rows["model.layers.1-31.mlp.up_proj"] == 31


def test_the_plan_of_a_mixture():
    text = str(mts.make_plan(mixtral(), "sparsegpt"))
    assert_fits(text)
    assert rows_in(text, "layer ")["model.layers.*.mlp.experts.gate_up_proj"] == 32
    assert rows_in(text, "stays dense ") == {"model.embed_tokens": 1, "model.layers.*.mlp.gate": 32, "lm_head": 1}


def test_the_report_folds_and_unfolds():
    model = tiny_llama(num_hidden_layers=4)
    rules = {"*.2.*up_proj": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", data_loader=token_batches(2), rules=rules, reconstruct=1, progress=False)
    report = mts.report(model)
    text = str(report)
    assert_fits(text)
    assert text.startswith("28 layers pruned, 50.00% zeros, ")
    assert ": wanda+reconstruct 2:4 x27; magnitude+reconstruct 2:4 x1." in " ".join(text.split())
    rows = rows_in(text, "layer ")
    assert sum(rows.values()) == 28
    assert rows["model.layers.*.mlp.gate_proj"] == 4
    assert rows["model.layers.0,1,3.mlp.up_proj"] == 3
    assert rows["model.layers.2.mlp.up_proj"] == 1
    assert rows_in(text, "reconstructed ") == {"model.layers.*": 4}
    errors = sorted(layer.error or 0.0 for layer in report.layers if layer.name.endswith("gate_proj"))
    assert f"{errors[0]:.4f}..{errors[-1]:.4f}" in text
    whole = rows_in(report.text(all_rows=True), "layer ")
    assert list(whole) == [layer.name for layer in report.layers]
    before = report.to_json()
    assert json.loads(before) == json.loads(json.dumps(report.as_dict()))
    assert len(json.loads(before)["layers"]) == 28


def test_the_verification_shows_the_layer_that_breaks_its_pattern():
    layers = [Verified(f"h.{i}.up", "2:4", 8, 16, "1 group holds 3" if i == 5 else "") for i in range(12)]
    text = str(Verification(tuple(layers)))
    assert text.splitlines()[0] == "1 of 12 layers do not hold their pattern: 2:4. 96 of 192 weights are zero."
    assert re.search(r"^h\.0-4,6-11\.up +x11 +ok$", text, re.MULTILINE)
    assert re.search(r"^h\.5\.up +1 group holds 3$", text, re.MULTILINE)
    assert Verification(tuple(layers)).text(all_rows=True).count("ok") == 11


def test_the_training_plan_and_the_plan_of_sparse_ift():
    plan = training.SET(0.9, include="default").plan(llama_8b())
    assert_fits(str(plan))
    assert str(plan).startswith("224 parameters sparse, 90.00% zeros at the start.\n")
    assert "model.layers.*.post_attention_layernorm.weight x32" in str(plan)
    assert set(rows_in(str(plan), "parameter ").values()) == {32}
    assert len(rows_in(plan.text(all_rows=True), "parameter ")) == 224
    ift = training.sparse_ift(tiny_llama(num_hidden_layers=3), 0.75).plan
    assert_fits(str(ift))
    assert sum(rows_in(str(ift), "layer ").values()) == len(ift.layers)
    assert len(rows_in(str(ift), "layer ")) == 7
    assert len(rows_in(ift.text(all_rows=True), "layer ")) == 21


def test_a_paragraph_fits_and_breaks_no_name():
    text = paragraph("stays dense: " + ", ".join(f"model.layers.{i}.block_sparse_moe.gate" for i in range(9)))
    assert_fits(text)
    assert all(f"model.layers.{i}.block_sparse_moe.gate" in text for i in range(9))
