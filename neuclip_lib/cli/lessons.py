"""``python -m neuclip_lib lessons``: build the notebooks from their sources, check, test, list and run them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from neuclip_lib.course import build as builder
from neuclip_lib.course.copies import copy_lessons
from neuclip_lib.course.declared import choose, parameters, trial_of_the_day
from neuclip_lib.course.first_cells import first_cells_problems
from neuclip_lib.course.gates import course_problems, lesson_problems
from neuclip_lib.course.proof import prove_parameter
from neuclip_lib.course.report import run_lesson
from neuclip_lib.course.shape import shape_problems, size
from neuclip_lib.course.source import KINDS, Lesson, course_root, find_source, read_lesson, sources
from neuclip_lib.course.strict import strict_problems
from neuclip_lib.home import runs_dir

DESCRIPTION = "Build the course's notebooks from solutions/NN_name.py, check, test, list and run them."


def main(arguments: list[str]) -> int:
    """Run one of the actions; 1 when something is wrong with a lesson."""
    rest, given = _take_parameters(arguments)
    options = _parser().parse_args(rest)
    if given and options.action != "run":
        raise ValueError("-p NAME VALUE belongs to: lessons run")
    options.given = given
    action: Callable[[argparse.Namespace], int] = options.call
    return action(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib lessons", description=DESCRIPTION)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(
        name: str, call: Callable[[argparse.Namespace], int], text: str, many: bool = True
    ) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        if many:
            action.add_argument("lesson", nargs="*", help="number or name of a lesson; all by default")
        action.set_defaults(call=call)
        return action

    build = add("build", _build, "make both notebooks of every lesson whose source changed")
    build.add_argument("--force", action="store_true", help="build even what is up to date")
    build.add_argument("--timeout", type=float, help="seconds that one cell may take (no limit by default)")
    add("check", _check, "check sources and notebooks against the rules, without executing anything")
    test = add("test", _test, "execute lessons under strict nbval and prove that a parameter has an effect")
    test.add_argument("--every", action="store_true", help="prove every parameter, the full preset too")
    add("list", _list, "list the lessons with their size and parameters")
    copy = add("copy", _copy, "copy the lessons to a folder of your own, where make lab opens them", many=False)
    copy.add_argument("folder", type=Path)
    run = add("run", _run, "execute one lesson with papermill and report", many=False)
    run.add_argument("lesson", help="number or name of the lesson")
    run.add_argument("--out", type=Path, help="folder for the notebook and its report (by default beside the runs)")
    run.add_argument("--preset", help="quick or full; the same as: -p preset VALUE")
    run.add_argument("--solved", action="store_true", help="run the solved version")
    run.epilog = "-p NAME VALUE sets a parameter of the lesson, as often as needed; lessons list names them"
    return parser


def _take_parameters(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split off every ``-p NAME VALUE`` (a value may begin with a dash)."""
    rest: list[str] = []
    given: dict[str, str] = {}
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word not in ("-p", "--parameter"):
            rest.append(word)
            continue
        if len(left) < 2:
            raise ValueError("-p takes a name and a value, for instance: -p seed 1")
        name, value = left.pop(0), left.pop(0)
        if name in given:
            raise ValueError(f"parameter {name} is given twice")
        given[name] = value
    return rest, given


def _chosen(options: argparse.Namespace) -> list[Path]:
    root = course_root()
    return [find_source(root, lesson) for lesson in options.lesson] if options.lesson else sources(root)


def _build(options: argparse.Namespace) -> int:
    paths = _chosen(options)
    for number, path in enumerate(paths, 1):
        lesson, label = read_lesson(path), f"[{number}/{len(paths)}] {path.stem}"
        if not options.force and builder.is_built(lesson):
            print(f"{label}: up to date")
            continue
        print(f"{label}: building", flush=True)
        for built in builder.build(path, options.timeout):
            print(f"  {built.path.parent.name}/{built.path.name}  {built.seconds:.1f} s")
        for line in shape_problems(lesson):
            print(f"  still to do: {line}")
    return 0


def _check(options: argparse.Namespace) -> int:
    root = course_root()
    problems = [line for path in _chosen(options) for line in lesson_problems(path)] if options.lesson else []
    problems += [] if options.lesson else course_problems(root)
    for line in problems:
        print(line, file=sys.stderr)
    count = len(_chosen(options))
    print(f"{count} lessons, {len(problems)} problems" if problems else f"{count} lessons, all rules kept")
    return 1 if problems else 0


def _test(options: argparse.Namespace) -> int:
    failed = 0
    for path in _chosen(options):
        lesson = read_lesson(path)
        failed += _report(f"wrong parameters of {lesson.name} refused", partial(first_cells_problems, lesson))
        for kind in KINDS:
            failed += _report(f"strict nbval of {kind} {lesson.name}", partial(strict_problems, lesson.notebook(kind)))
        today = trial_of_the_day(lesson)
        names = [entry.name for entry in parameters(lesson).values() if entry.trial] if options.every else []
        for name in names or ([today.name] if today else []):
            out = runs_dir() / "lessons" / f"{lesson.name}-{name}"
            failed += _report(f"{lesson.name} with another {name}", partial(_effect, lesson, name, out))
    return 1 if failed else 0


def _effect(lesson: Lesson, name: str, out: Path) -> list[str]:
    return prove_parameter(lesson, name, out)[1]


def _report(what: str, problems_of: Callable[[], list[str]]) -> int:
    begun = time.monotonic()
    problems = problems_of()
    print(f"{what}: {'FAILED' if problems else 'ok'}, {time.monotonic() - begun:.1f} s", flush=True)
    for line in problems:
        print(line, file=sys.stderr)
    return len(problems)


def _list(options: argparse.Namespace) -> int:
    for path in _chosen(options):
        lesson = read_lesson(path)
        counts = size(lesson)
        state = "built" if builder.is_built(lesson) else "not built"
        print(f"{lesson.name}: {lesson.title} ({state})")
        print(
            f"  {counts.words} words, {counts.cells} cells, {counts.exercises} exercises, "
            f"{counts.prose_numbers} numbers in prose"
        )
        for entry in parameters(lesson).values():
            print(f"  -p {entry.name} {json.dumps(entry.default)}: {entry.type}, {entry.help}")
    return 0


def _copy(options: argparse.Namespace) -> int:
    for line in copy_lessons(course_root(), options.folder):
        print(line)
    print(f"your lessons are in {options.folder}")
    return 0


def _run(options: argparse.Namespace) -> int:
    lesson = read_lesson(find_source(course_root(), options.lesson))
    given = dict(options.given)
    if options.preset is not None:
        if "preset" in given:
            raise ValueError("the preset is given twice, by --preset and by -p preset")
        given["preset"] = options.preset
    out = options.out or runs_dir() / "lessons" / lesson.name
    done = run_lesson(lesson, "solution" if options.solved else "lesson", out, choose(lesson, given))
    print(f"{lesson.title}: {len(done.report.cells)} cells in {done.report.seconds:.1f} s")
    for name, value in done.report.results.items():
        print(f"  {name} = {value:.6g}")
    print(f"notebook: {done.notebook}\nreport:   {done.report_path}")
    if done.report.defaults and done.report.differences:
        print("results differ from those printed in the lesson:", *done.report.differences, sep="\n  ", file=sys.stderr)
        return 1
    return 0
