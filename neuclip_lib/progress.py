"""Progress with the time left: a bar when a person watches a terminal, a few plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T],
    label: str,
    total: int | None = None,
    start: int = 0,
    describe: Callable[[], str] | None = None,
    stream: TextIO | None = None,
) -> Iterator[T]:
    """Yield from ``items`` and report on ``stream`` (standard error by default).

    Args:
        label: what is being done, for instance ``"train neuclip"``.
        total: number of items, read from ``len(items)`` when not given.
        start: items already done before this call (a resumed run).
        describe: gives a short text of current figures, asked for only when a line is printed.
    """
    stream = stream or sys.stderr
    if total is None:
        total = len(items) + start  # type: ignore[arg-type]
    if stream.isatty():
        with tqdm(items, desc=label, total=total, initial=start, file=stream, dynamic_ncols=True) as bar:
            for item in bar:
                yield item
                if describe is not None:
                    bar.set_postfix_str(describe(), refresh=False)
        return
    begun = printed = time.monotonic()
    for done, item in enumerate(items, start + 1):
        yield item
        now = time.monotonic()
        if now - printed >= 10 or (done == total and now - begun >= 5):
            printed = now
            left = (now - begun) / (done - start) * (total - done)
            figures = f"  {describe()}" if describe is not None else ""
            print(f"{label}: {done}/{total}, {left:.0f} s left{figures}", file=stream, flush=True)
