"""Which packages the project names, and whether what is installed will do."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "neuclip-course"
MODULES = {  # where the module's name is not the package's
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
}


@dataclass(frozen=True)
class Package:
    """A package that the project names.

    Args:
        name: on the package index.
        version: the installed one, or None.
        problem: why the installed one will not do, or None.
    """

    name: str
    version: str | None
    problem: str | None


def required() -> list[Package]:
    """Packages that training and evaluation need."""
    return [_look_at(need) for need in _needs("")]


def extras() -> list[str]:
    """Names of the groups of optional packages."""
    return importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []


def of_extra(extra: str) -> list[Package]:
    """Packages of one group."""
    return [_look_at(need) for need in _needs(extra)]


def pip_line(extra: str) -> str:
    """The command that installs a group, in a checkout or outside of one."""
    here = Path(__file__).resolve().parent.parent.parent
    source = "." if (here / "pyproject.toml").is_file() else DISTRIBUTION
    return f'{Path(sys.executable).name} -m pip install "{source}[{extra}]"'


def import_problem(package: Package) -> str | None:
    """Why the package cannot be imported, or None. A torchvision of another torch shows only here."""
    name = package.name.lower().replace("_", "-")
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except Exception as error:
        advice = ""
        if name in ("torch", "torchvision"):
            advice = "\ntorch and torchvision belong together in pairs: install both from requirements.txt"
        return (
            f"cannot be imported ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}){advice}"
        )
    return None


def lacking_sources() -> Iterator[tuple[str, str]]:
    """(data set, how to get what it is made from) for every set that cannot be built here."""
    from neuclip_lib import data

    for name in data.names():
        card = data.card(name)
        if card.lacking:
            yield name, card.lacking


def _needs(extra: str) -> list[Requirement]:
    """Requirements of the group, ``""`` for the required ones.

    Raises:
        RuntimeError: when the project is not installed, so that nothing says what it needs.
    """
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"{DISTRIBUTION} is not installed here; run: pip install -e . --no-deps") from error
    needs = [Requirement(line) for line in lines]
    found = []
    for need in needs:
        always = need.marker is None or need.marker.evaluate({"extra": ""})
        if always if extra == "" else not always and need.marker is not None and need.marker.evaluate({"extra": extra}):
            found.append(need)
    return found


def _look_at(need: Requirement) -> Package:
    try:
        version = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return Package(need.name, None, f"missing, {need.specifier} is needed" if need.specifier else "missing")
    if not need.specifier.contains(version, prereleases=True):
        return Package(need.name, version, f"{need.specifier} is needed, {version} is installed")
    return Package(need.name, version, None)
