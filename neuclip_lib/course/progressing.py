"""progress: a bar for a person who watches, one plain line for a stored notebook, figures for the runner."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from neuclip_lib.course.watched import is_watched, runner_terminal
from neuclip_lib.files import ensure_writable, write_json
from neuclip_lib.progress import track

T = TypeVar("T")

SECONDS_BETWEEN_FILES = 1.0


def progress(
    items: Iterable[T], label: str, total: int | None = None, describe: Callable[[], str] | None = None
) -> Iterator[T]:
    """Yield from ``items`` and say how far it is.

    In JupyterLab a bar with the time left. In batch the cell's output gets one line at the end, without times, equal
    in every run; lines with the time left go to the runner's terminal, and ``progress.json`` to the folder named by
    ``NEUCLIP_PROGRESS`` when it is set.

    Args:
        label: what is being done, for instance ``"train neuclip"``.
        total: number of items, read from ``len(items)`` when not given.
        describe: gives a short text of current figures, for the bar and the terminal only.

    Raises:
        ValueError: when the number of items is not known.
        RuntimeError: when the folder named by ``NEUCLIP_PROGRESS`` cannot be written.
    """
    if total is None:
        if not isinstance(items, Sized):
            raise ValueError(f"progress({label!r}): the items have no length; pass total=")
        total = len(items)
    folder = os.environ.get("NEUCLIP_PROGRESS")
    report = _Report(ensure_writable(folder) / "progress.json", label, total) if folder else None
    inner = (_bar if is_watched() else _lines)(items, label, total, describe)
    return _finish(inner, report)


def _bar(items: Iterable[T], label: str, total: int, describe: Callable[[], str] | None) -> Generator[T, None, None]:
    """A bar of widgets that turns into text at its end: a stored widget shows as an error when reopened."""
    try:
        from IPython.display import display
        from tqdm.notebook import tqdm

        bar = tqdm(items, desc=label, total=total, display=False)
    except ImportError:  # no ipywidgets: the plain bar of the lower module
        yield from track(items, label, total=total, describe=describe)
        return
    handle = display(bar.container, display_id=True)
    done = 0
    try:
        for item in bar:
            yield item
            done += 1
            if describe is not None:
                bar.set_postfix_str(describe(), refresh=False)
    finally:
        bar.close()
        handle.update({"text/plain": f"{label}: {done} of {total}"}, raw=True)


def _lines(items: Iterable[T], label: str, total: int, describe: Callable[[], str] | None) -> Generator[T, None, None]:
    with runner_terminal() as terminal:
        done = 0
        for item in track(items, label, total=total, describe=describe, stream=terminal):
            yield item
            done += 1
    print(f"{label}: {done} of {total}")


def _finish(inner: Generator[T, None, None], report: _Report | None) -> Iterator[T]:
    """Count the items and write the file as they pass."""
    done, state = 0, "stopped"
    try:
        for item in inner:
            yield item
            done += 1
            if report is not None:
                report.write(done, "running")
        state = "done"
    finally:
        inner.close()
        if report is not None:
            report.write(done, state, now=True)


class _Report:
    """``progress.json``: written whole, at most once a second."""

    def __init__(self, path: Path, label: str, total: int) -> None:
        self.path, self.label, self.total = path, label, total
        self.begun = time.monotonic()
        self.written = -SECONDS_BETWEEN_FILES
        self.write(0, "running", now=True)

    def write(self, done: int, state: str, now: bool = False) -> None:
        seconds = time.monotonic() - self.begun
        if not now and seconds - self.written < SECONDS_BETWEEN_FILES:
            return
        self.written = seconds
        left = seconds / done * (self.total - done) if done else None
        write_json(
            self.path,
            {
                "label": self.label,
                "done": done,
                "total": self.total,
                "state": state,
                "seconds": round(seconds, 1),
                "seconds_left": None if left is None else round(left, 1),
            },
        )
