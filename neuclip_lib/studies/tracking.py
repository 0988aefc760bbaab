"""Which normalizer keeps up with moving encoders, as the data grow and as the batch shrinks: synthetic pairs.

One method trains two small towers; all other normalizers ride along as shadows, so that all see the same embeddings. At
fixed steps each one's error is measured against the exact log-normalizers over all n pairs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neuclip_lib.data.order import batch_indices, steps_per_epoch
from neuclip_lib.evaluation.normalizer_error import Estimator, normalizer_error
from neuclip_lib.methods import get_method
from neuclip_lib.normalizers import MovingAverageOptions, PrototypeNormalizer, PrototypeOptions
from neuclip_lib.parts import Settings
from neuclip_lib.progress import track
from neuclip_lib.studies.keep import Kept, open_study
from neuclip_lib.studies.latent_pairs import LatentPairs
from neuclip_lib.studies.tracking_report import RECENT, draw, table
from neuclip_lib.studies.two_towers import TwoTowers, learn
from neuclip_lib.temperature import TemperatureOptions

__all__ = ["QUICK", "STUDY", "Setting", "Tracking", "draw", "run", "table"]

COMMAND = "python -m neuclip_lib compare tracking"


@dataclass(frozen=True)
class Setting:
    """Number of pairs n and global batch B."""

    n: int
    batch_size: int

    def part(self, seed: int) -> str:
        """Name of the part that holds its figures."""
        return f"n{self.n}_B{self.batch_size}_s{seed}"


@dataclass(frozen=True)
class Tracking:
    """The study's configuration.

    Args:
        settings: every (n, B) is a run of its own.
        trained_by: the method that steers; its normalizer is measured with the others.
        shadows: methods whose normalizers ride along.
        steps: of training, at a constant learning rate: the embeddings keep moving to the end.
        measure_every: steps from one measurement to the next; the last step must be one.
        tau: fixed.
        hidden: width of the towers' hidden layer.
        dim: embedding dimension d.
        lr: of AdamW without weight decay.
        gamma: constant rate of the moving average after its first pass.
        prototypes: of the prototype network; the last ``m`` pairs themselves, which learn nothing, stand beside it.
        anchors: training pairs that the error is measured on.
    """

    settings: tuple[Setting, ...] = (
        Setting(500, 128),  # every pair comes every fourth step: here an average per sample is hard to beat
        Setting(4_000, 128),
        Setting(20_000, 128),
        Setting(100_000, 128),
        Setting(20_000, 32),
    )
    trained_by: str = "gcl-batch"
    shadows: tuple[str, ...] = ("openclip", "sogclr", "neuclip")
    steps: int = 2000
    measure_every: int = 250
    tau: float = 0.07
    hidden: int = 128
    dim: int = 64
    lr: float = 1e-3
    gamma: float = 0.6
    prototypes: PrototypeOptions = field(default_factory=lambda: PrototypeOptions(m=256, updates=10, restart_every=500))
    pairs: LatentPairs = field(default_factory=LatentPairs)
    anchors: int = 1000

    def settings_of(self, setting: Setting, seed: int) -> Settings:
        """What the methods are told of one run."""
        per_epoch = steps_per_epoch(setting.n, setting.batch_size)
        return Settings(
            dim=self.dim,
            batch_size=setting.batch_size,
            temperature=TemperatureOptions(init=self.tau),
            prototypes=self.prototypes,
            moving_average=MovingAverageOptions(gamma=self.gamma),
            n=setting.n,
            steps_per_epoch=per_epoch,
            epochs=math.ceil(self.steps / per_epoch),
            seed=seed,
        )


STUDY = Tracking()
QUICK = Tracking(
    settings=(Setting(256, 32), Setting(512, 32), Setting(512, 16)),
    steps=40,
    measure_every=20,
    prototypes=PrototypeOptions(m=32, updates=2, restart_every=20),
    anchors=64,
)


def run(folder: Path, seeds: Sequence[int], quick: bool = False) -> None:
    """Measure what is missing in ``folder`` and draw the picture.

    Args:
        folder: ``results/tracking``.
        seeds: of data, towers, order and normalizers; every one is a part a setting.
        quick: a few seconds, to see that it works; its figures mean nothing.

    Raises:
        RuntimeError: when the folder holds a study of another configuration, or a run diverges.
    """
    study = QUICK if quick else STUDY
    kept = open_study(folder, COMMAND, dataclasses.asdict(study), seeds)
    # Seed by seed: a half-finished study compares what is there.
    missing = [(setting, seed) for seed in seeds for setting in study.settings if not kept.has(setting.part(seed))]
    steps = ((setting, seed, row) for setting, seed in missing for row in _measured(study, setting, seed, kept))
    for _ in track(steps, "tracking", total=len(missing) * study.steps):
        pass
    draw(kept, folder / "tracking.png")


def _measured(study: Tracking, setting: Setting, seed: int, kept: Kept) -> Iterator[int]:
    """Train, measure and keep one part; yields after every step, for the progress line."""
    x = study.pairs.draw(setting.n, seed)
    towers = TwoTowers((study.pairs.width, study.pairs.width), study.hidden, study.dim, seed)
    settings = study.settings_of(setting, seed)
    parts = get_method(study.trained_by).build(settings)
    built = {name: get_method(name).build(settings).normalizer for name in study.shadows}
    shadows = {name: normalizer for name, normalizer in built.items() if normalizer is not None}
    kept_pairs = dataclasses.replace(study.prototypes, updates=0, restart_every=1)
    shadows[RECENT] = PrototypeNormalizer(study.dim, setting.batch_size, kept_pairs, seed)
    estimators = {**shadows} if parts.normalizer is None else {study.trained_by: parts.normalizer, **shadows}
    optimizer = torch.optim.AdamW(towers.parameters(), lr=study.lr, weight_decay=0.0, fused=True)
    tau, curve = torch.tensor(study.tau), []
    for step in range(study.steps):
        index = batch_indices(setting.n, setting.batch_size, seed, step)
        learn(towers, x, index, parts, shadows.values(), tau, optimizer)
        if (step + 1) % study.measure_every == 0:
            curve.append({"step": step + 1, "errors": _errors(study, setting, towers, x, estimators, seed)})
        yield step
    kept.write(setting.part(seed), {**dataclasses.asdict(setting), "seed": seed, "curve": curve})


@torch.no_grad()
def _errors(
    study: Tracking,
    setting: Setting,
    towers: TwoTowers,
    x: tuple[torch.Tensor, torch.Tensor],
    estimators: Mapping[str, Estimator],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Mean square error, bias and correlation of every estimator on the same anchors and draws."""
    e1, e2 = towers(*x)
    found = normalizer_error(
        e1, e2, torch.arange(setting.n), estimators, study.tau, setting.batch_size, study.anchors, seed
    )
    return {name: {key: one[key] for key in ("mse", "bias", "correlation")} for name, one in found.items()}
