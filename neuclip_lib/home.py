"""Where data and runs live: ``$NEUCLIP_HOME``, else the checkout one stands in, else the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _checkout() -> Path | None:
    """The writable checkout of this project in which the current folder lies (a notebook runs in its own folder)."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "neuclip_lib" / "contrast.py").is_file() and (folder / "pyproject.toml").is_file():
            return folder if os.access(folder, os.W_OK) else None
    return None


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "neuclip"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "neuclip"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neuclip"


def data_dir() -> Path:
    """Folder of built data sets (not created here)."""
    if home := os.environ.get("NEUCLIP_HOME"):
        return Path(home).expanduser().resolve() / "datasets" / "built"
    if checkout := _checkout():
        return checkout / "datasets" / "built"
    return _user_cache() / "datasets" / "built"


def runs_dir() -> Path:
    """Folder of training runs (not created here)."""
    if home := os.environ.get("NEUCLIP_HOME"):
        return Path(home).expanduser().resolve() / "runs"
    if checkout := _checkout():
        return checkout / "runs"
    return _user_cache() / "runs"
