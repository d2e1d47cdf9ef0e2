"""The tests in device_cases.py, in a process of their own: for all of torch the pretend device is the accelerator of
the process that it was entered in."""

import pytest
import torch

import modelopt_sparse as mts
from modelopt_sparse.model.devices import bytes_in_use, peak_bytes
from tests.helpers import refused, run_python, tiny_llama, token_batches

DEVICES = [pytest.param("not gpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("marks", DEVICES)
def test_on_a_pretend_device_and_on_a_gpu(marks):
    done = run_python("-m", "pytest", "tests/faults/device_cases.py", "-q", "-n", "0", "-m", marks)
    assert done.returncode == 0, done.stdout


def test_the_peak_of_a_process_stays_when_memory_is_freed():
    before = peak_bytes(torch.device("cpu"))
    torch.ones(max(0, before - bytes_in_use(torch.device("cpu"))) + 2**27, dtype=torch.uint8)
    assert peak_bytes(torch.device("cpu")) >= before + 2**26
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    assert mts.report(model).peak_memory["cpu"] >= before + 2**26


@pytest.mark.parametrize("device", [f"cuda:{torch.cuda.device_count()}", "meta"])
def test_a_device_that_cannot_be_used_is_refused_by_name(device):
    words = f"^device='{device}' cannot be used here: "
    refused(mts.sparsify, tiny_llama(), "sparsegpt", device=device, data_loader=token_batches(), match=words)
