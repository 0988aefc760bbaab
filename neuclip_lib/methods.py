"""The table of methods: which normalizer, which objective, which stabiliser. Adding a method is one entry here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.losses import Objective
from neuclip_lib.normalizers import BatchNormalizer, Normalizer, PrototypeNormalizer, PrototypeOptions, cap_weight
from neuclip_lib.temperature import TemperatureOptions


@dataclass(frozen=True)
class Settings:
    """What a method may need to know to build its parts."""

    dim: int
    batch_size: int
    temperature: TemperatureOptions
    prototypes: PrototypeOptions
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


Adjust = Callable[[Sides, Sides], Sides]
"""From (alpha, log(eps + g)) to the alpha that the encoder step uses."""


def _as_it_is(alpha: Sides, log_eps_plus_g: Sides) -> Sides:
    return alpha


@dataclass(frozen=True)
class Parts:
    """A method ready to use: a normalizer, an objective and a stabiliser of alpha."""

    normalizer: Normalizer
    objective: Objective
    adjust: Adjust = _as_it_is

    def alpha(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """The alpha of the encoder step, each side ``[b]``."""
        raw = self.normalizer(e1, e2, log_g, batch, tau)
        return self.adjust(raw, self.objective.log_eps_plus_g(log_g, batch.size))


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Args:
        name: as given to ``--method``.
        title: the name people use.
        normalizer: where alpha comes from, in words.
        source: paper and code it follows.
        build: makes the parts.
        needs_index: whether batches must carry a stable sample index.
    """

    name: str
    title: str
    normalizer: str
    source: str
    build: Callable[[Settings], Parts]
    needs_index: bool = False


def _openclip(settings: Settings) -> Parts:
    # The positive in the denominator is eps = 1/(B-1): log(1 + (B-1) g) = log(B-1) + log(1/(B-1) + g).
    return Parts(BatchNormalizer(1 / (settings.batch_size - 1)), Objective(eps=None, scaled=False))


def _gcl_batch(settings: Settings) -> Parts:
    # Without the positive the plain loss falls for ever as tau shrinks, so a learned tau needs the factor tau and rho.
    learned = settings.temperature.learned
    return Parts(BatchNormalizer(1e-14), Objective(1e-14, learned, settings.temperature.rho if learned else 0.0))


def _neuclip(settings: Settings) -> Parts:
    options = settings.prototypes
    normalizer = PrototypeNormalizer(
        settings.dim, settings.batch_size, options, settings.seed, settings.device, settings.dtype
    )
    objective = Objective(options.eps, scaled=True, rho=settings.temperature.rho)
    cap = options.weight_cap
    if cap is None:
        return Parts(normalizer, objective)
    return Parts(normalizer, objective, lambda alpha, log_x: cap_weight(alpha, log_x, cap))


METHODS = {
    method.name: method
    for method in (
        Method("openclip", "OpenCLIP", "this batch, positive included", "InfoNCE, arXiv 2103.00020", _openclip),
        Method(
            "gcl-batch",
            "decoupled batch loss (gcl-batch)",
            "this batch, positive left out",
            "arXiv 2110.06848",
            _gcl_batch,
        ),
        Method("neuclip", "NeuCLIP", "prototype network", "arXiv 2511.08417", _neuclip),
    )
}


def method_names() -> list[str]:
    """Names accepted by ``--method``."""
    return list(METHODS)


def get_method(name: str) -> Method:
    """The row of that name.

    Raises:
        ValueError: for an unknown name, with the closest one and the list.
    """
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"there is no method {name!r}; {hint}the methods are {', '.join(METHODS)}")
    return METHODS[name]
