"""Whole runs under torchrun: equal to one process, resumed at another size, restarted after a killed worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from neuclip_lib import presets
from neuclip_lib.training import Run, train
from neuclip_lib.training.folder import default_folder

# fastclip-v2 keeps the most per sample: two averages, two temperatures, four moments. 132 = 8 x 16 + 4: a remainder.
METHOD, COMMON = "fastclip-v2", ["--preset", "tiny", "--data-options", "n=132", "--checkpoint-every", "5"]


def command(size: int, out: Path, *extra: str, method: str = METHOD, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    launcher.append(f"--max-restarts={restarts}")
    return [*launcher, "-m", "neuclip_lib", "train", *COMMON, "--method", method, "--out", str(out), *extra]


def environment() -> dict[str, str]:
    stale = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{key: value for key, value in os.environ.items() if key not in stale}, "OMP_NUM_THREADS": "1"}


def launch(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_rows(made: Path, expected: Path, tolerance: float) -> None:
    got, want = rows(made), rows(expected)
    assert [(row["step"], row["kind"]) for row in got] == [(row["step"], row["kind"]) for row in want]
    for a, b in zip(got, want, strict=True):
        for key, value in b.items():
            if isinstance(value, float) and key != "samples_per_second":
                assert a[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (b["step"], b["kind"], key)
            for name, figures in value.items() if key == "estimators" else ():
                # Adam makes whole steps of AmorLIP's rounding noise; in float64 the states agree to 1e-10.
                assert a[key][name]["mse"] == pytest.approx(figures["mse"], rel=0.15, abs=tolerance), name


def assert_same_weights(made: Path, expected: Path, tolerance: float) -> None:
    got, want = (load_file(folder / "checkpoints/step_000020/model.safetensors") for folder in (made, expected))
    for name, exact in want.items():
        # In length: AdamW's first steps blow single entries of rounding noise up.
        assert (got[name] - exact).norm().item() <= tolerance * exact.norm().item(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, unbroken."""
    config = presets.tiny(METHOD, data_options={"n": 132}, checkpoint_every=5, shadows=("neuclip", "amorlip"))
    return train(config, tmp_path_factory.mktemp("alone") / "run", quiet=True).folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two processes, unbroken; the folder and what was said."""
    folder = tmp_path_factory.mktemp("two") / "run"
    done = launch(command(2, folder, "--keep-last", "9", "--shadows", "neuclip", "amorlip"))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_two_processes_record_and_learn_what_one_does(alone: Path, two: tuple[Path, str]) -> None:
    folder, said = two
    assert_same_rows(folder, alone, 2e-3)
    assert_same_weights(folder, alone, 2e-3)
    assert said.count(" steps of 16 (8 on each of 2 processes) a pass; the ") == 1
    assert said.count("finished:") == 1
    assert Run(folder).finished


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_two_processes_goes_on_with_another_number(
    size: int, two: tuple[Path, str], tmp_path: Path
) -> None:
    """From the middle of the second pass; 3 processes share a batch of 24 in the run they take up."""
    folder = tmp_path / "run"
    if size == 1:
        shutil.copytree(two[0], folder)
        for step in (15, 20):
            shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
        train(Run(folder).config, folder, quiet=True)
        assert_same_weights(folder, two[0], 2e-3)
        assert_same_rows(folder, two[0], 2e-3)
        return
    options = ["--batch-size", "24", "--keep-last", "9"]
    assert launch(command(2, folder, *options)).returncode == 0
    unbroken = tmp_path / "unbroken"
    shutil.copytree(folder, unbroken)
    for step in (10, 15, 20):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    done = launch(command(3, folder, *options))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(folder, unbroken, 2e-3)
    assert_same_rows(folder, unbroken, 2e-3)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of its threads in /proc")
def test_no_thread_of_the_exchange_outlives_the_training(tmp_path: Path) -> None:
    """One that does may want the interpreter while it ends, and then takes the finished process down with SIGABRT."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "from neuclip_lib import presets\n"
        "from neuclip_lib.training import train\n"
        "train(presets.tiny('neuclip', data_options={'n': 132}, steps=2), sys.argv[1], quiet=True)\n"
        "names = sorted(p.read_text().strip() for p in pathlib.Path('/proc/self/task').glob('*/comm'))\n"
        "print('gloo threads:', sum('gloo' in name for name in names))\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = launch([*launcher, str(script), str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("gloo threads: 0\n") == 2, done.stdout


def workers(out: Path) -> Iterator[tuple[int, str]]:
    """(pid, rank) of the processes that train in ``out``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
            except (OSError, UnicodeDecodeError):
                continue
            if str(out) in words and "RANK" in variables and "torch.distributed.run" not in words:
                yield int(entry.name), variables["RANK"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for the workers in /proc")
@pytest.mark.parametrize("killed", ["0", "1"])
def test_a_killed_worker_is_restarted_from_the_last_checkpoint(killed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--steps", "200", "--checkpoint-every", "20", "--probe-every", "50", "--error-every", "0"]
    process = subprocess.Popen(
        command(2, folder, *options, method="neuclip", restarts=1),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder / "checkpoints/step_000020", process)
    pid = next(pid for pid, rank in workers(folder) if rank == killed)
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    facts = json.loads((folder / "versions.json").read_text())
    assert len(facts["resumed"]) == 1 and facts["resumed"][0]["step"] >= 20
    steps = [row["step"] for row in rows(folder) if row["kind"] == "train"]
    assert steps == sorted(set(steps)) and steps[-1] == 200
    assert Run(folder).finished


def test_sigterm_to_the_launcher_saves_and_the_same_command_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    folder, unbroken = tmp_path / "run", tmp_path / "unbroken"
    options = [
        "--steps",
        "150",
        "--checkpoint-every",
        "0",
        "--probe-every",
        "50",
        "--error-every",
        "0",
        "--log-every",
        "1",
    ]
    process = subprocess.Popen(
        command(2, folder, *options, method="neuclip"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder / "metrics.jsonl", process)
    while len(rows(folder)) < 5:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    saved = sorted((folder / "checkpoints").glob("step_*"))
    assert len(saved) == 1, errors[-3000:]
    assert f"saved after step {int(saved[0].name[5:])}" in errors
    assert launch(command(2, folder, *options, method="neuclip")).returncode == 0
    assert launch(command(2, unbroken, *options, method="neuclip")).returncode == 0
    last = "checkpoints/step_000150/model.safetensors"
    assert (folder / last).read_bytes() == (unbroken / last).read_bytes(), "the same ranks and threads: the same bits"


def test_a_batch_that_cannot_be_shared_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = launch(command(2, tmp_path / "run", "--batch-size", "15"))
    assert done.returncode != 0
    assert "must be divisible by their number: 15 is not by 2; take 14 or 16" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_default_folder_does_not_depend_on_the_rank() -> None:
    assert default_folder(presets.tiny("openclip")).parts[-2:] == ("tiny", "openclip")
