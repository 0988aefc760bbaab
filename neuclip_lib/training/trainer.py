"""The trainer: build or restore, step, record, save; stop cleanly when asked or when a loss is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from neuclip_lib import data as data_sets
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.devices import pick_device
from neuclip_lib.ranks import Ranks
from neuclip_lib.training.config import TrainConfig
from neuclip_lib.training.distributed import (
    check_divisible,
    from_first,
    own_device,
    process_group,
    wanted_processes,
)
from neuclip_lib.training.folder import claimed, default_folder, require_same_config
from neuclip_lib.training.run import Run
from neuclip_lib.training.session import Session
from neuclip_lib.training.signals import StopRequest


def train(config: TrainConfig, out: Path | str | None = None, resume: bool = True, quiet: bool = False) -> Run:
    """Train, or take up where the run in the folder stopped; a finished run returns at once.

    On the CPU a run that was stopped and taken up, at any step, ends with the same weights to the bit.

    Args:
        config: what to do; checked before any work.
        out: the run's folder; by default ``RUNS/PRESET/METHOD``.
        resume: go on with a run that is already there; otherwise refuse.
        quiet: print nothing but warnings.

    Raises:
        ValueError: for a config that makes no sense, or a batch larger than the data.
        RuntimeError: when the folder cannot be written, is in use or holds another run; when a package that the data
            need is missing; when other processes are announced and do not come; when a loss is not finite.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, once the state is saved.

    Warns:
        UserWarning: when the warm-up is longer than the run, or nothing holds a learned temperature.
    """
    config.check()
    for doubt in config.doubts():
        warnings.warn(doubt, stacklevel=2)
    check_divisible(config.batch_size, wanted_processes())
    folder = Path(out) if out is not None else default_folder(config)
    device = own_device(config.device, pick_device(config.device))
    with process_group(device) as ranks, _threads(config.threads):
        # In a function of its own: nothing here may hold the wrapped model, and with it the group, when that is closed.
        _train_on_this_rank(config, folder, resume, quiet or ranks.rank > 0, ranks, device)
    return Run(folder)


def _train_on_this_rank(
    config: TrainConfig, folder: Path, resume: bool, quiet: bool, ranks: Ranks, device: torch.device
) -> None:
    with claimed(folder) if ranks.rank == 0 else nullcontext():
        there = require_same_config(folder, config, resume) if ranks.rank == 0 else False
        there = bool(from_first(int(there), ranks, device))
        if there and from_first(int(ranks.rank == 0 and Run(folder).finished), ranks, device):
            _say(quiet, f"{folder} is finished: {config.steps} steps of {config.method}")
            return
        pairs = _load_pairs(config)
        _say(quiet, _describe_order(config, len(pairs), ranks))
        session = Session(config, folder, pairs, there, quiet, ranks, device)
        if session.start:
            _say(quiet, f"going on from step {session.start} of {config.steps}")
        with StopRequest() as stop:
            session.run(stop)
        stop.leave()


def _load_pairs(config: TrainConfig) -> Pairs:
    pairs = data_sets.load(config.data, config.train_split, **config.data_options)
    if config.batch_size > len(pairs):
        raise ValueError(
            f"batch_size {config.batch_size} is larger than the {len(pairs)} pairs of {config.data!r} "
            f"({config.train_split}); take at most {len(pairs)}"
        )
    if config.augment_shift >= pairs.image_size:
        raise ValueError(
            f"augment_shift {config.augment_shift} must be below the {pairs.image_size} pixels of {config.data!r}"
        )
    return pairs


def _describe_order(config: TrainConfig, n: int, ranks: Ranks) -> str:
    """What a pass over the data is, with the remainder that it leaves out."""
    steps, left = divmod(n, config.batch_size)
    shared = f" ({config.batch_size // ranks.size} on each of {ranks.size} processes)" if ranks.size > 1 else ""
    rest = f"; the {left} left over come in other passes, as the order changes" if left else ""
    return f"{n} pairs, {steps} steps of {config.batch_size}{shared} a pass{rest}"


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """PyTorch's threads inside the block; a notebook gets its own number back."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)
