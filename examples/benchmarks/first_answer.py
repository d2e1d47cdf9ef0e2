"""How long the first answer takes: help texts, version and completion of the command line, and first imports.

    python examples/benchmarks/first_answer.py            # about three minutes on one core

Each line is the median of fresh processes, in seconds of the clock, with the bytecode of all modules already there. The
last column is what the library adds to the programs that come before it: torch alone, and torch with transformers.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLI = "from modelopt_sparse.cli.commands import main; import sys; sys.argv[0] = 'modelopt-sparse'; main()"
COMPLETION = {
    "_MODELOPT_SPARSE_COMPLETE": "complete_bash",
    "COMP_WORDS": "modelopt-sparse sparsify --qual",
    "COMP_CWORD": "2",
}
TORCH = "import torch"
TRANSFORMERS = "import torch; from transformers import PreTrainedModel"

# what is shown -> (program, its arguments, further environment, the program that it is compared with)
RUNS: dict[str, tuple[str, list[str], dict[str, str], str | None]] = {
    "modelopt-sparse --help": (CLI, ["--help"], {}, None),
    "modelopt-sparse --version": (CLI, ["--version"], {}, None),
    "modelopt-sparse sparsify --help": (CLI, ["sparsify", "--help"], {}, None),
    "completion of an option": (CLI, [], COMPLETION, None),
    "import modelopt_sparse": ("import modelopt_sparse", [], {}, None),
    TORCH: (TORCH, [], {}, None),
    "... and modelopt_sparse.set_mask": (f"{TORCH}; import modelopt_sparse; modelopt_sparse.set_mask", [], {}, TORCH),
    TRANSFORMERS: (TRANSFORMERS, [], {}, None),
    "... and from modelopt_sparse import sparsify": (
        f"{TRANSFORMERS}; from modelopt_sparse import sparsify",
        [],
        {},
        TRANSFORMERS,
    ),
}


def seconds(program: str, arguments: list[str], environment: dict[str, str]) -> float:
    """One fresh process that runs the program."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", program, *arguments], env=variables, capture_output=True, text=True)
    took = time.perf_counter() - began
    if ran.returncode != 0:
        raise SystemExit(f"{program}: {ran.stderr}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each; one more is not counted")
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(rounds + 1):  # in turns, so that a busy moment does not fall on one line alone
        for name, (program, arguments, environment, _) in RUNS.items():
            took = seconds(program, arguments, environment)
            if number > 0:  # the first round writes bytecode, and fills the system's cache of files
                times[name].append(took)
    print("| what | seconds | more than without |\n| --- | --- | --- |")
    for name, (_, _, _, without) in RUNS.items():
        more = ""
        if without is not None:
            more = f"{statistics.median(a - b for a, b in zip(times[name], times[without])):.2f}"
        print(f"| {name} | {statistics.median(times[name]):.2f} | {more} |")


if __name__ == "__main__":
    main()
