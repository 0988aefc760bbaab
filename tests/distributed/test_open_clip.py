"""open_clip's loop on two real processes with our loss: equal to one process, resumed from what rank 0 alone saved."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("open_clip_worker", HERE / "open_clip_worker.py")
assert SPEC and SPEC.loader
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)
NAMES = [f"{name} x{accumulation}" for name, accumulation in worker.VARIANTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes saved."""
    folder = tmp_path_factory.mktemp("open_clip")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [*command, str(HERE / "open_clip_worker.py"), str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_what_one_does(name: str, found: dict[str, Any]) -> None:
    """Weights, temperature, bias, every rank's value, and the state, which is the same on both; x2 is accumulated."""
    gaps = found["compared"][name]
    assert all(gaps[part] <= 1e-10 for part in ("weights", "values", "state")), gaps
    assert gaps["state over ranks"] == 0
    assert gaps["moved"] > 1e-4 and (gaps["scale moved"] > 1e-6) == (name != "kcl x1"), "nothing was compared"


@pytest.mark.parametrize("name", ["neuclip", "amorlip"])
def test_what_rank_0_saved_alone_goes_on_to_the_bit(name: str, found: dict[str, Any]) -> None:
    assert all(found["resumed"][name].values()), found["resumed"][name]


def test_one_process_goes_on_from_it_too(folder: Path) -> None:
    saved = torch.load(folder / "neuclip.pt", weights_only=True)["state_dict"]
    assert next(iter(saved)).startswith("module.")
    model = worker.fresh("neuclip")
    loss = worker.nc.open_clip_loss("neuclip", **worker.OPTIONS["neuclip"]).attach(model)
    model.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    images, texts = worker.whole_batches(1)[0]
    loss(**model(images, texts)).backward()
    assert loss.steps == worker.STEPS + 1 and loss.get_extra_state()["normalizer"]["counters"][3] == worker.STEPS + 1


def test_a_loss_built_for_another_number_of_processes_is_refused(found: dict[str, Any]) -> None:
    assert "world_size=1, rank=0, but this process is rank 0 of 2 in the torch.distributed group" in found["refusal"]
