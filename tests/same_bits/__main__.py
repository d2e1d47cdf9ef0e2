"""Runs the same small jobs with two checkouts of this package, and says which of them end with other bits.

    python tests/same_bits OTHER_CHECKOUT [--this CHECKOUT] [--only SUBSTRING] [--out FILE]

It is for changes that must not change what is computed. Make a worktree of the version before the change, and give its
folder as OTHER_CHECKOUT. Each checkout runs all jobs in one process of its own, through the public API and the command
line alone. Compared are the bits of all tensors and masks, reports and plans, files, and what commands print. Times and
versions are left out. Exit code 1 says that a job differs or fails, 2 that a process did not come to its end.

Both sides (jobs.py) have one thread, and models of fewer than 2**20 weights to prune, so that the library times no
products. The two jobs with the larger embedded model set the precision of products themselves, which has the same
effect.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from differences import differences

Result = dict[str, Any]

HERE = Path(__file__).resolve().parent
SHOWN, LIMIT = 2, 900  # differences that the table spells out; seconds that a side may take


def start(checkout: Path, results: Path, only: str) -> Result:
    """Run one side in a process of its own, and return what it has left."""
    arguments = [sys.executable, str(HERE / "jobs.py"), str(checkout), str(results), only]
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = {"PYTHONPATH": f"{checkout}{os.pathsep}{HERE}", "PYTHONSAFEPATH": "1"}
    began, log = time.monotonic(), results.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.run(
            arguments, env={**os.environ, **fixed, **paths}, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    if process.returncode:
        print(log.read_text(encoding="utf-8")[-4000:], file=sys.stderr)
        raise SystemExit(2)
    done = json.loads(results.read_text(encoding="utf-8"))
    print(f"{checkout}: {len(done)} jobs in {time.monotonic() - began:.0f} s", flush=True)
    return done


def verdict(other: Result, this: Result) -> list[str]:
    """What is wrong with a job; nothing if it is the same, or if its sides are not to be compared."""
    failed = [
        f"fails {where}: {side['fails']}" for where, side in (("there", other), ("here", this)) if "fails" in side
    ]
    return failed or ([] if "outcome" in this else differences(other, this))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--this", type=Path, default=HERE.parent.parent, help="default: where this file lies")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="jobs with this in their names")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, with all that differs")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        other = start(chosen.other.resolve(), work / "other.json", chosen.only)
        this = start(chosen.this.resolve(), work / "this.json", chosen.only)
    wrong = {name: verdict(result, this[name]) for name, result in other.items()}
    width, short, long = max(map(len, wrong)), [], []
    for name, problems in wrong.items():
        said = this[name].get("outcome", "same")
        shown = [problem if "fails" in problem[:5] else problem[:300] for problem in problems[:SHOWN]]
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        short.append(f"{name:{width}}  {'; '.join([*shown, *more]) or said}")
        long.append(f"{name:{width}}  {'; '.join(problems) or said}")
    ending = f"{sum(not problems for problems in wrong.values())} of {len(wrong)} jobs are the same"
    print("\n".join([*short, ending]))
    if chosen.out is not None:
        chosen.out.write_text("\n".join([*long, ending, ""]), encoding="utf-8")
    raise SystemExit(any(wrong.values()))


if __name__ == "__main__":
    main()
