"""Solution regions: the lines of an exercise that the reader writes, and the stub that stands for them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

_BEGIN = re.compile(r"^(\s*)### BEGIN SOLUTION(?::\s*(.*?))?\s*$")
_END = re.compile(r"^(\s*)### END SOLUTION\s*$")
_MARKER = re.compile(r"###\s*(BEGIN|END)\b.*SOLUTION", re.IGNORECASE)


@dataclass(frozen=True)
class Region:
    """One solution region: the lines ``begin`` to ``end`` (both markers, counted from 0), its indentation and hint."""

    begin: int
    end: int
    indent: str
    hint: str
    lines: int

    def stub(self) -> list[str]:
        """The lines that stand in the lesson instead."""
        size = f"about {self.lines} line{'s' if self.lines > 1 else ''}"
        return [f"{self.indent}# Your code, {size}{': ' + self.hint if self.hint else ''}", f"{self.indent}..."]


def regions(source: str) -> list[Region]:
    """The solution regions of a code cell.

    Raises:
        ValueError: for markers that do not pair up, a region outside a function, an empty one, or one that is not the
            end of its function (what follows would use names that the stub does not define).
    """
    lines = source.splitlines()
    found: list[Region] = []
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines):
        if begin := _BEGIN.match(line):
            if opened:
                raise ValueError(f"line {number + 1}: a solution region opens inside another")
            opened = (number, begin[1], begin[2] or "")
        elif end := _END.match(line):
            if not opened or end[1] != opened[1]:
                raise ValueError(f"line {number + 1}: END SOLUTION without a BEGIN SOLUTION of the same indentation")
            found.append(_region(lines, opened, number))
            opened = None
        elif _MARKER.search(line):
            raise ValueError(f"line {number + 1}: write '### BEGIN SOLUTION: hint' or '### END SOLUTION', not {line!r}")
    if opened:
        raise ValueError(f"line {opened[0] + 1}: BEGIN SOLUTION without END SOLUTION")
    return found


def with_stubs(source: str) -> str:
    """A code cell with each solution region replaced by its stub."""
    lines = source.splitlines()
    for region in reversed(regions(source)):
        lines[region.begin : region.end + 1] = region.stub()
    return "\n".join(lines)


def stray_stub_lines(stub: str, solution: str) -> list[str]:
    """Lines of a lesson's exercise that are neither the stub itself nor in the solution (there must be none)."""
    known = set(solution.splitlines())
    own = {line for region in regions(solution) for line in region.stub()}
    return [line for line in stub.splitlines() if line not in known | own]


def _region(lines: list[str], opened: tuple[int, str, str], end: int) -> Region:
    begin, indent, hint = opened
    body = [line for line in lines[begin + 1 : end] if line.strip() and not line.strip().startswith("#")]
    if not body:
        raise ValueError(f"line {begin + 1}: the solution region is empty")
    if not indent:
        raise ValueError(f"line {begin + 1}: a solution region stands inside a function, not at the left margin")
    following = next((line for line in lines[end + 1 :] if line.strip()), "")
    if following.startswith(indent):
        raise ValueError(
            f"line {end + 2}: {following.strip()!r} follows the solution region in the same block; "
            "a region is the end of its function, its return included"
        )
    return Region(begin, end, indent, hint, len(body))


def check_call(source: str) -> str | None:
    """The NAME of ``f = check.NAME(f)`` in a code cell, if it has such a line at the left margin."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="check"), attr=name), args=[ast.Name(id=given), *_]
                ),
            ) if target == given:
                return name
    return None
