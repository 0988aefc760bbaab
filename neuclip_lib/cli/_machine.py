"""Facts about this machine: devices, memory, threads, folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from neuclip_lib import home


def folder_of_the_library() -> Path:
    """Where ``neuclip_lib`` was imported from."""
    return Path(__file__).resolve().parent.parent


def devices() -> list[str]:
    """One line a device that PyTorch can use."""
    import torch

    lines = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(number)
        lines.append(f"cuda:{number} {facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        lines.append("mps")
    return [*lines, f"cpu ({torch.backends.cpu.get_cpu_capability()})"]


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory in all and free for use; None where the system does not say."""
    try:
        import psutil
    except ImportError:
        return _memory_of_posix()
    facts = psutil.virtual_memory()
    return facts.total, facts.available


def _memory_of_posix() -> tuple[int | None, int | None]:
    def pages(name: str) -> int | None:
        if name not in getattr(os, "sysconf_names", {}):
            return None
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")

    return pages("SC_PHYS_PAGES"), pages("SC_AVPHYS_PAGES")


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> str:
    """PyTorch's threads and the cores, in words."""
    import torch

    asked = os.environ.get("OMP_NUM_THREADS")
    of = f" (OMP_NUM_THREADS={asked})" if asked else ""
    return f"PyTorch uses {torch.get_num_threads()} of {usable_cores()} cores{of}"


def wait_policy() -> str:
    """What idle OpenMP threads do."""
    return os.environ.get("OMP_WAIT_POLICY", "not set")


def launcher_variables() -> list[str]:
    """Variables that a launcher of several processes sets, as NAME=value."""
    return [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]


def folders() -> dict[str, Path]:
    """The folders that the library writes."""
    return {"data": home.data_dir(), "runs": home.runs_dir()}


def write_problem(folder: Path) -> str | None:
    """Why nothing can be written there, or None; nothing is created but for a moment."""
    above = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=above):
            return None
    except OSError as error:
        return f"cannot write in {above} ({error.strerror}); set NEUCLIP_HOME to a folder that can be written"


def free_disk(folder: Path) -> int:
    """Bytes free on the disk that holds the folder, or will."""
    return shutil.disk_usage(_nearest(folder)).free


def _nearest(folder: Path) -> Path:
    """The folder itself, or the lowest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
