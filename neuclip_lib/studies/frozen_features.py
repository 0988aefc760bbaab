"""Fixed features of a real set, made once: random convolutions of the picture, and which words the caption holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuclip_lib.contrast import Sides
from neuclip_lib.data.pairs import Pairs
from neuclip_lib.data.transforms import to_float
from neuclip_lib.models import build_model
from neuclip_lib.models.small import SmallModel
from neuclip_lib.models.words import UNKNOWN, WordTokenizer

SEED = 0
_AT_A_TIME = 500


@dataclass(frozen=True)
class Features:
    """Vectors of the pairs of every part of a set.

    Args:
        train: ``[n, width]`` of the pictures and ``[n, words]`` of the captions.
        held_out: the same by split, with the group ``[n]`` of each pair.
    """

    train: Sides
    held_out: Mapping[str, tuple[Tensor, Tensor, Tensor]]

    @property
    def widths(self) -> tuple[int, int]:
        """Lengths of a picture's and a caption's vector."""
        return self.train[0].shape[1], self.train[1].shape[1]


def features_of(train: Pairs, held_out: Mapping[str, Pairs], words: int, width: int) -> Features:
    """Features that depend on the training part alone (and on the picture or caption itself).

    A picture: the pooled maps of the untrained image tower of the model ``small`` (its weights are those of a fixed
    seed, whatever the study's), on the ``width`` leading principal axes of the training pictures, each scaled to
    variance 1. A caption: for each of the ``words`` most frequent training words how often it stands there, divided by
    the root of the caption's number of words.

    Args:
        train: the pairs trained on.
        held_out: by split.
    """
    captions = train.captions_at()
    model = build_model("small", captions, train.image_size, SEED)
    assert isinstance(model, SmallModel)
    model.image.head = nn.Identity()  # type: ignore[assignment]  # the maps themselves, not a random mixture of them
    raw = _maps(model, train)
    axes = _whitening(raw, width)
    known = WordTokenizer(model.tokenizer.words[:words], model.tokenizer.length)
    return Features(
        (_whitened(raw, axes), _bags(known, captions)),
        {
            split: (_whitened(_maps(model, pairs), axes), _bags(known, pairs.captions_at()), pairs.group)
            for split, pairs in held_out.items()
        },
    )


@torch.no_grad()
def _maps(model: SmallModel, pairs: Pairs) -> Tensor:
    """Pooled maps of the pictures ``[n, 640]``."""
    every = torch.arange(len(pairs)).split(_AT_A_TIME)
    return torch.cat([model.image(to_float(pairs.images_at(some))) for some in every])


def _whitening(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Mean ``[k]`` and scaled leading axes ``[k, width]`` of rows ``[n, k]``, in float64."""
    mean = x.double().mean(0)
    values, vectors = torch.linalg.eigh((x.double() - mean).T.cov())
    return mean, vectors[:, -width:] / values[-width:].clamp(min=float(values[-1]) * 1e-9).sqrt()


def _whitened(x: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
    return ((x.double() - axes[0]) @ axes[1]).float()


def _bags(tokenizer: WordTokenizer, captions: list[str]) -> Tensor:
    """Counts of the known words ``[n, words]`` over the root of the number of all words."""
    tokens = tokenizer(captions)
    counts = torch.zeros(len(captions), UNKNOWN + 1 + len(tokenizer.words))
    counts.scatter_add_(1, tokens, torch.ones(tokens.shape))
    length = counts[:, UNKNOWN:].sum(1, keepdim=True).clamp(min=1)  # column 0 counts empty places
    return counts[:, UNKNOWN + 1 :] / length.sqrt()
