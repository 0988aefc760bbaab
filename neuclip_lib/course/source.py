"""The one source of a lesson, ``solutions/NN_name.py`` in jupytext's percent format, as cells with stable ids."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from neuclip_lib.course.optional import need
from neuclip_lib.course.stubs import with_stubs

Kind = Literal["solution", "lesson"]
KINDS: tuple[Kind, ...] = ("solution", "lesson")
_NAME = re.compile(r"^(\d\d)_[a-z0-9_]+$")
_HEADER_KEYS = {"short"}
_CELL_KEYS = {"tags", "id"}
_SPACING = {"lines_to_next_cell", "lines_to_end_of_cell_marker"}  # jupytext's notes on blank lines
_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}


@dataclass(frozen=True)
class Cell:
    """One cell of a source: ``line`` is where its ``# %%`` marker stands in the file, counted from 1."""

    kind: Literal["markdown", "code"]
    source: str
    tags: tuple[str, ...]
    id: str
    line: int


@dataclass(frozen=True)
class Lesson:
    """A source file read: its number, cells, hash, and whether it is marked ``short`` (no size limits)."""

    path: Path
    sha256: str
    short: bool
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """For instance ``00_start_here``."""
        return self.path.stem

    @property
    def number(self) -> str:
        """The two digits."""
        return self.name[:2]

    @cached_property
    def title(self) -> str:
        """The first heading."""
        text = next((cell.source for cell in self.cells if cell.kind == "markdown"), "")
        return text.splitlines()[0].lstrip("# ") if text else self.name

    @property
    def code(self) -> list[Cell]:
        """The code cells in order."""
        return [cell for cell in self.cells if cell.kind == "code"]

    def folder(self, kind: Kind) -> Path:
        """``solutions/`` or the ``lessons/`` beside it."""
        return self.path.parent if kind == "solution" else self.path.parent.parent / "lessons"

    def notebook(self, kind: Kind) -> Path:
        """Where the generated notebook lies."""
        return self.folder(kind) / f"{self.name}.ipynb"

    def where(self, cell: Cell) -> str:
        """A cell's place for messages."""
        return f"{self.path.name}:{cell.line}"

    def prose_templates(self) -> dict[str, str]:
        """Source of every markdown cell by id, ``{value:...}`` not yet filled."""
        return {cell.id: cell.source for cell in self.cells if cell.kind == "markdown"}


def read_lesson(path: Path | str) -> Lesson:
    """Read one source file.

    Raises:
        ValueError: for a name other than NN_name.py, an unknown cell or header key, a raw cell, or a repeated id.
    """
    path = Path(path)
    if not _NAME.match(path.stem) or path.suffix != ".py":
        raise ValueError(f"{path.name}: a lesson's source is named NN_name.py, two digits and small letters")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({error})") from error
    try:
        parsed = need("jupytext").reads(text, fmt="py:percent")
    except Exception as error:  # the header's YAML, for instance; its own errors name no file
        raise ValueError(f"{path.name} is no lesson source: {str(error).splitlines()[0]}") from error
    header = dict(parsed.metadata.get("neuclip", {}))
    if unknown := set(header) - _HEADER_KEYS:
        raise ValueError(f"{path.name}: unknown header key {sorted(unknown)}; known: {sorted(_HEADER_KEYS)}")
    cells = _cells(path, text, parsed.cells)
    if not any(cell.source.strip() for cell in cells):
        raise ValueError(f"{path.name} holds no cell")
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Lesson(path.resolve(), sha256, header.get("short") is True, cells)


def generate(lesson: Lesson, kind: Kind) -> Any:
    """The unexecuted notebook of one kind: stubs or solved code, ids, tags, hash; prose numbers not yet filled."""
    v4 = need("nbformat.v4")
    cells = []
    for cell in lesson.cells:
        source = with_stubs(cell.source) if kind == "lesson" and cell.kind == "code" else cell.source
        new = v4.new_code_cell if cell.kind == "code" else v4.new_markdown_cell
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        cells.append(new(source, id=cell.id, metadata=metadata))
    own = {"kind": kind, "source": f"{lesson.path.parent.name}/{lesson.path.name}", "sha256": lesson.sha256}
    notebook = v4.new_notebook(
        cells=cells, metadata={"kernelspec": _KERNEL, "language_info": _LANGUAGE, "neuclip": own}
    )
    notebook.nbformat_minor = 5
    return notebook


def course_root(start: Path | str | None = None) -> Path:
    """The checkout at or above ``start``; without it, above the current folder or above this package.

    Raises:
        RuntimeError: when there is none (the lessons are no part of the installed package).
    """
    starts = [Path(start)] if start else [Path.cwd(), Path(__file__)]
    for place in starts:
        for folder in [place.resolve(), *place.resolve().parents]:
            if (folder / "neuclip_lib" / "course").is_dir() and (folder / "pyproject.toml").is_file():
                return folder
    raise RuntimeError(
        "no checkout of the course here; run the command inside a clone (it holds lessons/ and solutions/)"
    )


def sources(root: Path) -> list[Path]:
    """Every lesson source of a checkout, in order.

    Raises:
        ValueError: when two have the same number.
    """
    paths = sorted(path for path in (root / "solutions").glob("*.py") if path.name[:1].isdigit())
    numbers = [path.name[:2] for path in paths]
    if doubled := {number for number in numbers if numbers.count(number) > 1}:
        raise ValueError(f"two lessons have the number {', '.join(sorted(doubled))}: {[path.name for path in paths]}")
    return paths


def find_source(root: Path, lesson: str) -> Path:
    """The source for ``"0"``, ``"00"``, ``"00_start_here"`` or a path to one.

    Raises:
        ValueError: listing the lessons there are.
    """
    stem = Path(lesson).stem
    for path in sources(root):
        if stem == path.stem or (stem.isdigit() and stem.zfill(2) == path.name[:2]):
            return path
    known = ", ".join(path.stem for path in sources(root)) or "none yet"
    raise ValueError(f"there is no lesson {lesson!r}; lessons: {known}")


def _cells(path: Path, text: str, parsed: list[Any]) -> tuple[Cell, ...]:
    markers = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"# %%(\s|$)", line)]
    if len(markers) != len(parsed):
        raise ValueError(
            f"{path.name}: {len(markers)} lines begin with '# %%' but {len(parsed)} cells were read; "
            "every cell begins with a '# %%' line and text before the first belongs in the header"
        )
    cells: list[Cell] = []
    used: set[str] = set()
    for line, raw in zip(markers, parsed, strict=True):
        where = f"{path.name}:{line}"
        if raw.cell_type not in ("markdown", "code"):
            raise ValueError(f"{where}: a {raw.cell_type} cell; expected markdown or code")
        if unknown := set(raw.metadata) - _CELL_KEYS - _SPACING:
            raise ValueError(f"{where}: unknown cell key {sorted(unknown)}; known: {sorted(_CELL_KEYS)}")
        if not raw.source.strip():
            raise ValueError(f"{where}: the cell is empty")
        identity = _identity(path.name[:2], raw.source, raw.metadata.get("id"), used, where)
        cells.append(Cell(raw.cell_type, raw.source, tuple(raw.metadata.get("tags", ())), identity, line))
    return tuple(cells)


def _identity(number: str, source: str, explicit: str | None, used: set[str], where: str) -> str:
    """A cell's id: the explicit one, else a hash of its first line (of all of it, then counted, if that is taken)."""
    if explicit is not None:
        if explicit in used or not _ID.match(explicit):
            raise ValueError(f"{where}: the id {explicit!r} is taken or has other signs than letters, digits, - and _")
        candidates = [explicit]
    else:
        texts = [source.splitlines()[0], source, *(f"{source}\n{count}" for count in range(1, 1000))]
        candidates = [f"{number}-{hashlib.sha256(text.encode()).hexdigest()[:8]}" for text in texts]
    identity = next(candidate for candidate in candidates if candidate not in used)
    used.add(identity)
    return identity
