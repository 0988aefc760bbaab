"""Devices by name."""

from __future__ import annotations

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
