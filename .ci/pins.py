"""Write requirements.txt from the versions installed here: ``python .ci/pins.py`` (``--check`` only compares).

Start from what pyproject.toml names, extras included, and follow each package's own requirements for every
Python and platform we promise. A package that only another platform needs keeps the pin the file already has.
What torch itself brings on Linux (CUDA, triton) is left to torch, so that its builds for a CPU, macOS and
Windows install from the same file.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import sys
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "requirements.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {  # sys_platform: (platform_system, os_name, platform_machine)
    "linux": ("Linux", "posix", "x86_64"),
    "darwin": ("Darwin", "posix", "arm64"),
    "win32": ("Windows", "nt", "AMD64"),
}
LEFT_TO_TORCH = re.compile(r"(nvidia|cuda)-.*|triton")
HEADER = """\
# The versions that were tested, for Python 3.11 to 3.13 on Linux, macOS and Windows.
# Written by `make pins` from pyproject.toml and the installed packages: do not edit.
# What torch needs for a GPU comes with torch and is not listed.
"""


def environments() -> dict[tuple[str, str], dict[str, str]]:
    """One set of marker values for each Python and platform."""
    base = {key: str(value) for key, value in default_environment().items()}
    found = {}
    for python, (platform, (system, os_name, machine)) in itertools.product(PYTHONS, PLATFORMS.items()):
        found[python, platform] = base | {
            "python_version": python,
            "python_full_version": f"{python}.9",
            "sys_platform": platform,
            "platform_system": system,
            "os_name": os_name,
            "platform_machine": machine,
        }
    return found


def closure(roots: list[str], environment: dict[str, str]) -> set[str]:
    """Names that ``roots`` need in this environment, read from the installed packages' own requirements."""
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(root), "") for root in roots]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen or LEFT_TO_TORCH.fullmatch(name):
                continue
            seen.add((name, wanted))
            try:
                needs = importlib.metadata.distribution(name).requires or []
            except importlib.metadata.PackageNotFoundError:
                needs = []  # of another platform: its own needs are roots of the file already
            todo += [(Requirement(need), wanted) for need in needs]
    return {name for name, _ in seen}


def marker(where: set[tuple[str, str]]) -> str:
    """The shortest marker that is true exactly for these (Python, platform) pairs."""
    pythons = sorted({python for python, _ in where})
    platforms = sorted({platform for _, platform in where})
    if len(where) != len(pythons) * len(platforms):
        raise RuntimeError(f"no simple marker describes {sorted(where)}")
    parts = []
    if pythons != list(PYTHONS):
        parts.append(" or ".join(f"python_version == '{python}'" for python in pythons))
    if len(platforms) == len(PLATFORMS) - 1:
        parts.append(f"sys_platform != '{(set(PLATFORMS) - set(platforms)).pop()}'")
    elif len(platforms) == 1:
        parts.append(f"sys_platform == '{platforms[0]}'")
    if len(parts) > 1:
        parts = [f"({part})" if " or " in part else part for part in parts]
    return " and ".join(parts)


def earlier_pins() -> dict[str, tuple[str, str]]:
    """Name -> (version, marker) of the file as it stands."""
    pins = {}
    for line in TARGET.read_text(encoding="utf-8").splitlines() if TARGET.exists() else []:
        if match := re.match(r"([A-Za-z0-9_.-]+)==([^ ;]+)(?: *; *(.*))?$", line):
            pins[canonicalize_name(match[1])] = (match[2], match[3] or "")
    return pins


def pins() -> str:
    """The text of requirements.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    roots += itertools.chain.from_iterable(project["project"]["optional-dependencies"].values())
    needed: dict[str, set[tuple[str, str]]] = {}
    for key, environment in environments().items():
        for name in closure(roots, environment):
            needed.setdefault(name, set()).add(key)
    before = earlier_pins()
    lines = {}
    for name, where in needed.items():
        try:
            found = importlib.metadata.distribution(name)
            version, label = found.version.split("+")[0], found.metadata["Name"]
        except importlib.metadata.PackageNotFoundError:
            if name not in before:
                raise RuntimeError(f"{name} is needed on {sorted(where)} only: add its pin to {TARGET} once") from None
            version, label = before[name][0], name
        text = marker(where)
        lines[name] = f"{label}=={version}" + (f" ; {text}" if text else "")
    for name, (version, text) in before.items():  # needs of a package that is not installed here
        if name not in lines and text:
            lines[name] = f"{name}=={version} ; {text}"
    return HEADER + "\n".join(line for _, line in sorted(lines.items())) + "\n"


def _without_torch(text: str) -> list[str]:
    """The lines that must agree also where the machine's own torch is used."""
    return [line for line in text.splitlines() if not re.match(r"torch(vision)?==", line)]


def main() -> int:
    text = pins()
    if "--check" in sys.argv[1:]:
        if _without_torch(TARGET.read_text(encoding="utf-8")) == _without_torch(text):
            return 0
        print("requirements.txt is not what pyproject.toml and this environment give: run `make pins`", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"{text.count('==')} pins written to {TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
