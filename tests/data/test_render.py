import io

import numpy as np
import pytest
from PIL import Image

from neuclip_lib.data.render import on_white, open_rgba, svg_to_rgb


def encode(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def test_a_square_is_drawn_where_it_stands():
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M3 3V21H21V3Z"/></svg>'
    expected = np.full((3, 32, 32), 255, np.uint8)
    expected[:, 4:28, 4:28] = 0  # 3 of 24 is 4 of 32
    assert np.array_equal(svg_to_rgb(svg, 32, "square"), expected)


def test_half_transparent_ink_is_mixed_with_white():
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0] = [[200, 100, 0, 255], [200, 100, 0, 128], [200, 100, 0, 0]]
    got = on_white(Image.fromarray(pixels, "RGBA"))[:, 0].T
    alpha = pixels[0, :, 3:] / 255
    expected = alpha * pixels[0, :, :3] + (1 - alpha) * 255
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_pictures_of_every_mode_become_rgba(mode):
    image = Image.new("RGB", (5, 3), (255, 255, 255)).convert(mode)
    rgba = open_rgba(encode(image, "JPEG" if mode == "CMYK" else "PNG"), "white")
    assert rgba.mode == "RGBA"
    assert np.array_equal(on_white(rgba), np.full((3, 3, 5), 255, np.uint8))


def test_a_picture_that_does_not_decode_is_named():
    whole = encode(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)))
    for bad in (whole[: len(whole) // 2], b"<html>not a picture</html>", b""):
        with pytest.raises(RuntimeError, match=r"'grinning\.png' does not decode"):
            open_rgba(bad, "grinning.png")
    with pytest.raises(RuntimeError, match="'broken' cannot be drawn"):
        svg_to_rgb("<svg", 32, "broken")


def test_a_picture_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"'gone\.png' does not decode"):
        open_rgba(tmp_path / "gone.png", "gone.png")
