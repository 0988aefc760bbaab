"""The temperature stays inside its bounds in every forward pass, and comes back from outside; step_thresh."""

import math

import pytest
import torch

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.temperature import AnyTemperature, Temperature, TemperatureOptions

pytestmark = pytest.mark.quick

F64 = torch.float64
E = torch.eye(4, dtype=F64)
BATCH = GlobalBatch(E, E)


def learned(**options) -> Temperature:
    return Temperature(TemperatureOptions(learned=True, **options))


def test_starts_where_told_and_counts_as_a_parameter_only_when_learned():
    moving, fixed = Temperature(TemperatureOptions(0.07, True)), Temperature(TemperatureOptions(0.05))
    assert moving().item() == pytest.approx(0.07, rel=1e-6)
    assert fixed().item() == pytest.approx(0.05, rel=1e-6)
    assert len(list(moving.parameters())) == 1 and not list(fixed.parameters())
    assert set(fixed.state_dict()) == set(moving.state_dict()) == {"log_inverse"}


@pytest.mark.parametrize(("raw", "expected"), [(6.0, 0.01), (-1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_loaded_value_outside_is_bounded_in_the_first_forward(raw, expected, dtype):
    for step in (0, 1):
        temperature = learned().to(dtype)
        temperature.load_state_dict({"log_inverse": torch.tensor(raw)})
        temperature.begin(step)
        tau = temperature(BATCH)
        assert tau.item() == pytest.approx(expected, rel=1e-6)
        assert 0.01 <= tau.item() <= 1.0
        assert temperature.typical().item() == tau.item(), "what is recorded is what is used"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("low", "high"), [(0.01, 1.0), (0.02, 0.7), (1 / 3, 0.7), (0.07, 0.5), (0.01, 20.0)])
def test_rounding_never_steps_over_a_bound(low, high, dtype):
    temperature = Temperature(TemperatureOptions(0.4, True, low=low, high=high)).to(dtype)
    ends = []
    for raw in (50.0, -50.0):
        temperature.load_state_dict({"log_inverse": torch.tensor(raw)})
        temperature.project()
        ends.append(temperature().item())
    assert low <= ends[0] and ends[1] <= high
    assert ends == pytest.approx([low, high], rel=8 * torch.finfo(dtype).eps)
    unit = torch.finfo(dtype).eps / 2
    assert ends[0] * (1 - unit) >= low and (high == 1 or ends[1] * (1 + unit) <= high), "room for another rounding"


def test_a_bound_that_is_one_stays_one():
    temperature = learned()
    temperature.load_state_dict({"log_inverse": torch.tensor(-3.0)})
    temperature.begin(0)
    assert temperature().item() == 1.0


def test_a_projected_temperature_still_has_a_gradient():
    temperature = learned()
    temperature.load_state_dict({"log_inverse": torch.tensor(9.0)})
    temperature.begin(0)
    (slope,) = torch.autograd.grad(temperature() * 3, list(temperature.parameters()))
    assert slope.item() == pytest.approx(-0.03, rel=1e-5)


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_stays_float32_when_a_model_is_cast_to_less(is_learned, dtype):
    temperature = Temperature(TemperatureOptions(learned=is_learned))
    before = temperature.log_inverse.item()
    torch.nn.Sequential(torch.nn.Linear(2, 2), temperature).to(dtype)
    assert temperature().dtype == torch.float32
    assert temperature.log_inverse.item() == before, "not even rounded on the way"


def test_in_float64_it_is_float64():
    temperature = learned().double()
    assert temperature().dtype == temperature.log_inverse.dtype == F64
    temperature.begin(0)
    assert temperature().item() == pytest.approx(0.07, rel=1e-6)


def test_remember_sets_it_back_to_the_bit():
    for options in (TemperatureOptions(learned=True), TemperatureOptions(anneal="linear", anneal_steps=9)):
        temperature = Temperature(options)
        temperature.begin(3)
        before = temperature.log_inverse.detach().clone()
        undo = temperature.remember(BATCH)
        temperature.begin(4)
        with torch.no_grad():
            temperature.log_inverse.add_(0.3)
        undo()
        assert torch.equal(temperature.log_inverse, before)


def test_every_sample_has_the_same():
    temperature = learned(init=0.2)
    tau = temperature.at(torch.tensor([3, 1]))
    assert tau.shape == () and not tau.requires_grad and tau.item() == temperature().item()
    assert not temperature.typical().requires_grad


def steps(temperature, slopes, lr, **kwargs):
    """AdamW's way along given slopes of tau; yields tau after each step."""
    optimizer = torch.optim.AdamW(temperature.parameters(), lr=lr, weight_decay=0.0, **kwargs)
    for step, slope in enumerate(slopes):
        temperature.begin(step)
        tau = temperature(BATCH)
        optimizer.zero_grad()
        (tau * slope).backward()
        yield optimizer, tau
        optimizer.step()
        temperature.finish(tau, BATCH)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("divisor", [3.0, 1.0, 7.0])
def test_step_thresh_is_an_adamw_whose_rate_is_divided_while_tau_is_low(fused, divisor):
    # Down through the threshold and up again, so both sides of it and both ways over it are seen.
    slopes = [3.0] * 30 + [-9.0] * 60
    lr = 0.05
    ours = learned(init=0.05, lr_rule="step_thresh", threshold=0.03, threshold_divisor=divisor).double()
    plain = learned(init=0.05).double()
    low = 0
    pairs = zip(steps(ours, slopes, lr, fused=fused), steps(plain, slopes, lr, fused=fused), strict=True)
    for (_, tau), (optimizer, expected) in pairs:
        assert tau.item() == pytest.approx(expected.item(), rel=1e-12)
        low += expected.item() <= 0.03
        optimizer.param_groups[0]["lr"] = lr / divisor if expected.item() <= 0.03 else lr
    assert ours.log_inverse.item() == pytest.approx(plain.log_inverse.item(), rel=1e-12)
    assert 20 < low < 80


def test_a_step_above_the_threshold_is_left_to_the_bit():
    ours, plain = learned(init=0.05, lr_rule="step_thresh"), learned(init=0.05)
    for temperature in (ours, plain):
        list(steps(temperature, [1.0, 2.0, -1.0], 1e-3))
    assert torch.equal(ours.log_inverse, plain.log_inverse)


def test_a_step_that_was_left_out_stays_left_out():
    temperature = learned(init=0.02, lr_rule="step_thresh")
    temperature.begin(0)
    before = temperature.log_inverse.detach().clone()
    temperature.finish(temperature(BATCH), BATCH, skip=torch.tensor(True))
    assert torch.equal(temperature.log_inverse, before)


def test_finish_leaves_other_temperatures_alone_and_wants_a_begin():
    for temperature in (learned(init=0.02), Temperature(TemperatureOptions(0.02, lr_rule="step_thresh"))):
        before = temperature.log_inverse.detach().clone()
        temperature.finish(temperature(BATCH), BATCH)
        assert torch.equal(temperature.log_inverse, before)
    temperature = learned(lr_rule="step_thresh")
    with pytest.raises(RuntimeError, match=r"begin\(step\)"):
        temperature.finish(temperature(BATCH), BATCH)
    temperature.begin(0)
    temperature.finish(temperature(BATCH), BATCH)
    with pytest.raises(RuntimeError, match=r"begin\(step\)"):
        temperature.finish(temperature(BATCH), BATCH)


@pytest.mark.parametrize(
    "options",
    [
        TemperatureOptions(learned=True, lr_rule="step_thresh"),
        TemperatureOptions(anneal="cosine", anneal_steps=9),
        TemperatureOptions(),
    ],
)
def test_nothing_waits_for_the_host(options):
    temperature: AnyTemperature = Temperature(options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        temperature.begin(0)
        tau = temperature(BATCH)
        temperature.finish(tau, BATCH, torch.tensor(False))
    names = {event.name for event in profile.events()}
    assert "aten::exp" in names
    assert not {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"} & names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": 20.0}, "outside its bounds"),
        ({"init": 0.005}, "outside its bounds"),
        ({"low": 0.0}, "0 < low < high"),
        ({"low": 0.5, "high": 0.1}, "0 < low < high"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"rho": math.nan}, "rho must be finite"),
        ({"init": math.nan}, "outside its bounds"),
        ({"lr_rule": "step"}, "lr_rule must be one of schedule, step_thresh; got 'step'"),
        ({"threshold": 0.0}, "threshold must be positive"),
        ({"threshold_divisor": 0.5}, "threshold_divisor at least 1"),
        ({"anneal": "logarithmic"}, "anneal must be one of none, log, linear"),
        ({"anneal": "linear", "anneal_steps": 5, "learned": True}, "both move tau"),
        ({"anneal": "linear"}, "needs anneal_steps of at least 1"),
        ({"anneal": "cosine", "anneal_steps": 5, "final": 2.0}, "final=2.0 is outside its bounds"),
        ({"anneal": "log", "final": 0.09}, "only falls"),
        ({"per_sample_lr": 0.0}, "per_sample_lr must be positive"),
        ({"per_sample_eps": 0.0}, "per_sample_eps must be positive"),
        ({"per_sample_clamp": -1.0}, "per_sample_clamp must be positive"),
        ({"per_sample_beta1": 1.0}, r"per_sample_beta1 must be in \[0, 1\)"),
        ({"per_sample_beta2": -0.1}, r"per_sample_beta2 must be in \[0, 1\)"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Temperature(TemperatureOptions(**options))
