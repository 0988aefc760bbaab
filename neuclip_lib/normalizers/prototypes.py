"""The normalizer-prediction network (NPN): the other modality summarised by m prototypes.

    alpha1_i = log( eps + 1/m sum_j exp((cos(e1_i, W1_j) - s_ii)/tau) ),     W1 summarises texts, W2 images

NeuCLIP (arXiv 2511.08417). The optimal alpha has this form with all texts in place of the prototypes; m prototypes take
2 d m numbers whatever the size of the data. Gradients are closed forms, two matrix products a side and an update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.normalizers.base import Normalizer


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
        detach_alpha: hold alpha constant in the encoder step instead of the unified objective (ours).
    """

    m: int = 4096
    updates: int = 10
    restart_every: int = 500
    lr: float = 1e-2
    eps: float = 1e-6
    adagrad_eps: float = 1e-10
    weight_cap: float | None = None
    detach_alpha: bool = False

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


def _log(eps: float) -> float:
    return math.log(eps) if eps > 0 else -math.inf


def _stack(e1: Tensor, e2: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides' anchors as one ``[2, B, d]`` tensor, and their positives ``[B]``."""
    return torch.stack((e1, e2)), (e1 * e2).sum(1)


def prototype_alpha(e1: Tensor, e2: Tensor, w: Tensor, tau: Tensor, eps: float) -> Sides:
    """Alpha of both sides, differentiable in ``e1``, ``e2`` and ``tau`` (not in the prototypes).

    Args:
        e1: image anchors ``[b, d]``, unit rows.
        e2: text anchors ``[b, d]``, unit rows.
        w: prototypes ``[2, m, d]``, unit rows; the first half stands for texts, the second for images.
        tau: temperature, a scalar tensor.
        eps: constant inside the logarithm.
    """
    return _PrototypeAlpha.apply(e1, e2, tau, w, eps)


class _PrototypeAlpha(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e1: Tensor, e2: Tensor, tau: Tensor, w: Tensor, eps: float) -> Sides:
        e, positive = _stack(e1, e2)
        x = torch.bmm(e / tau, w.transpose(1, 2))
        shift = positive / tau + math.log(w.shape[1])
        log_mean = torch.logsumexp(x, 2) - shift
        alpha = torch.logaddexp(log_mean, log_mean.new_full((), _log(eps)))
        if any(ctx.needs_input_grad):
            # q_ij = share of prototype j in exp(alpha_i); only its moments V and Q are needed later.
            q = x.sub_((alpha + shift)[:, :, None]).exp_()
            ctx.save_for_backward(e, positive, tau, torch.bmm(q, w), torch.exp(log_mean - alpha))
        return alpha[0], alpha[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope1: Tensor, slope2: Tensor) -> tuple[Tensor | None, ...]:
        e, positive, tau, v, mass = ctx.saved_tensors
        slope = torch.stack((slope1, slope2)) / tau
        pulled = slope[:, :, None] * v
        weight = slope * mass
        # Both alphas contain -s_ii, so each side's positive partner is pushed by both.
        push = (weight[0] + weight[1])[:, None]
        d_e1, d_e2 = pulled[0] - push * e[1], pulled[1] - push * e[0]
        d_tau = -(slope * ((e * v).sum(2) - mass * positive)).sum() / tau
        return d_e1, d_e2, d_tau, None, None


def prototype_gradient(
    e: Tensor,
    positive: Tensor,
    w_raw: Tensor,
    log_eps_plus_g: Tensor,
    tau: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of the loss (scaled by tau) in the stored prototypes, in closed form.

        dL/dW_j = (I - w_j w_j^T)/|W_j| * 1/(2B) sum_i r_i q_ij e_i,     r_i = 1 - exp(-alpha_i)(eps + g_i)

    Args:
        e: anchors of both sides ``[2, B, d]``.
        positive: ``s_ii`` ``[B]``.
        w_raw: stored prototypes ``[2, m, d]``, not normalised.
        log_eps_plus_g: ``[2, B]``; constant over the updates on one batch.
        tau: temperature, a scalar tensor.
        eps: constant inside the logarithm.
        out: buffer ``[2, B, m]`` for the logits.

    Returns:
        ``[2, m, d]``.
    """
    length = torch.linalg.vector_norm(w_raw, dim=2, keepdim=True)
    w = w_raw / length
    x = torch.bmm(e / tau, w.transpose(1, 2), out=out) if out is not None else torch.bmm(e / tau, w.transpose(1, 2))
    # The B x m matrix sees only a maximum, an exponential and a sum; everything else acts on its rows.
    top = x.amax(2, keepdim=True)
    share = x.sub_(top).exp_()
    top = top - (positive / tau + math.log(w.shape[1]))[:, None]
    log_mean = share.sum(2, keepdim=True).log_().add_(top)
    alpha = torch.logaddexp(log_mean, log_mean.new_full((), _log(eps)))
    r = torch.expm1(_bounded(log_eps_plus_g[:, :, None] - alpha, tau)).neg_()
    row = torch.exp(top - alpha).mul_(r).div_(2 * e.shape[1])
    g = torch.bmm(share.transpose(1, 2), e * row)
    return g.sub_((g * w).sum(2, keepdim=True) * w).div_(length)


def _bounded(gap: Tensor, tau: Tensor) -> Tensor:
    """``log(eps + g) - alpha`` without what the number format cannot carry.

    A gap within the rounding of ``s/tau`` is none: AdaGrad would turn its sign into full steps. Above a third of the
    format's range (29 in float32; a weight of 1e12) AdaGrad's squares overflow and the column would never move again.
    """
    format = torch.finfo(gap.dtype)
    gap = gap.clamp_(max=math.log(format.max) / 3)
    return gap.mul_(gap.abs() > 8 * format.eps / tau)


class PrototypeNormalizer(Normalizer):
    """The NPN with its state: prototypes, AdaGrad's sums, a queue of recent embeddings, a generator.

    Args:
        dim: embedding dimension d.
        batch_size: global batch B; the queue holds the last ``max(m, B)`` pairs.
        options: sizes and rates.
        seed: of the draw at restarts.
        device: where the state lives.
        dtype: float32 in training; float64 in tests.
    """

    def __init__(
        self,
        dim: int,
        batch_size: int,
        options: PrototypeOptions,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        options.check()
        self.options, self.eps = options, options.eps
        self.generator = torch.Generator().manual_seed(seed)
        self.w = torch.zeros(2, options.m, dim, device=device, dtype=dtype)
        self.adagrad = torch.optim.Adagrad(
            [self.w], lr=options.lr, eps=options.adagrad_eps, fused=self.w.device.type == "cpu"
        )
        self.queue = torch.zeros(2, max(options.m, batch_size), dim, device=device, dtype=dtype)
        self.queue_next = self.queue_held = self.active = self.step = 0
        self._buffer: Tensor | None = None

    @property
    def prototypes(self) -> Tensor:
        """The active prototypes ``[2, active, d]`` as unit rows: texts first, images second."""
        return torch.nn.functional.normalize(self.w[:, : self.active], dim=2)

    @torch.no_grad()
    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """Queue the batch, restart or fill when due, then ``updates`` AdaGrad steps on this batch.

        Raises:
            ValueError: when the batch does not fit the queue.
        """
        e, positive = _stack(batch.e1, batch.e2)
        self._push(e)
        every = self.options.restart_every
        if self.step == 0 or (every and self.step % every == 0):
            self._restart()
        elif self.active < self.options.m:
            self._fill(e)
        log_x = torch.stack(log_g).detach()
        log_x = torch.logaddexp(log_x, log_x.new_full((), _log(self.eps)))
        for _ in range(self.options.updates):
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
        return prototype_alpha(e1, e2, self.prototypes, tau, self.eps)

    def state_dict(self) -> dict[str, Any]:
        """Prototypes, AdaGrad's sums, queue, counters and generator."""
        return {
            "w": self.w.clone(),
            "adagrad_sum": self._sum.clone(),
            "queue": self.queue.clone(),
            "counters": [self.queue_next, self.queue_held, self.active, self.step],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave.

        Raises:
            ValueError: when a part is missing or of another size.
        """
        parts = {"w": self.w, "adagrad_sum": self._sum, "queue": self.queue}
        if set(state) != {*parts, "counters", "generator"}:
            raise ValueError(f"this is not the state of a prototype normalizer: it has {sorted(state)}")
        for name, part in parts.items():
            if state[name].shape != part.shape:
                raise ValueError(
                    f"the saved {name} is {tuple(state[name].shape)}, this normalizer's is {tuple(part.shape)}; "
                    "m, the batch size and the embedding dimension must be those of the saved run"
                )
            part.copy_(state[name])
        self.queue_next, self.queue_held, self.active, self.step = map(int, state["counters"])
        self.generator.set_state(state["generator"].cpu())

    @property
    def _sum(self) -> Tensor:
        return self.adagrad.state[self.w]["sum"]

    def _push(self, e: Tensor) -> None:
        """Append a batch to the FIFO queue, over the oldest."""
        size, capacity = e.shape[1], self.queue.shape[1]
        if size > capacity:
            raise ValueError(
                f"a batch of {size} pairs does not fit the queue of {capacity}; build with batch_size={size}"
            )
        place = (torch.arange(size, device=e.device) + self.queue_next) % capacity
        # Texts stand for the negatives of images, and the other way round: the sides are swapped here.
        self.queue[0, place], self.queue[1, place] = e[1].to(self.queue), e[0].to(self.queue)
        self.queue_next = (self.queue_next + size) % capacity
        self.queue_held = min(self.queue_held + size, capacity)

    def _restart(self) -> None:
        """Re-seed the prototypes with recent pairs, drawn without replacement, and forget AdaGrad's sums."""
        self.active = min(self.options.m, self.queue_held)
        draw = torch.randperm(self.queue_held, generator=self.generator)[: self.active].to(self.queue.device)
        self.w.zero_()
        self.w[:, : self.active] = self.queue[:, draw]
        self._sum.zero_()

    def _fill(self, e: Tensor) -> None:
        """Give free columns this batch's embeddings, each pair once: equal columns would move together for ever.

        Captions that are equal in the data still give equal text columns.
        """
        more = min(e.shape[1], self.options.m - self.active)
        fresh = slice(self.active, self.active + more)
        self.w[0, fresh], self.w[1, fresh] = e[1, :more].to(self.w), e[0, :more].to(self.w)
        self.active += more

    def _descend(self, e: Tensor, positive: Tensor, log_x: Tensor, tau: Tensor) -> None:
        shape = (2, e.shape[1], self.active)
        if self._buffer is None or self._buffer.shape != shape:
            self._buffer = e.new_empty(shape)
        gradient = prototype_gradient(e, positive, self.w[:, : self.active], log_x, tau, self.eps, self._buffer)
        if self.active < self.options.m:
            gradient = torch.nn.functional.pad(gradient, (0, 0, 0, self.options.m - self.active))
        self.w.grad = gradient
        self.adagrad.step()
