"""What no stored output may hold: errors, warnings, widgets, bars, addresses, paths of one machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from neuclip_lib.course.execute import WIDGET

MEGABYTES = 4
_FOLDERS = "home|root|Users|tmp|var|usr|opt|mnt|private|workspace|content|kaggle"
_PATH = re.compile(rf"(?<![\w.:/~<-])/(?:{_FOLDERS})/[\w.-]+|\b[A-Z]:\\+(?:Users|Program|Temp)\b")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_BAR = re.compile(r"\d%\|")
_TEXT = ("text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml")


def absolute_path(text: str) -> str | None:
    """The first absolute path in a text, if there is one."""
    if match := _PATH.search(text):
        return match[0]
    home = f"{Path.home()}/"
    return home if len(home) > 4 and home in text else None


def output_problems(outputs: list[Any]) -> list[str]:
    """Broken rules of one cell's stored outputs."""
    problems = []
    for output in outputs:
        if output.output_type == "error":
            problems.append(f"an uncaught {output.get('ename')}; show errors through the helper that catches them")
        if output.get("name") == "stderr":
            problems.append(f"something was written to stderr: {output.text.strip()[:120]!r}")
        if WIDGET in output.get("data", {}):
            problems.append("a widget is stored; build the lesson again")
        problems += _text_problems(_text(output))
    return problems


def _text(output: Any) -> str:
    data = output.get("data", {})
    return "\n".join([str(output.get("text", "")), *(str(data[key]) for key in _TEXT if key in data)])


def _text_problems(text: str) -> list[str]:
    problems = []
    if path := absolute_path(text):
        problems.append(f"its output holds the absolute path {path!r}")
    if address := _ADDRESS.search(text):
        problems.append(f"its output holds the object address {address[0]}")
    if _BAR.search(text):
        problems.append("its output holds a progress bar; use progress()")
    return problems
