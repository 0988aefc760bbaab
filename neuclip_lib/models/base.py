"""What every model is: two towers whose rows have unit length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class ImageTextModel(nn.Module, ABC):
    """An image tower and a text tower into one space.

    Args:
        name: under which ``build_model`` makes it.
        dim: d, length of an embedding.
        image_size: S, side of the square images in pixels.
    """

    def __init__(self, name: str, dim: int, image_size: int) -> None:
        super().__init__()
        self.name, self.dim, self.image_size = name, dim, image_size

    @abstractmethod
    def tokenize(self, texts: list[str]) -> Tensor:
        """Texts to LongTensor [n, L] on the CPU; L is the same for every call."""

    @abstractmethod
    def image_features(self, images: Tensor) -> Tensor:
        """Images [b, 3, S, S] to features [b, d] of any length."""

    @abstractmethod
    def text_features(self, tokens: Tensor) -> Tensor:
        """Tokens [b, L] to features [b, d] of any length."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What ``rebuild`` needs to make the same model again without its weights; JSON values only."""

    def encode_image(self, images: Tensor) -> Tensor:
        """Unit rows [b, d] float32 of images float [b, 3, S, S] in [-1, 1].

        Raises:
            ValueError: for another shape.
        """
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, self.image_size, self.image_size):
            raise ValueError(
                f"model {self.name!r} takes images [b, 3, {self.image_size}, {self.image_size}], got "
                f"{list(images.shape)}; load the data at that size"
            )
        return unit_rows(self.image_features(images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Unit rows [b, d] float32 of tokens [b, L] as ``tokenize`` gives them."""
        return unit_rows(self.text_features(tokens))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Both encodings at once: DistributedDataParallel hooks into ``forward`` only."""
        return self.encode_image(images), self.encode_text(tokens)


def unit_rows(features: Tensor) -> Tensor:
    """Rows [b, d] divided by their length, in float32 whatever autocast does; a row of zeros stays zeros.

    Shorter than 1e-6 a row is divided by 1e-6, so that its gradient stays finite.
    """
    features = features.float() if features.dtype.itemsize < 4 else features
    return F.normalize(features, dim=-1, eps=1e-6)
