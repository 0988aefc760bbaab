"""Embeddings of pairs, images or texts as evaluation sees them: eval mode, no gradient, no augmentation, float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from neuclip_lib.data.transforms import to_float
from neuclip_lib.progress import track

if TYPE_CHECKING:
    from neuclip_lib.data import Pairs
    from neuclip_lib.models import ImageTextModel

T = TypeVar("T")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient inside the block; every module gets its own mode back after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def embed_pairs(
    model: ImageTextModel,
    pairs: Pairs,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    label: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Image and text embeddings of all pairs, in their order; draws no random number.

    Args:
        model: gives unit rows; its modes are as before afterwards.
        pairs: n pairs; images are read a batch at a time.
        batch_size: pairs at a time.
        device: where the model is; read from its parameters when not given. The result stays there.
        label: shows progress under this name.

    Returns:
        ``(e1 [n, d], e2 [n, d])`` float32.

    Raises:
        ValueError: for no pairs, images of another size than the model's, or a device where the model is not.
    """

    def both(index: Tensor) -> tuple[Tensor, Tensor]:
        images, texts = pairs.images_at(index), pairs.captions_at(index)
        return _encode_images(model, images, home), _encode_texts(model, texts, home)

    home = _device_of(model, device)
    rows = _in_batches(model, len(pairs), batch_size, both, label)
    return torch.cat([image for image, _ in rows]), torch.cat([text for _, text in rows])


def embed_images(
    model: ImageTextModel, images: Tensor, batch_size: int = 256, device: torch.device | str | None = None
) -> Tensor:
    """Embeddings [n, d] float32 of images uint8 [n, 3, H, W]; otherwise as ``embed_pairs``."""
    home = _device_of(model, device)
    return torch.cat(
        _in_batches(model, len(images), batch_size, lambda i: _encode_images(model, images[i], home), None)
    )


def embed_texts(
    model: ImageTextModel, texts: Sequence[str], batch_size: int = 256, device: torch.device | str | None = None
) -> Tensor:
    """Embeddings [n, d] float32 of n texts; otherwise as ``embed_pairs``."""
    home = _device_of(model, device)

    def encode(index: Tensor) -> Tensor:
        return _encode_texts(model, [texts[i] for i in index.tolist()], home)

    return torch.cat(_in_batches(model, len(texts), batch_size, encode, None))


def _in_batches(model: nn.Module, n: int, batch_size: int, encode: Callable[[Tensor], T], label: str | None) -> list[T]:
    if n == 0:
        raise ValueError("there is nothing to embed: the set is empty")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    parts = torch.arange(n).split(batch_size)
    with eval_mode(model):
        return [encode(part) for part in (track(parts, label) if label else parts)]


def _encode_images(model: ImageTextModel, images: Tensor, device: torch.device) -> Tensor:
    if images.shape[-2:] != (model.image_size, model.image_size):
        raise ValueError(
            f"the model takes images of {model.image_size} x {model.image_size} pixels; these are "
            f"{images.shape[-2]} x {images.shape[-1]}: build the data at that size or choose another model"
        )
    return model.encode_image(to_float(images.to(device))).float()


def _encode_texts(model: ImageTextModel, texts: list[str], device: torch.device) -> Tensor:
    return model.encode_text(model.tokenize(texts).to(device)).float()


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    home = next(model.parameters()).device
    if device is not None and torch.device(device).type != home.type:
        raise ValueError(f"the model is on {home}, not on {device}: move it there first with model.to({str(device)!r})")
    return home
