"""Checkpoints: one folder a step, written whole or not at all, checked before use.

    checkpoints/step_000100/model.safetensors   the encoders (with model.json, enough to rebuild them)
    checkpoints/step_000100/state.pt            everything else; loads with ``weights_only=True``
    checkpoints/step_000100/manifest.json       size and SHA-256 of the other files

The step in the name is the number of finished steps.
"""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from neuclip_lib.files import atomic_folder, read_json, sha256_of, write_json
from neuclip_lib.models import ImageTextModel, save_model

STATE, MANIFEST = "state.pt", "manifest.json"
NEEDED = ("model.json", "model.safetensors", STATE)
PLAIN = (bool, int, float, str, type(None))


def step_folder(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return checkpoints / f"step_{step:06d}"


def steps_in(checkpoints: Path) -> list[int]:
    """Steps that have a folder, oldest first; nothing is said about what is in them."""
    if not checkpoints.is_dir():
        return []
    matches = (re.fullmatch(r"step_(\d+)", folder.name) for folder in checkpoints.iterdir() if folder.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def save(folder: Path, step: int, model: ImageTextModel, state: dict[str, Any]) -> Path:
    """Write one checkpoint into ``folder``, replacing it if it exists.

    Args:
        state: nested dicts and lists of tensors and plain values.

    Raises:
        TypeError: naming the entry of ``state`` that could not be loaded again in safe mode.
        RuntimeError: when it cannot be written, for instance on a full disk.
    """
    _check_plain(state, "state")
    try:
        with atomic_folder(folder) as temporary:
            _write(temporary, step, model, state)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RuntimeError(
            f"the checkpoint {folder} could not be written ({error}); free space, then run the same command again: "
            "earlier checkpoints are as they were"
        ) from error
    return folder


def _write(folder: Path, step: int, model: ImageTextModel, state: dict[str, Any]) -> None:
    save_model(model, folder)
    torch.save(state, folder / STATE)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    rows = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }
    write_json(folder / MANIFEST, {"step": step, "files": rows})


def verify(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        RuntimeError: naming the file that is missing, cut short or altered.
    """
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        raise RuntimeError(f"{folder / MANIFEST} is damaged (it lists no files)")
    if lacking := [name for name in NEEDED if name not in manifest["files"]]:
        raise RuntimeError(f"{folder / MANIFEST} is damaged (it does not list {', '.join(lacking)})")
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise RuntimeError(f"{file} is missing")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise RuntimeError(f"{file} has {size} bytes instead of {expected['bytes']}: it was cut short or altered")
        if sha256_of(file) != expected["sha256"]:
            raise RuntimeError(f"{file} was altered: its SHA-256 is not the one in {MANIFEST}")


def newest_valid(checkpoints: Path, report: Callable[[str], None] | None = None) -> int | None:
    """The last step whose checkpoint is whole; every damaged one that is passed over is reported with its file."""
    report = report or (lambda text: print(text, file=sys.stderr, flush=True))
    steps = steps_in(checkpoints)
    for position in range(len(steps) - 1, -1, -1):
        try:
            verify(step_folder(checkpoints, steps[position]))
        except (RuntimeError, KeyError, TypeError, OSError) as error:
            following = f"the one of step {steps[position - 1]}" if position else "the beginning, no other is left"
            report(f"checkpoint of step {steps[position]} refused: {error}; going back to {following}")
        else:
            return steps[position]
    return None


def load_state(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What :func:`save` was given as ``state``, tensors on ``device``; nothing in the file is executed.

    Raises:
        RuntimeError: naming the file, when it holds anything but tensors and plain values.
    """
    try:
        state = torch.load(folder / STATE, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200] if isinstance(error, RuntimeError) else type(error).__name__
        raise RuntimeError(f"{folder / STATE} was not written by this trainer or is damaged ({reason})") from error
    if not isinstance(state, dict):
        raise RuntimeError(f"{folder / STATE} was not written by this trainer: it holds a {type(state).__name__}")
    return state


def prune(checkpoints: Path, keep_last: int | None) -> None:
    """Delete all but the last ``keep_last`` checkpoints (None keeps all), and what killed processes left half-written.

    Only the process that holds the run's lock may call it.
    """
    if not checkpoints.is_dir():
        return
    outdated = steps_in(checkpoints)[:-keep_last] if keep_last else []
    half_written = [folder for folder in checkpoints.iterdir() if re.fullmatch(r"\.step_\d+\..*", folder.name)]
    for folder in [step_folder(checkpoints, step) for step in outdated] + half_written:
        shutil.rmtree(folder, ignore_errors=True)


def discard_after(checkpoints: Path, step: int | None) -> None:
    """Delete the checkpoints behind ``step`` (None: all): they are damaged, and a resumed run writes them again."""
    for other in steps_in(checkpoints):
        if step is None or other > step:
            shutil.rmtree(step_folder(checkpoints, other), ignore_errors=True)


def _check_plain(value: Any, where: str) -> None:
    """Safe loading knows tensors and builtins; anything else is refused while it can still be repaired."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _check_plain(item, f"{where}[{position}]")
    elif not isinstance(value, Tensor) and type(value) not in PLAIN:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and plain Python values only")
