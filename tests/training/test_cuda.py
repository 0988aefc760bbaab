"""The trainer on a CUDA device: trains, resumes, and stops at the first bad step without a host sync in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuclip_lib.training import TrainConfig, train
from neuclip_lib.training.feed import Batch, Feed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

Small = Callable[..., TrainConfig]


@pytest.mark.parametrize("method", ["openclip", "gcl-batch", "neuclip"])
def test_it_follows_the_run_on_the_cpu(tmp_path: Path, small: Small, method: str) -> None:
    options = {"probe_every": 5, "error_every": 10, "checkpoint_every": 5, "shadows": ()}
    on_cpu = train(small(method, **options), tmp_path / "cpu", quiet=True)
    on_cuda = train(small(method, device="cuda", **options), tmp_path / "cuda", quiet=True)
    for left, right in zip(on_cpu.metrics("probe"), on_cuda.metrics("probe"), strict=True):
        assert right["loss"] == pytest.approx(left["loss"], abs=0.05)
    assert on_cuda.load_model().dim == on_cpu.load_model().dim


def test_a_bad_batch_stops_it_at_the_next_row_with_the_step_named(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Feed.batch

    def poisoned(feed: Feed, step: int) -> Batch:
        batch = real(feed, step)
        if step == 6:
            batch.images[2] = float("nan")
        return batch

    monkeypatch.setattr(Feed, "batch", poisoned)
    with pytest.raises(RuntimeError, match="not a finite number: step 7"):
        train(small("neuclip", device="cuda", log_every=5), tmp_path / "run", quiet=True)
