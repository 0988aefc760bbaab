"""Paired timing on a noisy machine: every variant in every round, in random order, over the round's reference."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SHORTEST = 0.02
"""Seconds of inner repeats a measurement takes at least: below that the clock's and the cache's noise shows."""


@dataclass(frozen=True)
class Ratio:
    """Median and inter-quartile range of a variant's time over the reference's, round by round."""

    median: float
    low: float
    high: float


def paired_ratios(
    variants: dict[str, Callable[[], object]],
    reference: str,
    rounds: int = 9,
    seed: int = 0,
    clock: Callable[[], float] = time.thread_time,
    repeats: int | None = None,
) -> dict[str, Ratio]:
    """Time every variant once a round.

    Args:
        variants: name -> call to time; one named ``reference`` must be among them.
        reference: the name of the denominator.
        rounds: at least 4; 9 or more for figures that are quoted.
        seed: of the order inside the rounds.
        clock: CPU seconds of this thread by default, which is right for one-thread ratios.
        repeats: calls in one measurement; as many as take 20 ms if not given. Ranks that time together must give it.
    """
    order = random.Random(seed)
    counts = {name: repeats or _repeats(call, clock) for name, call in variants.items()}
    if repeats:
        for call in variants.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            start = clock()
            for _ in range(counts[name]):
                variants[name]()
            seconds[name].append((clock() - start) / counts[name])
    result = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        result[name] = Ratio(middle, low, high)
    return result


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    call()
    start = clock()
    call()
    once = max(clock() - start, 1e-6)
    return max(1, round(SHORTEST / once))


def rows_of(
    case: str, ratios: Mapping[str, Ratio], reference: str, targets: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The rows of a table: one a variant, the reference itself left out."""
    return [
        {
            "case": case,
            "variant": f"{name} / {reference}",
            "ratio": round(ratio.median, 3),
            "target": targets.get(name),
            "iqr": [round(ratio.low, 3), round(ratio.high, 3)],
        }
        for name, ratio in ratios.items()
        if name != reference
    ]
