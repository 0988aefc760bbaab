"""``small``: a convolutional image tower and a bag-of-words text tower, made for comparing losses on one CPU core.

No layer keeps or uses statistics of the batch, so an embedding depends on its own image or text alone, and neither the
batch size nor the number of processes changes anything but the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuclip_lib.models.base import ImageTextModel
from neuclip_lib.models.words import PAD, UNKNOWN, WordTokenizer

DIM = 128
IMAGE_WIDTHS = (32, 64, 128, 160)
TEXT_WIDTH, TEXT_HIDDEN = 128, 256
GROUPS = 8
SIZE_STEP = 2
"""Sides must be a multiple: the first layer folds 2 x 2 pixels into channels."""
POOLED = 2
"""The last map is averaged to 2 x 2 places, kept apart: where something is tells icons from each other."""


class StandardizedConv(nn.Conv2d):
    """A 3 x 3 convolution whose filters have mean 0 and length 1.

    GroupNorm alone trains more slowly than batch statistics; with standardized filters it does not (Qiao et al. 2019,
    Micro-Batch Training with Batch-Channel Normalization and Weight Standardization). On icons at the laptop preset,
    validation R@1 with two seeds a cell: plain GroupNorm stayed clearly behind BatchNorm, this was no worse than it.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, centred * (centred.square().sum((1, 2, 3), keepdim=True) + 1e-8).rsqrt(), None)


class ConvBlock(nn.Module):
    """Convolution, GroupNorm, ReLU; ``residual`` adds the input before the ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, residual: bool = False) -> None:
        super().__init__()
        self.conv = StandardizedConv(inputs, outputs, stride)
        self.norm = nn.GroupNorm(GROUPS, outputs)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(x + y if self.residual else y)


class ImageTower(nn.Module):
    """Images [b, 3, S, S] in [-1, 1] to features [b, d]: widths 32, 64, 128, 160 at S/2, S/4, S/8, S/16 pixels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        first, *wider = IMAGE_WIDTHS
        blocks = [ConvBlock(3 * SIZE_STEP**2, first)]
        for inputs, outputs in zip(IMAGE_WIDTHS, wider, strict=False):
            blocks += [ConvBlock(inputs, outputs, stride=2), ConvBlock(outputs, outputs, residual=True)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(IMAGE_WIDTHS[-1] * POOLED**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        x = F.pixel_unshuffle(images, SIZE_STEP)  # [b, 12, S/2, S/2]: full-size maps would cost most of the time
        x = x.contiguous(memory_format=torch.channels_last)  # a sixth of a step's time less on a CPU
        pooled = F.adaptive_avg_pool2d(self.blocks(x), POOLED)  # [b, 160, 2, 2]
        return self.head(pooled.flatten(1))


class TextTower(nn.Module):
    """Tokens [b, L] to features [b, d]: the mean of the words' vectors, then two layers."""

    def __init__(self, entries: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, TEXT_WIDTH, padding_idx=PAD)
        # Words start close together: a short run moves a rare word by about as much, so what it learns shows.
        nn.init.normal_(self.embedding.weight, std=0.1)
        with torch.no_grad():
            # No training text holds an unknown word: a random vector would only be noise in the mean.
            self.embedding.weight[[PAD, UNKNOWN]] = 0.0
        self.hidden = nn.Linear(TEXT_WIDTH, TEXT_HIDDEN)
        self.head = nn.Linear(TEXT_HIDDEN, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        words = (tokens != PAD).sum(1, keepdim=True).clamp(min=1)  # [b, 1]; a text without words divides by 1
        mean = self.embedding(tokens).sum(1) / words  # [b, width]; the vector of PAD is zero
        return self.head(F.relu(self.hidden(mean)))


class SmallModel(ImageTextModel):
    """The model ``small``; its vocabulary is part of it.

    Args:
        tokenizer: vocabulary and length.
        image_size: S, a multiple of 2, at least 32.

    Raises:
        ValueError: for another size.
    """

    def __init__(self, tokenizer: WordTokenizer, image_size: int) -> None:
        if image_size < 32 or image_size % SIZE_STEP:
            raise ValueError(f"model 'small' takes even image sizes from 32 pixels, got {image_size}")
        super().__init__("small", DIM, image_size)
        self.tokenizer = tokenizer
        self.image = ImageTower(DIM)
        self.text = TextTower(len(tokenizer), DIM)

    def tokenize(self, texts: list[str]) -> Tensor:
        return self.tokenizer(texts)

    def image_features(self, images: Tensor) -> Tensor:
        return self.image(images)

    def text_features(self, tokens: Tensor) -> Tensor:
        return self.text(tokens)

    def description(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dim": self.dim,
            "image_size": self.image_size,
            "context_length": self.tokenizer.length,
            "vocabulary": list(self.tokenizer.words),
        }
