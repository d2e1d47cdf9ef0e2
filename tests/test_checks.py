"""Checks of option values, and plain values as YAML 1.2 reads them."""

import pytest
import yaml
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.checks import LONGEST, Yaml, check_number, check_whole, read_yaml, shown

REFUSED = [
    (check_whole, 1, (2,), "x=1: must be a whole number of at least 2"),
    (check_number, 0, ("(0, 1]",), r"x=0: must be a number in (0, 1]"),
    (check_number, 1.5, ("(0, 1]",), r"x=1.5: must be a number in (0, 1]"),
    (check_number, 1, ("[0, 1)",), r"x=1: must be a number in [0, 1)"),
    (check_number, -0.1, ("[0, 1)",), r"x=-0.1: must be a number in [0, 1)"),
    (check_number, float("nan"), ("[0, 1]",), r"x=nan: must be a number in [0, 1]"),
    (check_number, True, ("[0, 1]",), r"x=True: must be a number in [0, 1]"),
    (check_number, None, ("[0, 1]",), r"x=None: must be a number in [0, 1]"),
]


@pytest.mark.parametrize(("check", "value", "more", "message"), REFUSED)
def test_a_value_that_is_refused(check, value, more, message):
    with pytest.raises(ValueError, match=r"^x=") as caught:
        check("x", value, *more)
    assert str(caught.value) == message


def test_values_that_are_accepted():
    check_number("x", 1, "(0, 1]")
    check_number("x", 0, "[0, 1)")
    check_number("x", 0.5, "(0, 1)")


PLAIN = [
    *((text, text) for text in ("2:4", "8:16", "50%", "none", "yes", "2026-01-02")),  # of 2:4 YAML 1.1 makes 124
    ("0.5", 0.5),
    (".5", 0.5),
    ("1e-2", 0.01),  # text in YAML 1.1
    ("1.5e+3", 1500.0),
    ("12", 12),
    ("-3", -3),
    ("0", 0),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("[2:4, 1e-2, {a: 4:8}]", ["2:4", 0.01, {"a": "4:8"}]),
    ("'12'", "12"),
]


@pytest.mark.parametrize(("text", "value"), PLAIN)
def test_plain_yaml_values(text, value):
    found = yaml.load(text, Yaml)
    assert found == value
    assert type(found) is type(value)
    assert yaml.safe_load("2:4") == 124  # the reader of everybody else is untouched


@pytest.mark.parametrize("option", ["pattern", "include", "rules", "seq_len", "polish", "reconstruct", "quality", "x"])
def test_long_values_are_shortened_in_messages(option):
    """330 bytes of YAML anchors, and a name of a megabyte."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcd", "bcde", strict=True)]
    value = read_yaml("\n".join(lines), "bomb")["e"]
    options = {"x" * 2**20: 1} if option == "x" else {option: value}
    with pytest.raises((ValueError, TypeError)) as caught:
        mts.make_plan(nn.Linear(8, 8), "magnitude", options)
    assert len(str(caught.value)) < 2000
    with pytest.raises(ValueError, match="sparsity") as caught:
        mts.training.configure({"sparsity": {"algorithm": "rigl", "sparsity": value}})
    assert len(str(caught.value)) < 2000


def test_a_value_is_shown_whole_or_by_its_beginning():
    path = "folder/" * 40
    assert shown(path) == repr(path)
    nested = [[["x" * 20] * 6] * 6] * 6
    assert shown(nested) == f"{repr(nested)[:LONGEST]} ..."
    assert len(shown("x" * 10**6)) <= LONGEST + 4
