"""AmorLIP's normalizer: two small networks that learn the sum over negatives as a function of the embedding.

    log Z_i = log( sum_{j != i} exp(s_ij/tau + bias) + pos_coef exp(s_ii/tau + bias) )      learned:  log lambda(e_i)
    alpha_i = log lambda_i - bias - s_ii/tau - log(B-1)                                     s_ii and tau with gradient

AmorLIP (arXiv 2505.18983). At ``lambda = Z`` this is ``log(eps + g_i)`` with ``eps = pos_coef/(B-1)``; for any lambda
the encoders' gradient is half that of AmorLIP's own loss. The memory is that of the networks, whatever the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.normalizers.amortized_network import FitLoss, ResidualNetwork, fit_loss
from neuclip_lib.normalizers.base import Normalizer
from neuclip_lib.ranks import ONE, Ranks

Target = Literal["network", "combined"]


@dataclass(frozen=True)
class AmortizedOptions:
    """Sizes and rates of AmorLIP's networks; the defaults are the paper's where it gives them, ours are marked.

    Args:
        hidden: width of the hidden layer; None for the embedding dimension (CC12M), half of that for CC3M.
        lr: Adam's learning rate; Adam starts anew in every epoch.
        updates: Adam steps on a batch (T_lambda).
        every: training steps from one batch that is learned from to the next (T_online; 8 on CC3M, 1 on CC12M).
        pos_coef: weight of the positive in Z; 1 is InfoNCE's denominator, 1e-3 the CC12M recipe.
        bias: added to ``s/tau`` in the exponents.
        average: share that the averaged network keeps of itself (.999 on CC3M, .92 on CC12M).
        average_every: training steps from one averaging to the next, step 0 included; the encoder step then sees it.
        prior_weight: final weight beta of last epoch's averaged network in the networks' target; 0 for Z alone.
        prior_epochs: epochs T in which ``beta_t = prior_weight (1 - cos(pi t/T))/2`` rises; None for those of the run.
        loss: ``log`` (mean square of logs), ``kl`` or ``js`` (see ``fit_loss``: the divergences' form is ours).
        target: what the encoder loss divides by: the averaged network's prediction, as in the paper, or the
            ``combined`` target ``beta lambda_prev + (1 - beta) Z`` of this batch, as in the released code.
        warm_start: set the output's constant to the first batch's mean log Z, and let the average keep at most
            ``k/(k+1)`` of itself after k averagings (ours). Without it the averaged network is mostly its random start
            for ``average_every/(1 - average)`` steps, and lambda too small by orders of magnitude.
    """

    hidden: int | None = None
    lr: float = 1e-3
    updates: int = 3
    every: int = 1
    pos_coef: float = 1.0
    bias: float = 0.0
    average: float = 0.999
    average_every: int = 2
    prior_weight: float = 0.8
    prior_epochs: int | None = None
    loss: FitLoss = "log"
    target: Target = "network"
    warm_start: bool = False

    def check(self) -> None:
        """Raise ValueError, naming the option, when one makes no sense."""
        for name in ("hidden", "prior_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"amortized.{name} must be at least 1, or None, got {value}")
        for name in ("updates", "every", "average_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"amortized.{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"amortized.lr must be positive and finite, got {self.lr}")
        if not (math.isfinite(self.pos_coef) and self.pos_coef >= 0):
            raise ValueError(f"amortized.pos_coef must be finite and not negative, got {self.pos_coef}")
        if not math.isfinite(self.bias):
            raise ValueError(f"amortized.bias must be finite, got {self.bias}")
        for name in ("average", "prior_weight"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"amortized.{name} must be from 0 to below 1, got {getattr(self, name)}")
        for name, allowed in (("loss", FitLoss), ("target", Target)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"amortized.{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}"
                )


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


class AmortizedNormalizer(Normalizer):
    """AmorLIP's networks with their state: weights, averaged weights, last epoch's averaged weights, Adam's moments.

    The state is the same on every rank: each takes gradients over its own anchors, and their mean moves all.

    Args:
        dim: embedding dimension d.
        batch_size: global batch B, to which lambda, a sum, is tied; a batch of another size counts with its mean.
        steps_per_epoch: training steps in an epoch.
        epochs: epochs of the run.
        options: sizes and rates.
        seed: of the first weights.
        ranks: processes of the run.
        device: where the state lives.
        dtype: float32 in training; float64 in tests.

    Raises:
        ValueError: for an option or a number that makes no sense.
    """

    def __init__(
        self,
        dim: int,
        batch_size: int,
        steps_per_epoch: int,
        epochs: int,
        options: AmortizedOptions,
        seed: int = 0,
        ranks: Ranks = ONE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        options.check()
        if batch_size < 2:
            raise ValueError(f"a contrastive batch needs at least 2 pairs, got batch_size={batch_size}")
        if steps_per_epoch < 1 or epochs < 1:
            raise ValueError(
                f"steps_per_epoch and epochs must be at least 1, got {steps_per_epoch} and {epochs}; "
                "Adam and the prior follow the epochs"
            )
        self.options, self.ranks = options, ranks
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        self.log_negatives = math.log(batch_size - 1)
        self.eps = options.pos_coef / (batch_size - 1)
        self.network = ResidualNetwork(dim, options.hidden or dim)
        self.weights = self.network.initial(torch.Generator().manual_seed(seed), device, dtype)
        self.averaged, self.previous = self.weights.clone(), self.weights.clone()
        # Fused Adam keeps its step count on the device; bias correction never makes the host wait.
        self.adam = torch.optim.Adam([self.weights], lr=options.lr, fused=True)
        self.adam.state[self.weights] = {
            "step": torch.zeros((), device=device, dtype=torch.float32),
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
        }
        self.step = 0

    @property
    def prior(self) -> float:
        """Beta of the epoch of the last update: 0 in epoch 0, ``prior_weight`` after ``prior_epochs``."""
        epoch, rise = max(self.step - 1, 0) // self.steps_per_epoch, self.options.prior_epochs or self.epochs
        return self.options.prior_weight * (1 - math.cos(math.pi * min(epoch / rise, 1))) / 2

    @torch.no_grad()
    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """At an epoch's start freeze the average and forget Adam; learn from this batch, and average, when due."""
        options, step = self.options, self.step
        if self._starts_epoch:
            self.previous.copy_(self.averaged)
            for moment in self._moments.values():
                moment.zero_()
        self.step += 1
        e = torch.stack((batch.own(batch.e1), batch.own(batch.e2))).to(self.weights)
        if step == 0 and options.warm_start:
            self._start_at(self._log_z(e, log_g, batch.own_tau(tau)))
        if step % options.every == 0:
            target = self._combined(e, log_g, batch.own_tau(tau))
            for _ in range(options.updates):
                self._descend(e, target)
        if step % options.average_every == 0:
            kept = options.average
            if options.warm_start:
                done = step // options.average_every
                kept = min(kept, done / (done + 1))
            self.averaged.lerp_(self.weights, 1 - kept)

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of the anchors, each ``[b]``; lambda is a constant, ``s_ii`` and tau have gradients.

        Raises:
            RuntimeError: before the first update.
        """
        if self.step == 0:
            raise RuntimeError(
                "AmorLIP's networks have learned nothing yet: call update with a batch before asking for alpha"
            )
        own_tau = batch.own_tau(tau)
        if tau.ndim:
            # A temperature of an anchor has one owner: its gradient is summed over ranks, while theirs are averaged.
            own_tau = own_tau.detach() + (own_tau - own_tau.detach()) / batch.ranks.size
        with torch.no_grad():
            e = torch.stack((e1, e2)).to(self.weights)
            if self.options.target == "combined":
                log_lambda = self._combined(e, log_g, own_tau)
            else:
                log_lambda = self.network(self.averaged, e)
        alpha = log_lambda - (self.options.bias + self.log_negatives) - (e1 * e2).sum(1) / own_tau  # [2, b]
        return alpha[0], alpha[1]

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """A function that takes back the next ``update``, to the bit."""
        touched = [self.weights, self.averaged, *self._moments.values()]
        if self._starts_epoch:
            touched.append(self.previous)
        before, step = [part.clone() for part in touched], self.step

        def undo() -> None:
            for part, value in zip(touched, before, strict=True):
                part.copy_(value)
            self.step = step

        return undo

    def state_dict(self) -> dict[str, Any]:
        """Weights, averaged and last epoch's averaged weights, Adam's moments, the number of updates."""
        return {**{name: part.clone() for name, part in self._parts.items()}, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave.

        Raises:
            ValueError: when a part is missing or of another size.
        """
        if set(state) != {*self._parts, "step"}:
            raise ValueError(f"this is not the state of an amortized normalizer: it has {sorted(state)}")
        for name, part in self._parts.items():
            if state[name].shape != part.shape:
                raise ValueError(
                    f"the saved {name} is {tuple(state[name].shape)}, this normalizer's is {tuple(part.shape)}; "
                    "amortized.hidden and the embedding dimension must be those of the saved run"
                )
        for name, part in self._parts.items():
            part.copy_(state[name])
        self.step = int(state["step"])

    @property
    def _moments(self) -> dict[str, Tensor]:
        return self.adam.state[self.weights]

    @property
    def _parts(self) -> dict[str, Tensor]:
        networks = {"weights": self.weights, "averaged": self.averaged, "previous": self.previous}
        return {**networks, **{f"adam_{name}": part for name, part in self._moments.items()}}

    @property
    def _starts_epoch(self) -> bool:
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    def _log_z(self, e: Tensor, log_g: Sides, own_tau: Tensor) -> Tensor:
        """``log Z`` ``[2, b]`` from the mean over negatives: nothing is exponentiated."""
        mean = torch.stack(log_g).detach().to(e)
        mean = torch.logaddexp(mean, mean.new_full((), _log(self.eps)))
        return mean + (e[0] * e[1]).sum(1) / own_tau.detach() + (self.log_negatives + self.options.bias)

    def _combined(self, e: Tensor, log_g: Sides, own_tau: Tensor) -> Tensor:
        """``log(beta lambda_prev + (1 - beta) Z)`` ``[2, b]``."""
        log_z, beta = self._log_z(e, log_g, own_tau), self.prior
        if beta == 0:
            return log_z
        return torch.logaddexp(self.network(self.previous, e) + math.log(beta), log_z + math.log1p(-beta))

    def _start_at(self, log_z: Tensor) -> None:
        """Let both networks begin at the mean of ``log_z`` ``[2, b]`` over all ranks."""
        mean = self.ranks.mean(log_z.mean(1))
        for part in (self.weights, self.averaged):
            self.network.output_bias(part).copy_(mean)

    def _descend(self, e: Tensor, target: Tensor) -> None:
        with torch.enable_grad():
            weights = self.weights.detach().requires_grad_()
            loss = fit_loss(target - self.network(weights, e), self.options.loss)
        (gradient,) = torch.autograd.grad(loss, weights)
        self.weights.grad = self.ranks.mean(gradient)
        self.adam.step()
