"""A small run that every test here can afford."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuclip_lib import presets
from neuclip_lib.training import TrainConfig


@pytest.fixture
def small() -> Callable[..., TrainConfig]:
    """The tiny preset, measuring nothing unless asked."""

    def build(method: str = "neuclip", **overrides: Any) -> TrainConfig:
        quiet = {"probe_every": 0, "error_every": 0, "log_every": 1, "checkpoint_every": 0, "data_options": {"n": 128}}
        return presets.tiny(method=method, **{**quiet, "warmup": 2, **overrides})

    return build


@pytest.fixture
def weights() -> Callable[[Path], bytes]:
    """The bytes of the encoders after the last step of a run."""

    def read(folder: Path) -> bytes:
        last = sorted((folder / "checkpoints").glob("step_*"))[-1]
        return (last / "model.safetensors").read_bytes()

    return read
