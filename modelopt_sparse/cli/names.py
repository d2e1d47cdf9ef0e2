"""What help texts and messages of the command line name: no torch is needed to read it."""

import os

import typer

# the keys of METHODS and of QUALITIES, and MEMBERS, whose modules import torch; a test holds them equal
METHODS = ("magnitude", "wanda", "ria", "sparsegpt", "alps")
QUALITIES = ("fast", "balanced", "best", "max")
MEMBERS = ("wide", "parallel", "factorized", "doped")
DTYPES = ("auto", "float32", "bfloat16", "float16")

VIOLATION, WRONG_INPUT, RANK_LOST, INTERRUPTED = 1, 2, 3, 130  # exit codes


def complain(message: object) -> None:
    """Print a message on standard error, in one line; in another rank than 0 with the rank, which torchrun sets."""
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    rank = os.environ.get("RANK", "0") if launched else "0"
    speaker = "" if rank == "0" else f"rank {rank}: "
    typer.echo(f"modelopt-sparse: {speaker}{' '.join(str(message).split())}", err=True)
