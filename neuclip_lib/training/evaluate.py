"""Measure a finished run: retrieval, zero-shot, normalizer error, geometry, and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuclip_lib import data as data_sets
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.devices import pick_device
from neuclip_lib.evaluation.embed import embed_pairs
from neuclip_lib.evaluation.geometry import geometry
from neuclip_lib.evaluation.normalizer_error import normalizer_error
from neuclip_lib.evaluation.retrieval import retrieval
from neuclip_lib.evaluation.zero_shot import zero_shot
from neuclip_lib.files import ensure_writable, write_json
from neuclip_lib.models import ImageTextModel
from neuclip_lib.normalizers import BatchNormalizer
from neuclip_lib.training import pictures
from neuclip_lib.training.build import estimators_of
from neuclip_lib.training.measure import NOTHING
from neuclip_lib.training.run import Run

EVALUATION, PICTURES = "evaluation", "pictures"


def evaluate(
    run: Run | Path | str,
    split: str | None = None,
    device: str = "cpu",
    batch_size: int = 256,
    ks: Sequence[int] = (1, 5, 10),
    anchors: int = 1000,
    draw: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure a finished run and write ``evaluation.json`` and ``pictures/`` into its folder.

    Retrieval, zero-shot and geometry are on ``split``; the normalizer error is always on the training pairs, at the
    run's own temperature, for its own normalizer, for those that rode along and for the plain batch estimate. Recalls
    and accuracies are in percent.

    Args:
        run: a run or its folder.
        split: by default the run's own (test, or validation for a run that tunes). Another one is written to
            ``evaluation-SPLIT.json`` and ``pictures-SPLIT/``, so that no result replaces that of another split.
        device: where the encoders run.
        batch_size: pairs embedded at a time.
        ks: the k of recall at k.
        anchors: training pairs at which the normalizer error is measured.
        draw: write the pictures.
        quiet: show no progress.

    Returns:
        What was written.

    Raises:
        ValueError: for an unknown split or device, or test asked of a run that tunes.
        RuntimeError: when the folder is no run or cannot be written, the run is not finished, or its data changed.
    """
    run = run if isinstance(run, Run) else Run(run)
    require_finished(run)
    at = pick_device(device)
    ensure_writable(run.folder)
    pairs = run.eval_pairs(split)
    model = run.load_model().to(at)
    e1, e2 = embed_pairs(model, pairs, batch_size, label=None if quiet else f"embed {pairs.split}")
    tasks = data_sets.zero_shot_tasks(run.config.data, pairs.split, **run.config.data_options)
    result = {
        "run": _identity(run),
        "settings": _settings(run, pairs, device, batch_size, anchors),
        "retrieval": retrieval(e1, e2, pairs.group, pairs.group, ks),
        "zero_shot": {task.name: zero_shot(model, task, batch_size) for task in tasks},
        "normalizer_error": _normalizer_error(run, model, batch_size, anchors, quiet),
        "geometry": geometry(e1, e2),
    }
    write_json(evaluation_file(run, pairs.split), result)
    if draw:
        _draw(run, pairs, e1.cpu(), e2.cpu())
    return result


def evaluation_file(run: Run, split: str | None = None) -> Path:
    """Where the evaluation on ``split`` (the run's own by default) is, or would be."""
    return run.folder / f"{EVALUATION}{_ending(run, split)}.json"


def pictures_folder(run: Run, split: str | None = None) -> Path:
    """Where the pictures on ``split`` (the run's own by default) are, or would be."""
    return run.folder / f"{PICTURES}{_ending(run, split)}"


def require_finished(run: Run) -> None:
    """Refuse a run whose last step is not saved.

    Raises:
        RuntimeError: with the steps done, and how to go on.
    """
    if run.step >= run.config.steps:
        run.checkpoint(run.config.steps)  # says which file is damaged
    if not run.finished:
        raise RuntimeError(
            f"{run.folder} is not finished: {run.step} of {run.config.steps} steps are saved; run the command that "
            "trained it again (it goes on from there), then evaluate"
        )


def _ending(run: Run, split: str | None) -> str:
    return "" if split in (None, run.config.eval_split) else f"-{split}"


def _identity(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "method": config.method,
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "preset": config.preset,
    }


def _settings(run: Run, pairs: Pairs, device: str, batch_size: int, anchors: int) -> dict[str, Any]:
    return {
        "split": pairs.split,
        "pairs": len(pairs),
        "content_hash": pairs.content_hash,
        "tau": run.tau(),
        "device": device,
        "embed_batch_size": batch_size,
        "anchors": anchors,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _normalizer_error(run: Run, model: ImageTextModel, batch_size: int, anchors: int, quiet: bool) -> dict[str, Any]:
    """The run's own estimator in front, if it has one, and all of them, itself included, under ``estimators``."""
    nothing = {"mse": None, "bias": None, "correlation": None, "n": 0}
    if run.config.steps == 0:
        return {**nothing, "why": "no step was taken, so no normalizer has seen a batch", "estimators": {}}
    pairs = run.train_pairs()
    e1, e2 = embed_pairs(model, pairs, batch_size, label=None if quiet else f"embed {pairs.split}")
    estimators = estimators_of(run.config.method, run.load_parts(), run.load_shadows())
    estimators["batch"] = BatchNormalizer(NOTHING)
    temperature = run.load_temperature()
    temperature.begin(run.config.steps)
    # The normalizers are on the CPU, as they were saved.
    errors = normalizer_error(
        e1.cpu(),
        e2.cpu(),
        pairs.index,
        estimators,
        temperature.at(pairs.index),
        run.config.batch_size,
        min(anchors, len(pairs)),
    )
    own = errors.get(run.config.method, {**nothing, "why": "the method's loss has no normalizer"})
    return {**own, "estimators": errors}


def _draw(run: Run, pairs: Pairs, e1: Tensor, e2: Tensor) -> None:
    credit = data_sets.card(run.config.data).attribution
    pictures.save_all(run, pairs, e1, e2, pictures_folder(run, pairs.split), credit)
