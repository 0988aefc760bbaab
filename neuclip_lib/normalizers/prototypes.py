"""The normalizer-prediction network (NPN): the other modality summarised by m prototypes.

    alpha1_i = log( eps + 1/m sum_j exp((cos(e1_i, W1_j) - s_ii)/tau) ),     W1 summarises texts, W2 images

NeuCLIP (arXiv 2511.08417). The optimal alpha has this form with all texts in place of the prototypes; m prototypes take
2 d m numbers whatever the size of the data. Gradients are closed forms, two matrix products a side and an update. On
several ranks prototype j lives on rank ``j % W``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.normalizers.base import Normalizer
from neuclip_lib.normalizers.prototype_math import (
    Room,
    Updates,
    compiled_gradient,
    log_or_minus_infinity,
    prototype_alpha,
    stack_sides,
)
from neuclip_lib.ranks import ONE, Ranks


@dataclass(frozen=True)
class PrototypeOptions:
    """Sizes and rates of the NPN; the defaults are the paper's where it gives them, ours are marked.

    Args:
        m: prototypes a side.
        updates: AdaGrad steps on each batch (T_u); 0 leaves only restarts.
        restart_every: steps between restarts from recent embeddings (T_r); 0 never restarts after the first filling.
        lr: AdaGrad's learning rate for unit columns (ours).
        eps: constant inside the logarithm (ours).
        adagrad_eps: AdaGrad's own constant (ours).
        weight_cap: bound of ``exp(-alpha)(eps + g)`` in the encoder step, ``None`` for the paper's method (ours).
        batch_share: of ``neuclip-mixed``: lambda in ``alpha <- log((1-lambda) exp(alpha) + lambda (eps + g))`` (ours;
            the default is the one that ``compare mixed`` found best at batches of 32 on validation).
        share_decay_epochs: let lambda fall from 1 over so many epochs by a cosine; None holds it (ours).
        detach_alpha: hold alpha constant in the encoder step instead of the unified objective (ours).
        compiled: let ``torch.compile`` fuse an update into a few kernels once all prototypes are filled. One process;
            needs a C++ compiler (CPU) or Triton (GPU), takes up to a minute once, and rounds otherwise than eager.
            It saves launches of a GPU; a CPU is not faster for it.
    """

    m: int = 4096
    updates: int = 10
    restart_every: int = 500
    lr: float = 1e-2
    eps: float = 1e-6
    adagrad_eps: float = 1e-10
    weight_cap: float | None = None
    batch_share: float = 0.5
    share_decay_epochs: int | None = None
    detach_alpha: bool = False
    compiled: bool = False

    def check(self) -> None:
        """Raise ValueError, naming the option, when one makes no sense."""
        if self.m < 1:
            raise ValueError(f"prototypes.m must be at least 1, got {self.m}")
        if self.updates < 0 or self.restart_every < 0:
            raise ValueError(
                "prototypes.updates and prototypes.restart_every must not be negative, "
                f"got {self.updates} and {self.restart_every}"
            )
        if not (self.lr > 0 and self.adagrad_eps > 0):
            raise ValueError(
                f"prototypes.lr and prototypes.adagrad_eps must be positive, got {self.lr} and {self.adagrad_eps}"
            )
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"prototypes.eps must be finite and not negative, got {self.eps}")
        if self.weight_cap is not None and not self.weight_cap >= 1:
            raise ValueError(
                "prototypes.weight_cap must be at least 1 (1 is the batch's own normalizer) or None, "
                f"got {self.weight_cap}"
            )
        if not 0 <= self.batch_share <= 1:
            raise ValueError(f"prototypes.batch_share must be from 0 to 1, got {self.batch_share}")
        if self.share_decay_epochs is not None and self.share_decay_epochs < 1:
            raise ValueError(f"prototypes.share_decay_epochs must be at least 1, got {self.share_decay_epochs}")


class PrototypeNormalizer(Normalizer):
    """The NPN with its state: prototypes, AdaGrad's sums, a queue of recent embeddings, a generator.

    Args:
        dim: embedding dimension d.
        batch_size: global batch B; the queue holds the last ``max(m, B)`` pairs.
        options: sizes and rates.
        seed: of the draw at restarts.
        device: where the state lives.
        dtype: float32 in training; float64 in tests.
        ranks: over which the prototypes are spread; every rank keeps the whole queue.

    Raises:
        ValueError: for options that make no sense, or fewer prototypes than ranks.
    """

    def __init__(
        self,
        dim: int,
        batch_size: int,
        options: PrototypeOptions,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ONE,
    ) -> None:
        options.check()
        if options.m < ranks.size:
            raise ValueError(f"prototypes.m must be at least the number of processes {ranks.size}, got {options.m}")
        if options.compiled and ranks.size > 1:
            raise ValueError(f"prototypes.compiled works in one process, not in {ranks.size}; set it to False")
        self.ranks = ranks
        self.options, self.eps = options, options.eps
        self.generator = torch.Generator().manual_seed(seed)
        self.w = torch.zeros(2, self._own(options.m), dim, device=device, dtype=dtype)
        self.adagrad_sum = torch.zeros_like(self.w)
        self._no_decay = torch.zeros(())  # the count of steps that torch's AdaGrad asks for; nothing depends on it
        self.queue = torch.zeros(2, max(options.m, batch_size), dim, device=device, dtype=dtype)
        self.queue_next = self.queue_held = self.active = self.step = 0
        self._room: Room | None = None

    @property
    def prototypes(self) -> Tensor:
        """This rank's active prototypes ``[2, active/W, d]`` as unit rows: texts first, images second."""
        return torch.nn.functional.normalize(self.w[:, : self._own(self.active)], dim=2)

    @torch.no_grad()
    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """Queue the batch, restart or fill when due, then ``updates`` AdaGrad steps on this batch.

        Raises:
            ValueError: when the batch does not fit the queue.
        """
        e, positive = stack_sides(batch.e1, batch.e2)
        # An embedding of zeros has no direction, and one such column would make all of its side NaN: it gets one.
        seeds = torch.where((e == 0).all(2, keepdim=True), e.shape[2] ** -0.5, e)
        self._push(seeds)
        every = self.options.restart_every
        if self.step == 0 or (every and self.step % every == 0):
            self._restart()
        elif self.active < self.options.m:
            self._fill(seeds)
        log_x = torch.stack(batch.whole(log_g))
        log_x = torch.logaddexp(log_x, log_x.new_full((), log_or_minus_infinity(self.eps)))
        self._descend(e, positive, log_x, tau)
        self.step += 1

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of the anchors from the prototypes alone, each ``[b]``, differentiable unless ``detach_alpha``.

        Raises:
            RuntimeError: before the first update, when there is no prototype yet.
        """
        if self.active == 0:
            raise RuntimeError("the prototypes are empty: call update with a batch before asking for alpha")
        if self.options.detach_alpha:
            e1, e2, tau = e1.detach(), e2.detach(), tau.detach()
        return prototype_alpha(e1, e2, self.prototypes, tau, self.eps, batch, self.active)

    def remember(self, batch: GlobalBatch) -> Callable[[], None]:
        """Takes back one update; a copy of the prototypes, of AdaGrad's sums and of the queue's places that change."""
        place = self._places(batch.size)
        old = self.w.clone(), self.adagrad_sum.clone(), self.queue[:, place]
        counters, generator = self._counters(), self.generator.get_state()

        def undo() -> None:
            self.w.copy_(old[0])
            self.adagrad_sum.copy_(old[1])
            self.queue[:, place] = old[2]
            self.queue_next, self.queue_held, self.active, self.step = counters
            self.generator.set_state(generator)

        return undo

    def state_dict(self) -> dict[str, Any]:
        """Prototypes, AdaGrad's sums, queue, counters and generator."""
        return {
            "w": self._together(self.w),
            "adagrad_sum": self._together(self.adagrad_sum),
            "queue": self.queue.clone(),
            "counters": self._counters(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave.

        Raises:
            ValueError: when a part is missing or of another size.
        """
        parts = {"w": self.w, "adagrad_sum": self.adagrad_sum, "queue": self.queue}
        if set(state) != {*parts, "counters", "generator"}:
            raise ValueError(f"this is not the state of a prototype normalizer: it has {sorted(state)}")
        whole = torch.Size((2, self.options.m, self.w.shape[2]))
        sizes = {"w": whole, "adagrad_sum": whole, "queue": self.queue.shape}
        for name, size in sizes.items():
            if state[name].shape != size:
                raise ValueError(
                    f"the saved {name} is {tuple(state[name].shape)}, this normalizer's is {tuple(size)}; "
                    "m, the batch size and the embedding dimension must be those of the saved run"
                )
        self.queue.copy_(state["queue"])
        for name in ("w", "adagrad_sum"):
            parts[name].copy_(self._mine(state[name]))
        self.queue_next, self.queue_held, self.active, self.step = map(int, state["counters"])
        self.generator.set_state(state["generator"].cpu())

    def _own(self, count: int) -> int:
        """How many of the first ``count`` prototypes are this rank's."""
        return (count + self.ranks.size - 1 - self.ranks.rank) // self.ranks.size

    def _mine(self, columns: Tensor) -> Tensor:
        """This rank's of all columns ``[2, count, d]``."""
        return columns[:, self.ranks.rank :: self.ranks.size]

    def _together(self, part: Tensor) -> Tensor:
        """All columns ``[2, m, d]`` on rank 0, none on the others."""
        parts = self.ranks.collect(part.transpose(0, 1).contiguous())
        whole = part.new_empty(2, self.options.m if parts else 0, part.shape[2])
        for rank, columns in enumerate(parts):
            whole[:, rank :: self.ranks.size] = columns.transpose(0, 1)
        return whole

    def _counters(self) -> list[int]:
        return [self.queue_next, self.queue_held, self.active, self.step]

    def _places(self, size: int) -> Tensor:
        """Where the queue puts its next ``size`` pairs."""
        return (torch.arange(size, device=self.queue.device) + self.queue_next) % self.queue.shape[1]

    def _push(self, e: Tensor) -> None:
        """Append a batch to the FIFO queue, over the oldest."""
        size, capacity = e.shape[1], self.queue.shape[1]
        if size > capacity:
            raise ValueError(
                f"a batch of {size} pairs does not fit the queue of {capacity}; build with batch_size={size}"
            )
        place = self._places(size)
        # Texts stand for the negatives of images, and the other way round: the sides are swapped here.
        self.queue[0, place], self.queue[1, place] = e[1].to(self.queue), e[0].to(self.queue)
        self.queue_next = (self.queue_next + size) % capacity
        self.queue_held = min(self.queue_held + size, capacity)

    def _restart(self) -> None:
        """Re-seed the prototypes with recent pairs, drawn without replacement, and forget AdaGrad's sums."""
        self.active = min(self.options.m, self.queue_held)
        draw = torch.randperm(self.queue_held, generator=self.generator)[: self.active].to(self.queue.device)
        self.w.zero_()
        self.w[:, : self._own(self.active)] = self.queue[:, draw[self.ranks.rank :: self.ranks.size]]
        self.adagrad_sum.zero_()

    def _fill(self, e: Tensor) -> None:
        """Give free columns this batch's embeddings, each pair once: equal columns would move together for ever.

        Captions that are equal in the data still give equal text columns.
        """
        more = min(e.shape[1], self.options.m - self.active)
        fresh = slice(self._own(self.active), self._own(self.active + more))
        # Column active + k takes the batch's pair k; this rank's are those whose number leaves its rank.
        first = (self.ranks.rank - self.active) % self.ranks.size
        self.w[0, fresh] = e[1, first : more : self.ranks.size].to(self.w)
        self.w[1, fresh] = e[0, first : more : self.ranks.size].to(self.w)
        self.active += more

    def _descend(self, e: Tensor, positive: Tensor, log_x: Tensor, tau: Tensor) -> None:
        """``updates`` AdaGrad steps on one batch."""
        own = self._own(self.active)
        if self._room is None or not self._room.fits(e, own):
            self._room = Room.like(e, own)
        updates = Updates(e, positive, log_x, tau, self.eps, self.active, self._room, self.ranks)
        idle = self.w.shape[1] - own
        # Every other size, while the prototypes are being filled, would be compiled anew.
        gradient_of = compiled_gradient() if self.options.compiled and not idle else Updates.gradient
        for _ in range(self.options.updates):
            gradient = gradient_of(updates, self.w[:, :own])
            self._adagrad(torch.nn.functional.pad(gradient, (0, 0, 0, idle)) if idle else gradient)

    def _adagrad(self, gradient: Tensor) -> None:
        """``sum <- sum + g^2``, ``w <- w - lr g/(sqrt(sum) + eps)``: torch's own, without an optimizer's hooks."""
        options = self.options
        adagrad(
            [self.w],
            [gradient],
            [self.adagrad_sum],
            [self._no_decay],
            fused=self.w.device.type == "cpu",
            lr=options.lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=options.adagrad_eps,
            maximize=False,
        )
