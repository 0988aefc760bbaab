"""The table of methods: which normalizer, which objective, which temperature. Adding a method is one entry here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from neuclip_lib.contrast import Sides
from neuclip_lib.losses import (
    KclOptions,
    Objective,
    SiglipOptions,
    TauRule,
    dhel_loss,
    kcl_loss,
    siglip_loss,
)
from neuclip_lib.normalizers import (
    AmortizedNormalizer,
    AmortizedOptions,
    BatchNormalizer,
    MovingAverageNormalizer,
    MovingAverageOptions,
    PrototypeNormalizer,
    PrototypeOptions,
    Stabilised,
    cap_weight,
    share_with_batch,
)
from neuclip_lib.parts import Contrastive, Pairwise, Parts
from neuclip_lib.per_sample_temperature import PerSampleTemperature
from neuclip_lib.ranks import ONE, Ranks
from neuclip_lib.temperature import AnyTemperature, Temperature, TemperatureOptions


@dataclass(frozen=True)
class Settings:
    """What a method may need to know to build its parts.

    Args:
        dim: embedding dimension d.
        batch_size: global batch B.
        n: samples that an index may name; None where batches carry no index.
        steps_per_epoch: steps in one pass over the data.
        epochs: passes in the whole run.
    """

    dim: int
    batch_size: int
    temperature: TemperatureOptions = field(default_factory=TemperatureOptions)
    prototypes: PrototypeOptions = field(default_factory=PrototypeOptions)
    moving_average: MovingAverageOptions = field(default_factory=MovingAverageOptions)
    amortized: AmortizedOptions = field(default_factory=AmortizedOptions)
    siglip: SiglipOptions = field(default_factory=SiglipOptions)
    kcl: KclOptions = field(default_factory=KclOptions)
    n: int | None = None
    steps_per_epoch: int = 1
    epochs: int = 1
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    ranks: Ranks = ONE

    @property
    def samples(self) -> int:
        """Samples that an index may name.

        Raises:
            ValueError: when the batches carry no index.
        """
        if self.n is None:
            raise ValueError("this method keeps numbers per sample and needs a stable index with every batch")
        return self.n


def one_temperature(settings: Settings) -> AnyTemperature:
    """One tau for all samples."""
    return Temperature(settings.temperature).to(device=settings.device, dtype=settings.dtype)


def temperature_per_sample(settings: Settings, root: bool = True) -> AnyTemperature:
    """One tau a sample and side; ``root=False`` divides by Adam's second moment itself, as published code does.

    Raises:
        ValueError: when the batches carry no index.
    """
    return PerSampleTemperature(
        settings.temperature,
        settings.samples,
        settings.steps_per_epoch,
        settings.ranks,
        settings.device,
        settings.dtype,
        root,
    )


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Args:
        name: as given to ``--method``.
        title: the name people use.
        normalizer: where alpha comes from, in words.
        source: paper and code it follows.
        build: makes the parts.
        tau: ``free`` (fixed, annealed or learned, as the options say), ``fixed`` (never learned), ``per sample`` (one a
            sample and side, always learned) or ``unused``.
        temperature: makes the temperature.
        needs_index: whether batches must carry a stable sample index.
        defaults: options a preset takes for this method in place of its own, by dotted name.
    """

    name: str
    title: str
    normalizer: str
    source: str
    build: Callable[[Settings], Parts]
    tau: Literal["free", "fixed", "per sample", "unused"] = "free"
    temperature: Callable[[Settings], AnyTemperature] = one_temperature
    needs_index: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def check(self, temperature: TemperatureOptions) -> None:
        """Refuse temperature options that the method cannot follow.

        Raises:
            ValueError: saying what to do instead.
        """
        if temperature.learned and self.tau in ("fixed", "unused"):
            why = "holds the temperature fixed" if self.tau == "fixed" else "does not use the temperature"
            raise ValueError(f"{self.name} {why}; set temperature.learned to False, or choose another method")
        if temperature.anneal != "none" and self.tau == "per sample":
            raise ValueError(f"{self.name} learns one temperature per sample, which cannot be annealed")


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
            defaults={"temperature.init": 0.1, "temperature.learned": True},
        ),
        Method("dhel", "DHEL", "none: same-view negatives", "arXiv 2405.18045", _dhel),
        Method("kcl", "KCL", "none: kernel energies", "arXiv 2405.18045", _kcl, tau="unused"),
        # What the published code computes, where it is not its paper's gradient. Its encoder gradient leaves out the
        # factor tau_i of RGCL; tau's has the mean of log u in place of h; its Adam divides by the squared gradient's
        # mean, not by its root. Published rho and learning rates were tuned with that.
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
        # tau's gradient counts the middle term twice, since both halves of the loss depend on the scale, and has the
        # mean of log u in place of h.
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
    keepers = [keeper for keeper in (parts.normalizer, temperature) if hasattr(keeper, "bytes_for")]
    return sum(keeper.bytes_for(2) - keeper.bytes_for(1) for keeper in keepers)


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
