"""The schedule against its closed form, the groups against a list by hand, the optimizer against a loop."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from neuclip_lib.temperature import Temperature, TemperatureOptions
from neuclip_lib.training import optim


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.GroupNorm(1, 2)
        self.table = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.scale = nn.Parameter(torch.ones(()))
        self.square_norm = nn.LayerNorm((2, 2))  # two-dimensional, and still of a norm
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_warm_up_is_linear_and_the_cosine_starts_at_the_peak_and_ends_near_zero() -> None:
    steps, warmup = 700, 50
    factors = [optim.learning_rate_factor(step, steps, warmup) for step in range(steps)]
    assert factors[0] == 1 / 50
    assert factors[24] == 0.5
    assert factors[49] == factors[50] == 1.0
    assert factors[375] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx((math.pi / 650) ** 2 / 4, rel=1e-4)
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[50:]))
    assert [optim.learning_rate_factor(step, 4, 0) for step in range(4)] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert [optim.learning_rate_factor(step, 3, 10) for step in range(3)] == [0.1, 0.2, pytest.approx(0.3)]


def test_no_decay_on_vectors_biases_norms_and_scalars() -> None:
    model = Small()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in optim.parameter_groups(model, 0.1)}
    assert [names[id(p)] for p in groups["decayed"]["params"]] == ["table", "conv.weight"]
    assert sorted(names[id(p)] for p in groups["free"]["params"]) == sorted(
        ["scale", "conv.bias", "norm.weight", "norm.bias", "square_norm.weight", "square_norm.bias"]
    )
    assert (groups["decayed"]["weight_decay"], groups["free"]["weight_decay"]) == (0.1, 0.0)


def test_a_learned_temperature_has_its_own_group_and_rate_and_a_fixed_one_none() -> None:
    options = optim.OptimOptions(lr=2e-3)
    learned = Temperature(TemperatureOptions(learned=True))
    optimizer = optim.build_optimizer(Small(), learned.parameters(), options, TemperatureOptions(lr=5e-5))
    group = optimizer.param_groups[-1]
    assert group["params"][0] is learned.log_inverse
    assert (group["peak"], group["weight_decay"]) == (5e-5, 0.0)
    optim.set_learning_rates(optimizer, step=0, steps=10, warmup=2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 2.5e-5]
    quarter = optim.build_optimizer(Small(), learned.parameters(), options, TemperatureOptions())
    assert quarter.param_groups[-1]["peak"] == 2e-3 / 4
    fixed = optim.build_optimizer(
        Small(), Temperature(TemperatureOptions()).parameters(), options, TemperatureOptions()
    )
    assert [group["name"] for group in fixed.param_groups] == ["decayed", "free"]


def test_step_thresh_holds_the_temperatures_rate_alone_and_a_loss_has_scalars_of_its_own() -> None:
    learned, bias = Temperature(TemperatureOptions(learned=True)), nn.Parameter(torch.tensor(-10.0))
    rule = TemperatureOptions(learned=True, lr=1e-3, lr_rule="step_thresh")
    optimizer = optim.build_optimizer(Small(), learned.parameters(), optim.OptimOptions(lr=4e-3), rule, [bias])
    optim.set_learning_rates(optimizer, step=0, steps=10, warmup=2)
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert rates["temperature"] == (1e-3, 0.0)  # no warm-up
    assert rates["loss"] == (5e-4, 0.0)
    assert optimizer.param_groups[-1]["params"][0] is bias


def test_three_adamw_steps_equal_the_written_out_rule() -> None:
    options = optim.OptimOptions(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3, warmup=2)
    model = nn.Linear(3, 2).double()
    optimizer = optim.build_optimizer(model, [], options, TemperatureOptions())
    generator = torch.Generator().manual_seed(1)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in expected.items()}
    square = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in range(3):
        optim.set_learning_rates(optimizer, step, 5, options.warmup)
        lr = 1e-2 * optim.learning_rate_factor(step, 5, 2)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            mean[name] = 0.8 * mean[name] + 0.2 * p.grad
            square[name] = 0.9 * square[name] + 0.1 * p.grad**2
            decay = 0.3 if name == "weight" else 0.0
            root = (square[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-3
            expected[name] = expected[name] * (1 - lr * decay) - lr * mean[name] / (1 - 0.8 ** (step + 1)) / root
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_the_gradient_norm_is_that_of_all_parameters_and_is_clipped_on_demand() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([12.0])
    assert optim.encoder_gradient_norm(model, None).item() == 13.0
    assert model.bias.grad.item() == 12.0
    assert optim.encoder_gradient_norm(model, 1.0).item() == 13.0
    assert torch.cat([model.weight.grad[0], model.bias.grad]).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "optim.lr must be above 0, got 0.0"),
        ({"lr": -1.0}, "optim.lr must be above 0"),
        ({"weight_decay": -0.1}, "optim.weight_decay must not be negative"),
        ({"beta2": 1.0}, r"optim.beta2 must be in \[0, 1\)"),
        ({"eps": 0.0}, "optim.eps must be above 0"),
        ({"warmup": -1}, "optim.warmup must not be negative"),
        ({"clip_norm": 0.0}, "optim.clip_norm must be above 0 or None"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.OptimOptions(**changes).check()
