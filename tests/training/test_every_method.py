"""What holds for every method in the table: numerics on real data at the smallest temperature, and resuming."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuclip_lib import presets
from neuclip_lib.methods import get_method, method_names
from neuclip_lib.training import Run, TrainConfig, checkpoint, train

Small = Callable[..., TrainConfig]
Weights = Callable[[Path], bytes]


def finite(value: Any, where: str = "") -> None:
    """Every tensor and number of a state is finite; a log u of minus infinity is a sample not visited yet."""
    if isinstance(value, dict):
        for key, item in value.items():
            finite(item, f"{where}/{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            finite(item, f"{where}/{place}")
    elif isinstance(value, torch.Tensor) and value.is_floating_point():
        whole = torch.isfinite(value) | (value == -math.inf) if where.endswith("/log_u") else torch.isfinite(value)
        assert bool(whole.all()), where


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_icons_at_a_temperature_of_one_hundredth_stay_finite(method: str, precision: str, tmp_path: Path) -> None:
    """Exponents reach 200 there, far beyond what float32 can hold outside logs."""
    options: dict[str, Any] = {"steps": 6, "batch_size": 32, "m": 48, "warmup": 1, "checkpoint_every": 0}
    options |= {"probe_every": 0, "error_every": 6, "log_every": 1, "temperature.init": 0.01, "precision": precision}
    if get_method(method).tau == "free":
        options |= {"temperature.learned": True, "temperature.rho": 3.0}
    run = train(presets.laptop(method, **options), tmp_path / "run", quiet=True)
    rows = run.metrics("train")
    assert len(rows) == 6
    for row in rows:
        assert all(value is not None for value in row.values()), row
        assert row["tau"] >= 0.01 and row["tau"] < 0.2
    for name, figures in run.metrics("normalizer_error")[-1]["estimators"].items():
        assert figures["not_finite"] == 0, name
    finite(checkpoint.load_state(run.checkpoint()))


@pytest.mark.parametrize("method", method_names())
def test_taken_up_in_mid_epoch_or_at_its_end_or_finished_it_is_the_same_run(
    method: str, tmp_path: Path, small: Small, weights: Weights
) -> None:
    """107 pairs, 6 steps of 16 a pass: step 3 is inside the first, 6 is its end; all as in the unbroken run."""
    learned = get_method(method).tau == "free"
    config = small(
        method,
        steps=9,
        checkpoint_every=3,
        keep_last=None,
        m=40,
        restart_every=5,
        **{"temperature.learned": learned, "temperature.rho": 1.0, "amortized.average": 0.5},
    )
    whole = train(config, tmp_path / "whole", quiet=True)
    expected = weights(whole.folder)
    state = checkpoint.load_state(whole.checkpoint())
    for step in (3, 6):
        folder = tmp_path / str(step)
        shutil.copytree(whole.folder, folder)
        checkpoint.discard_after(folder / "checkpoints", step)
        again = train(config, folder, quiet=True)
        assert weights(folder) == expected, f"taken up after step {step}"
        assert _equal(checkpoint.load_state(again.checkpoint()), state), f"taken up after step {step}"
        assert _rows(again) == _rows(whole)
    finished = (whole.folder / "metrics.jsonl").read_bytes()
    train(config, whole.folder, quiet=True)
    assert weights(whole.folder) == expected and (whole.folder / "metrics.jsonl").read_bytes() == finished


def _rows(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "samples_per_second"} for row in run.metrics()]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right
