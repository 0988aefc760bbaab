"""The oracle: alpha over all n training pairs, embedded anew every few steps as the anchors themselves are.

What no method can afford: it tells how much of a method's distance from the best is its normalizer's error. The bank is
made in training mode and with augmentation, because an anchor's positive is: a bank without them would be of another
distribution, and its alpha wrong for the anchors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip_lib import data as data_sets
from neuclip_lib.contrast import GlobalBatch, Sides
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.data.transforms import shift, to_float
from neuclip_lib.evaluation.embed import embed_pairs
from neuclip_lib.evaluation.retrieval import retrieval
from neuclip_lib.models import ImageTextModel, build_model
from neuclip_lib.normalizers import Normalizer
from neuclip_lib.normalizers.prototype_math import log_or_minus_infinity
from neuclip_lib.progress import track
from neuclip_lib.training import TrainConfig
from neuclip_lib.training.build import Samples, build_trainee
from neuclip_lib.training.feed import Feed
from neuclip_lib.training.measure import probe_loss, probe_set
from neuclip_lib.training.optim import set_learning_rates
from neuclip_lib.training.step import Diverged, Guard, NonFinite, train_step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Oracle:
    """How an oracle is used.

    Args:
        every: steps between two embeddings of all pairs.
        attached: let the gradient flow through alpha, as in NeuCLIP; otherwise hold it.
    """

    every: int = 20
    attached: bool = False


class OracleNormalizer(Normalizer):
    """``alpha_i = log(eps + g_i)`` with ``g_i`` over the other n - 1 pairs of a bank.

    Args:
        embed: gives the bank, both sides ``[n, d]``, in the order of ``index``.
        index: ``[n]`` stable index of the bank's pairs.
        eps: constant inside the logarithm.
        oracle: how often, and whether attached.
    """

    needs_index = True

    def __init__(self, embed: Callable[[], Sides], index: Tensor, eps: float, oracle: Oracle) -> None:
        self.embed, self.eps, self.oracle, self.step = embed, eps, oracle, 0
        self.place = torch.full((int(index.max()) + 1,), -1)
        self.place[index] = torch.arange(len(index))

    @torch.no_grad()
    def update(self, batch: GlobalBatch, log_g: Sides, tau: Tensor) -> None:
        """Embed everything anew when it is due."""
        if self.step % self.oracle.every == 0:
            self.bank = self.embed()
        self.step += 1

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Sides, batch: GlobalBatch, tau: Tensor) -> Sides:
        """Alpha of the anchors, each ``[b]``."""
        assert batch.index is not None
        own = self.place[batch.index][:, None]  # [b, 1]
        with torch.set_grad_enabled(self.oracle.attached):
            positive = (e1 * e2).sum(1, keepdim=True)
            return self._side(e1, self.bank[1], positive, own, tau), self._side(e2, self.bank[0], positive, own, tau)

    def _side(self, e: Tensor, bank: Tensor, positive: Tensor, own: Tensor, tau: Tensor) -> Tensor:
        x = ((e @ bank.T - positive) / tau).scatter(1, own, -math.inf)  # [b, n], without the anchor's own pair
        return torch.logaddexp(
            x.logsumexp(1) - math.log(len(bank) - 1), x.new_full((), log_or_minus_infinity(self.eps))
        )


@torch.no_grad()
def embed_as_trained(model: ImageTextModel, pairs: Pairs, pixels: int, generator: torch.Generator) -> Sides:
    """All n pairs in the order of the data, ``[n, d]`` a side, in training mode and augmented like the anchors.

    Args:
        pixels: by how much an image may move.
        generator: of the shifts; it goes on from call to call.

    Raises:
        ValueError: for a model that learns statistics while it embeds: the passes would change the run.
    """
    if any("running" in name for name, _ in model.named_buffers()):
        raise ValueError("an oracle needs a model without running statistics, such as 'small'")
    model.train()
    parts: list[Sides] = []
    for places in torch.arange(len(pairs)).split(256):
        images = pairs.images_at(places)
        if pixels:
            images = shift(images, pixels, generator)
        parts.append(model(to_float(images), model.tokenize(pairs.captions_at(places))))
    return torch.cat([e1 for e1, _ in parts]), torch.cat([e2 for _, e2 in parts])


def oracle_figures(config: TrainConfig, oracle: Oracle) -> dict[str, Any]:
    """Train as ``config`` says, with the oracle in the place of its normalizer; its figures on the run's own split.

    Objective, eps and stabilisers stay those of the config's method.

    Raises:
        Diverged: when a loss is not finite.
    """
    torch.set_num_threads(config.threads or torch.get_num_threads())
    pairs = data_sets.load(config.data, config.train_split, **config.data_options)
    model = build_model(config.model, pairs.vocabulary_texts(), pairs.image_size, config.seed)
    trainee = build_trainee(config, model, CPU, Samples.of(pairs, config.batch_size))
    generator = torch.Generator().manual_seed(config.seed)

    def embed() -> Sides:
        return embed_as_trained(model, pairs, config.augment_shift, generator)

    assert trainee.parts.normalizer is not None
    trainee.parts.normalizer = OracleNormalizer(embed, pairs.index, trainee.parts.normalizer.eps, oracle)
    feed = Feed(pairs, model, config.batch_size, config.seed, config.augment_shift, CPU)
    guard, probe, curve, begun = Guard(CPU, trainee.optimizer), probe_set(pairs), [], time.perf_counter()
    for step in track(range(config.steps), "oracle"):
        if step % config.probe_every == 0:
            curve.append([step, round(probe_loss(model, probe, trainee.temperature.typical()), 4)])
        model.train()
        set_learning_rates(trainee.optimizer, step, config.steps, config.optim.warmup)
        try:
            train_step(trainee, feed.batch(step), guard, step, config.precision, config.optim.clip_norm)
        except NonFinite as error:
            raise Diverged(str(error)) from error
    test = data_sets.load(config.data, config.eval_split, **config.data_options)
    found = retrieval(*embed_pairs(model, test), test.group, test.group)
    return {"retrieval": found, "probe": curve, "seconds": round(time.perf_counter() - begun, 1)}
