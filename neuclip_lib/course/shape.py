"""The shape of a lesson: its size, its parts, and what every exercise carries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from neuclip_lib.course.prose import names_in
from neuclip_lib.course.source import Cell, Lesson
from neuclip_lib.course.source_rules import called, exercises
from neuclip_lib.course.stubs import regions

WORDS = (2000, 4500)
CELLS = (30, 60)
EXERCISES = (3, 5)
PROSE_NUMBERS = 8
LONG_EXERCISE = 5
_PARTS = {
    "objectives": re.compile(r"^#+ .*you will be able to", re.IGNORECASE | re.MULTILINE),
    "what comes before": re.compile(r"^#+ .*before you start", re.IGNORECASE | re.MULTILINE),
    "a summary": re.compile(r"^#+ .*summary", re.IGNORECASE | re.MULTILINE),
    "references": re.compile(r"^#+ .*references", re.IGNORECASE | re.MULTILINE),
}
_NOT_WORDS = re.compile(r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|<[^>]+>|\{value:[^}]*\}|\]\([^)]*\)", re.DOTALL)
_WORD = re.compile(r"[^\W\d_][\w'’-]*")


@dataclass(frozen=True)
class Size:
    """Counts of a lesson; words are those of the prose without formulas, code and addresses of links."""

    words: int
    cells: int
    exercises: int
    prose_numbers: int
    longest_exercise: int


def size(lesson: Lesson) -> Size:
    """Count a lesson."""
    prose = [cell.source for cell in lesson.cells if cell.kind == "markdown"]
    parts = [sum(region.lines for region in regions(cell.source)) for cell in exercises(lesson)]
    return Size(
        words=sum(len(_WORD.findall(_NOT_WORDS.sub(" ", text))) for text in prose),
        cells=len(lesson.cells),
        exercises=len(parts),
        prose_numbers=sum(len(names_in(text)) for text in prose),
        longest_exercise=max(parts, default=0),
    )


def shape_problems(lesson: Lesson) -> list[str]:
    """Parts that a lesson lacks; limits on its size count only for lessons not marked short."""
    problems = _part_problems(lesson) + _exercise_problems(lesson)
    if not lesson.short:
        problems += _size_problems(size(lesson))
    return [f"{lesson.path.name}: {line}" for line in problems]


def _size_problems(found: Size) -> list[str]:
    limits = {
        "words": (found.words, *WORDS),
        "cells": (found.cells, *CELLS),
        "exercises": (found.exercises, *EXERCISES),
    }
    problems = [
        f"{count} {what}; expected {low} to {high}"
        for what, (count, low, high) in limits.items()
        if not low <= count <= high
    ]
    if found.prose_numbers < PROSE_NUMBERS:
        problems.append(f"{found.prose_numbers} numbers in prose come from results; expected at least {PROSE_NUMBERS}")
    if found.longest_exercise < LONG_EXERCISE:
        problems.append(f"the longest exercise needs {found.longest_exercise} lines; one must need {LONG_EXERCISE}")
    return problems


def _part_problems(lesson: Lesson) -> list[str]:
    first = lesson.cells[0]
    prose = "\n\n".join(cell.source for cell in lesson.cells if cell.kind == "markdown")
    problems = []
    if first.kind != "markdown" or not first.source.startswith("# "):
        problems.append("the first cell is not the title, '# ...'")
    problems += [f"no heading for {name} ({part.pattern!r})" for name, part in _PARTS.items() if not part.search(prose)]
    if not any("explore" in _called(cell) for cell in lesson.code):
        problems.append("no explorer: no cell calls explore(...)")
    if following := _next(lesson):
        last = [cell.source for cell in lesson.cells if cell.kind == "markdown"][-1:]
        if f"({following}.ipynb)" not in "".join(last):
            problems.append(f"the last text does not link to the next lesson, ({following}.ipynb)")
    return problems


def _exercise_problems(lesson: Lesson) -> list[str]:
    problems = []
    for cell in exercises(lesson):
        text = _before(lesson, cell)
        if not re.search(r"difficulty", text, re.IGNORECASE):
            problems.append(f"line {cell.line}: the exercise does not say its difficulty")
        if not re.search(r"\d+ minutes?\b", text):
            problems.append(f"line {cell.line}: the exercise does not say how many minutes it takes")
        if (hints := text.count("<details>")) < 2:
            problems.append(f"line {cell.line}: the exercise has {hints} folded hints (<details>); expected 2")
    return problems


def _before(lesson: Lesson, cell: Cell) -> str:
    """The text between the code cell before an exercise and the exercise."""
    texts = []
    for other in reversed(lesson.cells[: lesson.cells.index(cell)]):
        if other.kind == "code":
            break
        texts.append(other.source)
    return "\n".join(texts)


def _called(cell: Cell) -> set[str]:
    try:
        return called(cell.source)
    except SyntaxError:
        return set()  # reported by the rules for sources


def _next(lesson: Lesson) -> str | None:
    names = sorted(path.stem for path in lesson.path.parent.glob("[0-9][0-9]_*.py"))
    return next((name for name in names if name > lesson.name), None)
