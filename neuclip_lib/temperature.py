"""The temperature: fixed, annealed or learned, inside its bounds in every forward pass.

One tau for all samples is here; one for each sample is in ``per_sample_temperature``. Both have the same face,
:class:`AnyTemperature`, so a training step does not ask which it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch

Anneal = Literal["none", "log", "linear", "cosine", "exponential"]
LrRule = Literal["schedule", "step_thresh"]


@dataclass(frozen=True)
class TemperatureOptions:
    """How tau starts and what moves it.

    Args:
        init: tau at step 0.
        learned: train ``log(1/tau)``.
        low: smallest tau.
        high: largest tau.
        lr: learning rate of ``log(1/tau)``; ``None`` means a quarter of the encoders'.
        rho: weight of ``+ rho tau`` in objectives with the factor tau; it should be the mean KL divergence of the
            negatives' weights from uniform at the tau that is wanted (usually .3 to .6 of log n; ``suggest_rho``
            measures it).
        lr_rule: of a learned tau: the encoders' warm-up and decay, or ``step_thresh`` (FastCLIP-v3): a constant
            rate without warm-up, divided by ``threshold_divisor`` while tau is at or below ``threshold``.
        threshold: of ``step_thresh``.
        threshold_divisor: of ``step_thresh``.
        anneal: change tau by a schedule instead of learning it; see :func:`annealed`.
        final: tau at the end of the schedule.
        anneal_steps: steps from ``init`` to ``final``, counted from step 0 and not a share of the run; ``log`` has a
            speed of its own and does not use it.
        per_sample_lr: learning rate of tau itself where every sample has its own (FastCLIP-v2).
        per_sample_beta1: Adam's decay of the mean gradient from epoch 1 on, there.
        per_sample_beta2: Adam's decay of the squared gradient from epoch 1 on, there.
        per_sample_eps: Adam's own constant, there.
        per_sample_clamp: bound of an anchor's gradient, there.
    """

    init: float = 0.07
    learned: bool = False
    low: float = 0.01
    high: float = 1.0
    lr: float | None = None
    rho: float = 0.0
    lr_rule: LrRule = "schedule"
    threshold: float = 0.03
    threshold_divisor: float = 3.0
    anneal: Anneal = "none"
    final: float = 0.01
    anneal_steps: int = 0
    per_sample_lr: float = 0.0133
    per_sample_beta1: float = 0.9
    per_sample_beta2: float = 0.999
    per_sample_eps: float = 1e-8
    per_sample_clamp: float = 5.0

    def check(self) -> None:
        """Raise ValueError, naming the value, when an option makes no sense."""
        if not 0 < self.low < self.high:
            raise ValueError(f"temperature bounds must satisfy 0 < low < high, got low={self.low}, high={self.high}")
        if self.low < 1e-6 or self.high > 1e6:
            raise ValueError(
                "temperature bounds must lie in 1e-06..1e+06, beyond which float32 loses every similarity; "
                f"got low={self.low}, high={self.high}"
            )
        if not self.low <= self.init <= self.high:
            raise ValueError(
                f"temperature init={self.init} is outside its bounds [{self.low}, {self.high}]; "
                "tau is the divisor of the similarities, for instance 0.05, not its inverse"
            )
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"temperature lr must be positive, got {self.lr}")
        if not (math.isfinite(self.rho) and self.rho >= 0):
            raise ValueError(f"temperature rho must be finite and not negative, got {self.rho}")
        for name, choices in (("lr_rule", get_args(LrRule)), ("anneal", get_args(Anneal))):
            if getattr(self, name) not in choices:
                raise ValueError(f"temperature {name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if not (self.threshold > 0 and self.threshold_divisor >= 1):
            raise ValueError(
                "temperature threshold must be positive and threshold_divisor at least 1, "
                f"got {self.threshold} and {self.threshold_divisor}"
            )
        self._check_per_sample()
        if self.anneal != "none":
            self._check_schedule()

    def _check_per_sample(self) -> None:
        for name in ("per_sample_lr", "per_sample_eps", "per_sample_clamp"):
            if not getattr(self, name) > 0:
                raise ValueError(f"temperature {name} must be positive, got {getattr(self, name)}")
        for name in ("per_sample_beta1", "per_sample_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"temperature {name} must be in [0, 1), got {getattr(self, name)}")

    def _check_schedule(self) -> None:
        if self.learned:
            raise ValueError(f"temperature anneal={self.anneal!r} and learned both move tau; choose one of them")
        if not self.low <= self.final <= self.high:
            raise ValueError(
                f"temperature final={self.final} is outside its bounds [{self.low}, {self.high}]; change one of them"
            )
        if self.anneal == "log" and self.final > self.init:
            raise ValueError(f"temperature anneal='log' only falls, but final={self.final} is above init={self.init}")
        if self.anneal != "log" and self.anneal_steps < 1:
            raise ValueError(
                f"temperature anneal={self.anneal!r} needs anneal_steps of at least 1 (the number of steps from init "
                f"to final), got {self.anneal_steps}"
            )


def annealed(options: TemperatureOptions, step: int) -> float:
    """Tau in step ``step`` (0 is the first) of a schedule: of the step alone, however long the run is.

    With ``t = step``, ``a = init``, ``b = final``, ``n = anneal_steps``; from step n on the last three are ``b``:

        none         a
        log          a log 2 / log(t + 2), held at b once it has fallen so far: the classical law of simulated annealing
        linear       a + (b - a) t/n
        cosine       a + (b - a) (1 - cos(pi t/n))/2
        exponential  a (b/a)^(t/n)

    Raises:
        ValueError: for a negative step.
    """
    if step < 0:
        raise ValueError(f"a step is counted from 0, got {step}")
    if options.anneal == "none":
        return options.init
    if options.anneal == "log":
        return max(options.final, options.init * math.log(2) / math.log(step + 2))
    if step >= options.anneal_steps:
        return options.final
    share = step / options.anneal_steps
    if options.anneal == "linear":
        return options.init + (options.final - options.init) * share
    if options.anneal == "cosine":
        return options.init + (options.final - options.init) * (1 - math.cos(math.pi * share)) / 2
    return options.init * (options.final / options.init) ** share


class AnyTemperature(Protocol):
    """What a training step asks of a temperature, in the order of the calls."""

    def begin(self, step: int) -> None:
        """Get ready for the forward pass of step ``step`` of the whole training, 0 being the first."""

    def __call__(self, batch: GlobalBatch) -> Tensor:
        """Tau for this batch, the same on every rank: a scalar ``[]``, or ``[2, B]`` for one a side and anchor."""
        ...

    def finish(self, tau: Tensor, batch: GlobalBatch, skip: Tensor | None = None) -> None:
        """What is left to do after the optimizer's step.

        Args:
            tau: what the call gave, after the backward pass.
            batch: the one it was given for.
            skip: a 0-dim bool on the device: the optimizer left out this step, so nothing may change.
        """

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """A function that takes back what a step with ``batch`` does to the temperature."""
        ...

    def at(self, index: Tensor) -> Tensor:
        """Tau of given samples ``[k]``, without gradient: ``[]`` or ``[2, k]``. All ranks call it with the same."""
        ...

    def typical(self) -> Tensor:
        """A scalar that stands for the whole in records and probes, without gradient; all ranks must call it."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """What the optimizer moves."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs; all ranks must call it, rank 0 has the whole."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take back what ``state_dict`` gave on rank 0, on any number of ranks."""


class Temperature(nn.Module):
    """One tau for all samples: holds ``log(1/tau)`` in float32, or float64 after ``.double()``, never in less.

    The bound is a projection of the parameter before a forward pass, not a clamp in the graph: behind a clamp the
    gradient is zero and a temperature outside could never return.

    Raises:
        ValueError: for options that make no sense.
    """

    log_inverse: Tensor

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__()
        options.check()
        self.options = options
        start = torch.tensor(-math.log(options.init), dtype=torch.float32)
        if options.learned:
            self.log_inverse = nn.Parameter(start)
        else:
            self.register_buffer("log_inverse", start)
        self._bounds = {dtype: _inside(options.low, options.high, dtype) for dtype in (torch.float32, torch.float64)}
        self._before: Tensor | None = None

    @property
    def _shrinks_steps(self) -> bool:
        return self.options.learned and self.options.lr_rule == "step_thresh"

    @torch.no_grad()
    def project(self) -> None:
        """Bring the parameter inside the bounds, in place."""
        self.log_inverse.clamp_(*self._bounds[self.log_inverse.dtype])

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Before the forward pass of step ``step``: set an annealed tau, and bring any inside its bounds."""
        if self.options.anneal != "none":
            self.log_inverse.fill_(-math.log(annealed(self.options, step)))
        self.project()
        if self._shrinks_steps:
            self._before = self.log_inverse.detach().clone()

    def forward(self, batch: GlobalBatch | None = None) -> Tensor:
        """Tau, a scalar ``[]``, whatever the batch."""
        return torch.exp(-self.log_inverse)

    @torch.no_grad()
    def finish(self, tau: Tensor, batch: GlobalBatch | None = None, skip: Tensor | None = None) -> None:
        """After the optimizer's step with a constant learning rate: ``step_thresh`` cuts it where tau was low.

        AdamW without weight decay moves in proportion to its learning rate, so a third of the step is the step of a
        third of the rate, and no host has to read tau before it. A step that was left out stays left out.

        Raises:
            RuntimeError: under ``step_thresh``, when ``begin`` was not called before the step.
        """
        if not self._shrinks_steps:
            return
        if self._before is None:
            raise RuntimeError("temperature.finish(...) needs temperature.begin(step) before the step it ends")
        shorter = torch.lerp(self._before, self.log_inverse, 1 / self.options.threshold_divisor)
        self.log_inverse.copy_(torch.where(tau <= self.options.threshold, shorter, self.log_inverse))
        self._before = None

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """A function that sets tau back to what it is now."""
        before = self.log_inverse.detach().clone()

        @torch.no_grad()
        def undo() -> None:
            self.log_inverse.copy_(before)

        return undo

    def at(self, index: Tensor) -> Tensor:
        """Tau, a scalar, whatever the samples."""
        return self().detach()

    def typical(self) -> Tensor:
        """Tau itself, without gradient."""
        return self().detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Temperature:
        """Follow a module to its device and to float64, but not to half precision, where log(1/tau) cannot move."""

        def in_full(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype in self._bounds else x.to(moved.device)

        super()._apply(in_full, recurse)
        return self


def _inside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Bounds of ``log(1/tau)`` whose exponential does not step over the wanted ones by rounding.

    One unit in the last place is left over, for devices whose exponential rounds to the other side.
    """
    smallest, largest = torch.tensor([-math.log(high), -math.log(low)], dtype=dtype)
    unit = torch.finfo(dtype).eps
    while torch.exp(-largest).nextafter(-largest.new_tensor(math.inf)).item() < low:
        largest = largest - unit * max(1.0, abs(largest.item()))
    # exp(0) is exact everywhere.
    while smallest != 0 and torch.exp(-smallest).nextafter(smallest.new_tensor(math.inf)).item() > high:
        smallest = smallest + unit * max(1.0, abs(smallest.item()))
    return smallest.item(), largest.item()
