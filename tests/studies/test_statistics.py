"""Spreads and paired intervals against worked examples and against their own promise, coverage."""

import math
import random

import pytest

from neuclip_lib.studies.statistics import paired_interval, spread


def test_spread_of_few_values():
    found = spread([1.0, 2.0, 4.0])
    assert (found.mean, found.n) == (pytest.approx(7 / 3), 3)
    assert found.deviation == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2))
    assert spread([3.0]).deviation is None
    assert str(spread([3.0])) == "3.0"


def test_paired_interval_of_a_worked_example():
    # Differences 1, 2, 3, 4: mean 2.5, deviation 1.29099, and 3.18245 is the 97.5 % quantile of t with 3 degrees.
    found = paired_interval([2, 4, 6, 8], [1, 2, 3, 4])
    assert found.mean == 2.5
    assert found.high - found.mean == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-6)
    assert found.low == pytest.approx(2 * found.mean - found.high)
    assert found.says_better
    assert not found.says_worse


def test_one_pair_says_nothing():
    found = paired_interval([1.0], [5.0])
    assert (found.mean, found.n) == (-4.0, 1)
    assert not found.says_worse
    assert "one pair" in str(found)


def test_the_interval_covers_the_truth_nineteen_times_in_twenty():
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        pairs = [(draw.gauss(3, 1), draw.gauss(1, 1)) for _ in range(5)]
        found = paired_interval([a for a, _ in pairs], [b for _, b in pairs])
        hits += found.low <= 2 <= found.high
    assert 0.935 < hits / 2000 < 0.965


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(left, right):
    with pytest.raises(ValueError, match="pairs are needed"):
        paired_interval(left, right)
