"""expect_error: show an error on purpose without stopping the notebook, and fail when there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def expect_error(kind: type[Exception], match: str = "") -> Iterator[None]:
    """Run the block, print the message of the error it raises, and go on.

    Args:
        kind: the exception expected; any other one is raised as usual.
        match: regular expression that must be found in the message.

    Raises:
        AssertionError: when the block raises nothing, or a message in which ``match`` is not found.
    """
    try:
        yield
    except kind as error:
        if not re.search(match, str(error)):
            raise AssertionError(f"expected a message with {match!r}, got {type(error).__name__}: {error}") from error
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError(f"expected {kind.__name__}, but nothing was raised")
