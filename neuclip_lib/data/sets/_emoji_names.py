"""Emoji concepts: code points, English names, skin tones, keywords, and the base emoji that decides the split."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

PRESENTATION = "\ufe0f"  # "show as a picture": most file names leave it out
TONES = {
    "\U0001f3fb": "light",
    "\U0001f3fc": "medium-light",
    "\U0001f3fd": "medium",
    "\U0001f3fe": "medium-dark",
    "\U0001f3ff": "dark",
}
_TONE_WORDS = re.compile(r"[ _](?:medium-light|medium-dark|medium|light|dark)[ _]skin[ _]tone")
_FLAG_TAG = "\U000e007f"  # ends the flags of England, Scotland and Wales


@dataclass(frozen=True)
class Concept:
    """One emoji.

    Args:
        characters: the fully qualified sequence.
        name: English, in words, for instance ``"waving hand medium skin tone"``.
        base: code points of the emoji without skin tones; shared by all its tone copies.
        tone: ``"none"``, one of the five tones, or ``"mixed"`` for two people of different tones.
        keywords: search words for the base emoji, without those already in the name.
    """

    characters: str
    name: str
    base: str
    tone: str
    keywords: tuple[str, ...]

    @property
    def codepoints(self) -> str:
        return code_points(self.characters)


def code_points(characters: str) -> str:
    """Lower-case hexadecimal code points joined by "-", without FE0F: the concept's key."""
    return "-".join(f"{ord(c):x}" for c in characters if c != PRESENTATION)


def file_stems(characters: str, digits: int = 1) -> tuple[str, str]:
    """The two names a picture file may have, lower case: with FE0F as given, and without.

    Args:
        digits: least number of digits a code point (OpenMoji writes 00A9, Twemoji a9).
    """
    points = [f"{ord(c):0{digits}x}" for c in characters]
    return "-".join(points), "-".join(point for point in points if point != f"{ord(PRESENTATION):x}")


def tone_of(characters: str) -> str:
    """Skin tone named by the modifiers of a sequence: none, one of the five, or mixed."""
    found = {TONES[c] for c in characters if c in TONES}
    if not found:
        return "none"
    return found.pop() if len(found) == 1 else "mixed"


def without_tone(text: str) -> str:
    """A sequence without its skin-tone modifiers and FE0F."""
    return "".join(c for c in text if c not in TONES and c != PRESENTATION)


def concepts() -> list[Concept]:
    """All fully qualified emoji of the ``emoji`` package, ordered by their code points.

    Raises:
        RuntimeError: when a skin-tone copy has no base emoji (a package version this code does not know).
    """
    import emoji

    status = emoji.STATUS["fully_qualified"]
    names = {seq: entry["en"].strip(":") for seq, entry in emoji.EMOJI_DATA.items() if entry["status"] == status}
    keywords = _keywords()
    plain = {seq for seq in names if tone_of(seq) == "none"}
    by_sequence = {without_tone(seq): seq for seq in plain}
    by_name = {names[seq]: seq for seq in plain}
    found = []
    for sequence, name in names.items():
        base = _base_of(sequence, name, by_sequence, by_name)
        words = english(sequence, name)
        extra = tuple(word for word in keywords.get(code_points(base), ()) if word not in words.lower())
        found.append(Concept(sequence, words, code_points(base), tone_of(sequence), extra))
    return sorted(found, key=lambda concept: concept.codepoints)


def english(sequence: str, name: str) -> str:
    """The published name as words; a country's flag, published under the bare country, becomes "flag of X"."""
    words = name.replace("_", " ").replace("’", "'")
    is_flag = "\U0001f1e6" <= sequence[0] <= "\U0001f1ff" or sequence.endswith(_FLAG_TAG)
    return f"flag of {words}" if is_flag else words


def _base_of(sequence: str, name: str, by_sequence: dict[str, str], by_name: dict[str, str]) -> str:
    """The emoji without tones. Two people of different tones are spelt as two joined people: found by name."""
    if (stripped := without_tone(sequence)) in by_sequence:
        return by_sequence[stripped]
    plain_name = _TONE_WORDS.sub("", name).removesuffix("_person_person")
    if plain_name not in by_name:
        raise RuntimeError(f"no base emoji for {name!r} ({code_points(sequence)}); install emoji==2.16.0")
    return by_name[plain_name]


def _keywords() -> dict[str, tuple[str, ...]]:
    """Keywords by code points, from ``em-keyboard``: plain words only, without the name that stands first."""
    table = json.loads(resources.files("em").joinpath("emojis.json").read_text(encoding="utf-8"))
    is_word = re.compile(r"[a-z][a-z_-]+").fullmatch
    return {
        code_points(sequence): tuple(word.replace("_", " ") for word in words[1:] if is_word(word))
        for sequence, words in table.items()
    }
