"""What a run is made of: one frozen dataclass, checked before any work starts, kept as JSON in the run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from neuclip_lib.data.registry import spec_of
from neuclip_lib.devices import pick_device
from neuclip_lib.files import read_json
from neuclip_lib.losses import KclOptions, SiglipOptions
from neuclip_lib.methods import get_method, runs_away
from neuclip_lib.models import check_model_name
from neuclip_lib.normalizers import AmortizedOptions, MovingAverageOptions, PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions
from neuclip_lib.training import options
from neuclip_lib.training.optim import OptimOptions
from neuclip_lib.training.precision import Precision

Option = bool | int | float | str


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run's numbers, and how often it measures and saves.

    Args:
        method: a name of ``method_names()``.
        data: a name of ``data.names()``.
        data_options: further arguments of the data set, such as ``n`` of a procedural one.
        model: ``small``, ``nano``, ``micro``, ``mini`` or a name of open_clip.
        seed: of the weights, the order, the augmentation and the prototypes.
        batch_size: pairs in a step, of all processes together.
        steps: encoder steps in all.
        split: ``final`` trains on train and validation and is evaluated on test; ``tune`` trains on train alone, is
            evaluated on validation and never sees test.
        augment_shift: pixels by which a training image may move.
        precision: of the encoders; the loss and the normalizers are float32 in every case. float16 scales the loss and
            skips a step that overflows.
        optim: AdamW and its schedule.
        temperature: how tau starts and whether it is learned.
        prototypes: the NPN, for ``neuclip`` and wherever it rides along.
        moving_average: per-sample averages, for SogCLR, FastCLIP and SCENT.
        amortized: the networks of AmorLIP.
        siglip: the bias of SigLIP.
        kcl: the kernel of KCL.
        shadows: methods whose normalizers see every batch without steering the run.
        threads: of PyTorch on the CPU; None leaves them as they are. The last bits depend on it.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``auto`` for CUDA where there is one and else the CPU.
        log_every: steps between rows of training figures.
        probe_every: steps between exact losses on the probe set; 0 for never.
        error_every: steps between measurements of the normalizer error; 0 for never.
        checkpoint_every: steps between checkpoints; 0 for one at the end.
        keep_last: checkpoints that are kept; None keeps all.
        preset: the starting values that the others replaced (laptop, tiny); not compared when a run is resumed.
    """

    method: str = "neuclip"
    data: str = "icons"
    data_options: dict[str, Option] = field(default_factory=dict)
    model: str = "small"
    seed: int = 0
    batch_size: int = 128
    steps: int = 700
    split: Literal["final", "tune"] = "final"
    augment_shift: int = 0
    precision: Precision = "float32"
    optim: OptimOptions = field(default_factory=OptimOptions)
    temperature: TemperatureOptions = field(default_factory=TemperatureOptions)
    prototypes: PrototypeOptions = field(default_factory=PrototypeOptions)
    moving_average: MovingAverageOptions = field(default_factory=MovingAverageOptions)
    amortized: AmortizedOptions = field(default_factory=AmortizedOptions)
    siglip: SiglipOptions = field(default_factory=SiglipOptions)
    kcl: KclOptions = field(default_factory=KclOptions)
    shadows: tuple[str, ...] = ()
    threads: int | None = None
    device: str = "cpu"
    log_every: int = 10
    probe_every: int = 100
    error_every: int = 0
    checkpoint_every: int = 100
    keep_last: int | None = 2
    preset: str = "custom"

    @property
    def train_split(self) -> str:
        """The part of the data that is trained on."""
        return "train" if self.split == "tune" else "train+validation"

    @property
    def eval_split(self) -> str:
        """The part that is evaluated on; a run that tunes never reads test."""
        return "validation" if self.split == "tune" else "test"

    def check(self) -> None:
        """Look at every field without reading data.

        Raises:
            ValueError: naming the field, the value, what is allowed and, for a name, the closest one.
        """
        options.from_dict(TrainConfig, options.to_dict(self))
        for method in (self.method, *self.shadows):
            get_method(method)
        if len(set(self.shadows)) < len(self.shadows) or self.method in self.shadows:
            raise ValueError(f"shadows must be different methods other than {self.method!r} itself, got {self.shadows}")
        if empty := [name for name in self.shadows if not get_method(name).has_normalizer]:
            raise ValueError(f"shadows are normalizers that ride along, and {', '.join(empty)} has none; leave it out")
        spec_of(self.data)
        check_model_name(self.model)
        self._check_numbers()
        self.optim.check()
        self.temperature.check()
        for group in (self.prototypes, self.moving_average, self.amortized, self.siglip, self.kcl):
            group.check()
        get_method(self.method).check(self.temperature)
        pick_device(self.device)

    def doubts(self) -> list[str]:
        """What is allowed and probably not meant; the trainer warns of it."""
        doubts = []
        if self.optim.warmup > self.steps > 0:
            doubts.append(
                f"the warm-up of {self.optim.warmup} steps is longer than the run of {self.steps}: "
                "the learning rate never reaches its peak"
            )
        if runs_away(get_method(self.method), self.temperature):
            doubts.append(
                f"{self.method} learns the temperature with temperature.rho 0: nothing holds it, and it rises to "
                f"temperature.high {self.temperature.high}; set rho to the mean KL divergence that you want of the "
                "negatives' weights from uniform (nc.suggest_rho measures it)"
            )
        return doubts

    def _check_numbers(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, got {self.batch_size}: one pair alone has no negatives")
        for name, low in (("steps", 0), ("seed", 0), ("augment_shift", 0), ("log_every", 1), ("probe_every", 0)):
            _at_least(self, name, low)
        for name, low in (("error_every", 0), ("checkpoint_every", 0), ("threads", 1), ("keep_last", 1)):
            _at_least(self, name, low)
        most = 4 * (os.cpu_count() or 1)
        if self.threads is not None and self.threads > most:
            raise ValueError(f"threads must be at most {most} on this machine, got {self.threads}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if not re.fullmatch(r"[\w-][\w.-]*", self.preset):
            raise ValueError(f"preset must be a plain name, got {self.preset!r}")


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON values; :func:`from_json` gives an equal one."""
    return options.to_dict(config)


def from_json(values: Mapping[str, Any]) -> TrainConfig:
    """The config back from JSON values.

    Raises:
        ValueError: for an unknown field or a value of the wrong type.
    """
    return options.from_dict(TrainConfig, values)


def read_config(path: Path) -> TrainConfig:
    """The config in a file.

    Raises:
        RuntimeError: naming the file, when it is missing, damaged or of another library's version.
    """
    try:
        return from_json(read_json(path))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise RuntimeError(
            f"{path} is no training config of this version: {error}; restore it, or choose another folder"
        ) from error


def differences(left: TrainConfig, right: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ, by dotted name, with both values; the preset's name is left out."""
    return {name: pair for name, pair in options.differences(left, right).items() if name != "preset"}


def _at_least(config: TrainConfig, name: str, low: int) -> None:
    value = getattr(config, name)
    if value is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
