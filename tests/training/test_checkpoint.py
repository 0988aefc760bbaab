"""Checkpoints: whole or refused, the previous one instead, safe to load."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from neuclip_lib.models import build_model, load_model
from neuclip_lib.training import TrainConfig, checkpoint, train

STATE = {"step": 1, "list": [torch.arange(3), 2.5, None, "x"], "nested": {"flag": True, 0: torch.ones(2)}}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 5 and 10."""
    model = build_model("small", ["a red circle", "two blue squares"], 32, seed=0)
    for step in (5, 10):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), step, model, STATE)
    return tmp_path


def test_a_checkpoint_gives_back_model_and_state_in_safe_mode(two: Path) -> None:
    folder = checkpoint.step_folder(two, 10)
    state = checkpoint.load_state(folder)
    assert state["list"][0].tolist() == [0, 1, 2]
    assert state["list"][1:] == [2.5, None, "x"]
    assert state["nested"][0].tolist() == [1, 1]
    fresh = build_model("small", ["a red circle", "two blue squares"], 32, seed=0).state_dict()
    loaded = load_model(folder).state_dict()
    assert loaded.keys() == fresh.keys()
    assert all(torch.equal(loaded[name], fresh[name]) for name in fresh)
    assert checkpoint.steps_in(two) == [5, 10]
    assert checkpoint.newest_valid(two, pytest.fail) == 10


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut in half", "emptied", "one byte altered", "removed"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(two: Path, name: str, damage: str) -> None:
    file = checkpoint.step_folder(two, 10) / name
    data = bytearray(file.read_bytes())
    if damage == "removed":
        file.unlink()
    elif damage == "cut in half":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "emptied":
        file.write_bytes(b"")
    else:
        place = data.index(b"sha256") + 12 if name == "manifest.json" else len(data) // 2
        data[place] ^= 1
        file.write_bytes(data)
    said: list[str] = []
    assert checkpoint.newest_valid(two, said.append) == 5
    assert len(said) == 1
    assert "step 10 refused" in said[0]
    assert "step 5" in said[0]
    if (name, damage) != ("manifest.json", "one byte altered"):  # then another file seems altered
        assert name in said[0]


def test_with_every_checkpoint_damaged_the_run_starts_again_and_says_so(two: Path) -> None:
    for step in (5, 10):
        (checkpoint.step_folder(two, step) / "state.pt").write_bytes(b"")
    said: list[str] = []
    assert checkpoint.newest_valid(two, said.append) is None
    assert "the beginning" in said[-1]


def test_what_safe_loading_would_refuse_is_refused_at_saving(two: Path) -> None:
    model = load_model(checkpoint.step_folder(two, 5))
    for value in (np.float64(1.0), Path("x"), {1, 2}):
        with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is a"):
            checkpoint.save(two / "step_000015", 15, model, {"a": [value]})
    assert checkpoint.steps_in(two) == [5, 10]


def test_prune_keeps_the_last_and_removes_what_a_killed_save_left(two: Path) -> None:
    (two / ".step_000015.123.tmp").mkdir()
    checkpoint.prune(two, keep_last=None)
    assert sorted(path.name for path in two.iterdir()) == ["step_000005", "step_000010"]
    checkpoint.prune(two, keep_last=1)
    assert checkpoint.steps_in(two) == [10]
    shutil.rmtree(two)
    checkpoint.prune(two, keep_last=1)
    assert checkpoint.steps_in(two) == []


def test_killed_while_saving_the_earlier_checkpoint_stays_whole(two: Path) -> None:
    script = f"""
import os, signal, torch
from pathlib import Path
from neuclip_lib.training import checkpoint
from neuclip_lib.models import load_model
real = torch.save
def half(state, path):
    real(state, path)
    with open(path, "r+b") as file:
        file.truncate(100)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
folder = Path({str(two)!r})
model = load_model(folder / "step_000010")
checkpoint.save(folder / "step_000010", 10, model, {{"step": 10}})
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert checkpoint.newest_valid(two, pytest.fail) == 10
    assert checkpoint.load_state(checkpoint.step_folder(two, 10))["list"][3] == "x"


def test_on_a_full_disk_it_says_so_and_the_earlier_checkpoint_stays(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = load_model(checkpoint.step_folder(two, 5))
    monkeypatch.setattr(torch, "save", full)
    for step in (10, 15):
        with pytest.raises(RuntimeError, match=rf"step_0000{step} could not be written .*No space left.*free space"):
            checkpoint.save(checkpoint.step_folder(two, step), step, model, STATE)
    assert sorted(path.name for path in two.iterdir()) == ["step_000005", "step_000010"]
    assert checkpoint.newest_valid(two, pytest.fail) == 10


def test_a_run_goes_on_from_the_previous_checkpoint_to_the_same_weights(
    tmp_path: Path,
    small: Callable[..., TrainConfig],
    weights: Callable[[Path], bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small(checkpoint_every=5)
    run = train(config, tmp_path / "run", quiet=True)
    whole = weights(run.folder)
    state = run.folder / "checkpoints" / "step_000020" / "state.pt"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    assert not run.finished
    train(config, run.folder, quiet=True)
    said = capsys.readouterr().err
    assert "step 20 refused" in said
    assert str(state) in said
    assert run.finished
    assert weights(run.folder) == whole


def test_every_file_of_a_run_is_safe_to_load(tmp_path: Path, small: Callable[..., TrainConfig]) -> None:
    run = train(small(shadows=("openclip",), steps=3), tmp_path / "run", quiet=True)
    folder = run.checkpoint()
    torch.load(folder / "state.pt", weights_only=True)
    assert json.loads((folder / "manifest.json").read_text())["step"] == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.json",
        "model.safetensors",
        "state.pt",
    ]
