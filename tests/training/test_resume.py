"""A run that was stopped, however and wherever, ends with the same weights to the bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuclip_lib.training import Run, TrainConfig, checkpoint, train
from neuclip_lib.training.config import to_json

Small = Callable[..., TrainConfig]
Weights = Callable[[Path], bytes]

SCRIPT = """
import json, sys
from neuclip_lib.training import train
from neuclip_lib.training.config import from_json
train(from_json(json.loads(sys.argv[1])), sys.argv[2])
"""


def _start(config: TrainConfig, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(to_json(config)), str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in Run(folder).metrics()):
            return
        time.sleep(0.002)
    if process.poll() is None:
        process.kill()
    pytest.fail(f"step {step} was not reached: {process.communicate()[1][-2000:]}")


def _rows(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "samples_per_second"} for row in run.metrics()]


def _cut_to(source: Path, target: Path, step: int) -> None:
    """What a run killed right after ``step`` leaves: later checkpoints never came; rows may have."""
    shutil.copytree(source, target)
    checkpoint.discard_after(target / "checkpoints", step)
    for other in checkpoint.steps_in(target / "checkpoints")[:-1]:
        shutil.rmtree(checkpoint.step_folder(target / "checkpoints", other))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openclip", "neuclip"])
def test_taken_up_after_any_step_the_end_is_the_same_to_the_bit(
    tmp_path: Path, small: Small, weights: Weights, method: str
) -> None:
    # 72 prototypes are filled by 16 pairs a step until step 5 and drawn anew in step 8.
    config = small(
        method,
        steps=10,
        m=72,
        restart_every=7,
        checkpoint_every=1,
        keep_last=None,
        learned=True,
        log_every=4,
        probe_every=5,
        error_every=6,
        shadows=("gcl-batch",),
    )
    whole = train(config, tmp_path / "whole", quiet=True)
    expected, rows = weights(whole.folder), _rows(whole)
    assert {row["kind"] for row in rows} == {"train", "probe", "normalizer_error"}
    for step in range(10):
        if step == 0:  # killed after the config was written and before the first checkpoint
            shutil.copytree(whole.folder, folder := tmp_path / "0")
            shutil.rmtree(folder / "checkpoints")
        else:
            _cut_to(whole.folder, folder := tmp_path / str(step), step)
        again = train(config, folder, quiet=True)
        assert weights(folder) == expected, f"taken up after step {step}"
        assert _rows(again) == rows, f"taken up after step {step}"


def _without(part: str, state: dict[str, Any]) -> None:
    """Lose one part of a checkpoint's state."""
    if part == "adagrad":
        state["normalizer"]["adagrad_sum"].zero_()
    elif part == "prototypes":
        state["normalizer"]["w"].neg_()
    elif part == "queue":
        state["normalizer"]["queue"].neg_()
    elif part == "generator":
        state["normalizer"]["generator"] = checkpoint.torch.Generator().manual_seed(0).get_state()
    elif part == "normalizer's step":
        state["normalizer"]["counters"][3] = 1
    elif part == "adamw":
        for entry in state["optimizer"]["state"].values():
            entry["exp_avg"].zero_()
    elif part == "temperature":
        state["temperature"]["log_inverse"].fill_(3.0)
    else:
        assert part == "nothing"


@pytest.mark.parametrize(
    "part",
    ["nothing", "adagrad", "prototypes", "queue", "generator", "normalizer's step", "adamw", "temperature"],
)
def test_every_part_of_the_state_is_needed(
    tmp_path: Path, small: Small, weights: Weights, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Resuming without one part of the checkpoint must show, or the test above would prove nothing."""
    # 12 of the 16 queued pairs are drawn at a restart, so that the draw matters and not only its order.
    config = small("neuclip", steps=12, m=12, restart_every=4, checkpoint_every=6, keep_last=None, learned=True)
    whole = train(config, tmp_path / "whole", quiet=True)
    _cut_to(whole.folder, tmp_path / "again", 6)
    if part == "queue":  # it is read at restarts: make the queue outlive the batch that a restart follows
        config = small("neuclip", steps=12, m=40, restart_every=7, checkpoint_every=6, keep_last=None, learned=True)
        whole = train(config, tmp_path / "longer", quiet=True)
        shutil.rmtree(tmp_path / "again")
        _cut_to(whole.folder, tmp_path / "again", 6)
    real = checkpoint.load_state

    def load(*arguments: Any) -> dict[str, Any]:
        state = real(*arguments)
        _without(part, state)
        return state

    monkeypatch.setattr(checkpoint, "load_state", load)
    train(config, tmp_path / "again", quiet=True)
    assert (weights(tmp_path / "again") == weights(whole.folder)) == (part == "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openclip", "neuclip"])
def test_killed_at_a_random_step_and_taken_up_the_end_is_the_same_to_the_bit(
    tmp_path: Path, small: Small, weights: Weights, method: str
) -> None:
    config = small(method, steps=40, m=200, restart_every=25, checkpoint_every=3, probe_every=7)
    step = random.randrange(1, 36)
    process = _start(config, tmp_path / "killed")
    _wait_for_step(process, tmp_path / "killed", step)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not Run(tmp_path / "killed").finished
    run = train(config, tmp_path / "killed", quiet=True)
    whole = train(config, tmp_path / "whole", quiet=True)
    assert weights(run.folder) == weights(whole.folder), f"killed at step {step}"
    assert _rows(run) == _rows(whole), f"killed at step {step}"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_saves_where_it_is_and_says_how_to_go_on(
    tmp_path: Path, small: Small, weights: Weights, number: signal.Signals, code: int
) -> None:
    config = small("neuclip", steps=60, m=200, data_options={"n": 128})
    folder = tmp_path / "stopped"
    arguments = ["--preset", "tiny", "--out", str(folder), "--steps", "60", "--data-options", "n=128"]
    arguments += ["--prototypes.m", "200", "--probe-every", "0", "--error-every", "0", "--log-every", "1"]
    arguments += ["--checkpoint-every", "0", "--optim.warmup", "2"]
    command = [sys.executable, "-m", "neuclip_lib", "train", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _wait_for_step(process, folder, 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    run = Run(folder)
    step = run.step
    assert 3 <= step < 60
    assert run.metrics()[-1]["step"] == step
    assert f"saved after step {step}" in said
    assert "the same command goes on" in said
    assert run.config == config
    train(config, folder, quiet=True)
    whole = train(config, tmp_path / "whole", quiet=True)
    assert weights(folder) == weights(whole.folder)
    assert [row["step"] for row in run.metrics()] == list(range(1, 61))


def test_a_model_of_open_clip_is_taken_up_to_the_bit_too(tmp_path: Path, small: Small, weights: Weights) -> None:
    config = small("neuclip", model="nano", steps=5, checkpoint_every=2, keep_last=None, learned=True)
    whole = train(config, tmp_path / "whole", quiet=True)
    _cut_to(whole.folder, tmp_path / "again", 2)
    train(config, tmp_path / "again", quiet=True)
    assert weights(tmp_path / "again") == weights(whole.folder)


def test_a_finished_run_returns_at_once_and_changes_nothing(tmp_path: Path, small: Small) -> None:
    config = small("openclip", steps=3)
    run = train(config, tmp_path / "run", quiet=True)
    before = {
        path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"
    }
    begun = time.perf_counter()
    assert train(config, run.folder, quiet=True).finished
    assert time.perf_counter() - begun < 1
    after = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
