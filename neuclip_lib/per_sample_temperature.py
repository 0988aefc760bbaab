"""A temperature for every sample and side, each moved by an Adam of its own (RGCL: iSogCLR, FastCLIP-v2).

    L = 1/(2B) sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ]

iSogCLR (arXiv 2305.11965), FastCLIP (arXiv 2407.01445). What moves tau1_i is d/dtau1_i of the anchor's own term, which
is 2B times the gradient of L and is not divided by the number of samples either.

Published with FastCLIP-v2: learning rate .0133 without a schedule, start .03, the gradient clamped to 5 on either side,
both betas 0 in epoch 0 and those of the run's AdamW after (.9, .999 and eps 1e-8 for its ResNet-50, the defaults here;
.9, .98 and 1e-6 for vision transformers), bias correction by epoch + 1, tau clamped to [.01, 1].

Ours: the step divides by the root of the second moment, as Adam does; the published code leaves the root out
(``root=False``), so its steps grow as gradients shrink. A sample that is twice in a batch moves once, by the mean of
its clamped gradients.

A moment that starts in epoch 0 with betas 0 is the first gradient and has no bias left to correct. The correction is
kept as published: under a steady gradient g the step is .24 of the learning rate in epoch 1, .15 to .20 in the 35
after it (without the root .011/g in epoch 1, growing to .037/g).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.tables import Table
from neuclip_lib.temperature import TemperatureOptions


class PerSampleTemperature:
    """Two tau a sample with Adam's moments, spread over the ranks: 24 n / W bytes on each in float32.

    Args:
        options: ``init``, the bounds and what begins with ``per_sample``; ``learned``, ``lr`` and ``lr_rule`` belong to
            a scalar temperature.
        n: samples; an index is from 0 to n - 1.
        steps_per_epoch: for the epoch of a step.
        ranks: over which the tables are spread.
        device: where this rank's share lives.
        dtype: float32 in training; float64 in tests.
        root: divide by the root of the second moment; False follows published code.

    Raises:
        ValueError: for options that make no sense or anneal tau, fewer than 1 sample or step an epoch.
        RuntimeError: when a rank's share is more than half of the free memory.
    """

    def __init__(
        self,
        options: TemperatureOptions,
        n: int,
        steps_per_epoch: int,
        ranks: Ranks = ONE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        root: bool = True,
    ) -> None:
        options.check()
        if options.anneal != "none":
            raise ValueError(
                f"a temperature for every sample is learned and cannot follow anneal={options.anneal!r}; "
                "set temperature.anneal=none or take a method with one temperature"
            )
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {steps_per_epoch}")
        self.options, self.ranks, self.steps_per_epoch, self.root = options, ranks, steps_per_epoch, root
        self.epoch = 0
        self.tau = Table(n, 2, options.init, ranks, device, dtype)
        self.moments = Table(n, 4, 0.0, ranks, device, dtype)  # first of both sides, second of both sides
        self._low, self._high = _rounded_inwards(options.low, options.high, dtype)
        self._project()

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.tau.n

    def begin(self, step: int) -> None:
        """Note the epoch of step ``step``, counted from the start of the whole training."""
        self.epoch = step // self.steps_per_epoch

    def __call__(self, batch: GlobalBatch | None = None) -> Tensor:
        """Tau of the batch's anchors ``[2, B]``, a leaf with gradient.

        Raises:
            ValueError: when there is no batch, or it does not say which samples it holds.
        """
        return self.at(_index_of(batch)).requires_grad_()

    @torch.no_grad()
    def at(self, index: Tensor) -> Tensor:
        """Tau of the samples ``index [k]``: ``[2, k]``, without gradient. All ranks must ask for the same."""
        return self.tau.look_up(index)

    @torch.no_grad()
    def finish(self, tau: Tensor, batch: GlobalBatch, skip: Tensor | None = None) -> None:
        """One Adam step for every sample of the batch; the encoders' step has used the old tau.

        Args:
            tau: what the call gave, ``[2, B]``; its gradient is exact for this rank's anchors and zero for the others.
            batch: the one it was given for.
            skip: a 0-dim bool on the device: where it is true nothing changes.

        Raises:
            ValueError: for a tau of another shape.
            RuntimeError: when there was no backward pass.
        """
        index = _index_of(batch)
        if tau.shape != (2, batch.size):
            raise ValueError(f"tau must be [2, {batch.size}], one a side and anchor; got {list(tau.shape)}")
        if tau.grad is None:
            raise RuntimeError("tau has no gradient: temperature.finish(...) comes after loss.backward()")
        clamp = self.options.per_sample_clamp
        gradient = (self.ranks.sum(tau.grad.clone()) * (2 * batch.size)).clamp_(-clamp, clamp)
        old = self.moments.look_up(index)
        moments = self._moments(old.view(2, 2, -1), _mean_over_equal(gradient, index)).view_as(old)
        new = self._step(tau.detach(), moments.view(2, 2, -1))
        if skip is not None:
            new, moments = torch.where(skip, tau.detach(), new), torch.where(skip, old, moments)
        self.tau.write(index, new)
        self.moments.write(index, moments)

    def _betas(self) -> tuple[float, float]:
        if self.epoch == 0:
            return 0.0, 0.0
        return self.options.per_sample_beta1, self.options.per_sample_beta2

    def _moments(self, old: Tensor, gradient: Tensor) -> Tensor:
        """Both moments ``[2, 2, B]`` after this gradient ``[2, B]``."""
        beta1, beta2 = self._betas()
        return torch.stack((old[0].lerp(gradient, 1 - beta1), old[1].lerp(gradient.square(), 1 - beta2)))

    def _step(self, tau: Tensor, moments: Tensor) -> Tensor:
        """Tau ``[2, B]`` after the step."""
        times, (beta1, beta2) = self.epoch + 1, self._betas()
        first, second = moments[0] / (1 - beta1**times), moments[1] / (1 - beta2**times)
        divisor = (second.sqrt() if self.root else second) + self.options.per_sample_eps
        return (tau - self.options.per_sample_lr * first / divisor).clamp_(self._low, self._high)

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """A function that takes back the next ``finish`` with ``batch``; it costs what that touches."""
        index = _index_of(batch)
        kept = [(table, table.look_up(index)) for table in (self.tau, self.moments)]

        def undo() -> None:
            for table, values in kept:
                table.write(index, values)

        return undo

    @torch.no_grad()
    def typical(self) -> Tensor:
        """The mean of both sides over the samples visited so far, the start before that; all ranks must call it.

        A sample that is not trained on (another split's) is never visited. It reads the whole table, so it is for
        records and probes.
        """
        visited = self.moments.values[2:] > 0
        taus = torch.where(visited, self.tau.values, torch.zeros_like(self.tau.values)).sum()
        total, count = self.ranks.sum(torch.stack((taus, visited.sum().to(taus))))
        return torch.where(count > 0, total / count.clamp_min(1), torch.full_like(total, self.options.init))

    def parameters(self) -> list[nn.Parameter]:
        """Nothing for the optimizer: every tau has its own Adam here."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The tables, whole on rank 0 and empty on the others; all ranks must call it."""
        return {"tau": self.tau.whole(), "moments": self.moments.whole()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take this rank's share of what ``state_dict`` gave on rank 0, of any number of ranks.

        Raises:
            ValueError: when the state belongs to a temperature of another kind or to another number of samples.
        """
        if set(state) != {"tau", "moments"}:
            raise ValueError(
                "the saved state is not of a temperature for every sample: it has "
                f"{', '.join(sorted(state)) or 'nothing'}, expected moments, tau; the method must be the saved run's"
            )
        self.tau.load(state["tau"])
        self.moments.load(state["moments"])
        self._project()

    def _project(self) -> None:
        """Bring every tau inside its bounds: whatever was loaded, the first forward pass is bounded too."""
        self.tau.values.clamp_(self._low, self._high)

    def bytes_for(self, n: int) -> int:
        """Bytes kept for a data set of ``n`` samples, over all ranks."""
        return (self.tau.columns + self.moments.columns) * self.tau.values.element_size() * n


def _index_of(batch: GlobalBatch | None) -> Tensor:
    if batch is None or batch.index is None:
        raise ValueError(
            "a temperature for every sample needs to know the samples: give it a batch with the stable index of each"
        )
    return batch.index


def _mean_over_equal(x: Tensor, index: Tensor) -> Tensor:
    """``x`` ``[2, B]`` with each entry replaced by the mean over the places that have the same index ``[B]``.

    Sums of log2(B) shifts of the sorted samples: fixed shapes, no host waits, and the order of additions is the same in
    every run, which atomic additions do not promise.
    """
    ordered, order = index.sort(stable=True)
    total, shift = x[:, order], 1  # at place i the sum over the last ``shift`` places of its run of equal indices
    while shift < len(index):
        same = ordered[shift:] == ordered[:-shift]
        earlier = total[:, :-shift].where(same, total.new_zeros(()))
        total = torch.cat((total[:, :shift], total[:, shift:] + earlier), 1)
        shift *= 2
    end = torch.searchsorted(ordered, index, right=True)
    return total[:, end - 1] / (end - torch.searchsorted(ordered, index))


def _rounded_inwards(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """The bounds as numbers of that type, between the wanted ones."""
    least, most = torch.tensor([low, high], dtype=dtype)
    if least.item() < low:
        least = least.nextafter(most)
    if most.item() > high:
        most = most.nextafter(least)
    return least.item(), most.item()
