"""Annealed temperatures: functions of the step alone, with values by hand, that end exactly where they should."""

import math
from itertools import pairwise

import pytest
import torch

from neuclip_lib.temperature import Temperature, TemperatureOptions, annealed

pytestmark = pytest.mark.quick

UNTIL = {"linear", "cosine", "exponential"}


def options(anneal, init=0.2, final=0.05, steps=100, **more):
    return TemperatureOptions(init, anneal=anneal, final=final, anneal_steps=steps, **more)


@pytest.mark.parametrize(
    ("anneal", "step", "expected"),
    [
        ("none", 7, 0.2),
        ("linear", 0, 0.2),
        ("linear", 20, 0.17),
        ("linear", 50, 0.125),
        ("cosine", 0, 0.2),
        ("cosine", 50, 0.125),
        ("cosine", 25, 0.05 + 0.15 * (1 + math.sqrt(0.5)) / 2),
        ("exponential", 0, 0.2),
        ("exponential", 50, 0.1),
        ("exponential", 25, 0.2 / math.sqrt(2)),
        ("log", 0, 0.2),
        ("log", 2, 0.1),  # log 2 / log 4
        ("log", 6, 0.2 / 3),  # log 2 / log 8
        ("log", 14, 0.05),  # log 2 / log 16: it arrives
        ("log", 15, 0.05),
    ],
)
def test_values_by_hand(anneal, step, expected):
    assert annealed(options(anneal), step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("anneal", sorted(UNTIL))
def test_it_arrives_exactly_stays_and_does_not_know_how_long_the_run_is(anneal):
    one = options(anneal, init=0.3, final=0.07, steps=37)
    assert annealed(one, 36) > 0.07
    assert [annealed(one, step) for step in (37, 38, 10**9)] == [0.07] * 3
    assert annealed(one, 0) == pytest.approx(0.3, rel=1e-15)


WAYS = [(anneal, *ends) for anneal in sorted(UNTIL) for ends in ((0.2, 0.05), (0.1, 0.1), (0.05, 0.2))]


@pytest.mark.parametrize(("anneal", "init", "final"), [*WAYS, ("log", 0.2, 0.05), ("log", 0.1, 0.1)])
def test_it_goes_one_way_between_its_ends(anneal, init, final):
    values = [annealed(options(anneal, init, final), step) for step in range(130)]
    sign = 1 if final <= init else -1
    assert all(sign * (before - after) >= 0 for before, after in pairwise(values))
    assert min(init, final) <= min(values) and max(values) <= max(init, final)


def test_log_takes_a_number_of_steps_that_no_share_of_a_run_could_shorten():
    """It arrives at final when t + 2 = 2^(init/final), whatever anneal_steps is."""
    one = options("log", init=0.2, final=0.02, steps=3)
    arrives = 2**10 - 2
    assert annealed(one, arrives - 1) > 0.02
    assert annealed(one, arrives) == pytest.approx(0.02, rel=1e-12)
    assert annealed(one, arrives + 1) == 0.02


def test_a_step_before_the_first_is_refused():
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        annealed(options("linear"), -1)


@pytest.mark.parametrize("anneal", ["log", *sorted(UNTIL)])
def test_the_temperature_follows_in_any_order_of_steps(anneal):
    one = options(anneal, low=0.01, high=0.5)
    temperature = Temperature(one)
    for step in (0, 3, 99, 40, 100, 10**6):
        temperature.begin(step)
        tau = temperature()
        assert tau.item() == pytest.approx(annealed(one, step), rel=1e-6)
        assert not tau.requires_grad
    assert not list(temperature.parameters())


def test_an_end_on_a_bound_stays_inside_it():
    temperature = Temperature(options("linear", init=0.5, final=0.01, low=0.01))
    temperature.begin(100)
    assert 0.01 <= temperature().item() <= 0.01 * (1 + 1e-6)


def test_a_resumed_run_needs_only_the_step():
    one = options("cosine")
    first, second = Temperature(one), Temperature(one)
    for step in range(30):
        first.begin(step)
    second.begin(29)
    assert torch.equal(first.log_inverse, second.log_inverse)
