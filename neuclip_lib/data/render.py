"""Drawings and picture files to small RGB squares on white."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def svg_to_rgb(svg: str, size: int, name: str) -> np.ndarray:
    """Draw an SVG text on white: uint8 [3, size, size].

    Raises:
        RuntimeError: naming the picture, when it cannot be drawn.
    """
    return on_white(svg_to_rgba(svg, size, name))


def svg_to_rgba(svg: str, size: int, name: str) -> Image.Image:
    """Draw an SVG text with a transparent ground, ``size`` by ``size`` pixels.

    Raises:
        RuntimeError: naming the picture, when it cannot be drawn.
    """
    import resvg_py

    try:
        # Searching the machine for fonts takes most of the time, and would make pictures differ between machines.
        drawn = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, skip_system_fonts=True)
    except ValueError as error:
        raise RuntimeError(f"picture {name!r} cannot be drawn: {error}") from error
    return open_rgba(bytes(drawn), name)


def open_rgba(source: bytes | Path, name: str) -> Image.Image:
    """Decode a picture of any mode, from bytes or a file, to RGBA.

    Raises:
        RuntimeError: naming the picture, when it does not decode.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGBA")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RuntimeError(f"picture {name!r} does not decode: {error}") from error


def on_white(image: Image.Image) -> np.ndarray:
    """Lay an RGBA picture on white: uint8 [3, H, W]."""
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    return np.ascontiguousarray(np.asarray(ground.convert("RGB")).transpose(2, 0, 1))
