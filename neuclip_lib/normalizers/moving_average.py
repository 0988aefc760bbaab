"""The moving average of SogCLR, FastCLIP and SCENT: one number u per sample and side that remembers g.

    u_i <- (1 - gamma) u_i + gamma g_i,    u_i = g_i at the first visit,    alpha_i = log(eps + u_i)

Everything is kept and computed as log u: exp(log g) reaches exp(2/tau), which float32 cannot hold at small tau.
With u' = eps + u it is a mirror step of size gamma on the block of the sample (Bregman divergence of Itakura and
Saito); the methods differ in gamma alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.normalizers.base import Normalizer
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.tables import Table, check_index, require_index

Rate = Literal["constant", "cosine", "per sample"]
"""How gamma moves: SogCLR's, FastCLIP's, SCENT's."""


@dataclass(frozen=True)
class MovingAverageOptions:
    """Rates of the moving average; the defaults are the published ones.

    Args:
        gamma: gamma_min, the rate after epoch 0 (constant) or at the end of the cosine; 1 forgets everything, and None
            takes :func:`suggested_gamma` for the run's epochs.
        decay_epochs: epochs over which the cosine falls from 1 to gamma; None is half of the run's, at least 1.
        eps: constant inside the logarithm.
        log_step: log of SCENT's step size, of the rate ``per sample``.
    """

    gamma: float | None = None
    decay_epochs: int | None = None
    eps: float = 1e-14
    log_step: float = 10.0

    def check(self) -> None:
        """Raise ValueError, naming the option, when one makes no sense."""
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise ValueError(
                "moving_average.gamma must be above 0 and at most 1 (1 is the batch's own g), or None for the rate "
                f"suggested for the run's epochs; got {self.gamma}"
            )
        if self.decay_epochs is not None and self.decay_epochs < 1:
            raise ValueError(f"moving_average.decay_epochs must be at least 1 or None, got {self.decay_epochs}")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"moving_average.eps must be finite and not negative, got {self.eps}")
        if not math.isfinite(self.log_step):
            raise ValueError(f"moving_average.log_step must be finite, got {self.log_step}")


def suggested_gamma(epochs: int) -> float:
    """gamma_min for a run of so many epochs: ``min(1, 4.177 E^-0.7265)``, the rule of the FastCLIP code base.

    Raises:
        ValueError: for less than 1 epoch.
    """
    if epochs < 1:
        raise ValueError(f"a run has at least 1 epoch, got {epochs}")
    return min(1.0, 4.177 * epochs**-0.7265)


def gamma_of_epoch(rate: Rate, epoch: int, gamma_min: float, decay_epochs: int) -> float:
    """The rate of one epoch, counted from 0: 1 in epoch 0, then gamma_min, or down to it by a cosine (FastCLIP).

    Args:
        rate: ``constant`` or ``cosine``; ``per sample`` has a common rate in epoch 0 alone.
        epoch: from 0.
        gamma_min: rate at the end.
        decay_epochs: of the cosine; from this epoch on the rate is gamma_min.

    Raises:
        ValueError: for ``per sample`` after epoch 0, when every sample has its own, or another word.
    """
    if rate not in get_args(Rate):
        raise ValueError(f"the rate must be one of {', '.join(map(repr, get_args(Rate)))}, got {rate!r}")
    if epoch == 0:
        return 1.0
    if rate == "per sample":
        raise ValueError(f"in epoch {epoch} of the rate 'per sample' every sample has its own gamma")
    if rate == "constant" or epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min


def log_mean_of_repeats(index: Tensor, log_g: Tensor) -> Tensor:
    """For each pair the log of the mean of g over all pairs with its index; ``log_g`` itself where there is one.

    Args:
        index: ``[B]``, integers.
        log_g: ``[..., B]``.

    Returns:
        The shape of ``log_g``; equal pairs get the same bits. Sums of log2(B) shifts of the sorted pairs: fixed shapes,
        no host read, and unlike atomic additions the same order in every run.
    """
    ordered, order = index.sort(stable=True)
    # After the shift by d, place i holds the log of the sum over the last 2d places of its run of equal indices.
    total, shift = log_g[..., order], 1
    while shift < len(index):
        same = ordered[shift:] == ordered[:-shift]
        longer = torch.logaddexp(total[..., shift:], total[..., :-shift])
        total = torch.cat((total[..., :shift], torch.where(same, longer, total[..., shift:])), -1)
        shift *= 2
    after = torch.searchsorted(ordered, ordered, right=True)  # where each run ends, [B]
    count = after - torch.searchsorted(ordered, ordered)
    mean = total[..., after - 1] - count.to(total).log()
    result = torch.empty_like(mean)
    result[..., order] = mean
    return result


class MovingAverageNormalizer(Normalizer):
    """Alpha from a moving average of every sample's g: SogCLR, FastCLIP and SCENT, whose rates differ.

    Sources: arXiv 2202.12387, 2407.01445 and 2602.02877.

    Args:
        n: samples of the data set; a batch's index is from 0 to n - 1.
        steps_per_epoch: updates after which the epoch, and with it gamma, changes.
        epochs: of the run, for the options that follow it.
        rate: how gamma moves.
        options: rates and eps.
        ranks: over which the table is spread.
        device: where this rank's share lives.
        dtype: float32 in training; float64 in tests.

    Raises:
        ValueError: for options or sizes that make no sense.
        RuntimeError: before anything is allocated, when the table does not fit.
    """

    needs_index = True

    def __init__(
        self,
        n: int,
        steps_per_epoch: int,
        epochs: int,
        rate: Rate,
        options: MovingAverageOptions,
        ranks: Ranks = ONE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        options.check()
        if steps_per_epoch < 1:
            raise ValueError(f"an epoch has at least 1 step, got steps_per_epoch={steps_per_epoch}")
        suggested = suggested_gamma(epochs)
        self.gamma_min = suggested if options.gamma is None else options.gamma
        self.decay_epochs = max(1, epochs // 2) if options.decay_epochs is None else options.decay_epochs
        gamma_of_epoch(rate, 0, self.gamma_min, self.decay_epochs)  # refuses an unknown rate before it allocates
        self.steps_per_epoch, self.rate, self.options, self.eps = steps_per_epoch, rate, options, options.eps
        self._log_eps = math.log(self.eps) if self.eps > 0 else -math.inf
        self.table = Table(n, 2, -math.inf, ranks, device, dtype)  # log u of both sides; -inf: not yet visited
        self.step = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next update, from 0."""
        return self.step // self.steps_per_epoch

    def check(self, index: Tensor | None) -> None:
        """Refuse an index that does not name a sample; it reads on the host, so once, with all indices of the data.

        Raises:
            ValueError: naming the first wrong index, or saying that there is none.
        """
        check_index(index, self.table.n)

    @torch.no_grad()
    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """Move u of the batch's samples once, and write it back; an index met several times moves by its mean g.

        Raises:
            ValueError: for a batch without an index, or (on the CPU) one outside the table, which is named.
        """
        index = require_index(batch.index)
        log_u = self.table.look_up(index)  # [2, B]
        new = log_mean_of_repeats(index, torch.stack(batch.whole(log_g)).to(log_u))
        log_gamma, log_rest = self._log_rates(log_u)
        moved = torch.logaddexp(log_rest + log_u, log_gamma + new)
        self.table.write(index, torch.where(log_u == -math.inf, new, moved))
        self.step += 1

    @torch.no_grad()
    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """``log(eps + u)`` of this rank's anchors, each ``[b]``, a constant; after ``update`` it holds this batch.

        An anchor that was never visited has no u yet. Its alpha is ``log(eps + g)`` of this batch, which is what a
        first visit with this batch would give it.

        Raises:
            ValueError: as in ``update``.
        """
        own_g = torch.stack(log_g)  # [2, b]
        log_u = self.table.look_up(require_index(batch.index))[:, batch.rows].to(own_g)
        log_u = torch.where(log_u == -math.inf, own_g, log_u)
        alpha1, alpha2 = torch.logaddexp(log_u.new_full((), self._log_eps), log_u)
        return alpha1, alpha2

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """Takes back one update; a copy of the 2B numbers that change, and the counter. All ranks must call it."""
        index, step = require_index(batch.index).clone(), self.step
        old = self.table.look_up(index)

        def undo() -> None:
            self.table.write(index, old)
            self.step = step

        return undo

    def state_dict(self) -> dict[str, Any]:
        """``log_u``: ``[2, n]`` on rank 0 and ``[2, 0]`` on the others; ``step``: updates so far."""
        return {"log_u": self.table.whole(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave on rank 0, at any number of ranks.

        Raises:
            ValueError: when a part is missing, or the table is another data set's.
        """
        if set(state) != {"log_u", "step"}:
            raise ValueError(f"this is not the state of a moving average: it has {sorted(state)}, not log_u and step")
        step = int(state["step"])
        if step < 0:
            raise ValueError(f"the saved number of updates must not be negative, got {step}")
        self.table.load(state["log_u"])
        self.step = step

    def bytes_for(self, n: int) -> int:
        """Bytes of the table for ``n`` samples, over all ranks: 8 n in float32."""
        return 2 * self.table.values.element_size() * n

    def _log_rates(self, log_u: Tensor) -> tuple[Tensor, Tensor]:
        """``log gamma`` and ``log(1 - gamma)``: ``[]``, or ``[2, B]`` from u before its update (SCENT)."""
        if self.rate == "per sample" and self.epoch > 0:
            z = torch.logaddexp(log_u.new_full((), self._log_eps), log_u) + self.options.log_step
            return logsigmoid(z), logsigmoid(-z)
        gamma = gamma_of_epoch(self.rate, self.epoch, self.gamma_min, self.decay_epochs)
        log_rest = math.log1p(-gamma) if gamma < 1 else -math.inf  # gamma = 1 forgets exactly
        return log_u.new_full((), math.log(gamma)), log_u.new_full((), log_rest)
