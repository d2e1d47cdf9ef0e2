"""What differs between two results; for the jobs and for the table of them, which imports nothing of the package."""

from collections.abc import Iterator
from typing import Any


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(each, f"{path} > {key}".removeprefix(" > "))
        yield path, f"{type(value).__name__} of {len(value)}"
    else:
        yield path, repr(value)


def differences(other: Any, this: Any) -> list[str]:
    there, here = dict(flat(other)), dict(flat(this))
    return [
        f"{path}: {there.get(path, 'nothing')} there, {here.get(path, 'nothing')} here"
        for path in {**there, **here}
        if there.get(path) != here.get(path)
    ]
