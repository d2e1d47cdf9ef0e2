"""Runs that are interrupted inside of a function of the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest


@contextmanager
def interrupted(owner: Any, function: str, at: int = 1) -> Iterator[list[tuple]]:
    """The ``at``-th call of a function of ``owner`` is interrupted, which ends what is inside -> the calls up to it."""
    calls, real = [], getattr(owner, function)

    def stop(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with patch.object(owner, function, stop), pytest.raises(KeyboardInterrupt):
        yield calls
