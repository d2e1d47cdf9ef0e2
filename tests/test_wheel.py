"""The package as it is installed: a built wheel works outside of the checkout."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

SCRIPT = """
import sys
import modelopt_sparse as mts
import torch
from modelopt_sparse.cli.commands import main

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
mts.sparsify(model, "wanda", pattern="2:4", include="*", data_loader=[torch.randn(8, 16)], progress=False)
mts.verify(model, "2:4")
mts.save(model, "sparse")
mts.report(model).to_html("report.html")
print(mts.__file__)
sys.argv = ["modelopt-sparse", "report", "sparse"]
main()
"""


@pytest.mark.slow
def test_a_wheel_works_outside_of_the_checkout(tmp_path):
    """Its styles, scripts and stub come along. pip gets hatchling from the package index."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    built, installed = tmp_path / "built", tmp_path / "installed"
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", built, ROOT], check=True)
    (wheel,) = built.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().startswith(str(installed))
    assert (work / "report.html").stat().st_size > 1_000_000
    assert "2 layers pruned, 50.00% zeros" in ran.stdout
