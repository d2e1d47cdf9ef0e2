"""Shows how far a run is: a bar on a terminal or in a notebook; elsewhere, as in a log file, a line every minute."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

EVERY = 60.0  # seconds between two lines


@contextmanager
def only_errors(name: str) -> Iterator[None]:
    """A library's logger shows errors alone."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Progress:
    """A bar that stays while one part of a run goes on.

    title, unit: what runs, and what is counted. total: how many there are, None if that is not known.
    show: True shows the bar, False shows nothing; None shows it on a terminal and in a notebook, and elsewhere writes a
      line to standard error every minute.
    """

    def __init__(self, title: str, unit: str, total: int | None = None, *, show: bool | None = None) -> None:
        in_notebook = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)  # where tqdm draws widgets
        shown = show if show is not None else in_notebook or sys.stderr.isatty()
        self._bar = tqdm(desc=title, unit=unit, total=total, disable=not shown)
        self._writes_lines = show is None and not shown
        self._title, self._unit, self._said = title, unit, ""
        self._began = self._last_line = time.monotonic()
        self.count, self.total = 0, total

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def begin(self, total: int | None) -> None:
        """Count from the start again, up to another total."""
        self.count, self.total = 0, total
        self._bar.reset(total)

    def say(self, *words: str) -> None:
        """The words behind the bar from now on."""
        self._said = ", ".join(filter(None, words))
        self._bar.set_postfix_str(self._said)

    def update(self, count: int = 1) -> None:
        """Count further ones as done."""
        self.count += count
        self._bar.update(count)
        now = time.monotonic()
        if self._writes_lines and now - self._last_line >= EVERY:
            self._last_line = now
            sys.stderr.write(self.line(now - self._began) + "\n")
            sys.stderr.flush()

    def line(self, seconds: float) -> str:
        """Title, count, time and words in one line. ``seconds``: since the beginning."""
        of_total = "" if self.total is None else f" of {self.total}"
        parts = [f"{self._title}: {self._unit} {self.count}{of_total}, {tqdm.format_interval(seconds)} gone"]
        if self.total is not None and 0 < self.count <= self.total:
            parts.append(f"{tqdm.format_interval(seconds / self.count * (self.total - self.count))} left")
        return ", ".join([*parts, *filter(None, [self._said])])
