"""The temperature stays inside its bounds in every forward pass, and can come back from outside."""

import math

import pytest
import torch

from neuclip_lib.temperature import Temperature, TemperatureOptions

pytestmark = pytest.mark.quick


def test_starts_where_told_and_counts_as_a_parameter_only_when_learned():
    learned, fixed = Temperature(TemperatureOptions(0.07, True)), Temperature(TemperatureOptions(0.05))
    assert learned().item() == pytest.approx(0.07, rel=1e-6)
    assert fixed().item() == pytest.approx(0.05, rel=1e-6)
    assert len(list(learned.parameters())) == 1 and not list(fixed.parameters())
    assert "log_inverse" in fixed.state_dict()


@pytest.mark.parametrize(("raw", "expected"), [(6.0, 0.01), (-1.0, 1.0)])
def test_a_loaded_value_outside_is_bounded_before_the_first_forward(raw, expected):
    temperature = Temperature(TemperatureOptions(learned=True))
    temperature.load_state_dict({"log_inverse": torch.tensor(raw)})
    temperature.project()
    tau = temperature().item()
    assert tau == pytest.approx(expected, rel=1e-6)
    assert 0.01 <= tau <= 1.0


@pytest.mark.parametrize("low", [0.01, 0.02, 1 / 3, 0.07])
def test_rounding_never_steps_over_a_bound(low):
    temperature = Temperature(TemperatureOptions(0.5, True, low=low, high=0.7))
    for raw in (50.0, -50.0):
        temperature.load_state_dict({"log_inverse": torch.tensor(raw)})
        temperature.project()
        assert low <= temperature().item() <= 0.7


def test_a_projected_temperature_still_has_a_gradient():
    temperature = Temperature(TemperatureOptions(learned=True))
    temperature.load_state_dict({"log_inverse": torch.tensor(9.0)})
    temperature.project()
    (slope,) = torch.autograd.grad(temperature() * 3, list(temperature.parameters()))
    assert slope.item() == pytest.approx(-0.03, rel=1e-5)


def test_the_parameter_stays_float32_when_a_model_is_cast():
    temperature = Temperature(TemperatureOptions(learned=True))
    assert temperature().dtype == torch.float32
    assert math.isfinite(temperature().item())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (TemperatureOptions(init=20.0), "outside its bounds"),
        (TemperatureOptions(init=0.005), "outside its bounds"),
        (TemperatureOptions(low=0.0), "0 < low < high"),
        (TemperatureOptions(low=0.5, high=0.1), "0 < low < high"),
        (TemperatureOptions(lr=0.0), "lr must be positive"),
        (TemperatureOptions(rho=float("nan")), "rho must be finite"),
        (TemperatureOptions(init=float("nan")), "outside its bounds"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Temperature(options)
