"""``python -m neuclip_lib evaluate RUN``: measure a finished run and print what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from neuclip_lib.training.evaluate import evaluate, evaluation_file, pictures_folder
from neuclip_lib.training.run import Run


@dataclass(frozen=True)
class Command:
    """Measure a finished run: retrieval, zero-shot, normalizer error, geometry.

    Args:
        run: the run's folder.
        split: what to evaluate on; by default test, or validation for a run that tunes.
        device: where the encoders run.
        batch_size: pairs embedded at a time.
        anchors: training pairs at which the normalizer error is measured.
        pictures: draw the top matches and the curves.
    """

    run: tyro.conf.Positional[Path]
    split: str | None = None
    device: str = "cpu"
    batch_size: int = 256
    anchors: int = 1000
    pictures: bool = True


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured.

    Raises:
        ValueError, RuntimeError: as :func:`neuclip_lib.training.evaluate.evaluate`.
    """
    chosen = tyro.cli(Command, prog="python -m neuclip_lib evaluate", args=arguments)
    run = Run(chosen.run)
    result = evaluate(run, chosen.split, chosen.device, chosen.batch_size, anchors=chosen.anchors, draw=chosen.pictures)
    print("\n".join(report(result)))
    print(f"\nwritten: {evaluation_file(run, result['settings']['split'])}")
    if chosen.pictures:
        print(f"pictures: {pictures_folder(run, result['settings']['split'])}")
    return 0


def report(result: dict[str, Any]) -> Iterator[str]:
    """The lines that people read, from what ``evaluate`` returns; n/a is what could not be measured."""
    run, settings = result["run"], result["settings"]
    yield (
        f"{run['method']} on {run['data']} ({settings['split']}, {settings['pairs']} pairs), "
        f"{run['steps']} steps of {run['batch_size']}, tau {settings['tau']:.3g}"
    )
    yield "\nretrieval (percent)"
    for name in ("image_to_text", "text_to_image"):
        yield _retrieval_line(name.replace("_", " "), result["retrieval"][name])
    for name, task in result["zero_shot"].items():
        yield f"\nzero-shot {name} (percent): top-1 {_say(task['top1'])}, top-5 {_say(task['top5'])}"
        yield (
            f"  chance {_say(task['chance'])}, largest class {_say(task['majority'])}, "
            f"{task['num_classes']} classes, n {task['n']}{_nan(task['nan'])}"
        )
    error = result["normalizer_error"]
    yield f"\nnormalizer error over the training set ({error['n']} anchors)"
    for name, figures in error["estimators"].items():
        parts = (f"{key} {_say(figures[key], 3)}" for key in ("mse", "bias", "correlation"))
        yield f"  {name:<12} {', '.join(parts)}"
    if "why" in error:
        yield f"  not measured: {error['why']}"
    yield f"\ngeometry\n  {_geometry_line(result['geometry'])}"


def _retrieval_line(name: str, figures: dict[str, Any]) -> str:
    recalls = ", ".join(f"{key.upper()} {_say(figures[key])}" for key in figures["chance"])
    chances = "/".join(_say(value) for value in figures["chance"].values())
    rest = f"median rank {figures['median_rank']:g} of {figures['candidates']}, n {figures['n']}{_nan(figures['nan'])}"
    return f"  {name}: {recalls} (chance {chances}), {rest}"


def _geometry_line(figures: dict[str, Any]) -> str:
    sides = (
        f"{name.replace('_', ' ')} {_say(figures[name]['image'], 2)} images, {_say(figures[name]['text'], 2)} texts"
        for name in ("uniformity", "effective_rank")
    )
    pair = (f"{name.replace('_', ' ')} {_say(figures[name], 3)}" for name in ("alignment", "modality_gap"))
    return "; ".join([*pair, *sides]) + _nan(figures["nan"])


def _say(value: float | None, digits: int = 1) -> str:
    """A figure; small chances keep a digit that is not zero."""
    if value is None:
        return "n/a"
    return f"{value:.{digits}f}" if value == 0 or abs(value) >= 0.95 * 10**-digits else f"{value:.1g}"


def _nan(count: int) -> str:
    return f", {count} WITH NaN" if count else ""
