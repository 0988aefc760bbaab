"""Inside the drop-in for open_clip's loss: its options, and a method's parts whose whole state is on every rank."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.losses import KclOptions
from neuclip_lib.methods import Method, Settings
from neuclip_lib.normalizers import AmortizedOptions, Normalizer, PrototypeOptions
from neuclip_lib.ranks import Ranks
from neuclip_lib.temperature import TemperatureOptions


@dataclass(frozen=True)
class ModelTemperature:
    """What is left to choose about a temperature that open_clip's model owns.

    Args:
        rho: weight of ``+ rho tau`` in objectives with the factor tau; ``None`` means ``.45 log(B-1)``, the middle of
            the usual range over one batch's negatives (B pairs). It should be the mean KL divergence of the negatives'
            weights from uniform at the tau that is wanted: ``neuclip_lib.rho.suggest_rho`` measures it.
    """

    rho: float | None = None

    def of(self, batch_size: int) -> TemperatureOptions:
        """As options of a learned temperature."""
        rho = 0.45 * math.log(batch_size - 1) if self.rho is None else self.rho
        return TemperatureOptions(learned=True, rho=rho)


@dataclass(frozen=True)
class OpenClipOptions:
    """What can be given to :func:`open_clip_loss` by name; every method takes what it uses.

    Args:
        steps_per_epoch: optimizer steps in one pass over the data; asked for by methods that follow the epochs.
        epochs: passes in the whole training; the same.
        seed: of a normalizer's own draws.
    """

    temperature: ModelTemperature = field(default_factory=ModelTemperature)
    prototypes: PrototypeOptions = field(default_factory=PrototypeOptions)
    amortized: AmortizedOptions = field(default_factory=AmortizedOptions)
    kcl: KclOptions = field(default_factory=KclOptions)
    steps_per_epoch: int | None = None
    epochs: int | None = None
    seed: int = 0

    def settings(self, dim: int, batch_size: int, like: Tensor) -> Settings:
        """What a method needs to know to build its parts beside ``like``; its state is that of one process."""
        return _Settings(
            dim=dim,
            batch_size=batch_size,
            temperature=self.temperature.of(batch_size),
            prototypes=self.prototypes,
            amortized=self.amortized,
            kcl=self.kcl,
            steps_per_epoch=self.steps_per_epoch,  # type: ignore[arg-type]
            epochs=self.epochs,  # type: ignore[arg-type]
            seed=self.seed,
            device=like.device,
            dtype=like.dtype,
        )


class _Settings(Settings):
    """Settings in a trainer that does not tell its loss how long an epoch is."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in ("steps_per_epoch", "epochs"):
            raise ValueError(
                "this method follows the epochs: give steps_per_epoch=... (optimizer steps in one pass over the data) "
                "and epochs=..."
            )
        return value


class Built:
    """A method's parts for the sizes of a first batch.

    Raises:
        ValueError: for options that the method cannot follow.
    """

    def __init__(self, method: Method, options: OpenClipOptions, dim: int, batch_size: int, like: Tensor) -> None:
        self.method, self.batch_size = method, batch_size
        self.parts = method.build(options.settings(dim, batch_size, like))
        self.normalizer = None if self.parts.normalizer is None else _Copied(self.parts.normalizer)
        self.parts.normalizer = self.normalizer
        self.wanted = {name for name, _ in self.parts.learned.named_parameters()}
        self.parts.learned = self.given = _Given()

    def loss(
        self, e1: Tensor, e2: Tensor, batch: GlobalBatch, tau: Tensor, bias: Tensor | None, observe: bool
    ) -> Tensor:
        """One batch's loss, with the model's scalars in the place of those that the method would learn itself."""
        self.given.scalars = {} if bias is None else {"bias": bias}
        if missing := self.wanted - set(self.given.scalars):
            raise ValueError(
                f"{self.method.name} learns a {', '.join(sorted(missing))}, which open_clip's model must own: build it "
                "with init_logit_bias (in open_clip's trainer: --siglip)"
            )
        if self.normalizer is not None:
            self.normalizer.observes = observe
        return self.parts.loss(e1, e2, batch, tau).loss

    def state(self) -> dict[str, Any]:
        """The normalizer's, with the batch size that it belongs to."""
        return {
            "batch_size": self.batch_size,
            "normalizer": {} if self.normalizer is None else self.normalizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take back what ``state`` gave."""
        if self.normalizer is None or not state["normalizer"]:
            return
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"the checkpoint's normalizer belongs to a global batch of {state['batch_size']} pairs, this run has "
                f"{self.batch_size}; keep batch size x processes x accumulation, or load plain_weights(state_dict)"
            )
        self.normalizer.load_state_dict(state["normalizer"])


class _Given(nn.Module):
    """Scalars that the caller hands in with every batch, parameters of its own model."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: dict[str, Tensor] = {}

    def get_parameter(self, target: str) -> Any:
        return self.scalars[target]


class _Copied(Normalizer):
    """A normalizer whose whole state is on every rank: it sees the global batch as a single process would."""

    def __init__(self, inner: Normalizer) -> None:
        self.inner, self.eps, self.observes = inner, inner.eps, True

    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        if self.observes:
            self.inner.update(GlobalBatch(batch.e1, batch.e2), batch.whole(log_g), tau)

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        return self.inner(e1, e2, log_g, dataclasses.replace(batch, ranks=_Copies(batch.ranks)), tau)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class _Copies(Ranks):
    """Exchanges about what every rank has whole: the sum over shares is there already."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size

    def gather(self, part: Tensor) -> Tensor:
        return self.ranks.gather(part)

    def mean(self, x: Tensor) -> Tensor:
        return x

    def sum_own_rows(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        return x[self.rank * rows : (self.rank + 1) * rows]
