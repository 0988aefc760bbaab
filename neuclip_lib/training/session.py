"""One process's share of a run: build or restore, step, record, save; the other ranks do the same at the same steps."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.files import write_json
from neuclip_lib.models import ImageTextModel, build_model, load_model
from neuclip_lib.progress import track
from neuclip_lib.ranks import Ranks
from neuclip_lib.training import checkpoint
from neuclip_lib.training.build import Samples, build_trainee, estimators_of
from neuclip_lib.training.config import TrainConfig
from neuclip_lib.training.distributed import (
    any_rank,
    from_first,
    own_rows,
)
from neuclip_lib.training.feed import Feed
from neuclip_lib.training.folder import note_resume, write_identity
from neuclip_lib.training.log import MetricsLog, NoLog
from neuclip_lib.training.measure import Stopwatch, Window, normalizer_errors, probe_loss, probe_set
from neuclip_lib.training.optim import set_learning_rates
from neuclip_lib.training.run import CHECKPOINTS, FAILURE
from neuclip_lib.training.signals import StopRequest
from neuclip_lib.training.step import Diverged, Guard, NonFinite, Seen, train_step


class Session:
    """One process's share of a run: from a checkpoint, or the beginning, to the end or a signal.

    Rank 0 alone writes the folder. What needs an exchange is done by all ranks, at the same steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        pairs: Pairs,
        there: bool,
        quiet: bool,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.config, self.folder, self.pairs, self.quiet = config, folder, pairs, quiet
        self.ranks, self.device, self.is_first = ranks, device, ranks.rank == 0
        self.checkpoints = folder / CHECKPOINTS
        self.start = self._newest() if there else None
        model = self._model().to(device)
        # Built before the folder is marked as this run's: what cannot be built must not block the corrected command.
        self.trainee = build_trainee(config, model, device, Samples.of(pairs, config.batch_size), ranks)
        if self.is_first and there:
            note_resume(folder, self.start, pairs)
        elif self.is_first:
            write_identity(folder, config, pairs, model)
        self.window = Window(device, ranks)
        self.rows = 0
        if self.start is not None:
            state = checkpoint.load_state(checkpoint.step_folder(self.checkpoints, self.start), device)
            self.trainee.load_state(state)
            self.window.load_state_dict(state["window"])
            self.rows = state["rows"]
        if self.is_first:
            self._clean()
        share = own_rows(config.batch_size, ranks)
        self.feed = Feed(pairs, model, config.batch_size, config.seed, config.augment_shift, device, share)
        self.probe = probe_set(pairs)
        self.guard = Guard(device, self.trainee.optimizer)
        self.watch = Stopwatch()
        self.last: Seen | None = None

    def run(self, stop: StopRequest) -> None:
        """Step until the end, or until a signal asks to stop; the state is saved in either case."""
        begin = self.start or 0
        self.log = MetricsLog(self.folder, self.start, self.rows) if self.is_first else NoLog()
        try:
            if self.start is None:
                self._probe(0)
            done = begin
            stopping = False
            for step in self._progress(range(begin, self.config.steps), begin):
                self._step(step)
                done = step + 1
                self._record(done)
                # A signal may reach the ranks in different steps; they leave in the same one.
                if stopping := any_rank(stop.signal is not None, self.ranks):
                    break
            if not self._is_saved(done):
                self._save(done)
            if stopping and self.is_first:
                print(f"saved after step {done} in {self.folder}; the same command goes on from there", file=sys.stderr)
            if stopping:
                stop.also_here()
        finally:
            self.log.close()

    def _newest(self) -> int | None:
        """The last whole checkpoint, looked for by rank 0."""
        newest = checkpoint.newest_valid(self.checkpoints) if self.is_first else None
        agreed = from_first(-1 if newest is None else newest, self.ranks, self.device)
        return None if agreed < 0 else agreed

    def _is_saved(self, done: int) -> bool:
        saved = self.is_first and done in checkpoint.steps_in(self.checkpoints)
        return bool(from_first(int(saved), self.ranks, self.device))

    def _clean(self) -> None:
        """Remove what an earlier process left and this one writes anew."""
        checkpoint.discard_after(self.checkpoints, self.start)
        checkpoint.prune(self.checkpoints, self.config.keep_last)
        shutil.rmtree(self.folder / FAILURE, ignore_errors=True)
        (self.folder / FAILURE).with_suffix(".json").unlink(missing_ok=True)

    def _model(self) -> ImageTextModel:
        if self.start is not None:
            return load_model(checkpoint.step_folder(self.checkpoints, self.start))
        words = self.pairs.vocabulary_texts()
        return build_model(self.config.model, words, self.pairs.image_size, self.config.seed)

    def _step(self, step: int) -> None:
        config = self.config
        self.trainee.model.train()
        set_learning_rates(self.trainee.optimizer, step, config.steps, config.optim.warmup)
        batch = self.feed.batch(step)
        try:
            seen = train_step(self.trainee, batch, self.guard, step, config.precision, config.optim.clip_norm)
        except NonFinite as error:
            raise self._failure(error) from None
        self.last = seen
        self.window.add(seen)
        self.watch.add(config.batch_size)

    def _record(self, done: int) -> None:
        """Whatever is due after ``done`` steps; the last step gets everything."""
        config = self.config
        at_end = done == config.steps

        def due(every: int) -> bool:
            return bool(every) and (done % every == 0 or at_end)

        if due(config.log_every):
            try:
                self.guard.check()
            except NonFinite as error:
                raise self._failure(error) from None
            self._write_train_row(done)
        with self.watch.paused():
            if due(config.probe_every):
                self._probe(done)
            if due(config.error_every):
                self._normalizer_error(done)
            if config.checkpoint_every and done % config.checkpoint_every == 0:
                self._save(done)

    def _write_train_row(self, done: int) -> None:
        assert self.last is not None
        row: dict[str, Any] = {"step": done, "kind": "train", "epoch": self.feed.epoch(done - 1), **self.window.take()}
        row["tau"] = self.last.tau.mean().item()
        row["learning_rate"] = self.trainee.optimizer.param_groups[0]["lr"]
        row["gradient_norm"] = self.last.gradient_norm.item()
        row["samples_per_second"] = round(self.watch.take(), 1)
        self.log.write(row)

    @torch.no_grad()
    def _probe(self, done: int) -> None:
        if not self.config.probe_every:
            return
        tau = self.trainee.temperature.typical()
        if self.is_first:
            loss = probe_loss(self.trainee.model, self.probe, tau)
            self.log.write({"step": done, "kind": "probe", "loss": loss, "n": len(self.probe), "tau": tau.item()})

    @torch.no_grad()
    def _normalizer_error(self, done: int) -> None:
        """All ranks measure: the normalizers' answers need all of them."""
        temperature = self.trainee.temperature
        tau = temperature.at(self.pairs.index.to(self.device))
        estimators = estimators_of(self.config.method, self.trainee.parts, self.trainee.shadows)
        errors = normalizer_errors(
            self.trainee.model, self.pairs, estimators, tau, self.config.batch_size, self.trainee.ranks
        )
        row = {"step": done, "kind": "normalizer_error", "tau": temperature.typical().item(), "estimators": errors}
        self.log.write(row)

    def _save(self, done: int) -> None:
        self.log.sync()
        state = {"step": done, "rows": self.log.count, "window": self.window.state_dict(), **self.trainee.state()}
        if self.is_first:
            checkpoint.save(checkpoint.step_folder(self.checkpoints, done), done, self.trainee.model, state)
            checkpoint.prune(self.checkpoints, self.config.keep_last)

    def _failure(self, error: NonFinite) -> Diverged:
        """Save the state and what was seen; the error to raise."""
        folder, report = self.folder / FAILURE, describe_failure(error.step, error.seen)
        state = {"step": error.step, "window": self.window.state_dict(), **self.trainee.state()}
        if self.is_first:
            checkpoint.save(folder, error.step, self.trainee.model, state)
            write_json(folder.with_suffix(".json"), report)
        shown = ", ".join(f"{name} {value}" for name, value in report.items() if name != "samples")
        return Diverged(
            f"the loss or its gradient is not a finite number: {shown}. The state before that step is in {folder}, "
            f"this report with the samples in {folder.with_suffix('.json')}. Try a smaller optim.lr, "
            "optim.clip_norm=1, prototypes.weight_cap=5, a larger temperature.low or precision='float32'"
        )

    def _progress(self, steps: range, begin: int) -> Iterable[int]:
        if self.quiet or not steps:
            return steps
        label = f"train {self.config.method}"
        return track(steps, label, total=self.config.steps, start=begin, describe=self._describe)

    def _describe(self) -> str:
        return f"loss {self.last.loss.item():.3f}" if self.last is not None else ""


def describe_failure(step: int, seen: Seen) -> dict[str, Any]:
    """What a bad step saw, as JSON values; numbers that are not finite are written out in words."""

    def extent(sides: tuple[torch.Tensor, torch.Tensor] | None) -> list[float | str] | None:
        if sides is None:
            return None
        both = torch.cat(sides)
        return [_say_number(both.min().item()), _say_number(both.max().item())]

    return {
        "step": step + 1,
        "loss": _say_number(seen.loss.item()),
        "gradient_norm": _say_number(seen.gradient_norm.item()),
        "tau": _say_number(seen.tau.mean().item()),
        "alpha": extent(seen.alpha),
        "log_g": extent(seen.log_g),
        "embedding_length": extent(seen.lengths),
        "samples": seen.index.tolist(),
    }


def _say_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
