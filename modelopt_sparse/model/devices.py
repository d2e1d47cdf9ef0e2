"""Giving freed memory back to the system."""

import ctypes
import sys


def give_back_freed_memory() -> None:
    """glibc keeps the memory of freed tensors of middle size in pieces, which grow with every block that comes and
    goes; other C libraries have no such call."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
