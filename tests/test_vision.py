"""examples/vision.py on a small model: the order of its rows is that of docs/vision.md, and the zeros are exact."""

import re

import pytest

SCRIPT = "../vision.py"
SMALL = ("--width", 16, "--images", 2048, "--steps", 200, "--fine-tune", 60, "--calibration", 256, "--held-out", 1024)


def _rows(printed: str) -> dict[str, tuple[float, str]]:
    """(accuracy in percent, zeros) of each row of the table, by its name."""
    found = re.findall(r"^\| (.+?) \| ([\d.]+)% \| ([\d.]+%) \| \d+ \|$", printed, re.MULTILINE)
    return {name: (float(accuracy), zeros) for name, accuracy, zeros in found}


@pytest.mark.slow
def test_fine_tuning_brings_back_what_pruning_has_cost(run_script, tmp_path):
    """A CNN learns, loses by pruning, and gains by fine-tuning with half of its weights held at zero."""
    out = tmp_path / "cnn"
    printed = run_script(SCRIPT, "--model", "cnn", "--methods", "magnitude", *SMALL, "--out", out).out
    rows = _rows(printed)
    dense, pruned, tuned = (rows[name] for name in ("dense", "2:4 by magnitude", "the last, 60 steps later"))
    assert [zeros for _, zeros in (dense, pruned, tuned)] == ["0.00%", "50.00%", "50.00%"]
    assert dense[0] > 25  # one in 16 by chance
    assert pruned[0] < dense[0]
    assert tuned[0] > pruned[0]
    assert "All 3 layers hold their pattern: 2:4." in printed
    assert (out / "sparsity.json").is_file()


@pytest.mark.slow
def test_a_vision_transformer_keeps_its_zeros(run_script):
    """So short a training teaches it next to nothing: it is no worse fine-tuned, within what 512 images tell apart."""
    few = ("--width", 16, "--images", 512, "--steps", 60, "--fine-tune", 20, "--calibration", 256, "--held-out", 512)
    printed = run_script(SCRIPT, "--methods", "sparsegpt", *few).out
    rows = _rows(printed)
    pruned, tuned = rows["2:4 by sparsegpt"], rows["the last, 20 steps later"]
    assert (pruned[1], tuned[1]) == ("50.00%", "50.00%")
    assert tuned[0] >= pruned[0] - 3
    assert "All 24 layers hold their pattern: 2:4." in printed
