"""An exercise: the reference, the cases it is tried on, and the wrong answers it knows by name."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuclip_lib.course.answers import is_finite, problem, same, shown
from neuclip_lib.course.guarded import Outcome, call

Function = Callable[..., Any]
State = Literal["passed", "not done", "wrong"]


@dataclass(frozen=True)
class Case:
    """One set of inputs and what to call it in a message."""

    label: str
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Wrong:
    """A wrong answer: a function that makes the mistake, and what to tell the reader who makes it."""

    function: Function
    message: str


def _plain_call(function: Function, *inputs: Any) -> Any:
    return function(*inputs)


@dataclass(frozen=True)
class Exercise:
    """What ``check.NAME`` holds a reader's function against.

    Args:
        name: of the function and of the check.
        reference: the right answer, made from the library's own function.
        cases: makes the cases afresh, seeded, the smallest first; called once for each function that is tried, so that
            no function sees inputs that another one changed.
        wrong: the mistakes known by name; the first that explains the reader's results gives its message.
        tolerance: largest difference that counts as equal, relative above 1 and absolute below.
        run: how a function is tried on inputs; another one can compare gradients, for instance.
    """

    name: str
    reference: Function
    cases: Callable[[], list[Case]]
    wrong: Mapping[str, Wrong]
    tolerance: float = 1e-5
    run: Callable[..., Any] = field(default=_plain_call)

    def outcomes(self, function: Function) -> list[Outcome]:
        """The function's outcome on each case; the cases after one that took too long are not tried."""
        found: list[Outcome] = []
        for case in self.cases():
            slow = found and found[-1].kind == "_TooSlow"
            found.append(found[-1] if slow else call(self.run, function, *case.inputs))
        return found


@dataclass(frozen=True)
class Verdict:
    """What a check found: the state, what to print, and which named wrong answer it was, if one."""

    state: State
    message: str = ""
    wrong: str = ""
    printed: str = ""


def judge(exercise: Exercise, function: Any) -> Verdict:
    """Hold a reader's function against the exercise; never raises (but for the reader's own interrupt)."""
    try:
        return _judge(exercise, function)
    except Exception as error:  # a result whose comparison fails, for instance
        return Verdict("wrong", f"its result could not be compared ({type(error).__name__})")


def _judge(exercise: Exercise, function: Any) -> Verdict:
    if not callable(function):
        return Verdict("wrong", f"expected a function, got {type(function).__name__}")
    cases, inputs_after = exercise.cases(), exercise.cases()
    got = _tried_on(exercise, function, inputs_after)
    expected = [outcome.value for outcome in exercise.outcomes(exercise.reference)]
    printed = got[0].printed
    if nothing := _nothing_there(function, got[0]):
        return Verdict(*nothing, printed=printed)
    failed = [
        place for place, one in enumerate(got) if one.error or not same(expected[place], one.value, exercise.tolerance)
    ]
    if not failed:
        changed = _changed_input(cases, inputs_after)
        return Verdict("wrong" if changed else "passed", changed, printed=printed)
    for name, wrong in exercise.wrong.items():
        if _explains(exercise, exercise.outcomes(wrong.function), got, expected):
            return Verdict("wrong", wrong.message, name, printed)
    return Verdict("wrong", _failure(cases[failed[0]], expected[failed[0]], got[failed[0]]), printed=printed)


def _tried_on(exercise: Exercise, function: Function, cases: list[Case]) -> list[Outcome]:
    """As ``Exercise.outcomes``, on cases that the caller keeps to see whether the function changed them."""
    iterator = Exercise(exercise.name, exercise.reference, lambda: cases, {}, exercise.tolerance, exercise.run)
    return iterator.outcomes(function)


def _nothing_there(function: Function, first: Outcome) -> tuple[State, str] | None:
    """The stub, or a function without a return."""
    stub = _has_stub(function)
    if first.kind == "NotImplementedError" or first.value is Ellipsis or (stub and first.error):
        return "not done", ""
    if first.value is None and not first.error:
        return ("wrong", "it returns nothing; does it end with a return?") if stub is False else ("not done", "")
    return None


def _has_stub(function: Function) -> bool | None:
    """Whether a line of the function is still ``...``; None when its source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    lines = [node.value for node in ast.walk(tree) if isinstance(node, (ast.Expr, ast.Assign, ast.Return))]
    return any(isinstance(one, ast.Constant) and one.value is Ellipsis for one in lines)


def _changed_input(before: list[Case], after: list[Case]) -> str:
    for one, other in zip(before, after, strict=True):
        for place, (was, now) in enumerate(zip(one.inputs, other.inputs, strict=True), 1):
            if not callable(was) and not same(was, now, 0.0):
                return f"the result is right, but it changes its argument {place} in place; work on a copy"
    return ""


def _explains(exercise: Exercise, wrong: list[Outcome], got: list[Outcome], expected: list[Any]) -> bool:
    """Whether a known mistake gives the reader's results: on every case, or on every one that came out finite."""

    def agrees(places: list[int]) -> bool:
        return all(
            not wrong[place].error
            and not got[place].error
            and same(wrong[place].value, got[place].value, exercise.tolerance)
            for place in places
        )

    everywhere = list(range(len(got)))
    finite = [place for place in everywhere if not got[place].error and is_finite(got[place].value)]
    differs = any(not same(expected[place], got[place].value, exercise.tolerance) for place in finite)
    return agrees(everywhere) or (differs and agrees(finite))


def _failure(case: Case, expected: Any, got: Outcome) -> str:
    if got.error:
        return f"{case.label}: it {got.error}"
    if unlike := problem(expected, got.value):
        return f"{case.label}: {unlike}"
    return f"{case.label}: expected {shown(expected)}, got {shown(got.value)}"
