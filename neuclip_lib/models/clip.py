"""open_clip's own models: three tiny ones, and any of its names, without weights or with weights from a local file."""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuclip_lib.models.base import ImageTextModel

TINY: dict[str, dict[str, Any]] = {
    "nano": {
        "embed_dim": 64,
        "vision_cfg": {"patch_size": 8, "width": 64, "layers": 2, "head_width": 32},
        "text_cfg": {"context_length": 16, "width": 64, "layers": 2, "heads": 2},
    },
    "micro": {
        "embed_dim": 64,
        "vision_cfg": {"patch_size": 4, "width": 128, "layers": 4, "head_width": 32},
        "text_cfg": {"context_length": 16, "width": 128, "layers": 3, "heads": 4},
    },
    "mini": {
        "embed_dim": 128,
        "vision_cfg": {"patch_size": 4, "width": 192, "layers": 6, "head_width": 32},
        "text_cfg": {"context_length": 32, "width": 192, "layers": 4, "heads": 6},
    },
}
"""Configurations as open_clip writes them; image size and vocabulary are added when a model is built."""

PREPROCESS = {"mean": [0.5] * 3, "std": [0.5] * 3}
"""open_clip's normalisation that equals our range -1..1."""


class OpenClipModel(ImageTextModel):
    """A model of open_clip's classes, with open_clip's own tokenizer.

    Args:
        name: a tiny name or one of ``open_clip.list_models()``.
        clip: the model.
        config: what open_clip makes it from.
        tokenizer: open_clip's.
        kept: for a compact vocabulary, the open_clip ids that have a vector of their own, see ``CompactIds``.
    """

    _mean: Tensor
    _std: Tensor

    def __init__(
        self, name: str, clip: nn.Module, config: dict[str, Any], tokenizer: Any, kept: list[int] | None = None
    ) -> None:
        size = clip.visual.image_size  # type: ignore[union-attr]
        side = size if isinstance(size, int) else size[0]  # type: ignore[index]
        super().__init__(name, int(config["embed_dim"]), int(side))
        self.clip, self.config, self.tokenizer = clip, config, tokenizer
        self.compact = None if kept is None else CompactIds(kept, tokenizer)
        preprocess = getattr(clip.visual, "preprocess_cfg", None) or PREPROCESS
        self.preprocess: dict[str, Any] = {key: value for key, value in preprocess.items() if key != "size"}
        self._renormalise = any(list(preprocess[key]) != PREPROCESS[key] for key in PREPROCESS)
        for key in PREPROCESS:
            values = torch.tensor(preprocess[key], dtype=torch.float32).reshape(3, 1, 1)
            self.register_buffer(f"_{key}", values, persistent=False)
        _freeze_what_we_do_not_use(clip)

    def tokenize(self, texts: list[str]) -> Tensor:
        """open_clip's ids [n, L], whatever the vocabulary; too long a text is cut and still ends with the end token."""
        return self.tokenizer(texts)

    def image_features(self, images: Tensor) -> Tensor:
        if self._renormalise:
            images = ((images + 1.0) / 2.0 - self._mean) / self._std
        return self.clip.encode_image(images)  # type: ignore[operator]

    def text_features(self, tokens: Tensor) -> Tensor:
        if self.compact is not None:
            tokens = self.compact(tokens)
        return self.clip.encode_text(tokens)  # type: ignore[operator]

    def description(self) -> dict[str, Any]:
        kept = None if self.compact is None else list(self.compact.kept)
        return {"name": self.name, "dim": self.dim, "image_size": self.image_size, "vocabulary": kept}


class CompactIds(nn.Module):
    """open_clip's 49408 ids to a few: those in ``kept`` get a vector each, all others share one.

    open_clip's table of 49408 vectors is 30 times the rest of ``nano``, and a run on a small set sees some hundred of
    them. The order is kept, so the end token stays the largest id, where open_clip reads the text's feature.

    Args:
        kept: open_clip ids, rising; 0 (also an empty place), start and end are among them.
        tokenizer: open_clip's ``SimpleTokenizer``.

    Raises:
        ValueError: when they do not rise, or one of those three is missing.
    """

    table: Tensor

    def __init__(self, kept: list[int], tokenizer: Any) -> None:
        super().__init__()
        needed = {0, tokenizer.sot_token_id, tokenizer.eot_token_id}
        if kept != sorted(set(kept)) or not needed <= set(kept) or kept[-1] >= tokenizer.vocab_size or kept[0] < 0:
            raise ValueError(
                f"a compact vocabulary is a rising list of open_clip ids from 0 to {tokenizer.vocab_size - 1} with "
                f"{sorted(needed)} among them; got {len(kept)} ids"
            )
        self.kept = list(kept)
        table = torch.ones(tokenizer.vocab_size, dtype=torch.long)  # 1: the vector the others share
        table[torch.tensor(kept)] = torch.tensor([0, *range(2, len(kept) + 1)])
        self.register_buffer("table", table, persistent=False)

    def __len__(self) -> int:
        """Number of vectors."""
        return len(self.kept) + 1

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def build_tiny(name: str, vocabulary_texts: Iterable[str], image_size: int) -> OpenClipModel:
    """``nano``, ``micro`` or ``mini`` with vectors for the tokens of ``vocabulary_texts``; for all 49408 without texts.

    Raises:
        ValueError: when the image size is no multiple of the patch size.
    """
    tokenizer = _simple_tokenizer(TINY[name]["text_cfg"]["context_length"])
    kept = {0, tokenizer.sot_token_id, tokenizer.eot_token_id}
    has_texts = False
    for text in vocabulary_texts:
        has_texts = True
        kept.update(tokenizer.encode(text))
    return tiny_from_ids(name, sorted(kept) if has_texts else None, image_size)


def tiny_from_ids(name: str, kept: list[int] | None, image_size: int) -> OpenClipModel:
    """A tiny model with a compact vocabulary (None: open_clip's whole one)."""
    import open_clip

    config = copy.deepcopy(TINY[name])
    patch = config["vision_cfg"]["patch_size"]
    if image_size < patch or image_size % patch:
        raise ValueError(
            f"model {name!r} cuts images into patches of {patch} pixels; image size {image_size} does not fit"
        )
    tokenizer = _simple_tokenizer(config["text_cfg"]["context_length"])
    config["vision_cfg"]["image_size"] = image_size
    config["text_cfg"]["vocab_size"] = tokenizer.vocab_size if kept is None else len(CompactIds(kept, tokenizer))
    return OpenClipModel(name, open_clip.CLIP(**copy.deepcopy(config)), config, tokenizer, kept)


def build_open_clip(name: str, image_size: int | None = None, pretrained: Path | str | None = None) -> OpenClipModel:
    """A model of open_clip by name.

    Args:
        image_size: what the data has; must be the model's own (None: not checked).
        pretrained: a local file of weights; weights are never downloaded.

    Raises:
        ValueError: when the image size is another one.
        RuntimeError: when the file is missing or does not fit, or the model needs a package or a download.
    """
    import open_clip

    config = open_clip.get_model_config(name)
    own = config["vision_cfg"].get("image_size", 224)
    own_sides = {own} if isinstance(own, int) else set(own)
    if image_size is not None and own_sides != {image_size}:
        raise ValueError(
            f"model {name!r} takes images of {own} pixels, the data has {image_size}; load it at that size"
        )
    if pretrained is not None and not Path(pretrained).is_file():
        raise RuntimeError(f"{pretrained} is missing; pretrained weights are read from a local file")
    try:
        with _quiet_logging():
            clip = open_clip.create_model(
                name, pretrained=None if pretrained is None else str(pretrained), pretrained_text=False
            )
            tokenizer = open_clip.get_tokenizer(name)
    except Exception as error:
        raise RuntimeError(_why_not(name, pretrained, error)) from error
    return OpenClipModel(name, clip, config, tokenizer)


def resolve_open_clip(name: str) -> str:
    """open_clip's spelling of ``name`` ("ViT-B/32" is "ViT-B-32").

    Raises:
        ValueError: for an unknown name, with the closest ones.
    """
    import open_clip

    known = open_clip.list_models()
    spelled = name.replace("/", "-")
    if spelled in known:
        return spelled
    lower = {other.lower(): other for other in ("small", *TINY, *known)}
    close = [lower[match] for match in difflib.get_close_matches(spelled.lower(), lower, n=5, cutoff=0.5)]
    raise ValueError(
        f"unknown model {name!r}; the closest names: {', '.join(close) or 'none'}; there are small, {', '.join(TINY)} "
        f"and the {len(known)} of open_clip.list_models()"
    )


@cache
def _simple_tokenizer(context_length: int) -> Any:
    import open_clip

    return open_clip.SimpleTokenizer(context_length=context_length)


def _freeze_what_we_do_not_use(clip: nn.Module) -> None:
    """The temperature is not the model's, and a parameter without a gradient stops DistributedDataParallel."""
    for part in ("logit_scale", "logit_bias"):
        if isinstance(value := getattr(clip, part, None), nn.Parameter):
            value.requires_grad_(False)
    if isinstance(decoder := getattr(clip, "text_decoder", None), nn.Module):  # of CoCa
        decoder.requires_grad_(False)


def _why_not(name: str, pretrained: Path | str | None, error: Exception) -> str:
    if pretrained is not None:
        return f"{pretrained} could not be loaded into model {name!r}: {error}"
    return (
        f"model {name!r} could not be built offline: {type(error).__name__}: {error}; it may need a package "
        "(transformers for names with a Hugging Face text tower) or files from the network; ViT names need neither"
    )


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """open_clip warns through the root logger that there are no weights, which also installs a handler there."""
    root = logging.getLogger()
    handlers, disabled = list(root.handlers), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
