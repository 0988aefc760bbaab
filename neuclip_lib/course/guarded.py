"""Calling a reader's function so that nothing it does stops the notebook."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

SECONDS_ALLOWED = 10.0
CHARACTERS_KEPT = 2000


@dataclass(frozen=True)
class Outcome:
    """What one call gave: a value, or an error in words; and what it printed (cut at 2000 characters)."""

    value: Any = None
    error: str = ""
    kind: str = ""
    printed: str = ""


class _TooSlow(BaseException):
    """Not an Exception, so that an ``except Exception`` in the reader's loop does not swallow it."""


class _Kept(io.StringIO):
    """Keeps the beginning of what is printed, however much that is."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, CHARACTERS_KEPT - self.tell())])
        return len(text)


def call(function: Callable[..., Any], *inputs: Any, seconds: float = SECONDS_ALLOWED) -> Outcome:
    """Call ``function``; every error but the reader's own interrupt becomes part of the outcome.

    Args:
        seconds: after this long the call is given up (on systems with timer signals, in the main thread).
    """
    printed = _Kept()
    try:
        with _time_limit(seconds), redirect_stdout(printed), redirect_stderr(io.StringIO()):
            value = function(*inputs)
        return Outcome(value, printed=printed.getvalue())
    except KeyboardInterrupt:
        raise
    except _TooSlow:
        return Outcome(error=f"took more than {seconds:g} s", kind="_TooSlow", printed=printed.getvalue())
    except BaseException as error:
        return Outcome(error=_in_words(error), kind=type(error).__name__, printed=printed.getvalue())


def _in_words(error: BaseException) -> str:
    try:
        return f"raised {type(error).__name__}: {error}"[:500]
    except Exception:
        return f"raised {type(error).__name__}"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
