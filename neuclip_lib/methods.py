"""The table of methods: which normalizer, which objective, which temperature. Adding a method is one entry here."""

from __future__ import annotations

import difflib
import math
from typing import Any

import torch
from torch import nn

from neuclip_lib.contrast import Sides
from neuclip_lib.losses import (
    Objective,
    TauRule,
    dhel_loss,
    kcl_loss,
    siglip_loss,
)
from neuclip_lib.normalizers import (
    AmortizedNormalizer,
    BatchNormalizer,
    MovingAverageNormalizer,
    PrototypeNormalizer,
    PrototypeOptions,
    Stabilised,
    cap_weight,
    share_with_batch,
)
from neuclip_lib.parts import Contrastive, Method, Pairwise, Parts, Settings, temperature_per_sample
from neuclip_lib.temperature import TemperatureOptions


def _openclip(settings: Settings) -> Parts:
    # The positive in the denominator is eps = 1/(B-1): log(1 + (B-1) g) = log(B-1) + log(1/(B-1) + g).
    return Contrastive(BatchNormalizer(1 / (settings.batch_size - 1)), Objective(eps=None, factor="one"))


def _gcl_batch(settings: Settings) -> Parts:
    # Without the positive the plain loss falls for ever as tau shrinks, so a learned tau needs the factor tau and rho.
    if settings.temperature.learned:
        objective = Objective(1e-14, "tau", settings.temperature.rho)
    else:
        objective = Objective(1e-14, "one")
    return Contrastive(BatchNormalizer(1e-14), objective)


def _moving_average(rate: Any, with_tau: bool = True, with_rho: bool = True, rule: TauRule | None = None) -> Any:
    """SogCLR, FastCLIP and SCENT: one normalizer, four objectives."""

    def build(settings: Settings) -> Parts:
        options = settings.moving_average
        normalizer = MovingAverageNormalizer(
            settings.samples,
            settings.steps_per_epoch,
            settings.epochs,
            rate,
            options,
            settings.ranks,
            settings.device,
            settings.dtype,
        )
        rho = settings.temperature.rho if with_rho else 0.0
        return Contrastive(normalizer, Objective(options.eps, "tau" if with_tau else "one", rho, rule or TauRule()))

    return build


def _amorlip(settings: Settings) -> Parts:
    normalizer = AmortizedNormalizer(
        settings.dim,
        settings.batch_size,
        settings.steps_per_epoch,
        settings.epochs,
        settings.amortized,
        settings.seed,
        settings.ranks,
        settings.device,
        settings.dtype,
    )
    return Contrastive(normalizer, Objective(normalizer.eps, "held tau", settings.temperature.rho))


def _prototypes(settings: Settings) -> tuple[PrototypeNormalizer, Objective]:
    options = settings.prototypes
    normalizer = PrototypeNormalizer(
        settings.dim, settings.batch_size, options, settings.seed, settings.device, settings.dtype, settings.ranks
    )
    return normalizer, Objective(options.eps, "tau", settings.temperature.rho)


def _neuclip(settings: Settings) -> Parts:
    normalizer, objective = _prototypes(settings)
    cap = settings.prototypes.weight_cap
    if cap is None:
        return Contrastive(normalizer, objective)
    return Contrastive(normalizer, objective, lambda raw, log_x: cap_weight(raw, log_x, cap))


def _neuclip_mixed(settings: Settings) -> Parts:
    normalizer, objective = _prototypes(settings)
    options = settings.prototypes

    def share() -> float:
        if options.share_decay_epochs is None:
            return options.batch_share
        epoch = (normalizer.step - 1) // settings.steps_per_epoch  # the normalizer has seen this step's batch
        done = min(1.0, epoch / options.share_decay_epochs)
        return options.batch_share + (1 - options.batch_share) * (1 + math.cos(math.pi * done)) / 2

    def adjust(raw: Stabilised, log_x: Sides) -> Stabilised:
        capped = raw if options.weight_cap is None else cap_weight(raw, log_x, options.weight_cap)
        return share_with_batch(capped, log_x, share())

    return Contrastive(normalizer, objective, adjust)


def _siglip(settings: Settings) -> Parts:
    start = settings.siglip.start(settings.batch_size, settings.dim, settings.temperature.init)
    learned = nn.Module()
    learned.bias = nn.Parameter(torch.tensor(start, dtype=settings.dtype, device=settings.device))
    return Pairwise(
        lambda e1, e2, batch, tau, scalars: siglip_loss(e1, e2, batch, tau, scalars.get_parameter("bias")), learned
    )


def _dhel(settings: Settings) -> Parts:
    return Pairwise(lambda e1, e2, batch, tau, _: dhel_loss(e1, e2, batch, tau))


def _kcl(settings: Settings) -> Parts:
    return Pairwise(lambda e1, e2, batch, tau, _: kcl_loss(e1, e2, batch, settings.kcl))


_FASTCLIP = "arXiv 2407.01445"
_AVERAGE = "moving average per sample"

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
        Method(
            "sogclr",
            "SogCLR",
            f"{_AVERAGE}, constant rate",
            "arXiv 2202.12387",
            _moving_average("constant", with_rho=False),
            tau="fixed",
            needs_index=True,
        ),
        Method(
            "isogclr",
            "iSogCLR",
            f"{_AVERAGE}, constant rate",
            "arXiv 2305.11965",
            _moving_average("constant"),
            tau="per sample",
            temperature=temperature_per_sample,
            needs_index=True,
        ),
        Method(
            "fastclip-v0",
            "FastCLIP-v0",
            f"{_AVERAGE}, cosine rate",
            _FASTCLIP,
            _moving_average("cosine", with_tau=False, with_rho=False),
            needs_index=True,
        ),
        Method(
            "fastclip-v1",
            "FastCLIP-v1",
            f"{_AVERAGE}, cosine rate",
            _FASTCLIP,
            _moving_average("cosine", with_rho=False),
            tau="fixed",
            needs_index=True,
        ),
        Method(
            "fastclip-v2",
            "FastCLIP-v2",
            f"{_AVERAGE}, cosine rate",
            _FASTCLIP,
            _moving_average("cosine"),
            tau="per sample",
            temperature=temperature_per_sample,
            needs_index=True,
        ),
        Method(
            "fastclip-v3",
            "FastCLIP-v3",
            f"{_AVERAGE}, cosine rate",
            _FASTCLIP,
            _moving_average("cosine"),
            needs_index=True,
        ),
        Method(
            "scent",
            "SCENT",
            f"{_AVERAGE}, its own rate",
            "arXiv 2602.02877",
            _moving_average("per sample"),
            needs_index=True,
        ),
        Method("amorlip", "AmorLIP", "residual MLP on the embedding", "arXiv 2505.18983", _amorlip),
        Method("neuclip", "NeuCLIP", "prototype network", "arXiv 2511.08417", _neuclip),
        Method(
            "neuclip-mixed",
            "NeuCLIP, mixed",
            "prototype network and this batch",
            "ours, after arXiv 2511.08417",
            _neuclip_mixed,
        ),
        Method(
            "siglip",
            "SigLIP",
            "none: sum over pairs",
            "arXiv 2303.15343",
            _siglip,
            has_normalizer=False,
            defaults={"temperature.init": 0.1, "temperature.learned": True},
        ),
        Method("dhel", "DHEL", "none: same-view negatives", "arXiv 2405.18045", _dhel, has_normalizer=False),
        Method("kcl", "KCL", "none: kernel energies", "arXiv 2405.18045", _kcl, tau="unused", has_normalizer=False),
        # FastCLIP-v2 as its published code has it, line by line; published rho and rates were tuned with that.
        #   encoders  1/(2B) sum e^-alpha grad g, without RGCL's factor tau_i               (encoder_without_tau)
        #   tau_i     log u_i + rho + tau_i e^-alpha dg/dtau_i, with log u for h             (head="alpha")
        #   Adam      m / (v + eps), without the root                                        (root=False)
        # Alike in both entries: gradient clamped to 5, betas 0 in epoch 0, correction by epoch + 1, tau in [.01, 1].
        # Not followed: there an anchor uses its old tau, and as a negative of others their new one; ours the old.
        Method(
            "fastclip-v2-published",
            "FastCLIP-v2, as published code",
            f"{_AVERAGE}, cosine rate",
            "github.com/Optimization-AI/fast_clip",
            _moving_average("cosine", rule=TauRule(head="alpha", encoder_without_tau=True)),
            tau="per sample",
            temperature=lambda settings: temperature_per_sample(settings, root=False),
            needs_index=True,
        ),
        # FastCLIP-v3 as its published code has it.
        #   tau       mean log u + rho + 2 tau e^-alpha dg/dtau: both halves of the loss (anchors, and what they do as
        #             negatives) depend on the scale, so the middle term counts twice        (middle=2)
        #             and log u stands for h                                                 (head="alpha")
        #   encoders  as in the paper.
        Method(
            "fastclip-v3-published",
            "FastCLIP-v3, as published code",
            f"{_AVERAGE}, cosine rate",
            "github.com/Optimization-AI/fast_clip",
            _moving_average("cosine", rule=TauRule(head="alpha", middle=2.0)),
            needs_index=True,
        ),
    )
}


def bytes_per_sample(method: Method) -> int:
    """Bytes of state kept for each sample of the data, over all processes: asked of the parts, not written down."""
    settings = Settings(dim=2, batch_size=4, n=4, prototypes=PrototypeOptions(m=4))
    parts, temperature = method.build(settings), method.temperature(settings)
    of_both = [getattr(keeper, "bytes_for", None) for keeper in (parts.normalizer, temperature)]
    return sum(bytes_for(2) - bytes_for(1) for bytes_for in of_both if bytes_for is not None)


def runs_away(method: Method, temperature: TemperatureOptions) -> bool:
    """Whether a learned tau has nothing that holds it: the loss has the factor tau, and rho is 0."""
    if not (temperature.learned or method.tau == "per sample"):
        return False
    parts = method.build(Settings(2, 4, temperature, n=4, prototypes=PrototypeOptions(m=4)))
    return isinstance(parts, Contrastive) and parts.objective.factor == "tau" and parts.objective.rho == 0


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
