"""Progress of long work: a line on a terminal or in a notebook, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_EVERY_S = 0.2


def is_watched() -> bool:
    """Whether an overwritten line is visible: on a terminal, or in a notebook's cell."""
    if sys.stderr is None:
        return False
    if sys.stderr.isatty():
        return True
    # Streams of notebooks are not terminals, but show an overwritten line as well.
    return type(sys.stderr).__module__.startswith("ipykernel.")


class Line:
    """A line on standard error with the progress and the estimated time left."""

    def __init__(self) -> None:
        self._began = self._written = time.monotonic()
        self._width = 0

    def say(self, what: str, done: float, of: float) -> None:
        """``done`` of ``of``, in one unit."""
        now = time.monotonic()
        if now - self._written < LINE_EVERY_S:
            return
        self._written = now
        left = (now - self._began) * (of - done) / done if done > 0 else float("inf")
        left_said = f", {left:.0f} s left at most" if left < float("inf") else ""
        self.write(f"{what}: {100 * done / of:.0f}%{left_said}" if of > 0 else what)

    def write(self, text: str) -> None:
        """Replaces the text of the line."""
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def end(self) -> None:
        """Removes the line."""
        if self._width:
            self.write("")
            sys.stderr.write("\r")
            sys.stderr.flush()


@contextmanager
def told(progress: bool | Callable[[str, float, float], Any]) -> Iterator[Callable[[str, float, float], Any] | None]:
    """Returns the receiver of progress: the given function, or a line if it is ``True`` and the line is visible."""
    if callable(progress):
        yield progress
    elif progress and is_watched():
        line = Line()
        try:
            yield line.say
        finally:
            line.end()
    else:
        yield None
