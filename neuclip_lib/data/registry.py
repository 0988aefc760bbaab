"""The sets there are: every module in ``sets`` with a ``SPEC``."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from neuclip_lib.data import sets
from neuclip_lib.data.spec import SetSpec


def names() -> list[str]:
    """Names of all sets, built or not, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(sets.__path__) if not module.name.startswith("_"))


def spec_of(name: str) -> SetSpec:
    """The specification of a set.

    Raises:
        ValueError: for an unknown name, listing the known ones and the closest.
    """
    known = names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no data set {name!r}{hint}; known: {', '.join(known)}")
    spec: SetSpec = importlib.import_module(f"{sets.__name__}.{name}").SPEC
    if spec.name != name:
        raise RuntimeError(f"the module sets/{name}.py calls its set {spec.name!r}; both names must be the same")
    return spec
