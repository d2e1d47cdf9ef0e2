"""Plain values as YAML 1.2 reads them."""

import pytest
import yaml

from modelopt_sparse.values import Yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:4", "2:4"),  # 124 in YAML 1.1
        ("8:16", "8:16"),
        ("50%", "50%"),
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
        ("none", "none"),
        ("yes", "yes"),
        ("2026-01-02", "2026-01-02"),
        ("[2:4, 1e-2, {a: 4:8}]", ["2:4", 0.01, {"a": "4:8"}]),
        ("'12'", "12"),
    ],
)
def test_plain_yaml_values(text, value):
    found = yaml.load(text, Yaml)
    assert found == value
    assert type(found) is type(value)
    assert yaml.safe_load("2:4") == 124  # the reader of everybody else is untouched
