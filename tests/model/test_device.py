"""The tests in device_cases.py, in a process of their own: for all of torch the pretend device is the accelerator of
the process that it was entered in."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT


def run(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "tests/faults/device_cases.py", "-q", "-n", "0", "-m", marks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_on_a_pretend_device():
    run("not gpu")


@pytest.mark.gpu
def test_on_a_gpu():
    run("gpu")
