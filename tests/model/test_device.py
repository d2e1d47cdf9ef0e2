"""The tests in device_cases.py, in a process of their own: for all of torch the pretend device is the accelerator of
the process that it was entered in."""

import subprocess
import sys

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.model.devices import bytes_in_use, peak_bytes
from tests.helpers import ROOT, tiny_llama


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


def test_the_peak_of_a_process_stays_when_memory_is_freed():
    before = peak_bytes(torch.device("cpu"))
    extra = max(0, before - bytes_in_use(torch.device("cpu"))) + 2**27
    torch.ones(extra, dtype=torch.uint8)
    assert peak_bytes(torch.device("cpu")) >= before + 2**26
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    assert mts.report(model).peak_memory["cpu"] >= before + 2**26


@pytest.mark.parametrize("device", [f"cuda:{torch.cuda.device_count()}", "meta"])
def test_a_device_that_cannot_be_used_is_refused_by_name(device):
    model = tiny_llama()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"^device='{device}' cannot be used here: "):
        mts.sparsify(model, "sparsegpt", device=device, data_loader=[torch.zeros(2, 8, dtype=torch.long)])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
