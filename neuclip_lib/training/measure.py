"""What a run measures about itself: means over steps, the exact loss on a probe set, the normalizer error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from neuclip_lib.conjugate import residual
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.data.pairs import Chosen, Pairs
from neuclip_lib.evaluation.embed import embed_pairs
from neuclip_lib.evaluation.normalizer_error import normalizer_error
from neuclip_lib.models import ImageTextModel
from neuclip_lib.normalizers import BatchNormalizer, Normalizer
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.training.step import Seen

PROBE_SIZE = 512
PROBE_SEED = 0
NOTHING = 1e-14
"""The eps of the plain batch estimate, that of ``gcl-batch``."""


class Window:
    """Sums over the steps since the last row, kept on the device so that no step waits for it.

    Part of the checkpoint: a resumed run writes the same rows. On several ranks each sums its own anchors; figures and
    state are of all, so every rank must ask for them.
    """

    def __init__(self, device: torch.device, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        self.count = 0
        self.has_alpha = False
        self.sums = torch.zeros(4, device=device)
        self.largest = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, seen: Seen) -> None:
        """Count one step."""
        self.count += 1
        alpha_and_r = [torch.zeros_like(seen.loss)] * 2
        if seen.alpha is not None and seen.log_eps_plus_g is not None:
            alpha, log_x = torch.cat(seen.alpha), torch.cat(seen.log_eps_plus_g)
            alpha_and_r = [alpha.mean(), residual(alpha, log_x).mean()]
            self.largest = torch.maximum(self.largest, (log_x - alpha).max().exp())
            self.has_alpha = True
        self.sums += torch.stack([seen.loss, *alpha_and_r, seen.overflowed.to(seen.loss)])

    def take(self) -> dict[str, float]:
        """The figures of the row, and start again; waits for the device."""
        loss, alpha, r, overflows = (self.ranks.mean(self.sums.clone()) / max(1, self.count)).tolist()
        largest = self.ranks.max(self.largest.clone()).item()
        figures = {"loss": loss}
        if self.has_alpha:
            figures |= {"mean_alpha": alpha, "mean_r": r, "largest_weight": largest}
        if overflows:
            figures["overflows"] = round(overflows * self.count)
        self.count = 0
        self.sums.zero_()
        self.largest.zero_()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Count, sums and maximum."""
        return {
            "count": self.count,
            "has_alpha": self.has_alpha,
            "sums": self.ranks.mean(self.sums.clone()),
            "largest": self.ranks.max(self.largest.clone()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.count, self.has_alpha = state["count"], state["has_alpha"]
        self.sums.copy_(state["sums"])
        self.largest.copy_(state["largest"])


class Stopwatch:
    """Samples a second of training itself, without the time that measuring and saving take."""

    def __init__(self) -> None:
        self._samples, self._begun, self._paused = 0, time.perf_counter(), 0.0

    def add(self, samples: int) -> None:
        """Count samples."""
        self._samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this block does not count."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begun

    def take(self) -> float:
        """Samples a second since the last call."""
        now = time.perf_counter()
        rate = self._samples / max(1e-9, now - self._begun - self._paused)
        self._samples, self._begun, self._paused = 0, now, 0.0
        return rate


def probe_set(pairs: Pairs, size: int = PROBE_SIZE) -> Chosen:
    """A fixed choice of ``min(size, n)`` training pairs, the same for every run on the same data."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(PROBE_SEED))
    return Chosen(pairs, order[:size].sort().values)


@torch.no_grad()
def probe_loss(model: ImageTextModel, probe: Pairs, tau: Tensor) -> float:
    """Mean of ``(log g1 + log g2)/2`` over the probe set, negatives within it, eps = 0: what methods have in common."""
    e1, e2 = embed_pairs(model, probe)
    log_g1, log_g2 = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), tau)
    return float((log_g1 + log_g2).mean() / 2)


def normalizer_errors(
    model: ImageTextModel,
    pairs: Pairs,
    estimators: Mapping[str, Normalizer],
    tau: Tensor,
    batch_size: int,
    ranks: Ranks = ONE,
) -> dict[str, dict[str, Any]]:
    """Error of every estimator, and of the plain batch estimate as ``batch``, on all training pairs embedded anew.

    Args:
        tau: a scalar, or ``[2, n]`` for one a side and training pair.
        ranks: over which the estimators' state is spread; every rank must call it.
    """
    e1, e2 = embed_pairs(model, pairs)
    everyone = {**estimators, "batch": BatchNormalizer(NOTHING)}
    return normalizer_error(e1, e2, pairs.index.to(e1.device), everyone, tau, batch_size, ranks=ranks)
