"""Crop a drawing to its content, so that a vendor's margin is no cue."""

from __future__ import annotations

import numpy as np
from PIL import Image

from neuclip_lib.data.render import on_white

VISIBLE = 8  # least alpha of 255 that counts as drawn; below it lies the rounding of soft edges


def fit(picture: Image.Image, size: int) -> np.ndarray:
    """Crop an RGBA picture to what is drawn, pad to a square, lay it on white: uint8 [3, size, size].

    Raises:
        ValueError: when nothing is drawn.
    """
    content = picture.crop(content_box(picture))
    side = max(content.size)
    square = Image.new("RGBA", (side, side))
    square.paste(content, ((side - content.width) // 2, (side - content.height) // 2))
    # Colours weighted by alpha ("RGBa"): the colour of a clear pixel must not bleed into an edge.
    small = square.convert("RGBa").resize((size, size), Image.Resampling.LANCZOS).convert("RGBA")
    return on_white(small)


def content_box(picture: Image.Image) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the visible part of an RGBA picture.

    Raises:
        ValueError: when nothing is visible.
    """
    box = picture.getchannel("A").point(lambda alpha: 255 if alpha >= VISIBLE else 0).getbbox()
    if box is None:
        raise ValueError("nothing in the picture is visible")
    return box
