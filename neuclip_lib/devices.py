"""Devices by name."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def pick_device(name: str = "auto") -> torch.device:
    """The device called ``name``: ``auto`` (CUDA if it is there, else CPU), ``cpu``, ``cuda``, ``cuda:1``, ``mps``.

    Raises:
        ValueError: for another name, or a device that this machine does not have; nothing else is taken instead.
    """
    present = ["cpu"]
    if torch.cuda.is_available():
        present += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        present.append("mps")
    if name == "auto":
        return torch.device("cuda" if "cuda" in present else "cpu")
    if name not in present:
        raise ValueError(f"there is no device {name!r} on this machine; choose auto or one of {', '.join(present)}")
    return torch.device(name)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on ``device``, or None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
