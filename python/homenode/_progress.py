"""How far long work is: a line on a terminal or in a notebook, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_EVERY_S = 0.2


def is_watched() -> bool:
    """Whether somebody sees a line that is written over: a terminal, or a notebook's cell."""
    if sys.stderr is None:
        return False
    if sys.stderr.isatty():
        return True
    # Streams of notebooks are no terminals, and show a line that is written over all the same.
    return type(sys.stderr).__module__.startswith("ipykernel.")


class Line:
    """A line of standard error that says how much is done and how long the rest may take."""

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
        """Puts text in the place of what the line says."""
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def end(self) -> None:
        """Takes the line away."""
        if self._width:
            self.write("")
            sys.stderr.write("\r")
            sys.stderr.flush()


@contextmanager
def told(progress: bool | Callable[[str, float, float], Any]) -> Iterator[Callable[[str, float, float], Any] | None]:
    """What is told how far work is: the function that was given, or a line where it is ``True`` and somebody sees it."""
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
