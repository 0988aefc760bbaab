"""What each method's gradient is worth, on frozen features of real pairs: many passes, and many samples a batch.

Only two small heads are trained, so that the exact gradient over all pairs is at hand. In one common run every method's
normalizer sees every batch; at fixed passes the bias and the variance of every method's gradient are measured there.
Then each method trains heads of its own, and their held-out recall is measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neuclip_lib import data as data_sets
from neuclip_lib.data.order import batch_indices, steps_per_epoch
from neuclip_lib.data.pairs import Chosen
from neuclip_lib.evaluation.retrieval import retrieval
from neuclip_lib.methods import get_method
from neuclip_lib.normalizers import MovingAverageOptions, PrototypeOptions
from neuclip_lib.parts import Contrastive, Settings
from neuclip_lib.progress import track
from neuclip_lib.studies.frozen_features import Features, features_of
from neuclip_lib.studies.frozen_report import draw, table
from neuclip_lib.studies.gradient_error import gradient_errors
from neuclip_lib.studies.keep import Kept, open_study
from neuclip_lib.studies.two_towers import TwoTowers, learn
from neuclip_lib.temperature import TemperatureOptions
from neuclip_lib.training.optim import learning_rate_factor, parameter_groups

__all__ = ["QUICK", "STUDY", "Frozen", "Setting", "draw", "run", "table"]

COMMAND = "python -m neuclip_lib compare frozen"
HELD_OUT = ("validation", "test")


@dataclass(frozen=True)
class Setting:
    """A data set, a batch and a number of passes.

    Args:
        name: of its parts.
        data: a name of ``data.names()``.
        data_options: what ``data.load`` takes besides.
        pairs: how many of the training pairs, drawn once; None for all.
        batch_size: B.
        passes: of every run.
        measured_after: passes of the common run after which gradients are measured.
        batches: fresh ones a measurement; the smaller the batch, the more a bias takes to stand out.
        moving_average: rates of the moving averages.
    """

    name: str
    data: str
    batch_size: int
    passes: int
    measured_after: tuple[int, ...]
    batches: int
    pairs: int | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    moving_average: MovingAverageOptions = field(default_factory=MovingAverageOptions)

    def common(self, seed: int) -> str:
        """Name of the part of the common run."""
        return f"{self.name}_gradients_s{seed}"

    def own(self, method: str, seed: int) -> str:
        """Name of the part of a method's own run."""
        return f"{self.name}_{method}_s{seed}"


@dataclass(frozen=True)
class Frozen:
    """The study's configuration; nothing in it was chosen by its results.

    Args:
        settings: measured one after the other.
        methods: compared; members of the family only.
        trained_by: the method that steers the common run.
        tau: fixed, for every method.
        hidden: width of the heads' hidden layer; None for linear heads.
        dim: embedding dimension d.
        lr: peak of AdamW's learning rate, with the trainer's warm-up and cosine.
        weight_decay: of AdamW.
        warmup: steps.
        prototypes: the laptop preset's stabilisers. No measurement falls on a step with a restart, which every batch
            measured there would begin with.
        words: length of a caption's vector.
        width: length of a picture's vector.
    """

    settings: tuple[Setting, ...]
    methods: tuple[str, ...] = ("openclip", "gcl-batch", "sogclr", "fastclip-v3", "neuclip", "neuclip-mixed")
    trained_by: str = "gcl-batch"
    tau: float = 0.05
    hidden: int | None = None
    dim: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.1
    warmup: int = 50
    prototypes: PrototypeOptions = field(
        default_factory=lambda: PrototypeOptions(m=256, updates=10, restart_every=280, weight_cap=5.0)
    )
    words: int = 1024
    width: int = 256

    def settings_of(self, setting: Setting, n: int, seed: int) -> Settings:
        """What the methods are told of one run."""
        return Settings(
            dim=self.dim,
            batch_size=setting.batch_size,
            temperature=TemperatureOptions(init=self.tau),
            prototypes=self.prototypes,
            moving_average=setting.moving_average,
            n=n,
            steps_per_epoch=steps_per_epoch(n, setting.batch_size),
            epochs=setting.passes,
            seed=seed,
        )

    def parts(self, method: str, settings: Settings) -> Contrastive:
        """A method's parts.

        Raises:
            ValueError: for a method without a normalizer.
        """
        parts = get_method(method).build(settings)
        if not isinstance(parts, Contrastive):
            raise ValueError(f"{method} has no normalizer, and so no part in this study; leave it out")
        return parts


STUDY = Frozen(
    (
        # 15 batches a pass, so that 200 passes stay affordable.
        Setting("icons-200-passes", "icons", 128, 200, (1, 20, 200), batches=600, pairs=1920),
        # About 17,100 training pairs: a sample comes up once in 1,070 steps. The rate that is suggested for 2 passes is
        # 1, which is no moving average at all.
        Setting(
            "captions-many-a-batch",
            "captions",
            16,
            2,
            (1, 2),
            batches=1500,
            data_options={"n": 24_000},
            moving_average=MovingAverageOptions(gamma=0.6, decay_epochs=2),
        ),
    )
)
QUICK = Frozen(
    (Setting("captions-quick", "captions", 16, 3, (1, 3), batches=8, data_options={"n": 256}),),
    prototypes=PrototypeOptions(m=32, updates=2, restart_every=7, weight_cap=5.0),
    words=64,
    width=32,
)


def run(folder: Path, seeds: Sequence[int], quick: bool = False) -> None:
    """Measure what is missing in ``folder`` and draw the picture.

    Args:
        folder: ``results/frozen``.
        seeds: of heads, order and normalizers; the features are the same for all.
        quick: a few seconds, to see that it works; its figures mean nothing.

    Raises:
        RuntimeError: when the folder holds a study of another configuration, or a run diverges.
    """
    measure(QUICK if quick else STUDY, folder, seeds)


def measure(study: Frozen, folder: Path, seeds: Sequence[int]) -> None:
    """:func:`run` with a configuration of one's own."""
    kept = open_study(folder, COMMAND, dataclasses.asdict(study), seeds)
    for setting in study.settings:
        common = [seed for seed in seeds if not kept.has(setting.common(seed))]
        own = [(name, seed) for seed in seeds for name in study.methods if not kept.has(setting.own(name, seed))]
        if not common and not own:
            continue
        features = _features(study, setting)
        steps = setting.passes * steps_per_epoch(len(features.train[0]), setting.batch_size)
        work = [_common_run(study, setting, features, seed, kept) for seed in common]
        work += [_own_run(study, setting, features, name, seed, kept) for name, seed in own]
        for _ in track((step for each in work for step in each), f"frozen, {setting.name}", total=len(work) * steps):
            pass
    draw(kept, folder / "frozen.png")


def _features(study: Frozen, setting: Setting) -> Features:
    train = data_sets.load(setting.data, "train", **setting.data_options)
    if setting.pairs is not None:
        drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: setting.pairs]
        train = Chosen(train, drawn.sort().values)
    held_out = {split: data_sets.load(setting.data, split, **setting.data_options) for split in HELD_OUT}
    return features_of(train, held_out, study.words, study.width)


class _Heads:
    """Two fresh heads and what trains them."""

    def __init__(self, study: Frozen, setting: Setting, features: Features, seed: int) -> None:
        self.study, self.setting, self.x, self.seed = study, setting, features.train, seed
        self.n = len(self.x[0])
        self.per_pass = steps_per_epoch(self.n, setting.batch_size)
        self.towers = TwoTowers(features.widths, study.hidden, study.dim, seed)
        groups = parameter_groups(self.towers, study.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=study.lr, fused=True)
        self.tau = torch.tensor(study.tau)

    def train(self, parts: Contrastive, shadows: Sequence[Contrastive] = ()) -> Iterator[int]:
        """One step a time; yields the number of steps done."""
        steps = self.setting.passes * self.per_pass
        for step in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.study.lr * learning_rate_factor(step, steps, self.study.warmup)
            index = batch_indices(self.n, self.setting.batch_size, self.seed, step)
            normalizers = [shadow.normalizer for shadow in shadows]
            learn(self.towers, self.x, index, parts, normalizers, self.tau, self.optimizer)
            yield step + 1


def _common_run(study: Frozen, setting: Setting, features: Features, seed: int, kept: Kept) -> Iterator[int]:
    """Train by one method, measure every method's gradient on the way, and keep the part."""
    heads = _Heads(study, setting, features, seed)
    settings = study.settings_of(setting, heads.n, seed)
    members = {name: study.parts(name, settings) for name in study.methods}
    steering = members[study.trained_by]
    shadows = [parts for parts in members.values() if parts is not steering]
    measured = []
    for step in heads.train(steering, shadows):
        passes, rest = divmod(step, heads.per_pass)
        if rest == 0 and passes in setting.measured_after:
            found, log_g = gradient_errors(
                heads.towers, heads.x, members, heads.tau, setting.batch_size, setting.batches, seed=1000 + seed
            )
            below = torch.cat(log_g) < math.log(study.prototypes.eps)
            exact = {"mean": float(torch.cat(log_g).mean()), "below_eps": float(below.double().mean())}
            measured.append({"passes": passes, "step": step, "gradients": found, "log_g": exact})
        yield step
    kept.write(setting.common(seed), {**_facts(setting, heads, seed), "measured": measured})


def _own_run(study: Frozen, setting: Setting, features: Features, method: str, seed: int, kept: Kept) -> Iterator[int]:
    """Train by one method and keep its recalls."""
    heads = _Heads(study, setting, features, seed)
    yield from heads.train(study.parts(method, study.settings_of(setting, heads.n, seed)))
    recall = {split: _recall(heads.towers, held_out) for split, held_out in features.held_out.items()}
    kept.write(setting.own(method, seed), {**_facts(setting, heads, seed), "method": method, "recall": recall})


def _facts(setting: Setting, heads: _Heads, seed: int) -> dict[str, Any]:
    return {"setting": setting.name, "seed": seed, "n": heads.n, "batch_size": setting.batch_size}


@torch.no_grad()
def _recall(towers: TwoTowers, held_out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """R@1 both ways, their mean and chance, in percent."""
    x1, x2, group = held_out
    e1, e2 = towers(x1, x2)
    found = retrieval(e1, e2, group, group, ks=(1,))
    ways = {way: found[way]["r@1"] for way in ("image_to_text", "text_to_image")}
    return {**ways, "r@1": sum(ways.values()) / 2, "chance": found["chance"]["r@1"]}
