"""``python -m neuclip_lib train``: train one method on one data set, or take up a run that was stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from neuclip_lib import presets
from neuclip_lib.training import TrainConfig, train
from neuclip_lib.training.config import to_json
from neuclip_lib.training.folder import default_folder


def main(arguments: list[str]) -> int:
    """Run the command; 0 when the run is finished.

    Raises:
        ValueError, RuntimeError: as :func:`neuclip_lib.training.train`, before any work where that is possible.
    """
    chosen = parse(arguments)
    config = chosen.config
    folder = chosen.out or default_folder(config)
    print(json.dumps(to_json(config)))
    print(f"training {config.method} on {config.data}, {config.steps} steps, in {folder}", flush=True)
    run = train(config, folder, resume=chosen.resume)
    if probes := run.metrics("probe"):
        print(f"probe loss {probes[0]['loss']:.3f} at step {probes[0]['step']}, {probes[-1]['loss']:.3f} at the end")
    print(f"finished: {run.folder}  (measure it: python -m neuclip_lib evaluate {run.folder})")
    return 0


@dataclass(frozen=True)
class Command:
    """Train one method on one data set; a run that was stopped goes on from its last checkpoint.

    Args:
        preset: where the defaults below come from.
        out: the run's folder; by default RUNS/PRESET/METHOD.
        resume: go on with the run that is in the folder; otherwise refuse.
        config: the run.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "laptop"
    out: Path | None = None
    resume: bool = True


def parse(arguments: list[str]) -> Command:
    """The command line as a config; unknown options end the program with a suggestion (exit code 2)."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="laptop")
    first.add_argument("--method", default="neuclip")
    first.add_argument("--data")
    known, _ = first.parse_known_args(arguments)
    preset: Callable[..., TrainConfig] = presets.get_preset(known.preset)
    base = preset(method=known.method, **({"data": known.data} if known.data else {}))
    return tyro.cli(
        Command,
        prog="python -m neuclip_lib train",
        args=arguments,
        default=Command(config=base, preset=known.preset),
        config=(tyro.conf.CascadeSubcommandArgs,),
    )
