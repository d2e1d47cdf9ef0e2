"""The tools that the benchmarks compare, each run as a process of its own in an environment of its own. Linux."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"  # first and by its exact version: a range would take gigabytes of CUDA packages
REQUIREMENTS = {
    # transformers as its extra "hf" bounds it; requests is imported without being declared
    "modelopt": ("nvidia-modelopt==0.47.0", "transformers>=5,<5.15", "accelerate>=1.0.0", "requests"),
    "llmcompressor": ("llmcompressor==0.14.0.1",),
    "torchao": ("torchao==0.18.0", "transformers==5.23.0", "accelerate"),
}
TITLES = {
    "dense": "dense",
    "ours": "modelopt_sparse",
    "modelopt": "ModelOpt",
    "llmcompressor": "llm-compressor",
    "compressed_tensors": "compressed-tensors",
    "torchao": "torchao",
    "torch_pruning": "Torch-Pruning",
}
HERE_TOO = ("ours", "compressed_tensors")  # tools of the environment that runs this


class Failed(Exception):
    """A row that could not be made; the text is one line."""


class Tools:
    """Runs ``run_<tool>.py`` (see worker.py) with ``threads`` threads; environments are made in the folder ``work``."""

    def __init__(self, work: Path, threads: int) -> None:
        self.work, self.threads = work, threads

    def run(
        self, tool: str, model: Path, windows: Tensor | Mapping[str, Tensor], place: Path, *arguments: str
    ) -> dict[str, Any]:
        """What a run on calibration windows [n, seq_len], or on all inputs by name, cost. Its folder and log are in
        ``place``. Raises Failed."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        data = place / "windows"
        save_file({"windows": windows.contiguous()} if isinstance(windows, Tensor) else dict(windows), data)
        self._call(tool, f"run_{tool}.py", place, model, data, place, "--threads", self.threads, *arguments)
        return json.loads((place / "cost.json").read_text(encoding="utf-8"))

    def quantize(self, tool: str, model: Path, windows: Path, place: Path, scheme: str) -> dict[str, Any]:
        """Run ``quantize_<tool>.py`` (see quantizing.py) -> {"version": of the tool}. Raises Failed."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self._call(tool, f"quantize_{tool}.py", place, model, windows, place, "--scheme", scheme)
        return json.loads((place / "cost.json").read_text(encoding="utf-8"))

    def _call(self, tool: str, script: str, place: Path, *arguments: object) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # one of the peers would take a GPU if there were one
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
        }
        command = [self._python(tool), str(HERE / script), *map(str, arguments)]
        run(command, place / "log.txt", environment)

    def _python(self, tool: str) -> str:
        """The interpreter of the tool's environment, made if it is not there or was made for other versions."""
        if tool in HERE_TOO:
            return sys.executable
        folder = self.work / f"venv-{tool}"
        python, made_for = str(folder / "bin" / "python"), folder / "made-for.json"
        wanted = json.dumps([TORCH, *REQUIREMENTS[tool]])
        if not made_for.exists() or made_for.read_text(encoding="utf-8") != wanted:
            print(f"installing {', '.join(REQUIREMENTS[tool])}", file=sys.stderr)
            self.work.mkdir(parents=True, exist_ok=True)
            log = self.work / f"venv-{tool}.txt"
            run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
            for packages in ((TORCH,), REQUIREMENTS[tool]):
                run([python, "-m", "pip", "install", "--quiet", *packages], log)
            made_for.write_text(wanted, encoding="utf-8")
        return python


def run(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output in a file; Failed with the output's last line if it fails."""
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)
    if done.returncode != 0:
        raise Failed(last_line(log.read_text(encoding="utf-8")) or f"exit code {done.returncode}")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{cpu[1] if cpu else 'unknown CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"
