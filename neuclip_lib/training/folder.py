"""The run's folder before training: is it ours, is it free, does it belong to this config."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import neuclip_lib
from neuclip_lib import home
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.files import ensure_writable, write_json
from neuclip_lib.models import ImageTextModel
from neuclip_lib.training.build import index_end
from neuclip_lib.training.config import TrainConfig, differences, read_config, to_json
from neuclip_lib.training.log import METRICS
from neuclip_lib.training.run import CHECKPOINTS, CONFIG, VERSIONS, read_versions

PACKAGES = ("torch", "torchvision", "open_clip_torch", "numpy", "safetensors", "pillow")


def default_folder(config: TrainConfig) -> Path:
    """``RUNS/PRESET/METHOD``."""
    return home.runs_dir() / config.preset / config.method


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go of it even when the process is killed.

    Raises:
        RuntimeError: when it cannot be written, or another process is training in it.
    """
    ensure_writable(folder)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(f"another process is training in {folder}; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        lock.release()


def require_same_config(folder: Path, config: TrainConfig, resume: bool) -> bool:
    """Whether a run of this very config is in ``folder`` already.

    Raises:
        RuntimeError: when the folder holds a run of another config (the fields that differ are named), when it holds
            parts of a run and no config, or when there is a run and ``resume`` is off.
    """
    if not (folder / CONFIG).is_file():
        if leftovers := [name for name in (METRICS, CHECKPOINTS) if (folder / name).exists()]:
            raise RuntimeError(f"{folder} has {' and '.join(leftovers)} but no {CONFIG}; choose another folder")
        # What a killed process can leave before the config stands: a lock, half-written files, the versions.
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != "." and entry.name != VERSIONS)
        if foreign:
            raise RuntimeError(
                f"{folder.resolve()} holds other files ({', '.join(foreign[:5])}) and is not the folder of a run; "
                "give --out an empty or a new folder"
            )
        return False
    changed = differences(read_config(folder / CONFIG), config)
    if changed:
        rows = "\n".join(f"  {name}: {old!r} in the folder, {new!r} now" for name, (old, new) in changed.items())
        raise RuntimeError(f"{folder} holds a run of another config:\n{rows}\nchoose another folder with --out")
    if not resume:
        raise RuntimeError(f"{folder} holds this run already and resuming is switched off; choose another folder")
    return True


def versions() -> dict[str, str]:
    """Versions of what can change a run's bits."""
    found = {"neuclip_lib": neuclip_lib.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found | {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "none",
        "threads": str(torch.get_num_threads()),
    }


def write_identity(folder: Path, config: TrainConfig, pairs: Pairs, model: ImageTextModel) -> None:
    """Write ``versions.json`` and, last, ``config.json``, which makes the folder that of a run."""
    facts: dict[str, Any] = {
        "versions": versions(),
        "data": {
            "name": pairs.name,
            "split": pairs.split,
            "pairs": len(pairs),
            "content_hash": pairs.content_hash,
            "index_end": index_end(pairs),
        },
        "model": {
            "name": config.model,
            "dim": model.dim,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "resumed": [],
    }
    write_json(folder / VERSIONS, facts)
    write_json(folder / CONFIG, to_json(config))


def note_resume(folder: Path, step: int | None, pairs: Pairs) -> None:
    """Check that the data are the same, and put down where the run was taken up and what has changed since.

    Raises:
        RuntimeError: when the data set has another content than the run was started with.
    """
    facts = read_versions(folder)
    if facts["data"]["content_hash"] != pairs.content_hash:
        raise RuntimeError(
            f"the data set {pairs.name!r} has changed since the run in {folder} was started "
            f"(content {pairs.content_hash[:12]} instead of {facts['data']['content_hash'][:12]}); "
            "start it again in another folder"
        )
    now = versions()
    changed = {name: [old, now.get(name)] for name, old in facts["versions"].items() if now.get(name) != old}
    if changed:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        print(f"resuming with other versions, so the last bits may differ: {listed}", file=sys.stderr, flush=True)
    facts["resumed"].append({"step": step or 0, "changed": changed})
    write_json(folder / VERSIONS, facts)
