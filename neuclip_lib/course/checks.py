"""check: ``f = check.NAME(f)`` in the cell of an exercise says how the reader's function does, and never stops."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from neuclip_lib.course.solved import remember

LINES_SHOWN = 8


class Checks:
    """``check.NAME`` for every file of ``neuclip_lib/course/exercises``."""

    def __dir__(self) -> list[str]:
        return _names()

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if name.startswith("_") or name not in _names():
            close = difflib.get_close_matches(name, _names(), n=1)
            hint = f"did you mean check.{close[0]}? " if close else ""
            raise AttributeError(f"there is no check {name!r}; {hint}there are {', '.join(_names())}")
        return partial(_run, name)


def exercise(name: str) -> Any:
    """The ``Exercise`` of a name."""
    return importlib.import_module(f"neuclip_lib.course.exercises.{name}").EXERCISE


def _names() -> list[str]:
    from neuclip_lib.course import exercises

    return sorted(one.name for one in pkgutil.iter_modules(exercises.__path__))


def _run(name: str, function: Any) -> Any:
    """Judge, print, remember; give the reader's function when it passes and the reference otherwise."""
    from neuclip_lib.course.exercise import judge

    task = exercise(name)
    verdict = judge(task, function)
    passed = verdict.state == "passed"
    opening = {"passed": "passed", "not done": "not done yet", "wrong": "not right yet"}[verdict.state]
    print(f"{name}: {opening}{': ' + verdict.message if verdict.message else '.'}")
    if lines := verdict.printed.splitlines():
        print("\n".join(["It printed, on the first case:", *(f"    {line[:120]}" for line in lines[:LINES_SHOWN])]))
    if trouble := remember(name, verdict.state, verdict.wrong):
        print(trouble)
    print(f"The cells below use {'your function' if passed else 'the reference version'}.")
    return function if passed else task.reference


check = Checks()
