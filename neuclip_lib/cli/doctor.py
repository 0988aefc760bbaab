"""``python -m neuclip_lib doctor``: what is on this machine, what is missing and how to get it, a short self-test."""

from __future__ import annotations

import argparse
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import neuclip_lib
from neuclip_lib.cli import _machine, _packages, _selftest

State = Literal["ok", "note", "broken"]
_SIGN = {"ok": " ", "note": "!", "broken": "X"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: what was looked at.
        text: what was found, and what to do when that is not well.
        state: ``note`` is worth knowing and stops nothing; ``broken`` stops training or evaluation.
    """

    name: str
    text: str
    state: State = "ok"


def main(arguments: list[str]) -> int:
    """Print the report; 1 when something that is required is broken."""
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--no-self-test", action="store_true", help="leave out the self-test")
    chosen = parser.parse_args(arguments)
    broken = 0
    for title, look in _sections(not chosen.no_self_test):
        print(title, flush=True)
        for finding in _safely(look):
            broken += finding.state == "broken"
            first, *rest = finding.text.splitlines() or [""]
            print(f"{_SIGN[finding.state]}   {finding.name:<20} {first}")
            for line in rest:
                print(f"{'':<25}{line}")
        print(flush=True)
    print(f"{broken} broken (X)" if broken else "Everything that is required works.")
    return 1 if broken else 0


def _sections(self_test: bool) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    yield "Versions", _versions
    yield "Optional packages", _optional
    yield "Machine", _hardware
    yield "Folders", _folders
    if self_test:
        yield "Self-test", _self_test


def _safely(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A section that fails is a finding, not the end of the report."""
    try:
        yield from look()
    except Exception as error:
        where = "".join(traceback.format_exception_only(error)).strip()
        yield Finding("failed", f"{where}\nwhile looking; the lines after it are missing", "broken")


def _versions() -> Iterator[Finding]:
    yield Finding("neuclip_lib", f"{neuclip_lib.__version__} in {_machine.folder_of_the_library()}")
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    advice = "" if fits else "; 3.11, 3.12 or 3.13 is needed"
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}{advice}", "ok" if fits else "broken")
    yield Finding("system", f"{platform.platform()}, {platform.machine()}")
    for package in _packages.required():
        problem = package.problem or _packages.import_problem(package)
        text = f"{package.version or 'missing'}{f'; {problem}' if problem else ''}"
        yield Finding(package.name, text, "broken" if problem else "ok")


def _optional() -> Iterator[Finding]:
    for extra in _packages.extras():
        lacking = [package for package in _packages.of_extra(extra) if package.problem]
        if not lacking:
            yield Finding(f"[{extra}]", "complete")
            continue
        rows = [f"{package.name}: {package.problem}" for package in lacking]
        advice = f"get them: {_packages.pip_line(extra)}"
        yield Finding(f"[{extra}]", "\n".join([*rows, advice]), "note")
    for name, advice in _packages.lacking_sources():
        yield Finding(f"data set {name}", advice, "note")


def _hardware() -> Iterator[Finding]:
    yield Finding("device", "\n".join(_machine.devices()))
    total, free = _machine.memory()
    yield Finding("memory", f"{_gib(total)} in all, {_gib(free)} free")
    yield Finding("threads", _machine.threads())
    policy = _machine.wait_policy()
    advice = "" if policy == "PASSIVE" else "; PASSIVE keeps idle threads from spinning on a busy core"
    yield Finding("OMP_WAIT_POLICY", f"{policy}{advice}", "ok" if policy == "PASSIVE" else "note")
    if stale := _machine.launcher_variables():
        text = f"{', '.join(stale)} set: training takes itself for one of several processes; unset them to train alone"
        yield Finding("launcher", text, "note")


def _folders() -> Iterator[Finding]:
    for name, folder in _machine.folders().items():
        problem = _machine.write_problem(folder)
        yield Finding(name, f"{folder}{f'; {problem}' if problem else ''}", "broken" if problem else "ok")
        free = _machine.free_disk(folder)
        small = free < 2 * 2**30
        yield Finding(
            "  free there", _gib(free) + ("; less than 2 GiB may not do" if small else ""), "note" if small else "ok"
        )


def _self_test() -> Iterator[Finding]:
    for name, test in _selftest.TESTS.items():
        outcome = test()
        yield Finding(name, outcome.text, "ok" if outcome.passed else "broken")


def _gib(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**30:.1f} GiB"
