"""The temperature: fixed or learned, inside its bounds in every forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TemperatureOptions:
    """How tau starts and whether it is learned.

    Args:
        init: tau at step 0.
        learned: train ``log(1/tau)``.
        low: smallest tau.
        high: largest tau.
        lr: learning rate of ``log(1/tau)``; ``None`` means a quarter of the encoders'.
        rho: weight of ``+ rho tau`` in objectives with the factor tau; it should be the mean KL divergence of the
            negatives' weights from uniform at the tau that is wanted (usually .3 to .6 of log n).
    """

    init: float = 0.07
    learned: bool = False
    low: float = 0.01
    high: float = 1.0
    lr: float | None = None
    rho: float = 0.0

    def check(self) -> None:
        """Raise ValueError, naming the value, when an option makes no sense."""
        if not 0 < self.low < self.high:
            raise ValueError(f"temperature bounds must satisfy 0 < low < high, got low={self.low}, high={self.high}")
        if not self.low <= self.init <= self.high:
            raise ValueError(
                f"temperature init={self.init} is outside its bounds [{self.low}, {self.high}]; "
                "tau is the divisor of the similarities, for instance 0.05, not its inverse"
            )
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"temperature lr must be positive, got {self.lr}")
        if not (math.isfinite(self.rho) and self.rho >= 0):
            raise ValueError(f"temperature rho must be finite and not negative, got {self.rho}")


class Temperature(nn.Module):
    """Holds ``log(1/tau)`` in float32; ``project()`` before a forward pass brings it inside the bounds.

    The bound is a projection of the parameter, not a clamp in the graph: behind a clamp the gradient is zero and a
    temperature outside could never return.
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
        self.lowest, self.highest = _inside(options.low, options.high)

    @torch.no_grad()
    def project(self) -> None:
        """Bring the parameter inside the bounds, in place."""
        self.log_inverse.clamp_(self.lowest, self.highest)

    def forward(self) -> Tensor:
        """Tau, a float32 scalar."""
        return torch.exp(-self.log_inverse.float())


def _inside(low: float, high: float) -> tuple[float, float]:
    """Bounds of ``log(1/tau)`` in float32 whose exponential does not step over the wanted ones by rounding."""
    smallest, largest = torch.tensor(-math.log(high)), torch.tensor(-math.log(low))
    while torch.exp(-largest).item() < low:
        largest = torch.nextafter(largest, torch.tensor(-math.inf))
    while torch.exp(-smallest).item() > high:
        smallest = torch.nextafter(smallest, torch.tensor(math.inf))
    return smallest.item(), largest.item()
