import random

import pytest
import torch

from neuclip_lib.data.order import batch_indices, epoch_of, steps_per_epoch


@pytest.mark.parametrize(("n", "batch_size"), [(10, 3), (12, 4), (7, 7), (2, 2), (101, 50)])
def test_every_epoch_is_a_permutation_without_its_incomplete_batch(n, batch_size):
    per_epoch = n // batch_size
    for epoch in range(3):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = torch.cat([batch_indices(n, batch_size, seed=5, step=step) for step in steps]).tolist()
        assert len(seen) == len(set(seen)) == per_epoch * batch_size
        assert set(seen) <= set(range(n))
        assert {epoch_of(n, batch_size, step) for step in steps} == {epoch}


def test_a_batch_depends_on_nothing_but_its_arguments():
    n, batch_size, steps = 23, 4, list(range(40))
    forward = {step: batch_indices(n, batch_size, 3, step) for step in steps}
    random.Random(0).shuffle(steps)
    torch.manual_seed(1)  # a global seed must not matter
    for step in steps:
        batch_indices(n + 1, batch_size, 4, step)  # other orders in between
        again = batch_indices(n, batch_size, 3, step)
        assert torch.equal(again, forward[step])
        again.fill_(-1)  # what a caller does to its batch must not matter either
        assert torch.equal(batch_indices(n, batch_size, 3, step), forward[step])


def test_the_order_draws_no_global_random_number():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    batch_indices(50, 5, seed=11, step=123)
    assert torch.equal(torch.get_rng_state(), before)


def test_orders_of_other_seeds_and_epochs_differ():
    orders = {tuple(batch_indices(40, 40, seed, epoch).tolist()) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


def test_the_samples_left_out_change_from_epoch_to_epoch():
    left = [set(range(11)) - set(batch_indices(11, 10, 0, step).tolist()) for step in range(200)]
    assert set.union(*left) == set(range(11))


@pytest.mark.parametrize(("batch_size", "step"), [(1, 0), (0, 0), (-3, 0), (9, 0)])
def test_a_batch_of_one_or_larger_than_the_data_is_refused_with_both_numbers(batch_size, step):
    with pytest.raises(ValueError, match=rf"{batch_size}.*\b8\b"):
        batch_indices(8, batch_size, 0, step)


def test_steps_are_counted_from_zero():
    assert steps_per_epoch(10, 3) == 3
    assert [epoch_of(10, 3, step) for step in (0, 2, 3, 5, 6)] == [0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="-1"):
        epoch_of(10, 3, -1)
