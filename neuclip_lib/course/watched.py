"""Whether a person watches this kernel, and the terminal of whoever started it."""

from __future__ import annotations

import io
import os
import sys


def is_watched() -> bool:
    """True under JupyterLab, which names the session in the kernel's environment; papermill and nbclient do not."""
    return bool(os.environ.get("JPY_SESSION_NAME"))


class _Terminal(io.TextIOWrapper):
    """Lines only: a bar of ours would overwrite the runner's own."""

    def isatty(self) -> bool:
        return False


def runner_terminal() -> io.TextIOWrapper:
    """A text stream to the standard error that the runner of this kernel sees; the caller closes it.

    Inside a kernel ``sys.stderr`` and even descriptor 2 end up in the cell's output; the stream that replaced
    ``sys.stderr`` gives the original descriptor as its ``fileno()``.
    """
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                return _Terminal(os.fdopen(os.dup(stream.fileno()), "wb"), encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            continue
    return _Terminal(io.BytesIO(), encoding="utf-8")  # no terminal at all, as under pythonw
