"""The drop-in for open_clip's loss, call by call: value and gradients, when it learns, its state, what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss
from torch import Tensor, nn

import neuclip_lib as nc
from neuclip_lib.methods import METHODS
from neuclip_lib.training.open_clip_loss import OpenClipLoss, plain_weights

pytestmark = pytest.mark.quick

NPN = {"m": 12, "prototypes.updates": 3, "restart_every": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "gcl-batch": {"rho": 1.0},
    "neuclip": {"rho": 1.0, **NPN},
    "neuclip-mixed": {"rho": 1.0, "weight_cap": 1.5, **NPN},
    "amorlip": {"rho": 1.0, "average": 0.5, "steps_per_epoch": 2, "epochs": 2},
    "siglip": {},
    "dhel": {},
    "kcl": {},
}


# One call


def features(dtype: torch.dtype = torch.float64, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    e1, e2 = (nn.functional.normalize(torch.randn(size, 6, generator=g, dtype=torch.float64), dim=1) for _ in range(2))
    return e1.to(dtype).requires_grad_(), e2.to(dtype).requires_grad_()


def number(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("name", ["openclip", "siglip"])
def test_value_and_gradients_are_those_of_its_own_loss(name: str) -> None:
    published = open_clip.ClipLoss() if name == "openclip" else SigLipLoss()
    results = []
    for loss in (nc.open_clip_loss(name), published):
        inputs = [*features(), number(12.0), number(-3.0)]
        value = loss(*inputs, output_dict=True)["contrastive_loss"]
        value.backward()
        # Features of unit length move on the sphere: what points outward is lost in open_clip's normalisation.
        for x in inputs[:2]:
            x.grad -= (x.grad * x.detach()).sum(1, keepdim=True) * x.detach()
        results.append((value.item(), [x.grad for x in inputs]))
    constant = math.log(7) if name == "openclip" else 0.0
    assert results[0][0] + constant == pytest.approx(results[1][0], abs=1e-12)
    for made, expected in zip(results[0][1], results[1][1], strict=True):
        assert (made - expected).abs().max() < 1e-12
    assert results[0][1][3].abs() > 1e-3 or name == "openclip"


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_a_loss_does_not_use_has_a_gradient_of_zero(name: str) -> None:
    scale, bias = number(10.0), number(-2.0).detach().reshape(1).requires_grad_()
    nc.open_clip_loss(name, **OPTIONS[name])(*features(), scale, bias).backward()
    assert scale.grad is not None and bias.grad is not None and bias.grad.shape == (1,)
    assert (scale.grad == 0) == (name == "kcl")
    assert (bias.grad == 0) == (name != "siglip")


def test_half_precision_is_left_at_the_door() -> None:
    """Under autocast and from bfloat16 features the loss is that of float32 unit rows."""
    low = features(torch.bfloat16)
    scale = number(50.0, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        value = nc.open_clip_loss("neuclip", **OPTIONS["neuclip"])(*low, scale)
    value.backward()
    full = [nn.functional.normalize(x.detach().float(), dim=1).requires_grad_() for x in low]
    exact = nc.open_clip_loss("neuclip", **OPTIONS["neuclip"])(*full, number(50.0, torch.float32))
    assert value.dtype == torch.float32 and value.item() == pytest.approx(exact.item(), rel=1e-6)
    assert low[0].grad is not None and low[0].grad.dtype == torch.bfloat16 and low[0].grad.abs().max() > 1e-4


def state_of(loss: OpenClipLoss) -> dict[str, Any]:
    return copy.deepcopy(dict(loss.get_extra_state()))


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("name", ["neuclip", "amorlip"])
def test_a_first_call_in_inference_mode_spoils_nothing(name: str) -> None:
    loss = nc.open_clip_loss(name, **OPTIONS[name])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call update with a batch before"):
        loss(*features(), number(10.0))
    again = nc.open_clip_loss(name, **OPTIONS[name])
    assert loss(*features(), number(10.0)).item() == again(*features(), number(10.0)).item()
    assert loss.steps == 1


@pytest.mark.parametrize("name", ["neuclip", "amorlip"])
def test_it_learns_once_a_step_and_only_in_training(name: str) -> None:
    loss = nc.open_clip_loss(name, accumulation=2, **OPTIONS[name])
    loss(*features(), number(10.0))
    first = state_of(loss)
    loss(*features(), number(10.0))
    assert equal(state_of(loss), first) and loss.steps == 1
    loss.eval()(*features(seed=1), number(10.0))
    with torch.no_grad():
        loss.train()(*features(seed=1), number(10.0))
    assert equal(state_of(loss), first)
    loss(*features(seed=1), number(10.0))
    assert loss.steps == 2 and not equal(state_of(loss)["normalizer"], first["normalizer"])


def test_rho_unsaid_is_in_the_middle_of_the_usual_range_of_one_batch() -> None:
    def slope(**options: Any) -> float:
        scale = number(10.0)
        nc.open_clip_loss("gcl-batch", **options)(*features(), scale).backward()
        assert scale.grad is not None
        return scale.grad.item()

    assert slope() == pytest.approx(slope(rho=0.45 * math.log(7)), rel=1e-12)
    # rho tau with tau = 1/10: its slope in the scale is -rho/100.
    assert slope(**{"temperature.rho": 3.0}) - slope(rho=1.0) == pytest.approx(-2 / 100, abs=1e-12)


# Its state, inside a model


def trained(name: str, size: int = 8) -> tuple[nn.Module, OpenClipLoss]:
    """A stand-in for a model, with a loss that has seen one batch."""
    model = nn.Linear(2, 2)
    loss = nc.open_clip_loss(name, **OPTIONS[name]).attach(model)
    loss(*features(size=size), number(10.0))
    return model, loss


def test_a_checkpoint_without_the_state_loads_with_a_warning_and_one_with_it_into_a_plain_model() -> None:
    model, _ = trained("neuclip")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*neuclip_loss\._extra_state"):
        nn.Linear(2, 2).load_state_dict(model.state_dict())
    nn.Linear(2, 2).load_state_dict(plain_weights(model.state_dict()))
    fresh = nn.Linear(2, 2)
    loss = nc.open_clip_loss("neuclip", **OPTIONS["neuclip"]).attach(fresh)
    with pytest.warns(UserWarning, match=r"no neuclip_loss\._extra_state.*'neuclip' keeps its own state.* 0 steps"):
        fresh.load_state_dict(plain_weights(model.state_dict()))
    assert torch.equal(fresh.weight, model.weight) and loss.steps == 0
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    assert plain_weights(wrapped).keys() == {"module.weight", "module.bias"}


def test_the_state_of_another_method_size_or_shape_is_refused() -> None:
    saved = trained("neuclip")[0].state_dict()
    with pytest.raises(ValueError, match=r"state of 'neuclip', this loss is 'amorlip'.*plain_weights"):
        trained("amorlip")[0].load_state_dict(saved)
    model, loss = trained("neuclip")
    model.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"global batch of 8 pairs, this run has 6.*accumulation"):
        loss(*features(size=6), number(10.0))
    other = nn.Linear(2, 2)
    larger = nc.open_clip_loss("neuclip", m=16).attach(other)
    other.load_state_dict(saved)
    assert equal(state_of(larger), dict(saved["neuclip_loss._extra_state"])), "waits for the first batch"
    with pytest.raises(ValueError, match=r"the saved w is \(2, 12, 6\), this normalizer's is \(2, 16, 6\)"):
        larger(*features(), number(10.0))
    with pytest.raises(ValueError, match="attached to this model already"):
        nc.open_clip_loss("openclip").attach(model)


# Refusals


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs_index])
def test_a_method_that_needs_an_index_names_those_that_do_not(name: str) -> None:
    free = [other for other, method in METHODS.items() if not method.needs_index]
    with pytest.raises(ValueError, match=f"{name} keeps numbers per sample.*{', '.join(free)}.*--method {name}"):
        nc.open_clip_loss(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("neuclap", {}, "no method 'neuclap'; did you mean 'neuclip'"),
        ("neuclip", {"mm": 3}, "there is no option 'mm'"),
        ("neuclip", {"lr": 0.1}, "'lr' may mean prototypes.lr or amortized.lr"),
        ("neuclip", {"temperature.init": 0.05}, "there is no option 'temperature.init'"),
        ("neuclip", {"m": 0}, "prototypes.m must be at least 1, got 0"),
        ("neuclip", {"m": "many"}, "m must be int, got 'many'"),
        ("gcl-batch", {"rho": -1.0}, "rho must be finite and not negative, got -1.0"),
        ("amorlip", {}, "follows the epochs: give steps_per_epoch"),
        ("amorlip", {"steps_per_epoch": 3}, "follows the epochs"),
        ("openclip", {"accumulation": 0}, "accumulation must be at least 1.*accumulation=0"),
        ("openclip", {"world_size": 2, "rank": 2}, "rank from 0 to world_size - 1.*rank=2, world_size=2"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_batch(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.open_clip_loss(name, **options)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"siglip learns a bias.*init_logit_bias.*--siglip"):
        nc.open_clip_loss("siglip")(*features(), number(10.0))
    with pytest.raises(ValueError, match=r"world_size=2, rank=1, but this process is rank 0 of 1 in no torch"):
        nc.open_clip_loss("openclip", world_size=2, rank=1)(*features(), number(10.0))
    loss = nc.open_clip_loss("openclip")
    loss(*features(), number(10.0))
    with pytest.raises(ValueError, match="global batch of 8 pairs, its first one, and got 6"):
        loss(*features(size=6), number(10.0))
    with pytest.raises(ValueError, match=r"one number each, got \(2,\)"):
        loss(*features(), torch.ones(2))
