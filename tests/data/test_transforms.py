import numpy as np
import pytest
import torch

from neuclip_lib.data.transforms import shift, to_float


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n, height, width, seed=0):
    return torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=generator(seed))


def shift_by_loop(images, pixels, moves):
    """Pad by repeating the edge, then cut each picture out at its own place."""
    _, _, height, width = images.shape
    wide = np.pad(images.numpy(), ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)), mode="edge")
    out = []
    for picture, (dy, dx) in zip(wide, moves.tolist(), strict=True):
        top, left = pixels + dy, pixels + dx
        out.append(picture[:, top : top + height, left : left + width])
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize(
    ("n", "height", "width", "pixels"), [(32, 8, 8, 2), (1, 5, 9, 3), (7, 32, 32, 4), (4, 3, 2, 1)]
)
def test_shift_equals_padding_and_cutting_one_by_one(n, height, width, pixels):
    images = pictures(n, height, width)
    moves = torch.randint(-pixels, pixels + 1, (n, 2), generator=generator(3))
    assert torch.equal(shift(images, pixels, generator(3)), shift_by_loop(images, pixels, moves))


def test_every_move_is_equally_likely():
    pixels, n = 2, 20_000
    places = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(n, 3, 8, 8)
    middle = shift(places, pixels, generator())[:, 0, 4, 4].long()  # holds 8 (4 + dy) + 4 + dx
    dy, dx = middle // 8 - 4, middle % 8 - 4
    counts = torch.bincount((dy + pixels) * 5 + dx + pixels, minlength=25)
    assert len(counts) == 25
    assert (counts - n / 25).abs().max() < 5 * (n / 25) ** 0.5  # 5 standard deviations


def test_shift_leaves_its_input_and_global_random_state_alone():
    images = pictures(4, 8, 8)
    kept, state = images.clone(), torch.get_rng_state()
    moved = shift(images, 2, generator())
    assert torch.equal(images, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(moved, images)
    assert torch.equal(shift(images, 0, generator()), images)


def test_shift_works_on_pictures_that_are_not_contiguous():
    images = pictures(6, 8, 8).permute(0, 1, 3, 2)[::2]
    assert torch.equal(shift(images, 2, generator(1)), shift(images.contiguous(), 2, generator(1)))


@pytest.mark.parametrize("pixels", [-1, 8, 9])
def test_a_move_as_large_as_the_picture_is_refused(pixels):
    with pytest.raises(ValueError, match=rf"0\.\.7.*{pixels}"):
        shift(pictures(2, 8, 10), pixels, generator())


def test_to_float_maps_bytes_to_minus_one_to_one():
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    values = to_float(every_byte)
    assert values.dtype == torch.float32
    expected = torch.linspace(-1, 1, 256, dtype=torch.float64).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert (values.double() - expected).abs().max() < 1e-7
    assert values.min() == -1
    assert values.max() == 1


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.uint8)])
def test_other_types_and_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="uint8"):
        to_float(wrong)
    with pytest.raises(ValueError, match="uint8"):
        shift(wrong, 1, generator())
