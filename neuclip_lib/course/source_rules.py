"""Rules for a lesson's source: parameters, plain Python, exercises with a check, links that lead somewhere."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from pathlib import Path

from neuclip_lib.course.declared import Parameter, parameters
from neuclip_lib.course.output_rules import absolute_path
from neuclip_lib.course.source import Cell, Lesson
from neuclip_lib.course.stubs import check_call, regions

TAGS = {"parameters", "nbval-ignore-output", "hide-input"}
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=[\"']([^\"']+)")
_REMOTE_PICTURE = re.compile(r"!\[[^\]]*\]\(\s*https?:|<img[^>]+src=[\"']https?:")
_REFUSED_IN_CODE = {
    "tqdm": "a bar becomes a widget or text that never agrees; use progress()",
    "sys.path": "the package is installed; import it",
    "NBVAL_": "use cell tags",
}


def source_problems(lesson: Lesson) -> list[str]:
    """Broken rules of a source; nothing is executed."""
    problems = _parameter_problems(lesson)
    for cell in lesson.cells:
        rules = _code(cell) if cell.kind == "code" else _markdown(lesson, cell)
        if unknown := sorted(set(cell.tags) - TAGS):
            rules.append(f"tags {unknown} are refused; allowed: {', '.join(sorted(TAGS))}")
        if path := absolute_path(cell.source):
            rules.append(f"holds the absolute path {path!r}")
        problems += [f"{lesson.where(cell)}: {line}" for line in rules]
    ignored = sum("nbval-ignore-output" in cell.tags for cell in lesson.code)
    if ignored > len(lesson.code) // 2:
        problems.append(f"{lesson.path.name}: {ignored} of {len(lesson.code)} code cells keep their output unchecked")
    return problems


def called(source: str) -> set[str]:
    """Names of the functions that a code cell calls (``a.b()`` counts as ``b`` and as ``a.b``)."""
    functions = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {ast.unparse(function) for function in functions}
    return names | {name.rpartition(".")[2] for name in names}


def exercises(lesson: Lesson) -> list[Cell]:
    """The code cells with a solution region."""
    return [cell for cell in lesson.code if "BEGIN SOLUTION" in cell.source]


def _parameter_problems(lesson: Lesson) -> list[str]:
    if not lesson.code:
        return [f"{lesson.path.name}: there is no code cell"]
    try:
        declared = parameters(lesson)
    except (ValueError, SyntaxError) as error:
        return [str(error)]
    problems = _preset_problems(declared.get("preset"))
    if not any(entry.trial for entry in declared.values() if entry.name != "preset"):
        problems.append("no parameter but the preset has a [try value: recorded_name]")
    second = lesson.code[1] if len(lesson.code) > 1 else None
    try:
        if second is None or "validate" not in called(second.source):
            problems.append("the code cell after the parameters does not call validate(...)")
    except SyntaxError:
        pass  # reported for the cell itself
    return [f"{lesson.path.name}: {line}" for line in problems]


def _preset_problems(preset: Parameter | None) -> list[str]:
    if preset is None or (preset.type, preset.default) != ("str", "quick"):
        return ['the parameters cell has no line like: preset: str = "quick"  # quick or full [try "full": NAME]']
    if preset.trial is None or preset.trial.value != "full":
        return ['the preset has no [try "full": NAME]']
    return []


def _code(cell: Cell) -> list[str]:
    try:
        ast.parse(cell.source)
    except SyntaxError as error:
        return [f"no plain Python ({error.msg}, line {error.lineno} of the cell); magics and ! lines are refused"]
    problems = [f"{word} is refused: {why}" for word, why in _REFUSED_IN_CODE.items() if word in cell.source]
    problems += [f"line {line} of the cell ends with ';'" for line in _semicolons(cell.source)]
    try:
        found = regions(cell.source)
    except ValueError as error:
        return [*problems, str(error)]
    if found and check_call(cell.source) is None:
        problems.append("an exercise without its check: end the cell with f = check.NAME(f)")
    return problems


def _semicolons(source: str) -> list[int]:
    ends = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    return [
        token.start[0]
        for token, following in itertools.pairwise(tokens)
        if token.string == ";" and token.type == tokenize.OP and following.type in ends
    ]


def _markdown(lesson: Lesson, cell: Cell) -> list[str]:
    problems = []
    if _REMOTE_PICTURE.search(cell.source):
        problems.append("a picture from the network; draw it or say it")
    for match in _LINK.finditer(cell.source):
        target = (match[1] or match[2]).partition("#")[0]
        if target and ":" not in target and not _exists(lesson, target):
            problems.append(f"the link to {target} leads nowhere")
    return problems


def _exists(lesson: Lesson, target: str) -> bool:
    """Whether a relative link works from lessons/ (a notebook counts when its source is there)."""
    path = Path(target)
    if path.suffix == ".ipynb" and path.parent in (Path(), Path("../lessons"), Path("../solutions")):
        return (lesson.path.parent / f"{path.stem}.py").is_file()
    return (lesson.folder("lesson") / path).exists()
