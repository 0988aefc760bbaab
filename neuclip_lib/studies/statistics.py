"""Means, spreads and paired differences of small samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    deviation: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with a 95 % confidence interval by Student's t; infinite for a single pair."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def says_worse(self) -> bool:
        """The whole interval is below zero."""
        return self.high < 0

    @property
    def says_better(self) -> bool:
        """The whole interval is above zero."""
        return self.low > 0

    def __str__(self) -> str:
        if self.n == 1:
            return f"{self.mean:+.1f} (one pair)"
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f}, n {self.n})"


def paired_interval(left: Sequence[float], right: Sequence[float]) -> Interval:
    """Of ``left[k] - right[k]``, pairs that share all but what is compared.

    Raises:
        ValueError: for no pair, or lists of different length.
    """
    from scipy.stats import t

    if len(left) != len(right) or not left:
        raise ValueError(f"pairs are needed, got {len(left)} and {len(right)} values")
    found = spread([a - b for a, b in zip(left, right, strict=True)])
    if found.deviation is None:
        return Interval(found.mean, -math.inf, math.inf, 1)
    half = float(t.ppf(0.975, found.n - 1)) * found.deviation / math.sqrt(found.n)
    return Interval(found.mean, found.mean - half, found.mean + half, found.n)
