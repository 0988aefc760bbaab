"""Embedding: order, batches, modes and random state, with a model small enough to work out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from neuclip_lib.data.pairs import PairSet
from neuclip_lib.evaluation.embed import embed_images, embed_pairs, embed_texts


class Fake(nn.Module):
    """Image: mean of each colour. Text: counts of the letters a, b, c. Dropout shows when the mode is wrong."""

    image_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.loose, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()
        self.sizes: list[int] = []
        self.gradient: list[bool] = []

    def tokenize(self, texts: list[str]) -> Tensor:
        return torch.tensor([[text.count(letter) for letter in "abc"] for text in texts])

    def encode_image(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.float32 and float(images.min()) >= -1 and float(images.max()) <= 1
        self.sizes.append(len(images))
        self.gradient.append(torch.is_grad_enabled())
        return nn.functional.normalize(self.frozen(self.loose(images.mean((2, 3)))) * self.weight, dim=1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return nn.functional.normalize(self.loose(tokens.double()) * self.weight, dim=1)


def pairs(n: int = 11, size: int = 4) -> PairSet:
    g = torch.Generator().manual_seed(0)
    return PairSet(
        name="fake",
        split="test",
        images=torch.randint(0, 256, (n, 3, size, size), generator=g, dtype=torch.uint8),
        captions=["abc" + "abc"[i % 3] * (1 + i) for i in range(n)],
        index=torch.arange(n),
        group=torch.arange(n),
        keys=[str(i) for i in range(n)],
        content_hash="0",
    )


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4, 3]), (5, [5, 5, 1]), (11, [11]), (100, [11])])
def test_every_pair_is_embedded_in_order(batch_size: int, sizes: list[int]) -> None:
    model, data = Fake(), pairs()
    e1, e2 = embed_pairs(model, data, batch_size)
    assert model.sizes == sizes  # a last batch of one is fine
    assert e1.dtype == e2.dtype == torch.float32 and not e1.requires_grad
    colours = data.images.double().mean((2, 3)) / 127.5 - 1
    counts = torch.tensor([[t.count(c) for c in "abc"] for t in data.captions]).double()
    torch.testing.assert_close(e1.double(), nn.functional.normalize(colours, dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(e2.double(), nn.functional.normalize(counts, dim=1), rtol=1e-5, atol=1e-6)
    assert torch.equal(embed_images(model, data.images, batch_size), e1)
    assert torch.equal(embed_texts(model, data.captions, batch_size), e2)


def test_modes_come_back_and_no_random_number_is_drawn() -> None:
    model = Fake().train()
    model.frozen.eval()
    random = torch.get_rng_state()
    embed_pairs(model, pairs())
    assert (model.training, model.loose.training, model.frozen.training) == (True, True, False)
    assert torch.equal(random, torch.get_rng_state())
    assert model.gradient == [False] and torch.is_grad_enabled()
    model.eval()
    embed_pairs(model, pairs())
    assert not model.training


def test_modes_come_back_after_an_error() -> None:
    model = Fake().train()
    with pytest.raises(ValueError, match="takes images of 4 x 4 pixels; these are 6 x 6"):
        embed_pairs(model, pairs(size=6))
    assert model.training and model.loose.training and torch.is_grad_enabled()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="set is empty"):
        embed_pairs(Fake(), pairs(0))
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        embed_pairs(Fake(), pairs(), 0)
    with pytest.raises(ValueError, match="the model is on cpu, not on meta"):
        embed_pairs(Fake(), pairs(), device="meta")
