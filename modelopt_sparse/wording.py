"""What error messages share."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def unknown_option(key: str, known: Sequence[str]) -> str:
    return f"option {key!r} is not known{nearest(key, known)}; allowed are {', '.join(sorted(known))}"
