"""Whether cells are being run by ``start_at`` on the reader's behalf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def is_replaying() -> bool:
    """True inside ``replaying()``: nothing is credited to the reader, and sections do not start one another."""
    return _depth > 0


@contextmanager
def replaying() -> Iterator[None]:
    """Mark a block in which solved cells run on the reader's behalf."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
