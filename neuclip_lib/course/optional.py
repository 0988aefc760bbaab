"""Packages that only building and running notebooks needs."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(name: str) -> ModuleType:
    """Import an optional package.

    Raises:
        RuntimeError: naming the package and how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise RuntimeError(
            f"notebooks need the package {package} ({error}); get it with: pip install 'neuclip-course[course]'"
        ) from error
