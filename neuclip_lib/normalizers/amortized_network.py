"""AmorLIP's residual network from an embedding to ``log lambda``, and the losses that fit it.

    x = LN(relu(W1 e + b1)),    y = LN(relu(W2 x + b2)),    log lambda = w3 . relu(y + e) + b3

AmorLIP (arXiv 2505.18983); LN is a layer norm with scale and shift. One network for image anchors and one for text
anchors, with all their weights in one flat tensor ``[2, P]``: one optimizer step, one average and one exchange between
ranks move everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu, softplus

FitLoss = Literal["log", "kl", "js"]

LOG_PART = 0.1
"""Share of the mean square of logs that is added to the divergences."""


@dataclass(frozen=True)
class ResidualNetwork:
    """The two networks as a function of their weights.

    Args:
        dim: embedding dimension d.
        hidden: width h of the hidden layer.
    """

    dim: int
    hidden: int

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        d, h = self.dim, self.hidden
        return [(h, d), (h,), (h,), (h,), (d, h), (d,), (d,), (d,), (d,), (1,)]

    @property
    def size(self) -> int:
        """Weights P of one network: ``2 d h + 3 h + 4 d + 1``."""
        return sum(math.prod(shape) for shape in self._shapes)

    def initial(self, generator: torch.Generator, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """First weights ``[2, P]``: uniform in ``+-1/sqrt(inputs)``, layer norms the identity.

        Drawn in float64 on the CPU, so that they are the same on every device and, rounded, in every format.
        """
        weights = torch.rand(2, self.size, generator=generator, dtype=torch.float64) * 2 - 1
        w1, b1, scale1, shift1, w2, b2, scale2, shift2, w3, b3 = self._layers(weights)
        for inputs, parts in ((self.dim, (w1, b1)), (self.hidden, (w2, b2)), (self.dim, (w3, b3))):
            for part in parts:
                part.div_(math.sqrt(inputs))
        for part in (scale1, scale2):
            part.fill_(1)
        for part in (shift1, shift2):
            part.zero_()
        return weights.to(device, dtype)

    def output_bias(self, weights: Tensor) -> Tensor:
        """The last layer's constants ``[2]``, a view of ``weights``."""
        return weights[:, -1]

    def __call__(self, weights: Tensor, e: Tensor) -> Tensor:
        """``log lambda`` of both sides' anchors.

        Args:
            weights: ``[2, P]``.
            e: embeddings ``[2, b, d]``, images first.

        Returns:
            ``[2, b]``.
        """
        # An outer autocast would round to bfloat16: steps of 1/16 near log Z = 10.
        with torch.autocast(e.device.type, enabled=False):
            w1, b1, scale1, shift1, w2, b2, scale2, shift2, w3, b3 = self._layers(weights)
            x = relu(torch.baddbmm(b1[:, None], e, w1.transpose(1, 2)))  # [2, b, h]
            x = torch.addcmul(shift1[:, None], layer_norm(x, (self.hidden,)), scale1[:, None])
            x = relu(torch.baddbmm(b2[:, None], x, w2.transpose(1, 2)))  # [2, b, d]
            x = torch.addcmul(shift2[:, None], layer_norm(x, (self.dim,)), scale2[:, None])
            return torch.baddbmm(b3[:, None], relu(x + e), w3[:, :, None])[:, :, 0]

    def _layers(self, weights: Tensor) -> list[Tensor]:
        parts = weights.split([math.prod(shape) for shape in self._shapes], 1)
        return [part.view(2, *shape) for part, shape in zip(parts, self._shapes, strict=True)]


def fit_loss(gap: Tensor, kind: FitLoss) -> Tensor:
    """What the networks minimise, as a function of ``gap = log target - log lambda`` ``[2, b]``; zero at no gap.

    ``log`` is the mean square. The two divergences are those between ``p_j = exp(s_ij/tau)/target`` and
    ``q_j = exp(s_ij/tau)/lambda`` with their masses, p's being 1 (the target is Z), which reduces them to functions
    of ``u = gap``; for a combined target the same functions are used. A tenth of the mean square is added:

        kl   sum_j p log(p/q) - p + q             = exp(u) - u - 1
        js   1/2 [kl(p, (p+q)/2) + kl(q, (p+q)/2)] = 1/2 [exp(u) (log 2 - log(1+exp(-u))) + log 2 - log(1+exp(u))]

    The form with masses and without a factor 1/B is ours. The released code divides js by B and kl by B squared, which
    leaves the tenth of the mean square to do the work, and its kl is ``exp(u) u``, smallest at ``u = -1`` and not at 0.

    Returns:
        The sum over sides of the mean over anchors.
    """
    square = gap.square().mean(1).sum()
    if kind == "log":
        return square
    # Beyond a third of the format's range Adam's squares would overflow: from there on the divergence goes on straight.
    top = math.log(torch.finfo(gap.dtype).max) / 3
    u = gap.clamp(max=top)
    if kind == "kl":
        inside, slope = torch.expm1(u) - u, math.expm1(top)
    else:
        inside = (u.exp() * (math.log(2) - softplus(-u)) + math.log(2) - softplus(u)) / 2
        slope = math.exp(top) * (math.log(2) - math.log1p(math.exp(-top))) / 2
    return (inside + slope * relu(gap - top)).mean(1).sum() + LOG_PART * square
