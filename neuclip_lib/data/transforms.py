"""What happens to a batch of pictures before the image tower."""

from __future__ import annotations

import torch
from torch import Tensor


def to_float(images: Tensor) -> Tensor:
    """Bytes to numbers: uint8 [b, 3, H, W] to float32 [b, 3, H, W], 0 to -1 and 255 to 1.

    Raises:
        ValueError: for another type.
    """
    _check(images)
    return images.to(torch.float32).div_(127.5).sub_(1.0)


def shift(images: Tensor, pixels: int, generator: torch.Generator, part: tuple[int, slice] | None = None) -> Tensor:
    """Move each picture by up to ``pixels`` in both directions; what comes in repeats the edge.

    Output row y is input row y + dy (held within the picture), columns alike; dy and dx are drawn per picture from
    -pixels..pixels. They are drawn on the generator's device, so a CPU generator gives the same pictures everywhere.

    Args:
        images: uint8 [b, 3, H, W].
        pixels: largest move, 0 for none.
        generator: of the draw.
        part: when these are only some rows of a larger batch, its size and the rows: every process draws for the whole
            batch, so a picture's move does not depend on how the batch is shared.

    Raises:
        ValueError: for another type, or a move as large as the picture.
    """
    _check(images)
    batch, channels, height, width = images.shape
    if not 0 <= pixels < min(height, width):
        raise ValueError(
            f"pixels must lie in 0..{min(height, width) - 1} for {height} x {width} pictures, got {pixels}"
        )
    if pixels == 0:
        return images
    of, rows = part or (batch, slice(None))
    moves = torch.randint(-pixels, pixels + 1, (of, 2), generator=generator, device=generator.device)
    moves = moves[rows].to(images.device)
    lines = (torch.arange(height, device=images.device) + moves[:, :1]).clamp_(0, height - 1)  # [b, H]
    columns = (torch.arange(width, device=images.device) + moves[:, 1:]).clamp_(0, width - 1)  # [b, W]
    # One gather over flat places is eight times as fast as indexing with rows and columns.
    places = (lines[:, :, None] * width + columns[:, None, :]).reshape(batch, 1, height * width)
    flat = images.reshape(batch, channels, height * width)
    return flat.gather(2, places.expand(batch, channels, height * width)).view(batch, channels, height, width)


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 [b, 3, H, W], got {images.dtype} {list(images.shape)}")
