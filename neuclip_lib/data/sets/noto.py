"""Emoji by a third vendor that no training set holds: for tests on an unseen style."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.data.sets import _noto_source
from neuclip_lib.data.sets._crop import fit
from neuclip_lib.data.sets._emoji_names import concepts
from neuclip_lib.data.sets.emoji import SIZE, raw_set, tone_and_name
from neuclip_lib.data.spec import RawSet, SetSpec, ZeroShotTask
from neuclip_lib.progress import track


def produce() -> RawSet:
    """Draw every emoji that Noto shows as one picture, cropped to its content."""
    source = _noto_source.open_source(_noto_source.find())
    kept, images = [], []
    for concept in track(concepts(), "noto: draw"):
        picture = source.draw(concept)
        if picture is not None:
            kept.append(concept)
            images.append(fit(picture, SIZE))
    return raw_set(kept, ("noto",), np.stack(images))


def zero_shot(pairs: Pairs) -> list[ZeroShotTask]:
    """Name the emoji without tone among those of the split, and the skin tone.

    The concepts of "train" are those that the set ``emoji`` trains on, drawn by the unseen vendor; those of "test"
    are new as well.
    """
    return tone_and_name(pairs, "noto skin tone", "noto name")


def system() -> Mapping[str, str]:
    """What Noto would be drawn from now, and its hash."""
    return _noto_source.version(_noto_source.find())


SPEC = SetSpec(
    name="noto",
    title="emoji by an unseen vendor (Noto), optional",
    origin=(
        "the Noto Color Emoji font (Debian package fonts-noto-color-emoji) or the npm package @iconify-json/noto in "
        "the folder that NEUCLIP_NOTO names; names from emoji, keywords from em-keyboard"
    ),
    licence="font SIL OFL 1.1, drawings Apache-2.0; names BSD-3-Clause; keywords ISC and MIT",
    attribution=(
        "Noto Emoji: copyright Google Inc., SIL OFL 1.1 (font) or Apache-2.0 (drawings). "
        "Cropped and reduced to 32 pixels."
    ),
    task="naming emoji drawn by a vendor that training never saw",
    image_size=SIZE,
    packages=("emoji", "em-keyboard", "resvg-py"),
    produce=produce,
    zero_shot=zero_shot,
    system=system,
    helpers=(
        "neuclip_lib.data.sets.emoji",
        "neuclip_lib.data.sets._crop",
        "neuclip_lib.data.sets._emoji_names",
        "neuclip_lib.data.sets._noto_source",
        "neuclip_lib.data.render",
    ),
    counts={"train": 2679, "validation": 544, "test": 566},
    optional=True,
    note=(
        "The split is that of the set emoji: the part train holds concepts seen in training from other vendors, the "
        "part test holds concepts never seen. Never train on it when it is to measure an unseen vendor. Counts are "
        "those of Debian's font 2.042; the npm package lacks the flags of countries."
    ),
)
