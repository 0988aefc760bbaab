"""Named starting points for a run; every value can be replaced by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuclip_lib.losses import SiglipOptions
from neuclip_lib.methods import get_method
from neuclip_lib.normalizers import AmortizedOptions, PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions
from neuclip_lib.training import options
from neuclip_lib.training.config import TrainConfig
from neuclip_lib.training.optim import OptimOptions


def laptop(method: str = "neuclip", data: str = "icons", seed: int = 0, **overrides: Any) -> TrainConfig:
    """One to two minutes on one idle core; the same budget, batch, model and temperature for every method.

    Args:
        overrides: further fields by full name (``**{"optim.lr": 1e-3}``) or by a last part that is unique (``m=256``).

    Raises:
        ValueError: for an unknown or ambiguous name, or a value that makes no sense.
    """
    base = TrainConfig(
        method=method,
        data=data,
        seed=seed,
        model="small",
        batch_size=128,
        steps=700,
        augment_shift=2,
        optim=OptimOptions(lr=2e-3, weight_decay=0.1, warmup=50),
        temperature=TemperatureOptions(init=0.05, learned=False),
        prototypes=PrototypeOptions(m=512, updates=10, restart_every=200, lr=1e-2, eps=1e-6, weight_cap=5.0),
        # A short run has no time for networks that start from nothing and are averaged over a thousand steps, or for a
        # bias made for large batches. AmorLIP's three values are the best of six tried on the validation part.
        amortized=AmortizedOptions(lr=1e-2, average=0.5, prior_weight=0.0, warm_start=True),
        siglip=SiglipOptions(bias=None),
        threads=1,
        log_every=10,
        probe_every=50,
        error_every=100,
        checkpoint_every=100,
        keep_last=None,
        preset="laptop",
    )
    return _finished(base, overrides)


def tiny(method: str = "neuclip", data: str = "captions", seed: int = 0, **overrides: Any) -> TrainConfig:
    """A few seconds on one thread: enough to see every part work, not to learn much.

    Arguments and errors as in :func:`laptop`.
    """
    base = TrainConfig(
        method=method,
        data=data,
        data_options={"n": 256} if data == "captions" else {},
        seed=seed,
        model="small",
        batch_size=16,
        steps=20,
        augment_shift=1,
        optim=OptimOptions(lr=2e-3, weight_decay=0.1, warmup=4),
        temperature=TemperatureOptions(init=0.05, learned=False),
        prototypes=PrototypeOptions(m=48, updates=3, restart_every=12, lr=1e-2, eps=1e-6, weight_cap=5.0),
        # A short run has no time for networks that start from nothing and are averaged over a thousand steps, or for a
        # bias made for large batches. AmorLIP's three values are the best of six tried on the validation part.
        amortized=AmortizedOptions(lr=1e-2, average=0.5, prior_weight=0.0, warm_start=True),
        siglip=SiglipOptions(bias=None),
        threads=1,
        log_every=5,
        probe_every=10,
        error_every=10,
        checkpoint_every=5,
        keep_last=2,
        preset="tiny",
    )
    return _finished(base, overrides)


PRESETS: dict[str, Callable[..., TrainConfig]] = {"laptop": laptop, "tiny": tiny}


def get_preset(name: str) -> Callable[..., TrainConfig]:
    """The preset of that name.

    Raises:
        ValueError: for an unknown name, with the closest one and the list.
    """
    if name not in PRESETS:
        hint = options.closest(name, PRESETS)
        raise ValueError(f"there is no preset {name!r}{hint}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]


def _finished(base: TrainConfig, overrides: dict[str, Any]) -> TrainConfig:
    """The preset, then what the method's table entry asks for, then what the caller asks for."""
    config = options.override(options.override(base, get_method(base.method).defaults), overrides)
    config.check()
    return config
