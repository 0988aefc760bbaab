"""``python -m neuclip_lib train``: train one method on one data set, or take up a run that was stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_origin

import tyro

from neuclip_lib import presets
from neuclip_lib.training import TrainConfig, train
from neuclip_lib.training.config import Option, to_json
from neuclip_lib.training.distributed import is_first
from neuclip_lib.training.folder import default_folder


def main(arguments: list[str]) -> int:
    """Run the command; 0 when the run is finished.

    Raises:
        ValueError, RuntimeError: as :func:`neuclip_lib.training.train`, before any work where that is possible.
    """
    chosen = parse(arguments)
    config = chosen.config
    config.check()
    folder = chosen.out or default_folder(config)
    speaks = is_first()
    if speaks:
        print(json.dumps(to_json(config)))
        print(f"training {config.method} on {config.data}, {config.steps} steps, in {folder}", flush=True)
    run = train(config, folder, resume=chosen.resume)
    if not speaks:
        return 0
    if probes := run.metrics("probe"):
        if probes[-1].get("loss") is None:
            raise RuntimeError(
                f"the run in {run.folder} has diverged: its loss on the probe set is not a finite number at the end; "
                "train again in another folder with a smaller optim.lr or optim.clip_norm=1"
            )
        print(f"probe loss {probes[0]['loss']:.3f} at step {probes[0]['step']}, {probes[-1]['loss']:.3f} at the end")
    print(f"finished: {run.folder}  (measure it: python -m neuclip_lib evaluate {run.folder})")
    return 0


@dataclass(frozen=True)
class Command:
    """Train one method on one data set; a run that was stopped goes on from its last checkpoint.

    Args:
        out: the run's folder; by default RUNS/PRESET/METHOD.
        resume: go on with the run that is in the folder; otherwise refuse.
        config: the run; --preset, --method and --data choose the defaults of the rest.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
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
    with _registry():
        return tyro.cli(Command, prog="python -m neuclip_lib train", args=arguments, default=Command(config=base))


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Mappings are written ``--data-options n=4000 seed=3``, whatever the preset's own are."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def mapping(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="NAME=VALUE ...",
            instance_from_str=lambda words: dict(map(_pair, words)),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{name}={item}" for name, item in value.items()],
        )

    return registry


def _pair(word: str) -> tuple[str, Option]:
    name, equals, text = word.partition("=")
    if not (name and equals):
        raise ValueError(f"{word!r} is not NAME=VALUE, for instance n=4000")
    if text in ("True", "False"):
        return name, text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(text)
    return name, text
