"""A run on disk: what it was asked to do, what it measured, and what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from neuclip_lib import data as data_sets
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.files import read_json
from neuclip_lib.methods import Settings, get_method
from neuclip_lib.models import ImageTextModel, load_model
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.parts import Parts
from neuclip_lib.temperature import AnyTemperature
from neuclip_lib.training import checkpoint
from neuclip_lib.training.build import Samples, settings_of
from neuclip_lib.training.config import TrainConfig, read_config
from neuclip_lib.training.log import METRICS, Row, read_rows

CONFIG, VERSIONS, CHECKPOINTS, FAILURE = "config.json", "versions.json", "checkpoints", "failure"


class Run:
    """Opens the folder of a run, finished or not.

    Args:
        folder: it holds ``config.json``, ``versions.json``, ``metrics.jsonl`` and ``checkpoints/``.

    Raises:
        RuntimeError: when the folder is not that of a run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not (self.folder / CONFIG).is_file():
            what = "has no config.json" if self.folder.is_dir() else "does not exist"
            raise RuntimeError(
                f"{self.folder} is not the folder of a run: it {what}; train one first: "
                f"python -m neuclip_lib train --out {self.folder}"
            )
        self.config: TrainConfig = read_config(self.folder / CONFIG)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self.config.method} on {self.config.data}, step {self.step})"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def step(self) -> int:
        """Finished steps of the newest checkpoint, 0 when there is none; its files are not checked here."""
        return max(checkpoint.steps_in(self.checkpoints), default=0)

    @property
    def finished(self) -> bool:
        """Whether a whole checkpoint of the last step is there."""
        folder = checkpoint.step_folder(self.checkpoints, self.config.steps)
        try:
            checkpoint.verify(folder)
        except (RuntimeError, KeyError, TypeError):
            return False
        return True

    def metrics(self, kind: str | None = None) -> list[Row]:
        """Rows of ``metrics.jsonl``, all or those of one kind (``train``, ``probe``, ``normalizer_error``).

        Raises:
            RuntimeError: when a line is damaged.
        """
        return [row for row in read_rows(self.folder / METRICS) if kind in (None, row["kind"])]

    def versions(self) -> dict[str, Any]:
        """What the run was made with: library and package versions, machine, hash of the data."""
        return read_versions(self.folder)

    def load_model(self, step: int | None = None) -> ImageTextModel:
        """The encoders after ``step`` steps, or of the newest whole checkpoint; on the CPU.

        Raises:
            RuntimeError: when there is no such checkpoint, or it is damaged.
        """
        return load_model(self.checkpoint(step))

    def load_parts(self, step: int | None = None) -> Parts:
        """The method's parts with their state; on the CPU."""
        state = self._state(step)
        parts = self._parts(self.config.method, state["normalizer"])
        parts.learned.load_state_dict(state["learned"])
        return parts

    def load_normalizer(self, step: int | None = None) -> Normalizer | None:
        """The method's own normalizer with its state, on the CPU; None for a loss without one."""
        return self.load_parts(step).normalizer

    def load_shadows(self, step: int | None = None) -> dict[str, Normalizer]:
        """The normalizers that rode along, by method."""
        states = self._state(step)["shadows"]
        loaded = {name: self._parts(name, states[name]).normalizer for name in states}
        return {name: normalizer for name, normalizer in loaded.items() if normalizer is not None}

    def load_temperature(self, step: int | None = None) -> AnyTemperature:
        """The temperature with its state; on the CPU."""
        temperature = get_method(self.config.method).temperature(self._settings())
        temperature.load_state_dict(self._state(step)["temperature"])
        return temperature

    def tau(self, step: int | None = None) -> float:
        """The temperature that the next step would use; the mean where samples have their own."""
        temperature = self.load_temperature(step)
        temperature.begin(self.step if step is None else step)
        return temperature.typical().item()

    def train_pairs(self) -> Pairs:
        """What the run was trained on.

        Raises:
            RuntimeError: when the data set on this machine is not the one it was trained on.
        """
        return self._pairs(self.config.train_split)

    def eval_pairs(self, split: str | None = None) -> Pairs:
        """What the run is evaluated on: test, or validation for a run that tunes.

        Args:
            split: another part of the data.

        Raises:
            ValueError: when test is asked of a run that tunes: values chosen on it would be no measurement.
            RuntimeError: as :meth:`train_pairs`.
        """
        split = split or self.config.eval_split
        if self.config.split == "tune" and split in ("test", "all"):
            raise ValueError(
                f"{self.folder} is a run for tuning (split='tune') and is evaluated on validation, not on {split!r}; "
                "train with split='final' to read the test part"
            )
        return self._pairs(split)

    def checkpoint(self, step: int | None = None) -> Path:
        """Folder of a whole checkpoint, the newest one if no step is given.

        Raises:
            RuntimeError: when there is none, or it is damaged.
        """
        if step is None:
            step = checkpoint.newest_valid(self.checkpoints)
        if step is None or not checkpoint.step_folder(self.checkpoints, step).is_dir():
            have = ", ".join(map(str, checkpoint.steps_in(self.checkpoints))) or "none"
            wanted = "no whole checkpoint" if step is None else f"no checkpoint of step {step}"
            raise RuntimeError(
                f"{self.folder} has {wanted} (steps saved: {have}); train it with the same command again"
            )
        checkpoint.verify(folder := checkpoint.step_folder(self.checkpoints, step))
        return folder

    def _state(self, step: int | None) -> dict[str, Any]:
        return checkpoint.load_state(self.checkpoint(step))

    def _settings(self) -> Settings:
        versions = self.versions()
        data, dim = versions["data"], int(versions["model"]["dim"])
        samples = Samples(int(data.get("index_end", data["pairs"])), int(data["pairs"]) // self.config.batch_size)
        return settings_of(self.config, dim, torch.device("cpu"), samples)

    def _parts(self, method: str, state: dict[str, Any]) -> Parts:
        parts = get_method(method).build(self._settings())
        if parts.normalizer is not None:
            parts.normalizer.load_state_dict(state)
        return parts

    def _pairs(self, split: str) -> Pairs:
        pairs = data_sets.load(self.config.data, split, **self.config.data_options)
        recorded = self.versions()["data"]["content_hash"]
        if pairs.content_hash != recorded:
            raise RuntimeError(
                f"the data set {self.config.data!r} on this machine differs from the one of {self.folder} "
                f"(content {pairs.content_hash[:12]} instead of {recorded[:12]}); train again in another folder"
            )
        return pairs


def read_versions(folder: Path) -> dict[str, Any]:
    """What ``versions.json`` says of a run.

    Raises:
        RuntimeError: naming the file, when it is missing, damaged or lacks a part.
    """
    advice = "restore it from a copy, or train again in another folder"
    try:
        facts = read_json(folder / VERSIONS)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {advice}") from error
    shape = {"versions": (), "data": ("content_hash", "pairs"), "model": ("dim",)}
    whole = isinstance(facts, dict) and isinstance(facts.get("resumed"), list)
    if not whole or not all(
        isinstance(facts.get(part), dict) and all(key in facts[part] for key in keys) for part, keys in shape.items()
    ):
        raise RuntimeError(f"{folder / VERSIONS} is damaged: it lacks a part; {advice}")
    return facts


def load(folder: Path | str) -> ImageTextModel:
    """The encoders of a run (its newest whole checkpoint), or of a folder that ``save_model`` wrote; on the CPU.

    Raises:
        RuntimeError: when the folder holds neither, or is damaged.
    """
    folder = Path(folder)
    return Run(folder).load_model() if (folder / CONFIG).is_file() else load_model(folder)
