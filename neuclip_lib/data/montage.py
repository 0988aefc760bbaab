"""A picture of pictures with their captions."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import torch

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.files import atomic_path

ACROSS = 6
LINE = 20  # characters a caption line


def draw_montage(pairs: Pairs, n: int, seed: int, path: Path, attribution: str = "") -> list[str]:
    """Draw n pairs, chosen by the seed, in rows of six; return their captions.

    Args:
        path: of the picture; its ending says the format (png, pdf, svg).
        attribution: a line to print under the pictures.

    Raises:
        ValueError: when n is not in 1..len(pairs), or matplotlib does not know the ending.
    """
    from matplotlib.figure import Figure

    if not 1 <= n <= len(pairs):
        raise ValueError(f"n must lie in 1..{len(pairs)} for split {pairs.split!r} of {pairs.name!r}, got {n}")
    if not path.suffix:
        raise ValueError(f"{str(path)!r} needs an ending that says the format, for instance {path.name or 'pairs'}.png")
    chosen = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:n].sort().values
    images, captions = pairs.images_at(chosen), pairs.captions_at(chosen)
    across, down = min(ACROSS, n), math.ceil(n / ACROSS)
    figure = Figure(figsize=(1.6 * across, 1.9 * down + 0.35 * bool(attribution)), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, image, caption in zip(axes, images, captions, strict=False):
        axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axis.set_title("\n".join(textwrap.wrap(caption, LINE)), fontsize=8)
    if attribution:
        figure.supxlabel("\n".join(textwrap.wrap(attribution, 22 * across)), fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:])
    return captions
